"""Packed GQA: the query and head of a row, and calls whose heads are packed."""

from dataclasses import replace

import pytest
import torch

from cute_attn.host import choose
from cute_attn.host.call import Call
from cute_attn.reference.tilings import TILINGS, Scores
from cute_attn.tiles import ForwardSm90Tile
from tests.cpu.test_epilogues import compare

PACKED = ForwardSm90Tile(64, 64, pack_heads=8)


# ---- rows ----


@pytest.mark.parametrize(
    ("name", "heads", "features"),
    [
        ("wgmma1-64x80", 2, "causal_top_left"),
        ("wgmma1-64x80", 8, "causal-alibi"),
        ("wgmma1-64x80", 8, "window-softcap-alibi-sinks_fp32"),
        ("wgmma1-64x80", 64, "window-softcap-alibi-sinks_fp32"),
        ("wgmma2-128x112", 16, ""),
        ("wgmma2-128x112", 16, "causal-alibi"),
    ],
)
def test_rows_have_the_scores_of_their_query_and_head(name, heads, features):
    """Scores, softmax and log-sum-exps of every query and head, on real accumulators; two packs a batch."""
    tiling = TILINGS[name].of(features)
    tiling = replace(tiling, tile=replace(tiling.tile, pack_heads=heads))
    for seqlen_q, seqlen_k in ((1, 100), (7, 60), (70, 300)):
        problem = Scores.random(
            *(1, 2 * heads, seqlen_q, seqlen_k),
            softcap=2.5 if "softcap" in features else 0.0,
            alibi_slopes=torch.rand(1, 2 * heads) if "alibi" in features else None,
            sinks=3 * torch.randn(2 * heads) if "sinks" in features else None,
            window_left=20,
            window_right=3,
        )
        first = [heads * (head // heads) for head in range(2 * heads)]
        got = compare(tiling, replace(problem, k=problem.k[:, :, first], v=problem.v[:, :, first]))
        assert got.visits.shape[1] == 2 and got.visits.shape[2] == -(-seqlen_q * heads // tiling.tile.tile_m)


# ---- tiles ----


def test_a_tile_counts_its_queries():
    assert (PACKED.queries, replace(PACKED, tile_m=192, pack_heads=4).queries) == (8, 48)
    assert ForwardSm90Tile().override("pack_heads=4") == replace(ForwardSm90Tile(), pack_heads=4)


def call(nheads: int, nheads_kv: int, tile: str = "") -> Call:
    q, k = (torch.empty(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((3, nheads), (300, nheads_kv)))
    return Call(q, k, k, max_seqlen_q=3, max_seqlen_k=300, kernel="sm90", tile=tile)


def test_a_call_is_packed_by_its_heads():
    assert choose.choose_kernel(call(16, 2), "sm90").tile.pack_heads == 8
    assert choose.choose_kernel(call(12, 2), "sm90").tile.pack_heads == 8
    assert choose.choose_kernel(call(6, 6), "sm90").tile.pack_heads == 1
    assert choose.choose_kernel(call(12, 2, "pack_heads=2"), "sm90").tile.pack_heads == 2
