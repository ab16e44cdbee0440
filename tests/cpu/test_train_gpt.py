"""The example that trains a GPT, on the CPU: with the reference, and with PyTorch's attention."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = [
    "--device",
    "cpu",
    "--dropout",
    "0",
    "--steps",
    "4",
    "--width",
    "128",
    "--seqlen",
    "32",
    "--batch",
    "2",
]


def run(example, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *SMALL, *arguments])
    example.main()


def test_both_attentions_train_alike(example, monkeypatch, tmp_path, capsys):
    run(example, monkeypatch, "--plot", str(tmp_path / "curves.png"))
    assert "apart by 0.0" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "curves.json").exists()


def test_a_different_attention_is_detected(example, monkeypatch):
    plain = example.attention
    monkeypatch.setattr(example, "attention", lambda q, k, v, **options: plain(q, k, v) * 1.5)
    with pytest.raises(SystemExit, match=r"the losses of step \d+ differ by"):
        run(example, monkeypatch, "--plot", "")


def test_the_seed_is_as_pytorch_takes_it(example, monkeypatch):
    class Generator:
        offset = 8

        def initial_seed(self):
            return 2**64 - 3

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})
    state = example.torch_rng_state(torch.empty(2, 5, 3, 8))
    assert state.tolist() == [-3, 8] and generator.offset == 8 + 32 * 2 * 3
