"""Split-KV: each query block has the same number of splits, or splits of the same number of keys, one CTA per split.

Every split has a place for its partial result, so that the combine kernel merges them all. A split without key blocks
has an LSE of -inf.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cute_attn.work.block_range import BlockRange


class Partials(NamedTuple):
    """Partial results as kernel arguments, fp32.

    Attributes:
        out, lse: with the trait split "parts" (parts, batch, seqlen_q, nheads, head_dim_v) and (parts, batch, nheads,
            seqlen_q), with packed rows as one batch; with "shares" (2 * slots, tile_m, head_dim_v) and
            (2 * slots, tile_m), a work tile's rows at each index, in the tile's order.
        parts: number of splits of a query block; unused with "shares".
        part_keys: keys of a split, a multiple of the tile's tile_n, or 0 for splits of equal size.
    """

    out: cute.Tensor
    lse: cute.Tensor
    parts: Int32
    part_keys: Int32


@dataclass(frozen=True)
class KeyPart:
    """The key blocks [begin, end) of a work tile, and the place of its result.

    Attributes:
        partial: the index of the partial result, or -1 for a final result.
    """

    begin: Int32
    end: Int32
    partial: Int32

    @staticmethod
    @cute.jit
    def of(blocks: BlockRange, part: Int32, partials: Partials, tile_n: cutlass.Constexpr) -> "KeyPart":
        """Split ``part`` of ``blocks``; splits of ``part_keys`` keys count from row 0, whatever is visible."""
        begin, end = blocks.begin, blocks.end
        if partials.part_keys > 0:
            size = partials.part_keys // tile_n
            begin = cutlass.min(cutlass.max(begin, part * size), end)
            end = cutlass.max(cutlass.min(end, (part + 1) * size), begin)
        else:
            count = end - begin
            end = begin + (part + 1) * count // partials.parts
            begin = begin + part * count // partials.parts
        return KeyPart(begin, end, part)
