"""Predictions before, outcomes after: the file, its judgements and its refusals."""

import io
import json
import math
import multiprocessing
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cute_attn.lab import ledger
from cute_attn.lab.race import Comparison, Measured
from cute_attn.lab.sensors import State
from cute_attn.lab.statistics import Interval

A, B = "forward-sm90-bf16-d128 tile_n=112", "forward-sm90-bf16-d128 (default tile)"


def measured(low, high, workload="fwd-bf16-d128-b2-s8192-h16"):
    found = Interval(math.sqrt(low * high), low, high, 21)
    return Measured(workload, found.outcome(), found.ratio, low, high, 21, 0, 1.0, 1.0, State(1755))


def comparison(*each, started="2999-01-01T00:00:00+00:00"):
    return Comparison(A, B, each, 0.005, "a GPU", "580", "abc", started)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bench" / "ledger.jsonl"


def predict(path, low=0.02, high=0.05, why="fewer steps"):
    return ledger.predict(f"{A} against {B}", "tile_n=112", low=low, high=high, why=why, path=path)


def test_a_prediction_is_settled(path):
    assert ledger.entries(path) == []
    entry = predict(path)
    assert ledger.entries(path) == [entry] and entry.outcome == "open" and entry.predicted == "+2..+5%"
    settled = ledger.settle(entry, comparison(measured(1.028, 1.032)), path=path)
    assert settled.outcome == "right" and ledger.entries(path) == [settled]
    assert Comparison.from_json(settled.result).measured[0].low == 1.028
    ledger.see(entry.id, "as in the paper", path=path)
    assert ledger.entries(path)[0].seen == "as in the paper"


def test_the_file_is_only_appended_to(path):
    before, first = b"", predict(path)
    second = predict(path)
    for change in (
        lambda: ledger.settle(second, comparison(measured(1.1, 1.2)), path=path),
        lambda: ledger.see(second.id, "no", path=path),
        lambda: ledger.settle(first, comparison(measured(1.02, 1.05)), path=path),
    ):
        before = path.read_bytes()
        change()
        assert path.read_bytes().startswith(before) and len(path.read_bytes()) > len(before)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["prediction", "prediction", "result", "seen", "result"]
    assert [entry.outcome for entry in ledger.entries(path)] == ["right", "wrong"]


def test_a_prediction_after_its_measurement_is_refused(path):
    result = comparison(measured(1.028, 1.032), started="2001-01-01T00:00:00+00:00")
    entry = predict(path)
    with pytest.raises(
        ValueError, match=r"its measurement began at 2001-.*; accepted: predictions made before"
    ):
        ledger.settle(entry, result, path=path)
    # The file's date counts, not that of the object.
    forged = replace(entry, date="2000-01-01T00:00:00+00:00")
    with pytest.raises(ValueError, match="accepted: predictions made before"):
        ledger.settle(forged, result, path=path)
    assert ledger.entries(path) == [entry]


def test_a_prediction_is_settled_once_and_has_to_be_there(path):
    entry = predict(path)
    ledger.settle(entry, comparison(measured(1.0, 1.01)), path=path)
    with pytest.raises(ValueError, match="was settled before, as wrong"):
        ledger.settle(entry, comparison(measured(1.03, 1.04)), path=path)
    with pytest.raises(ValueError, match="prediction other is not in"):
        ledger.settle(replace(entry, id="other"), comparison(measured(1.03, 1.04)), path=path)
    with pytest.raises(ValueError, match="id is 'other'; accepted: ids that the ledger lists"):
        ledger.see("other", "words", path=path)


@pytest.mark.parametrize(
    "bounds, outcome",
    [
        ([(1.025, 1.03)], "right"),
        ([(1.015, 1.03)], "right"),  # faster, and the median is predicted
        ([(1.01, 1.025)], "undecided"),
        ([(1.01, 1.019)], "wrong"),
        ([(1.06, 1.07)], "wrong"),
        ([(0.99, 1.08)], "undecided"),
        ([(0.0, math.inf)], "undecided"),
        ([(1.025, 1.03), (1.03, 1.04)], "right"),
        ([(1.025, 1.03), (0.99, 1.0)], "wrong"),
        ([(1.025, 1.03), (1.01, 1.025)], "undecided"),
    ],
)
def test_judgements(path, bounds, outcome):
    each = [
        measured(*b) if b[0] else replace(measured(1, 1), low=0.0, high=math.inf, outcome="undecided")
        for b in bounds
    ]
    assert ledger.judge(predict(path), each) == outcome


@pytest.mark.parametrize(
    "text, expected",
    [
        ("+2..+5%", (0.02, 0.05)),
        ("2..5", (0.02, 0.05)),
        ("-1.5%..+1%", (-0.015, 0.01)),
        ("0..0%", (0.0, 0.0)),
    ],
)
def test_ranges(text, expected):
    assert ledger.parse_range(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["5%", "+5..+2%", "", "a..b", "2-5%"])
def test_wrong_ranges(text):
    with pytest.raises(ValueError, match=r"predict is .*; accepted: a range such as '\+2..\+5%'"):
        ledger.parse_range(text)


def test_wrong_predictions(path):
    with pytest.raises(ValueError, match="accepted: low up to high"):
        predict(path, 0.05, 0.02)
    with pytest.raises(ValueError, match="why is ''; accepted: the reason"):
        predict(path, why=" ")
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "result", "id": "unknown"}',
        '{"kind": "prediction", "id": "1"}',
        '{"kind": "prediction", "id": "1", "date": "", "commit": "", "question": "", "change": "", "why": "", '
        '"low": "a", "high": 1}',
        '{"kind": "seen", "id": "{id}", "saw": "no field of an entry"}',
        '{"kind": "result", "id": "{id}", "result": {"no": "comparison"}}',
        '["a list"]',
        "\udcff",
    ],
)
def test_a_broken_line_is_named_and_left_out(path, line):
    first = predict(path)
    with path.open("ab") as file:
        file.write(line.replace("{id}", first.id).encode(errors="surrogateescape") + b"\n")
    second = predict(path)
    with pytest.warns(UserWarning, match=r"line 2 of .*ledger.jsonl is not the ledger's") as seen:
        assert ledger.entries(path) == [first, second]
    assert len(seen) == 1


def test_a_line_that_its_writer_did_not_end_is_left_out(path):
    first = predict(path)
    with path.open("a") as file:
        file.write('{"kind": "prediction", "id": "kil')
    second = predict(path)
    with pytest.warns(UserWarning, match="line 2 of"):
        assert ledger.entries(path) == [first, second]


def test_words_are_no_markup(path):
    words = "a [/b] closed, a [red]colour[/red], a [link=http://there]link"
    entry = ledger.predict(words, "tile_n=112", low=0.0, high=0.1, why=words, path=path)
    ledger.see(entry.id, words, path=path)
    console = Console(file=io.StringIO(), width=500)
    console.print(ledger.table(path))
    assert console.file.getvalue().count(words) == 3


def test_calibration_counts_by_width(path):
    for low, high, found in (
        (0.02, 0.03, 1.025),
        (0.02, 0.04, 1.2),
        (0.0, 0.05, 1.03),
        (0.0, 0.05, 1.04),
        (-0.5, 0.5, 1.1),
    ):
        entry = predict(path, low, high)
        ledger.settle(entry, comparison(measured(found - 0.001, found + 0.001)), path=path)
    predict(path, 0.0, 0.08)
    rows = ledger.calibration(path)
    assert [(row.width, row.right, row.wrong, row.open) for row in rows] == [
        (0.02, 1, 1, 0),
        (0.05, 2, 0, 0),
        (0.1, 0, 0, 1),
        (math.inf, 1, 0, 0),
    ]
    assert [row.held for row in rows] == [0.5, 1.0, None, 1.0]
    assert ledger.table(path).row_count == 6 and ledger.calibration_table(path).row_count == 4


def test_two_processes_append_whole_lines(path):
    entry = predict(path)

    def write():
        for _ in range(20):
            ledger.see(entry.id, "x" * 5000, path=path)

    both = [multiprocessing.get_context("fork").Process(target=write) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(path.read_text().splitlines()) == 41 and len(ledger.entries(path)) == 1
    assert ledger.as_json(path)[0]["seen"] == "x" * 5000


def test_the_default_is_the_checkouts():
    assert ledger.default_path() == Path(__file__).parents[2] / "bench" / "ledger.jsonl"


def test_uncommitted_changes_are_told_apart(monkeypatch):
    monkeypatch.setattr(ledger, "commit", lambda: "abc-dirty")
    texts = iter([b"one", b"one", b"two"])
    done = subprocess.CompletedProcess
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done(command, 0, next(texts)))
    names = [ledger.commit_with_changes() for _ in range(3)]
    assert names[0] == names[1] != names[2] and names[0].startswith("abc-dirty-")
    monkeypatch.setattr(ledger, "commit", lambda: "abc")
    assert ledger.commit_with_changes() == "abc"
