"""Benchmarks without a GPU: their arithmetic, files, and calls of peers."""

import importlib.machinery
import importlib.metadata
import json
import math
import sys
import types
from dataclasses import replace
from functools import partialmethod

import pytest
import torch

from bench import backward, forward, run, table
from cute_attn.api import attention as interface
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.lab.benchmark import peers, results
from cute_attn.lab.benchmark.workload import Workload, mixed_lengths, of_traits, standard
from cute_attn.lab.check import Accuracy, check_workloads, small_workloads
from cute_attn.reference import emulate
from cute_attn.traits import Traits


def test_names_are_distinct_and_describe_the_workload():
    workloads = [*forward.workloads(), *backward.workloads()]
    assert len({w.name for w in workloads}) == len(workloads)
    assert standard(128, 8192, causal=True).name == "fwd-bf16-d128-b2-s8192-h16-causal"
    assert Workload(1, 64, 32, 128, nheads_kv=8, bias="fp32").name == "fwd-bf16-d128-b1-s64-h32x8-bias_fp32"
    both = Workload(1, 64, 32, 128, bias="bf16", op="backward", bias_grad=True)
    assert both.name == "bwd-bf16-d128-b1-s64-h32-bias_bf16-bias_grad"
    assert both.traits("sm90").name == "backward-sm90-bf16-d128-bias_bf16-bias_grad"
    assert both.traits("sm90", "forward").name == "forward-sm90-bf16-d128-bias_bf16"


def test_names_of_stored_results_are_still_those_of_workloads():
    stored = {
        row["workload"]
        for path in run.RESULTS.glob("*ward.json")
        for row in json.loads(path.read_text())["rows"]
    }
    assert stored and stored <= {w.name for w in [*forward.workloads(), *backward.workloads()]}


def test_lengths_of_keys_and_windows_are_named():
    few = Workload(2, 512, 16, 128, nheads_kv=2, seqlen_k=8192, causal=True)
    assert few.name == "fwd-bf16-d128-b2-s512x8192-h16x2-causal"
    assert (few.longest, few.longest_k, few.equal_lengths) == (512, 8192, False)
    banded = Workload(1, 64, 2, 64, window=8, window_right=3)
    assert banded.name == "fwd-bf16-d64-b1-s64-h2-window8_3" and banded.traits("sm80").mask == "window"
    assert replace(banded, window=0).name == "fwd-bf16-d64-b1-s64-h2-window_3"
    assert replace(banded, window=0).band == (None, 3) and replace(banded, window_right=0).band == (8, 0)
    varlen = Workload(1, 1, 2, 64, lengths=(3, 5), lengths_k=(5, 3))
    assert varlen.name == "fwd-bf16-d64-varlen2x5x5-h2" and varlen.sequences == ((3, 5), (5, 3))
    x = replace(varlen, lengths_k=(7, 4)).inputs("cpu")
    assert x.cu_seqlens.tolist() == [0, 3, 8] and x.cu_seqlens_k.tolist() == [0, 7, 11]
    assert x.q.shape[0] == 8 and x.k.shape[0] == x.v.shape[0] == 11
    assert Workload(1, 64, 2, 64, seqlen_k=64) == Workload(1, 64, 2, 64)
    for wrong in ({"lengths_k": (1,)}, {"causal": True, "window_right": 1}):
        with pytest.raises(ValueError, match=r"is .*; accepted: "):
            replace(varlen, **wrong)


def test_useful_flops_are_of_two_or_five_products():
    forward_ = Workload(2, 64, 3, 8, head_dim_v=16, seqlen_k=96)
    assert forward_.flops == 2 * 2 * 3 * 64 * 96 * (8 + 16)
    assert replace(forward_, op="backward").flops == 2 * 2 * 3 * 64 * 96 * (3 * 8 + 2 * 16)


def test_mixed_lengths_use_all_tokens():
    lengths = mixed_lengths(16384, 8192)
    assert sum(lengths) == 16384 and max(lengths) == 8192 and min(lengths) == 128 and len(lengths) > 5
    varlen = Workload(1, 1, 2, 64, lengths=(3, 5))
    assert varlen.flops == 4 * 2 * (9 + 25) * 64
    assert varlen.inputs("cpu").cu_seqlens.tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "features",
    ["", "-causal", "-window-softcap-alibi", "-bias_bf16-dropout", "-causal-varlen", "-causal-sinks_bf16"],
)
def test_workloads_of_traits(features):
    for op in ("forward",) if "sinks" in features else ("backward", "forward"):
        traits = Traits.parse(op + "-sm80-bf16-d64" + features)
        workload = of_traits(traits, 2048)
        assert workload.traits("sm80") == traits
    assert workload.causal == (traits.causal or traits.windowed) and bool(workload.window) == traits.windowed
    assert (workload.softcap, workload.alibi) == (traits.softcap, traits.alibi)
    assert (workload.bias, workload.dropout, workload.sinks) == (traits.bias, traits.dropout, traits.sinks)
    assert bool(workload.lengths) == traits.varlen
    assert all(small.nheads == 2 * small.nheads_kv for small in small_workloads(traits))


@pytest.mark.parametrize("workload", list(forward.workloads()), ids=lambda workload: workload.name)
def test_torchs_operators_accept_the_workload(workload):
    """On fake tensors: the call gives an output of q's shape, or the peer declines."""
    x = workload.inputs("meta")
    for peer in (peers.fa2, peers.mem_efficient):
        try:
            out = peer(workload, x)()
        except peers.Declined as reason:
            assert "has no" in str(reason) or "wants" in str(reason)
            continue
        assert out.shape == x.q.shape


@pytest.mark.parametrize("workload", list(backward.workloads()), ids=lambda workload: workload.name)
def test_torchs_gradients_accept_the_workload(workload):
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


def test_peers_decline_unsupported_workloads():
    for peer, features in (
        (peers.fa2, {"bias": "bf16"}),
        (peers.fa4, {"dropout": "flash"}),
        (peers.cudnn, {"window": 8}),
        (peers.mem_efficient, {"nheads_kv": 1}),
        (peers.cudnn, {"bias": "bf16", "op": "backward", "bias_grad": True}),
        (peers.fa2, {"alibi": True, "op": "backward"}),
        (peers.mem_efficient, {"window": 8, "window_right": 8}),
        (peers.fa3, {"alibi": True}),
        (peers.fa3, {"dropout": "flash"}),
        *((peer, {"sinks": "bf16"}) for peer in (peers.fa2, peers.fa3, peers.cudnn, peers.mem_efficient)),
    ):
        workload = Workload(1, 16, 2, 64, **features)
        with pytest.raises(peers.Declined, match="has no"):
            peer(workload, workload.inputs("meta"))
    fewer = Workload(1, 16, 2, 64, seqlen_k=32, causal=True)
    with pytest.raises(peers.Declined, match="aligns causal to the first"):
        peers.cudnn(fewer, fewer.inputs("meta"))


_DISABLED = ("LOCAL", "SOFTCAP", "FP16", "HDIM96", "HDIM192", "SM8x")


@pytest.fixture
def flash_attention_3(monkeypatch, tmp_path):
    """The folder of a fake FA3 whose functions are the reference on the CPU."""

    def bounds(window_size):
        return tuple(None if side == -1 else side for side in window_size)

    def dense(q, k, v, *, causal, window_size, softcap, num_splits):
        assert num_splits == (1 if q.requires_grad else 0)
        return interface.attention(q, k, v, causal=causal, window=bounds(window_size), softcap=softcap)

    def varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        *,
        causal,
        window_size,
        softcap,
        num_splits,
    ):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"causal": causal, "window": bounds(window_size), "softcap": softcap}
        return interface.attention_varlen(q, k, v, *lengths, **options)

    flags = {f"FLASHATTENTION_DISABLE_{name}": True for name in _DISABLED}
    flags |= {f"FLASH_ATTENTION_DISABLE_HDIMDIFF{dim}": True for dim in (64, 192)}
    names = ("flash_attn_interface", "flash_attn_config")
    modules = [types.ModuleType(name) for name in names]
    modules[0].flash_attn_func, modules[0].flash_attn_varlen_func = dense, varlen
    modules[1].CONFIG = {"build_flags": flags}
    for name, module in zip(names, modules, strict=True):
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(tmp_path / f"{name}.py"))
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


@pytest.mark.parametrize(
    "features",
    [
        {"causal": True, "seqlen_k": 24},
        {"nheads_kv": 1, "head_dim": 128},
        {"lengths": (5, 11), "lengths_k": (9, 3), "causal": True},
        {"op": "backward", "causal": True, "nheads_kv": 1},
    ],
)
def test_fa3_is_called_for_supported_workloads(features, flash_attention_3):
    workload = Workload(**{"batch": 1, "seqlen": 16, "nheads": 2, "head_dim": 64, "dtype": "fp32"} | features)
    x = workload.inputs("cpu")
    given, expected = (peer(workload, x)() for peer in (peers.fa3, peers.ours("sm80")))
    if workload.op == "forward":
        given, expected = (given,), (expected,)
    assert len(given) == len(expected)
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "features, words",
    [
        ({"window": 8}, "without windows"),
        ({"softcap": True}, "without softcap"),
        ({"dtype": "fp16"}, "without fp16"),
        ({"head_dim": 96}, "up to 96"),
        ({"head_dim": 160}, "up to 192"),
        ({"head_dim": 64, "head_dim_v": 128}, "for unequal head dims"),
        ({"lengths": (3, 4), "op": "backward"}, "end the process"),
    ],
)
def test_fa3_declines_features_that_were_not_built(features, words, flash_attention_3):
    workload = Workload(**{"batch": 1, "seqlen": 16, "nheads": 2, "head_dim": 64} | features)
    with pytest.raises(peers.Declined, match=words):
        peers.fa3(workload, workload.inputs("meta"))


def test_fa3_has_a_version(flash_attention_3, monkeypatch):
    assert peers.versions()["fa3"] == "not installed"
    (flash_attention_3 / "COMMIT").write_text("0123456789abcdef\n")
    assert peers.versions()["fa3"] == "commit 0123456789ab"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 3.0")
    assert peers.versions()["fa3"] == "flash-attn-3 3.0"


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
    assert lines[0] == "| workload | **forward-sm80** | FA2 | cuDNN | **sm80** / FA2 | best / best peer |"
    assert lines[2:] == ["| a | 300 | 250 | - | 1.20 | 1.20 |", "| b | - | 200 | - | - | - |"]
    assert len(table.table(result, ("*a",)).splitlines()) == 3
    readme = tmp_path / "docs" / "speed.md"
    readme.parent.mkdir()
    readme.write_text(f"before\n{table.BEGIN['forward']}\nold\n{table.END['forward']}\nafter\n")
    source = results.write(result, tmp_path / "bench" / "results" / "x.json")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "ROWS", ("*",))
    monkeypatch.setattr("sys.argv", ["table", "--write", str(source)])
    table.main()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert table.table(result) in text and "bench/results/x.json" in text
    assert (tmp_path / "docs" / "speed.png").read_bytes().startswith(b"\x89PNG")
    run.print_table(result)
    printed = capsys.readouterr().out
    assert "1.20x" in printed and "geometric mean 1.200, least 1.200" in printed


def test_fa3_has_a_column_and_a_caption(result):
    fa3 = {"workload": "fwd-a", "impl": "fa3", "ms": 0.5, "value": 600.0, "unit": "TFLOP/s"}
    result["rows"].insert(2, fa3)
    result["peers"]["fa3"] = "commit abc"
    text = table.section(result, "x.json")
    assert "FA2 | cuDNN | FA3 |" in text and "FA3 commit abc, FA4 4.0 (" in text
    assert "| a | 300 | 250 | - | 600 | 1.20 | 0.50 |" in text


def test_the_picture_is_of_both_results_that_the_readme_names(result, tmp_path, monkeypatch):
    """Also of the one that was not written again; a result file that is missing is left out."""
    backward_ = result | {
        "rows": [row | {"workload": row["workload"].replace("fwd", "bwd")} for row in result["rows"]]
    }
    readme = tmp_path / "docs" / "speed.md"
    readme.parent.mkdir()
    short = tmp_path / "README.md"
    short.write_text(f"before\n{table.SHORT_BEGIN}\nold\n{table.SHORT_END}\nafter\n")
    monkeypatch.setattr(table, "SHORT_ROWS", ("a", "b"))
    readme.write_text("".join(f"{table.BEGIN[op]}\n{table.END[op]}\n" for op in table.BEGIN))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "ROWS", ("*",))
    first, second = (
        results.write(x, tmp_path / name) for x, name in ((result, "f.json"), (backward_, "b.json"))
    )
    drawn = []
    monkeypatch.setattr(table, "plot", lambda *given: drawn.append(given))
    table.write([first, second])
    table.write([first])
    second.unlink()
    table.write([first])
    picture = tmp_path / "docs" / "speed.png"
    assert drawn == [(result, backward_, picture)] * 2 + [(result, None, picture)]
    lines = short.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    assert "| a | **300** | 250 (FA2) | 1.20 | **300** | 250 (FA2) | 1.20 |" in lines
    assert "| b | - | 200 (FA2) | - | - | 200 (FA2) | - |" in lines


def test_the_picture_has_a_dot_a_row_that_both_computed(result, tmp_path):
    more = {"workload": "fwd-a", "impl": "cute_attn/forward-sm90", "ms": 0.8, "value": 375.0}
    result["rows"] += [more, {"workload": "fwd-c", "impl": "fa4", "ms": 2.0, "value": 1.0}]
    assert table.times(result) == [(1.2, 0.8)]
    for path, results_ in (("one", (result, None)), ("none", (None, None))):
        assert table.plot(*results_, tmp_path / f"{path}.png").read_bytes().startswith(b"\x89PNG")


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
    """On the CPU, where the kernel is the reference in float32."""
    if op == "forward":
        features = features.replace("-bias_grad", "")
    traits = Traits.parse(op + "-sm80-bf16-d64" + features)
    monkeypatch.setattr(Workload, "inputs", partialmethod(Workload.inputs, device="cpu"))
    for workload, accuracy in check_workloads(traits, small_workloads(traits)[1:2]):
        assert workload.op == op and accuracy.passed and accuracy.error > 0


def test_the_emulated_score_tile_depends_on_its_indices():
    """Another window gives other scores; the demo compares with the reference."""
    kernel = registry.lookup(Traits.parse("forward-sm80-bf16-d64-window"))
    products = torch.randn(1, 2, 70, 90)
    scores = emulate.scores_on_host(kernel, products, 0.5, ScoreInputs(window_left=5, window_right=0))
    key, query = torch.arange(90), torch.arange(70)[:, None]
    seen = (key <= query + 20) & (key >= query + 15)
    assert torch.equal(scores.isfinite(), seen.expand_as(scores))
    assert torch.equal(scores[scores.isfinite()], (products * 0.5)[seen.expand_as(scores)])


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_newest_kernel_is_a_call_that_names_none(op, monkeypatch):
    monkeypatch.setattr(peers, "ours", lambda kernel: kernel)
    for target, kernels in (("sm86", {"sm80": None}), ("sm90", {"sm80": "sm80", "sm90": None})):
        monkeypatch.setattr("cute_attn.compiler.default_target", lambda arch, target=target: target)
        assert peers.own_kernels(op) == {f"cute_attn/{op}-{arch}": kernel for arch, kernel in kernels.items()}
