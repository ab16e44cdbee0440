"""Benchmarks without a GPU: rows of decoding, of drop-ins and of masks, and the package's calls for them."""

import math
from functools import partial

import pytest
import torch

from bench import cliffs, decode, decode_impls, masks
from bench.decode_rows import Row, make_inputs
from bench.drop_ins import ROWS, Attention, all_served
from cute_attn.host.call import Call
from cute_attn.sdpa import slower
from cute_attn.sdpa.calls import request_of, why_not

# ---- decoding ----


def visible(row: Row, queries: int, keys: int) -> list[set[int]]:
    """The set of keys that each query sees."""
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


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_our_call_is_attention_with_the_rows_keys(row):
    """Compare with plain torch over the row's keys, found through the tables of pages."""
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


def test_an_implementation_that_fails_in_every_way_is_a_row(monkeypatch):
    """Its error names another's way to be called, in one line."""

    def calls(row, x, factor):
        return {how: lambda x: x.q.float() * factor for how in ("2 splits", "")}

    known = {"fa3": partial(calls, factor=1), "fa2": partial(calls, factor=2)}
    monkeypatch.setattr(decode_impls, "IMPLEMENTATIONS", known)
    monkeypatch.setattr(decode, "make_inputs", lambda row: make_inputs(row, "cpu", copies=1))
    monkeypatch.setattr(decode, "captured", lambda calls: calls[0])
    monkeypatch.setattr(decode, "microseconds", lambda replays, _: dict.fromkeys(replays, 5.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fa3, fa2 = decode.time_row(SMALL[0], tuple(known), 1.0, lambda names: None)[0]
    assert fa3["ms"] == 0.005
    assert fa2["error"] == "its output differs from fa3, 2 splits's by 1 of the largest element"


@pytest.mark.parametrize("names", [("fa3", "cute_attn/tf32"), ("cute_attn/tf32", "cute_attn/forward-sm80")])
def test_a_result_of_any_implementations_is_shown(names):
    rows = [
        {"workload": "fwd-x", "impl": name, "ms": i + 1.0, "value": 10.0, "unit": "TFLOP/s"}
        for i, name in enumerate(names)
    ]
    shown = cliffs.table({"rows": rows})
    assert cliffs.compare({"rows": rows})[0].ms == 2.0
    assert all(name.rpartition("-")[2] in shown for name in names)


# ---- drop-ins: rows cover what is left to PyTorch for being slower here ----


def calls():
    """The call of each row under cuDNN, which PyTorch prefers on Hopper, by the row's name."""
    found = {}
    for name, row in ROWS.items():
        if isinstance(row, Attention):
            inputs, mask = row.tensors("cpu" if row.batch < 4 else "meta")
            bias = None if mask is None else mask.to(inputs[0].dtype)
            tensors = Call(*(x.transpose(1, 2) for x in inputs), bias=bias)
            options = {"causal": row.causal, "dropout_p": row.dropout_p, "learns": row.train}
            call = request_of("cudnn", tensors, scale=None, **options)
            found[name] = call._replace(devices=frozenset([*call.devices][:1]), target="sm90")
    return found


@pytest.mark.parametrize("row", slower.ROWS, ids=lambda row: row.kind)
def test_each_rule_is_measured(row):
    decisions = {row.applies(call) for call in calls().values()}
    assert decisions == {True, False} and row.ours_ms > row.pytorch_ms


def test_all_are_served_without_the_rules():
    cuda = frozenset([torch.device("cuda", 0)])
    of = {name: call._replace(devices=cuda) for name, call in calls().items()}
    declined = [name for name, call in of.items() if why_not(call) is not None]
    inference = [name for name in of if name.startswith("DiT") and "training" not in name]
    assert declined == [name for name in of if name in inference or "1 quer" in name]
    with pytest.raises(ZeroDivisionError), all_served():
        assert not [name for name, call in of.items() if why_not(call) is not None]
        raise ZeroDivisionError
    assert [name for name, call in of.items() if why_not(call) is not None] == declined


# ---- masks ----


@pytest.fixture
def short(monkeypatch):
    """Sequences of few blocks, in which each mask hides something."""
    sizes = {"SEQLEN": 384, "HEADS": 2, "GRID": 32, "RADIUS": 4, "DOCUMENT": 150, "PREFIX": 160}
    for name, value in (sizes | {"WINDOW": 100, "FIRST": 20, "REACH": 200}).items():
        monkeypatch.setattr(masks, name, value)
    monkeypatch.setitem(masks.OPTIONS, "window", {"causal": True, "window": (99, 0)})


@pytest.mark.parametrize("kind", [*masks.OPTIONS, "alibi", "softcap"])
def test_what_is_built_in_is_the_same(short, kind):
    row = masks.prepared(masks.Row(kind, 64), "cpu")
    torch.testing.assert_close(masks.cute(row)(), masks.built_in(row)(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", masks.MASKS)
def test_each_mask_hides_scores_and_leaves_some_for_each_query(short, kind):
    q, kv = torch.arange(masks.SEQLEN)[:, None], torch.arange(masks.SEQLEN)
    seen = masks.MASKS[kind](0, 0, q, kv)
    assert 0 < seen.sum() < seen.numel() and seen.any(1).all()


def test_a_table_without_wrong_results():
    own = {"workload": "d64-causal", "op": "forward"}
    results = [
        own | {"impl": "cute", "ms": 1.0},
        own | {"impl": "fa4", "ms": 1.5},
        own | {"impl": "flex", "ms": 0.1, "error": "its output differs by 1"},
    ]
    lines = masks.table(results).splitlines()
    assert lines[1].split() == ["d64-causal", "forward", "1.000", "1.500", "-"]
    assert lines[2:] == ["forward: fa4 takes 1.50 of the time over 1 rows, least 1.50"]
