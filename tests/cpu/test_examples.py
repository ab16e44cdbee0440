"""The examples run on CPUs, and their claims hold."""

import json
import re
import socket

import pytest
import torch

import cute_attn.flex
from tests import machine, notebook, processes, programs
from tests.programs import load

EXAMPLES = processes.ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_layout", "custom_epilogue"])
def test_runs_as_a_script(name):
    done = processes.run(str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 0 bytes spilled") == 3, done.stdout
    assert "No GPU here" in done.stdout


NEEDS = {
    "generate.py --device cuda": "--device is 'cuda', and there is no GPU; accepted here: --device cpu",
    "serve.py --device cuda": "--device is 'cuda', and there is no GPU; accepted here: --device cpu",
    "context_parallel.py": "RANK is not set; accepted: processes that torchrun starts",
}


@pytest.mark.parametrize("command", NEEDS)
def test_what_an_example_needs_is_one_sentence(command):
    name, *options = command.split()
    done = processes.run(str(EXAMPLES / name), *options)
    assert done.returncode == 2 and f"{name}: error: {NEEDS[command]}" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_learned_bias_is_learned_like_a_dense_one():
    """On the CPU, losses equal the ones with a dense bias; only the table's gradient makes the model find the token."""
    example = load("learned_bias")
    runs = [example.train(f, "cpu", 6, 40) for f in (example.dense, cute_attn.flex.flex_attention)]
    torch.testing.assert_close(*(torch.tensor(losses) for losses, _ in runs), atol=1e-4, rtol=1e-4)
    assert all((table[:, :8] != 0).all() for _, table in runs)


NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_outputs_are_todays(path):
    """`python -m tests.notebook FILE --write` stores them."""
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
    printed, warned = capsys.readouterr()
    assert not warned
    assert "3 images, 301 patches" in printed and "No GPU here" in printed
    assert float(printed.partition("PyTorch's ")[2].split()[0]) < 1e-5


# ---- an epilogue ----


# ---- drop-ins, on CPUs ----


def in_two_processes(tmp_path, *arguments):
    """The rows of examples/context_parallel.py."""
    command = [EXAMPLES / "context_parallel.py", "--heads", 2, "--head-dim", 16, *arguments]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # What torchrun sets, without the interpreters that it starts.
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = ({"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2))
    both = processes.run_at_once(
        [[*command, "--json", tmp_path / "rows.json"]] * 2, *(common | rank for rank in ranks)
    )
    for done in both:
        assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(max(row["errors"].values()) < 0.01 for row in rows)
    return rows


@pytest.mark.slow
def test_context_parallel_over_two_processes(tmp_path):
    """The overridden operators compute each section of a sequence, and PyTorch merges the results."""
    rows = in_two_processes(tmp_path)
    assert [row["rotation"] for row in rows] == ["allgather", "alltoall"]
    assert all(row["served"] == 4 for row in rows)  # two parts of keys, forward and backward


@pytest.mark.slow
def test_documents_over_two_processes(tmp_path):
    """PyTorch gathers keys, and gives each process its rows of the BlockMask."""
    assert [row["by"] for row in in_two_processes(tmp_path, "--documents", 3)] == ["cute_attn"]


def test_models_before_and_after(tmp_path):
    done = processes.run(
        str(EXAMPLES / "drop_in.py"), "--small", "--repeats", "1", "--json", str(tmp_path / "rows.json")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No GPU here: nothing is served" in done.stdout and " times, " not in done.stdout
    assert "images/s" not in done.stdout and "tokens/s" not in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "dit" in rows
    for row in rows.values():
        assert 0 < row["before_error"] < 0.05 and 0 < row["after_error"] < 0.05


# ---- programs that compare their own attention with plain torch's ----

GENERATE = "generate --device cpu --steps 6 --layers 2 --width 256 --longest 20 --batch 3"
SERVE = "serve --device cpu --chunk 6 --compared 5"
TRAIN = "train_gpt --device cpu --dropout 0 --steps 4 --width 128 --seqlen 32 --batch 2 --plot"
MEANFLOW = "meanflow --device cpu --steps 3"


def run(monkeypatch, command, *arguments):
    programs.load("generate")  # serve imports it
    programs.run(monkeypatch, command, *arguments)


@pytest.mark.parametrize(("page", "options"), [("1", ()), ("7", ()), ("64", ()), ("7", ("--latent",))])
def test_every_token_is_plain_torchs(monkeypatch, capsys, page, options):
    run(monkeypatch, GENERATE, "--page", page, "--seed", page, *options)
    assert "18 of 18 tokens are plain torch's most likely ones" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["1", "7"])
def test_every_token_that_is_served_is_plain_torchs(monkeypatch, capsys, page):
    """Prompts come in chunks, and requests reuse slots and pages of earlier requests."""
    run(monkeypatch, SERVE, "--page", page, "--seed", page)
    printed = capsys.readouterr().out
    equal, total = re.search(r"(\d+) of (\d+) compared tokens", printed).groups()
    assert equal == total and f"{total} generated, on the CPU" in printed


def test_both_attentions_learn_alike(monkeypatch, tmp_path, capsys):
    run(monkeypatch, TRAIN, str(tmp_path / "curves.png"))
    assert "apart by 0.0" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "curves.json").exists()
    run(monkeypatch, MEANFLOW)
    assert "largest difference" in capsys.readouterr().out


def of_a_cache(right):
    """``attention_with_kvcache`` at positions that are too late by one."""
    return lambda *tensors, **given: right(*tensors, **given | {"cache_seqlens": given["cache_seqlens"] + 1})


def of_tangents(right):
    def wrong(q, k, v):
        out = right(q, k, v)
        return out.detach() + 1.01 * (out - out.detach())

    return wrong


WRONG = {
    "generate": (GENERATE, of_a_cache, "behind plain torch's"),
    "generate latent": (f"{GENERATE} --latent", of_a_cache, "behind plain torch's"),
    "serve": (SERVE, of_a_cache, "behind plain torch's"),
    "train_gpt": (
        f"{TRAIN}=",
        lambda right: lambda q, k, v, **options: right(q, k, v) * 1.5,
        r"the losses of step \d+ differ by",
    ),
    "meanflow output": (MEANFLOW, lambda right: lambda *x: 1.01 * right(*x), "differ by more than rounding"),
    "meanflow tangent": (MEANFLOW, of_tangents, "differ by more than rounding"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_attention_is_detected(monkeypatch, name):
    command, wrong, message = WRONG[name]
    programs.load("generate")
    example = programs.load(command.split()[0])
    called = "attention_with_kvcache" if hasattr(example, "attention_with_kvcache") else "attention"
    monkeypatch.setattr(example, called, wrong(getattr(example, called)))
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, command)


def test_the_seed_is_as_pytorch_takes_it(monkeypatch):
    generator = machine.Generator(2**64 - 3, 8)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})
    state = programs.load("train_gpt").torch_rng_state(torch.empty(2, 5, 3, 8))
    assert state.tolist() == [-3, 8] and generator.offset == 8 + 32 * 2 * 3
