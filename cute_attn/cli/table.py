"""The commands ``cute-attn table``, the served calls and their costs, and ``explain``."""

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any

import typer

from cute_attn import lab
from cute_attn.cli.options import AsJson, Target, answer, complete_name, import_names, show, working
from cute_attn.lab.tables import Table
from cute_attn.traits import ARCHS, FEATURES


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
        made = lab.dispatch_table
        rows = made.mem_efficient(target) if like else list(made.grid(op, arch, target))
    values = [{**vars(one), "tile": one.tile and one.tile.text} for one in rows]
    answer(as_json, values, lambda: _table(rows))


def _table(rows: Iterable[Any]) -> Table:
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
    """A tile's block and warps, and whether it streams columns or computes dQ in passes."""
    warps = tile.num_threads // 32
    words = [f"{tile.tile_m} x {tile.tile_n}, {warps} warps"]
    if getattr(tile, "columns", 0):
        words.append(f"streamed, {tile.columns} columns per CTA")
    elif getattr(tile, "dq_passes", 1) > 1:
        words.append(f"dQ in {tile.dq_passes} passes")
    return ", ".join(words)


def explain_words(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORD",
            autocompletion=lambda incomplete: [
                *complete_name(incomplete),
                *(f for f in FEATURES if f.startswith(incomplete)),
            ],
            help="forward-sm80, a kernel's name, a feature, a tile's field, or a row of a verdict.",
        ),
    ],
) -> None:
    """What a kernel's name, a field of its tile, or a row of its verdict means."""
    table = Table("word", "what it means")
    with working("reading docstrings"):
        if not lab.explain.listed_words().keys() >= set(words):
            import_names()
        for word in words:
            for name, text in lab.explain.explain(word):
                table.add_row(name, text)
    show(table)
