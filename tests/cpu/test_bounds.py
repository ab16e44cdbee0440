"""The kernels' 32-bit arithmetic at the largest sizes that the checks accept, on the host."""

import itertools

import cutlass
import pytest
import torch
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.compiler import registry
from cute_attn.device.copy import RowCopy
from cute_attn.device.score_tile import ScoreContext
from cute_attn.device.seqlen import SeqlenInfo
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.mask import Mask
from cute_attn.host.checks import MAX_ROWS, MAX_SEQLEN
from cute_attn.outputs.staged_output import ForwardOutputs, OutputStore
from cute_attn.traits import Traits
from cute_attn.work.query_tiles import QueryTile
from tests.tensors import dynamic

TILE = 2**12


@cute.jit
def window_bounds(cases: cute.Tensor, out: cute.Tensor, top_left: Constexpr):
    """(first_key, end_key, first_query, end_query) of each (seqlen_q, seqlen_k, left, right, query, key)."""
    for i in cutlass.range(cases.shape[0]):
        seqlen_q, seqlen_k = cases[i, 0], cases[i, 1]
        shift = Int32(0) if cutlass.const_expr(top_left) else seqlen_k - seqlen_q
        zero, one = Int32(0), Float32(1.0)
        context = ScoreContext(zero, zero, zero, seqlen_q, seqlen_k, seqlen_q, seqlen_k, shift, one, one, one)
        band = Mask(False, True).begin((cases[i, 2], cases[i, 3]), context)
        query, key = cases[i, 4], cases[i, 5]
        out[i, 0] = band.first_key(query)
        out[i, 1] = band.end_key(query)
        out[i, 2] = band.first_query(key)
        out[i, 3] = band.end_query(key, seqlen_q)


@pytest.mark.parametrize("top_left", [False, True])
def test_windows_of_the_longest_sequences(top_left):
    """Up to a tile beyond either sequence, since tiles reach beyond it."""
    lengths, bounds = (1, 1000, MAX_SEQLEN), (0, 1, UNBOUNDED - 1, UNBOUNDED)
    cases = [
        (seqlen_q, seqlen_k, left, right, query, key)
        for seqlen_q, seqlen_k in itertools.product(lengths, repeat=2)
        for left, right in itertools.product(bounds, repeat=2)
        for query in (0, seqlen_q - 1, seqlen_q + TILE)
        for key in (0, seqlen_k - 1, seqlen_k + TILE)
    ]
    given = torch.tensor(cases, dtype=torch.int32)
    found = torch.zeros(len(cases), 4, dtype=torch.int32)
    window_bounds(dynamic(given), dynamic(found), top_left)
    for (seqlen_q, seqlen_k, left, right, query, key), row in zip(cases, found.tolist(), strict=True):
        shift = 0 if top_left else seqlen_k - seqlen_q
        assert row == [
            max(query + shift - left, 0),
            min(query + shift + right + 1, seqlen_k),
            max(key - shift - right, 0),
            min(key - shift + left + 1, seqlen_q),
        ]


@cute.jit
def blocks_and_rounds(counts: cute.Tensor, out: cute.Tensor, tile: Constexpr):
    """Blocks of a tile, rows of all blocks, quotient and remainder by the next number, and a loop's iterations."""
    for i in cutlass.range(counts.shape[0]):
        count, step = counts[i, 0], counts[i, 1]
        out[i, 0] = cute.ceil_div(count, tile)
        out[i, 1] = cute.round_up(count, tile)
        out[i, 2], out[i, 3] = divmod(count, cute.FastDivmodDivisorV2(step))
        turns = Int32(0)
        for _ in cutlass.range(count - 1, count, step, unroll=1):
            turns += 1
        out[i, 4] = turns


@pytest.mark.parametrize("tile", [64, 80, 128])
def test_as_many_rows_as_there_may_be(tile):
    cases = [(count, step) for count in (MAX_SEQLEN, MAX_ROWS - TILE) for step in (1, 7, 2**12)]
    cases += [(MAX_ROWS // 2, MAX_ROWS // 2), (2**31 - 1 - MAX_SEQLEN, MAX_SEQLEN)]
    found = torch.zeros(len(cases), 5, dtype=torch.int32)
    blocks_and_rounds(dynamic(torch.tensor(cases, dtype=torch.int32)), dynamic(found), tile)
    for (count, step), row in zip(cases, found.tolist(), strict=True):
        blocks = -(-count // tile)
        assert row == [blocks, blocks * tile, count // step, count % step, 1]


@pytest.mark.parametrize(("arch", "tile"), [("sm80", "pack_heads=64,tile_m=64"), ("sm90", "pack_heads=8")])
def test_rows_of_packed_heads_in_long_sequences(arch, tile, monkeypatch):
    """Kernels count a tile's rows within O's bounds; all remaining queries times heads would exceed 32 bits."""
    kernel, copied = registry.lookup(Traits("forward", arch, "bf16", 64), tile, arch), []
    monkeypatch.setattr(RowCopy, "copy", lambda self, source, target, rows, whole: copied.append(rows))

    @cute.jit
    def copy_rows(cases: cute.Tensor, o: cute.Tensor, out: cute.Tensor):
        zero = Int32(0)
        for i in cutlass.range_constexpr(out.shape[0]):
            info = SeqlenInfo(cases[i, 0], zero, zero, zero)
            work_tile = QueryTile(cases[i, 1], zero, zero, zero, info, zero, zero)
            if cutlass.const_expr(arch == "sm80"):
                copied.append(kernel.rows_left(info.seqlen_q - work_tile.row0))
            else:
                store = OutputStore(kernel, ForwardOutputs(None, o, o), o, zero, zero)
                store.copy_rows(work_tile, work_tile.row0)
            out[i] = copied.pop()

    heads = kernel.tile.pack_heads
    cases = [(MAX_SEQLEN, 0), (2**25 + 64, 0), (2**28 + 3, 2**28), (2**28, 2**28 + 8)]
    found = torch.zeros(len(cases), dtype=torch.int32)
    o = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    copy_rows(dynamic(torch.tensor(cases, dtype=torch.int32)), dynamic(o), from_dlpack(found))
    assert found.tolist() == [min((n - row0) * heads, 64) for n, row0 in cases]
