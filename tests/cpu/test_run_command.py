"""``cute-attn run``: a program behaves as it does without it, and its attention calls are listed and compared."""

import json
import os

import pytest
import torch

from cute_attn.cli import run
from cute_attn.host import doors
from cute_attn.host.activation import Options
from cute_attn.sdpa import operators, overrides
from cute_attn.sdpa.observe import Observer
from tests import processes

PROGRAM = """if True:
    import sys, torch
    from torch.nn.functional import scaled_dot_product_attention
    import beside
    q = torch.randn(2, 4, 16, 32)
    for _ in range(3):
        scaled_dot_product_attention(q, q, q, is_causal=True)
    scaled_dot_product_attention(q, q, q, torch.zeros(16, 16))
    print(__name__, sys.argv[1:], beside.x)
    if "exit" in sys.argv:
        sys.exit(3)
    if "raise" in sys.argv:
        raise ValueError("from the program")
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text("x = 5\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_script_runs_as_itself_and_is_reported(program, tmp_path):
    results = str(tmp_path / "out.json")
    done = processes.run("-m", "cute_attn", "run", "--json", results, str(program), "--shadow", "1", "-m")
    assert (done.returncode, done.stdout) == (0, "__main__ ['--shadow', '1', '-m'] 5\n")
    assert "4 attention calls, 0 on the kernels" in done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["calls"] for row in found["rows"]] == [3, 1]
    assert {row["reason"] for row in found["rows"]} == {"query is on cpu; accepted: cuda"}
    assert found["rows"][0]["signature"] == "fp32, 2x4x16x32, k 2x4x16x32, v 2x4x16x32, causal"


@pytest.mark.slow
def test_a_module_and_its_failures(program):
    done = processes.alone("-m", "cute_attn", "run", "-m", "program", "exit", folder=program.parent)
    assert (done.returncode, done.stdout) == (3, "__main__ ['exit'] 5\n")
    done = processes.run("-m", "cute_attn", "run", str(program), "raise")
    assert (
        done.returncode == 1 and "Traceback" in done.stderr and "ValueError: from the program" in done.stderr
    )
    assert "4 attention calls" in done.stderr


def test_nothing_starts_cuda(monkeypatch):
    """A program may still choose its GPUs, or fork."""
    asked = []
    for name in ("current_device", "get_device_capability", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: pytest.fail("CUDA was started"))
    check = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(os.environ.get(check)) or True)
    monkeypatch.delenv(check, raising=False)
    options = Options(("flash",))
    execution = run.Execution("program", options, 0, None, False)
    execution.begin()
    assert overrides.serving().options is options and doors.observer is not None
    execution.end()
    assert overrides.serving() is None and doors.observer is None
    assert set(asked) == {"1"} and check not in os.environ


MODULES = """if True:
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention
    x = torch.randn(2, 5, 16)
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    encoder, attention = nn.TransformerEncoder(layer, 3).eval(), nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        encoder(x), attention.eval()(x, x, x)                              # where a CPU has faster ways
    attention.train()(x, x, x, need_weights=False)[0].sum().backward()
    q = torch.randn(2, 4, 16, 32)
    with torch.inference_mode():
        scaled_dot_product_attention(q, q, q)
    nested = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 4)])
    scaled_dot_product_attention(nested, nested, nested)
    import cute_attn.flash_attn, cute_attn.transformers
    cute_attn.flash_attn.install()
    import flash_attn
    flash_attn.flash_attn_func(q, q, q, softcap=2.0)
    cute_attn.transformers.attention_forward(nn.Module(), q, q, q, None, is_causal=False)
    assert cute_attn.flash_attn.served is cute_attn.transformers.served is cute_attn.sdpa.served
    assert cute_attn.sdpa.served.total() == 2
"""


def test_calls_of_modules_and_by_other_doors_are_listed(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(MODULES)
    done = processes.run("-m", "cute_attn", "run", "--json", str(tmp_path / "out.json"), str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {(row["operator"], row["signature"]): row["calls"] for row in rows}
    name, size = "scaled_dot_product_attention", "2x4x16x32, k 2x4x16x32, v 2x4x16x32"
    assert found == {
        (name, "fp32, 2x2x5x8, k 2x2x5x8, v 2x2x5x8"): 4,
        (name, f"fp32, {size}"): 1,
        (name, "fp32, 2 nested, k 2 nested, v 2 nested"): 1,
        ("flash_attn.flash_attn_func", f"fp32, {size}, softcap 2.0"): 1,
        ("transformers.attention_forward", f"fp32, {size}"): 1,
    }
    by_us = [row for row in rows if "." in row["operator"]]
    assert {row["reason"] for row in by_us} == {"query is on cpu, where the reference computes it"}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 9, 16, generator=generator).half() for _ in range(3)]


def observed(observer, calls, stock, **options):
    """Outputs of flash attention's forward under an observer, by the reference."""
    name, q = "_scaled_dot_product_flash_attention", tensors()
    return [
        observer(name, operators.flash_forward, Options(), stock, tuple(q), options) for _ in range(calls)
    ]


def worse(by):
    """A stand-in for PyTorch's kernel whose results are ``by`` larger."""

    def stock(*args, **kwargs):
        torch.rand(3)
        out, *others = operators.flash_forward(Options(), *args, **kwargs)
        return out + by, *others

    return stock


def test_shadowed_calls_are_compared_and_timed():
    observer, state = Observer(2), torch.get_rng_state()
    found = observed(observer, 5, worse(0.5))
    (row,) = observer.rows.values()
    largest = (found[0][0].float() + 0.5).abs().max()
    assert row.calls == 5 and row.reason is None and abs(row.difference - 0.5 / float(largest)) < 1e-3
    assert len(row.ours_us) == len(row.pytorch_us) == 2 and min(row.ours_us + row.pytorch_us) > 0
    ours, theirs = (sum(x) / 2 for x in (row.ours_us, row.pytorch_us))
    assert row.gain_us == pytest.approx(5 * (theirs - ours))
    assert all(torch.equal(x[0], found[0][0]) for x in found)
    assert torch.equal(torch.get_rng_state(), state)
