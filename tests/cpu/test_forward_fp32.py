"""Products of a forward in fp32: every lane's operands meet the same keys and columns."""

import re

import cutlass
import numpy as np
import pytest
from cutlass import Float32, Int32, Int64, cute

import layouts
from cute_attn.compiler import compile
from cute_attn.device.forward_fp32 import Fp32Rows, PermutedResult, as_operand_a, store_rows
from cute_attn.traits import Traits
from layouts.host import run_on_host

# The loops over one thread's pieces are unrolled on purpose: fragments take static indices.


@cute.jit
def write_keys(
    tile_m: cutlass.Constexpr, tile_n: cutlass.Constexpr, warps: cutlass.Constexpr, out: cute.Tensor
):
    """out[thread, m, step, row place, key place] = (row, key) of P's A operand."""
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps)
    for thread in cutlass.range(cute.size(out.shape[0])):
        coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), Int32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = coords[i][0] * 1000 + coords[i][1]
        a = as_operand_a(acc)
        for m in cutlass.range_constexpr(cute.size(a, mode=[1])):
            for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
                for row in cutlass.range_constexpr(2):
                    for key in cutlass.range_constexpr(2):
                        out[thread, m, step, row, key] = a[row + 2 * key, m, step]


def test_places_of_an_mma_are_neighbouring_keys():
    """Place t of K is key 2t and place t + 4 key 2t + 1, in P as ``Fp32Rows`` reads V."""
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
def write_addresses(shape: cutlass.Constexpr, warps: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, stage, step, group, odd] = (the operand's address, the layout's)."""
    rows, cols, stages = shape
    pointer = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(pointer, layouts.smem_layout(rows, cols, Float32, stages=stages))
    for thread in cutlass.range(cute.size(out.shape[0])):
        v, lane = Fp32Rows(tile, thread, *warps), thread % 32
        col0 = thread // 32 // warps[0] * (cols // warps[1]) + 4 * (lane // 4)
        for stage in cutlass.range(cute.size(out.shape[1])):
            starts = v.starts(stage)
            for step in cutlass.range_constexpr(v.steps):
                for group in cutlass.range_constexpr(cols // 32 // warps[1]):
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
        lambda out: write_addresses((rows, cols, stages), warps, out), 64, stages, rows // 8, groups, 2, 2
    )
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    # Eight lanes are served at once: each 16 of 128 bytes.
    units = np.sort(found[:, 0, 0, 0, :, 0].reshape(-1, 8, 2) // 16 % 8, axis=1)
    assert (units == np.arange(8)[None, :, None]).all()


@cute.jit
def write_places(shape: cutlass.Constexpr, warps: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, r, c, odd] = (the address that P's element goes to, that of its place in the layout)."""
    pointer = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(pointer, layouts.smem_layout(*shape, Float32))
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps[0] * warps[1], warps_n=warps[1])
    modes = layouts.row_col_modes(tiled_mma, *shape)
    for thread in cutlass.range(cute.size(out.shape[0])):
        result = PermutedResult(tiled_mma, shape, tile, thread)
        row0, col0 = layouts.thread_row_col(tiled_mma, *shape, thread)
        start = result.start()
        for r in cutlass.range_constexpr(len(modes.rows)):
            for c in cutlass.range_constexpr(len(modes.cols)):
                key = col0 + modes.cols[c]
                place = key - key % 8 + key % 8 // 2 + key % 2 * 4
                at = result.address(start, modes.rows[r], modes.cols[c - c % 2] + c % 2 * 4)
                out[thread, r, c, 0] = at.toint()
                out[thread, r, c, 1] = 4 * cute.crd2idx((row0 + modes.rows[r], place), tile.layout)


@pytest.mark.parametrize("shape, warps", [((64, 32), (4, 2)), ((32, 32), (2, 2)), ((32, 64), (1, 2))])
def test_places_of_p_in_shared_memory(shape, warps):
    threads = 32 * warps[0] * warps[1]
    rows, cols = shape[0] // (8 * warps[0]), shape[1] // (4 * warps[1])
    found = run_on_host(lambda out: write_places(shape, warps, out), threads, rows, cols, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    assert len(np.unique(found[..., 0])) == shape[0] * shape[1]


@cute.jit
def write_words(
    which: cutlass.Constexpr, shape: cutlass.Constexpr, warps: cutlass.Constexpr, out: cute.Tensor
):
    """out[thread, piece, k, i] = coordinates of: the row of 16 bytes that the lane addresses (i 0), and by the MMA the
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
        for piece in cutlass.range_constexpr(cute.size(view, mode=[1])):
            for k in cutlass.range_constexpr(cute.size(view, mode=[2])):
                row, col = source[0, piece, k]
                out[thread, piece, k, 0] = row * 1000 + col
                for i in cutlass.range_constexpr(4):
                    out[thread, piece, k, 1 + i] = view[i, piece, k]


@pytest.mark.parametrize("which, shape", [("a", (64, 32)), ("b", (64, 32))])
@pytest.mark.parametrize("warps", [(2, 1), (2, 2)])
def test_ldmatrix_fills_the_operands_of_32_bits(which, shape, warps):
    """Lane l gets word l % 4 of the 16 bytes that lane 8 i + l // 4 addresses, in its register i."""
    pieces = shape[0] // 16 // (warps[0] if which == "a" else warps[1])
    found = run_on_host(
        lambda out: write_words(which, shape, warps, out),
        *(32 * warps[0] * warps[1], pieces, shape[1] // 8, 5),
    ).reshape(-1, 32, pieces, shape[1] // 8, 5)
    lanes = np.arange(32)
    for i in range(4):
        got = found[..., 0][:, 8 * i + lanes // 4] + (lanes % 4)[None, :, None, None]
        np.testing.assert_array_equal(got, found[..., 1 + i])


SMALL = "tile_m=16,tile_n=16,num_warps=1,num_stages=1,qk_unroll=1"
PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k8\S*\s*" + r",\s*".join([r"\{([^}]*)\}"] * 4))


@pytest.mark.parametrize("precision", ["", "-tf32"])
def test_products_take_each_register_of_an_operand_once(precision):
    """cute.gemm takes registers in their order in memory: of a fragment with other strides, some twice."""
    compiled = compile(Traits.parse(f"forward-sm80-fp32-d32{precision}"), SMALL, "sm90")
    products = PRODUCT.findall(compiled.ptx)
    assert len(products) >= 20
    for _, a, b, _ in products:
        assert len({x.strip() for x in a.split(",")}) == 4 and len({x.strip() for x in b.split(",")}) == 2, a


@cute.jit
def write_output(
    shape: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    head_dim: cutlass.Constexpr,
    aligned: cutlass.Constexpr,
    out,
):
    """Store an accumulator whose elements are 1000 times their row plus their column, by the PTX manual's fragment of C
    and the order of V's columns: column n of MMA j of group c is column 32 c + 4 n + j."""
    rows, cols = shape
    tiled_mma = layouts.tiled_mma_sm80(Float32, warps[0] * warps[1], warps_n=warps[1])
    offsets = layouts.row_col_modes(tiled_mma, *shape).rows
    pointer = cute.recast_ptr(out.iterator, dtype=Float32)
    o = cute.make_tensor(pointer, cute.make_layout((rows, head_dim), stride=(Int64(head_dim), 1)))
    for thread in cutlass.range(32 * warps[0] * warps[1]):
        lane, warp_m, warp_n = thread % 32, thread // 32 % warps[0], thread // 32 // warps[0]
        first_row, first_col = 16 * warp_m + lane // 4, warp_n * (cols // warps[1])
        acc = cute.make_rmem_tensor(tiled_mma.get_slice(0).partition_shape_C(shape), Float32)
        for n in cutlass.range_constexpr(cute.size(acc, mode=[2])):
            for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for i in cutlass.range_constexpr(4):
                    row = first_row + 16 * warps[0] * m + 8 * (i // 2)
                    col = first_col + 32 * (n // 4) + 4 * (2 * (lane % 4) + i % 2) + n % 4
                    acc[i, m, n] = Float32(1000 * row + col)
        row0, _ = layouts.thread_row_col(tiled_mma, *shape, thread)
        store_rows(o, acc, offsets, row0, rows - 3, first_col + lane % 4 * 8, head_dim, aligned)


@pytest.mark.parametrize(
    "shape, warps, head_dim, aligned",
    [((64, 64), (2, 1), 60, True), ((32, 128), (2, 2), 128, True), ((64, 64), (4, 1), 59, False)],
)
def test_the_output_is_stored_in_place(shape, warps, head_dim, aligned):
    found = run_on_host(lambda out: write_output(shape, warps, head_dim, aligned, out), shape[0], head_dim)
    wanted = 1000 * np.arange(shape[0])[:, None] + np.arange(head_dim)
    np.testing.assert_array_equal(found.view(np.float32)[:-3], wanted[:-3])
    assert (found[-3:] == -1).all()  # rows beyond the sequence
