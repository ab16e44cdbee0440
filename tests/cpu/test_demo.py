"""``make demo`` fits on a screen, and reports the step that failed."""

import pytest
import typer

from cute_attn.cli import demo, main
from tests import processes


@pytest.mark.slow
def test_it_prints_at_most_fifty_lines_of_eighty_columns():
    done = processes.run("-m", "cute_attn.cli.demo", environment={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) < 50 and "All agree." in done.stdout and "There is no GPU" in done.stdout


@pytest.mark.parametrize("status", [0, 1])
def test_it_names_the_command_that_fails(monkeypatch, status):
    def explained(word):
        raise typer.Exit(status)

    monkeypatch.setattr(main.lab.explain, "explain", explained)
    assert list(demo.run("explain causal", "a word")) == ["explain causal"] * status
