"""The examples of drop-ins, on CPUs."""

import json
import socket

from tests import processes

EXAMPLES = processes.ROOT / "examples"


def test_context_parallel_over_two_processes(tmp_path):
    """Each part of a sequence is computed by the overridden operators, and merged by PyTorch."""
    command = [EXAMPLES / "context_parallel.py", "--seqlen", 128, "--heads", 2, "--head-dim", 16]
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
    assert [row["rotation"] for row in rows] == ["allgather", "alltoall"]
    for row in rows:
        assert row["served"] == 4  # two parts of keys, forward and backward
        assert max(row["errors"].values()) < 0.01


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
