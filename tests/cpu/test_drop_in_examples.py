"""The examples of drop-ins, on CPUs."""

import json

from tests import processes

EXAMPLES = processes.ROOT / "examples"


def test_context_parallel_over_two_processes(tmp_path):
    """Each part of a sequence is computed by the overridden operators, and merged by PyTorch."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "context_parallel.py"), "--seqlen", "128", "--heads", "2", "--head-dim", "16"]
    done = processes.run(*command, "--json", str(tmp_path / "rows.json"))
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
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "dit" in rows
    for row in rows.values():
        assert 0 < row["before_error"] < 0.05 and 0 < row["after_error"] < 0.05
