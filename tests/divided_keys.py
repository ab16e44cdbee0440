"""Key blocks in equal stream-K ranges: the device code, on the host or by a warp, and the same by brute force."""

import functools
import itertools

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Constexpr, Int32, cute

from cute_attn.device.seqlen import Seqlens
from cute_attn.epilogues.mask import Mask
from cute_attn.work.stream_k import StreamK, VisibleBlocks
from tests.tensors import dynamic, int32

QUERIES, TILE_N = 16, 32
COLUMNS = ("index", "batch", "head", "m_block", "begin", "end", "whole", "partial")


@cute.jit
def divide(tensors: tuple, lane: Int32, mask: Constexpr, overhead: Constexpr):
    """Write every CTA's ``TileRange``s, and every work tile's first and last stream-K range; lane 0 writes.

    tensors: starts of queries, used keys, numbers, ranges and work tiles. numbers: heads, CTAs, window; and as results
    the number of ``TileRange``s, the line's length and its ranges.
    """
    cu_seqlens_q, seqused_k, numbers, ranges, tiles = tensors
    batch = Int32(seqused_k.shape[0])
    seqlens = Seqlens(cu_seqlens_q, None, None, seqused_k, Int32(0), Int32(1 << 30))
    args = (numbers[2], Int32(0)) if cutlass.const_expr(mask.windowed) else ()
    blocks = VisibleBlocks(seqlens, args, mask, QUERIES, TILE_N)
    line = StreamK.make(blocks, batch, numbers[0], numbers[1], lane, overhead)
    count = Int32(0)
    for cta in cutlass.range(numbers[1], unroll=1):
        index = line.range_of_cta(cta)
        position, end = line.begin(index), line.begin(index + 1)
        tile_range = line.range_in_tile(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        if position < end:
            tile_range = line.range_at(position, end)
        while position < end:
            if lane == 0:
                row = ranges[count, None]
                row[0], row[1], row[2], row[3] = index, tile_range.batch, tile_range.head, tile_range.m_block
                row[4], row[5] = tile_range.begin, tile_range.end
                row[6] = Int32(1) if tile_range.whole else Int32(0)
                row[7] = tile_range.partial(index)
            position = tile_range.next
            count += 1
            if position < end:
                tile_range = line.following(tile_range, end)
    for i in cutlass.range(tiles.shape[0], unroll=1):
        tile = tiles[i, None]
        _, start = StreamK.measure(blocks, batch, numbers[0], numbers[1], lane, overhead, tile[0])
        first, last = line.ranges_of(start, tile[0], tile[1], tile[2])
        if lane == 0:
            tile[3], tile[4] = first, last
    if lane == 0:
        numbers[3], numbers[4], numbers[5] = count, line.total, line.ranges


@cute.jit
def divide_by_a_thread(tensors: tuple, mask: Constexpr, overhead: Constexpr):
    """Divide on the host, where one thread holds the terms of all lanes."""
    divide(tensors, Int32(0), mask, overhead)


@cute.kernel
def warp(tensors: tuple, mask: Constexpr, overhead: Constexpr):
    divide(tensors, cute.arch.thread_idx()[0], mask, overhead)


@cute.jit
def divide_by_a_warp(tensors: tuple, mask: Constexpr, overhead: Constexpr, stream: cuda.CUstream):
    """Divide on the device, by one warp."""
    warp(tensors, mask, overhead).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


KINDS = {"none": Mask(False, False), "causal": Mask(True, False), "window": Mask(False, True)}


def fakes():
    """The tensors' types, for any sizes."""
    shapes = ((2,), (1,), (6,), (1, len(COLUMNS)), (1, 5))
    return tuple(dynamic(torch.zeros(shape, dtype=torch.int32)) for shape in shapes)


@functools.cache
def on_host(kind, overhead):
    return cute.compile(divide_by_a_thread, fakes(), KINDS[kind], overhead)


@functools.cache
def on_device(kind, overhead):
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    compiled = cute.compile(divide_by_a_warp, fakes(), KINDS[kind], overhead, stream)
    return lambda tensors: compiled(tensors, stream)


@functools.lru_cache(maxsize=256)
def visible_blocks(kind, seqlen_q, seqlen_k, m_block, window):
    """How many key blocks the queries of a block see, by definition."""
    queries = torch.arange(m_block * QUERIES, min((m_block + 1) * QUERIES, seqlen_q)).unsqueeze(1)
    distance = torch.arange(seqlen_k) - queries - (seqlen_k - seqlen_q)
    seen = {"none": distance == distance, "causal": distance <= 0}.get(
        kind, (distance <= 0) & (distance >= -window)
    )
    keys = seen.any(0).nonzero().flatten()
    return int(keys[-1]) // TILE_N - int(keys[0]) // TILE_N + 1 if keys.numel() else 0


class Line:
    """A call's ``TileRange``s as the device code has them, and its work tiles by definition."""

    def __init__(self, kind, overhead, lengths, heads, ctas, window=40, device="cpu"):
        self.ctas, self.overhead = ctas, overhead
        self.batch, self.heads = len(lengths), heads
        self.tiles = {
            (b, head, m): visible_blocks(kind, seqlen_q, seqlen_k, m, window)
            for b, (seqlen_q, seqlen_k) in enumerate(lengths)
            for head in range(heads)
            for m in range(-(-seqlen_q // QUERIES))
        }
        self.length = sum(max(n, 1) + overhead for n in self.tiles.values())
        ranges = torch.full((len(self.tiles) + 2 * ctas + 1, len(COLUMNS)), -1, dtype=torch.int32)
        tiles = torch.full((max(len(self.tiles), 1), 5), -1, dtype=torch.int32)
        tiles[:, :3] = int32(*self.tiles) if self.tiles else 0
        if not self.tiles:
            tiles = tiles[:0]
        numbers = int32(*[heads, ctas, window, -1, -1, -1])
        cu_seqlens_q = int32(*[0, *itertools.accumulate(q for q, _ in lengths)])
        tensors = (cu_seqlens_q, int32(*[k for _, k in lengths]), numbers, ranges, tiles)
        tensors = tuple(x.to(device) for x in tensors)
        run = on_host if device == "cpu" else on_device
        run(kind, overhead)(tuple(map(dynamic, tensors)))
        numbers, ranges, tiles = (x.cpu() for x in tensors[2:])
        count, self.total, self.used = numbers[3:].tolist()
        self.ranges = [dict(zip(COLUMNS, row, strict=True)) for row in ranges[:count].tolist()]
        self.found = {tuple(row[:3]): tuple(row[3:]) for row in tiles.tolist()}

    def of(self, tile):
        return [s for s in self.ranges if (s["batch"], s["head"], s["m_block"]) == tile]

    def check(self):
        assert self.total == self.length and self.used == self.ranges_by_definition()
        self.check_blocks()
        self.check_sizes()
        self.check_partials()

    def ranges_by_definition(self):
        """Number of ranges by definition: all, or fewer that cut equally, if sequences are equally long on the line."""
        positions = [0] * self.batch
        for (b, head, _), blocks in self.tiles.items():
            positions[b] += (max(blocks, 1) + self.overhead) * (head == 0)
        blocks = sum((0, 0, m) in self.tiles for m in range(64))
        if self.length and len(set(positions)) == 1:
            first = blocks * (max(self.tiles[0, 0, 0], 1) + self.overhead)
            count, waves = blocks * self.batch * self.heads, -(-blocks * self.batch * self.heads // self.ctas)
            whole = [n for n in range(1, self.ctas + 1) if n * waves == count and first == positions[0]]
            cut = [n for n in range(1, self.ctas + 1) if n % count == 0]
            alike = whole if count >= self.ctas else cut
            alone = 15 / 16 if blocks == 1 else 2 / 3
            similar = 15 * positions[0] <= 16 * first and first <= positions[0]
            if similar and alike and alone * self.ctas <= alike[-1] <= self.length:
                return alike[-1]
        return min(self.ctas, self.length)

    def check_blocks(self):
        """Assert that every key block is in one range; a work tile without keys is in one range as well."""
        for tile, blocks in self.tiles.items():
            found = sorted((s["begin"], s["end"]) for s in self.of(tile))
            seen = [block for begin, end in found for block in range(begin, end)]
            assert seen == list(range(blocks)), tile
            if blocks == 0:
                assert sum(s["whole"] for s in self.of(tile)) == 1, tile

    def check_sizes(self):
        """Sizes of ranges differ by one at most; without overhead these are blocks."""
        ends = [index * self.length // max(self.used, 1) for index in range(self.used + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
        assert all(s["index"] < self.used for s in self.ranges)
        if self.overhead == 0 and all(self.tiles.values()):
            blocks = [
                sum(s["end"] - s["begin"] for s in self.ranges if s["index"] == i) for i in range(self.used)
            ]
            assert blocks == sizes

    def check_partials(self):
        """Assert that a range has at most two partial results, none twice, and that combine looks for the same ones."""
        partials = [s for s in self.ranges if not s["whole"] and s["begin"] < s["end"]]
        indices = [s["partial"] for s in partials]
        assert len(set(indices)) == len(indices) and all(s["partial"] // 2 == s["index"] for s in partials)
        for tile, blocks in self.tiles.items():
            first, last = self.found[tile]
            written = [s["partial"] for s in self.of(tile) if not s["whole"] and s["begin"] < s["end"]]
            wanted = [2 * index + (index == first) for index in range(first, last + 1)]
            assert sorted(written) == (sorted(wanted) if last > first else []), (tile, blocks)
