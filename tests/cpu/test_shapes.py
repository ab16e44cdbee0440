"""The sweep of random shapes without a GPU: its shapes, failing peers, reported ratios."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import cliffs, isolated, shapes
from cute_attn.lab.benchmark import peers
from cute_attn.lab.benchmark.workload import Workload, visible_pairs

SEEDS = range(3)


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"seed{seed}")
def swept(request):
    return shapes.sweep(80, request.param)


# ---- shapes ----


def test_shapes_are_distinct_and_bounded(swept):
    names = {w.name for w in shapes.workloads(swept, "both")}
    assert len(swept) == 80 and len(names) == 160
    least, most = shapes.MILLISECONDS
    for w in swept:
        assert all(least <= shapes.estimate(both) <= most for both in (w, replace(w, op="backward")))
        assert shapes.nbytes(w) <= shapes.MAX_BYTES
        assert 1 <= w.longest <= shapes.MAX_SEQLEN_Q and 16 <= w.longest_k <= shapes.MAX_SEQLEN_K
        assert min(min(lengths) for lengths in w.sequences) >= 1
        assert w.nheads % w.nheads_kv == 0 and 1 <= w.nheads // w.nheads_kv <= 16
        assert w.nheads <= shapes.MAX_NHEADS and len(w.sequences) <= shapes.MAX_BATCH
        assert all(dim in range(32, 257, 8) for dim in (w.head_dim, w.head_dim_v))
        w.traits("sm80"), replace(w, op="backward").traits("sm90")


# ---- useful operations ----

_SIZES = st.integers(1, 40)
_BOUND = st.none() | st.integers(0, 45)


def _count(seqlen_q, seqlen_k, left, right):
    """(query, key) pairs under the band, counted one by one."""
    own = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= key >= own - left
    if right is not None:
        seen &= key <= own + right
    return int(seen.sum())


@given(_SIZES, _SIZES, _BOUND, _BOUND)
def test_pairs_are_counted(seqlen_q, seqlen_k, left, right):
    assert visible_pairs(seqlen_q, seqlen_k, left, right) == _count(seqlen_q, seqlen_k, left, right)


@given(
    st.lists(st.tuples(_SIZES, _SIZES), min_size=1, max_size=4),
    st.sampled_from(["", "causal", "window", "causal_window"]),
    st.integers(1, 30),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from([("forward", 8 + 24), ("backward", 3 * 8 + 2 * 24)]),
)
def test_flops_are_of_the_pairs_of_every_sequence(lengths, mask, window, right, packed, op):
    causal, windowed = mask.startswith("causal"), mask.endswith("window")
    options = {
        "causal": causal,
        "window": window if windowed else 0,
        "window_right": right if mask == "window" else 0,
        "op": op[0],
    }
    if packed:
        queries, keys = zip(*lengths, strict=True)
        workload = Workload(1, 1, 6, 8, 2, 24, lengths=queries, lengths_k=keys, **options)
    else:
        lengths = lengths[:1] * 3
        workload = Workload(3, lengths[0][0], 6, 8, 2, 24, seqlen_k=lengths[0][1], **options)
    band = (window if windowed else None, 0 if causal else right if windowed else None)
    pairs = sum(_count(*pair, *band) for pair in lengths)
    assert workload.flops == 2 * 6 * pairs * op[1]


# ---- peers accept the shapes ----


@pytest.mark.parametrize(
    "features",
    [
        {"seqlen_k": 40, "causal": True},
        {"seqlen_k": 9, "window": 5, "window_right": 2},
        {"lengths": (3, 17), "lengths_k": (20, 4), "window": 6, "causal": True},
        {"lengths": (3, 17), "lengths_k": (20, 4), "softcap": True},
    ],
)
def test_we_compute_what_the_workload_says(features):
    """Against torch's softmax with an explicit mask."""
    workload = Workload(2, 24, 4, 64, 2, 32, dtype="fp32", **features)
    x = workload.inputs("cpu")
    out = peers.ours("sm80")(workload, x)()
    assert out.shape == (*x.q.shape[:-1], 32)
    if workload.lengths:
        tensors = zip(
            x.q.split(workload.lengths),
            *(tensor.split(workload.lengths_k) for tensor in (x.k, x.v)),
            out.split(workload.lengths),
            strict=True,
        )
    else:
        tensors = zip(x.q, x.k, x.v, out, strict=True)
    left, right = workload.band
    for q, k, v, mine in tensors:
        own = torch.arange(len(q))[:, None] + len(k) - len(q)
        distance = torch.arange(len(k)) - own
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= distance < -left if left is not None else hidden
        hidden |= distance > right if right is not None else hidden
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8
        if workload.softcap:
            scores = 30 * (scores / 30).tanh()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(mine, torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))


# ---- separate processes ----

_TASKS = [isolated.Task(Workload(1, seqlen, 1, 64), ("good", "bad", "own")) for seqlen in (1, 2, 3)]


def _rows(task):
    return [{"workload": task.workload.name, "impl": name, "ms": 1.0} for name in task.names]


def _work(tasks, send, trouble):
    """Times nothing; "bad" fails at the second workload by calling ``trouble``."""
    for task in tasks:
        send(("stage", task.names))
        for name in task.names:
            send(("stage", (name,)))
            if name == "bad" and task.workload.seqlen == 2:
                trouble()
        send(("rows", (_rows(task), 1500)))


def _raises():
    raise RuntimeError("illegal access\nand where")


def _ends():
    os._exit(3)


def _hangs():
    signal.pause()


@pytest.mark.parametrize(
    "trouble, error",
    [
        (_raises, "RuntimeError: illegal access"),
        (_ends, "it ended the process (exit code 3)"),
        (_hangs, "it did not return within 4 s"),
    ],
)
def test_a_peer_that_ends_the_process_loses_its_row(trouble, error):
    def work(tasks, send):
        _work(tasks, send, trouble)

    found = list(isolated.run_tasks(work, _TASKS, patience=4, context="fork"))
    for task, (rows, clock) in zip(_TASKS, found, strict=True):
        expected = _rows(task)
        if task.workload.seqlen == 2:
            expected[1] = {"workload": task.workload.name, "impl": "bad", "error": error}
        assert rows == expected and clock == 1500


# ---- ratios ----

OWN = "cute_attn/forward-sm90"


@pytest.fixture
def result():
    def row(workload, impl, ms=None, error="it has no such thing"):
        numbers = {"ms": ms, "value": 2.0 / ms, "unit": "TFLOP/s"} if ms else {"error": error}
        return {"workload": workload, "impl": impl} | numbers

    rows = []
    for workload, fa4, cudnn, ours in (
        ("fwd-fast", 2.0, None, 1.0),
        ("fwd-slow", 1.0, 0.4, 1.0),
        ("fwd-alone", None, None, 1.0),
        ("fwd-broken", 1.0, None, None),
        ("fwd-even", 1.0, 3.0, 1.0),
    ):
        rows += [
            row(workload, "fa4", fa4),
            row(workload, "cudnn", cudnn),
            row(workload, OWN, ours, "it broke"),
        ]
        rows.append(row(workload, "cute_attn/forward-sm80", 0.1))
    rows += [row("bwd-slow", "fa4", 1.0), row("bwd-slow", "cute_attn/backward-sm90", 2.0)]
    machine = {"gpu": "NVIDIA H200", "clock_mhz": 1500, "commit": "abc", "date": "2026-11-22T08:00:00+00:00"}
    return machine | {"rows": rows}


WORST_FIRST = ["fwd-broken", "fwd-slow", "bwd-slow", "fwd-even", "fwd-fast", "fwd-alone"]


def test_ratios_are_of_what_a_call_gets_to_the_fastest_peer(result):
    found = {c.workload: c for c in cliffs.compare(result)}
    assert list(found) == WORST_FIRST
    ratios = {name: c.ratio for name, c in found.items()}
    assert ratios == {
        "fwd-broken": None,
        "fwd-slow": 0.4,
        "bwd-slow": 0.5,
        "fwd-even": 1.0,
        "fwd-fast": 2.0,
        "fwd-alone": None,
    }
    assert found["fwd-slow"].peer == "cudnn" and found["fwd-broken"].error == "it broke"
    assert found["fwd-slow"].flops == pytest.approx(2e9) and found["bwd-slow"].op == "backward"
