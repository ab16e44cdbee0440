"""The combine kernel after stream-K, on every thread of every CTA: it finds and merges the partial results.

Stream-K ranges are computed by device code (``tests.divided_keys``), and the kvcache kernel's results in torch.
"""

import functools
import itertools
import math

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute

from cute_attn.device.seqlen import Seqlens
from cute_attn.kernels.combine import CombineStreamK, StreamKRows
from cute_attn.tiles.inference import CombineStreamKTile
from cute_attn.traits import Traits
from cute_attn.work.block_range import Partials
from cute_attn.work.stream_k import OVERHEAD
from tests.divided_keys import QUERIES, TILE_N, Line
from tests.merged_rows import merge_rows
from tests.tensors import int32, run

GROUP, PACK, HEADS_KV, DIM = 3, 2, 2, 16
"""Query heads of a key head, packed two at a time, so that a second pack has one head."""
PACKS = HEADS_KV * 2


@cute.jit
def combine(
    outs: cute.Tensor,
    lses: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    starts: cute.Tensor,
    lengths: cute.Tensor,
    numbers: cute.Tensor,
    memory: cute.Tensor,
    kernel: Constexpr,
):
    """Run all CTAs. numbers: max_seqlen_q, ctas."""
    packed: Constexpr = kernel.traits.varlen
    seqlens = Seqlens(
        starts if packed else None, None, None, lengths, numbers[0], Int32(1 << 30), None, Int32(0)
    )
    rows = StreamKRows.make(out, seqlens, None, Int32(HEADS_KV), numbers[1], kernel.tile)
    partials = Partials(outs, lses, Int32(0), Int32(0))
    found = cute.make_rmem_tensor(5, Int32)
    for block in cutlass.range(rows.ctas, unroll=1):
        index, chunk = divmod(block, rows.chunks)
        rows.look_up(kernel, index, Int32(lengths.shape[0]), Int32(0), found)
        tile = rows.read(found, chunk)
        if rows.are_divided(tile):
            at = functools.partial(rows.of_thread, kernel, tile, partials)
            merge_rows(kernel, at, partials, memory, out, lse, None)


def attend(q, k, v, keys):
    """out and LSE of one query and some of the keys, in fp64; without keys, NaN and -inf."""
    if not len(keys):
        return torch.full((DIM,), math.nan), -math.inf
    scores = k[keys] @ q
    return scores.softmax(0) @ v[keys], float(scores.logsumexp(0))


class Call:
    """Random queries and keys, and results as a kvcache kernel leaves them."""

    def __init__(self, kind, lengths, ctas, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.kind, self.lengths = kind, lengths
        self.line = Line(kind, OVERHEAD, lengths, PACKS, ctas)
        self.q = [randn(n, HEADS_KV * GROUP, DIM) for n, _ in lengths]
        self.k, self.v = ([randn(n, HEADS_KV, DIM) for _, n in lengths] for _ in range(2))
        self.outs = torch.full((2 * ctas, QUERIES * PACK, DIM), math.nan)
        self.lses = torch.full((2 * ctas, QUERIES * PACK), math.nan)
        total = sum(n for n, _ in lengths)
        self.out = torch.full((total, HEADS_KV * GROUP, DIM), math.nan, dtype=torch.float16)
        self.lse = torch.full((HEADS_KV * GROUP, total), math.nan)
        self.starts = [0, *itertools.accumulate(n for n, _ in lengths)]
        for tile_range in self.line.ranges:
            self.write(tile_range)

    def row(self, b, head, query, begin, end):
        """A row's result over key blocks [begin, end)."""
        seqlen_q, seqlen_k = self.lengths[b]
        last = query + seqlen_k - seqlen_q + 1 if self.kind == "causal" else seqlen_k
        keys = range(begin * TILE_N, min(end * TILE_N, last, seqlen_k))
        return attend(self.q[b][query, head], self.k[b][:, head // GROUP], self.v[b][:, head // GROUP], keys)

    def write(self, tile_range):
        if tile_range["begin"] >= tile_range["end"] and not tile_range["whole"]:
            return
        b, pack = tile_range["batch"], tile_range["head"]
        for r in range(QUERIES * PACK):
            query, in_group = tile_range["m_block"] * QUERIES + r // PACK, pack % 2 * PACK + r % PACK
            if query >= self.lengths[b][0] or in_group >= GROUP:
                continue
            head = pack // 2 * GROUP + in_group
            out, lse = self.row(b, head, query, tile_range["begin"], tile_range["end"])
            if tile_range["whole"]:
                at = self.starts[b] + query
                self.out[at, head], self.lse[head, at] = out.nan_to_num(0.0).half(), lse
            else:
                self.outs[tile_range["partial"], r], self.lses[tile_range["partial"], r] = out.float(), lse

    def check(self, kernel):
        packed = kernel.traits.varlen
        out, lse = self.out, self.lse
        if not packed:
            out = out.unflatten(0, (len(self.lengths), -1)).contiguous()
            lse = lse.unflatten(1, (len(self.lengths), -1)).transpose(0, 1).contiguous()
        memory = torch.full((kernel.tile.smem_bytes(kernel.traits) // 4,), math.nan)
        longest = max(n for n, _ in self.lengths)
        tensors = (self.outs, self.lses, out, lse, int32(*self.starts), int32(*[n for _, n in self.lengths]))
        run(combine, *tensors, int32(longest, self.line.ctas), memory, constants=(kernel,))
        out = out if packed else out.flatten(0, 1)
        lse = lse if packed else lse.transpose(0, 1).flatten(1)
        for b, (queries, keys) in enumerate(self.lengths):
            for query, head in itertools.product(range(queries), range(HEADS_KV * GROUP)):
                whole, whole_lse = self.row(b, head, query, 0, -(-keys // TILE_N))
                at = self.starts[b] + query
                torch.testing.assert_close(
                    out[at, head].double(), whole.nan_to_num(0.0).double(), rtol=2e-3, atol=2e-3
                )
                assert lse[head, at] == whole_lse or math.isclose(lse[head, at], whole_lse, abs_tol=1e-4)


def kernel_of(kind, varlen, rows, groups, unroll, eager, by_range):
    mask = "" if kind == "none" else kind
    traits = Traits("combine_stream_k", "sm80", "fp16", DIM, mask=mask, varlen=varlen, seqused_k=True)
    tile = CombineStreamKTile(rows, groups, unroll, eager, QUERIES * PACK, TILE_N, PACK, by_range)
    assert tile.reject(traits, "sm80") is None
    return CombineStreamK(traits, tile)


TILES = [(8, 1, 4, False, True), (2, 8, 2, True, False), (4, 2, 16, True, True)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("ctas", [1, 7, 33])
def test_batched_queries(tile, ctas):
    Call("causal", [(2, 300), (2, 1), (2, 0), (2, 700)], ctas).check(kernel_of("causal", False, *tile))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("ctas", [5, 40])
def test_packed_queries(tile, ctas):
    """Sequences of several query blocks, and of none."""
    lengths = [(1, 200), (0, 90), (40, 333), (17, 17), (3, 0), (16, 64)]
    Call("causal", lengths, ctas).check(kernel_of("causal", True, *tile))


def test_all_keys():
    Call("none", [(1, 900)], 50).check(kernel_of("none", False, *TILES[1]))
    Call("none", [(1, 320)] * 8, 33).check(kernel_of("none", False, *TILES[0]))
