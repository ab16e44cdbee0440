"""Key blocks in equal shares: the device code, on the host or by a warp, and what is expected of it by brute force."""

import functools
import itertools

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.device.seqlen import Seqlens
from cute_attn.epilogues.mask import Mask
from cute_attn.work.key_shares import KeyShares, VisibleBlocks

QUERIES, TILE_N = 16, 32
COLUMNS = ("slot", "batch", "head", "m_block", "begin", "end", "whole", "partial")


@cute.jit
def divide(
    cu_seqlens_q: cute.Tensor,
    seqused_k: cute.Tensor,
    numbers: cute.Tensor,
    shares: cute.Tensor,
    units: cute.Tensor,
    lane: Int32,
    mask: Constexpr,
    overhead: Constexpr,
):
    """Every slot's shares, and of every unit (batch, head, m_block) the first and the last slot; lane 0 writes them.

    numbers: heads, slots, window; and as results the number of shares, the line's length and its slots.
    """
    batch = Int32(seqused_k.shape[0])
    seqlens = Seqlens(cu_seqlens_q, None, None, seqused_k, Int32(0), Int32(1 << 30))
    args = (numbers[2], Int32(0)) if cutlass.const_expr(mask.windowed) else ()
    blocks = VisibleBlocks(seqlens, args, mask, QUERIES, TILE_N)
    line = KeyShares.make(blocks, batch, numbers[0], numbers[1], lane, overhead)
    count = Int32(0)
    for cta in cutlass.range(numbers[1], unroll=1):
        slot = line.slot_of_cta(cta)
        position, end = line.begin(slot), line.begin(slot + 1)
        share = line.share_of_unit(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        if position < end:
            share = line.share(position, end)
        while position < end:
            if lane == 0:
                row = shares[count, None]
                row[0], row[1], row[2], row[3] = slot, share.batch, share.head, share.m_block
                row[4], row[5] = share.begin, share.end
                row[6] = Int32(1) if share.whole else Int32(0)
                row[7] = share.partial(slot)
            position = share.next
            count += 1
            if position < end:
                share = line.following(share, end)
    for i in cutlass.range(units.shape[0], unroll=1):
        unit = units[i, None]
        _, start = KeyShares.measure(blocks, batch, numbers[0], numbers[1], lane, overhead, unit[0])
        first, last = line.slots_of(start, unit[0], unit[1], unit[2])
        if lane == 0:
            unit[3], unit[4] = first, last
    if lane == 0:
        numbers[3], numbers[4], numbers[5] = count, line.total, line.slots


@cute.jit
def divide_by_a_thread(
    cu_seqlens_q: cute.Tensor,
    seqused_k: cute.Tensor,
    numbers: cute.Tensor,
    shares: cute.Tensor,
    units: cute.Tensor,
    mask: Constexpr,
    overhead: Constexpr,
):
    """On the host, where a thread has the terms of all lanes."""
    divide(cu_seqlens_q, seqused_k, numbers, shares, units, Int32(0), mask, overhead)


@cute.kernel
def warp(
    cu_seqlens_q: cute.Tensor,
    seqused_k: cute.Tensor,
    numbers: cute.Tensor,
    shares: cute.Tensor,
    units: cute.Tensor,
    mask: Constexpr,
    overhead: Constexpr,
):
    lane = cute.arch.thread_idx()[0]
    divide(cu_seqlens_q, seqused_k, numbers, shares, units, lane, mask, overhead)


@cute.jit
def divide_by_a_warp(
    cu_seqlens_q: cute.Tensor,
    seqused_k: cute.Tensor,
    numbers: cute.Tensor,
    shares: cute.Tensor,
    units: cute.Tensor,
    mask: Constexpr,
    overhead: Constexpr,
    stream: cuda.CUstream,
):
    """On the device, by one warp."""
    warp(cu_seqlens_q, seqused_k, numbers, shares, units, mask, overhead).launch(
        grid=[1, 1, 1], block=[32, 1, 1], stream=stream
    )


def dynamic(x):
    return from_dlpack(x).mark_layout_dynamic(leading_dim=x.ndim - 1)


KINDS = {"none": Mask(False, False), "causal": Mask(True, False), "window": Mask(False, True)}


def fakes():
    """The tensors' types, for any sizes."""
    shapes = ((2,), (1,), (6,), (1, len(COLUMNS)), (1, 5))
    return [dynamic(torch.zeros(shape, dtype=torch.int32)) for shape in shapes]


@functools.cache
def on_host(kind, overhead):
    return cute.compile(divide_by_a_thread, *fakes(), KINDS[kind], overhead)


@functools.cache
def on_device(kind, overhead):
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    compiled = cute.compile(divide_by_a_warp, *fakes(), KINDS[kind], overhead, stream)
    return lambda *tensors: compiled(*tensors, stream)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


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
    """A call's shares as the device code has them, and its units by definition."""

    def __init__(self, kind, overhead, lengths, heads, slots, window=40, device="cpu"):
        self.slots, self.overhead = slots, overhead
        self.batch, self.heads = len(lengths), heads
        self.units = {
            (b, head, m): visible_blocks(kind, seqlen_q, seqlen_k, m, window)
            for b, (seqlen_q, seqlen_k) in enumerate(lengths)
            for head in range(heads)
            for m in range(-(-seqlen_q // QUERIES))
        }
        self.length = sum(max(n, 1) + overhead for n in self.units.values())
        shares = torch.full((len(self.units) + 2 * slots + 1, len(COLUMNS)), -1, dtype=torch.int32)
        units = torch.full((max(len(self.units), 1), 5), -1, dtype=torch.int32)
        units[:, :3] = int32(list(self.units)) if self.units else 0
        if not self.units:
            units = units[:0]
        numbers = int32([heads, slots, window, -1, -1, -1])
        cu_seqlens_q = int32([0, *itertools.accumulate(q for q, _ in lengths)])
        tensors = (cu_seqlens_q, int32([k for _, k in lengths]), numbers, shares, units)
        tensors = tuple(x.to(device) for x in tensors)
        run = on_host if device == "cpu" else on_device
        run(kind, overhead)(*map(dynamic, tensors))
        numbers, shares, units = (x.cpu() for x in tensors[2:])
        count, self.total, self.used = numbers[3:].tolist()
        self.shares = [dict(zip(COLUMNS, row, strict=True)) for row in shares[:count].tolist()]
        self.found = {tuple(row[:3]): tuple(row[3:]) for row in units.tolist()}

    def of(self, unit):
        return [s for s in self.shares if (s["batch"], s["head"], s["m_block"]) == unit]

    def check(self):
        assert self.total == self.length and self.used == self.slots_by_definition()
        self.check_blocks()
        self.check_sizes()
        self.check_partials()

    def slots_by_definition(self):
        """All, or those that cut sequences alike which are equally long on the line, the first with one query block."""
        positions = [0] * self.batch
        for (b, head, _), blocks in self.units.items():
            positions[b] += (max(blocks, 1) + self.overhead) * (head == 0)
        count = self.batch * self.heads
        if self.length and len(set(positions)) == 1 and (0, 0, 1) not in self.units:
            waves = -(-count // self.slots)
            alike = [n for n in range(1, self.slots + 1) if n * waves == count or n % count == 0]
            if alike and 15 / 16 * self.slots <= alike[-1] <= self.length:
                return alike[-1]
        return min(self.slots, self.length)

    def check_blocks(self):
        """Every key block is in one share; a unit without keys is in one as well."""
        for unit, blocks in self.units.items():
            parts = sorted((s["begin"], s["end"]) for s in self.of(unit))
            seen = [block for begin, end in parts for block in range(begin, end)]
            assert seen == list(range(blocks)), unit
            if blocks == 0:
                assert sum(s["whole"] for s in self.of(unit)) == 1, unit

    def check_sizes(self):
        """Positions of slots differ by one at most; without overhead these are blocks."""
        ends = [slot * self.length // max(self.used, 1) for slot in range(self.used + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)
        assert all(s["slot"] < self.used for s in self.shares)
        if self.overhead == 0 and all(self.units.values()):
            blocks = [
                sum(s["end"] - s["begin"] for s in self.shares if s["slot"] == i) for i in range(self.used)
            ]
            assert blocks == sizes

    def check_partials(self):
        """At most two a slot, none twice, and those that the combine kernel looks for."""
        partials = [s for s in self.shares if not s["whole"] and s["begin"] < s["end"]]
        indices = [s["partial"] for s in partials]
        assert len(set(indices)) == len(indices) and all(s["partial"] // 2 == s["slot"] for s in partials)
        for unit, blocks in self.units.items():
            first, last = self.found[unit]
            written = [s["partial"] for s in self.of(unit) if not s["whole"] and s["begin"] < s["end"]]
            wanted = [2 * slot + (slot == first) for slot in range(first, last + 1)]
            assert sorted(written) == (sorted(wanted) if last > first else []), (unit, blocks)
