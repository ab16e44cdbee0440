"""``cute-attn run``: a program sees what it would without, and its attention calls are listed and compared."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from cute_attn import sdpa
from cute_attn.cli import app
from cute_attn.sdpa import operators
from cute_attn.sdpa.observe import Observer, describe, difference
from cute_attn.sdpa.operators import Options
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


def test_a_module_and_its_failures(program):
    command = [sys.executable, "-m", "cute_attn", "run", "-m", "program", "exit"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=program.parent)
    assert (done.returncode, done.stdout) == (3, "__main__ ['exit'] 5\n")
    done = processes.run("-m", "cute_attn", "run", str(program), "raise")
    assert (
        done.returncode == 1 and "Traceback" in done.stderr and "ValueError: from the program" in done.stderr
    )
    assert "4 attention calls" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "the program is 'nothing.py'; accepted: a Python file, or -m and a module"),
        (["--backends", "math", __file__], r"backends is \('math',\); accepted: a tuple"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = CliRunner().invoke(app, ["run", *arguments])
    assert isinstance(done.exception, ValueError) and not done.output
    with pytest.raises(ValueError, match=message):
        raise done.exception


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


def test_what_cannot_be_compared_is_only_counted():
    def never(*args, **kwargs):
        raise AssertionError("called")

    observer = Observer(3)
    observed(observer, 2, never, dropout_p=0.5)
    observed(observer, 2, None)
    assert [(row.calls, row.difference, row.gain_us) for row in observer.rows.values()] == [
        (2, None, None)
    ] * 2

    def missing(*args, **kwargs):
        raise RuntimeError("no such kernel")

    other = Observer(1)
    (found,) = observed(other, 1, missing)
    assert isinstance(found, tuple) and next(iter(other.rows.values())).difference is None


def test_a_declined_call_has_its_reason():
    observer = Observer(1)
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    given = (q, q, q, None, True, 0.5)
    found = observer(
        "_scaled_dot_product_cudnn_attention", operators.cudnn_forward, Options(), None, given, {}
    )
    (row,) = observer.rows.values()
    assert row.reason == found and found.startswith("dropout_p is 0.5; accepted under cuDNN")
    assert row.signature == "bf16, 1x2x8x16, k 1x2x8x16, v 1x2x8x16, dropout_p 0.5"


def test_the_dispatcher_asks_the_observer():
    observer = Observer()
    activation = sdpa.Activation(Options(), "CPU")
    try:
        with observer.watching():
            torch.ops.aten._scaled_dot_product_flash_attention(*tensors())
        torch.ops.aten._scaled_dot_product_flash_attention(*tensors())
    finally:
        activation.remove()
    assert [row.calls for row in observer.rows.values()] == [1]


def test_signatures_as_text():
    q = torch.zeros(16, 4, 8, dtype=torch.bfloat16)
    bias = torch.zeros(1, 1, 1, 9).expand(2, 4, 9, 9)
    cu = torch.zeros(3, dtype=torch.int32)
    given = {"query": q, "key": q, "value": q, "attn_bias": bias, "cum_seq_q": cu, "window_size_left": 3}
    text = (
        "bf16, 16x4x8, k 16x4x8, v 16x4x8, bias fp32 1x1x1x9, 2 sequences, window_size_left 3, alibi_slopes"
    )
    assert describe(given | {"alibi_slopes": q, "window_size_right": -1}) == text


def test_differences_are_relative_and_of_floating_tensors():
    a, b = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])
    assert difference((a, torch.tensor([3])), (b, torch.tensor([9]))) == pytest.approx(0.2)
    assert difference((a, None), (a, None)) == 0
