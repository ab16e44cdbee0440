"""The two products of a forward on fp32 operands; for their parts see :mod:`cute_attn.device.gemm_fp32`.

A tensor core rounds its sums toward zero, which would bias long ones. So where there are three products, each few steps
along K are summed from zero, and then added to the accumulator in fp32 (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341); in P V together with the rescaling of the output so far.

In P V the step along the keys is permuted, so that the accumulator of the scores is the A operand as it is: lane t of a
quad holds keys 2t and 2t + 1, which are places t and t + 4 of the MMA's K. V is read by vectors of four columns of a
row; so the output's columns are permuted as well: see ``Fp32Rows``.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from cute_attn.device.gemm import SmemOperand, below_1024
from cute_attn.device.gemm_fp32 import Fp32Result, Split, multiply, split
from cute_attn.device.math import rematerialize
from layouts.mma import row_col_modes, row_col_view, thread_row_col

K_STEP = 8
"""Elements of a step along K."""
COLUMNS = 32
"""Columns of V, and of the output, that a warp takes at a time: four MMAs of eight."""


@cute.jit
def gemm_qk(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    q: SmemOperand,
    k: SmemOperand,
    stage: Int32,
    unroll: Constexpr,
    products: Constexpr,
) -> None:
    """acc += Q K^T with both operands in shared memory, ``unroll`` steps at a time, which are summed from zero."""
    q_start, k_start = q.start(Int32(0)), k.start(stage)
    pieces = cute.logical_divide(acc, (None, None, 2))
    k_pieces = cute.logical_divide(k.fragment, (None, 2, None))
    for first in cutlass.range(0, k.steps, unroll, unroll=1):
        q_here, k_here = q.at_step(q_start, first), k.at_step(k_start, first)
        parts = []
        for step in cutlass.range_constexpr(unroll):
            q.load_step(q_here, step)
            parts.append(split(as_fp32(q.fragment[None, None, step]), products))
        for piece in cutlass.range_constexpr(k.pieces):
            target = pieces[None, None, (None, piece)]
            total = target
            if cutlass.const_expr(products == 3):
                total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
                total.fill(0.0)
            for step in cutlass.range_constexpr(unroll):
                k.load(k_here, piece, step)
                b = split(as_fp32(k_pieces[None, (None, piece), step]), products)
                multiply(tiled_mma, total, parts[step], b)
            if cutlass.const_expr(products == 3):
                _add(target, total)


def as_fp32(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment that ldmatrix has loaded, which the MMA's layout calls tf32."""
    return cute.recast_tensor(fragment, Float32)


@cute.jit
def _add(target: cute.Tensor, total: cute.Tensor) -> None:
    for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
            for i in cutlass.range_constexpr(cute.size(target, mode=[0])):
                target[i, m, n] = target[i, m, n] + total[i, m, n]


@dataclass(frozen=True)
class Fp32Rows:
    """V in shared memory, (keys, columns, stage) in fp32 with the widest swizzle, as the B operand of P V.

    Lane (g, t) = (lane // 4, lane % 4) of a warp reads columns 32 c + 4 g to 32 c + 4 g + 3 of keys 8 s + 2 t and
    8 s + 2 t + 1: eight lanes that are served at once read all banks. Column 4 n + j of a group of 32 is column n of
    the group's MMA j; so a lane's elements of a row of the output are columns 32 c + 8 t to 32 c + 8 t + 7.

    ``warps_n`` warps divide the columns: those of ``first_col`` on are the thread's.
    """

    tile: cute.Tensor
    thread: Int32
    warps_m: Constexpr = 1
    warps_n: Constexpr = 1

    def first_col(self, thread: Int32) -> Int32:
        """The first of a thread's columns."""
        if self.warps_n == 1:
            return Int32(0)
        return thread // (32 * self.warps_m) * (cute.size(self.tile, mode=[1]) // self.warps_n)

    @property
    def steps(self) -> int:
        """MMA steps along the keys."""
        return cute.size(self.tile, mode=[0]) // K_STEP

    def starts(self, stage: Int32) -> tuple[Int32, Int32]:
        """The addresses of the thread's first vector of an even and of an odd key, rematerialized."""
        thread = below_1024(rematerialize(self.thread))
        lane = thread % 32
        row, col = lane % 4 * 2, self.first_col(thread) + lane // 4 * 4
        first, second = (
            (self.tile.iterator + cute.crd2idx((row + i, col, stage), self.tile.layout)).toint()
            for i in range(2)
        )
        return first, second

    def load(self, starts: tuple[Int32, Int32], step: int, group: int) -> cute.Tensor:
        """The (2, 4) fragment of one K step and one group of columns: four MMAs' B operands."""
        fragment, row = (
            cute.make_rmem_tensor(cute.make_layout((2, 4)), Float32),
            cute.make_rmem_tensor(4, Float32),
        )
        for i in range(2):
            source = cute.make_tensor(self.address(starts[i], step, group), cute.make_layout(4))
            cute.autovec_copy(source, row)
            for j in range(4):
                fragment[i, j] = row[j]
        return fragment

    def address(self, start: Int32, step: int, group: int) -> cute.Pointer:
        """The address of a vector from one of ``starts``: whole atoms of the layout, at static distances."""
        distance = cute.crd2idx((K_STEP * step, COLUMNS * group, 0), self.tile.layout.outer)
        return cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=16) + distance


def as_operand_a(p: cute.Tensor) -> cute.Tensor:
    """P in the layout of the scores' accumulator ((2, 2), M, N) as the A operand (4, M, N), a K step for each N.

    A lane's keys 2t and 2t + 1 become places t and t + 4; an A fragment has both rows of a place together. Registers
    are renamed, since ``cute.gemm`` takes them in their order in memory.
    """
    _, size_m, size_n = p.layout.shape
    words = cute.make_rmem_tensor(cute.make_layout((4, size_m, size_n)), p.element_type)
    for n in range(size_n):
        for m in range(size_m):
            for key in range(2):
                for row in range(2):
                    words[row + 2 * key, m, n] = p[(key, row), m, n]
    return words


@cute.jit
def gemm_pv(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: Split,
    v: Fp32Rows,
    stage: Int32,
    factors: cute.Tensor,
    products: Constexpr,
) -> None:
    """acc = factors * acc + P V, acc ((2, 2), M, columns / 8), factors (2 M): of the rows of each M, two by two.

    a: P, of :func:`as_operand_a` or read from where :class:`PermutedResult` stored it.
    """
    starts = v.starts(stage)
    groups = cute.logical_divide(acc, (None, None, 4))
    for group in cutlass.range_constexpr(cute.size(acc, mode=[2]) // 4):
        target = groups[None, None, (None, group)]
        total = target
        if cutlass.const_expr(products == 3):
            total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
            total.fill(0.0)
        else:
            _scale(target, factors)
        for step in cutlass.range_constexpr(v.steps):
            own = Split(a.high[None, None, step], None if a.low is None else a.low[None, None, step])
            multiply(tiled_mma, total, own, split(v.load(starts, step, group), products))
        if cutlass.const_expr(products == 3):
            scale_and_add(target, total, factors)


@cute.jit
def _scale(target: cute.Tensor, factors: cute.Tensor) -> None:
    for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
            for i in cutlass.range_constexpr(4):
                target[i, m, n] = target[i, m, n] * factors[i // 2 + 2 * m]


@cute.jit
def scale_and_add(target: cute.Tensor, total: cute.Tensor, factors: cute.Tensor) -> None:
    for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
            for i in cutlass.range_constexpr(4):
                target[i, m, n] = target[i, m, n] * factors[i // 2 + 2 * m] + total[i, m, n]


@dataclass(frozen=True)
class PermutedResult(Fp32Result):
    """Stores P so that it is read as :func:`as_operand_a` has it: keys 2t and 2t + 1 at places t and t + 4."""

    def start(self) -> Int32:
        """The address of the thread's first element, rematerialized so that it occupies no register."""
        rows, cols = self.shape
        row, col = thread_row_col(self.tiled_mma, rows, cols, below_1024(rematerialize(self.thread)))
        return (self.tile.iterator + cute.crd2idx((row, col - col % 8 // 2), self.tile.layout)).toint()

    def store(self, fragment: cute.Tensor, col0: int = 0) -> None:
        """Store ``fragment``, with the accumulator's layout, at column ``col0``."""
        modes = row_col_modes(self.tiled_mma, *self.shape)
        view, start = row_col_view(fragment, modes), self.start()
        for r, row in enumerate(modes.rows):
            for c in range(0, len(modes.cols), 2):
                for odd in range(2):
                    at = self.address(start, row, modes.cols[c] + col0 + 4 * odd).toint()
                    word = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4)
                    cute.make_tensor(word, cute.make_layout(1))[0] = view[r, c + odd]


@cute.jit
def store_rows(
    o: cute.Tensor,
    acc: cute.Tensor,
    rows: tuple,
    row0: Int32,
    seqlen: Int32,
    col0: Int32,
    head_dim: Constexpr,
    aligned: Constexpr = True,
) -> None:
    """Store the output of :func:`gemm_pv` to o, (seqlen, head_dim), by vectors of four columns.

    rows: the offset of each of the thread's rows from its first one, ``row0``; col0: its first column. aligned: whether
    vectors of o start at multiples of 16 bytes; else single elements are stored.
    """
    vector = cute.make_rmem_tensor(4, Float32)
    for r in cutlass.range_constexpr(len(rows)):
        row = row0 + rows[r]
        for group in cutlass.range_constexpr(cute.size(acc, mode=[2]) // 4):
            for half in cutlass.range_constexpr(2):
                col = col0 + (COLUMNS * group + 4 * half)
                for j in cutlass.range_constexpr(4):
                    vector[j] = acc[half + 2 * (r % 2), r // 2, 4 * group + j]
                if cutlass.const_expr(aligned):
                    if (row < seqlen) & (col < head_dim):
                        target = cute.make_tensor(
                            (o.iterator + cute.crd2idx((Int64(row), col), o.layout)).align(16),
                            cute.make_layout(4),
                        )
                        cute.autovec_copy(vector, target)
                else:
                    for j in cutlass.range_constexpr(4):
                        if (row < seqlen) & (col + j < head_dim):
                            at = o.iterator + cute.crd2idx((Int64(row), Int64(col + j)), o.layout)
                            cute.make_tensor(at, cute.make_layout(1))[0] = vector[j]
