"""The example that generates through a paged cache: on the GPU its steps are replays of one CUDA graph."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


@pytest.mark.parametrize("page", ["1", "16", "24"])
def test_every_token_is_plain_torchs(page, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("generate", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arguments = ["--steps", "20", "--layers", "2", "--longest", "90", "--page", page]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    example.main()  # raises where a token is not among the most likely ones
    printed = capsys.readouterr().out
    assert "decoded in a CUDA graph" in printed
    assert int(re.search(r"(\d+) of 80 tokens", printed)[1]) >= 60
