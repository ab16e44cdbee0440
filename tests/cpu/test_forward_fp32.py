"""Products of a forward in fp32: every lane's operands meet the same keys and columns."""

import cutlass
import numpy as np
import pytest
from cutlass import Float32, Int32, cute

import layouts
from cute_attn.device.forward_fp32 import Fp32Rows, as_operand_a
from layouts.host import run_on_host

# The loops over one thread's pieces are unrolled on purpose: fragments take static indices.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")


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
                        out[thread, m, step, row, key] = a[(row, key), m, step]


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
def write_addresses(shape: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, stage, step, group, odd] = (the operand's address, the layout's)."""
    rows, cols, stages = shape
    pointer = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(pointer, layouts.smem_layout(rows, cols, Float32, stages=stages))
    for thread in cutlass.range(cute.size(out.shape[0])):
        v, lane = Fp32Rows(tile, thread), thread % 32
        for stage in cutlass.range(cute.size(out.shape[1])):
            starts = v.starts(stage)
            for step in cutlass.range_constexpr(v.steps):
                for group in cutlass.range_constexpr(cols // 32):
                    for odd in cutlass.range_constexpr(2):
                        row, col = 8 * step + 2 * (lane % 4) + odd, 32 * group + 4 * (lane // 4)
                        out[thread, stage, step, group, odd, 0] = v.address(starts[odd], step, group).toint()
                        out[thread, stage, step, group, odd, 1] = 4 * cute.crd2idx(
                            (row, col, stage), tile.layout
                        )


@pytest.mark.parametrize("rows, cols, stages", [(32, 64, 2), (64, 128, 1), (16, 96, 3)])
def test_addresses_of_v_are_the_layouts_and_reach_all_banks(rows, cols, stages):
    found = run_on_host(
        lambda out: write_addresses((rows, cols, stages), out), 64, stages, rows // 8, cols // 32, 2, 2
    )
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    # Eight lanes are served at once: each 16 of 128 bytes.
    units = np.sort(found[:, 0, 0, 0, :, 0].reshape(-1, 8, 2) // 16 % 8, axis=1)
    assert (units == np.arange(8)[None, :, None]).all()
