"""merge_attention: its operator on the CPU, and every step of the combine kernel on every thread."""

import functools
import math

import cutlass
import pytest
import torch
from cutlass import Constexpr, Float32, cute

from cute_attn.api.merge import merge_attention
from cute_attn.compiler import compile, registry
from cute_attn.host.memory import row_alignment
from cute_attn.host.merge import check, check_for_kernels
from cute_attn.kernels.combine import Combine, OutputRows
from cute_attn.reference import kvcache as kvcache_reference
from cute_attn.tiles.inference import MAX_PARTIALS, CombineTile, partial_columns
from cute_attn.traits import Traits
from tests import refusals
from tests.tensors import partial_results, run

# ---- the kernel's steps ----


@cute.jit
def merge_rows(
    kernel: Constexpr,
    at: Constexpr,
    partials: tuple,
    memory: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    mSinks: cute.Tensor | None,
):
    """Run all threads between barriers. at: from a thread to its rows; memory: replaces shared memory."""
    threads: Constexpr = kernel.tile.num_threads(kernel.traits)
    shared, outs, lses = kernel.shared_memory(memory.iterator), partials[0].iterator, partials[1].iterator
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        kernel.load_lse(lses, own, shared, place)
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        kernel.compute_weights(own.count, shared, place)
    for thread in cutlass.range(threads, unroll=1):
        place, own = at(thread)
        acc = cute.make_rmem_tensor(cute.make_layout((4, kernel.tile.vectors(kernel.traits))), Float32)
        acc.fill(0.0)
        if cutlass.const_expr(kernel.tile.in_order):
            row_max, total = kernel.add_in_order(acc, outs, own, shared, place)
        else:
            row_max, largest = kernel.compute_weights(own.count, shared, place)
            loaded = None
            if cutlass.const_expr(kernel.tile.eager):
                loaded = kernel.load_first(outs, own, place)
            total = kernel.add_partials(acc, outs, own, largest, shared, place, loaded)
        if cutlass.const_expr(kernel.tile.groups > 1):
            kernel.store_sums(acc, total, shared, place)
        elif place.exists:
            if cutlass.const_expr(kernel.traits.sinks != ""):
                row_max, total = kernel.add_sink(acc, total, row_max, mSinks, place)
            kernel.store(acc, total, row_max, mO, mLSE, place)
    if cutlass.const_expr(kernel.tile.groups > 1):
        for thread in cutlass.range(threads, unroll=1):
            place, own = at(thread)
            row_max, _ = kernel.compute_weights(own.count, shared, place)
            acc = cute.make_rmem_tensor(cute.make_layout((4, kernel.tile.vectors(kernel.traits))), Float32)
            total = kernel.add_groups(acc, shared, place)
            if cutlass.const_expr(kernel.traits.sinks != ""):
                row_max, total = kernel.add_sink(acc, total, row_max, mSinks, place)
            if place.exists and place.group == 0:
                kernel.store(acc, total, row_max, mO, mLSE, place)


@cute.jit
def combine(
    mOpartial: cute.Tensor,
    mLSEpartial: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    memory: cute.Tensor,
    mSinks: cute.Tensor,
    kernel: Constexpr,
):
    """Run every CTA."""
    rows, partials = OutputRows.make(mO, kernel.tile), (mOpartial, mLSEpartial)
    for block in cutlass.range(rows.ctas, unroll=1):
        at = functools.partial(rows.of, kernel, partials, block)
        merge_rows(kernel, at, partials, memory, mO, mLSE, mSinks)


def emulate(kernel: Combine, outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None):
    dtype, dim = {"fp16": torch.float16, "fp32": torch.float32}[kernel.traits.dtype], outs.shape[-1]
    out = torch.full(outs.shape[1:], math.nan, dtype=dtype)
    outs = torch.nn.functional.pad(outs, (0, partial_columns(kernel.traits) - dim), value=math.nan)
    lse = torch.full(lses.shape[1:], math.nan)
    memory = torch.full((kernel.tile.smem_bytes(kernel.traits) // 4,), math.nan)
    sinks = torch.full((1,), math.nan) if sinks is None else sinks
    run(combine, outs, lses, out, lse, memory, sinks, constants=(kernel,))
    return out, lse


T = CombineTile
KERNELS = {
    "one-group": (64, "fp32", T(4, 1)),
    "groups": (64, "fp32", T(1, 4)),
    "rows-and-groups": (40, "fp32", T(3, 2, 2)),
    "two-vectors": (256, "fp32", T(2, 2)),
    "narrow": (8, "fp16", T(8, 1, 8)),
    "odd": (72, "fp16", T(2, 3, 1)),
    "eager": (64, "fp32", T(2, 2, 4, eager=True)),
    "any-row": (59, "fp16", T(2, 2, 2)),
    "any-fp32-row": (13, "fp32", T(4, 1)),
    "pairs": (102, "fp16", T(1, 4)),
    "half-vectors": (20, "fp16", T(8, 1)),
    "in-order": (64, "fp32", T(2, 1, 4, in_order=True)),
}


@pytest.mark.parametrize("partials", [1, 2, 7, 33])
@pytest.mark.parametrize("name", KERNELS)
def test_every_thread_against_the_definition(name, partials):
    dim, dtype, tile = KERNELS[name]
    alignment = row_alignment(torch.empty(1, dim, dtype=torch.float16 if dtype == "fp16" else torch.float32))
    kernel = Combine(Traits("combine", "sm80", dtype, dim, alignment=alignment), tile)
    assert tile.reject(kernel.traits, "sm86") is None
    outs, lses = partial_results(partials, 2, 3, 3, dim, seed=partials)
    lses[:, 1, 2, 1] = -math.inf  # a row without keys
    out, lse = emulate(kernel, outs, lses)
    expected, expected_lse = kvcache_reference.merge(outs, lses)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-5 if dtype == "fp32" else 1e-3, atol=1e-6)
    assert (out[1, 1, 2] == 0).all() and lse[1, 2, 1] == -math.inf


@pytest.mark.parametrize("tile", [T(4, 1), T(1, 4)], ids=str)
def test_sinks_join_once(tile):
    """There are rows with keys, a row without any, and sinks far below and far above all keys."""
    kernel = Combine(Traits("combine", "sm80", "fp32", 16, sinks="fp32"), tile)
    outs, lses = partial_results(5, 2, 3, 4, 16)
    lses[:, 1, 2, 1] = -math.inf
    lses[:, 0, 3, 2] = -math.inf
    sinks = torch.tensor([0.5, -90.0, 200.0, -math.inf])
    out, lse = emulate(kernel, outs, lses, sinks)
    expected, expected_lse = kvcache_reference.merge(outs, lses, sinks)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert lse[1, 2, 1] == 200 and lse[0, 3, 2] == -math.inf and (out[1, 1, 2] == 0).all()
    plain, _ = kvcache_reference.merge(outs, lses)
    torch.testing.assert_close(out[:, :, 3], plain[:, :, 3])


def test_empty_partial_results_change_no_bit_in_order():
    """Other rows change no bit either: a row equals the row alone, with only its partial results that saw a key."""
    kernel = Combine(Traits("combine", "sm80", "fp32", 16), T(2, 1, 4, in_order=True))
    outs, lses = partial_results(9, 1, 6, 2, 16)
    out, lse = emulate(kernel, outs, lses)
    assert not lses.isfinite().all()
    for query in range(6):
        for head in range(2):
            seen = lses[:, 0, head, query].isfinite()
            assert seen.any()
            alone = (
                outs[seen, :, query : query + 1, head : head + 1],
                lses[seen, :, head : head + 1, query : query + 1],
            )
            own, own_lse = emulate(kernel, *(x.contiguous() for x in alone))
            assert own[0, 0, 0].equal(out[0, query, head]) and own_lse[0, 0, 0] == lse[0, head, query]


def test_the_most_partial_results():
    kernel = Combine(Traits("combine", "sm80", "fp32", 16), T(1, 4))
    outs, lses = partial_results(MAX_PARTIALS, 1, 2, 1, 16, empty=0.8)
    expected = kvcache_reference.merge(outs, lses)
    torch.testing.assert_close(emulate(kernel, outs, lses), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [T(4, 1), T(1, 4)], ids=str)
def test_nan_stays_nan(tile):
    outs, lses = partial_results(5, 1, 3, 2, 16, empty=0.0)
    lses[2, 0, 0, 0], lses[:, 0, 1, 1], outs[3, 0, 2, 0, 5] = math.nan, math.nan, math.nan
    out, lse = emulate(Combine(Traits("combine", "sm80", "fp32", 16), tile), outs, lses)
    expected, expected_lse = kvcache_reference.merge(outs, lses)
    assert out.isnan().equal(expected.isnan()) and lse.isnan().equal(expected_lse.isnan())
    assert out.isnan().sum() == 16 + 16 + 1 and lse.isnan().sum() == 2


def test_inf_in_one_column_leaves_the_others():
    """A row loaded in place of an absent one has weight 0; 0 times inf must not make NaN."""
    outs, lses = torch.ones(3, 1, 1, 1, 8), torch.tensor([0.0, -math.inf, -math.inf]).view(3, 1, 1, 1)
    outs[0, ..., 3] = math.inf
    out, _ = emulate(Combine(Traits("combine", "sm80", "fp32", 8), T(1, 1)), outs, lses)
    assert out.flatten().tolist() == [1.0, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]


def test_strides_of_any_order():
    outs, lses = partial_results(3, 2, 5, 4, 32)
    kernel = Combine(Traits("combine", "sm80", "fp32", 32), T(4, 1))
    others = outs.permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    expected = emulate(kernel, outs, lses)
    torch.testing.assert_close(emulate(kernel, others, lses), expected, rtol=0, atol=0)


# ---- what is built ----


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_rows_are_loaded_several_at_a_time(arch):
    """Loads have 16 bytes; the tile's number of them is issued together, none behind a branch."""
    compiled = compile(f"combine-{arch}-bf16-d128", "unroll=8")
    lines = [line for line in compiled.sass.splitlines() if "LDG" in line and ".128" in line]
    assert len(lines) == 8 and not any("@" in line for line in lines)
    assert ("griddepcontrol.wait" in compiled.ptx) == (arch == "sm90")


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_a_tile_for_every_head_dim(dim):
    traits = Traits("combine", "sm80", "bf16", dim)
    for partials in (1, 4, 5, MAX_PARTIALS):
        tile = CombineTile.of(partials)
        assert registry.lookup(traits, tile, "sm86").tile == tile
        assert tile.threads_per_row(traits) * tile.vectors(traits) * 4 >= dim


# ---- the public function ----


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_the_function_is_the_definition(packed):
    outs, lses = partial_results(4, 1 if packed else 2, 5, 3, 16)
    if packed:
        outs, lses = outs[:, 0], lses[:, 0]
    expected = kvcache_reference.merge(outs, lses)
    for given in ((outs, lses), (list(outs), tuple(lses))):
        torch.testing.assert_close(merge_attention(*given), expected, rtol=0, atol=0)
    out, lse = merge_attention(outs, lses, dtype=torch.bfloat16)
    assert out.equal(expected[0].bfloat16()) and lse.equal(expected[1])
    half, _ = merge_attention(outs.half(), lses)
    assert half.dtype == torch.float16


def test_the_operator():
    outs, lses = partial_results(3, 2, 5, 3, 16)
    torch.library.opcheck(torch.ops.cute_attn.merge.default, (outs, lses, None, torch.float16))
    packed = (outs[:, 0], lses[:, 0], torch.zeros(3), torch.float32)
    torch.library.opcheck(torch.ops.cute_attn.merge.default, packed)


OUTS, LSES = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 4, 3)
WRONG = """
merge_attention(OUTS, LSES[:, 0]) -> ValueError: lses has shape (2, 4, 3); accepted: (2, 1, 4, 3), for outs of
merge_attention(OUTS[0, 0], LSES) -> ValueError: outs has shape (3, 4, 8); accepted: (partials, batch,
merge_attention(OUTS[:0], LSES[:0]) -> ValueError: outs has 0 partial results; accepted: 1 or more
merge_attention(OUTS, LSES, dtype=torch.int32) -> TypeError: dtype is torch.int32; accepted: torch.float16
merge_attention(OUTS, LSES.half()) -> TypeError: lses has dtype torch.float16; accepted: torch.float32
merge_attention(OUTS, LSES, sinks=torch.zeros(3))
    -> ValueError: sinks has shape (3,); accepted: (4,), a number per head
merge_attention(OUTS, LSES, sinks=torch.zeros(4).double()) -> TypeError: sinks has dtype torch.float64; accepted: torch
merge_attention(OUTS, LSES, sinks=torch.zeros(4).to_sparse()) -> TypeError: sinks is of layout torch.sparse_coo; acc
merge_attention([OUTS[0], OUTS[0, 0]], LSES) -> ValueError: outs[1] has shape (3, 4, 8); accepted: (1, 3, 4, 8)
merge_attention([OUTS[0], OUTS[0].half()], LSES) -> ValueError: outs[1] has dtype torch.float16; accepted: torch.flo
merge_attention([], []) -> ValueError: outs has 0 partial results; accepted: 1 or more
merge_attention(OUTS, ()) -> ValueError: lses has 0 partial results; accepted: 1 or more
merge_attention([1, 2], LSES) -> TypeError: outs[0] is an int; accepted: a torch.Tensor
merge_attention([OUTS[0].to_sparse()], LSES) -> TypeError: outs[0] is of layout torch.sparse_coo; accepted: a dense
merge_attention((x for x in OUTS), LSES) -> TypeError: outs is a generator; accepted: a list or a tuple of tensors, or
merge_attention(OUTS, LSES.to("meta")) -> ValueError: lses is on meta; accepted: cpu, where outs is
on_cuda((513, 1, 1, 1, 8), torch.float16) -> ValueError: outs has 513 partial results; accepted on CUDA: up to 512
on_cuda((2, 1, 1, 1, 513), torch.float16) -> ValueError: outs has head_dim_v 513; accepted on CUDA: 1 to 512
on_cuda((2, 1, 1, 1, 8), torch.float64) -> TypeError: dtype is torch.float64; accepted on CUDA: torch.float16
registry.lookup(D128, "rows=0") -> Unsupported: rows is 0; accepted: 1 or more
registry.lookup(D128, "rows=64,groups=8")
    -> Unsupported: rows and groups are 64 and 8, 16384 threads with 32 for each; accepted: up to 1024
registry.lookup(Traits("combine", "sm80", "bf16", 128, mask="causal"))
    -> Unsupported: uses no features but sinks; accepted: combine-sm80-bf16-d128
"""
D128 = Traits("combine", "sm80", "bf16", 128)


def on_cuda(shape, dtype):
    """Raise if the kernel does not support the call, or if the call is wrong."""
    outs, lses = torch.zeros(shape, device="meta"), torch.zeros(shape[:-1], device="meta").transpose(2, 3)
    check(outs, lses, None, dtype)
    check_for_kernels(outs, lses, dtype)


@refusals.each(WRONG)
def test_a_wrong_call_is_told(call, sentence):
    refusals.check(call, sentence, globals())


def test_a_gradient_is_refused():
    with pytest.raises(NotImplementedError, match="outs requires a gradient, which merge_attention"):
        merge_attention(OUTS.clone().requires_grad_(), LSES)
    with torch.no_grad():
        merge_attention(OUTS.clone().requires_grad_(), LSES)
