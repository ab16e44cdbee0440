"""The laws of accumulators: rows and columns, the next MMA's operand, stores."""

import numpy as np
import pytest
from cutlass import BFloat16, Float16, Float32, cute

import layouts
from layouts import model
from layouts.host import coordinate_table


def warp_mma(num_warps, warps_n=1):
    return lambda: layouts.tiled_mma_sm80(Float16, num_warps, warps_n=warps_n)


def wgmma(m, n, warpgroups, warpgroups_n=1, **kwargs):
    return lambda: layouts.tiled_mma_sm90(
        BFloat16, m, n, warpgroups=warpgroups, warpgroups_n=warpgroups_n, **kwargs
    )


# (tiled MMA, threads, tile_m, tile_n)
TILES = {
    "warps4x1-128x64": (warp_mma(4), 128, 128, 64),
    "warps4x1-64x16": (warp_mma(4), 128, 64, 16),
    "warps1x1-16x48": (warp_mma(1), 32, 16, 48),
    "warps8x1-128x176": (warp_mma(8), 256, 128, 176),
    "warps2x2-64x128": (warp_mma(4, 2), 128, 64, 128),
    "warps4x2-128x64": (warp_mma(8, 2), 256, 128, 64),
    "warps2x4-64x64": (warp_mma(8, 4), 256, 64, 64),
    "wgmma1-64x64": (wgmma(64, 64, 1), 128, 64, 64),
    "wgmma2-128x176": (wgmma(128, 176, 2), 256, 128, 176),
    "wgmma3-192x256": (wgmma(192, 256, 3), 384, 192, 256),
    "wgmma2-256x96": (wgmma(128, 96, 2), 256, 256, 96),
    "wgmma2-64x128-along-n": (wgmma(64, 128, 2, 2), 256, 64, 128),
    "wgmma1-64x160-twice-80": (wgmma(64, 80, 1), 128, 64, 160),
    "wgmma2-mn-major": (wgmma(128, 64, 2, a_major="mn", b_major="mn"), 256, 128, 64),
}


def accumulator_coordinates(make, threads, tile_m, tile_n):
    return coordinate_table(
        lambda t: make().get_slice(t).partition_C(cute.make_identity_tensor((tile_m, tile_n))), threads
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["untransposed", "transposed"])
@pytest.mark.parametrize("name", TILES)
def test_rows_columns_and_registers_are_those_of_the_partition(name, transposed):
    make, threads, *tile = TILES[name]
    modes = model.trace(lambda: layouts.row_col_modes(make(), *tile, transposed=transposed))
    assert all(type(offset) is int for offset in modes.rows + modes.cols)
    assert modes.rows[0] == modes.cols[0] == 0
    assert list(modes.rows) == sorted(modes.rows) and list(modes.cols) == sorted(modes.cols)
    coords = accumulator_coordinates(make, threads, *tile)
    if transposed:
        coords = coords[..., ::-1]

    def registers():
        acc = cute.make_rmem_tensor(make().partition_shape_C(tuple(tile)), Float32)
        return model.table(layouts.row_col_view(acc, modes).layout)

    # Every thread's elements are the product of its rows and its columns, offset by its first element.
    view = model.trace(registers)
    assert (np.sort(view, axis=None) == np.arange(coords.shape[1])).all()
    product = np.stack(np.meshgrid(modes.rows, modes.cols, indexing="ij"), -1)
    assert (coords[:, view] - coords[:, :1, None] == product).all()
    count = np.zeros(tuple(tile)[::-1] if transposed else tuple(tile), dtype=int)
    np.add.at(count, (coords[..., 0], coords[..., 1]), 1)
    assert (count == 1).all()


def test_view_of_another_accumulator_is_refused():
    def mixed():
        tiled_mma = warp_mma(4)()
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((64, 64)), Float32)
        return layouts.row_col_view(acc, layouts.row_col_modes(tiled_mma, 128, 64))

    with pytest.raises(ValueError, match="another MMA or tile"):
        model.trace(mixed)


# Accumulator -> A operand


OPERANDS = {
    "warps4-128x64": (warp_mma(4), warp_mma(4), 128, (128, 64)),
    "warps8-128x16": (warp_mma(8), warp_mma(8), 256, (128, 16)),
    "warps4-64x48": (warp_mma(4), warp_mma(4), 128, (64, 48)),
    "wgmma1-64x64": (wgmma(64, 64, 1), wgmma(64, 32, 1, a_source="rmem"), 128, (64, 64)),
    "wgmma2-128x112": (wgmma(128, 112, 2), wgmma(128, 64, 2, a_source="rmem"), 256, (128, 112)),
    "wgmma2-256x32": (wgmma(128, 32, 2), wgmma(128, 64, 2, a_source="rmem"), 256, (256, 32)),
    "wgmma1-64x64-twice-32": (wgmma(64, 32, 1), wgmma(64, 64, 1, a_source="rmem"), 128, (64, 64)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_accumulator_is_the_next_mmas_operand(name):
    first, second, threads, tile = OPERANDS[name]

    def operand():
        acc = cute.make_rmem_tensor(first().partition_shape_C(tile), Float16)
        return model.table(layouts.as_operand_a(acc).layout), second().partition_shape_A(tile)

    registers, expected = model.trace(operand)
    assert registers.shape == tuple(int(np.prod(mode)) for mode in expected)
    held = accumulator_coordinates(first, threads, *tile)
    wanted = coordinate_table(
        lambda t: second().get_slice(t).partition_A(cute.make_identity_tensor(tile)), threads
    )
    assert (held[:, registers.ravel(order="F")] == wanted).all()


@pytest.mark.parametrize("shape", [((2, 2), 1, 3), ((2, 2, 3), 1, 1)], ids=["warp", "wgmma"])
def test_half_a_step_of_columns_is_refused(shape):
    with pytest.raises(ValueError, match="3 blocks of 8 columns"):
        model.trace(lambda: layouts.as_operand_a(cute.make_rmem_tensor(shape, Float16)))


# Stores of accumulators


@pytest.mark.parametrize("name", ["warps4x1-128x64", "warps2x2-64x128", "wgmma2-128x176"])
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_store_writes_each_element_once_from_the_thread_that_holds_it(name, arch):
    make, threads, *tile = TILES[name]

    def copy():
        return layouts.store_copy_c(make(), BFloat16, arch)

    held = accumulator_coordinates(make, threads, *tile)
    written = coordinate_table(
        lambda t: copy().get_slice(t).partition_D(cute.make_identity_tensor(tuple(tile))), threads
    )
    count = np.zeros(tile, dtype=int)
    np.add.at(count, (written[..., 0], written[..., 1]), 1)
    assert (count == 1).all()
    if arch == "sm80":
        order = np.lexsort((held[..., 1], held[..., 0]))
        again = np.lexsort((written[..., 1], written[..., 0]))
        assert (
            np.take_along_axis(held, order[..., None], 1) == np.take_along_axis(written, again[..., None], 1)
        ).all()
    # Source registers: the copy's elements are the same as in the MMA's map.
    source = model.copy_map(copy, "src")
    mma = model.mma_map(make, "C")
    for thread in (0, 37, threads - 1):
        taken = sorted(zip(source.row[thread], source.col[thread], strict=True))
        assert taken == sorted(zip(mma.row[thread], mma.col[thread], strict=True))


@pytest.mark.parametrize("n", [48, 64, 128])
def test_transposed_store_exchanges_rows_and_columns_of_each_8_x_8(n):
    """Against stmatrix.trans: lane l writes row l % 8 of matrix l // 8, which is a column of the accumulator."""

    def copy():
        tiled_mma = layouts.tiled_mma_sm90(BFloat16, 128, n, warpgroups=2)
        return layouts.store_copy_c(tiled_mma, BFloat16, "sm90", transpose=True)

    written = coordinate_table(
        lambda t: copy().get_slice(t).partition_D(cute.make_identity_tensor((128, n))), 256
    )
    thread, value = np.arange(256)[:, None], np.arange(n // 2)[None, :]
    lane, matrix = thread % 32, thread % 32 // 8
    assert (written[..., 0] == thread // 32 * 16 + 8 * (matrix % 2) + value % 8).all()
    assert (written[..., 1] == value // 8 * 16 + 8 * (matrix // 2) + lane % 8).all()
    source = model.copy_map(copy, "src")
    matrix = value % 8 // 2
    assert (source.row == thread // 32 * 16 + lane // 4 + 8 * (matrix % 2)).all()
    assert (source.col == value // 8 * 16 + 8 * (matrix // 2) + lane % 4 * 2 + value % 2).all()
