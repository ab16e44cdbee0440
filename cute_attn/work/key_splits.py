"""Split-KV: each query block has the same number of splits, or splits of the same number of keys, one CTA per split.

The workspace has room for the partial results of all splits, and the combine kernel merges all of them. A split without
key blocks has an LSE of -inf.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cute_attn.work.block_range import BlockRange


class Partials(NamedTuple):
    """Partial results as kernel arguments, fp32.

    Attributes:
        out, lse: with the trait split "fixed" (num_splits, batch, seqlen_q, nheads, head_dim_v) and (num_splits, batch,
            nheads, seqlen_q), where packed rows are one batch; with "stream_k" (2 * CTAs, tile_m, head_dim_v) and
            (2 * CTAs, tile_m), where each index has the rows of one work tile, in the tile's order.
        num_splits: number of splits per query block; unused with "stream_k".
        split_keys: number of keys per split, a multiple of the tile's tile_n, or 0 for splits of equal size.
    """

    out: cute.Tensor
    lse: cute.Tensor
    num_splits: Int32
    split_keys: Int32


@dataclass(frozen=True)
class KeySplit:
    """The key blocks [begin, end) of a work tile, and the place of its result.

    Attributes:
        partial: the index of the partial result, or -1 for a final result.
    """

    begin: Int32
    end: Int32
    partial: Int32

    @staticmethod
    @cute.jit
    def of(blocks: BlockRange, split: Int32, partials: Partials, tile_n: cutlass.Constexpr) -> "KeySplit":
        """Split ``split`` of ``blocks``; splits of ``split_keys`` keys are counted from row 0, visible or not."""
        begin, end = blocks.begin, blocks.end
        if partials.split_keys > 0:
            size = partials.split_keys // tile_n
            begin = cutlass.min(cutlass.max(begin, blocks.step_from(split * size)), end)
            end = cutlass.max(cutlass.min(end, blocks.step_from((split + 1) * size)), begin)
        else:
            # split * count // num_splits, of quotient and remainder: the product may exceed 32 bits.
            count, num_splits = end - begin, partials.num_splits
            size = count // num_splits
            rest = count - size * num_splits
            end = begin + (split + 1) * size + (split + 1) * rest // num_splits
            begin = begin + split * size + split * rest // num_splits
        return KeySplit(begin, end, split)
