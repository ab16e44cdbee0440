"""The command ``cute-attn table``: what is served, by which kernel, at which cost."""

import json
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cute_attn.cli.options import AsJson, Target, show, working
from cute_attn.lab.tables import Table
from cute_attn.traits import ARCHS

if TYPE_CHECKING:
    from cute_attn.lab.dispatch_table import Row


def print_table(
    op: Annotated[str, typer.Option("--op", help="forward or backward.")] = "backward",
    arch: Annotated[
        str | None, typer.Option("--arch", help="A generation of kernels: sm80 or sm90; by default both.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", help="mem_efficient: a row for each kernel of PyTorch's memory-efficient backward."
        ),
    ] = None,
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Dtypes, generations, head dims, dropout and bias: the kernel's default tile, or why there is none."""
    from cute_attn.lab.dispatch_table import grid, mem_efficient

    for name, value, accepted in (
        ("--op", op, ("forward", "backward")),
        ("--arch", arch, (None, *ARCHS)),
        ("--like", like, (None, "mem_efficient")),
    ):
        if value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {', '.join(x for x in accepted if x)}")
    if like and (op, arch) not in (("backward", None), ("backward", "sm80")):
        raise ValueError(f"--like is {like!r} with {op} on {arch}; accepted: the backward, on sm80")
    with working("choosing default tiles"):
        rows = mem_efficient(target) if like else list(grid(op, arch, target))
    if as_json:
        print(json.dumps([{**vars(one), "tile": one.tile and one.tile.text} for one in rows], indent=1))
    else:
        show(_table(rows))


def _table(rows: "Iterable[Row]") -> Table:
    heads = ("attention", "target", "tile, or why there is none", "registers", "shared memory", "CTAs")
    table = Table(*heads, title="tile: queries x keys, warps; registers are estimates")
    for reason, same in groupby(rows, lambda one: one.reason):
        if reason:
            *others, last = same
            more = f" and {len(others)} before it" if others else ""
            table.add_row(last.name + more, last.target, f"[red]{reason}")
            continue
        for one in same:
            memory = f"{one.shared_memory_bytes:,}"
            table.add_row(one.name, one.target, _short(one.tile), str(one.registers), memory, str(one.blocks))
    return table


def _short(tile: Any) -> str:
    """A tile's block and warps, and that it divides or streams columns."""
    warps = tile.num_threads // 32
    words = [f"{tile.tile_m} x {tile.tile_n}, {warps} warps"]
    if getattr(tile, "columns", 0):
        words.append(f"streamed, {tile.columns} columns per CTA")
    elif getattr(tile, "dq_passes", 1) > 1:
        words.append(f"dQ in {tile.dq_passes} passes")
    return ", ".join(words)
