"""Two kernels' machine code next to each other: what a change of a tile, a layout or a source file did to the step.

print(compare(verdict(name, "tile_n=128", lines=True), verdict(name, "tile_n=160", lines=True)))
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from cute_attn.lab.rank import check_verdict
from cute_attn.lab.sass import Instruction, Step
from cute_attn.lab.tables import Printed, Table
from cute_attn.lab.verdict import Verdict, lines_of, shown

MOST_ROWS = 40
"""Maximum rows of two steps side by side that are shown, unless all are asked for."""
CONTEXT = 3
"""Equal instructions that are shown around a difference."""

_REGISTER = re.compile(r"\b(U?[RP])\d+\b")


@dataclass(frozen=True)
class Count:
    """Each side's number of steady-step instructions with one opcode or from one source line."""

    what: str
    a: int
    b: int

    @property
    def change(self) -> int:
        return self.b - self.a


@dataclass(frozen=True)
class Row:
    """Aligned instructions of both sides, "" where a side has none; ``same``: equal except for register numbers."""

    a: str
    b: str
    same: bool


@dataclass(frozen=True, repr=False)
class Difference:
    """Two verdicts, and how their steady steps differ.

    Attributes:
        a, b: the verdicts.
        opcodes: counts that differ, by opcode with modifiers; the largest change first.
        lines: counts that differ, by file and source text; both sides need line info.
        rows: the two steps side by side; empty unless both have one.
    """

    a: Verdict
    b: Verdict
    opcodes: tuple[Count, ...]
    lines: tuple[Count, ...]
    rows: tuple[Row, ...]

    @property
    def equal(self) -> bool:
        """True if both steps have the same instructions, except for registers' numbers."""
        return bool(self.rows) and all(row.same for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        parts = {name: [asdict(one) for one in getattr(self, name)] for name in ("opcodes", "lines", "rows")}
        return {"a": self.a.as_dict(), "b": self.b.as_dict()} | parts

    def shown(self, *, verbose: bool = False) -> Printed:
        """The verdicts, the opcodes and source lines whose counts differ, and the first :data:`MOST_ROWS` rows of the
        steps side by side. verbose: all rows, and all fields of the tiles.
        """
        parts: list[Any] = [shown(self.a, self.b, verbose=verbose)]
        for title, counts in (("opcodes of a steady step", self.opcodes), ("source lines", self.lines)):
            if counts:
                table = Table("", "a", "b", "change", title=title)
                for one in counts:
                    table.add_row(Text(one.what), str(one.a), str(one.b), f"{one.change:+}")
                parts.append(table)
        if self.equal:
            parts.append(Text("The steady steps are equal except for registers' numbers."))
        elif self.rows:
            parts.append(_side_by_side(self.rows, None if verbose else MOST_ROWS))
        return Printed(*parts)

    def __repr__(self) -> str:
        return f"Difference({self.a!r}, {self.b!r}: {sum(not row.same for row in self.rows)} rows of the steps differ)"

    def _repr_html_(self) -> str:
        return self.shown()._repr_html_()

    def __str__(self) -> str:
        return str(self.shown())

    __rich__ = shown


def compare(a: Verdict, b: Verdict) -> Difference:
    """How two kernels' steady steps differ.

    Raises:
        ValueError: one of the verdicts is on a tile that does not fit.
    """
    for what, one in (("a is", a), ("b is", b)):
        check_verdict(what, one)
        if not one.fits:
            raise ValueError(f"there is no code to compare: {one.reason}")
    if a.steady is None or b.steady is None:
        return Difference(a, b, (), (), ())
    opcodes, places = (_changed(of(a.steady), of(b.steady)) for of in (_opcodes, _places))
    return Difference(a, b, opcodes, places, tuple(_rows(a.steady, b.steady)))


def _changed(a: Counter[str], b: Counter[str]) -> tuple[Count, ...]:
    """The entries whose counts differ, the largest change first."""
    counts = [Count(what, a[what], b[what]) for what in sorted(a | b) if a[what] != b[what]]
    return tuple(sorted(counts, key=lambda one: -abs(one.change)))


def _opcodes(step: Step) -> Counter[str]:
    return Counter(i.name for i, times in step.instructions for _ in range(times))


def _places(step: Step) -> Counter[str]:
    """Instruction counts by file and source text, since line numbers differ between revisions."""
    counts = Counter[str]()
    for line in lines_of(step):
        counts[f"{line.place.rpartition(':')[0]}  {line.source}"] += line.instructions
    return counts


def _rows(a: Step, b: Step) -> list[Row]:
    """The instructions of two steps, aligned; an inner loop's instructions appear once."""
    left, right = ([i for i, _ in step.instructions] for step in (a, b))
    a_text, b_text = ([normalized(i) for i in side] for side in (left, right))
    matcher = difflib.SequenceMatcher(None, a_text, b_text, autojunk=False)
    rows = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        for n in range(max(a1 - a0, b1 - b0)):
            text_a = str(left[a0 + n]) if a0 + n < a1 else ""
            text_b = str(right[b0 + n]) if b0 + n < b1 else ""
            rows.append(Row(text_a, text_b, kind == "equal"))
    return rows


def normalized(i: Instruction) -> str:
    """An instruction without its registers' numbers and its branch's target."""
    operands = () if i.target is not None else i.operands
    return _REGISTER.sub(r"\1", f"{i.predicate} {i.name} {', '.join(operands)}")


# ---- tables ----


def _side_by_side(rows: tuple[Row, ...], most: int | None) -> Table:
    """A table of the differences and nearby equal instructions. most: maximum rows, or None for all."""
    made = Table("a", "b", title="steady steps, registers' numbers ignored", show_lines=False)
    excerpt = list(_excerpt(rows))
    for a, b in excerpt[:most]:
        made.add_row(a, b)
    if most is not None and len(excerpt) > most:
        made.caption = f"{len(excerpt) - most} more rows are left out; `cute-attn diff -v` shows all"
    return made


def _excerpt(rows: tuple[Row, ...]) -> Iterator[tuple[Text, Text]]:
    """The rows to show: all that differ, equal ones near them, and for each gap the number of rows left out."""
    near = {m for n, row in enumerate(rows) if not row.same for m in range(n - CONTEXT, n + CONTEXT + 1)}
    for is_near, group in itertools.groupby(enumerate(rows), lambda item: item[0] in near):
        if not is_near:
            yield Text(f"... {len(list(group))} equal", style="dim"), Text("")
            continue
        for _, row in group:
            style_a, style_b = ("", "") if row.same else ("red", "green")
            yield Text(row.a, style=style_a), Text(row.b, style=style_b)
