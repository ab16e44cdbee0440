"""fp32 operands of products: which words of shared memory each lane reads, against the fragments of m16n8k8."""

import cutlass
import numpy as np
import pytest
from cutlass import Float32, Int32, cute

import layouts
from cute_attn.device.gemm_fp32 import Fp32Operand, Fp32Result, rounded_to_tf32
from layouts.host import run_on_host

WARPS = 4


def make_operand(is_a, by_words, paired, rows, k, warps_m, thread):
    """An operand of (rows, k) with 2 stages at address 0."""
    stored = (k, rows) if by_words else (rows, k)
    pointer = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(pointer, layouts.smem_layout(*stored, Float32, stages=2))
    warps = warps_m if is_a else WARPS // warps_m
    view = layouts.transposed(tile) if by_words else tile
    return Fp32Operand(view, thread, warps_m, warps, is_a, by_words, paired)


@cute.jit
def write_addresses(case: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, step, piece, i] = addresses of pointer i: unrolled, and in a loop over steps."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = make_operand(*case, thread)
        start = operand.start(Int32(1))
        for step in cutlass.range_constexpr(operand.steps):
            here = operand.at_step(start, Int32(step))
            for piece in cutlass.range_constexpr(operand.pieces):
                unrolled = operand.pointers(start, piece, step)
                looped = operand.pointers(here, piece, 0)
                for i in cutlass.range_constexpr(len(unrolled)):
                    out[thread, step, piece, i, 0] = unrolled[i].toint()
                    out[thread, step, piece, i, 1] = looped[i].toint()


@cute.jit
def write_layout(stored: cutlass.Constexpr, out: cute.Tensor):
    layout = layouts.smem_layout(*stored, Float32, stages=2)
    for row in cutlass.range(stored[0]):
        for col in cutlass.range(stored[1]):
            out[row, col] = 4 * cute.crd2idx((row, col, 1), layout)


def wanted(is_a, by_words, paired, warps_m, pieces, steps):
    """(thread, step, piece, i, 2): row and k of each pointer, from the PTX manual's fragments of m16n8k8."""
    warps = warps_m if is_a else WARPS // warps_m
    found = np.zeros((32 * WARPS, steps, pieces, 4 if by_words else 1, 2), dtype=int)
    for thread, step, piece in np.ndindex(32 * WARPS, steps, pieces):
        warp, lane = divmod(thread, 32)
        first = 16 * (warp % warps_m) if is_a else 8 * (warp // warps_m)
        first += 16 * warps * piece
        half = 8 if is_a else 8 * warps  # an MMA tile of B has 8 columns of each warp, then 8 more of each
        if by_words:
            ks = [2 * (lane % 4), 2 * (lane % 4) + 1] if paired else [lane % 4, lane % 4 + 4]
            rows = [first + lane // 4, first + lane // 4 + half]
            order = [(r, k) for k in ks for r in rows] if is_a else [(r, k) for r in rows for k in ks]
        else:  # matrix m of ldmatrix is register m: its row comes from lane 8 m + row
            m, row = divmod(lane, 8)
            r, k = (m % 2, m // 2) if is_a else (m // 2, m % 2)
            order = [(first + half * r + row, 4 * k)]
        found[thread, step, piece] = [(r, 8 * step + k) for r, k in order]
    return found


@pytest.mark.parametrize("is_a", [True, False])
@pytest.mark.parametrize("by_words, paired", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("rows, k, warps_m", [(64, 96, 1), (128, 16, 2)])
def test_lanes_read_their_fragments(rows, k, by_words, paired, is_a, warps_m):
    warps = warps_m if is_a else WARPS // warps_m
    pieces, steps = rows // (16 * warps), k // 8
    case = (is_a, by_words, paired, rows, k, warps_m)
    pointers = 4 if by_words else 1
    found = run_on_host(lambda out: write_addresses(case, out), 32 * WARPS, steps, pieces, pointers, 2)
    stored = (k, rows) if by_words else (rows, k)
    addresses = run_on_host(lambda out: write_layout(stored, out), *stored)
    if by_words:
        addresses = addresses.T
    where = wanted(is_a, by_words, paired, warps_m, pieces, steps)
    expected = addresses[where[..., 0], where[..., 1]]
    np.testing.assert_array_equal(found[..., 0], expected)
    np.testing.assert_array_equal(found[..., 1], expected)


@pytest.mark.parametrize("by_words, paired, ways", [(True, True, 1), (True, False, 2), (False, False, 1)])
def test_bank_conflicts(by_words, paired, ways):
    """Of pairs of k there are none; a row of a matrix takes 4 banks, 8 rows all 32."""
    for is_a in (True, False):
        case = (is_a, by_words, paired, 64, 64, 2)
        found = run_on_host(
            lambda out, case=case: write_addresses(case, out), 128, 8, 2, 4 if by_words else 1, 2
        )
        words = found[:32, 0, 0, 0, 0] // 4 % 32
        lanes = words if by_words else words[:8]
        assert np.bincount(lanes).max() == ways


@cute.jit
def write_warps(warps_m: cutlass.Constexpr, out: cute.Tensor):
    """out[thread] = row and column of a thread's first element of a 64 x 64 accumulator."""
    mma = layouts.tiled_mma_sm80(Float32, WARPS, warps_n=WARPS // warps_m)
    for thread in cutlass.range(cute.size(out.shape[0])):
        row, col = layouts.thread_row_col(mma, 64, 64, thread)
        out[thread, 0], out[thread, 1] = Int32(row), Int32(col)


@pytest.mark.parametrize("warps_m", [1, 2, 4])
def test_operands_and_accumulators_divide_warps_alike(warps_m):
    found = run_on_host(lambda out: write_warps(warps_m, out), 32 * WARPS, 2)
    thread = np.arange(32 * WARPS)
    warp, lane = thread // 32, thread % 32
    np.testing.assert_array_equal(found[:, 0], 16 * (warp % warps_m) + lane // 4)
    np.testing.assert_array_equal(found[:, 1], 8 * (warp // warps_m) + 2 * (lane % 4))


@cute.jit
def write_stores(tile: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, r, c] = addresses of a pair: the result's and the layout's."""
    mma = layouts.tiled_mma_sm80(Float32, WARPS, warps_n=2)
    pointer = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    s = cute.make_tensor(pointer, layouts.smem_layout(*tile, Float32))
    modes = layouts.row_col_modes(mma, *tile)
    for thread in cutlass.range(cute.size(out.shape[0])):
        result = Fp32Result(mma, tile, s, thread)
        row0, col0 = layouts.thread_row_col(mma, *tile, thread)
        start = result.start()
        for r in cutlass.range_constexpr(len(modes.rows)):
            for c in cutlass.range_constexpr(0, len(modes.cols), 2):
                row, col = modes.rows[r], modes.cols[c]
                out[thread, r, c // 2, 0] = result.address(start, row, col).toint()
                out[thread, r, c // 2, 1] = 4 * cute.crd2idx((row0 + row, col0 + col), s.layout)


@pytest.mark.parametrize("tile", [(64, 32), (32, 96), (64, 64)])
def test_results_are_stored_at_the_layouts_addresses(tile):
    pairs = tile[0] * tile[1] // (32 * WARPS) // (tile[0] // 16) // 2
    found = run_on_host(lambda out: write_stores(tile, out), 32 * WARPS, tile[0] // 16, pairs, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    assert len(np.unique(found[..., 0])) == tile[0] * tile[1] // 2


@cute.jit
def write_rounded(out: cute.Tensor):
    """out[i] = bits of a float of either sign, and of it rounded."""
    for i in cutlass.range(cute.size(out.shape[0])):
        bits = i * 520_123 ^ (i << 31)
        out[i, 0] = bits
        out[i, 1] = rounded_to_tf32(bits.bitcast(Float32)).bitcast(Int32)


def test_tf32_has_eleven_significant_bits():
    found = run_on_host(write_rounded, 4096, 2)
    x, tf32 = (found[:, i].copy().view(np.float32).astype(np.float64) for i in range(2))
    assert np.all(found[:, 1] & 0x1FFF == 0)
    normal = np.abs(x) > 1e-37
    error = np.abs(tf32[normal] / x[normal] - 1)
    assert 2.0**-12 < error.max() <= 2.0**-11
