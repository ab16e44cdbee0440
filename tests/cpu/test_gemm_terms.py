"""Operands of fp32 products, and their results: where lanes read and write, against layouts and the PTX manual."""

import functools
import re

import cutlass
import numpy as np
import pytest
from cutlass import Constexpr, Float16, Float32, Int32, Int64, cute

import layouts
from cute_attn.compiler import compile
from cute_attn.device.gemm import SmemOperand
from cute_attn.device.gemm_terms import (
    Fp32Operand,
    Fp32Result,
    Fp32Values,
    PairedResult,
    StoredTerms,
    paired_operand_a,
)
from cute_attn.device.score_tile import ScoreMap
from cute_attn.outputs.fragment_rows import store_rows
from cute_attn.tiles.base import WarpTile
from cute_attn.traits import Traits
from layouts.host import run_on_host

# The loops over one thread's subtiles are unrolled on purpose: fragments take static indices.

WARPS = 4


def tile_at_zero(rows, cols, dtype=Float32, stages=None, bits=None):
    """A tile of shared memory at address 0."""
    pointer = cute.make_ptr(dtype, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(pointer, layouts.smem_layout(rows, cols, dtype, stages=stages, swizzle_bits=bits))


# ---- fp16 terms in rows ----


@cute.jit
def write_terms(which: Constexpr, dim: Constexpr, out: cute.Tensor):
    """out[thread, k, subtile, term] = addresses of step k: the operand's, and the layout's."""
    warps, rows = 2, 64
    tiled_mma, tile = layouts.tiled_mma_sm80(Float16, warps), tile_at_zero(rows, 2 * dim, Float16, 1)
    tile = layouts.transposed(tile) if which == "v" else tile
    copy = (layouts.ldmatrix_copy_a if which == "q" else layouts.ldmatrix_copy_b)(
        tiled_mma, Float16, which == "v"
    )
    make = SmemOperand.a if which == "q" else SmemOperand.b
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = StoredTerms.in_rows(make, 2, which != "v", tiled_mma, copy, tile, thread)
        reference = copy.get_slice(thread).partition_S(cute.make_identity_tensor(tile.layout.shape))
        starts = operand.start(Int32(0))
        for k in cutlass.range_constexpr(operand.steps):
            # V is read from the start, Q and K in a loop by two steps.
            here = starts if which == "v" else operand.at_step(starts, Int32(k - k % 2))
            for t, term in enumerate(operand.each):
                for subtile in cutlass.range_constexpr(operand.subtiles):
                    first = (t * operand.subtiles, 0) if which == "v" else (0, t * operand.steps)
                    found = reference[0, subtile + first[0], k + first[1], 0]
                    row, col, _ = found
                    step = k if which == "v" else k % 2
                    out[thread, k, subtile, t, 0] = term.address(here[t], subtile, step).toint()
                    out[thread, k, subtile, t, 1] = 2 * cute.crd2idx((row, col, 0), tile.layout)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_addresses_of_terms_in_rows(which, dim):
    steps, subtiles = {"q": (dim // 16, 2), "k": (dim // 16, 4), "v": (4, dim // 16)}[which]
    found = run_on_host(lambda out: write_terms(which, dim, out), 64, steps, subtiles, 2, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])


# ---- fp32 operands ----


def make_operand(is_a, by_words, paired, rows, k, warps_m, thread):
    """An operand of (rows, k) with 2 stages at address 0."""
    tile = tile_at_zero(*((k, rows) if by_words else (rows, k)), stages=2)
    warps = warps_m if is_a else WARPS // warps_m
    view = layouts.transposed(tile) if by_words else tile
    return Fp32Operand(view, thread, 1, warps_m, warps, is_a, by_words, paired)


@cute.jit
def write_addresses(case: Constexpr, out: cute.Tensor):
    """out[thread, step, subtile, i] = addresses of pointer i: unrolled, and in a loop over steps."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = make_operand(*case, thread)
        start = operand.start(Int32(1))
        for step in cutlass.range_constexpr(operand.steps):
            here = operand.at_step(start, Int32(step))
            for subtile in cutlass.range_constexpr(operand.subtiles):
                unrolled = operand.pointers(start, subtile, step)
                looped = operand.pointers(here, subtile, 0)
                for i in cutlass.range_constexpr(len(unrolled)):
                    out[thread, step, subtile, i, 0] = unrolled[i].toint()
                    out[thread, step, subtile, i, 1] = looped[i].toint()


@cute.jit
def write_layout(stored: Constexpr, out: cute.Tensor):
    layout = layouts.smem_layout(*stored, Float32, stages=2)
    for row in cutlass.range(stored[0]):
        for col in cutlass.range(stored[1]):
            out[row, col] = 4 * cute.crd2idx((row, col, 1), layout)


def wanted(is_a, by_words, paired, warps_m, subtiles, steps):
    """(thread, step, subtile, i, 2): row and k of each pointer, from the PTX manual's fragments of m16n8k8."""
    warps = warps_m if is_a else WARPS // warps_m
    found = np.zeros((32 * WARPS, steps, subtiles, 4 if by_words else 1, 2), dtype=int)
    for thread, step, subtile in np.ndindex(32 * WARPS, steps, subtiles):
        warp, lane = divmod(thread, 32)
        first = 16 * (warp % warps_m) if is_a else 8 * (warp // warps_m)
        first += 16 * warps * subtile
        half = 8 if is_a else 8 * warps  # an MMA tile of B has 8 columns of each warp, then 8 more of each
        if by_words:
            ks = [2 * (lane % 4), 2 * (lane % 4) + 1] if paired else [lane % 4, lane % 4 + 4]
            rows = [first + lane // 4, first + lane // 4 + half]
            order = [(r, k) for k in ks for r in rows] if is_a else [(r, k) for r in rows for k in ks]
        else:  # matrix m of ldmatrix is register m: its row comes from lane 8 m + row
            m, row = divmod(lane, 8)
            r, k = (m % 2, m // 2) if is_a else (m // 2, m % 2)
            order = [(first + half * r + row, 4 * k)]
        found[thread, step, subtile] = [(r, 8 * step + k) for r, k in order]
    return found


@pytest.mark.parametrize("is_a", [True, False])
@pytest.mark.parametrize("by_words, paired", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("rows, k, warps_m", [(64, 96, 1), (128, 16, 2)])
def test_lanes_read_their_fragments(rows, k, by_words, paired, is_a, warps_m):
    warps = warps_m if is_a else WARPS // warps_m
    subtiles, steps = rows // (16 * warps), k // 8
    case = (is_a, by_words, paired, rows, k, warps_m)
    pointers = 4 if by_words else 1
    found = run_on_host(lambda out: write_addresses(case, out), 32 * WARPS, steps, subtiles, pointers, 2)
    stored = (k, rows) if by_words else (rows, k)
    addresses = run_on_host(lambda out: write_layout(stored, out), *stored)
    if by_words:
        addresses = addresses.T
    where = wanted(is_a, by_words, paired, warps_m, subtiles, steps)
    expected = addresses[where[..., 0], where[..., 1]]
    np.testing.assert_array_equal(found[..., 0], expected)
    np.testing.assert_array_equal(found[..., 1], expected)


@pytest.mark.parametrize("by_words, paired, ways", [(True, True, 1), (True, False, 2), (False, False, 1)])
def test_bank_conflicts(by_words, paired, ways):
    """Pairs along k have no conflicts: a row of a matrix takes 4 banks, 8 rows all 32."""
    for is_a in (True, False):
        case = (is_a, by_words, paired, 64, 64, 2)
        found = run_on_host(
            lambda out, case=case: write_addresses(case, out), 128, 8, 2, 4 if by_words else 1, 2
        )
        words = found[:32, 0, 0, 0, 0] // 4 % 32
        lanes = words if by_words else words[:8]
        assert np.bincount(lanes).max() == ways


@cute.jit
def write_warps(warps_m: Constexpr, out: cute.Tensor):
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
def write_words(which: Constexpr, shape: Constexpr, warps: Constexpr, out: cute.Tensor):
    """out[thread, subtile, k, i]: coordinates of the row of 16 bytes that the lane addresses (i 0), and by the MMA the
    four registers that the copy fills (i 1 to 4)."""
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps[0] * warps[1], warps_n=warps[1])
    make = layouts.ldmatrix_copy_a if which == "a" else layouts.ldmatrix_copy_b
    copy = make(tiled_mma, Float32)
    for thread in cutlass.range(cute.size(out.shape[0])):
        mma = tiled_mma.get_slice(thread)
        identity = cute.make_identity_tensor(shape)
        held = mma.partition_A(identity) if cutlass.const_expr(which == "a") else mma.partition_B(identity)
        registers = cute.make_rmem_tensor(held.shape, Int32)
        for i in cutlass.range_constexpr(cute.size(registers)):
            registers[i] = held[i][0] * 1000 + held[i][1]
        view = copy.get_slice(thread).retile(registers)
        source = copy.get_slice(thread).partition_S(identity)
        for subtile in cutlass.range_constexpr(cute.size(view, mode=[1])):
            for k in cutlass.range_constexpr(cute.size(view, mode=[2])):
                row, col = source[0, subtile, k]
                out[thread, subtile, k, 0] = row * 1000 + col
                for i in cutlass.range_constexpr(4):
                    out[thread, subtile, k, 1 + i] = view[i, subtile, k]


@pytest.mark.parametrize("which, shape", [("a", (64, 32)), ("b", (64, 32))])
@pytest.mark.parametrize("warps", [(2, 1), (2, 2)])
def test_ldmatrix_fills_the_operands_of_32_bits(which, shape, warps):
    """Lane l gets word l % 4 of the 16 bytes that lane 8 i + l // 4 addresses, in its register i."""
    subtiles = shape[0] // 16 // (warps[0] if which == "a" else warps[1])
    found = run_on_host(
        lambda out: write_words(which, shape, warps, out),
        *(32 * warps[0] * warps[1], subtiles, shape[1] // 8, 5),
    ).reshape(-1, 32, subtiles, shape[1] // 8, 5)
    lanes = np.arange(32)
    for i in range(4):
        got = found[..., 0][:, 8 * i + lanes // 4] + (lanes % 4)[None, :, None, None]
        np.testing.assert_array_equal(got, found[..., 1 + i])


@cute.jit
def write_keys(tile_m: Constexpr, tile_n: Constexpr, warps: Constexpr, out: cute.Tensor):
    """out[thread, m, step, row place, key place] = (row, key) of P's A operand."""
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps)
    for thread in cutlass.range(cute.size(out.shape[0])):
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), Int32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = coords[i][0] * 1000 + coords[i][1]
        a = paired_operand_a(acc)
        for m in cutlass.range_constexpr(cute.size(a, mode=[1])):
            for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                for row in cutlass.range_constexpr(2):
                    for key in cutlass.range_constexpr(2):
                        out[thread, m, step, row, key] = a[row + 2 * key, m, step]


def test_places_of_an_mma_are_neighbouring_keys():
    """Place t of K is key 2t and place t + 4 key 2t + 1, in P as ``Fp32Values`` reads V."""
    warps, tile_m, tile_n = 2, 64, 32
    found = run_on_host(
        lambda out: write_keys(tile_m, tile_n, warps, out),
        32 * warps,
        tile_m // (16 * warps),
        tile_n // 8,
        2,
        2,
    )
    thread, m, step, row, key = np.indices(found.shape)
    lane, warp = thread % 32, thread // 32
    rows = 16 * warps * m + 16 * warp + 8 * row + lane // 4
    np.testing.assert_array_equal(found, 1000 * rows + 8 * step + 2 * (lane % 4) + key)


@cute.jit
def write_values(shape: Constexpr, warps: Constexpr, out: cute.Tensor):
    """out[thread, stage, step, group, odd] = (the operand's address, the layout's)."""
    rows, cols, stages = shape
    tile = tile_at_zero(rows, cols, stages=stages)
    for thread in cutlass.range(cute.size(out.shape[0])):
        v, lane = Fp32Values(tile, thread, 1, *warps), thread % 32
        col0 = thread // 32 // warps[0] * (cols // warps[1]) + 4 * (lane // 4)
        for stage in cutlass.range(cute.size(out.shape[1])):
            starts = v.start(stage)
            for step in cutlass.range_constexpr(v.steps):
                for group in cutlass.range_constexpr(v.subtiles):
                    for odd in cutlass.range_constexpr(2):
                        row, col = 8 * step + 2 * (lane % 4) + odd, 32 * group + col0
                        out[thread, stage, step, group, odd, 0] = v.address(starts[odd], step, group).toint()
                        out[thread, stage, step, group, odd, 1] = 4 * cute.crd2idx(
                            (row, col, stage), tile.layout
                        )


@pytest.mark.parametrize(
    "rows, cols, stages, warps", [(32, 64, 2, (2, 1)), (64, 128, 1, (1, 2)), (16, 96, 3, (2, 1))]
)
def test_addresses_of_v_are_the_layouts_and_reach_all_banks(rows, cols, stages, warps):
    groups = cols // 32 // warps[1]
    found = run_on_host(
        lambda out: write_values((rows, cols, stages), warps, out), 64, stages, rows // 8, groups, 2, 2
    )
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    # Eight lanes are served at once: each 16 of 128 bytes.
    units = np.sort(found[:, 0, 0, 0, :, 0].reshape(-1, 8, 2) // 16 % 8, axis=1)
    assert (units == np.arange(8)[None, :, None]).all()


# ---- results ----


@cute.jit
def write_stores(paired: Constexpr, shape: Constexpr, warps: Constexpr, out: cute.Tensor):
    """out[thread, r, c] = (the address that an element is stored to, the address of its place in the layout)."""
    tile = tile_at_zero(*shape)
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps[0] * warps[1], warps_n=warps[1])
    modes = layouts.row_col_modes(tiled_mma, *shape)
    for thread in cutlass.range(cute.size(out.shape[0])):
        result = (PairedResult if paired else Fp32Result)(tiled_mma, shape, tile, thread)
        row0, col0 = layouts.thread_row_col(tiled_mma, *shape, thread)
        start = result.start()
        for r in cutlass.range_constexpr(len(modes.rows)):
            for c in cutlass.range_constexpr(len(modes.cols)):
                col, odd = col0 + modes.cols[c], c % 2
                place = col - col % 8 + col % 8 // 2 + col % 2 * 4 if paired else col
                at = result.address(start, modes.rows[r], modes.cols[c - odd] + (4 * odd if paired else 0))
                out[thread, r, c, 0] = at.toint() + (0 if paired else 4 * odd)
                out[thread, r, c, 1] = 4 * cute.crd2idx((row0 + modes.rows[r], place), tile.layout)


@pytest.mark.parametrize(
    "paired, shape, warps",
    [
        *((False, shape, (2, 2)) for shape in ((64, 32), (32, 96), (64, 64))),
        *((True, *other) for other in (((64, 32), (4, 2)), ((32, 32), (2, 2)), ((32, 64), (1, 2)))),
    ],
)
def test_results_are_stored_at_the_layouts_addresses(paired, shape, warps):
    threads = 32 * warps[0] * warps[1]
    rows, cols = shape[0] // (8 * warps[0]), shape[1] // (4 * warps[1])
    found = run_on_host(lambda out: write_stores(paired, shape, warps, out), threads, rows, cols, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    assert len(np.unique(found[..., 0])) == shape[0] * shape[1]


@cute.jit
def accumulator(tiled_mma: cute.TiledMma, shape: Constexpr, warps: Constexpr, thread: Int32):
    """An accumulator whose elements are 1000 times their row plus their column, by the PTX manual's fragment of C and
    the order of V's columns: column n of MMA j of group c is column 32 c + 4 n + j."""
    lane, warp_m, warp_n = thread % 32, thread // 32 % warps[0], thread // 32 // warps[0]
    first_row, first_col = 16 * warp_m + lane // 4, warp_n * (shape[1] // warps[1])
    acc = cute.make_rmem_tensor(tiled_mma.get_slice(0).partition_shape_C(shape), Float32)
    for n in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for i in cutlass.range_constexpr(4):
                row = first_row + 16 * warps[0] * m + 8 * (i // 2)
                col = first_col + 32 * (n // 4) + 4 * (2 * (lane % 4) + i % 2) + n % 4
                acc[i, m, n] = Float32(1000 * row + col)
    return acc


@cute.jit
def write_vectors(shape: Constexpr, warps: Constexpr, dim: Constexpr, out, vector: Constexpr = 4):
    """Store P V with fp32 values, columns in ascending order."""
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps[0] * warps[1], warps_n=warps[1])
    for thread in cutlass.range(32 * warps[0] * warps[1]):
        acc = accumulator(tiled_mma, shape, warps, thread)
        values = Fp32Values(tile_at_zero(32, shape[1]), thread, 1, *warps)
        acc_rows, own = values.output_rows(acc, ScoreMap.make(tiled_mma, *shape, thread), thread)
        rows = (output(out, shape[0], dim), Int32(0), Int32(shape[0] - 3), dim)
        store_rows(acc_rows, own, *rows, vector=vector)


@cute.jit
def write_pairs(shape: Constexpr, warps: Constexpr, dim: Constexpr, out):
    """Store an accumulator of fp16 products, columns in its order."""
    tiled_mma = layouts.tiled_mma_sm80(Float16, warps[0])
    for thread in cutlass.range(32 * warps[0]):
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(shape), Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = Float32(1000 * coords[i][0] + coords[i][1])
        score_map = ScoreMap.make(tiled_mma, *shape, thread)
        rows = (output(out, shape[0], dim), Int32(0), Int32(shape[0] - 3), dim)
        store_rows(score_map.view(acc), score_map, *rows)


def output(out, rows, dim):
    layout = cute.make_layout((rows, dim), stride=(Int64(dim), 1))
    return cute.make_tensor(cute.recast_ptr(out.iterator, dtype=Float32), layout)


@pytest.mark.parametrize(
    "write, shape, warps, dim",
    [
        (write_vectors, (64, 64), (2, 1), 60),
        (write_vectors, (32, 128), (2, 2), 128),
        (write_vectors, (64, 64), (4, 1), 60),
        (functools.partial(write_vectors, vector=2), (16, 96), (1, 1), 70),
        (functools.partial(write_vectors, vector=2), (64, 64), (2, 1), 62),
        (write_vectors, (64, 128), (4, 1), 128),
        *((write_pairs, (64, 64), (2, 1), dim) for dim in (64, 36)),
    ],
)
def test_the_output_is_stored_in_place(write, shape, warps, dim):
    found = run_on_host(lambda out: write(shape, warps, dim, out), shape[0], dim)
    wanted = 1000 * np.arange(shape[0])[:, None] + np.arange(dim)
    np.testing.assert_array_equal(found.view(np.float32)[:-3], wanted[:-3])
    assert (found[-3:] == -1).all()  # rows beyond the sequence


# ---- kernels ----

SMALL = "tile_m=16,tile_n=16,num_warps=1,num_stages=1,qk_unroll=1"
PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k8\S*\s*" + r",\s*".join([r"\{([^}]*)\}"] * 4))


@pytest.mark.parametrize("precision", ["", "-tf32"])
def test_products_take_each_register_of_an_operand_once(precision):
    """cute.gemm visits registers in memory order, which would repeat some of a fragment with other strides."""
    compiled = compile(Traits.parse(f"forward-sm80-fp32-d32{precision}"), SMALL, "sm90")
    products = PRODUCT.findall(compiled.ptx)
    assert len(products) >= 20
    for _, a, b, _ in products:
        assert len({x.strip() for x in a.split(",")}) == 4 and len({x.strip() for x in b.split(",")}) == 2, a


# ---- fp16 operands ----

UNROLLS = (0, 1, 2, 3, 4)
"""Steps that a tile asks to unroll; 0 for all."""


def operand_at_zero(which, rows, cols, stages, bits, warps, thread):
    """An operand at address 0 of shared memory: Q or K as (rows, cols), V transposed."""
    tiled_mma = layouts.tiled_mma_sm80(Float16, warps)
    tile = tile_at_zero(rows, cols, Float16, stages, bits)
    if which == "q":
        return SmemOperand.a(tiled_mma, layouts.ldmatrix_copy_a(tiled_mma, Float16), tile, thread)
    copy = layouts.ldmatrix_copy_b(tiled_mma, Float16, transpose=which == "v")
    return SmemOperand.b(tiled_mma, copy, layouts.transposed(tile) if which == "v" else tile, thread)


def first_of(k, steps, unroll):
    """The first of the steps that a loop reads with step k."""
    return k - k % WarpTile.steps_at_once(16 * steps, unroll)


@cute.jit
def write_steps(case: Constexpr, out: cute.Tensor):
    """out[thread, stage, k, subtile] = addresses: the operand's, by ``UNROLLS`` in a loop, and the layout's."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = operand_at_zero(*case, thread)
        reference = operand.tiled_copy.get_slice(thread).partition_S(
            cute.make_identity_tensor(operand.tile.layout.shape)
        )
        for stage in cutlass.range(cute.size(out.shape[1])):
            start = operand.start(stage)
            for k in cutlass.range_constexpr(operand.steps):
                for subtile in cutlass.range_constexpr(operand.subtiles):
                    row, col, _ = reference[0, subtile, k, 0]
                    for i in cutlass.range_constexpr(len(UNROLLS)):
                        first = first_of(k, operand.steps, UNROLLS[i])
                        here = operand.at_step(start, Int32(first))
                        out[thread, stage, k, subtile, i] = operand.address(here, subtile, k - first).toint()
                    out[thread, stage, k, subtile, len(UNROLLS)] = 2 * cute.crd2idx(
                        (row, col, stage), operand.tile.layout
                    )


@pytest.mark.parametrize("cols, bits", [(32, None), (64, None), (96, None), (128, None), (64, 0), (96, 1)])
@pytest.mark.parametrize("which, rows, stages, warps", [("q", 128, 1, 4), ("k", 64, 2, 4), ("v", 48, 3, 2)])
def test_addresses_are_the_layouts(which, rows, stages, warps, cols, bits):
    steps, subtiles = {
        "q": (cols // 16, rows // 16 // warps),
        "k": (cols // 16, rows // 16),
        "v": (rows // 16, cols // 16),
    }[which]
    case = (which, rows, cols, stages, bits, warps)
    found = run_on_host(
        lambda out: write_steps(case, out), 32 * warps, stages, steps, subtiles, len(UNROLLS) + 1
    )
    *read, wanted = np.moveaxis(found, -1, 0)
    for unroll, addresses in zip(UNROLLS, read, strict=True):
        np.testing.assert_array_equal(addresses, wanted, err_msg=f"{unroll} steps at a time")
