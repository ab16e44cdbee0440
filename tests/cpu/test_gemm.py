"""Operands of products: a thread's addresses in shared memory against the layout's."""

import cutlass
import numpy as np
import pytest
from cutlass import Float16, Int32, cute

import layouts
from cute_attn.device.gemm import SmemOperand
from cute_attn.tiles.base import WarpTile
from layouts.host import run_on_host

UNROLLS = (0, 1, 2, 3, 4)
"""Steps that a tile asks to unroll; 0 for all."""

# The loops over one thread's subtiles are unrolled on purpose: fragments take static indices.


def make_operand(which, rows, cols, stages, bits, warps, thread):
    """An operand at address 0 of shared memory: Q or K as (rows, cols), V transposed."""
    tiled_mma = layouts.tiled_mma_sm80(Float16, warps)
    pointer = cute.make_ptr(Float16, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
    tile = cute.make_tensor(
        pointer, layouts.smem_layout(rows, cols, Float16, stages=stages, swizzle_bits=bits)
    )
    if which == "q":
        return SmemOperand.a(tiled_mma, layouts.ldmatrix_copy_a(tiled_mma, Float16), tile, thread)
    copy = layouts.ldmatrix_copy_b(tiled_mma, Float16, transpose=which == "v")
    return SmemOperand.b(tiled_mma, copy, layouts.transposed(tile) if which == "v" else tile, thread)


def first_of(k, steps, unroll):
    """The first of the steps that a loop reads with step k."""
    return k - k % WarpTile.steps_at_once(16 * steps, unroll)


@cute.jit
def write_addresses(case: cutlass.Constexpr, out: cute.Tensor):
    """out[thread, stage, k, subtile] = addresses: the operand's, by ``UNROLLS`` in a loop, and the layout's."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = make_operand(*case, thread)
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
        lambda out: write_addresses(case, out), 32 * warps, stages, steps, subtiles, len(UNROLLS) + 1
    )
    *read, wanted = np.moveaxis(found, -1, 0)
    for unroll, addresses in zip(UNROLLS, read, strict=True):
        np.testing.assert_array_equal(addresses, wanted, err_msg=f"{unroll} steps at a time")
