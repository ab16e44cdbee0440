"""The examples that generate through a paged cache: on the GPU their steps are replays of one CUDA graph."""

import re

import pytest
import torch

from tests import programs
from tests.gpu.archs import runnable_archs

CALLS = [("1", ()), ("16", ()), ("24", ())]
if "sm90" in runnable_archs("kvcache"):
    CALLS.append(("16", ("--latent",)))


@pytest.mark.parametrize(("page", "options"), CALLS)
def test_every_token_is_plain_torchs(page, options, monkeypatch, capsys):
    # It raises where a token is not among the most likely ones.
    programs.run(monkeypatch, "generate --steps 20 --layers 2 --longest 90", "--page", page, *options)
    printed = capsys.readouterr().out
    assert "decoded in a CUDA graph" in printed
    assert int(re.search(r"(\d+) of 80 tokens", printed)[1]) >= 60


def test_every_token_that_is_served_is_plain_torchs(monkeypatch, capsys):
    programs.load("generate")  # the example imports it
    programs.run(
        monkeypatch,
        "serve --requests 12 --slots 4 --layers 2 --width 512 --heads-kv 2 --longest 90 --wanted 20 --chunk 64",
        *("--compared", "12"),
    )
    printed = capsys.readouterr().out
    equal, total = map(int, re.search(r"(\d+) of (\d+) compared tokens", printed).groups())
    assert torch.cuda.get_device_name() in printed and equal >= 0.75 * total
