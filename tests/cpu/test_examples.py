"""The examples run, and their claims hold: a layout and an epilogue from outside the package."""

import json
import re

import pytest
import torch

import cute_attn.flex
from cute_attn import attention
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference import emulate
from cute_attn.reference.tilings import TILINGS, Scores
from cute_attn.traits import Traits
from tests import notebook, processes
from tests.programs import load

EXAMPLES = processes.ROOT / "examples"


@pytest.mark.parametrize("name", ["custom_layout", "custom_epilogue"])
def test_runs_as_a_script(name):
    done = processes.run(str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 0 bytes spilled") == 3, done.stdout
    assert "No GPU here" in done.stdout


NEEDS = {
    "generate.py": "--device is 'cuda', and there is no GPU; accepted here: --device cpu",
    "context_parallel.py": "RANK is not set; accepted: processes that torchrun starts",
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_an_example_needs_is_one_sentence(name):
    done = processes.run(str(EXAMPLES / name))
    assert done.returncode == 2 and f"{name}: error: {NEEDS[name]}" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_learned_bias_is_learned_alike():
    """As with a dense bias, on the CPU; the table's gradient is what finds the token."""
    example = load("learned_bias")
    runs = [example.train(f, "cpu", 6, 40) for f in (example.dense, cute_attn.flex.flex_attention)]
    torch.testing.assert_close(*(torch.tensor(losses) for losses, _ in runs), atol=1e-4, rtol=1e-4)
    assert all((table[:, :8] != 0).all() for _, table in runs)


@pytest.mark.slow
def test_the_notebooks_outputs_are_todays():
    """`python -m tests.notebook examples/walkthrough.ipynb --write` stores them."""
    path = EXAMPLES / "walkthrough.ipynb"
    done = processes.run("-m", "tests.notebook", str(path))
    assert done.returncode == 0, done.stderr
    assert without_measures(path.read_text()) == without_measures(done.stdout)


def without_measures(text):
    """A notebook without its pictures' bytes and its rounding errors, which differ between machines."""
    read = json.loads(text)
    for cell in notebook.cells(read):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = "a picture"
    return re.sub(r"\d\.\de-\d\d", "error", json.dumps(read, indent=1))


def test_a_program_of_flex_attention(monkeypatch, capsys):
    import torch.nn.attention.flex_attention as pytorch

    monkeypatch.setattr(pytorch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # no compiler is loaded
    load("flex_attention").main()
    printed = capsys.readouterr().out
    assert "3 images, 301 patches" in printed and "No GPU here" in printed
    assert float(printed.partition("PyTorch's ")[2].split()[0]) < 1e-5


# ---- a layout ----


# ---- an epilogue ----


@pytest.mark.parametrize("name", ["warps4x1-64x32", "wgmma1-64x80"])
def test_an_epilogue_on_both_generations_tilings(name):
    load("custom_epilogue")
    tiling = TILINGS[name].of("causal-relative_position")
    problem = Scores.random(2, 3, 90, 130, extra={"relative_position": (torch.randn(3, 41),)})
    got, expected = problem.emulate(tiling).scores, problem.expected_scores(tiling.traits)
    seen = ~got.isnan()
    torch.testing.assert_close(got[seen], expected[seen], atol=1e-5, rtol=1e-6)
    assert (expected[~seen] == -torch.inf).all()


def test_an_epilogue_is_used_by_attention():
    """On CPU tensors: a table that grows with distance leaves each query its own key alone."""
    load("custom_epilogue")
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    table = (torch.arange(-4, 5).abs() * -1e4).expand(2, 9).contiguous()
    out = attention(q, k, v, epilogues={"relative_position": table})
    torch.testing.assert_close(out, v)
    scores = emulate.scores_by_definition(
        Traits.parse("forward-sm80-fp16-d8-relative_position"),
        torch.zeros(1, 2, 6, 6),
        1.0,
        ScoreInputs(extra={"relative_position": (table,)}),
    )
    assert float(scores.diagonal(dim1=-2, dim2=-1).abs().max()) == 0.0 and float(scores.min()) == -4e4
