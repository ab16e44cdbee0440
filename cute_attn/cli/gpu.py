"""The commands of the laboratory that use a GPU: ab and tune."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from cute_attn import lab
from cute_attn.cli import options
from cute_attn.cli.code import Side, Tiles
from cute_attn.traits import did_you_mean

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
