"""The mask of a tree of draft tokens: on score tiles of every kind, against the definition; refusals."""

import re
from dataclasses import replace

import pytest
import torch

from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.reference.tilings import SMALL, TILINGS, Scores
from tests.cpu.test_cache_bias import check_cached


@pytest.mark.parametrize(
    ("name", "heads", "features"),
    [
        *((SMALL, 1, "tree"), (SMALL, 4, "causal-tree"), ("warps2x2-64x64", 1, "softcap-tree")),
        *(("wgmma1-64x80", 8, "tree"), ("warps2x4-32x128", 1, "causal-tree")),
    ],
)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 100), (40, 300), (70, 65), (70, 71), (33, 33), (5, 2)]
)
def test_tiles_have_the_scores_of_the_definition(name, heads, features, seqlen_q, seqlen_k):
    """Several words of bits, trees across key blocks, fewer keys than queries."""
    tiling = TILINGS[name].of(features, op="kvcache")
    tiling = replace(tiling, tile=replace(tiling.tile, pack_heads=heads))
    generator = torch.Generator().manual_seed(seqlen_q)
    bits = torch.randint(-(2**31), 2**31, (2 * seqlen_q, 3), generator=generator).int()
    softcap = 2.5 if "softcap" in features else 0.0
    problem = Scores.random(2, heads, seqlen_q, seqlen_k, softcap=softcap, tree_mask=bits)
    check_cached(tiling, problem)


def test_a_chain_is_causal_attention():
    """Bits of all earlier drafts; a tree's leaves do not see each other."""
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (4, 9, 9))
    chain = torch.tensor([0b0001, 0b0011, 0b0111, 0b1111], dtype=torch.int32)[:, None]
    expected = attention_with_kvcache(q, k, v, causal=True)
    assert torch.equal(attention_with_kvcache(q, k, v, tree_mask=chain), expected)
    leaves = torch.tensor([0b0001, 0b0011, 0b0101, 0b1001], dtype=torch.int32)[:, None]
    found = attention_with_kvcache(q, k, v, tree_mask=leaves)
    for leaf in range(4):
        seen = [*range(5), 5, *([5 + leaf] if leaf else [])]
        alone = attention_with_kvcache(q[:, leaf : leaf + 1], k[:, seen], v[:, seen])
        torch.testing.assert_close(found[:, leaf : leaf + 1], alone)


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (torch.zeros(4, 1, dtype=torch.int64), {}, "tree_mask has dtype torch.int64; accepted: torch.int32"),
        (torch.zeros(3, 1).int(), {}, r"tree_mask has shape \(3, 1\).*accepted: \(4, 1\) or more words"),
        (torch.zeros(4, 0).int(), {}, r"tree_mask has shape \(4, 0\)"),
        (torch.zeros(4).int(), {}, r"tree_mask has shape \(4,\)"),
        (torch.zeros(2, 4).int().T, {}, r"strides \(1, 4\); accepted: \(4, 1\) or more words, with a last"),
        (torch.zeros(4, 1).int(), {"window": (3, 0)}, "tree_mask is given with a window; accepted: without"),
        (torch.zeros(4, 1).int(), {"alibi_slopes": torch.ones(2)}, "tree_mask is given with alibi_slopes"),
    ],
)
def test_a_wrong_call_is_one_sentence(tree, options, message):
    q, k, v = (torch.randn(1, n, 2, 8) for n in (4, 9, 9))
    with pytest.raises((TypeError, ValueError)) as error:
        attention_with_kvcache(q, k, v, tree_mask=tree, **options)
    assert re.search(message, str(error.value)), error.value
