"""Softcap: cap * tanh(score / cap) (Gemma 2, https://arxiv.org/abs/2408.00118)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from cute_attn.device.math import TANH_UNIT, tanh_base2
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue


@dataclass(frozen=True)
class Softcap(Epilogue):
    """Leaves tanh(score / cap) in ``tile.acc``; the context's score_scale is the cap.

    The derivative 1 - tanh^2, in [0, 1], is saved. It is fp32 for fp32 operands and for the tangent of LSE, else fp16,
    half a register per element. fp16's relative rounding is at most 2^-11, and dS is rounded to 16 bits anyway; below
    its range, 6e-8, the error of tanh is larger. bf16 would round more, and 1 - tanh^2 from a saved tanh would lose its
    digits near 1.

    saves: the dtype of saved derivatives, Float16 or Float32; None to save none.
    """

    saves: type | None = None
    name = "softcap"

    def begin(self, args: tuple, context: ScoreContext) -> Float32:
        return context.softmax_scale * context.inv_score_scale * TANH_UNIT

    def forward(self, state: Float32, tile: ScoreTile, loaded=()) -> cute.Tensor | None:
        for r in range(len(tile.rows)):
            for c in range(len(tile.cols)):
                tile.acc[r, c] = tanh_base2(tile.acc[r, c] * state)
        return self._slopes(tile) if self.saves else None

    @cute.jit
    def _slopes(self, tile: ScoreTile) -> cute.Tensor:
        """Derivatives, in register order."""
        tanh = tile.registers().load()
        slopes = cute.make_rmem_tensor(tile.registers().layout, self.saves)
        slopes.store((1.0 - tanh * tanh).to(self.saves))
        return slopes

    @cute.jit
    def backward(self, state: Float32, tile: ScoreTile, saved: cute.Tensor) -> None:
        registers = tile.registers()
        registers.store(registers.load() * saved.load().to(Float32))
