"""What a Hopper backward of some traits and tile does, of all that it could: yes or no, before anything is compiled."""

import functools
from dataclasses import dataclass

from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.kernels.backward_sm90.layouts import BackwardSm90Layouts


@dataclass(frozen=True)
class BackwardSm90Predicates(BackwardSm90Layouts):
    """Decided by the traits and the tile, and by the registers that compilers turned out to have for them."""

    @property
    def loads_bias_by_tma(self) -> bool:
        """Whether TMA brings the bias: its strides and its address then have to be as those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """Whether TMA stores the bias's gradient from where dS lies: as it reads the bias, and not broadcast."""
        traits, same = (
            self.traits,
            self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient,
        )
        return self.loads_bias_by_tma and traits.bias_grad and same

    @property
    def is_crowded(self) -> bool:
        """Whether a register that lasts through the main loop is one too many, as compilers showed."""
        traits, wide = self.traits, self.tile.tile_m == 128
        both = traits.windowed and traits.varlen
        any_of_them = bool(traits.windowed or traits.varlen or traits.alibi or traits.dropout)
        return both or (wide and any_of_them)

    @property
    def reads_lse_first(self) -> bool:
        """Whether registers are left for log-sum-exps while products run: by a mask's drawing and derivatives not."""
        draws = self.traits.dropout and not self.tile.mask_warps
        return not (self.loads_bias_by_tma or draws or self.traits.softcap)

    @property
    def dp_starts_from_d(self) -> bool:
        """Whether the product dP is added to -D, and nobody subtracts D afterwards.

        Not under dropout, where an element is -D without dP if it is dropped.
        """
        return not self.traits.dropout

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)
