"""Dropout's mask drawn by one warp for others, which hold scores transposed as wgmma leaves them.

Of 64 keys that a warpgroup computes, lane l of warp w has keys 16 w + l / 4 and 8 more, and of every 8 queries the two
from 2 (l % 4) on. A *word* is what a thread has of 64 queries: 32 bits, each of which says that an element is dropped.
Query 16 z + 8 h + 2 (l % 4) + i and key 16 w + 8 k + l / 4 are bit 16 i + 8 h + 2 z + k: pairs of neighbouring queries,
which share a register of P, are 16 bits apart, as ``cute_attn.epilogues.dropout`` has its masks.

A flash call's 16 bytes belong to threads of two warps, each of which would have to draw all of it. A warp that draws
for all of them makes every call once, in time that it would otherwise have waited.
"""

import cutlass
from cutlass import Constexpr, Int32, Uint32, Uint64, cute

from cute_attn.device.math import byte_permute, uniform
from cute_attn.epilogues.dropout import (
    FLASH_BLOCK,
    FLASH_ROUNDS,
    DropoutState,
    byte_limits,
    bytes_above,
    philox,
    words,
)

QUERIES = 64  # of a word
UNIT_KEYS = FLASH_BLOCK[1]  # that a warp draws at a time
_TOP_BITS = 0x80808080 - (1 << 32)


@cute.jit
def draw_words(
    state: DropoutState,
    halves: cute.Tensor,
    row0: Int32,
    col0: Int32,
    unit: Int32,
    tile_m: Constexpr,
    lane: Int32,
) -> None:
    """By a warp: the words that have ``unit``, the tile's 32 keys from there on, of all its queries.

    A lane's calls have, of a query in 8 and of two neighbouring keys in 8, all 4 eighths of the unit: byte
    2 h + key % 2 of a call's word k is of query 8 h and of the k-th eighth.

    Args:
        halves: 16 bits, (2, threads, words): each thread's words, low half first.
        row0, col0: the tile's first query and key, whole blocks of the mask.
        lane: the thread's in its warp.
    """
    for word in cutlass.range_constexpr(cute.size(halves, mode=[2])):
        blocks = min(QUERIES, tile_m - QUERIES * word) // FLASH_BLOCK[0]
        first = (row0 >> 4) + QUERIES // FLASH_BLOCK[0] * word
        _draw_blocks(state, halves[None, None, word], first, (col0 >> 5) + unit, unit, blocks, lane)


@cute.jit
def _draw_blocks(
    state: DropoutState,
    halves: cute.Tensor,
    row_block: Int32,
    col_block: Int32,
    unit: Int32,
    blocks: Constexpr,
    lane: Int32,
) -> None:
    """A word of each thread that has keys of ``unit``: so many blocks of 16 queries."""
    add, either = (Int32(uniform(Uint32(limit))) for limit in byte_limits(state.threshold))
    eighths = [Int32(0), Int32(0)]  # of either warp; in each byte a bit for (z, k)
    own = words(state.base + Uint64(Uint32(lane)))
    for z in cutlass.range_constexpr(blocks):
        call = philox((*own, Uint32(row_block + z), Uint32(col_block)), state.key, FLASH_ROUNDS)
        for k, word in enumerate(call):
            above = bytes_above(add, either, Int32(word)) & Int32(_TOP_BITS)
            eighths[k // 2] = Int32(Uint32(eighths[k // 2]) >> Uint32(1)) | above
    missing = Uint32(8 - 2 * blocks)
    query = (lane >> 2) & 1
    for warp in cutlass.range_constexpr(2):
        bits = Int32(Uint32(eighths[warp]) >> missing)
        for key in cutlass.range_constexpr(2):
            thread = (2 * unit + warp) * 32 + (2 * (lane & 3) + key) * 4 + (lane >> 3)
            both = byte_permute(bits, bits, 0x2020 + 0x1111 * key)
            halves[query, thread] = cutlass.Int16(both)
