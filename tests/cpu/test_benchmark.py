"""What can be known of a benchmark without a GPU: its arithmetic, its files, the peers' signatures."""

import json
import math
from dataclasses import replace
from functools import partialmethod

import pytest
import torch

from bench import backward, forward, run, table
from cute_attn import emulate, registry
from cute_attn.benchmark import peers, results
from cute_attn.benchmark.workload import Workload, mixed_lengths, of_traits, standard
from cute_attn.check import Accuracy, check_workloads, small_workloads
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


def test_names_are_distinct_and_say_what_is_timed():
    workloads = [*forward.workloads(), *backward.workloads()]
    assert len({w.name for w in workloads}) == len(workloads)
    assert standard(128, 8192, causal=True).name == "fwd-bf16-d128-b2-s8192-h16-causal"
    assert Workload(1, 64, 32, 128, nheads_kv=8, bias="fp32").name == "fwd-bf16-d128-b1-s64-h32x8-bias_fp32"
    both = Workload(1, 64, 32, 128, bias="bf16", op="backward", bias_grad=True)
    assert both.name == "bwd-bf16-d128-b1-s64-h32-bias_bf16-bias_grad"
    assert both.traits("sm90").name == "backward-sm90-bf16-d128-bias_bf16-bias_grad"
    assert both.traits("sm90", "forward").name == "forward-sm90-bf16-d128-bias_bf16"


@pytest.mark.parametrize("seqlen, window", [(64, 0), (64, 1), (64, 10), (64, 63), (64, 200)])
def test_useful_flops_count_the_pairs(seqlen, window):
    i, j = torch.arange(seqlen)[:, None], torch.arange(seqlen)
    full = Workload(2, seqlen, 3, 8, head_dim_v=16)
    assert full.flops == 2 * 2 * 3 * seqlen * seqlen * (8 + 16)
    assert replace(full, op="backward").flops == 2 * 2 * 3 * seqlen * seqlen * (3 * 8 + 2 * 16)
    if window:
        seen = int(((j <= i) & (j >= i - window)).sum())
        banded = Workload(2, seqlen, 3, 8, causal=True, window=window)
        assert banded.flops == 2 * 2 * 3 * seen * (8 + 8)
    else:
        assert Workload(2, seqlen, 3, 8, head_dim_v=16, causal=True).flops == full.flops // 2


def test_mixed_lengths_use_all_tokens():
    lengths = mixed_lengths(16384, 8192)
    assert sum(lengths) == 16384 and max(lengths) == 8192 and min(lengths) == 128 and len(lengths) > 5
    packed = Workload(1, 1, 2, 64, lengths=(3, 5))
    assert packed.flops == 4 * 2 * (9 + 25) * 64
    assert packed.inputs("cpu").cu_seqlens.tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "features", ["", "-causal", "-window-softcap-alibi", "-bias_bf16-dropout", "-causal-varlen"]
)
def test_workloads_of_traits(features):
    for op in ("forward", "backward"):
        traits = Traits.parse(op + "-sm80-bf16-d64" + features)
        workload = of_traits(traits, 2048)
        assert workload.traits("sm80") == traits
    assert workload.causal == (traits.causal or traits.windowed) and bool(workload.window) == traits.windowed
    assert (workload.softcap, workload.alibi) == (traits.softcap, traits.alibi)
    assert (workload.bias, workload.dropout) == (traits.bias, traits.dropout)
    assert bool(workload.lengths) == traits.varlen
    assert all(small.nheads == 2 * small.nheads_kv for small in small_workloads(traits))


@pytest.mark.parametrize("workload", list(forward.workloads()), ids=lambda workload: workload.name)
def test_torchs_operators_take_what_they_are_given(workload):
    """On tensors without data: the call is well formed and gives an output of q's shape, or the peer declines."""
    x = workload.inputs("meta")
    for peer in (peers.fa2, peers.mem_efficient):
        try:
            out = peer(workload, x)()
        except peers.Declined as reason:
            assert "has no" in str(reason) or "wants" in str(reason)
            continue
        assert out.shape == x.q.shape


@pytest.mark.parametrize("workload", list(backward.workloads()), ids=lambda workload: workload.name)
def test_torchs_gradients_take_what_they_are_given(workload):
    for peer in (peers.fa2, peers.mem_efficient):
        x = workload.inputs("meta")
        try:
            grads = peer(workload, x)()
        except peers.Declined as reason:
            assert "has no" in str(reason) or "wants" in str(reason)
            continue
        assert [g.shape for g in grads] == [y.shape for y in x.leaves(workload)]
        assert len(grads) == 3 + workload.bias_grad


def test_our_gradients_are_timed():
    workload = Workload(1, 16, 2, 64, causal=True, bias="fp32", op="backward", bias_grad=True, dtype="fp32")
    x = workload.inputs("cpu")
    grads = peers.ours("sm80")(workload, x)()
    assert [g.shape for g in grads] == [x.q.shape, x.k.shape, x.v.shape, x.bias.shape] and grads[3].any()


def test_peers_decline_what_they_lack():
    for peer, features in (
        (peers.fa2, {"bias": "bf16"}),
        (peers.fa4, {"dropout": "flash"}),
        (peers.cudnn, {"window": 8}),
        (peers.mem_efficient, {"nheads_kv": 1}),
        (peers.cudnn, {"bias": "bf16", "op": "backward", "bias_grad": True}),
        (peers.fa2, {"alibi": True, "op": "backward"}),
    ):
        workload = Workload(1, 16, 2, 64, **features)
        with pytest.raises(peers.Declined, match="has no"):
            peer(workload, workload.inputs("meta"))


@pytest.fixture
def result():
    rows = [
        {"workload": "fwd-a", "impl": "cute_attn/forward-sm80", "ms": 1.0, "value": 300.0, "unit": "TFLOP/s"},
        {"workload": "fwd-a", "impl": "fa2", "ms": 1.2, "value": 250.0, "unit": "TFLOP/s"},
        {"workload": "fwd-a", "impl": "cudnn", "error": "it has no such thing"},
        {"workload": "fwd-b", "impl": "cute_attn/forward-sm80", "error": "broken"},
        {"workload": "fwd-b", "impl": "fa2", "ms": 1.0, "value": 200.0, "unit": "TFLOP/s"},
    ]
    return {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "clock_mhz": 1500,
        "torch": "2.13",
        "cutlass_dsl": "4.8.1",
        "peers": {"fa4": "4.0"},
        "commit": "abc",
        "date": "2026-11-21T08:00:00+00:00",
        "rows": rows,
    }


def test_a_result_reads_back(result, tmp_path):
    path = results.write(result, results.default_path(tmp_path, "forward", result))
    assert path.name == "2026-11-21-h200-forward.json"
    assert json.loads(path.read_text()) == result
    assert path.read_text().count("\n") > len(result["rows"])


def test_the_table(result, tmp_path, monkeypatch, capsys):
    lines = table.table(result).splitlines()
    peers = "FA2 | mem-eff. | cuDNN | FA4"
    assert lines[0] == f"| workload | **forward-sm80** | {peers} | **sm80** / FA2 | best / best peer |"
    assert lines[2:] == ["| a | 300 | 250 | - | - | - | 1.20 | 1.20 |", "| b | - | 200 | - | - | - | - | - |"]
    assert len(table.table(result, ("*a",)).splitlines()) == 3
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN['forward']}\nold\n{table.END['forward']}\nafter\n")
    source = results.write(result, tmp_path / "bench" / "results" / "x.json")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(table, "README_ROWS", ("*",))
    monkeypatch.setattr("sys.argv", ["table", "--write", str(source)])
    table.main()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert table.table(result) in text and "bench/results/x.json" in text
    run.print_table(result)
    printed = capsys.readouterr().out
    assert "1.20x" in printed and "geometric mean 1.200, least 1.200" in printed


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
    """On the CPU, where the kernel is the definition in float32."""
    if op == "forward":
        features = features.replace("-bias_grad", "")
    traits = Traits.parse(op + "-sm80-bf16-d64" + features)
    monkeypatch.setattr(Workload, "inputs", partialmethod(Workload.inputs, device="cpu"))
    for workload, accuracy in check_workloads(traits, small_workloads(traits)[1:2]):
        assert workload.op == op and accuracy.passed and accuracy.error > 0


def test_the_emulated_score_tile_sees_its_own_indices():
    """Not only equal to the reference, as the demo shows, but sensitive: another window gives other scores."""
    kernel = registry.lookup(Traits.parse("forward-sm80-bf16-d64-window"))
    products = torch.randn(1, 2, 70, 90)
    scores = emulate.scores_on_host(kernel, products, 0.5, ScoreInputs(window_left=5, window_right=0))
    key, query = torch.arange(90), torch.arange(70)[:, None]
    seen = (key <= query + 20) & (key >= query + 15)
    assert torch.equal(scores.isfinite(), seen.expand_as(scores))
    assert torch.equal(scores[scores.isfinite()], (products * 0.5)[seen.expand_as(scores)])
