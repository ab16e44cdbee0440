"""What a Hopper backward of some traits and tile does, of all that it could: yes or no, before anything is compiled."""

import functools
from dataclasses import dataclass

from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.kernels.backward_sm90_layouts import BackwardSm90Layouts


@dataclass(frozen=True)
class BackwardSm90Choices(BackwardSm90Layouts):
    """Decided by the traits and the tile, and by the registers that compilers turned out to have for them."""

    @property
    def stages_bias(self) -> bool:
        """Whether TMA brings the bias: its strides and its address then have to be as those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """Whether TMA stores the bias's gradient from where dS lies: as it reads the bias, and not broadcast."""
        traits, same = (
            self.traits,
            self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient,
        )
        return self.stages_bias and traits.bias_grad and same and self.tile.dq_late > 0

    @property
    def is_crowded(self) -> bool:
        """Whether a register that lasts through the main loop is one too many, as compilers showed."""
        traits, wide = self.traits, self.tile.tile_m == 128
        both = traits.windowed and traits.varlen
        any_of_them = bool(traits.windowed or traits.varlen or traits.alibi or traits.dropout)
        return self.reads_ahead or both or (wide and any_of_them)

    @property
    def reads_lse_first(self) -> bool:
        """Whether registers are left for log-sum-exps while products run: by a mask's drawing and derivatives not."""
        draws = self.traits.dropout and not self.tile.mask_warps
        return not (self.stages_bias or draws or self.traits.softcap)

    @property
    def dp_starts_from_d(self) -> bool:
        """Whether the product dP is added to -D, and nobody subtracts D afterwards.

        Not under dropout, where an element is -D without dP if it is dropped; by pairs it made no difference.
        """
        return not self.traits.dropout

    @property
    def ds_by_pairs(self) -> bool:
        """Whether P and dP - D are multiplied in 16 bits: half the instructions, and a rounding more.

        Of bf16, which has the range of fp32, and where nobody derives further from dS in fp32.
        """
        last = self.epilogues.keeps_gradients or self.stores_bias_gradient
        return self.traits.dtype == "bf16" and self.tile.p_rounded and last

    @property
    def reads_ahead(self) -> bool:
        """Whether a step ends by waiting for the next one's operands and reading what belongs to their rows.

        Where registers are left for that, which is with few queries, and with dS by pairs. With packed sequences it was
        no faster, and with used lengths of queries some spilled.
        """
        tile, own_lengths = self.tile, self.traits.varlen or self.traits.seqused_q
        if own_lengths or not (tile.dq_late and self.reads_lse_first and self.dp_starts_from_d):
            return False
        several = min(tile.num_stages_q, tile.num_stages_do) > 1
        return several and tile.tile_m <= 64 and self.ds_by_pairs

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)
