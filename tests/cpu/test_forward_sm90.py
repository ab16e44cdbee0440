"""What the Hopper forward's tiles are made of, and what they refuse."""

import re
from dataclasses import replace

import pytest

from cute_attn import registry
from cute_attn.compiler import compile
from cute_attn.tiles import ForwardSm90Tile
from cute_attn.traits import Traits

D128 = Traits("forward", "sm90", "bf16", 128)


@pytest.mark.parametrize(
    "tile, traits, message",
    [
        (ForwardSm90Tile(cluster=3), D128, "cluster is 3; accepted: 1, and 2 with pack_heads 1"),
        (
            ForwardSm90Tile(cluster=2, pack_heads=2),
            D128,
            "cluster is 2; accepted: 1, and 2 with pack_heads 1",
        ),
        *(
            (
                ForwardSm90Tile(cluster=2),
                replace(D128, **asked),
                "cluster is 2; .* without a bias, dropout, users'",
            )
            for asked in (
                {"bias": "fp32"},
                {"dropout": "flash"},
                {"epilogues": ("relative",)},
                {"seqused_q": True},
                {"seqused_k": True},
                {"return_softmax": True},
            )
        ),
    ],
)
def test_a_tile_that_cannot_work_is_refused_in_one_sentence(tile, traits, message):
    reason = tile.reject(traits, "sm90") or ""
    assert re.search(message, reason), reason
    assert "\n" not in reason


def test_the_text_parses_back():
    tile = ForwardSm90Tile(64, 80, optimistic=True, cluster=2, p_in_smem=True)
    assert ForwardSm90Tile().override(str(tile)) == tile


@pytest.mark.parametrize(
    "name", ["d64", "d128", "d128-causal", "d256", "d256-causal-varlen", "d64-window-softcap-alibi"]
)
def test_clusters_load_by_multicast_and_without_spills(name):
    traits = Traits.parse(f"forward-sm90-bf16-{name}")
    compiled = compile(traits, replace(registry.lookup(traits).tile, cluster=2))
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    loads = re.findall(r"UTMALDG\.\dD(\.MULTICAST)?", compiled.sass)
    assert ".MULTICAST" in loads and "" in loads  # K and V; Q
    assert "UCGABAR_WAIT" in compiled.sass


@pytest.mark.parametrize(
    "name, tile", [("d128", "p_in_smem=true"), ("d256-causal", "p_in_smem=true,tile_n=64")]
)
def test_probabilities_through_shared_memory_without_spills(name, tile):
    compiled = compile(f"forward-sm90-bf16-{name}", tile)
    resources = compiled.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    assert compiled.warnings == ()
    assert compiled.resources.shared_memory_bytes == compiled.tile.smem_bytes(compiled.traits)
