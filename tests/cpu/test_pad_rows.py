"""Rows of any head dim, strides and address to padded rows and back: the kernel's device code on the host."""

import math

import cutlass
import numpy as np
import pytest
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.compiler import registry
from cute_attn.device.seqlen import RowPlaces
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.kernels.pad_rows import PadRows, is_run
from cute_attn.tiles.helpers import PadRowsTile
from cute_attn.traits import PADDED_TENSORS, Traits, aligned_head_dim
from layouts.host import run_on_host

# Two CTAs and more for tensors of a few rows.
TILE = PadRowsTile(num_threads=32, vectors=2)

CONTIGUOUS, TRANSPOSED, PACKED, SPREAD = "contiguous", "transposed", "packed", "spread"
UNWRITTEN = {2: 2**16 - 1, 4: 2**32 - 1}
KINDS = (CONTIGUOUS, TRANSPOSED, PACKED, SPREAD)


def strides_of(shape, kind):
    """Strides of (batch, seqlen, heads, dim) or (total, heads, dim)."""
    order, sizes = list(range(len(shape))), list(shape)
    if kind == TRANSPOSED:  # heads before sequences
        order[-3], order[-2] = order[-2], order[-3]
    if kind == PACKED:  # between two other tensors' heads
        sizes[-2] *= 3
    step, strides = 2 if kind == SPREAD else 1, [0] * len(shape)
    for mode in reversed(order):
        strides[mode] = step
        step *= sizes[mode]
    return tuple(strides)


def places_of(shape, strides, first):
    """Index of each element in memory: (rows, dim)."""
    grids = np.meshgrid(*(np.arange(n) * s for n, s in zip(shape, strides, strict=True)), indexing="ij")
    return first + sum(grids).reshape(-1, shape[-1])


@cute.jit
def write_noise(out: cute.Tensor, count: Constexpr):
    """Arbitrary bits, among which are NaNs of every dtype."""
    words = cute.make_tensor(out.iterator, cute.make_layout(count))
    for i in cutlass.range(count):
        words[i] = Int32(i) * 1103515245 + 12345


def tensor_of(out, first, dtype, shape, strides):
    """A tensor whose first element is ``first``. Strides are dynamic, as in the kernel."""
    strides = tuple(Int64(stride) for stride in strides)
    start = cute.recast_ptr(out.iterator, dtype=dtype) + first
    return cute.make_tensor(start, cute.make_layout(shape, stride=strides))


@cute.jit
def copy_rows(
    kernel: Constexpr,
    layout: Constexpr,
    words: Constexpr,
    anywhere: Constexpr,
    padded: Constexpr,
    cu_seqlens: Constexpr,
    out: cute.Tensor,
):
    """Run all threads of all CTAs; first fills ``words`` words of ``out`` with noise."""
    write_noise(out, words)
    shape, strides, first = layout
    dtype, dim = CUTE_DTYPES[kernel.traits.dtype], shape[-1]
    of_call = tensor_of(out, anywhere + first, dtype, shape, strides)
    wide = (*shape[:-1], kernel.wide(dim))
    of_kernels = cute.make_tensor(
        cute.recast_ptr(out.iterator, dtype=dtype) + padded,
        cute.make_ordered_layout(wide, tuple(range(len(wide)))[::-1]),
    )
    places = RowPlaces.make(of_call)
    lengths = None
    if cutlass.const_expr(cu_seqlens is not None):
        lengths = cute.make_rmem_tensor(cute.make_layout(len(cu_seqlens)), Int32)
        for i in cutlass.range_constexpr(len(cu_seqlens)):
            lengths[i] = Int32(cu_seqlens[i])
    blocks = -(-math.prod(shape[:-1]) // kernel.rows(dim))
    for thread in cutlass.range(kernel.tile.num_threads):
        for i in cutlass.range(blocks + 2):
            # Another tensor may have more blocks, which would be rows beyond 32 bits of this one.
            block = Int32(i) if i <= blocks else Int32(2**31 // kernel.rows(dim))
            if cutlass.const_expr(kernel.pads):
                kernel.pad(of_call, of_kernels, places, dim, Int32(block), Int32(thread))
            else:
                first, end = kernel.owned(of_call, places, lengths)
                kernel.unpad(of_kernels, of_call, places, dim, first, end, Int32(block), Int32(thread))


def copied(op, dtype, shape, kind, first=0, cu_seqlens=None):
    """(source, target) in memory order, and the positions in them of the call's elements and of the padded ones."""
    bits = {2: np.uint16, 4: np.uint32}[CUTE_DTYPES[dtype].width // 8]
    traits = Traits(op, "sm80", dtype, shape[-1], varlen=len(shape) == 3)
    kernel = PadRows(traits, TILE)
    strides, wide = strides_of(shape, kind), (*shape[:-1], kernel.wide(shape[-1]))
    places = places_of(shape, strides, first)
    wide_places = places_of(wide, strides_of(wide, CONTIGUOUS), 0)
    per_word = 4 // bits().itemsize
    of_call, of_kernels = (int(-(-(x.max() + 9) // per_word // 4) * 4) for x in (places, wide_places))
    source, target = (of_call, of_kernels) if kernel.pads else (of_kernels, of_call)
    starts = (0, source * per_word) if kernel.pads else (source * per_word, 0)
    found = run_on_host(
        lambda out: copy_rows(kernel, (shape, strides, first), source, *starts, cu_seqlens, out),
        source + target,
    )
    return found[:source].view(bits), found[source:].view(bits), places, wide_places


SHAPES = [
    *(("bf16", (2, 5, 3, 59), 0), ("bf16", (2, 3, 1, 201), 1), ("fp16", (13, 3, 33), 3)),
    *(("fp16", (1, 5, 2, 72), 1), ("bf16", (2, 67, 2, 3), 5), ("bf16", (70, 1, 1), 0)),
    *(("fp32", (2, 5, 3, 35), 2), ("fp32", (9, 2, 126), 1)),
]


# Each shape in two kinds of memory, and each kind with half of the shapes.
IN_TURN = [
    (*shape, kind) for i, shape in enumerate(SHAPES) for j, kind in enumerate(KINDS) if (i + j) % 2 == 0
]


@pytest.mark.parametrize("dtype, shape, first, kind", IN_TURN)
def test_padded_rows_have_all_elements_and_zeros_behind_them(dtype, shape, first, kind):
    source, target, places, wide_places = copied("forward_pad", dtype, shape, kind, first)
    expected = np.full_like(target, UNWRITTEN[target.dtype.itemsize])
    expected[wide_places] = 0
    expected[wide_places[:, : shape[-1]]] = source[places]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("dtype, shape, first, kind", IN_TURN)
def test_rows_come_back_without_their_padding(dtype, shape, first, kind):
    first = first * 4 if kind == CONTIGUOUS else first  # memory from a plan's allocation, or any other
    source, target, places, wide_places = copied("backward_unpad", dtype, shape, kind, first)
    expected = np.full_like(target, UNWRITTEN[target.dtype.itemsize])
    expected[places] = source[wide_places[:, : shape[-1]]]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("kind", [CONTIGUOUS, PACKED])
@pytest.mark.parametrize("cu_seqlens", [(0, 5, 37), (1, 1, 36), (17, 20, 30), (4, 4, 4)])
def test_rows_of_o_without_an_owner_stay(cu_seqlens, kind):
    shape = (37, 3, 59)
    source, target, places, wide_places = copied("forward_unpad", "bf16", shape, kind, 0, cu_seqlens)
    expected = np.full_like(target, UNWRITTEN[target.dtype.itemsize])
    owned = slice(cu_seqlens[0] * shape[1], cu_seqlens[-1] * shape[1])
    expected[places[owned]] = source[wide_places[owned, : shape[-1]]]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    "shape, kind, first, run",
    [
        ((2, 5, 3, 59), CONTIGUOUS, 0, True),
        ((2, 5, 3, 59), CONTIGUOUS, 4, True),
        ((2, 5, 3, 59), CONTIGUOUS, 2, False),
        ((13, 3, 59), CONTIGUOUS, 0, True),
        *(((2, 5, 3, 59), kind, 0, False) for kind in KINDS[1:]),
    ],
)
def test_which_rows_are_stored_eight_bytes_at_once(shape, kind, first, run):
    @cute.jit
    def write(out: cute.Tensor):
        y = tensor_of(out, first, cutlass.BFloat16, shape, strides_of(shape, kind))
        out[0] = Int32(is_run(y, shape[-1]))

    assert run_on_host(write, 4)[0] == run


def test_traits_of_padding_have_any_head_dim():
    for op, names in PADDED_TENSORS.items():
        traits = Traits.parse(f"{op}-sm80-bf16-d123x57-varlen")
        kernel = registry.lookup(traits)
        assert kernel.dims == tuple({"head_dim": 123, "head_dim_v": 57}[name] for name in names)
        assert [aligned_head_dim("bf16", dim) for dim in (123, 57)] == [128, 64]
    with pytest.raises(ValueError, match="multiples of 8"):
        Traits("forward", "sm80", "bf16", 59)
