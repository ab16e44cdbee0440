"""The commands of the laboratory: verdict and diff, which need no GPU, then ab and tune."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from cute_attn import lab
from cute_attn.cli import options
from cute_attn.compiler import registry
from cute_attn.traits import did_you_mean

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


# ---- on a GPU ----

_SIZES = "Sizes: b2-s8192-h16, s512x8192-h32x8, or a workload's name; repeatable. Default: s2048, s8192."
Workloads = Annotated[list[str] | None, typer.Option("--workload", "--workloads", help=_SIZES)]
Budget = Annotated[float, typer.Option("--budget", min=1, help="Seconds.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", callback=options.writable_file, help="Also write the result here, as JSON."
    ),
]


def _known_peer(peer: str | None) -> str | None:
    known = lab.benchmark.PEERS
    if peer is not None and peer not in known:
        raise ValueError(f"--peer is {peer!r}{did_you_mean(peer, known)}; accepted: {', '.join(known)}")
    return peer


def ab_of_tiles(
    name: options.Name,
    other: options.Other = None,
    tiles: Tiles = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", callback=_known_peer, help="B: fa4, fa3, cudnn, fa2, mem_efficient or ffpa."),
    ] = None,
    workloads: Workloads = None,
    resolution: Annotated[
        float, typer.Option(min=0, help="Differences below this share count as none.")
    ] = 0.005,
    budget: Budget = 30.0,
    output: Output = None,
) -> None:
    """Whether A is faster than B on this GPU: an interval and one sentence.

    A is NAME, with the first --tile. B is NAME2, such as a variant's base, a peer, or NAME with its default or the
    second --tile. Kernels are compared with the reference first, a peer with the kernel.
    """
    tiles = tiles or [""]
    if len(tiles) > 2 or (peer and (other or len(tiles) > 1)):
        raise ValueError("B is given more than once; accepted: one of NAME2, --peer and a second --tile")
    second: Any = peer or (other or name, tiles[1] if len(tiles) > 1 else tiles[0] if other else None)
    sides: list[Side] = [(name, tiles[0])] if peer else [(name, tiles[0]), second]
    options.check_first(lambda: _look_up(sides, None, workloads))
    options.need_gpu()
    with options.working("building") as say:
        found = lab.race.ab(
            (name, tiles[0]), second, workloads or (), resolution=resolution, budget_s=budget, progress=say
        )
    if output is not None:
        output.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    console = options.make_console()
    console.print(found.table())
    console.print(found.sentence, highlight=False, markup=False)


def _look_up(
    sides: Sequence[Side], target: str | None, workloads: list[str] | None, space: str | None = None
) -> None:
    """Raise ValueError for an invalid kernel, tile, workload or space."""
    for name, tile in sides:
        kernel = options.look_up(name, tile, target)
        for workload in workloads or ():
            lab.workloads.parse(workload, kernel.traits)
        if space:
            lab.space.Space.parse(space, kernel.tile)


_SHOWN = ("{task.completed} of {task.total}", "{task.fields[best]}", "{task.description}")
"""Columns of the progress: candidates done, the best so far, and the current step."""


def tune_tile(
    name: options.Name,
    space: Annotated[
        str | None,
        typer.Argument(
            metavar="SPACE",
            help="Tiles to try: tile_n=64..192:16,num_stages=1|2. Default: a field at a time, then pairs that helped.",
        ),
    ] = None,
    workloads: Workloads = None,
    budget: Budget = 60.0,
    static: Annotated[
        bool, typer.Option("--static", help="Only rank by the machine code; needs no GPU.")
    ] = False,
    target: options.Target = None,
    seed: Annotated[int, typer.Option(help="Of the order in which a large space is tried.")] = 0,
    timings: Annotated[
        Path | None,
        typer.Option(
            "--timings",
            callback=options.writable_file,
            help="The file of timings that are kept; by default the user's own.",
        ),
    ] = None,
    row: Annotated[
        bool, typer.Option("--row", help="Also print the winner as the line of its kernel's tiles.csv.")
    ] = False,
    output: Output = None,
    page: options.Page = None,
) -> None:
    """Search for a faster tile within a budget; after Ctrl-C the same command goes on."""
    options.check_first(lambda: _look_up([(name, None)], target, workloads, space))
    options.need_compiler()
    if not static:
        options.need_gpu("--static (static_only=True) ranks without one")
    console = options.make_console()
    columns = (BarColumn(bar_width=20), *(TextColumn(text, markup=False) for text in _SHOWN))
    with options.live_progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("", best="")

        def watch(seen: Any) -> None:
            if not progress.tasks[task].description:
                progress.console.print(seen.text, highlight=False, markup=False)
            best = f"best {seen.best} {100 * (seen.gain - 1):+.1f}%" if seen.best else "best: the default"
            done = seen.built if static else seen.timed
            progress.update(task, description=seen.text, total=seen.total, completed=done, best=best)

        asked: dict[str, Any] = {"target": target, "workloads": workloads or (), "budget_s": budget}
        try:
            study = lab.tune.tune(
                name, space, static_only=static, resume=timings, seed=seed, watch=watch, **asked
            )
        except KeyboardInterrupt:
            progress.console.print("stopped; the same command goes on where it was")
            raise typer.Exit(130) from None
    if output is not None:
        output.write_text(json.dumps(study.to_json(), indent=1) + "\n")
    console.print(study.table())
    for note in study.notes[1:]:  # the first was said at the start
        console.print(note, highlight=False, markup=False)
    console.print(study.sentence, highlight=False, markup=False)
    if study.best_text:
        console.print(f"\n    {study.best_text}", highlight=False, markup=False)
    if row and study.best:
        sizes = lab.race.workloads_of([lab.card.Contender(study.name)], workloads or ())
        print(lab.tune.table_row(study, sizes, lab.benchmark.results.commit()))
    if page is not None:
        with options.working("writing the page, which builds the kernels that it shows"):
            lab.report.of_study(study, page)
