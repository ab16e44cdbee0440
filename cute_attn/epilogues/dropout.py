"""PyTorch's two dropout masks, bit for bit, from Philox (Salmon et al., SC 2011, doi:10.1145/2063384.2063405).

**flash** (FlashAttention-2): Philox4x32-7. One call per lane of a 16 x 32 block of scores gives 16 bytes, one for each
of the 16 elements that the lane of an mma.sync or wgmma accumulator holds. An element is kept iff its byte <=
floor(255 (1 - p)). In a transposed accumulator a lane holds 4 of the elements of each of 4 calls.

**mem_efficient** (xformers, curand): Philox4x32-10. Each element has one word, numbered as in
:mod:`cute_attn.epilogues.numbering`, and is kept iff the word as a uniform in (0, 1] is > p.

Both masks are applied to P after its conversion to 16 bits, two elements per register: the row sum is the sum of the
undropped probabilities, and the output is scaled by 1 / (1 - p) at the end.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.lanes import COLUMN_LANES, QUAD_LANES, every_other_byte, lanes_or, share_two
from cute_attn.device.math import byte_permute, mul_wide, rematerialize, uniform
from cute_attn.device.score_tile import ScoreContext, ScoreTile, registers
from cute_attn.epilogues import numbering
from cute_attn.epilogues.inputs import ScoreInputs

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
FLASH_BLOCK = (16, 32)
FLASH_ROUNDS = 7
PAIRS = 16
"""Pairs per word of a packed mask: bits of first elements in its low half, of second elements in its high half."""


def philox(counter: tuple, key: tuple, rounds: int) -> tuple:
    """Philox4x32: four random words from a counter of four words and a key of two."""
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = mul_wide(x, Uint32(_MULTIPLIERS[0]))
        high1, low1 = mul_wide(z, Uint32(_MULTIPLIERS[1]))
        x, y, z, w = high1 ^ y ^ k0, low1, high0 ^ w ^ k1, low0
        k0, k1 = k0 + Uint32(_WEYL[0]), k1 + Uint32(_WEYL[1])
    return x, y, z, w


def words(x: Uint64) -> tuple[Uint32, Uint32]:
    """(low, high) words of a 64-bit number."""
    return Uint32(x), Uint32(x >> Uint64(32))


@functools.lru_cache(maxsize=64)
def rescale(p: float) -> float:
    """1 / (1 - p), rounded as PyTorch rounds it."""
    return float(np.float32(1.0 / float(np.float32(1) - np.float32(p))))


@dataclass(frozen=True)
class DropoutState:
    """One work tile's dropout: key and counter base of its batch and head, and the threshold."""

    key: tuple  # two Uint32
    base: Uint64  # flash: offset + (batch * nheads + head) * 32; mem_efficient: Philox call of the head's first score
    first_word: Uint32  # mem_efficient: which word of that call is that score's
    calls_mask: Uint64  # mem_efficient: bits that count of a call's number within the head
    row_stride: Uint32  # mem_efficient: scores in a row
    threshold: Int32
    unaligned: Boolean  # mem_efficient: rows do not start at the first word of a Philox call
    rescale: Float32


@dataclass(frozen=True)
class Dropout:
    """Dropout of P. It is not a score epilogue, but its arguments are passed along with the score epilogues'."""

    kind: str  # "flash" or "mem_efficient"
    varlen: bool = False  # whether sequences are packed, by cumulative lengths

    def fake_args(self) -> tuple:
        """Fake seed and offset, threshold and 1 / (1 - p); for mem_efficient also two bit masks.

        They keep the bits that PyTorch keeps of the index of a head's first score, and of a Philox call's in its head.
        """
        shared = (make_fake_tensor(Int64, (2,), stride=(1,)), Int32(0), Float32(0))
        return shared if self.kind == "flash" else (*shared, Int64(0), Int64(0))

    def host_args(self, inputs: ScoreInputs) -> tuple:
        p = inputs.dropout_p
        if self.kind == "flash":
            return (inputs.rng_state, numbering.flash_keep_threshold(p), rescale(p))
        # As signed words, for the kernel's arguments.
        masks = (numbering.plane_mask(self.varlen), numbering.score_mask() // 4)
        signed = (numbering.as_signed(mask, 64) for mask in masks)
        threshold = min(numbering.mem_efficient_keep_threshold(p), 2**32 - 1)
        return (inputs.rng_state, numbering.as_signed(threshold, 32), rescale(p), *signed)

    def begin(self, args: tuple, context: ScoreContext) -> DropoutState:
        rng_state, threshold, scale = args[:3]
        seed, offset = Uint64(rng_state[0]), Uint64(rng_state[1])
        plane = Uint64(Uint32(context.batch * context.nheads + context.head))
        first_word, calls_mask, row_stride = Uint32(0), Uint64(0), Uint32(0)
        if self.kind == "flash":
            base = offset + plane * Uint64(32)
        else:
            row_stride = Uint32(context.seqlen_k)
            rows = plane * Uint64(Uint32(context.max_seqlen_q))
            first = offset + (rows * Uint64(Uint32(context.max_seqlen_k)) & Uint64(args[3]))
            # In uniform registers: the others are scarce where all of them are used by a tile.
            low, high = (uniform(word) for word in words(first >> Uint64(2)))
            base, calls_mask = Uint64(low) | (Uint64(high) << Uint64(32)), Uint64(args[4])
            first_word = uniform(Uint32(first) & Uint32(3))
        unaligned = (first_word | row_stride) & Uint32(3) != Uint32(0)
        key = tuple(uniform(word) for word in words(seed))
        return DropoutState(key, base, first_word, calls_mask, row_stride, threshold, unaligned, scale)

    def forward(self, state: DropoutState, tile: ScoreTile, p: cute.Tensor) -> None:
        """Zero the dropped elements of p, a (rows, cols) view of 16-bit or fp32 registers."""
        bits = _as_words(p)
        for first, second, dropped in self._masks(state, tile):
            pair = _pair_index(p, first, second)
            if p.element_type is not Float32:
                bits[pair] = bits[pair] & ~dropped
                continue
            for i in range(2):  # each half, duplicated
                bits[2 * pair + i] = bits[2 * pair + i] & ~byte_permute(dropped, dropped, 0x1010 + 0x2222 * i)

    def packed_mask(self, state: DropoutState, tile: ScoreTile) -> tuple[Int32, ...]:
        """The tile's mask for :meth:`zero_dropped`: one bit per element, in words of ``PAIRS`` pairs.

        Since a word holds 32 elements, the mask can be generated before the products or while they run.
        """
        mask: dict[int, Int32] = {}
        for first, second, dropped in self._masks(state, tile):
            pair = _pair_index(tile.acc, first, second)
            word, own = pair // PAIRS, dropped & _signed(0x00010001 << _pair_bit(pair))
            mask[word] = mask[word] | own if word in mask else own
        return tuple(mask[word] for word in sorted(mask))

    @staticmethod
    def zero_dropped(mask: tuple[Int32, ...], view: cute.Tensor) -> None:
        """Zero the dropped elements of ``view``: (rows, cols), 16-bit or fp32. mask: from :meth:`packed_mask`."""
        elements = registers(view)
        if elements.element_type is Float32:
            # Bit by bit: ptxas then tests several at once.
            for i in sorted(range(cute.size(elements)), key=_mask_bit):
                word, bit = _mask_bit(i)
                dropped = (mask[word] & _signed(1 << bit)) != Int32(0)
                elements[i] = cutlass.select_(dropped, Float32(0.0), elements[i])
        else:
            pairs = cute.recast_tensor(elements, Int32)
            for i in range(cute.size(pairs)):
                pairs[i] = pairs[i] & ~Dropout.dropped_pair(mask, i)

    @staticmethod
    def dropped_pair(mask: tuple[Int32, ...], pair: int) -> Int32:
        """A word with 16 ones for each dropped element of the ``pair``-th pair in register order."""
        bit = _pair_bit(pair)
        signs = mask[pair // PAIRS] << Int32(7 - bit % 8)
        return byte_permute(signs, signs, 0xAA88 + 0x1111 * (bit // 8))

    def _masks(self, state: DropoutState, tile: ScoreTile):
        """Yield for each pair its two (row, column) indices and a word with 16 ones for each dropped element."""
        if self.kind == "flash":
            return _flash_transposed(state, tile) if tile.transposed else _flash_untransposed(state, tile)
        if tile.transposed:
            return _mem_efficient_transposed(state, tile)
        return _mem_efficient_untransposed(state, tile)

    @staticmethod
    def rescale_of(args: tuple) -> Float32:
        """1 / (1 - p), from the kernel's arguments."""
        return args[2]


def _signed(word: int) -> Int32:
    return Int32(numbering.as_signed(word, 32))


def _as_words(view: cute.Tensor) -> cute.Tensor:
    """A (rows, cols) view's registers as words of 32 bits."""
    return cute.recast_tensor(registers(view), Int32)


def _pair_index(p: cute.Tensor, first: tuple[int, int], second: tuple[int, int]) -> int:
    """Index of the word that contains the two 16-bit elements."""
    index = cute.crd2idx(first, p.layout)
    assert index % 2 == 0 and cute.crd2idx(second, p.layout) == index + 1
    return index // 2


def _flash_untransposed(state: DropoutState, tile: ScoreTile):
    """Masks of an untransposed tile: one Philox call gives exactly a thread's 16 elements of a 16 x 32 block."""
    block_rows = FLASH_BLOCK[0]
    lane = Uint32((tile.row0 & 7) * 4 + ((tile.col0 & 7) >> 1))
    above = functools.partial(bytes_above, *byte_limits(state.threshold))
    for row_block in sorted({row // block_rows for row in tile.rows}):
        z = Uint32((tile.row0 + row_block * block_rows) >> 4)
        counter = (*words(state.base + Uint64(lane)), z, Uint32(tile.col0 >> 5))
        word_of = _flash_words(state, tile, counter, above)
        for c in range(0, len(tile.cols), 2):
            word = word_of(tile.cols[c])
            for r, row in enumerate(tile.rows):
                if row // block_rows == row_block:
                    # The two bytes of this row as sign bits, each duplicated.
                    dropped = byte_permute(word, word, 0xBBAA if row >> 3 & 1 else 0x9988)
                    yield (r, c), (r, c + 1), dropped


def _flash_transposed(state: DropoutState, tile: ScoreTile):
    """Masks of a transposed tile: every other byte of two calls, one for a thread's even and one for its odd queries.

    The remaining bytes belong to the lane with the neighbouring key, 4 lanes further. So each of the two lanes makes
    one call, and they exchange bytes.
    """
    block_rows = FLASH_BLOCK[0]
    odd, skip = tile.col0 & 1, _half_of_block(tile) * 8
    limits = byte_limits(state.threshold)
    for row_block in sorted({row // block_rows for row in tile.rows}):
        z = Uint32((tile.row0 + row_block * block_rows) >> 4)
        rows = [r for r in range(0, len(tile.rows), 2) if tile.rows[r] // block_rows == row_block]
        for c in range(0, len(tile.cols), 2):

            def compute(query: Int32, z: Uint32 = z, c: int = c) -> tuple[Int32, Int32]:
                lane = Uint32(((tile.row0 & 7) + query) * 4 + ((tile.col0 & 7) >> 1))
                counter = (*words(state.base + Uint64(lane)), z, Uint32(tile.col0 >> 5))
                word_of = _flash_words(state, tile, counter, lambda word: word)
                return word_of(tile.cols[c]), word_of(tile.cols[c + 1])

            shared = share_two(compute, lambda made, odd: every_other_byte(made[0], made[1], odd), odd, 4)
            even_query, odd_query = (bytes_above(*limits, own >> skip) for own in shared)
            for r in rows:
                for i in range(2):
                    byte = 2 * i + (tile.rows[r] >> 3 & 1)
                    dropped = byte_permute(even_query, odd_query, 0xCC88 + 0x1111 * byte)
                    yield (r, c + i), (r + 1, c + i), dropped


def _half_of_block(tile: ScoreTile) -> Int32:
    """The half (8 of 16 queries) of a block that a transposed tile's rows are in: 0 or 1; 0 if rows are in both."""
    halves = [row >> 3 & 1 for row in tile.rows]
    if any(halves) and 2 * sum(halves) != len(halves):
        raise ValueError(f"a thread holds queries {tile.rows}: dropout needs whole blocks of 16 queries")
    return Int32(0) if any(halves) else (tile.row0 >> 3) & 1


def _flash_words(
    state: DropoutState, tile: ScoreTile, counter: tuple, prepare: Callable[[Int32], Int32]
) -> Callable[[int], Int32]:
    """A function that maps a column's offset to ``prepare(word)``, for the word with the bytes of its 8 columns.

    counter: the counter of the block that contains the thread's first column.
    """
    starts, start = _starts(tile), (tile.col0 >> 3) & 3
    prepared: dict[int, Int32] = {}

    def word_at(eighth: int) -> Int32:
        """eighth: the word's number, counted from the block of ``counter``."""
        if eighth not in prepared:
            x, y, z, w = counter
            call = philox((x, y, z, w + Uint32(eighth // 4)), state.key, FLASH_ROUNDS)
            for i, word in enumerate(call):
                prepared[eighth // 4 * 4 + i] = prepare(Int32(word))
        return prepared[eighth]

    def word_of(column: int) -> Int32:
        eighth = column // 8
        word = word_at(starts[0] + eighth)
        for other in starts[1:]:
            word = cutlass.select_(start == other, word_at(other + eighth), word)
        return word

    return word_of


def _mem_efficient_untransposed(state: DropoutState, tile: ScoreTile):
    """Masks of an untransposed tile: a Philox call is for four neighbouring scores of a row, which several lanes hold.

    So the lanes of a quad distribute the calls of its columns among them and exchange one bit per score, 32 columns per
    word.
    """
    lane = (tile.col0 & 7) >> 1
    groups: dict[int, int] = {}  # groups of 8 columns, in each word
    for column in tile.cols:
        groups[column // 32] = column % 32 // 8 + 1
    # Rematerialized, or the number would occupy registers until the next tile.
    row0 = rematerialize(tile.row0)
    number = _rows_below(state, Uint64(state.first_word), row0) + Uint64(Uint32(tile.col0 - 2 * lane))
    # Where a lane's bits begin in the bits of the quad's calls; all its rows are multiples of 4 apart.
    skip = Uint64(Uint32(number) & Uint32(3)) + Uint64(lane * 2)
    call = number >> Uint64(2)
    for r, row in enumerate(tile.rows):
        first = _calls_below(state, call, row)
        bits = {word: _curand_bits(state, first, 8 * word, 2 * n, lane) for word, n in groups.items()}
        for word, n in groups.items():
            both = Uint64(Uint32(bits[word]))
            if n == 4 and word + 1 in bits:
                both = both | (Uint64(Uint32(bits[word + 1])) << Uint64(32))
            elif n % 2 == 0:
                tail = _curand_tail(state, first, 8 * word + 2 * n)
                both = both | (Uint64(Uint32(tail)) << Uint64(8 * n))
            own = Int32(Uint32(both >> skip))
            even, odd = own << Int32(7), own << Int32(6)
            for c in range(0, len(tile.cols), 2):
                if tile.cols[c] // 32 == word:
                    byte = tile.cols[c] % 32 // 8
                    yield (r, c), (r, c + 1), byte_permute(even, odd, 0xCC88 + 0x1111 * byte)


def _mem_efficient_transposed(state: DropoutState, tile: ScoreTile):
    """Masks of a transposed tile: 8 lanes hold 16 neighbouring keys for the same two neighbouring queries.

    The lanes distribute the 4 calls of each query among them, and exchange one bit per score, 16 per query.
    """
    lane = tile.col0 & 7
    number = _rows_below(state, Uint64(state.first_word), rematerialize(tile.row0)) + Uint64(
        Uint32(tile.col0 - lane)
    )
    skips = [(Uint32(_rows_below(state, number, query)) & Uint32(3)) + Uint32(lane) for query in range(2)]
    for r in range(0, len(tile.rows), 2):
        for c in range(0, len(tile.cols), 2):
            offset = (tile.rows[r], tile.cols[c])
            bits = Uint32(_curand_bits_of_two(state, number, offset, lane))
            tails = Uint32(_curand_tails_of_two(state, number, offset, lane))
            own = []
            for query, skip in enumerate(skips):
                both = (bits >> Uint32(16 * query)) & Uint32(0xFFFF)
                both = both | (((tails >> Uint32(4 * query)) & Uint32(0xF)) << Uint32(16))
                own.append(Int32(both >> skip) << Int32(7))
            for i in range(2):
                yield (r, c + i), (r + 1, c + i), byte_permute(own[0], own[1], 0xCC88 + 0x1111 * i)


def _starts(tile: ScoreTile) -> tuple[int, ...]:
    """Indices of the 8-column groups of a 32-column block that can contain a thread's first column."""
    held = {column // 8 for column in tile.cols}
    free, firsts = set(range(tile.tile_n // 8)), set()
    while free:
        firsts.add(first := min(free))
        free -= {first + eighth for eighth in held}
    return tuple(sorted({(block * tile.tile_n // 8 + first) % 4 for block in range(4) for first in firsts}))


def byte_limits(threshold: Int32) -> tuple[Int32, Int32]:
    """(summand for the low 7 bits of each byte, ``either``): the limits of :func:`bytes_above`.

    For t < 128 a byte is above t if its top bit is set or its low bits are above t, and ``either`` is all ones. For
    t >= 128 both must hold, and ``either`` is 0.
    """
    low = threshold & Int32(127)
    add = (Int32(127) - low) * Int32(0x01010101)
    either = ((threshold >> Int32(7)) & Int32(1)) - Int32(1)
    return add, either


def bytes_above(add: Int32, either: Int32, word: Int32) -> Int32:
    """A word in which the top bit of each byte is 1 if that byte of ``word`` is above the threshold."""
    total = (word & Int32(0x7F7F7F7F)) + add
    return (total & word) | ((total | word) & either)


def _rows_below(state: DropoutState, number: Uint64, rows: Int32 | int) -> Uint64:
    """The number of the score ``rows`` rows below. Numbers count within a head, from its first Philox call on."""
    return number + Uint64(Uint32(rows)) * Uint64(state.row_stride)


def _calls_below(state: DropoutState, call: Uint64, rows: int) -> Uint64:
    """The Philox call of the score ``rows`` rows below, a multiple of 4: its word within the call is the same."""
    assert rows % 4 == 0
    return call + Uint64(rows // 4) * Uint64(state.row_stride)


def _curand_bits(state: DropoutState, first: Uint64, call: int, calls: int, lane: Int32) -> Int32:
    """One bit, 1 for dropped, for each word of ``calls`` Philox calls from ``first + call`` on.

    ``calls`` is at most 8 and is rounded up to a multiple of 4; each lane of the quad computes every fourth call.
    """

    def compute(lane: Int32) -> Int32:
        bits = Int32(0)
        for i in range(0, calls, 4):
            counter = first + Uint64(Uint32(lane + (call + i)))
            bits = bits | (_curand_call(state, counter) << Int32(4 * i))
        return bits << (lane * 4)

    return lanes_or(compute, lane, QUAD_LANES)


@cute.jit
def _curand_tail(state: DropoutState, first: Uint64, call: Constexpr) -> Int32:
    """The bits of call ``first + call``, in every lane of the quad; 0 if rows are aligned to Philox calls."""
    bits = Int32(0)
    if state.unaligned:
        bits = _curand_call(state, first + Uint64(call))
    return bits


def _curand_bits_of_two(state: DropoutState, number: Uint64, offset: tuple[int, int], lane: Int32) -> Int32:
    """One bit, 1 for dropped, for each word of 4 Philox calls of a query; the next query's bits in the high half.

    Each of the 8 lanes computes one call. The first call is that of the score ``offset`` (rows, keys) from ``number``.
    """

    def compute(lane: Int32) -> Int32:
        first = (_rows_below(state, number, lane >> 2) >> Uint64(2)) + Uint64(Uint32(lane & 3))
        return _curand_call(state, _call_at(state, first, offset)) << (lane * 4)

    return lanes_or(compute, lane, COLUMN_LANES)


@cute.jit
def _curand_tails_of_two(state: DropoutState, number: Uint64, offset: Constexpr, lane: Int32) -> Int32:
    """The 4 bits of the next call of each of the two queries; 0 if rows are aligned to Philox calls."""
    bits = Int32(0)
    if state.unaligned:
        bits = _tails(state, number, offset, lane)
    return bits


def _tails(state: DropoutState, number: Uint64, offset: tuple[int, int], lane: Int32) -> Int32:
    def compute(lane: Int32) -> Int32:
        query = lane >> 2  # four lanes have the same query
        first = (_rows_below(state, number, query) >> Uint64(2)) + Uint64(4)
        return _curand_call(state, _call_at(state, first, offset)) << (query * 4)

    return lanes_or(compute, lane, COLUMN_LANES)


def _call_at(state: DropoutState, call: Uint64, offset: tuple[int, int]) -> Uint64:
    """The Philox call of the score ``offset`` (rows, keys) further on; both are multiples of 4."""
    rows, keys = offset
    assert keys % 4 == 0
    return _calls_below(state, call, rows) + Uint64(keys // 4)


def _curand_call(state: DropoutState, call: Uint64) -> Int32:
    """Four bits, 1 for dropped, for the words of a Philox call; ``call`` counts from the head's first call."""
    low, high = words(state.base + (call & state.calls_mask))
    bits = Int32(0)
    for i, word in enumerate(philox((low, high, Uint32(0), Uint32(0)), state.key, 10)):
        bits = bits | cutlass.select_(word < Uint32(state.threshold), Int32(1 << i), Int32(0))
    return bits


def _mask_bit(element: int) -> tuple[int, int]:
    """(word, bit) in a packed mask of an element in register order."""
    return element // 2 // PAIRS, _pair_bit(element // 2) + 16 * (element % 2)


def _pair_bit(pair: int) -> int:
    """The bit of a pair in each half of a word: pairs 2, 3, 6, 7, ... have the upper 8 of the 16 bits.

    One shift then moves the bits of two pairs to sign bits that ``byte_permute`` replicates, and a transposed tile's
    halves of 16 queries are in the order of flash's bytes (``cute_attn.epilogues.dropout``).
    """
    return pair % 2 + pair % PAIRS // 4 * 2 + pair // 2 % 2 * 8


# ---- words: flash's mask, generated by producer warps for wgmma warps that hold transposed scores ----
#
# Of a warpgroup's 64 keys, lane l of warp w holds keys 16 w + l / 4 and 16 w + l / 4 + 8; of every 8 queries it holds
# queries 2 (l % 4) and 2 (l % 4) + 1. A word is a thread's mask for 64 queries: 32 bits, 1 for a dropped element. Query
# 16 z + 8 h + 2 (l % 4) + i and key 16 w + 8 k + l / 4 have bit 16 i + 8 h + 2 z + k: pairs of neighbouring queries are
# in one register of P and 16 bits apart, as in ``Dropout.packed_mask``.
#
# The 16 bytes of a flash call are masks for threads of two warps, so each of these warps would have to make the whole
# call. Instead, a producer warp makes every call once, while it would otherwise wait.

QUERIES = 64  # queries of a word
UNIT_KEYS = FLASH_BLOCK[1]  # keys that a warp generates at a time
_TOP_BITS = 0x80808080 - (1 << 32)


@cute.jit
def generate_words(
    state: DropoutState,
    halves: cute.Tensor,
    row0: Int32,
    col0: Int32,
    block: Int32,
    tile_m: Constexpr,
    lane: Int32,
) -> None:
    """Write the words of the tile's ``block``-th 32 keys, for all its queries; called by a whole warp.

    A lane's call covers one query of every 8 and, in each of the block's 4 groups of 8 keys, two neighbouring keys.
    Byte 2 h + key % 2 of the call's word k is for the h-th 8 queries and the k-th group.

    Args:
        halves: 16-bit (2, threads, words): each thread's words, low half first.
        row0, col0: the tile's first query and key, multiples of the mask's blocks.
        lane: the thread's index in its warp.
    """
    for word in cutlass.range_constexpr(cute.size(halves, mode=[2])):
        blocks = min(QUERIES, tile_m - QUERIES * word) // FLASH_BLOCK[0]
        first = (row0 >> 4) + QUERIES // FLASH_BLOCK[0] * word
        _generate_blocks(state, halves[None, None, word], first, (col0 >> 5) + block, block, blocks, lane)


@cute.jit
def _generate_blocks(
    state: DropoutState,
    halves: cute.Tensor,
    row_block: Int32,
    col_block: Int32,
    block: Int32,
    blocks: Constexpr,
    lane: Int32,
) -> None:
    """Write one word, for ``blocks`` blocks of 16 queries, of each thread that holds some of the 32 keys."""
    add, either = (Int32(uniform(Uint32(limit))) for limit in byte_limits(state.threshold))
    eighths = [Int32(0), Int32(0)]  # eighths of the two warps; each byte has a bit for (z, k)
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
            thread = (2 * block + warp) * 32 + (2 * (lane & 3) + key) * 4 + (lane >> 3)
            both = byte_permute(bits, bits, 0x2020 + 0x1111 * key)
            halves[query, thread] = cutlass.Int16(both)
