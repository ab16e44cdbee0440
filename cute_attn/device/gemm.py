"""The two matrix products of an mma.sync kernel.

ptxas hoists ldmatrix as far as registers last, and then spills values with longer lifetimes. It moves no load across
iterations: a loop over K steps, instead of unrolled code, bounds the registers of Q K^T. P V needs no such loop, since
the scores' registers are free by then.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.math import rematerialize
from layouts.mma import row_col_modes, row_col_view, thread_row_col


@dataclass(frozen=True)
class SmemOperand:
    """A thread's part of an MMA operand in shared memory, and its register fragment.

    tile: (rows, cols, stage); fragment: (mma, rows, k); view: the fragment retiled for the copy, (copy, piece, k), one
    ldmatrix a piece.
    """

    tiled_copy: cute.TiledCopy
    tile: cute.Tensor
    fragment: cute.Tensor
    view: cute.Tensor
    thread: Int32

    @staticmethod
    def a(
        tiled_mma: cute.TiledMma, tiled_copy: cute.TiledCopy, tile: cute.Tensor, thread: Int32
    ) -> "SmemOperand":
        """The A operand (M, K) in ``tile`` (rows, cols, stage)."""
        mma = tiled_mma.get_slice(thread)
        fragment = mma.make_fragment_A(mma.partition_A(tile[None, None, 0]))
        return SmemOperand(tiled_copy, tile, fragment, tiled_copy.get_slice(thread).retile(fragment), thread)

    @staticmethod
    def b(
        tiled_mma: cute.TiledMma, tiled_copy: cute.TiledCopy, tile: cute.Tensor, thread: Int32
    ) -> "SmemOperand":
        """The B operand (N, K) in ``tile`` (rows, cols, stage)."""
        mma = tiled_mma.get_slice(thread)
        fragment = mma.make_fragment_B(mma.partition_B(tile[None, None, 0]))
        return SmemOperand(tiled_copy, tile, fragment, tiled_copy.get_slice(thread).retile(fragment), thread)

    @property
    def pieces(self) -> int:
        """ldmatrix instructions of a K step."""
        return cute.size(self.view, mode=[1])

    @property
    def steps(self) -> int:
        """MMA steps along K."""
        return cute.size(self.fragment, mode=[2])

    def start(self, stage: Int32) -> Int32:
        """The address of the thread's first vector in ``stage``, rematerialized so that it occupies no register."""
        rows, cols, _ = self.tile.layout.shape
        coords = self.tiled_copy.get_slice(below_1024(rematerialize(self.thread))).partition_S(
            cute.make_identity_tensor((cute.size(rows), cute.size(cols)))
        )
        row, col = coords[0]
        return (self.tile.iterator + cute.crd2idx((row, col, stage), self.tile.layout)).toint()

    def at_step(self, start: Int32, k: Int32) -> Int32:
        """``start`` moved to step k, a dynamic value."""
        step = self._distance(0, 1) if self.steps > 1 else 0
        # Steps within a row of the layout's atom are equally far apart, and so are atoms.
        row = next((k for k in range(1, self.steps) if self._distance(0, k) != k * step), self.steps)
        atom = self._distance(0, row) if row < self.steps else 0
        in_row, size = k % row * step, self.tile.element_type.width // 8
        swizzled = in_row & swizzled_bits(self.tile.layout)
        return (start ^ (swizzled * size)) + (in_row - swizzled + k // row * atom) * size

    def address(self, start: Int32, piece: int, k: int) -> cute.Pointer:
        """The address of the thread's vector of a piece, k steps after ``start``.

        Without the swizzle, vectors are at static offsets from the first one. The swizzle is linear under xor, so one
        xor of the first address accounts for the swizzled bits, and one register serves all addresses.
        """
        distance = self._distance(piece, k)
        swizzled = distance & swizzled_bits(self.tile.layout)
        element = self.tile.element_type
        moved = start ^ (swizzled * (element.width // 8)) if swizzled else start
        return cute.make_ptr(element, moved, cute.AddressSpace.smem, assumed_align=16) + (distance - swizzled)

    def load(self, start: Int32, piece: int, k: int) -> None:
        """Load a piece into the fragment, k steps after ``start``."""
        elements = 128 // self.tile.element_type.width
        source = cute.make_tensor(self.address(start, piece, k), cute.make_layout(elements))
        cute.copy(self.tiled_copy, source, self.view[None, piece, k])

    def _distance(self, piece: int, k: int) -> int:
        """Elements from a thread's first vector to another one, without the swizzle."""
        layout = self.tile.layout
        unswizzled = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
        vectors = self.tiled_copy.get_slice(0).partition_S(cute.make_tensor(self.tile.iterator, unswizzled))
        return cute.crd2idx((0, piece, k, 0), vectors.layout)

    def load_step(self, start: Int32, k: int) -> None:
        """Load all pieces, k steps after ``start``."""
        for piece in range(self.pieces):
            self.load(start, piece, k)

    def load_all(self) -> None:
        """Load all steps of the first stage, for an operand that stays in registers."""
        start = self.start(Int32(0))
        for k in range(self.steps):
            self.load_step(start, k)


@cute.jit
def gemm(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: SmemOperand,
    b: SmemOperand,
    stage: Int32,
    unroll: Constexpr,
    a_stage: Int32 | int = 0,
) -> None:
    """acc += A B^T with both operands in shared memory; the loop over K is unrolled by ``unroll``."""
    a_start, b_start = a.start(Int32(a_stage)), b.start(stage)
    for first in cutlass.range(0, b.steps, unroll, unroll=1):
        a_here, b_here = a.at_step(a_start, first), b.at_step(b_start, first)
        for k in cutlass.range_constexpr(unroll):
            a.load_step(a_here, k)
            _step(tiled_mma, acc, a.fragment, b, b_here, k)


@cute.jit
def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, stage: Int32) -> None:
    """acc += A B^T with A in registers."""
    b_start = b.start(stage)
    for k in cutlass.range_constexpr(b.steps):
        _step(tiled_mma, acc, a, b, b_start, k)


@cute.jit
def gemm_sr(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: SmemOperand, b: cute.Tensor, stage: Int32) -> None:
    """acc += A B^T with B in registers."""
    a_start = a.start(stage)
    for k in cutlass.range_constexpr(a.steps):
        a.load_step(a_start, k)
        cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b[None, None, k], acc)


@cute.jit
def _step(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, b_start: Int32, k: Constexpr
) -> None:
    """One step along K: for each piece of B its ldmatrix, then the MMAs that read it."""
    acc_pieces = cute.logical_divide(acc, (None, None, 2))
    b_pieces = cute.logical_divide(b.fragment, (None, 2, None))
    for piece in cutlass.range_constexpr(b.pieces):
        b.load(b_start, piece, k)
        target = acc_pieces[None, None, (None, piece)]
        cute.gemm(tiled_mma, target, a[None, None, k], b_pieces[None, (None, piece), k], target)


@dataclass(frozen=True)
class SmemResult:
    """Stores a thread's part of an accumulator, in 16 bits, to row-major shared memory.

    tile: (rows, cols) of the product, or with more columns.
    """

    tiled_mma: cute.TiledMma
    shape: Constexpr  # (M, N) of the product
    tile: cute.Tensor
    thread: Int32

    def start(self) -> Int32:
        """The address of the thread's first element, rematerialized so that it occupies no register."""
        rows, cols = self.shape
        row, col = thread_row_col(self.tiled_mma, rows, cols, below_1024(rematerialize(self.thread)))
        return (self.tile.iterator + cute.crd2idx((row, col), self.tile.layout)).toint()

    def address(self, start: Int32, row: int, col: int) -> cute.Pointer:
        """The address of the pair ``row`` rows and ``col`` columns after the first, as ``SmemOperand.address``."""
        layout = self.tile.layout
        unswizzled = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
        distance = cute.crd2idx((row, col), unswizzled)
        swizzled = distance & swizzled_bits(layout)
        moved = start ^ (2 * swizzled) if swizzled else start
        pair = cute.make_ptr(Int32, moved, cute.AddressSpace.smem, assumed_align=4)
        return pair + (distance - swizzled) // 2

    def store(self, fragment: cute.Tensor, col0: int = 0) -> None:
        """Store ``fragment``, with the accumulator's layout, at column ``col0``."""
        modes = row_col_modes(self.tiled_mma, *self.shape)
        view, start = row_col_view(fragment, modes), self.start()
        pairs = cute.recast_tensor(fragment, Int32)
        pairs = cute.make_tensor(pairs.iterator, cute.make_layout(cute.size(fragment) // 2))
        for r, row in enumerate(modes.rows):
            for c in range(0, len(modes.cols), 2):
                target = self.address(start, row, modes.cols[c] + col0)
                pair = pairs[cute.crd2idx((r, c), view.layout) // 2]
                cute.make_tensor(target, cute.make_layout(1))[0] = pair


def below_1024(thread: Int32) -> Int32:
    """A thread index with a bound that the compiler can see: it is not negative, so divisions become shifts."""
    return thread & Int32(1023)


def swizzled_bits(layout: object) -> int:
    """The bits of an element offset that the layout's swizzle changes."""
    if not isinstance(layout, cute.ComposedLayout):
        return 0
    swizzle = layout.inner
    return ((1 << swizzle.num_bits) - 1) << swizzle.num_base
