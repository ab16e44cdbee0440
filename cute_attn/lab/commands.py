"""The commands of the laboratory that need no GPU: verdict and diff."""

import json
from typing import Annotated

import typer

# Modules that load torch or the DSL are imported inside the commands: --help needs neither.
from cute_attn.options import AsJson, Name, Target, make_console

Tiles = Annotated[
    list[str] | None,
    typer.Option(
        "--tile", help="Fields of the default tile to change: tile_n=128,num_stages=2; may be repeated."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("verdict")(verdict_of_tiles)


def verdict_of_tiles(
    name: Name,
    tiles: Tiles = None,
    target: Target = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Also the source lines that a steady step spends most instructions on."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What tiles cost, from their machine code; needs no GPU. The default tile, or a column for each --tile."""
    from cute_attn.lab.verdict import line_table, table, verdict

    found = [verdict(name, tile or None, target, lines=lines) for tile in tiles or [""]]
    if as_json:
        print(json.dumps([one.as_dict() for one in found], indent=1))
        return
    console = make_console()
    console.print(table(*found))
    for one in found:
        if one.lines:
            console.print(line_table(one))
