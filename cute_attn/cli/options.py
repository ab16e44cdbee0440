"""Arguments and options that several commands share, and where commands print."""

from typing import Annotated

import typer
from rich.console import Console

Name = Annotated[str, typer.Argument(metavar="NAME", help="A kernel, such as forward-sm80-bf16-d128-causal.")]
TileText = Annotated[
    str, typer.Option("--tile", help="Fields of the tile to change: tile_n=128,num_stages=2.")
]
Target = Annotated[
    str | None, typer.Option("--target", help="sm80, sm86, sm89 or sm90; by default the GPU that is present.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def make_console() -> Console:
    """120 columns where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
