"""Tiled MMAs, and the rows and columns of their accumulators.

All functions run inside a trace, in a kernel or in a host ``cute.jit`` function.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from .swizzle import bits_of

_MAJOR = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
_SOURCE = {"smem": warpgroup.OperandSource.SMEM, "rmem": warpgroup.OperandSource.RMEM}


def tiled_mma_sm80(dtype: Any, num_warps: int, *, warps_n: int = 1) -> cute.TiledMma:
    """mma.sync with fp32 accumulators; ``num_warps / warps_n`` warps along M, ``warps_n`` along N.

    m16n8k16 for 16-bit types; m16n8k8 for Float32, in tf32.

    A tile has 16 rows per warp along M and 16 columns per warp along N: one ldmatrix.x4 loads B for two instructions.
    """
    if warps_n < 1 or num_warps < 1 or num_warps % warps_n:
        raise ValueError(f"num_warps={num_warps}: must be a positive multiple of warps_n={warps_n}")
    warps_m = num_warps // warps_n
    k = 256 // bits_of(dtype)
    if dtype is Float32:
        op: Any = warp.MmaTF32Op((16, 8, k))
    else:
        op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, k))
    return cute.make_tiled_mma(op, (warps_m, warps_n, 1), permutation_mnk=(16 * warps_m, 16 * warps_n, k))


def tiled_mma_sm90(
    dtype: Any,
    m: int,
    n: int,
    *,
    warpgroups: int,
    warpgroups_n: int = 1,
    a_source: str = "smem",
    a_major: str = "k",
    b_major: str = "k",
) -> cute.TiledMma:
    """wgmma m64nNk16 with fp32 accumulators for an (m, n) tile.

    ``warpgroups / warpgroups_n`` warpgroups divide M, 64 rows each at a time, and ``warpgroups_n`` divide N; one
    instruction covers all columns of a warpgroup, at most 256. a_source: "smem" or "rmem"; a_major, b_major: "k" or
    "mn", the contiguous mode of the operand in shared memory ("k" for A in registers).
    """
    for name, value, accepted in (
        ("a_source", a_source, _SOURCE),
        ("a_major", a_major, _MAJOR),
        ("b_major", b_major, _MAJOR),
    ):
        if value not in accepted:
            raise ValueError(f"{name}={value!r}: accepted are {', '.join(map(repr, accepted))}")
    if a_source == "rmem" and a_major != "k":
        raise ValueError(f"a_major={a_major!r}: an A operand in registers is 'k' major")
    if warpgroups_n < 1 or warpgroups < 1 or warpgroups % warpgroups_n:
        raise ValueError(
            f"warpgroups={warpgroups}: must be a positive multiple of warpgroups_n={warpgroups_n}"
        )
    warpgroups_m = warpgroups // warpgroups_n
    if m <= 0 or m % (64 * warpgroups_m):
        raise ValueError(
            f"m={m}: must be a multiple of {64 * warpgroups_m}, 64 rows for each warpgroup along M"
        )
    if n <= 0 or n % (8 * warpgroups_n) or n // warpgroups_n > 256:
        raise ValueError(f"n={n}: must be a multiple of {8 * warpgroups_n}, at most {256 * warpgroups_n}")
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (64, n // warpgroups_n, 16), _SOURCE[a_source], _MAJOR[a_major], _MAJOR[b_major]
    )
    return cute.make_tiled_mma(op, (warpgroups_m, warpgroups_n, 1))


@dataclass(frozen=True)
class RowColModes:
    """Rows and columns of a score tile in a thread's accumulator, as Python ints.

    row_modes, col_modes: modes of the flattened accumulator layout, fastest first. rows, cols: element (r, c) of
    ``row_col_view`` is rows[r] rows and cols[c] columns after the thread's first element (``thread_row_col``).
    """

    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    shape: tuple[int, ...]


def row_col_modes(
    tiled_mma: cute.TiledMma, tile_m: int, tile_n: int, transposed: bool = False
) -> RowColModes:
    """Rows and columns of any tiled MMA's accumulator, from its partition of an identity tensor.

    transposed: the accumulator, of shape tile_m x tile_n, is the transpose of the score tile: its N modes are the
    score tile's rows. Raises ValueError if the tile is not a whole number of MMA tiles.
    """
    step_m, step_n = tiled_mma.get_tile_size(0), tiled_mma.get_tile_size(1)
    if tile_m % step_m or tile_n % step_n:
        raise ValueError(f"tile_m={tile_m}, tile_n={tile_n}: the MMA covers {step_m} x {step_n} at a time")
    coords = tiled_mma.get_slice(0).partition_C(cute.make_identity_tensor((tile_m, tile_n)))
    layout = cute.flatten(coords.layout)
    shape, strides = _leaves(layout.shape), _leaves(layout.stride)
    axes: tuple[list, list] = ([], [])
    for index, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        if extent > 1:
            axes[stride.mode[0]].append((stride.value, index, extent))
    found = [_axis(sorted(leaves)) for leaves in axes]
    (row_modes, rows), (col_modes, cols) = reversed(found) if transposed else found
    return RowColModes(row_modes, col_modes, rows, cols, shape)


def thread_row_col(
    tiled_mma: cute.TiledMma, tile_m: int, tile_n: int, thread: Any, transposed: bool = False
) -> tuple[Any, Any]:
    """(row, column) of a thread's first accumulator element in the score tile; ``thread`` may be dynamic."""
    first = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, tile_n)))[0]
    return (first[1], first[0]) if transposed else (first[0], first[1])


def row_col_view(acc: cute.Tensor, modes: RowColModes) -> cute.Tensor:
    """An accumulator of the MMA and tile of ``modes`` as a (rows, cols) tensor on the same registers.

    Raises ValueError for an accumulator of another MMA or tile.
    """
    layout = cute.flatten(acc.layout)
    shape, strides = _leaves(layout.shape), _leaves(layout.stride)
    if shape != modes.shape:
        raise ValueError(
            f"acc has modes {shape}, but row_col_modes described {modes.shape}: another MMA or tile"
        )
    picked = [
        (tuple(shape[i] for i in axis) or (1,), tuple(strides[i] for i in axis) or (0,))
        for axis in (modes.row_modes, modes.col_modes)
    ]
    view = cute.make_layout(
        tuple(extents for extents, _ in picked), stride=tuple(steps for _, steps in picked)
    )
    return cute.make_tensor(acc.iterator, view)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """The registers of an accumulator (converted to 16 bits) as the A operand of the next MMA, such as O = P V.

    For m16n8k16 ((2, 2), M, N) becomes ((2, 2, 2), M, N / 2); for wgmma ((2, 2, N / 8), M, n) becomes
    ((2, 2, 2), M, (N / 16, n)). The columns must all be in one warp or warpgroup (``warps_n`` or ``warpgroups_n`` 1).
    Raises ValueError if the number of columns is not a multiple of 16.
    """
    layout = acc.layout
    wgmma = cute.rank(layout.shape[0]) == 3
    blocks = cute.size(layout, mode=[0, 2]) if wgmma else cute.size(layout, mode=[2])
    if blocks % 2:
        raise ValueError(f"acc has {blocks} blocks of 8 columns: an A operand takes 16 columns at a time")
    if wgmma:
        # Two neighbouring blocks of 8 columns make one K step.
        (s0, s1, _), (d0, d1, d2) = layout.shape[0], layout.stride[0]
        shape = ((s0, s1, 2), layout.shape[1], (blocks // 2, layout.shape[2]))
        stride = ((d0, d1, d2), layout.stride[1], (2 * d2, layout.stride[2]))
    else:
        (s0, s1), (d0, d1), dn = layout.shape[0], layout.stride[0], layout.stride[2]
        shape = ((s0, s1, 2), layout.shape[1], blocks // 2)
        stride = ((d0, d1, dn), layout.stride[1], 2 * dn)
    return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))


def _axis(leaves: list[tuple[int, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(mode indices, offset of every element along these modes); leaves: (stride, index, extent), fastest first."""
    offsets = [0]
    for stride, _, extent in leaves:
        offsets = [start + stride * step for step in range(extent) for start in offsets]
    return tuple(index for _, index, _ in leaves), tuple(offsets)


def _leaves(profile: Any) -> tuple:
    """The leaves of a nested shape or stride."""
    if isinstance(profile, tuple):
        return tuple(leaf for part in profile for leaf in _leaves(part))
    return (profile,)
