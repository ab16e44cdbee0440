"""The example that trains a GPT, on the CPU: with the reference, and with PyTorch's attention."""

import pytest
import torch

from tests import machine, programs

SMALL = "train_gpt --device cpu --dropout 0 --steps 4 --width 128 --seqlen 32 --batch 2"


def test_both_attentions_train_alike(monkeypatch, tmp_path, capsys):
    programs.run(monkeypatch, SMALL, "--plot", str(tmp_path / "curves.png"))
    assert "apart by 0.0" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "curves.json").exists()


def test_a_different_attention_is_detected(monkeypatch):
    example = programs.load("train_gpt")
    plain = example.attention
    monkeypatch.setattr(example, "attention", lambda q, k, v, **options: plain(q, k, v) * 1.5)
    with pytest.raises(SystemExit, match=r"the losses of step \d+ differ by"):
        programs.run(monkeypatch, SMALL, "--plot", "")


def test_the_seed_is_as_pytorch_takes_it(monkeypatch):
    generator = machine.Generator(2**64 - 3, 8)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: generator})
    state = programs.load("train_gpt").torch_rng_state(torch.empty(2, 5, 3, 8))
    assert state.tolist() == [-3, 8] and generator.offset == 8 + 32 * 2 * 3
