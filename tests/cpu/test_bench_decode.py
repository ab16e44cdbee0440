"""The decode benchmark without a GPU: its rows, their inputs, what it says of peers, its table and picture."""

import math

import pytest
import torch

from bench import decode, decode_impls
from bench.decode_rows import MIXED, Row, make_inputs, rows
from cute_attn.lab.benchmark.peers import Declined

ROWS = list(rows())


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


def test_an_append_fills_the_last_rows():
    row = next(row for row in SMALL if row.append)
    (x,) = make_inputs(row, "cpu", copies=1)
    assert x.cache_seqlens.tolist() == [36, 36] and x.rotary_cos.shape == (39, 8)
    decode_impls.ours("sm90")(row, x)[""](x)
    for b in range(2):
        page = x.page_table[b, 36 // 3]
        assert x.v_cache[page, 36 % 3].equal(x.v[b, 0])


def test_packed_queries_of_a_mixed_batch():
    row = next(row for row in ROWS if row.mixed)
    queries = [n for n, _ in MIXED]
    assert row.sequences == MIXED and row.packed and row.capacity == max(keys for _, keys in MIXED)
    assert sum(queries) == 2 * 2048 + 64
    pairs = sum(n * k - n * (n - 1) // 2 for n, k in MIXED)
    assert row.flops == 4 * 128 * 32 * pairs


# ---- peers ----


DECLINED = {
    "cudnn": ["b16-k8192-page1", "b64-k32768-ragged", "b8-k8192-q16-causal", "b16-k32768-window4096"],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, some in DECLINED.items() for row in some])
def test_what_a_peer_cannot_compute_is_declined(name, row):
    one = next(r for r in ROWS if r.name == row)
    with pytest.raises(Declined):
        decode_impls.PEERS[name](one, None)


def test_a_call_that_fails_or_differs_is_an_error_of_its_implementation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = SMALL[0]
    inputs = make_inputs(row, "cpu", copies=1)
    right = decode_impls.ours("sm90")

    def declines(row, x):
        raise Declined("it has no caches")

    def raises(row, x):
        raise KeyError("a")

    def breaks(row, x):
        return {"a": lambda x: x.missing, "b": right(row, x)[""]}

    def differs(row, x):
        return {"": lambda x: right(row, x)[""](x) * 1.2}

    given = {"declines": declines, "raises": raises, "right": right, "breaks": breaks, "differs": differs}
    monkeypatch.setattr(decode_impls, "IMPLEMENTATIONS", given)
    stages = []
    calls, errors = decode.ready(row, tuple(given), inputs, stages.append)
    assert set(calls) == {("right", ""), ("breaks", "b")} and stages == [(name,) for name in given]
    assert errors["declines"] == "it has no caches" and set(errors) == {"declines", "raises", "differs"}
    assert errors["differs"].startswith("its output differs from right's by 0.2")
