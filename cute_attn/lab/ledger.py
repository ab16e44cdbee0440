"""The ledger: what was predicted of a change, and what was measured afterwards.

One JSON object a line, appended under a file lock and never rewritten: ``{"kind": "prediction", ...}``, later
``{"kind": "result", "id": ...}`` of the same id, and perhaps ``{"kind": "seen", ...}`` with a person's words.
A prediction made after its measurement is refused: what is wrong teaches more than what was fitted.
"""

import hashlib
import json
import os
import re
import subprocess
import uuid
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from filelock import FileLock
from rich.text import Text

from cute_attn.lab.benchmark.results import commit
from cute_attn.lab.race import Comparison, Measured
from cute_attn.lab.tables import Table

Judgement = Literal["right", "wrong", "undecided", "open"]

_RANGE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*%?\s*\.\.\s*([+-]?\d+(?:\.\d+)?)\s*%?\s*")
_WIDTHS = (0.02, 0.05, 0.1)
"""Of predicted ranges, in which calibration counts: up to 2%, 5%, 10% and wider."""


@dataclass(frozen=True)
class Entry:
    """A prediction and, once measured, what came of it.

    Attributes:
        id: names it.
        date: when it was predicted, in ISO 8601 and UTC.
        commit: of the sources then, with a digest of what differed from it.
        question: what is asked, such as ``"A against B on W"``.
        change: what is changed.
        low, high: the predicted range of a's speed over b's, less 1: 0.02 for 2% faster.
        why: the reason.
        result: the comparison as JSON, or None.
        static: how the two differ before anything is run, as JSON, or None.
        outcome: whether the prediction was right.
        seen: a person's words on it.
    """

    id: str
    date: str
    commit: str
    question: str
    change: str
    low: float
    high: float
    why: str
    result: dict[str, Any] | None = None
    static: dict[str, Any] | None = None
    outcome: Judgement = "open"
    seen: str = ""

    @property
    def predicted(self) -> str:
        """The range as text."""
        return f"{100 * self.low:+g}..{100 * self.high:+g}%"


def default_path() -> Path:
    """``bench/ledger.jsonl`` of the checkout that runs, or ``ledger.jsonl`` here where the package is installed."""
    bench = Path(__file__).parents[2] / "bench"
    return bench / "ledger.jsonl" if bench.is_dir() else Path("ledger.jsonl")


def parse_range(text: str) -> tuple[float, float]:
    """Shares from a text such as ``"+2..+5%"``: (0.02, 0.05).

    Raises:
        ValueError: it is not a range.
    """
    found = _RANGE.fullmatch(text)
    low, high = (float(found[1]) / 100, float(found[2]) / 100) if found else (1.0, 0.0)
    if low > high:
        raise ValueError(f"predict is {text!r}; accepted: a range such as '+2..+5%'")
    return low, high


def predict(
    question: str, change: str, *, low: float, high: float, why: str, path: Path | None = None
) -> Entry:
    """Write a prediction, before it is measured.

    Args:
        low, high: shares by which a is faster than b: 0.02 for 2%, negative for slower.

    Raises:
        ValueError: the range is empty, or there is no reason.
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}; accepted: low up to high")
    if not why.strip():
        raise ValueError("why is ''; accepted: the reason for the prediction")
    entry = Entry(uuid.uuid4().hex[:8], _now(), commit_with_changes(), question, change, low, high, why)
    fields = ("id", "date", "commit", "question", "change", "low", "high", "why")
    _append(path, {"kind": "prediction"} | {name: getattr(entry, name) for name in fields})
    return entry


def settle(
    entry: Entry, result: Comparison, *, static: dict[str, Any] | None = None, path: Path | None = None
) -> Entry:
    """Write what was measured of a prediction; returns the entry with its outcome.

    Raises:
        ValueError: the prediction is not in the ledger, was settled before, or was made after the measurement began.
    """
    known = {one.id: one for one in entries(path)}.get(entry.id)
    if known is None:
        raise ValueError(f"prediction {entry.id} is not in {path or default_path()}")
    if known.result is not None:
        raise ValueError(f"prediction {entry.id} was settled before, as {known.outcome}")
    if result.started <= known.date:
        raise ValueError(
            f"prediction {entry.id} is of {known.date}, and its measurement began at {result.started}; "
            "accepted: predictions made before"
        )
    outcome = judge(known, result.measured)
    found = result.to_json()
    values = {"result": found, "static": static, "outcome": outcome}
    _append(path, {"kind": "result", "id": entry.id, "date": _now(), **values})
    return replace(known, result=found, static=static, outcome=outcome)


def see(id: str, words: str, *, path: Path | None = None) -> None:
    """Write a person's words on an entry.

    Raises:
        ValueError: there is no such entry.
    """
    if id not in {entry.id for entry in entries(path)}:
        raise ValueError(f"id is {id!r}; accepted: ids that the ledger lists")
    _append(path, {"kind": "seen", "id": id, "date": _now(), "seen": words})


def judge(entry: Entry, measured: Iterable[Measured]) -> Judgement:
    """Whether a prediction was right: on all workloads; wrong: on one of them.

    On one it is right if the measured median is in the range, unless the A/B was undecided and its interval reaches
    beyond; wrong if the whole interval is outside.
    """
    each = []
    for one in measured:
        within = entry.low <= one.ratio - 1 <= entry.high
        outside = one.low - 1 > entry.high or one.high - 1 < entry.low
        inside = entry.low <= one.low - 1 and one.high - 1 <= entry.high
        if outside:
            each.append("wrong")
        else:
            each.append("right" if within and (inside or one.outcome != "undecided") else "undecided")
    if "wrong" in each:
        return "wrong"
    return "right" if set(each) == {"right"} else "undecided"


def entries(path: Path | None = None) -> list[Entry]:
    """All predictions with what came of them, in their order; none where there is no file.

    A line that is not the ledger's, as one that its writer did not end, is left out with a warning.
    """
    path = path or default_path()
    if not path.is_file():
        return []
    found: dict[str, Entry] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = _applied(json.loads(line), found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"line {number} of {path} is not the ledger's: {error!r}", stacklevel=2)
            continue
        found[entry.id] = entry
    return list(found.values())


def _applied(values: dict[str, Any], found: dict[str, Entry]) -> Entry:
    """The entry that a line makes or changes."""
    kind, id = values.pop("kind"), values["id"]
    if kind == "prediction":
        entry = Entry(**values)
        _ = entry.high - entry.low  # numbers
        return entry
    if values.get("result") is not None:
        Comparison.from_json(values["result"])
    return replace(found[id], **{name: values[name] for name in values if name not in ("id", "date")})


def table(path: Path | None = None) -> Table:
    """A row a prediction."""
    shown = Table("id", "date", "question", "why", "predicted", "measured", "outcome", "seen")
    shown.columns[0].no_wrap = True  # `--see` takes it
    shown.columns[2].min_width = 24
    for entry in entries(path):
        found = "-"
        if entry.result is not None:
            comparison = Comparison.from_json(entry.result)
            found = "\n".join(
                f"{100 * (one.ratio - 1):+.1f}% ({100 * (one.low - 1):+.1f} to {100 * (one.high - 1):+.1f})"
                for one in comparison.measured
            )
        cells = (
            entry.id,
            entry.date[:10],
            entry.question,
            entry.why,
            entry.predicted,
            found,
            entry.outcome,
            entry.seen,
        )
        shown.add_row(*map(Text, cells))  # a person's words are no markup
    return shown


@dataclass(frozen=True)
class Calibration:
    """How often ranges of one width held.

    Attributes:
        width: the widest, as a share; infinite for the last.
        right, wrong, undecided, open: numbers of predictions.
    """

    width: float
    right: int
    wrong: int
    undecided: int
    open: int

    @property
    def held(self) -> float | None:
        """The share of right ones among those that were right or wrong, or None without any."""
        decided = self.right + self.wrong
        return self.right / decided if decided else None


def calibration(path: Path | None = None) -> list[Calibration]:
    """How often predictions held, by the width of their ranges."""
    known, rows, narrower = entries(path), [], -1.0
    for width in (*_WIDTHS, float("inf")):
        these = [entry.outcome for entry in known if narrower < entry.high - entry.low - 1e-9 <= width]
        counts = {name: these.count(name) for name in ("right", "wrong", "undecided", "open")}
        rows.append(Calibration(width, **counts))
        narrower = width
    return rows


def calibration_table(path: Path | None = None) -> Table:
    """A row a width."""
    shown = Table("range up to", "right", "wrong", "undecided", "open", "held")
    for row in calibration(path):
        width = "wider" if row.width == float("inf") else f"{100 * row.width:g}%"
        counts = (str(n) for n in (row.right, row.wrong, row.undecided, row.open))
        shown.add_row(width, *counts, "-" if row.held is None else f"{100 * row.held:.0f}%")
    return shown


def commit_with_changes() -> str:
    """:func:`cute_attn.lab.benchmark.results.commit`, where files differ from it with a digest of the difference."""
    name = commit()
    if not name.endswith("-dirty"):
        return name
    command = ["git", "-C", str(Path(__file__).parent), "diff", "HEAD"]
    try:
        difference = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return name
    return f"{name}-{hashlib.sha256(difference).hexdigest()[:8]}"


def as_json(path: Path | None = None) -> list[dict[str, Any]]:
    """All entries as plain values."""
    return [asdict(entry) for entry in entries(path)]


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _append(path: Path | None, values: dict[str, Any]) -> None:
    path = path or default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")), path.open("ab+") as file:
        if file.tell() and not _ends_a_line(file):  # its writer was killed, or the disk was full
            file.write(b"\n")
        file.write(json.dumps(values).encode() + b"\n")


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
