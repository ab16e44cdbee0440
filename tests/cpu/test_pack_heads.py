"""Packed GQA: the query and head of a row, the lengths for which heads are packed, refusals.

test_defaults.py checks that these tiles build without spills.
"""

import re
from dataclasses import replace

import pytest
import torch

from cute_attn.compiler import registry
from cute_attn.host import choose
from cute_attn.host.call import Call
from cute_attn.reference.tilings import TILINGS, Scores
from cute_attn.tiles import ForwardSm80Tile, ForwardSm90Tile
from cute_attn.traits import Traits
from tests.cpu.test_epilogues import compare

TRAITS = Traits("forward", "sm90", "bf16", 128)
PACKED = ForwardSm90Tile(64, 64, pack_heads=8)
AMPERE = Traits("forward", "sm80", "bf16", 96)


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


@pytest.mark.parametrize(
    "tile, traits, message",
    [
        (replace(PACKED, pack_heads=0), TRAITS, "pack_heads is 0; accepted: 1, 2, 4, 8, 16, 32 or 64$"),
        (replace(PACKED, pack_heads=3), TRAITS, "pack_heads is 3; accepted: 1, 2, 4"),
        (replace(PACKED, pack_heads=128), TRAITS, "pack_heads is 128; accepted: 1, 2, 4"),
        (
            ForwardSm80Tile(96, 32, 2, pack_heads=64),
            AMPERE,
            "pack_heads is 64; accepted: 1, 2, 4, 8, 16 or 32$",
        ),
        *(
            (
                PACKED,
                replace(TRAITS, **feature),
                "pack_heads is 8; accepted: 1 with a bias, dropout or users' ",
            )
            for feature in ({"bias": "bf16"}, {"dropout": "flash"}, {"epilogues": ("mine",)})
        ),
    ],
)
def test_a_tile_that_cannot_pack_is_rejected(tile, traits, message):
    reason = tile.reject(traits, "sm90") or ""
    assert re.search(message, reason), reason


def test_a_tile_counts_its_queries():
    assert (PACKED.queries, replace(PACKED, tile_m=192, pack_heads=4).queries) == (8, 48)
    assert ForwardSm90Tile().override("pack_heads=4") == replace(ForwardSm90Tile(), pack_heads=4)


# ---- when heads are packed ----


def chosen(seqlen_q: int, group: int, features: str = "d128", seqlen_k: int = 4096) -> ForwardSm90Tile:
    kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-{features}"))
    return kernel.for_lengths(seqlen_q, seqlen_k, group).tile


@pytest.mark.parametrize(
    "seqlen_q, group, rows, heads",
    [
        *((8, 8, 64, 8), (9, 8, 128, 8), (1, 128, 64, 64), (1, 6, 64, 8)),
        *((29, 9, 128, 4), (384, 8, 128, 1), (3, 1, 64, 1)),
    ],
)
def test_few_queries_are_packed(seqlen_q, group, rows, heads):
    tile = chosen(seqlen_q, group)
    assert (tile.tile_m, tile.pack_heads) == (rows, heads)


@pytest.mark.parametrize("features", ["", "-causal-softcap-alibi-varlen-seqused_k"])
def test_chosen_tiles_fit_every_head_dim(features):
    for d in range(8, 257, 8):
        for dv in (8, d, 256):
            traits = Traits.parse(f"forward-sm90-bf16-d{d}" + (f"x{dv}" if dv != d else "") + features)
            for seqlen_q, seqlen_k in ((1, 300), (1, 9000), (64, 300), (64, 9000)):
                kernel = registry.lookup(traits).for_lengths(seqlen_q, seqlen_k, 8)
                assert kernel.tile.reject(traits, "sm90") is None
                assert kernel.tile.pack_heads == 8 or seqlen_q > 1


@pytest.mark.parametrize("feature", ["bias_bf16", "dropout", "dropout_mem_efficient"])
def test_features_that_depend_on_the_head_are_not_packed(feature):
    assert chosen(1, 8, f"d128-{feature}").pack_heads == 1


def call(nheads: int, nheads_kv: int, tile: str = "") -> Call:
    q, k = (torch.empty(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((3, nheads), (300, nheads_kv)))
    return Call(q, k, k, max_seqlen_q=3, max_seqlen_k=300, kernel="sm90", tile=tile)


def test_a_call_is_packed_by_its_heads():
    assert choose.choose_kernel(call(16, 2), "sm90").tile.pack_heads == 8
    assert choose.choose_kernel(call(12, 2), "sm90").tile.pack_heads == 8
    assert choose.choose_kernel(call(6, 6), "sm90").tile.pack_heads == 1
    assert choose.choose_kernel(call(12, 2, "pack_heads=2"), "sm90").tile.pack_heads == 2
