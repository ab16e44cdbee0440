"""The two matrix products of an mma.sync kernel.

Operands are read where they are used: ptxas spreads the ldmatrix among the mma by itself, and reading a step ahead by hand
left its code as it was.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.math import anew


@dataclass(frozen=True)
class SmemOperand:
    """A thread's part of an MMA operand in shared memory, and the registers it is read into.

    tile: (rows, cols, stage); source: (copy, rows, k, stage); fragment: (mma, rows, k); view: the fragment as the copy
    sees it.
    """

    tiled_copy: cute.TiledCopy
    tile: cute.Tensor
    source: cute.Tensor
    fragment: cute.Tensor
    view: cute.Tensor
    thread: Int32

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
        return SmemOperand(tiled_copy, tile, mine.partition_S(tile), fragment, mine.retile(fragment), thread)

    def anew(self) -> "SmemOperand":
        """The same, its addresses computed here rather than kept in registers through a loop."""
        return SmemOperand._of(self.tiled_copy, self.tile, self.fragment, anew(self.thread))

    def load(self, k: int, stage: Int32) -> None:
        """Read step k of ``stage`` into the fragment."""
        cute.copy(self.tiled_copy, self.source[None, None, k, stage], self.view[None, None, k])

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
    for k in cutlass.range_constexpr(b.steps):
        if cutlass.const_expr(not a_in_regs):
            a.load(k, 0)
        b.load(k, stage)
        cute.gemm(tiled_mma, acc, a.fragment[None, None, k], b.fragment[None, None, k], acc)


@cute.jit
def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, stage: Int32) -> None:
    """acc += A B^T with A in registers, as ``layouts.as_operand_a`` gives it."""
    b = b.anew()
    for k in cutlass.range_constexpr(b.steps):
        b.load(k, stage)
        cute.gemm(tiled_mma, acc, a[None, None, k], b.fragment[None, None, k], acc)
