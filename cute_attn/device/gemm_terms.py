"""Operands of fp32 matrix products in shared memory; the loop of :mod:`cute_attn.device.gemm` multiplies their terms.

    StoredTerms   fp16 terms, split by another kernel or by the store of P; ldmatrix reads each term
    SplitOnLoad   fp32, loaded by ldmatrix and split into tf32 terms in registers
    Fp32Operand   the same, or loaded word by word if rows (M or N) are contiguous, not k
    Fp32Values    V of the forward: fp32, loaded by vectors of four columns and split in the same way

m16n8k8 of tf32 reads fp32 registers. ldmatrix moves 8 x 4 fp32 as it moves 8 x 8 16-bit elements, but cannot transpose
them. Any order of k gives the same product if both operands use it. If an accumulator is the A operand,
lane t of a quad holds columns 2 t and 2 t + 1, which become places t and t + 4 of k (``paired``).
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Constexpr, Float16, Float32, Int32, TFloat32, cute
from cutlass.cute.nvgpu import warp

from cute_attn.device.gemm import (
    SmemOperand,
    SmemResult,
    below_1024,
    moved_by,
    moved_to_step,
    swizzled_bits,
    unswizzled,
)
from cute_attn.device.math import rematerialize
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.terms import Terms, split
from layouts.mma import row_col_modes, row_col_view, thread_row_col

K = 8
"""Elements along K of one step in tf32."""
COLUMNS = 32
"""Columns of V and of the output that a warp computes at a time: four MMAs of eight."""
_WORDS = 4

# ---- fp16 terms in shared memory ----


@dataclass(frozen=True)
class StoredTerms:
    """A thread's slice of an operand that is stored as fp16 terms.

    Attributes:
        each: one operand per term, all in the same tile.
        planes: number of terms stored as consecutive stages of the tile; 1 if rows contain all terms.
    """

    each: tuple[SmemOperand, ...]
    planes: Constexpr = 1

    loads_ahead = True
    width = 2

    @staticmethod
    def in_planes(make: Any, count: int, apart: int, *args: Any) -> "StoredTerms":
        """Terms that start at every ``apart`` elements. make: ``SmemOperand.a`` or ``.b``; args: its arguments."""
        return StoredTerms(tuple(make(*args, offset=t * apart) for t in range(count)), count)

    @staticmethod
    def in_rows(make: Any, count: int, along_k: bool, *args: Any) -> "StoredTerms":
        """Terms stored one after the other in each row of memory; rows run along K, or along M or N."""
        shape = [cute.size(args[2], mode=[i]) for i in range(2)]
        shape[along_k] //= count
        one = make(*args, tuple(shape))
        apart = {"first_step": one.steps} if along_k else {"first_subtile": one.subtiles}
        places = ({name: t * n for name, n in apart.items()} for t in range(1, count))
        return StoredTerms((one, *(make(*args, tuple(shape), **place) for place in places)))

    @property
    def thread(self) -> Int32:
        return self.each[0].thread

    @property
    def subtiles(self) -> int:
        """Number of ldmatrix instructions per K step and term."""
        return self.each[0].subtiles

    @property
    def steps(self) -> int:
        """Number of MMA steps along K."""
        return self.each[0].steps

    @property
    def terms(self) -> Terms:
        """The terms' fragments, for an operand that stays in registers."""
        return tuple(x.fragment for x in self.each)

    def start(self, stage: Int32) -> tuple[Int32, ...]:
        """For each term, the address of the thread's first vector in ``stage``, without the term's offset."""
        return (self.each[0].start(stage if self.planes == 1 else self.planes * stage),) * len(self.each)

    def at_step(self, starts: tuple[Int32, ...], k: Int32) -> tuple[Int32, ...]:
        """``starts`` moved to step k, which may be dynamic."""
        return tuple(x.at_step(start, k) for x, start in zip(self.each, starts, strict=True))

    def load_a(self, starts: tuple[Int32, ...], k: int) -> Terms:
        """Load all sub-tiles of A, k steps after ``starts``."""
        return tuple(x.load_a(start, k)[0] for x, start in zip(self.each, starts, strict=True))

    def load_b(self, starts: tuple[Int32, ...], subtile: int, k: int) -> Terms:
        """Load a sub-tile of B, k steps after ``starts``."""
        return tuple(x.load_b(start, subtile, k)[0] for x, start in zip(self.each, starts, strict=True))

    def load_all(self) -> None:
        """Load all steps of the first stage, for an operand that stays in registers."""
        for term in self.each:
            term.load_all()


# ---- fp32 in shared memory ----


@dataclass(frozen=True)
class SplitOnLoad(SmemOperand):
    """An operand that ldmatrix loads as fp32, split into ``count`` tf32 terms in registers."""

    count: Constexpr = 1

    loads_ahead = False

    @property
    def terms(self) -> Terms:
        return self._split((self.fragment,))

    def load_a(self, start: Int32, k: int) -> Terms:
        return self._split(super().load_a(start, k))

    def load_b(self, start: Int32, subtile: int, k: int) -> Terms:
        return self._split(super().load_b(start, subtile, k))

    def _split(self, loaded: Terms) -> Terms:
        words = cute.recast_tensor(loaded[0], Float32)  # the MMA's layout calls it tf32
        return split(words, TFloat32, self.count)


@dataclass(frozen=True)
class Fp32Operand:
    """A thread's slice of an fp32 operand, split into tf32 terms as it is loaded.

    Attributes:
        tile: (rows, k, stage); rows are M or N.
        count: number of terms.
        warps_m: warps along M.
        warps: warps along M or N, a power of 2.
        is_a: True for the A operand, False for B.
        by_words: rows are contiguous, not k.
        paired: lane (g, t) holds k = 2 t and 2 t + 1, not t and t + 4. Requires ``by_words``; a swizzled tile then has
            no bank conflicts.
    """

    tile: cute.Tensor
    thread: Int32
    count: Constexpr
    warps_m: Constexpr
    warps: Constexpr
    is_a: Constexpr
    by_words: Constexpr
    paired: Constexpr

    loads_ahead = False
    width = 2

    @property
    def subtiles(self) -> int:
        """Number of sub-tiles per warp, 16 rows each: one m16 of A, or two n8 of B."""
        return cute.size(self.tile, mode=[0]) // (16 * self.warps)

    @property
    def steps(self) -> int:
        """Number of MMA steps along K."""
        return cute.size(self.tile, mode=[1]) // K

    def start(self, stage: Int32) -> Int32:
        """The address of the thread's first word or vector in ``stage``, rematerialized like ``SmemOperand.start``."""
        thread = below_1024(rematerialize(self.thread))
        lane, index = thread % 32, thread // 32
        index = index % self.warps_m if self.is_a else index // self.warps_m
        row = index * (16 if self.is_a else 8)
        if self.by_words:
            row, k = row + lane // 4, lane % 4 * (2 if self.paired else 1)
        else:  # lane i has the address of row i % 8 of matrix i // 8
            matrix = lane // 8
            half_row, half_k = (matrix % 2, matrix // 2) if self.is_a else (matrix // 2, matrix % 2)
            row, k = row + lane % 8 + half_row * self._half_row, half_k * 4
        return (self.tile.iterator + cute.crd2idx((row, k, stage), self.tile.layout)).toint()

    @property
    def _half_row(self) -> int:
        """Distance from a row of a sub-tile to its counterpart in the other half."""
        return 8 if self.is_a else 8 * self.warps

    def at_step(self, start: Int32, k: Int32) -> Int32:
        """``start`` moved to step k, which may be dynamic."""
        return moved_to_step(self.tile, start, k, self.steps, lambda n: self._distance(0, n))

    def _distance(self, row: int, step: int, k: int = 0) -> int:
        """Distance in elements from the thread's first element to a later one, without the swizzle."""
        return cute.crd2idx((row, K * step + k, 0), unswizzled(self.tile.layout))

    def load(self, start: Int32, subtile: int, step: int) -> cute.Tensor:
        """Load the 4 fp32 registers of a sub-tile, ``step`` steps after ``start``.

        A: rows g and g + 8 of the first k, then of the second k. B: both k of the first n8, then of the second n8.
        """
        words = cute.make_rmem_tensor(4, Float32)
        pointers = self.pointers(start, subtile, step)
        if self.by_words:
            for i in range(4):
                words[i] = cute.make_tensor(pointers[i], cute.make_layout(1))[0]
        else:
            vector = cute.make_layout((8, 1))
            cute.copy(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), Float16),
                cute.make_tensor(cute.recast_ptr(pointers[0], dtype=Float16), vector),
                cute.make_tensor(cute.recast_tensor(words, Float16).iterator, vector),
            )
        return words

    def load_a(self, start: Int32, step: int) -> Terms:
        """Load all sub-tiles of A, (4, M), ``step`` steps after ``start``."""
        words = cute.make_rmem_tensor(cute.make_layout((4, self.subtiles)), Float32)
        for subtile in range(self.subtiles):
            loaded = self.load(start, subtile, step)
            for i in range(4):
                words[i, subtile] = loaded[i]
        return split(words, TFloat32, self.count)

    def load_b(self, start: Int32, subtile: int, step: int) -> Terms:
        """Load a sub-tile of B, (2, 2), ``step`` steps after ``start``."""
        words = cute.make_tensor(self.load(start, subtile, step).iterator, cute.make_layout((2, 2)))
        return split(words, TFloat32, self.count)

    def pointers(self, start: Int32, subtile: int, step: int) -> list[cute.Pointer]:
        """The thread's addresses in a sub-tile: of one matrix row for ldmatrix, or of each of its 4 words."""
        row = 16 * self.warps * subtile
        if not self.by_words:
            return [moved_by(self.tile, start, self._distance(row, step), 16)]
        starts, rows = (start, self._second_k(start)), (row, row + self._half_row)
        halves = (
            [(k, r) for k in range(2) for r in range(2)]
            if self.is_a
            else [(k, r) for r in range(2) for k in range(2)]
        )
        return [moved_by(self.tile, starts[k], self._distance(rows[r], step), 4) for k, r in halves]

    def _second_k(self, start: Int32) -> Int32:
        """``start`` moved to the lane's second k, a later row of the tile in memory, which is swizzled differently."""
        layout = self.tile.layout
        rows = 1 if self.paired else 4  # the first k has none of these bits
        distance = self._distance(0, 0, rows)
        if not isinstance(layout, cute.ComposedLayout):
            return start + distance * _WORDS
        swizzle = layout.inner
        changed = (distance >> swizzle.num_shift) & swizzled_bits(layout)
        return (start ^ (changed * _WORDS)) + distance * _WORDS


@dataclass(frozen=True)
class Fp32Values:
    """V in shared memory, (keys, columns, stage) in fp32 with the widest swizzle, as the B operand of P V.

    Lane (g, t) = (lane // 4, lane % 4) of a warp reads columns 32 c + 4 g to 32 c + 4 g + 3 of keys 8 s + 2 t and
    8 s + 2 t + 1: eight lanes that are served at once read all banks. Column 4 n + j of a group of 32 is column n of
    the group's MMA j; so a lane's elements of a row of the output are columns 32 c + 8 t to 32 c + 8 t + 7.

    ``warps_n`` warps divide the columns; the thread's columns start at ``first_col``.
    """

    tile: cute.Tensor
    thread: Int32
    count: Constexpr  # number of tf32 terms
    warps_m: Constexpr = 1
    warps_n: Constexpr = 1

    loads_ahead = False
    width = 4

    def first_col(self, thread: Int32) -> Int32:
        """The first of a thread's columns."""
        if self.warps_n == 1:
            return Int32(0)
        return thread // (32 * self.warps_m) * (cute.size(self.tile, mode=[1]) // self.warps_n)

    @property
    def subtiles(self) -> int:
        """Number of column groups."""
        return cute.size(self.tile, mode=[1]) // (COLUMNS * self.warps_n)

    @property
    def steps(self) -> int:
        """Number of MMA steps along the keys."""
        return cute.size(self.tile, mode=[0]) // K

    def start(self, stage: Int32) -> tuple[Int32, Int32]:
        """The addresses of the thread's first vectors in an even and an odd key, rematerialized."""
        thread = below_1024(rematerialize(self.thread))
        lane = thread % 32
        row, col = lane % 4 * 2, self.first_col(thread) + lane // 4 * 4
        first, second = (
            (self.tile.iterator + cute.crd2idx((row + i, col, stage), self.tile.layout)).toint()
            for i in range(2)
        )
        return first, second

    def load_b(self, starts: tuple[Int32, Int32], group: int, step: int) -> Terms:
        """Load the B operands of four MMAs, (2, 4): one group of columns in one step along the keys."""
        fragment, row = (
            cute.make_rmem_tensor(cute.make_layout((2, 4)), Float32),
            cute.make_rmem_tensor(4, Float32),
        )
        for i in range(2):
            source = cute.make_tensor(self.address(starts[i], step, group), cute.make_layout(4))
            cute.autovec_copy(source, row)
            for j in range(4):
                fragment[i, j] = row[j]
        return split(fragment, TFloat32, self.count)

    def output_rows(
        self, acc: cute.Tensor, score_map: ScoreMap, thread: Int32
    ) -> tuple[cute.Tensor, ScoreMap]:
        """The accumulator of P V as (rows, columns), with the thread's columns in ascending order, and its score map.

        score_map: a map with the accumulator's rows; its columns are replaced.
        """
        (key, row), m, n = acc.layout.stride
        groups = cute.size(acc, mode=[2]) // 4
        shape = ((2, cute.size(acc, mode=[1])), (4, 2, groups))
        view = cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=((row, m), (n, key, 4 * n))))
        cols = tuple(COLUMNS * group + col for group in range(groups) for col in range(8))
        modes = replace(score_map.modes, cols=cols)
        return view, replace(score_map, modes=modes, thr_col=self.first_col(thread) + thread % 4 * 8)

    def address(self, start: Int32, step: int, group: int) -> cute.Pointer:
        """The address of a vector: a static distance of whole layout atoms from ``start``, one of the ``starts``."""
        distance = cute.crd2idx((K * step, COLUMNS * group, 0), self.tile.layout.outer)
        return cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=16) + distance


def paired_operand_a(p: cute.Tensor) -> cute.Tensor:
    """P in the layout of the scores' accumulator ((2, 2), M, N) as the A operand (4, M, N), one K step per N.

    A lane's columns 2t and 2t + 1 become places t and t + 4; both rows of a place are adjacent in an A fragment.
    Registers are only renamed: ``cute.gemm`` reads them in memory order.
    """
    _, size_m, size_n = p.layout.shape
    words = cute.make_rmem_tensor(cute.make_layout((4, size_m, size_n)), p.element_type)
    for n in range(size_n):
        for m in range(size_m):
            for key in range(2):
                for row in range(2):
                    words[row + 2 * key, m, n] = p[(key, row), m, n]
    return words


# ---- results in shared memory ----


@dataclass(frozen=True)
class Fp32Result(SmemResult):
    """Like :class:`SmemResult`, but in fp32."""

    def store(self, terms: Terms, col0: int = 0) -> None:
        """Store the single fragment in ``terms``, with the accumulator's layout, at column ``col0``."""
        modes = row_col_modes(self.tiled_mma, *self.shape)
        view, start = row_col_view(terms[0], modes), self.start()
        pair = cute.make_rmem_tensor(2, Float32)
        for r, row in enumerate(modes.rows):
            for c in range(0, len(modes.cols), 2):
                pair[0], pair[1] = view[r, c], view[r, c + 1]
                target = self.address(start, row, modes.cols[c] + col0)
                cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))


@dataclass(frozen=True)
class PairedResult(Fp32Result):
    """Stores P in the order of :func:`paired_operand_a`: keys 2t and 2t + 1 at places t and t + 4."""

    def start(self) -> Int32:
        rows, cols = self.shape
        row, col = thread_row_col(self.tiled_mma, rows, cols, below_1024(rematerialize(self.thread)))
        return (self.tile.iterator + cute.crd2idx((row, col - col % 8 // 2), self.tile.layout)).toint()

    def store(self, terms: Terms, col0: int = 0) -> None:
        modes = row_col_modes(self.tiled_mma, *self.shape)
        view, start = row_col_view(terms[0], modes), self.start()
        for r, row in enumerate(modes.rows):
            for c in range(0, len(modes.cols), 2):
                for odd in range(2):
                    at = self.address(start, row, modes.cols[c] + col0 + 4 * odd).toint()
                    word = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4)
                    cute.make_tensor(word, cute.make_layout(1))[0] = view[r, c + odd]
