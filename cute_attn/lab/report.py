"""One HTML page of verdicts or of a study, to send: tables, layouts and both steps. It needs no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_attn.lab.card import Contender, tile_at
from cute_attn.lab.findings import findings
from cute_attn.lab.race import HEADS, Comparison, cells
from cute_attn.lab.study import Study
from cute_attn.lab.verdict import LINE_HEADS, Verdict, columns, line_cells
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


def of_verdicts(verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the page of verdicts: their tables, how the first two steps differ, the first one's layouts."""
    title, heads, rows = columns(verdicts)
    costs = Section("What they cost", findings(*verdicts), head=("", *heads), rows=rows)
    lines = (
        Section(f"Source lines: {head}", head=LINE_HEADS, rows=line_cells(one))
        for head, one in zip(heads, verdicts, strict=True)
        if one.lines
    )
    fitting = [one for one in verdicts if one.fits]
    _write(path, title, fitting[0].name, [costs, *lines, *_kernels(fitting[:2])])


def of_study(study: Study, path: Path) -> None:
    """Write the page of a search: its candidates and A/B, and the best one's step and layouts beside the default's."""
    from cute_attn.lab.verdict import verdict

    first = next((one.change for one in study.candidates if one.status in ("timed", "ranked")), "")
    shape = parse(study.workloads[0], Traits.parse(study.name))
    pair = dict.fromkeys(Contender(study.name, change) for change in (study.best or first, ""))
    verdicts = [verdict(study.name, tile_at(one, shape, study.target), study.target) for one in pair]
    _write(path, f"Tiles of {study.name}", study.sentence, [*study_sections(study), *_kernels(verdicts)])


def _write(path: Path, title: str, sentence: str, sections: Sequence[Section]) -> None:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("report.html.j2")
    path.write_text(template.render(title=title, sentence=sentence, sections=sections))


def study_sections(study: Study) -> list[Section]:
    """What was found, without the kernels."""
    sections = [] if study.verdict is None else [_comparison(study.verdict)]
    if study.best:
        sections.append(Section("To paste", (f"--tile {study.best}",), code=study.best_text))
    where = f"{study.gpu}, driver {study.driver}" if study.gpu else f"for {study.target}, without a GPU"
    texts = (
        f"{where}; {study.started[:16]}, {study.seconds:.0f} s. The default tile is {study.default}.",
        "Speeds over the default are medians of a few rounds, and no verdicts; estimates are times over the default's.",
        *study.notes,
    )
    heads, rows, _ = study.cells()
    sections.append(Section("Candidates", texts, head=heads, rows=rows))
    if study.declined:
        counts = [(str(count), reason) for reason, count in study.declined.items()]
        sections.append(
            Section("Declined before they were built", head=("tiles", "because they"), rows=counts)
        )
    return sections


def _comparison(found: Comparison) -> Section:
    texts = (
        f"a is {found.a}; b is {found.b}.",
        f"{found.gpu}, driver {found.driver}, commit {found.commit}, {found.started[:16]}. Rounds of samples in the "
        "order a, b, b, a and b, a, a, b, each call on a cold L2; the interval is of the median, by order statistics. "
        f"Differences below {100 * found.resolution:g}% count as none.",
    )
    return Section("Measured", texts, head=HEADS, rows=[cells(one) for one in found.measured])


# ---- kernels ----


def _kernels(verdicts: Sequence[Verdict]) -> list[Section]:
    """How the steady steps of two differ, and the first one's layouts."""
    return [*(_steps(*verdicts) if len(verdicts) == 2 else ()), _layouts(verdicts[0])]


def _steps(a: Verdict, b: Verdict) -> list[Section]:
    from cute_attn.lab.compare import compare

    found = compare(a, b)
    counts = [(one.what, str(one.a), str(one.b), f"{one.change:+d}") for one in found.opcodes]
    texts = [f"{side} is {one.name} {one.brief()}." for side, one in (("a", a), ("b", b))]
    if not found.rows:
        texts.append(f"No steady step was found: {a.no_step or b.no_step}.")
    elif found.equal:
        texts.append("The steady steps are equal but for registers' numbers.")
    head = ("opcode", "a", "b", "change")
    sections = [Section("Instructions of a steady step", texts, head=head, rows=counts)]
    if found.rows and not found.equal:
        shown = found.rows[:_MOST_ROWS]
        rows = [(row.a, row.b) for row in shown]
        marked = frozenset(i for i, row in enumerate(shown) if not row.same)
        left = len(found.rows) - len(rows)
        said = (f"The last {left} rows are left out.",) if left else ()
        title = "Both steps, side by side"
        sections.append(Section(title, said, head=("a", "b"), rows=rows, marked=marked, is_code=True))
    return sections


def _layouts(one: Verdict) -> Section:
    """Pictures of shared memory with its banks, of copies and of the MMA."""
    from cute_attn.lab.pictures import pictures

    drawn: list[str] = []
    left_out: list[str] = []
    for what, text in pictures(one.name, one.tile, one.target).inline():
        fits = sum(map(len, drawn)) + len(text) <= _FOR_PICTURES
        (drawn if fits else left_out).append(text if fits else what)
    texts = [f"{one.name} {one.brief()}: shared memory coloured by bank, copies and MMA by warp."]
    if left_out:
        names = ", ".join(left_out)
        texts.append(f"Left out, since the page would be too large: {names}; cute-attn show draws them.")
    return Section("Layouts", texts, figures=drawn)
