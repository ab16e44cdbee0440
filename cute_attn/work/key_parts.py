"""Key blocks of a query block in parts: as many parts for each, or parts of as many keys. One CTA computes each part.

Partial results have a place of their own for every part, so that the combine kernel merges them all. A part without
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
        out, lse: with the trait split "parts" (parts, batch, seqlen_q, nheads, head_dim_v) and (parts, batch, nheads,
            seqlen_q), where packed rows are one batch; with "shares" (2 * slots, tile_m, head_dim_v) and
            (2 * slots, tile_m), a work tile's rows at each index, in the tile's order.
        parts: number of parts of a query block; unused with "shares".
        part_keys: keys of a part, a multiple of the tile's tile_n, or 0 for parts of equal size.
    """

    out: cute.Tensor
    lse: cute.Tensor
    parts: Int32
    part_keys: Int32


@dataclass(frozen=True)
class KeyPart:
    """The key blocks [begin, end) of a work tile, and where its result goes.

    Attributes:
        partial: the index of the partial result, or -1 where the result is whole.
    """

    begin: Int32
    end: Int32
    partial: Int32

    @staticmethod
    @cute.jit
    def of(blocks: BlockRange, part: Int32, partials: Partials, tile_n: cutlass.Constexpr) -> "KeyPart":
        """Part ``part`` of ``blocks``; parts of ``part_keys`` keys count from row 0, whatever is visible."""
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
