"""The decode benchmark without a GPU: its rows, their inputs and our call."""

import math

import pytest
import torch

from bench import decode_impls
from bench.decode_rows import Row, make_inputs

# ---- rows ----


def visible(row: Row, queries: int, keys: int) -> list[set[int]]:
    """Each query's keys."""
    found = []
    for i in range(queries):
        own = keys - queries + i
        last = own if row.causal else keys - 1
        first = own - row.window if row.window else 0
        found.append(set(range(max(first, 0), last + 1)))
    return found


SMALL = [
    Row(3, 50),
    Row(2, 40, heads=(6, 2), head_dim=64, queries=5, causal=True),
    Row(2, 40, window=7, causal=True),
    Row(2, 40, window=7, causal=True, queries=3, head_dim=16),
    Row(2, 40, heads=(4, 1), page=8, head_dim=16),
    Row(2, 37, heads=(4, 2), page=3, append=1, causal=True, head_dim=16),
    Row(5, 2000, heads=(2, 1), ragged=True, head_dim=16),
]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_bytes_and_operations_are_counted(row):
    seen = [visible(row, *lengths) for lengths in row.sequences]
    pairs = sum(len(keys) for one in seen for keys in one)
    assert row.flops == 4 * row.head_dim * row.heads[0] * pairs
    assert row.read_bytes == sum(4 * row.head_dim * row.heads[1] * len(set().union(*one)) for one in seen)
    assert row.copies >= 2 and row.copies <= 64


# ---- inputs and our call ----


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_our_call_is_attention_with_the_rows_keys(row):
    """Against plain torch over the keys that the row says, through the tables of pages."""
    x, other = make_inputs(row, "cpu", copies=2)
    assert x.q is other.q and not x.k_cache.equal(other.k_cache)
    out = decode_impls.ours("sm90")(row, x)[""](x).float()
    for b, (queries, keys) in enumerate(row.sequences):
        k, v = x.k_cache[b] if not row.page else x.k_cache, x.v_cache[b] if not row.page else x.v_cache
        if x.page_table is not None:
            k, v = (cache[x.page_table[b].long()].flatten(0, 1) for cache in (k, v))
        group = row.heads[0] // row.heads[1]
        k, v = (y[:keys].float().repeat_interleave(group, 1) for y in (k, v))
        q = x.q[b].float()
        if row.append:
            continue  # the queries are rotated: the cache has the new key
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(row.head_dim)
        for i, own in enumerate(visible(row, queries, keys)):
            hidden = [key for key in range(keys) if key not in own]
            scores[:, i, hidden] = -math.inf
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        torch.testing.assert_close(out[b], wanted, atol=2e-2, rtol=2e-2)
