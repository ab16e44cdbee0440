"""The commands of the laboratory that use a GPU: ab, tune; and those that show what they found: ledger, report."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# Modules that load torch or the DSL are imported inside the commands: --help needs neither.
from cute_attn.cli.options import (
    AsJson,
    Name,
    Target,
    complete_tile,
    live_progress,
    make_console,
    show,
    working,
    writable_file,
)

Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "--workloads",
        help="Sizes: b2-s8192-h16, s512x8192-h32x8, or a workload's name; may be repeated. Default: s2048 and s8192.",
    ),
]
Budget = Annotated[float, typer.Option("--budget", min=1, help="Seconds.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", callback=writable_file, help="Also write the result here, as JSON for `report`."
    ),
]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="The ledger; by default bench/ledger.jsonl of the checkout.")
]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("ab")(ab_of_tiles)
    app.command("tune")(tune_tile)
    app.command("ledger")(show_ledger)
    app.command("report")(write_report)


def ab_of_tiles(
    name: Name,
    tiles: Annotated[
        list[str] | None,
        typer.Option(
            "--tile",
            autocompletion=complete_tile,
            help="Fields to change: A's, and if repeated B's; B's default is the default tile.",
        ),
    ] = None,
    peer: Annotated[
        str | None, typer.Option("--peer", help="B: fa4, fa3, cudnn, fa2, mem_efficient or ffpa.")
    ] = None,
    workloads: Workloads = None,
    resolution: Annotated[
        float, typer.Option(min=0, help="Differences below this share count as none.")
    ] = 0.005,
    budget: Budget = 30.0,
    predict: Annotated[
        str | None, typer.Option("--predict", help="How much faster A is: '+2..+5%'. Needs --why.")
    ] = None,
    why: Annotated[str, typer.Option("--why", help="The reason for the prediction.")] = "",
    ledger_file: LedgerFile = None,
    output: Output = None,
) -> None:
    """Whether tile A is faster than tile B, or than a peer, on this GPU: an interval and one sentence.

    Both are compared with the reference first. With --predict the prediction goes into the ledger before anything is
    measured, the outcome after.
    """
    from cute_attn.lab import ledger
    from cute_attn.lab.card import Contender, Gpu
    from cute_attn.lab.race import ab, workloads_of

    tiles = tiles or [""]
    if len(tiles) + (peer is not None) > 2:
        raise ValueError(
            f"--tile is given {len(tiles)} times{' beside --peer' if peer else ''}; accepted: A and one B"
        )
    second: Any = peer or (name, tiles[1] if len(tiles) > 1 else None)
    a, b = Contender.of((name, tiles[0])), Contender.of(second)
    shapes = workloads_of((a, b), workloads or ())
    low, high = ledger.parse_range(predict) if predict else (0.0, 0.0)
    if why and not predict:
        raise ValueError("--why is given without --predict; accepted: both")
    card, entry = Gpu(), None
    if predict:
        question = f"{a} against {b} on {', '.join(shape.name for shape in shapes)}"
        entry = ledger.predict(question, a.tile, low=low, high=high, why=why, path=ledger_file)
    with working("building") as say:
        found = ab(a, b, shapes, resolution=resolution, budget_s=budget, card=card, progress=say)
    _write(output, found.to_json())
    outcome = ""
    if entry is not None:
        entry = ledger.settle(entry, found, static=_static(a, b, shapes[0]), path=ledger_file)
        outcome = f"The prediction of {entry.predicted} was {entry.outcome} (ledger entry {entry.id})."
    console = make_console()
    console.print(found.table())
    console.print(found.sentence, highlight=False, markup=False)
    if outcome:
        console.print(outcome, highlight=False, markup=False)


def _static(a: Any, b: Any, shape: Any) -> dict[str, Any] | None:
    """How two kernels' steady steps differ, or why that is unknown, for the ledger; None beside a peer."""
    from cute_attn.lab.card import tile_at
    from cute_attn.lab.compare import compare
    from cute_attn.lab.verdict import verdict

    if a.peer or b.peer:
        return None
    try:
        found = compare(*(verdict(one.kernel, tile_at(one, shape)) for one in (a, b)))
    except (OSError, ValueError) as error:  # no nvdisasm, say: what was measured counts all the same
        return {"unknown": str(error)}
    return {"opcodes": {one.what: [one.a, one.b] for one in found.opcodes}, "same_step": found.equal}


def tune_tile(
    name: Name,
    space: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPACE]",
            help="Tiles to try: tile_n=64..192:16,num_stages=1|2. Default: a field at a time, then pairs that helped.",
        ),
    ] = None,
    workloads: Workloads = None,
    budget: Budget = 60.0,
    static: Annotated[
        bool, typer.Option("--static", help="Only rank by the machine code; needs no GPU.")
    ] = False,
    target: Target = None,
    seed: Annotated[int, typer.Option(help="Of the order in which a large space is tried.")] = 0,
    timings: Annotated[
        Path | None,
        typer.Option("--timings", help="The file of timings that are kept; by default the user's own."),
    ] = None,
    row: Annotated[
        bool, typer.Option("--row", help="Also print the winner as the line of its kernel's tiles.csv.")
    ] = False,
    output: Output = None,
) -> None:
    """Search for a faster tile within a budget; after Ctrl-C the same command goes on."""
    from cute_attn.lab.benchmark.results import commit
    from cute_attn.lab.card import Contender
    from cute_attn.lab.race import workloads_of
    from cute_attn.lab.tune import Progress as Seen
    from cute_attn.lab.tune import table_row, tune

    console = make_console()
    said: list[str] = []
    with _bar() as progress:
        task = progress.add_task("", best="")

        def watch(seen: Seen) -> None:
            if not said:
                said.append(seen.text)
                progress.console.print(seen.text, highlight=False, markup=False)
            best = f"best {seen.best} {100 * (seen.gain - 1):+.1f}%" if seen.best else "best: the default"
            done = seen.built if static else seen.timed
            progress.update(task, description=seen.text, total=seen.total, completed=done, best=best)

        try:
            study = tune(
                name,
                space,
                target=target,
                workloads=workloads or (),
                budget_s=budget,
                static_only=static,
                resume=timings,
                seed=seed,
                watch=watch,
            )
        except KeyboardInterrupt:
            progress.console.print("stopped; the same command goes on where it was")
            raise typer.Exit(130) from None
    _write(output, study.to_json())
    console.print(study.table())
    for note in study.notes[1:]:  # the first was said at the start
        console.print(note, highlight=False, markup=False)
    console.print(study.sentence, highlight=False, markup=False)
    if study.best_text:
        console.print(f"\n    {study.best_text}", highlight=False, markup=False)
    if row and study.best:
        print(table_row(study, workloads_of([Contender(study.name)], workloads or ()), commit()))


def show_ledger(
    calibration: Annotated[
        bool, typer.Option("--calibration", help="How often predicted ranges held, by their width.")
    ] = False,
    see: Annotated[str | None, typer.Option("--see", metavar="ID", help="Add --words to this entry.")] = None,
    words: Annotated[str, typer.Option("--words", help="What a person says of it.")] = "",
    ledger_file: LedgerFile = None,
    as_json: AsJson = False,
) -> None:
    """What was predicted, and what was measured."""
    from cute_attn.lab import ledger

    if ledger_file is not None and not ledger_file.is_file():
        raise ValueError(
            f"--ledger is {str(ledger_file)!r}, which is no file; accepted: one that `cute-attn ab --predict` wrote"
        )
    if see is not None:
        ledger.see(see, words, path=ledger_file)
    if as_json:
        print(json.dumps(ledger.as_json(ledger_file), indent=1))
        return
    shown = ledger.calibration_table(ledger_file) if calibration else ledger.table(ledger_file)
    show(shown)


def write_report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Of ab -o, tune -o or bench/results, or a ledger.jsonl.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", callback=writable_file, help="The page.")] = Path(
        "report.html"
    ),
    kernels: Annotated[
        bool,
        typer.Option("--kernels/--no-kernels", help="Also layouts and steady steps; builds the kernels."),
    ] = True,
) -> None:
    """Write one HTML page of a result; it needs no network."""
    from cute_attn.lab import report

    with working(
        "writing the page, which builds the kernels that it shows" if kernels else "writing the page"
    ):
        page = report.write(report.read(file), output, kernels=kernels)
    print(page)


def _write(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(values, indent=1) + "\n")


def _bar() -> Progress:
    """Candidates done, and the best so far."""
    return live_progress(
        BarColumn(bar_width=20),
        TextColumn("{task.completed} of {task.total}"),
        TextColumn("{task.fields[best]}", markup=False),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
