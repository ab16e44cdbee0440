"""Code paths of the Hopper backward that traits and tile decide at compile time."""

import functools
from dataclasses import dataclass

from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.kernels.backward_sm90.layouts import BackwardSm90Layouts


@dataclass(frozen=True)
class BackwardSm90Predicates(BackwardSm90Layouts):
    """Which code paths the kernel of (traits, tile) takes.

    ``rematerializes_thread`` and ``reads_lse_first`` are measured: they say where ptxas has registers left.
    """

    @property
    def loads_bias_by_tma(self) -> bool:
        """Whether TMA loads the bias; its strides and address must then be aligned like those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """Whether TMA stores dS from shared memory as the bias gradient: of one dtype, the scores' own gradient."""
        same = self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient
        return self.loads_bias_by_tma and self.traits.bias_grad and same

    @property
    def rematerializes_thread(self) -> bool:
        """Whether the thread index is recomputed for each key block instead of kept in a register.

        Without it the kernel of head dim 64 with dropout spills 8 bytes a thread.
        """
        traits = self.traits
        epilogue = traits.windowed or traits.varlen or traits.alibi or traits.dropout
        return bool((traits.windowed and traits.varlen) or (self.tile.tile_m == 128 and epilogue))

    @property
    def reads_lse_first(self) -> bool:
        """Whether a step reads LSE before it starts S and dP: later, the read waits behind them, in one queue.

        The values then occupy registers beside both products. Read first, those of the kernel of head dim 64 with a
        TMA-loaded bias spill 48 bytes a thread. Nor beside a softcap's derivative, or a mask generated meanwhile.
        """
        generates_mask = self.traits.dropout and not self.tile.mask_warps
        return not (self.loads_bias_by_tma or generates_mask or self.traits.softcap)

    @property
    def dp_starts_from_d(self) -> bool:
        """Whether dP's accumulator is initialized with -D, which saves the subtraction.

        Not with dropout: dS of a dropped element is -P D, without its dP.
        """
        return not self.traits.dropout

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)
