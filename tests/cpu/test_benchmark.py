"""Benchmarks without a GPU: useful operations, arithmetic, files, and calls of peers."""

import math
from functools import partialmethod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn.lab.benchmark import peers, results
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.check import Accuracy, check_workloads, small_workloads
from cute_attn.traits import Traits

_SIZES = st.integers(1, 40)


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


class _CountingClock:
    """Runs every call and reports a millisecond."""

    def medians(self, runs, milliseconds, most):
        for call in runs.values():
            call()
        return dict.fromkeys(runs, 1.0)


def test_failures_and_wrong_results_are_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Workload, "inputs", partialmethod(Workload.inputs, device="cpu"))

    def breaks(workload, x):
        raise IndexError("out of bounds\nand more")

    rivals = {
        "fa4": breaks,
        "fa3": peers.ours("sm80"),
        "cudnn": lambda workload, x: lambda: 1.2 * x.q,
        "mem_efficient": peers.mem_efficient,
        "cute_attn/forward-sm80": peers.ours("sm80"),
    }
    workload = Workload(1, 16, 2, 64, dtype="fp32", softcap=True, causal=True)
    stages = []
    rows, clock = results.time_workload(
        workload, rivals, _CountingClock(), 1.0, read_clock=False, stage=stages.append
    )
    assert clock is None and [row["impl"] for row in rows] == list(rivals)
    found = {row["impl"]: row.get("error") for row in rows}
    assert found["fa4"] == "IndexError: out of bounds" and "has no softcap" in found["mem_efficient"]
    assert "differs from fa3's by" in found["cudnn"]
    assert found["fa3"] is None and found["cute_attn/forward-sm80"] is None
    assert rows[1]["ms"] == 1.0 and rows[1]["value"] == pytest.approx(workload.flops / 1e9, rel=1e-3)
    timed = ("fa3", "cute_attn/forward-sm80")
    assert stages == [tuple(rivals), *((name,) for name in rivals), timed]


def test_accuracy_allows_twice_plain_torchs_error():
    exact = torch.ones(4, dtype=torch.float64)
    plain = (exact + 0.01).half()
    assert Accuracy.of((exact + 0.02).half(), exact, plain).passed
    assert not Accuracy.of((exact + 0.03).half(), exact, plain).passed
    assert not Accuracy.of(torch.full((4,), math.nan).half(), exact, plain).passed
    assert Accuracy.of(exact[:0].half(), exact[:0], plain[:0]).passed


@pytest.mark.parametrize("features", ["", "-causal-dropout", "-bias_fp32-bias_grad", "-causal-varlen"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_kernel_is_checked(op, features, monkeypatch):
    """On the CPU the kernel is the reference in float32."""
    if op == "forward":
        features = features.replace("-bias_grad", "")
    traits = Traits.parse(op + "-sm80-bf16-d64" + features)
    monkeypatch.setattr(Workload, "inputs", partialmethod(Workload.inputs, device="cpu"))
    for workload, accuracy in check_workloads(traits, small_workloads(traits)[1:2]):
        assert workload.op == op and accuracy.passed and accuracy.error > 0
