"""The laws of ``layouts``, checked for every coordinate.

Three implementations are compared: the DSL's code, run on the host for every thread and value; pycute's algebra; and
the integer models of ``layouts.model``, which pictures and bank counts use.
"""

import os
import sys
from math import prod

import cutlass
import numpy as np
import pycute
import pytest
from cutlass import BFloat16, Float16, Float32, cute

import layouts
from layouts import model
from layouts.host import coordinate_table, offset_table, run_on_host
from layouts.model import no_arguments, smem_map
from layouts.swizzle import atom_cols, choose_swizzle
from tests import refusals

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)


def covers_once(coords, rows, cols, times=1):
    count = np.zeros((rows, cols), dtype=int)
    np.add.at(count, (coords[..., 0], coords[..., 1]), 1)
    return (count == times).all()


def identity(rows, cols):
    return cute.make_identity_tensor((rows, cols))


def pycute_offsets(make, shape):
    """The same layout rebuilt from its printed shape, stride and swizzle in pycute, at every coordinate."""

    def parts():
        layout = make()
        inner = layout.inner
        return layout.outer.shape, layout.outer.stride, (inner.num_bits, inner.num_base, inner.num_shift)

    outer_shape, outer_stride, swizzle = model.trace(parts)
    composed = pycute.ComposedLayout(pycute.Swizzle(*swizzle), 0, pycute.Layout(outer_shape, outer_stride))
    return np.array([composed(*np.unravel_index(i, shape)) for i in range(prod(shape))]).reshape(shape)


# Swizzles


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("cols", HEAD_DIMS)
def test_atom_and_swizzle_of_a_row(cols, width):
    row_bytes = atom_cols(cols, width) * width // 8
    assert cols * width // 8 % row_bytes == 0
    assert row_bytes == 128 or cols * width // 8 % (2 * row_bytes) != 0
    swizzle = choose_swizzle(cols, width)
    assert 16 << swizzle.bits == row_bytes
    assert (1 << swizzle.base) * width // 8 == 16


# Shared memory


@pytest.mark.parametrize("bits", [None, 0])
@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [(8, 32, Float16), (64, 96, BFloat16), (128, 64, Float16), (48, 256, Float16), (64, 64, Float32)],
)
def test_smem_layout_is_a_bijection_and_equals_pycute(rows, cols, dtype, stages, bits):
    def make():
        return layouts.smem_layout(rows, cols, dtype, stages=stages, swizzle_bits=bits)

    shape = (rows, cols, stages) if stages else (rows, cols)
    ours = model.smem_map(make, dtype).offsets
    assert ours.shape == shape
    assert model.trace(lambda: cute.cosize(make())) == prod(shape)
    assert (np.sort(ours.ravel()) == np.arange(prod(shape))).all()
    assert (ours == pycute_offsets(make, shape)).all()
    if stages:
        assert (ours == offset_table(make, *shape)).all()
    # Vectors of 16 bytes stay whole, so that cp.async and ldmatrix can move them.
    vector = 128 // dtype.width
    first = np.take(ours, range(0, cols, vector), axis=1)
    assert (first % vector == 0).all()
    for step in range(vector):
        assert (np.take(ours, range(step, cols, vector), axis=1) == first + step).all()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: layouts.smem_layout(32, 96, Float16, stages=2), Float16),
        (lambda: layouts.smem_layout(64, 128, Float16, stages=1), Float16),
        (lambda: layouts.wgmma_smem_layout(64, 128, Float16, stages=3), Float16),
    ],
)
def test_transposed_swaps_coordinates(make, dtype):
    table = offset_table(make, *model.smem_map(make, dtype).offsets.shape)
    flipped = offset_table(lambda: layouts.transposed(make()), *table.swapaxes(0, 1).shape)
    assert (flipped == table.swapaxes(0, 1)).all()


def test_transposed_of_a_tensor_and_of_a_plain_layout():
    @cute.jit
    def body(out: cute.Tensor):
        flipped = layouts.transposed(out)
        for i in cutlass.range(6):
            for j in cutlass.range(4):
                flipped[i, j] = 10 * i + j

    assert (run_on_host(body, 4, 6) == np.add.outer(np.arange(4), 10 * np.arange(6))).all()
    plain = model.trace(lambda: model.table(layouts.transposed(cute.make_layout((4, 6), stride=(6, 1)))))
    assert (plain == np.arange(24).reshape(4, 6).T).all()


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize(
    ("rows", "cols", "stages"), [(64, 32, None), (128, 96, 2), (176, 128, 2), (96, 256, None), (64, 16, None)]
)
def test_wgmma_smem_layout_swizzles_bytes(rows, cols, stages, major):

    def make():
        return layouts.wgmma_smem_layout(rows, cols, BFloat16, stages=stages, major=major)

    ours = model.smem_map(make, BFloat16)
    shape = ours.offsets.shape
    assert shape == ((rows, cols, stages) if stages else (rows, cols))
    assert (np.sort(ours.offsets.ravel()) == np.arange(prod(shape))).all()
    contiguous = cols if major == "k" else rows
    assert 16 << ours.swizzle.bits == min(128, 2 * (contiguous & -contiguous))

    swizzle = pycute.Swizzle(ours.swizzle.bits, 4, 3)
    outer = model.trace(lambda: model.table(make().outer))
    assert (ours.offsets * 2 == np.vectorize(swizzle)(outer * 2)).all()


@pytest.mark.parametrize("cols", [32, 64, 96, 256])
def test_a_strip_of_columns_is_one_block_of_memory(cols):
    """Atoms are ordered by rows first, so that a TMA box or a loop over head dims has a contiguous strip."""
    for make in (layouts.smem_layout, layouts.wgmma_smem_layout):
        offsets = model.smem_map(lambda make=make: make(48, cols, BFloat16, stages=2), BFloat16).offsets
        strip = atom_cols(cols, 16)
        for col in range(0, cols, strip):
            block = np.sort(offsets[:, col : col + strip, 1].ravel())
            assert (block == cols * 48 + col * 48 + np.arange(48 * strip)).all()


@pytest.mark.parametrize(("keys", "dims", "stages"), [(64, 128, None), (96, 96, 2), (176, 32, None)])
def test_a_transposed_k_major_tile_is_mn_major(keys, dims, stages):
    """V as stored, (keys, dims), is the B operand (dims, keys) of P V."""

    def as_stored():
        return layouts.transposed(layouts.wgmma_smem_layout(keys, dims, BFloat16, stages=stages))

    def as_operand():
        return layouts.wgmma_smem_layout(dims, keys, BFloat16, stages=stages, major="mn")

    maps = [model.smem_map(make, BFloat16) for make in (as_stored, as_operand)]
    assert (maps[0].offsets == maps[1].offsets).all()
    assert maps[0].swizzle == maps[1].swizzle


def test_wgmma_layout_through_a_swizzled_pointer():
    """The DSL swizzles byte addresses: write through such a pointer, then search the memory."""

    def body(out):
        layout = layouts.wgmma_smem_layout(64, 32, Float32, stages=None)
        write_ids(cute.make_tensor(cute.recast_ptr(out.iterator, swizzle_=layout.inner), layout.outer))

    ours = model.smem_map(lambda: layouts.wgmma_smem_layout(64, 32, Float32), Float32).offsets
    memory = run_on_host(body, 64 * 32, alignment=1024)
    assert (memory[ours] == np.arange(64 * 32).reshape(64, 32)).all()


@cute.jit
def write_ids(tensor: cute.Tensor):
    for i in cutlass.range(64):
        for j in cutlass.range(32):
            tensor[i, j] = 32 * i + j


WRONG_SHAPES = """
smem_layout(12, 64, Float16) -> rows=12
smem_layout(8, 64, Float16, stages=0) -> stages=0
smem_layout(8, 64, Float16, swizzle_bits=4) -> swizzle_bits=4
smem_layout(8, 32, Float16, swizzle_bits=3) -> swizzle_bits=3
smem_layout(8, 64, Float16, swizzle_bits=-1) -> swizzle_bits=-1
smem_layout(8, 12, Float16) -> cols=12
wgmma_smem_layout(64, 64, Float16, major="m") -> major='m'
wgmma_smem_layout(12, 64, Float16) -> rows=12
gmem_tiled_copy(Float16, 12, 64, asynchronous=True) -> num_threads=12
gmem_tiled_copy(Float16, 128, 64, asynchronous=True, bits=48) -> bits=48
tiled_mma_sm80(Float16, 4, warps_n=3) -> num_warps=4
tiled_mma_sm90(Float16, 96, 64, warpgroups=1) -> m=96
tiled_mma_sm90(Float16, 64, 264, warpgroups=1) -> n=264
tiled_mma_sm90(Float16, 64, 64, warpgroups=1, a_source="gmem") -> a_source='gmem'
tiled_mma_sm90(Float16, 64, 64, warpgroups=1, a_source="rmem", a_major="mn") -> a_major='mn'
ldmatrix_copy_a(layouts.tiled_mma_sm80(Float16, 4), Float32, transpose=True) -> 16-bit
store_copy_c(layouts.tiled_mma_sm80(Float16, 4), Float16, "sm70") -> arch='sm70'
row_col_modes(layouts.tiled_mma_sm80(Float16, 4), 48, 64) -> tile_m=48
"""
WRONG_DTYPES = """
smem_layout(64, 64, torch.bfloat16) -> dtype is torch.bfloat16; accepted: one of CUTLASS
wgmma_smem_layout(64, 64, None) -> dtype is None; accepted: one of CUTLASS
tiled_mma_sm80(16, 4) -> dtype is 16; accepted: one of CUTLASS
"""


@refusals.each(WRONG_SHAPES)
def test_wrong_arguments_are_named(call, sentence):
    refusals.check(f"model.trace(lambda: layouts.{call})", f"ValueError: {sentence}", globals())


@refusals.each(WRONG_DTYPES)
def test_a_dtype_is_of_cutlass(call, sentence):
    refusals.check(f"layouts.{call}", f"TypeError: {sentence}", globals())


# Copies between global and shared memory


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("num_threads", "rows", "cols", "dtype"),
    [
        *((128, 128, 64, Float16), (128, 64, 96, BFloat16), (256, 32, 256, Float16)),
        *((64, 64, 160, Float16), (128, 64, 64, Float32)),
    ],
)
def test_gmem_copy_moves_each_element_once_in_whole_rows(num_threads, rows, cols, dtype, asynchronous):
    def make():
        return layouts.gmem_tiled_copy(dtype, num_threads, cols, asynchronous=asynchronous)

    coords = coordinate_table(lambda t: make().get_slice(t).partition_S(identity(rows, cols)), num_threads)
    assert covers_once(coords, rows, cols)
    assert (
        coords
        == coordinate_table(lambda t: make().get_slice(t).partition_D(identity(rows, cols)), num_threads)
    ).all()
    # 16 contiguous bytes per thread, aligned; a row's piece by adjacent threads.
    vector = 128 // dtype.width
    vectors = coords.reshape(num_threads, -1, vector, 2)
    assert (vectors[..., 0] == vectors[..., :1, 0]).all()
    assert (vectors[..., 1] == vectors[..., :1, 1] + np.arange(vector)).all()
    assert (vectors[..., 0, 1] % vector == 0).all()
    width = atom_cols(cols, dtype.width)
    rows_of_threads = vectors[:, :, 0].reshape(-1, width // vector, vectors.shape[1], 2)
    assert (rows_of_threads[..., 0] == rows_of_threads[:, :1, :, 0]).all()
    assert (np.diff(rows_of_threads[..., 1], axis=1) == vector).all()
    # The model has the first step of it.
    step = model.copy_map(make, "src")
    assert (np.stack([step.row, step.col], -1) == coords[:, :vector]).all()
    assert step.vector == vector


# MMA operands


SM80 = [(1, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4)]


@pytest.mark.parametrize("operand", ["A", "B", "C"])
@pytest.mark.parametrize(("num_warps", "warps_n"), SM80)
def test_sm80_operands_cover_their_tiles(num_warps, warps_n, operand):
    warps_m, threads = num_warps // warps_n, 32 * num_warps
    m, n, k = 16 * warps_m * 2, 16 * warps_n * 2, 32
    rows, cols = {"A": (m, k), "B": (n, k), "C": (m, n)}[operand]
    copies = {"A": warps_n, "B": warps_m, "C": 1}[operand]

    def make():
        return layouts.tiled_mma_sm80(Float16, num_warps, warps_n=warps_n)

    def partition(thread):
        return getattr(make().get_slice(thread), f"partition_{operand}")(identity(rows, cols))

    coords = coordinate_table(partition, threads)
    assert covers_once(coords, rows, cols, copies)
    one = model.mma_map(make, operand)
    held = {(t, *rc) for t in range(threads) for rc in zip(one.row[t], one.col[t], strict=True)}
    inside = {
        (t, *rc)
        for t in range(threads)
        for rc in coords[t].tolist()
        if rc[0] < one.shape[0] and rc[1] < one.shape[1]
    }
    assert held == inside


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("operand", ["A", "B"])
@pytest.mark.parametrize(("num_warps", "warps_n"), [(4, 1), (8, 2)])
def test_ldmatrix_reads_what_the_mma_holds(num_warps, warps_n, operand, transpose):
    threads = 32 * num_warps
    rows, cols = (32 * num_warps // warps_n, 32) if operand == "A" else (32 * warps_n, 32)
    copies = warps_n if operand == "A" else num_warps // warps_n

    def mma():
        return layouts.tiled_mma_sm80(Float16, num_warps, warps_n=warps_n)

    def make():
        build = layouts.ldmatrix_copy_a if operand == "A" else layouts.ldmatrix_copy_b
        return build(mma(), Float16, transpose)

    # Addresses: every lane names 8 elements that are contiguous along the stored axis.
    source = coordinate_table(lambda t: make().get_slice(t).partition_S(identity(rows, cols)), threads)
    assert covers_once(source, rows, cols, copies)
    along = 0 if transpose else 1
    pieces = source.reshape(threads, -1, 8, 2)
    assert (pieces[..., along] == pieces[..., :1, along] + np.arange(8)).all()
    assert (pieces[..., 1 - along] == pieces[..., :1, 1 - along]).all()
    # Registers: lane l of 4i + j receives elements 2j, 2j + 1 of the piece that lane i of the matrix named
    # (transposed: element i of the pieces 2j, 2j + 1), and that is what the MMA expects there.
    held = model.mma_map(mma, operand)
    read = model.copy_map(make, "src")
    lane, matrix, half = np.indices((32, 4, 2))
    i, j = np.divmod(lane, 4)
    namer, element = (2 * j + half, i) if transpose else (i, 2 * j + half)
    for warp in range(num_warps):
        at, source_at = (32 * warp + lane, 2 * matrix + half), (32 * warp + 8 * matrix + namer, element)
        assert (held.row[at] == read.row[source_at]).all()
        assert (held.col[at] == read.col[source_at]).all()


def test_options_of_a_script_are_not_the_dsls(monkeypatch):
    """The DSL would take ``-d 8`` for its option -diagnostic and end the process."""
    monkeypatch.setattr(sys, "argv", ["script.py", "-d", "8"])
    offsets = smem_map(lambda: layouts.smem_layout(16, 32, Float16), Float16).offsets
    assert offsets.shape == (16, 32) and sys.argv == ["script.py", "-d", "8"]
    with no_arguments():
        with no_arguments():  # in another thread, say
            assert sys.argv == ["script.py"]
        assert sys.argv == ["script.py"]
        child = os.fork()
        if child == 0:
            os._exit(sys.argv != ["script.py", "-d", "8"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.argv == ["script.py", "-d", "8"]
