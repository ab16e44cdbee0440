"""fp32 tensors as fp16 terms: the device code on the host."""

import cutlass
import numpy as np
import pytest
from cutlass import Constexpr, Float16, Float32, Int32, Int64, cute

from cute_attn.device.seqlen import RowPlaces
from cute_attn.device.terms import power_of_two, split_tile
from cute_attn.kernels.fp32_sm80.kernel import ForwardTerms
from cute_attn.kernels.split_fp32 import SplitFp32
from cute_attn.tiles import ForwardTermsTile, padded
from cute_attn.tiles.helpers import SplitFp32Tile
from cute_attn.traits import Traits
from layouts.host import offset_table, run_on_host

# Fragments take static indices, so loops over them are unrolled on purpose.


def terms_of(x):
    """The definition, in numpy: (hi, lo, exponent) of an fp32 array."""
    exponent = 14 - int(np.floor(np.log2(np.abs(x).max())))
    scaled = x * np.float32(2.0**exponent)
    hi = scaled.astype(np.float16)
    return hi, (scaled - hi.astype(np.float32)).astype(np.float16), exponent


EXPONENT = 11
"""Exponent for the numbers of :func:`write_numbers`, which are below 2^4."""


@cute.jit
def write_numbers(out: cute.Tensor, count: Constexpr):
    """fp32 numbers of 2^-4 to 2^4, with either sign."""
    words = cute.make_tensor(out.iterator, cute.make_layout(count))
    for i in cutlass.range(count):
        noise = Int32(i) * 1103515245 + 12345
        words[i] = (
            (noise & Int32(0x80FFFFFF - 2**32)) + Int32(0x3D800000) + ((noise >> 3) & Int32(0x03000000))
        )


@cute.jit
def write_parts(shape: Constexpr, kernel: Constexpr, out: cute.Tensor):
    """Rows of arbitrary numbers at the start of ``out``, then their terms, by all threads of all CTAs."""
    *outer, dim = shape
    steps, step = [], dim
    for n in reversed(outer):
        steps.insert(0, Int64(step))
        step *= n
    x = cute.make_tensor(
        cute.recast_ptr(out.iterator, dtype=Float32), cute.make_layout(shape, stride=(*steps, 1))
    )
    write_numbers(out, step)
    count = kernel.traits.fp32_terms
    terms = cute.make_tensor(
        cute.recast_ptr(out.iterator + step, dtype=Float16), cute.make_layout((*outer, count, padded(dim)))
    )
    places = RowPlaces.make(x)
    for thread in cutlass.range(kernel.tile.num_threads):
        for block in cutlass.range(kernel.tile.blocks):
            kernel.split_rows(
                x, places, terms, dim, power_of_two(Int32(EXPONENT)), Int32(block), Int32(thread)
            )


@pytest.mark.parametrize("shape, count", [((2, 5, 3, 40), 2), ((7, 2, 36), 2), ((2, 5, 3, 40), 1)])
def test_parts_of_all_rows(shape, count):
    rows, dim = int(np.prod(shape[:-1])), shape[-1]
    extra = "" if count == 2 else "-tf32"
    traits = Traits.parse(f"forward_split-sm80-fp32-d{dim}{extra}" + ("-varlen" if len(shape) == 3 else ""))
    kernel = SplitFp32(traits, SplitFp32Tile(num_threads=32, blocks=2))
    step = rows * dim
    words = rows * padded(dim) * count // 2
    found = run_on_host(lambda out: write_parts(shape, kernel, out), step + words)
    x = found[:step].view(np.float32).reshape(rows, dim)
    assert (x < 0).any() and (np.abs(x) < 0.07).any()
    terms = found[step:].view(np.float16).reshape(rows, count, padded(dim))
    hi, lo, exponent = terms_of(x)
    assert exponent == EXPONENT
    np.testing.assert_array_equal(terms[:, 0, :dim], hi)
    assert count == 1 or np.array_equal(terms[:, 1, :dim], lo)
    assert (terms[..., dim:] == 0).all()


@cute.jit
def write_tile(
    size: Constexpr,
    dim: Constexpr,
    first_row: Constexpr,
    kernel: Constexpr,
    out: cute.Tensor,
):
    """``size`` rows of arbitrary numbers at the start of ``out``, every second one of a tensor; then terms of a tile of
    them as a forward's CTA has them in shared memory."""
    write_numbers(out, size)
    x = cute.make_tensor(
        cute.recast_ptr(out.iterator, dtype=Float32),
        cute.make_layout((size // 2 // dim, dim), stride=(Int64(2 * dim), 1)),
    )
    terms, tile = kernel.traits.fp32_terms, kernel.tile
    target = cute.make_tensor(
        cute.recast_ptr(out.iterator + size, dtype=Float16),
        kernel.smem_layout(tile.tile_m, terms * padded(dim)),
    )
    factor, rows = power_of_two(Int32(EXPONENT)), Int32(size // 2 // dim)
    for thread in cutlass.range(tile.num_threads):
        split_tile(
            *(x, Int32(first_row), rows, target[None, None, 0], dim, factor, Int32(thread)),
            *(tile.num_threads, terms),
        )


@pytest.mark.parametrize(
    "name, tile",
    [
        ("d128", ForwardTermsTile(64, 32, 4)),
        ("d36", ForwardTermsTile(32, 16, 2)),
        ("d64-tf32", ForwardTermsTile(128, 64, 8)),
    ],
)
def test_parts_of_a_tile_in_shared_memory(name, tile):
    kernel = ForwardTerms(Traits.parse(f"forward-sm80:terms-fp32-{name}"), tile)
    traits = kernel.traits
    terms, dim, cols = traits.fp32_terms, traits.head_dim, padded(traits.head_dim)
    rows, first_row = tile.tile_m + 5, 16
    size = 2 * rows * dim
    size += -size % 256  # the tile's alignment
    found = run_on_host(
        lambda out: write_tile(size, dim, first_row, kernel, out),
        size + tile.tile_m * terms * cols // 2,
        alignment=1024,
    )
    exists = size // 2 // dim
    x = found[: 2 * exists * dim].view(np.float32).reshape(exists, 2, dim)[:, 0]
    x = x[np.minimum(np.arange(first_row, first_row + tile.tile_m), exists - 1)]
    shape = (tile.tile_m, terms * cols)
    offsets = offset_table(lambda: kernel.smem_layout(*shape), *shape, 1)
    written = found[size:].view(np.float16)[offsets].reshape(tile.tile_m, terms, cols)
    scaled = x * np.float32(2.0**EXPONENT)
    hi = scaled.astype(np.float16)
    np.testing.assert_array_equal(written[:, 0, :dim], hi)
    assert terms == 1 or np.array_equal(written[:, 1, :dim], (scaled - hi).astype(np.float16))
    assert (written[..., dim:] == 0).all()
