"""The commands of the laboratory that need no GPU: verdict and diff."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from cute_attn import lab
from cute_attn.cli import options
from cute_attn.compiler import registry

_TILES = "Fields of the default tile to change: tile_n=128,num_stages=2; may be repeated."
Tiles = Annotated[list[str] | None, typer.Option("--tile", autocompletion=options.complete_tile, help=_TILES)]


def verdict_of_tiles(
    names: options.KnownNames,
    tiles: Tiles = None,
    target: options.Target = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Also the costliest source lines of a step.")
    ] = False,
    as_json: options.AsJson = False,
    page: options.Page = None,
    verbose: options.Verbose = False,
) -> None:
    """What kernels cost, from their machine code; needs no GPU. A column for each NAME, and each --tile of it.

    `cute-attn diff NAME NAME2` also compares the instructions of two.
    """
    found = _verdicts([(name, tile or None) for name in names for tile in tiles or [""]], target, lines)
    if not any(one.fits for one in found):
        raise ValueError("; ".join(dict.fromkeys(one.reason for one in found)))
    if page is not None:
        with options.working("writing the page"):
            lab.report.of_verdicts(found, page)
    if as_json:
        print(json.dumps([one.as_dict() for one in found], indent=1))
        return
    parts: list[Any] = [lab.verdict.shown(*found, verbose=options.is_verbose())]
    if len(found) == 1:
        with options.working("building the kernel without its functions"):
            plain = lab.verdict.without_functions(found[0])
        if plain is not None:
            parts.append(Text(lab.findings.cost_of_functions(found[0], plain)))
    options.show(*parts, *(lab.verdict.line_table(one) for one in found if one.lines))


def difference_of_two(
    name: options.Name,
    other: options.Other = None,
    tiles: Tiles = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="REV",
            help="Build the first side from this git revision's sources; a second, both.",
        ),
    ] = None,
    target: options.Target = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """How two kernels' machine code differs: verdicts, opcodes, source lines, and the steady steps side by side.

    The sides are two tiles (of one --tile, the default is the other), NAME and NAME2, each with the --tile at its
    place, or NAME as a git revision has it and as it is now, or as two revisions have it.
    """
    revisions = at or []
    if len(revisions) > 2:
        raise ValueError(f"--at is given {len(revisions)} times; accepted: two revisions at most")
    sides = _sides(name, other, tiles or [], bool(revisions))
    found = []
    for revision, (kernel, tile) in zip(revisions, sides, strict=False):
        with options.working(f"building {kernel} at {revision}"):
            found.append(lab.revision.verdict_at(revision, kernel, tile or "", target))
    found += _verdicts(sides[len(found) :], target, lines=True)
    difference = lab.compare.compare(*found)
    options.answer(as_json, difference.as_dict(), lambda: difference.shown(verbose=options.is_verbose()))


def _verdicts(sides: Sequence["Side"], target: str | None, lines: bool) -> list[Any]:
    """The verdict on each side; kernels that are not built yet are built in parallel."""
    if not sides:
        return []
    options.check_first(lambda: _check_sides(sides, target))
    with options.working("loading the compiler") as say:
        options.import_kernels()
        what = " and ".join(dict.fromkeys(f"{name} {tile or ''}".strip() for name, tile in sides))
        say(f"building {what}: seconds each, the first time")
        lab.builds.build_at_once(sides, target, lines=lines)
        # With several tiles, one that does not fit is a column that says why.
        refuse = len(sides) == 1
        return [lab.verdict.verdict(name, tile, target, lines=lines, refuse=refuse) for name, tile in sides]


def _check_sides(sides: Sequence["Side"], target: str | None) -> None:
    """Raise ValueError if no side fits, or if a name or a tile's text is invalid."""
    reasons = []
    for name, tile in sides:
        try:
            options.look_up(name, tile, target)
        except registry.Unsupported as reason:
            reasons.append(str(reason))
    if len(reasons) == len(sides):
        raise ValueError("; ".join(dict.fromkeys(reasons)))


Side = tuple[str, str | None]
"""A kernel's name, and the text that changes its default tile, or None."""


def _sides(name: str, other: str | None, tiles: list[str], at_revision: bool) -> tuple[Side, Side]:
    """The two sides to compare; at_revision: the first side, or both, are built from git revisions."""
    if len(tiles) > 2:
        raise ValueError(f"--tile is given {len(tiles)} times; accepted: two tiles at most")
    first, second = [tile or None for tile in (*tiles, None, None)][:2]
    if other is None and not at_revision:
        if not tiles:
            raise ValueError(
                "there is nothing to compare; accepted: two tiles, two names, or --at a revision"
            )
        first, second = (None, first) if len(tiles) == 1 else (first, second)
    elif len(tiles) == 1:
        second = first
    sides = (name, first), (other or name, second)
    if sides[0] == sides[1] and not at_revision:
        raise ValueError(f"both sides are {' '.join(filter(None, sides[0]))}; accepted: two that differ")
    return sides
