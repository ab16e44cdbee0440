"""Write one HTML page of verdicts or of a study: tables, both steps and layouts. It needs no other files."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from cute_attn.compiler import registry
from cute_attn.lab.card import Contender, tile_at
from cute_attn.lab.compare import compare
from cute_attn.lab.pictures import pictures
from cute_attn.lab.study import Study
from cute_attn.lab.tables import Table, template
from cute_attn.lab.verdict import Verdict, line_table, shown, verdict
from cute_attn.lab.workloads import parse
from cute_attn.traits import Traits

_FOR_PICTURES = 1_500_000  # bytes; what would exceed them is left out, and named


def of_verdicts(verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the page of verdicts: their tables, how the first two steps differ, and the first kernel's layouts."""
    title = ", ".join(dict.fromkeys(f"{one.name} on {one.target}" for one in verdicts))
    lines = (line_table(one) for one in verdicts if one.lines)
    _write(path, title, [shown(*verdicts, verbose=True), *lines], [one for one in verdicts if one.fits])


def of_study(study: Study, path: Path) -> None:
    """Write the page of a search: its candidates and A/B, the best tile's step next to the default's, its layouts."""
    first = next((one.change for one in study.candidates if one.status in ("timed", "ranked")), "")
    shape = parse(study.workloads[0], Traits.parse(study.name))
    pair = dict.fromkeys(Contender(study.name, change) for change in (study.best or first, ""))
    verdicts = [verdict(study.name, tile_at(one, shape, study.target), study.target) for one in pair]
    where = f"{study.gpu}, driver {study.driver}" if study.gpu else f"for {study.target}, without a GPU"
    parts: list[Any] = [study.sentence, f"{where}; {study.started[:16]}, {study.seconds:.0f} s", *study.notes]
    if study.best:
        parts.append(f"--tile {study.best}\n{study.best_text}")
    declined = Table("tiles", "declined before they were built, because they")
    for reason, count in study.declined.items():
        declined.add_row(str(count), reason)
    measured = () if study.verdict is None else (study.verdict.table(),)
    parts += [*measured, study.table(len(study.candidates)), declined]
    _write(path, f"Tiles of {study.name}", parts, verdicts)


def _write(path: Path, title: str, parts: Sequence[Any], verdicts: Sequence[Verdict]) -> None:
    """Write ``parts`` as rich prints them, how the first two verdicts' steps differ, and the first one's layouts."""
    console = Console(file=io.StringIO(), width=180, record=True)
    console.print(*parts, sep="\n", highlight=False, markup=False)
    if len(verdicts) > 1:
        console.print(compare(*verdicts[:2]).shown(verbose=True))
    one, figures, left_out = verdicts[0], list[str](), list[str]()
    if hasattr(registry.lookup(Traits.parse(one.name), one.tile, one.target), "copies"):
        for what, text in pictures(one.name, one.tile, one.target).inline():
            fits = sum(map(len, figures)) + len(text) <= _FOR_PICTURES
            (figures if fits else left_out).append(text if fits else what)
    console.print("Shared memory coloured by bank, copies and MMA by warp, of the first tile.")
    if left_out:
        names = ", ".join(left_out)
        console.print(f"Left out, since the page would be too large: {names}; cute-attn show draws them.")
    code = console.export_html(inline_styles=True, code_format="{code}")
    path.write_text(template("page.html").format(title=escape(title), code=code, figures="\n".join(figures)))
