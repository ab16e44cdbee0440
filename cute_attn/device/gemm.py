"""The two matrix products of an mma.sync kernel, operands read from shared memory one step ahead of their use."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.math import opaque


@dataclass(frozen=True)
class SmemOperand:
    """A thread's part of an MMA operand in shared memory, and the registers it is read into.

    source: (copy, rows, k, stage); fragment: (mma, rows, k); view: the fragment as the copy sees it.
    """

    tiled_copy: cute.TiledCopy
    source: cute.Tensor
    fragment: cute.Tensor
    view: cute.Tensor

    @staticmethod
    def a(
        tiled_mma: cute.TiledMma, tiled_copy: cute.TiledCopy, tile: cute.Tensor, thread: Int32
    ) -> "SmemOperand":
        """The A operand (M, K) in ``tile`` (rows, cols, stage)."""
        mma = tiled_mma.get_slice(thread)
        return SmemOperand._of(
            tiled_copy, tile, mma.make_fragment_A(mma.partition_A(tile[None, None, 0])), thread
        )

    @staticmethod
    def b(
        tiled_mma: cute.TiledMma, tiled_copy: cute.TiledCopy, tile: cute.Tensor, thread: Int32
    ) -> "SmemOperand":
        """The B operand (N, K) in ``tile`` (rows, cols, stage)."""
        mma = tiled_mma.get_slice(thread)
        return SmemOperand._of(
            tiled_copy, tile, mma.make_fragment_B(mma.partition_B(tile[None, None, 0])), thread
        )

    @staticmethod
    def _of(
        tiled_copy: cute.TiledCopy, tile: cute.Tensor, fragment: cute.Tensor, thread: Int32
    ) -> "SmemOperand":
        mine = tiled_copy.get_slice(thread)
        return SmemOperand(tiled_copy, mine.partition_S(tile), fragment, mine.retile(fragment))

    def load(self, k: int, stage: Int32) -> None:
        """Read step k of ``stage`` into the fragment."""
        cute.copy(self.tiled_copy, self.source[None, None, k, stage], self.view[None, None, k])

    def load_piece(self, piece: int, k: int, stage: Int32) -> None:
        """Read one ldmatrix.x4 of step k: 16 rows of the operand."""
        cute.copy(self.tiled_copy, self.source[None, piece, k, stage], self.view[None, piece, k])

    def anew(self) -> "SmemOperand":
        """The same, its addresses computed here rather than kept in registers through a loop."""
        source = cute.make_tensor(self.source.iterator + cute.assume(opaque(Int32(0)), divby=512), self.source.layout)
        return SmemOperand(self.tiled_copy, source, self.fragment, self.view)

    @property
    def pieces(self) -> int:
        """ldmatrix.x4 of a step."""
        return cute.size(self.view, mode=[1])

    def load_all(self) -> None:
        """Read every step of the first stage: the operand stays in registers from here on."""
        for k in range(self.steps):
            self.load(k, 0)

    @property
    def steps(self) -> int:
        """Steps of the MMA along K."""
        return cute.size(self.fragment, mode=[2])


@cute.jit
def gemm(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: SmemOperand,
    b: SmemOperand,
    stage: Int32,
    a_in_regs: Constexpr = False,
) -> None:
    """acc += A B^T with both operands in shared memory, or A already in its fragment."""
    a, b = a.anew(), b.anew()
    if cutlass.const_expr(not a_in_regs):
        a.load(0, 0)
    b.load_piece(0, 0, stage)
    for k in cutlass.range_constexpr(b.steps):
        if cutlass.const_expr(not a_in_regs and k + 1 < b.steps):
            a.load(k + 1, 0)
        _multiply_step(tiled_mma, acc, a.fragment[None, None, k], b, k, stage)


@cute.jit
def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, stage: Int32) -> None:
    """acc += A B^T with A in registers, as ``layouts.as_operand_a`` gives it."""
    b = b.anew()
    b.load_piece(0, 0, stage)
    for k in cutlass.range_constexpr(b.steps):
        _multiply_step(tiled_mma, acc, a[None, None, k], b, k, stage)


@cute.jit
def _multiply_step(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, k: Constexpr, stage: Int32
) -> None:
    """One step along K, B read one ldmatrix ahead of the two columns of instructions that it feeds.

    Reading a whole step ahead would hold twice the step in registers, which 128 columns do not leave room for.
    """
    acc_pieces = cute.logical_divide(acc, (None, None, 2))
    b_pieces = cute.logical_divide(b.fragment, (None, 2, None))
    for piece in cutlass.range_constexpr(b.pieces):
        if cutlass.const_expr(piece + 1 < b.pieces):
            b.load_piece(piece + 1, k, stage)
        elif cutlass.const_expr(k + 1 < b.steps):
            b.load_piece(0, k + 1, stage)
        target = acc_pieces[None, None, (None, piece)]
        cute.gemm(tiled_mma, target, a, b_pieces[None, (None, piece), k], target)
