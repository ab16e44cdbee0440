"""What a search for a tile found: a value that prints as a table, and as JSON."""

import dataclasses
import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.text import Text

from cute_attn.lab.race import Comparison
from cute_attn.lab.rank import NOISE
from cute_attn.lab.tables import Printed, Table, brief_tile
from cute_attn.tiles import Tile

Status = Literal["timed", "ranked", "built", "failed", "wrong", "not reached"]


@dataclass(frozen=True)
class Candidate:
    """A tile that a study considers.

    Attributes:
        tile, change: all its fields, and only those that differ from the default tile, as ``--tile`` accepts them.
        status: "ranked" and "built" tiles have not been run; a "wrong" tile was run but not timed.
        reason: why it failed, is wrong or has no rank.
        gains: by workload, its speed over the default's: the median of a few rounds, too few for a verdict.
        ms: by workload, the median milliseconds of a call.
        estimate: its estimated time over the default's: the geometric mean over the workloads.
        seconds: build time.
        kept: whether its times come from an earlier study.
    """

    tile: str
    change: str
    status: Status = "not reached"
    reason: str = ""
    gains: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    estimate: float | None = None
    spills_in_step: int = 0
    seconds: float = 0.0
    kept: bool = False

    @property
    def gain(self) -> float | None:
        """The geometric mean of the gains, or None if the tile was not timed."""
        return math.exp(statistics.fmean(map(math.log, self.gains.values()))) if self.gains else None

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: timed tiles by gain, then ranked tiles, those without spills first, then all others."""
        if self.gain is not None:
            return 0, -self.gain
        if self.status in ("ranked", "built"):
            return 1, self.spills_in_step > 0, math.inf if self.estimate is None else self.estimate
        return {"not reached": 2, "wrong": 3}.get(self.status, 4), 0


@dataclass(frozen=True)
class Study:
    """A search for the fastest tile.

    Attributes:
        gpu: "" if nothing was timed.
        candidates: all candidates, the best first.
        declined: how many tiles were declined before they were built, for each reason.
        best: the tile that an A/B found faster than the default and not slower on any workload; "" for the default.
        best_text: that tile as Python, to paste.
        verdict: the A/B of the fastest candidate against the default; None if it was not run.
        started: start time, UTC in ISO 8601.
    """

    name: str
    target: str
    gpu: str
    driver: str
    workloads: tuple[str, ...]
    default: str
    candidates: tuple[Candidate, ...]
    declined: dict[str, int]
    best: str
    best_text: str
    verdict: Comparison | None
    seconds: float
    notes: tuple[str, ...]
    started: str

    @property
    def sentence(self) -> str:
        if not self.gpu:
            first = next((c for c in self.candidates if c.status == "ranked"), None)
            if first is None or first.estimate is None:
                return f"{self.name}: no tile was ranked"
            seen = [c for c in self.candidates if c.status != "not reached"]
            among = "" if len(seen) == len(self.candidates) else f" of the {len(seen)} that were reached"
            said = f"{first.change} is the fastest{among}, at {first.estimate:.3f} of the default's time"
            if first.estimate > 1 / (1 + NOISE):
                near = f": the next, {first.change}, is at {first.estimate:.3f} of its time"
                near = f"{near}, and less than {NOISE:.0%} means nothing" if first.estimate < 1 else ""
                said = f"no tile{among} is faster than the default{near}"
            return f"{self.name}: by its code {said}; nothing was run"
        if self.best:
            assert self.verdict is not None
            return f"{self.verdict.sentence}; --tile {self.best}"
        if self.verdict is None:
            return f"{self.name}: the default tile stays, no candidate was faster in the race"
        return f"{self.name}: the default tile stays; {self.verdict.sentence}"

    def table(self, most: int = 20) -> Table:
        """A table of the default tile, which is the baseline, the best ``most`` candidates, and all that failed."""
        timed = self.workloads if self.gpu else ()
        shown = Table("tile", *(f"speed, {name}" for name in timed), "estimated time", "spills", "note")
        shown.title = f"{self.name} on {self.gpu or self.target}"
        default = brief_tile(self.name, self.target, self.default).replace(",", ", ")
        shown.add_row(default, *("0%" for _ in timed), "1", "", "the default")
        bad = [c for c in self.candidates if c.status in ("failed", "wrong")]
        good = [c for c in self.candidates if c not in bad and c.status != "not reached"]
        for one in (*good[:most], *bad):
            speeds = (f"{100 * (one.gains[w] - 1):+.1f}%" if w in one.gains else "-" for w in timed)
            estimate = "-" if one.estimate is None else f"{one.estimate:.3f}"
            said = Text(one.reason or ("kept" if one.kept else ""), style="red" if one in bad else "")
            shown.add_row(one.change or "(default)", *speeds, estimate, str(one.spills_in_step or "-"), said)
        if good[most:]:
            shown.caption = f"{len(good[most:])} slower ones are left out"
        return shown

    def _repr_html_(self) -> str:
        return Printed(self.table(), Text(self.sentence))._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, with ``"kind": "study"``."""
        verdict = None if self.verdict is None else self.verdict.to_json()
        values = asdict(self) | {"sentence": self.sentence, "verdict": verdict}
        return {"kind": "study"} | json.loads(json.dumps(values))


def as_python(tile: Tile) -> str:
    """A tile as an expression, with the fields that differ from its class's defaults."""
    shown = ", ".join(
        f"{f.name}={getattr(tile, f.name)!r}"
        for f in dataclasses.fields(tile)  # type: ignore[arg-type]
        if getattr(tile, f.name) != f.default
    )
    return f"{type(tile).__name__}({shown})"
