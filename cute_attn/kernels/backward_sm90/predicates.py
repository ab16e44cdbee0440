"""Which code paths a Hopper backward of some traits and tile takes, decided before compiling."""

import functools
from dataclasses import dataclass

from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.kernels.backward_sm90.layouts import BackwardSm90Layouts


@dataclass(frozen=True)
class BackwardSm90Predicates(BackwardSm90Layouts):
    """Predicates of the traits and the tile; some are measured: where ptxas had registers left."""

    @property
    def loads_bias_by_tma(self) -> bool:
        """Whether TMA loads the bias: its strides and its address are then bound as those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """Whether TMA stores the bias's gradient from dS's shared memory: of the bias's dtype, not broadcast."""
        traits, same = (
            self.traits,
            self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient,
        )
        return self.loads_bias_by_tma and traits.bias_grad and same

    @property
    def rematerializes_thread(self) -> bool:
        """Whether the thread index is recomputed for each key block: one register less through the main loop."""
        traits, wide = self.traits, self.tile.tile_m == 128
        both = traits.windowed and traits.varlen
        any_of_them = bool(traits.windowed or traits.varlen or traits.alibi or traits.dropout)
        return both or (wide and any_of_them)

    @property
    def reads_lse_first(self) -> bool:
        """Whether registers are left for log-sum-exps while products run: not beside a mask or a derivative."""
        draws = self.traits.dropout and not self.tile.mask_warps
        return not (self.loads_bias_by_tma or draws or self.traits.softcap)

    @property
    def dp_starts_from_d(self) -> bool:
        """Whether dP's accumulator starts from -D, so that D needs no subtraction.

        Not under dropout: a dropped element is -D without dP.
        """
        return not self.traits.dropout

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)
