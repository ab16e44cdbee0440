"""One HTML page of a result, to send: tables, plots, layouts, the two steps. It needs no network and no script.

cute-attn tune forward-sm90-bf16-d128 -o study.json
cute-attn report study.json -o study.html
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_attn.lab import plots
from cute_attn.lab.card import Contender, tile_at
from cute_attn.lab.ledger import calibration, entries
from cute_attn.lab.race import Comparison
from cute_attn.lab.study import Study
from cute_attn.lab.workloads import parse
from cute_attn.traits import Traits

MAX_BYTES = 2_000_000
"""Of a page: pictures that would exceed it are left out, and named."""
_FOR_PICTURES = 1_500_000
_MOST_ROWS = 1500


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title, texts, code, figures: what it shows, in this order; figures are SVG.
        head, rows: a table below them.
        marked: indices of rows that stand out.
        is_code: whether the table is of code, which keeps its spaces and is not sorted.
    """

    title: str
    texts: Sequence[str] = ()
    code: str = ""
    figures: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marked: frozenset[int] = frozenset()
    is_code: bool = False


@dataclass(frozen=True)
class Page:
    """What the template shows."""

    title: str
    sentence: str
    sections: Sequence[Section]


def read(path: Path) -> Study | Comparison | dict[str, Any]:
    """A result's file: a study, a comparison, a benchmark's result, or a ledger (``.jsonl``).

    Raises:
        ValueError: it is none of these.
    """
    if path.suffix == ".jsonl":
        return {"kind": "ledger", "path": path}
    try:
        values = json.loads(path.read_text())
        kind = values.get("kind", "benchmark" if "rows" in values else None)
    except (ValueError, AttributeError):
        kind = None
    if kind == "study":
        return Study.from_json(values)
    if kind == "comparison":
        return Comparison.from_json(values)
    if kind == "benchmark":
        return values
    raise ValueError(
        f"{path} does not hold a result; accepted: files of ab, tune or the benchmarks, or a ledger.jsonl"
    )


def write(result: Study | Comparison | dict[str, Any], path: Path, *, kernels: bool = True) -> Path:
    """Write the page of a result.

    Args:
        result: from :func:`read`, :func:`cute_attn.lab.tune.tune` or :func:`cute_attn.lab.race.ab`.
        path: the file to write.
        kernels: also the layouts, and both steady steps, for which the kernels are built where the cache lacks them.
    """
    import jinja2

    if isinstance(result, Study):
        page = _study(result, kernels)
    elif isinstance(result, Comparison):
        sections = [_comparison(result), *(_kernels_of(result) if kernels else ())]
        page = Page("A/B", result.sentence, sections)
    elif result.get("kind") == "ledger":
        page = _ledger(result["path"])
    else:
        page = _benchmark(result)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(environment.get_template("report.html.j2").render(page=page))
    return path


# ---- results ----


def _comparison(found: Comparison) -> Section:
    rows = []
    for one in found.measured:
        state = one.state
        reads = (
            "-" if value is None else str(value) for value in (state.clock_mhz, state.watts, state.celsius)
        )
        rows.append(
            (
                one.workload,
                one.outcome,
                *(f"{100 * (value - 1):+.2f}" for value in (one.ratio, one.low, one.high)),
                f"{one.rounds}" + (f" ({one.void} void)" if one.void else ""),
                f"{one.ms_a:.4g}",
                f"{one.ms_b:.4g}",
                *reads,
                ", ".join(state.reasons) or "-",
            )
        )
    texts = (
        f"a is {found.a}; b is {found.b}.",
        f"{found.gpu}, driver {found.driver}, commit {found.commit}, {found.started[:16]}. Rounds of samples in the "
        "order a, b, b, a and b, a, a, b, each call on a cold L2; the interval is of the median, by order statistics. "
        f"Differences below {100 * found.resolution:g}% count as none.",
    )
    head = (
        "workload",
        "a is",
        "speed, %",
        "low",
        "high",
        "rounds",
        "ms of a",
        "ms of b",
        "MHz",
        "W",
        "°C",
        "held by",
    )
    figures = (plots.intervals(found.measured, found.resolution),)
    return Section("Measured", texts, figures=figures, head=head, rows=rows)


def _study(study: Study, kernels: bool) -> Page:
    sections = []
    if study.verdict is not None:
        sections.append(_comparison(study.verdict))
    if study.best:
        sections.append(Section("To paste", (f"--tile {study.best}",), code=study.best_text))
    rows = []
    for one in study.candidates:
        gains = (f"{100 * (one.gains[w] - 1):+.2f}" if w in one.gains else "" for w in study.workloads)
        estimate = "" if one.estimate is None else f"{one.estimate:.3f}"
        rows.append((one.change, one.status, *gains, estimate, str(one.spills_in_step or ""), one.reason))
    where = f"{study.gpu}, driver {study.driver}" if study.gpu else f"for {study.target}, without a GPU"
    texts = (
        f"{where}; {study.started[:16]}, {study.seconds:.0f} s. The default tile is {study.default}.",
        "Speeds over the default are medians of a few rounds, and no verdicts; estimates are times over the default's.",
        *study.notes,
    )
    head = (
        "tile",
        "status",
        *(f"speed, %, {w}" for w in study.workloads),
        "estimate",
        "spills in the step",
        "",
    )
    figures = (plots.gains(study),) if any(one.gain or one.estimate for one in study.candidates) else ()
    sections.append(Section("Candidates", texts, figures=figures, head=head, rows=rows))
    if study.declined:
        counts = [(str(count), reason) for reason, count in study.declined.items()]
        title = "Declined before they were built"
        sections.append(Section(title, head=("tiles", "because they"), rows=counts))
    if kernels:
        first = next((one.change for one in study.candidates if one.status in ("timed", "ranked")), "")
        pair = (Contender(study.name, study.best or first), Contender(study.name))
        sections += _kernels(pair, study.workloads[0], study.target)
    return Page(f"Tiles of {study.name}", study.sentence, sections)


def _benchmark(result: dict[str, Any]) -> Page:
    rows = [
        (row["workload"], row["impl"], str(row.get("ms", "")), str(row.get("value", row.get("error", ""))))
        for row in result["rows"]
    ]
    unit = next((row["unit"] for row in result["rows"] if "unit" in row), "")
    keys = ("gpu", "driver", "clock_mhz", "torch", "cutlass_dsl", "commit", "date")
    texts = ("; ".join(f"{key} {result[key]}" for key in keys if result.get(key)),)
    head = ("workload", "by", "ms", unit)
    section = Section("Measured", texts, figures=(plots.speeds(result),), head=head, rows=rows)
    return Page("Benchmark", f"{len(rows)} rows on {result.get('gpu', 'an unknown GPU')}", (section,))


def _ledger(path: Path) -> Page:
    known = entries(path)
    rows = []
    for one in known:
        found = "" if one.result is None else one.result["sentence"]
        rows.append((one.date[:10], one.question, one.why, one.predicted, found, one.outcome, one.seen))
    head = ("date", "question", "why", "predicted", "measured", "outcome", "seen")
    held = [
        (
            "wider" if row.width == float("inf") else f"{100 * row.width:g}%",
            *(str(count) for count in (row.right, row.wrong, row.undecided, row.open)),
            "-" if row.held is None else f"{100 * row.held:.0f}%",
        )
        for row in calibration(path)
    ]
    widths = Section(
        "How often predictions held",
        head=("range up to", "right", "wrong", "undecided", "open", "held"),
        rows=held,
    )
    return Page("Ledger", f"{len(known)} predictions", (Section("Predictions", head=head, rows=rows), widths))


# ---- kernels ----


def _kernels_of(found: Comparison) -> list[Section]:
    """Of an A/B's contenders."""
    return _kernels([contender(text) for text in (found.a, found.b)], found.measured[0].workload, None)


def contender(text: str) -> Contender:
    """A contender from its text."""
    name, _, tile = text.partition(" ")
    return Contender.of(name if tile in ("", "(default tile)") else (name, tile))


def _kernels(pair: Sequence[Contender], workload: str, target: str | None) -> list[Section]:
    """The steady steps of both, and the first one's layouts."""
    own = [one for one in pair if one.kernel]
    traits = Traits.parse(own[0].kernel)
    shape = parse(workload, traits)
    if len(own) == 1 or own[0] == own[1]:
        return [_layouts(own[0], shape, target)]
    return [*_steps(own, shape, target), _layouts(own[0], shape, target)]


def _steps(pair: Sequence[Contender], shape: Any, target: str | None) -> list[Section]:
    """How the two steady steps differ."""
    from cute_attn.lab.compare import compare
    from cute_attn.lab.verdict import verdict

    a, b = (verdict(one.kernel, tile_at(one, shape, target), target) for one in pair)
    found = compare(a, b)
    counts = [(one.what, str(one.a), str(one.b), f"{one.change:+d}") for one in found.opcodes]
    texts = [f"a is {pair[0]}; b is {pair[1]}."]
    if not found.rows:
        texts.append(f"No steady step was found: {a.no_step or b.no_step}.")
    elif found.equal:
        texts.append("The steady steps are equal but for registers' numbers.")
    sections = [
        Section("Instructions of a steady step", texts, head=("opcode", "a", "b", "change"), rows=counts)
    ]
    if found.rows and not found.equal:
        rows = [(row.a, row.b) for row in found.rows[:_MOST_ROWS]]
        marked = frozenset(i for i, row in enumerate(found.rows[:_MOST_ROWS]) if not row.same)
        left = len(found.rows) - len(rows)
        said = (f"The last {left} rows are left out.",) if left else ()
        title = "Both steps, side by side"
        sections.append(Section(title, said, head=("a", "b"), rows=rows, marked=marked, is_code=True))
    return sections


def _layouts(one: Contender, shape: Any, target: str | None) -> Section:
    """Pictures of shared memory with its banks, of copies and of the MMA."""
    from cute_attn.lab.pictures import pictures

    drawn: list[str] = []
    left_out, size = [], 0
    for what, text in pictures(one.kernel, tile_at(one, shape, target), target).inline():
        if size + len(text) > _FOR_PICTURES:
            left_out.append(what)
            continue
        drawn.append(text)
        size += len(text)
    texts = [f"{one}: shared memory coloured by bank, copies and MMA by warp."]
    if left_out:
        texts.append(
            f"Left out, since the page would be too large: {', '.join(left_out)}; cute-attn show draws them."
        )
    return Section("Layouts", texts, figures=drawn)
