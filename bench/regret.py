"""How good are the package's choices? The regret: the chosen time over the time of the best possible choice.

    python -m bench.regret                         24 shapes of every op; writes bench/results/DATE-GPU-regret.json
    python -m bench.regret --op backward --seed 3 --rows 60 -o FILE
    python -m bench.regret --op decode --compile 3/16    build a 16th of the kernels that this needs, without a GPU
    python -m bench.regret --list                  the shapes
    python -m bench.regret --judge FILE FILE       what would be chosen now, by stored timings, without a GPU

Timing needs a Hopper GPU, and is short where all kernels are in the disk cache before. Candidates are what the chooser
takes for some call: tiles of the kernel's table for its traits, whatever the lengths; splits of keys; splits of query
heads; packs of heads in the tiles. One choice is changed at a time. Each is timed on a cold L2, and what was chosen and
the three fastest are timed again in alternation: the fastest of a dozen looks 2 to 3% too good by noise alone.
"""

import argparse
import contextlib
import functools
import itertools
import json
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench import run
from bench.decode_rows import Row
from bench.regret_shapes import OPS, Shape, shapes_of
from cute_attn.host.backward_splits import MAX_IN_ORDER, MAX_SPLITS, even_splits
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.tiles import BackwardSm90Tile, ForwardSm90Tile

LENGTHS = (1, 4, 16, 40, 64, 80, 96, 300, 600, 3000)
"""Queries and keys, one of each range within which no chooser changes its tile."""
CLOCK_EVERY = 10
WAVES = 4
"""Maximum splits of keys per CTA."""
FINALISTS, MOST_CALLS = 3, 30
"""Candidates that are timed again, with the chosen one; calls of each in a round, which all flush L2."""
Medians = Callable[[dict[str, Callable[[], Any]], float, int, int], dict[str, float]]


@dataclass(frozen=True)
class Candidate:
    """Choices for a call. All are named, or "", 0 and None for choices that the chooser still makes.

    Attributes:
        tile: the main kernel's tile as text.
        head_splits: number of splits of a kv head's query heads, in a backward.
        accumulators: number of dQ's accumulators, in the deterministic mode.
        split: how the keys of a cache are divided, or a forward's keys by the kernels for a cache: a
            :class:`cute_attn.host.split_kv.Split`.
    """

    tile: str = ""
    head_splits: int = 0
    accumulators: int = 0
    split: Any = None

    @property
    def name(self) -> str:
        """For example ``tile_m=64,tile_n=128 head_splits=4``."""
        words = [self.tile]
        words += [f"{name}={n}" for name in ("head_splits", "accumulators") if (n := getattr(self, name))]
        if self.split is not None:
            words.append(f"split={self.split.num_splits}")
        return " ".join(filter(None, words))

    @property
    def named(self) -> tuple[str, int]:
        """Arguments of a call: its tile, and the number of splits."""
        return self.tile, 0 if self.split is None else self.split.num_splits

    def beside(self, other: "Candidate") -> str:
        """The words of the name that the other's name lacks."""
        known = set(re.split("[ ,]", other.name))
        return ",".join(word for word in re.split("[ ,]", self.name) if word not in known) or "the same"


# ---- choosing ----


@contextlib.contextmanager
def forced(candidate: Candidate, known: dict[str, dict]) -> Iterator[None]:
    """Calls are divided as the candidate says. known: separate plans, as the usual keys do not include the choice."""
    from cute_attn.host import backward, plans, split_kv

    choices = (
        (backward, "head_splits", candidate.head_splits),
        (backward, "key_splits", candidate.accumulators),
        (backward, "accumulators_in_order", candidate.accumulators),
        (split_kv, "_best_split", candidate.split),
    )
    with contextlib.ExitStack() as stack:
        for name, own in known.items():
            stack.enter_context(mock.patch.object(plans, name, own))
        for module, name, choice in choices:
            if choice:
                stack.enter_context(mock.patch.object(module, name, lambda *_, choice=choice: choice))
        if candidate.split is not None:
            stack.enter_context(mock.patch.object(split_kv, "divided", divided))
        yield


def divided(call: Any, kernel: Any, target: str, processors: int) -> tuple[Any, Any]:
    """The choice of the kernels for a cache, whether or not it pays to divide keys."""
    from cute_attn.host import split_kv

    return split_kv.choose_kernel(split_kv.as_cache(call), target, processors)


def new_plans() -> dict[str, dict]:
    """Empty plans for :func:`forced`."""
    from cute_attn.host import plans

    return {name: {} for name in plans.STORES}


class Choice(NamedTuple):
    """The choosers' result for a shape's call.

    Attributes:
        candidate: the choice. It names no tile if a forward divides keys, which it does only without a named tile.
        kernel: the main kernel; other tiles of it are candidates.
        in_order: whether key blocks add to the accumulators in order.
        divided: how keys are divided among CTAs, and the arguments of that choice; or empty.
    """

    candidate: Candidate
    kernel: Any
    in_order: bool
    divided: list[tuple[tuple, Any]]


def choice(shape: Shape, prepared: Callable[..., Callable[[], Any]], target: str = "sm90") -> Choice:
    """The choosers' result for the shape's call, found by making the call."""
    from cute_attn import compiler
    from cute_attn.compiler import registry
    from cute_attn.host import backward, split_kv

    with contextlib.ExitStack() as stack:

        def spied(module: Any, name: str) -> list[tuple[tuple, Any]]:
            """Arguments and result of each call of a function, from now on."""
            function, calls = getattr(module, name), []

            def spy(*args: Any, **options: Any) -> Any:
                calls.append((args, function(*args, **options)))
                return calls[-1][1]

            stack.enter_context(mock.patch.object(module, name, spy))
            return calls

        stack.enter_context(forced(Candidate(), new_plans()))
        built = spied(compiler, "build")
        heads, ordered = spied(backward, "head_splits"), spied(backward, "accumulators_in_order")
        keys = spied(backward, "key_splits")
        divided = spied(split_kv, "_best_split")
        prepared()()
    kernel = next(args[0] for args, _ in reversed(built) if args[0].traits.op in (shape.kernel_op, "kvcache"))
    if kernel.traits.op != "kvcache":
        divided = []  # the forward before a backward filled it
    splits, numbers, split = (calls[-1][1] if calls else None for calls in (heads, ordered or keys, divided))
    chosen = Candidate(kernel.tile.text, splits or 0, numbers or 0, split)
    if kernel.traits.op != shape.kernel_op:
        assert isinstance(shape.of, Workload)
        kernel, chosen = registry.lookup(shape.of.traits("sm90"), None, target), Candidate(split=split)
    return Choice(chosen, kernel, bool(ordered), divided[-1:])


def candidates(
    shape: Shape, prepared: Callable[..., Callable[[], Any]], target: str = "sm90"
) -> list[Candidate]:
    """The choosers' result for the shape's call, then every other result that they could have, one choice at a time."""
    from cute_attn.host import split_kv

    chosen, kernel, in_order, divided = choice(shape, prepared, target)
    kept = chosen if chosen.tile else Candidate()
    found = [replace(kept, tile=tile.text) for tile in tiles(kernel, shape, target)]
    if chosen.head_splits:  # another number of planes has another number of accumulators
        found += [
            replace(chosen, head_splits=n, accumulators=0)
            for n in _thinned(even_splits(shape.group), chosen.head_splits)
        ]
    if chosen.accumulators:
        blocks = -(-shape.seqlen_k // kernel.tile.tile_n)
        most = min(blocks, MAX_IN_ORDER if in_order else MAX_SPLITS)
        found += [replace(chosen, accumulators=n) for n in _thinned(range(1, most + 1), chosen.accumulators)]
    for arguments, split in divided:  # each has another default tile
        found += [replace(chosen, tile="", split=one) for one in _cache_splits(*arguments) if one != split]
    if not divided and shape.may_divide_keys:
        found += [Candidate(split=split_kv.Split("fixed", n)) for n in (2, 4, 8)]
    return list(dict.fromkeys([chosen, *found]))


def tiles(kernel: Any, shape: Shape, target: str) -> list[Any]:
    """Tiles that the kernel has for its traits and calls of any length, except for operands that TMA cannot read."""
    from cute_attn.compiler import registry
    from cute_attn.kernels.backward_sm90 import heuristics as backward
    from cute_attn.kernels.forward_sm90 import heuristics as forward
    from cute_attn.tiles.inference import CacheCall

    traits, group = kernel.traits, shape.group
    default = registry.lookup(traits, None, target)
    if isinstance(shape.of, Row):
        calls = [CacheCall(n, group=group, page_size=shape.of.page) for n in LENGTHS]
        found = [default.for_cache(call, target).tile for call in calls]
    else:
        lengths = itertools.product(
            LENGTHS, LENGTHS, [group], [target], [None] if traits.varlen else [1, 10**6]
        )
        found = [default.for_lengths(*one).tile for one in lengths]
        if traits.arch == "sm90" and traits.op == "forward":
            some = (forward.keys(traits, target, lengths) for lengths in ("long", "short", "one_warpgroup"))
            found += itertools.chain.from_iterable(forward.TABLE.tiles(*keys) for keys in some)
        elif traits.arch == "sm90":
            lengths_keys = ("long", *(f"keys_{n}" for n in backward.FEW_KEYS))
            some = (backward.keys(traits, target, lengths) for lengths in lengths_keys)
            found += itertools.chain.from_iterable(backward.TABLE.tiles(*keys) for keys in some)
    if getattr(kernel.tile, "dq_in_order", False):
        found = [tile.in_order() for tile in found]
    by_tma = bool(getattr(kernel.tile, "bias_stages", 0))
    fit = [tile for tile in dict.fromkeys(found) if tile.reject(traits, target) is None]
    return [tile for tile in fit if by_tma or not getattr(tile, "bias_stages", 0)]


def _thinned(numbers: Iterable[int], chosen: int) -> list[int]:
    """All numbers except the chosen one and ones within an eighth of the previous one."""
    found: list[int] = []
    for n in numbers:
        if n != chosen and (not found or n >= 1.125 * found[-1]):
            found.append(n)
    return found


def _cache_splits(call: Any, tile: Any, processors: int) -> list[Any]:
    """How the keys of a call with a cache may be divided: not, or in splits that take up to ``WAVES`` waves of CTAs."""
    from cute_attn.host.split_kv import Split, work_tiles
    from cute_attn.tiles.inference import MAX_PARTIALS

    blocks = -(-call.longest[1] // tile.tile_n)
    waves = tile.blocks_per_sm * processors / work_tiles(call, tile)
    most = min(blocks, MAX_PARTIALS, max(int(WAVES * waves), 4))
    splits = {n for n in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, int(waves)) if 1 < n <= most}
    return [Split(), *(Split("fixed", n) for n in sorted(splits))]


# ---- without a GPU ----


@contextlib.contextmanager
def simulated() -> Iterator[dict[str, tuple[Any, str]]]:
    """Calls on the CPU plan the launches of a GPU, and compute nothing. Yields the kernels by name."""
    import torch

    machine = run.machine_of_tests()

    def empty(*shape: Any, generator: Any = None, **options: Any) -> Any:
        return torch.empty(*shape, **options)

    with machine.launches() as (patch, found), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "randn", empty)  # memory that nobody touches costs nothing
        patch.setattr(torch.Tensor, "normal_", lambda x, **options: x)
        yield found


def needed(chosen: Sequence[Shape]) -> dict[str, tuple[Any, str]]:
    """(kernel, target) by a name of all that timing the shapes launches."""
    with simulated() as found:
        for shape in chosen:
            prepared = shape.prepared("cpu")
            first, *others = candidates(shape, prepared)
            for one in (first, *others):
                if one is first or (one.tile, one.split) != (first.tile, first.split):  # or the same kernels
                    with forced(one, new_plans()), contextlib.suppress(ValueError):  # timing reports it
                        prepared(*one.named)()
    return found


def timed_name(chosen: Candidate, times: Iterable[str]) -> str:
    """The name under which a candidate was timed, or its own.

    Fields that tiles have had only since then are left out there: they had their defaults. Head splits other than the
    chosen ones were timed with whatever accumulators they take, so those are left out too.
    """
    inert = ForwardSm90Tile.inert_fields() | BackwardSm90Tile.inert_fields()
    known = {name: set(re.split("[ ,]", name)) for name in times}
    for one in (chosen, replace(chosen, accumulators=0)):
        words = set(re.split("[ ,]", one.name))
        for name, timed in known.items():
            if timed <= words and words - timed <= inert:
                return name
    return chosen.name


def judged(stored: Mapping[str, Any], ops: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
    """Rows of a stored result with the choosers' current choices, by the result's timings.

    What is chosen now and was no candidate then has no regret, but an ``error``.
    """
    known = {(row["op"], row["workload"]): row for row in stored["rows"] if len(row.get("times", ())) > 1}
    with simulated():
        for shape in itertools.chain.from_iterable(shapes_of(op, stored["seed"], rows) for op in ops):
            row = known.get((shape.op, shape.name))
            if row is None:
                continue
            chosen, times = choice(shape, shape.prepared("cpu")).candidate, row["times"]
            name = timed_name(chosen, times)
            found = {"op": shape.op, "workload": shape.name, "chosen": name, "times": times}
            if name == row["chosen"]:  # timed in alternation
                yield found | {key: row[key] for key in ("best", "ms", "best_ms", "regret")}
            elif name not in times:
                yield found | {"error": f"{name} was not timed"}
            else:
                best = min(times, key=times.__getitem__)
                yield found | {
                    "best": best,
                    "ms": times[name],
                    "best_ms": times[best],
                    "regret": round(times[name] / times[best] - 1, 4),
                }


# ---- timing ----


def regret(
    shape: Shape, medians: Medians, milliseconds: float, device: str = "cuda"
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """A row of the result, and the call as it was chosen.

    Args:
        medians: of :class:`cute_attn.lab.benchmark.timing.Clock`.
        milliseconds: how long each candidate is timed.
    """
    prepared = shape.prepared(device)
    runs: dict[str, Callable[[], Any]] = {}
    declined: dict[str, str] = {}
    chosen, *others = candidates(shape, prepared)
    for candidate in (chosen, *others):
        known = new_plans()

        def call(run: Callable[[], Any], candidate: Candidate = candidate, known: Any = known) -> None:
            with forced(candidate, known):
                run()

        try:
            with forced(candidate, known):
                once = prepared(*candidate.named)
            call(once)
            runs[candidate.name] = functools.partial(call, once)
        except ValueError as reason:  # a tile that these tensors cannot have
            declined[candidate.name] = str(reason)
    times = medians(runs, milliseconds, 3, MOST_CALLS)
    fastest = sorted(times, key=times.__getitem__)[:FINALISTS]
    again = medians(
        {name: runs[name] for name in dict.fromkeys([chosen.name, *fastest])}, milliseconds, 7, MOST_CALLS
    )
    best = min(again, key=again.__getitem__)
    by_name = {one.name: one for one in (chosen, *others)}
    row = {
        "op": shape.op,
        "workload": shape.name,
        "chosen": chosen.name,
        "best": by_name[best].beside(chosen),
        "ms": round(again[chosen.name], 4),
        "best_ms": round(again[best], 4),
        "regret": round(again[chosen.name] / again[best] - 1, 4),
        "times": {name: round(ms, 4) for name, ms in times.items()},
        **({"declined": declined} if declined else {}),
    }
    return row, runs[chosen.name]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean and worst regret of each op, of shapes that left a choice."""
    by_op: dict[str, list[float]] = {}
    for row in rows:
        if len(row.get("times", ())) > 1 and "regret" in row:
            by_op.setdefault(row["op"], []).append(row["regret"])
    return "\n".join(
        f"{op:14} {len(found):3} shapes, mean {statistics.fmean(found):6.1%}, worst {max(found):6.1%}"
        for op, found in by_op.items()
    )


def line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['op']:14} {row['workload']:52} {row['error']}"
    times = f"{row['ms']:8.4f} ms, best {row['best_ms']:8.4f}, regret {row['regret']:6.1%}"
    return f"{row['op']:14} {row['workload']:52} {times}  {row['best']} beside {row['chosen']}"


def measure(chosen: Sequence[Shape], options: argparse.Namespace) -> None:
    """Time the shapes; the result is written after each, in case the run is cut."""
    import torch

    run.need_gpu()
    from cute_attn.lab.benchmark.results import default_path, first_line, machine, write
    from cute_attn.lab.benchmark.timing import Clock, clock_under_load
    from cute_attn.lab.sensors import known_median

    clock, clocks = Clock(), list[int | None]()
    result: dict[str, Any] = machine() | {"seed": options.seed, "rows": []}
    ops = "" if len(options.op) == len(OPS) else "-" + "-".join(options.op)
    path = options.output or default_path(run.RESULTS, f"regret{ops}", result)
    for number, shape in enumerate(chosen):
        try:
            row, call = regret(shape, clock.medians, options.milliseconds)
            if number % CLOCK_EVERY == 0:
                clocks.append(clock_under_load(call, row["ms"]))
            del call
        except Exception as error:  # a row of the table
            row = {"op": shape.op, "workload": shape.name, "error": first_line(error)}
            torch.cuda.synchronize()  # raises again if the GPU's context is lost
        print(line(row), flush=True)
        result["rows"].append(row)
        write(result | {"clock_mhz": known_median(clocks)}, path)
        torch.cuda.empty_cache()
    print(f"\n{summary(result['rows'])}\n{result['gpu']}; wrote {path}")
    with contextlib.suppress(ImportError):
        picture(result).savefig(path.with_suffix(".svg"), metadata={"Date": None})


def picture(result: dict[str, Any]) -> Any:
    """A figure: for each op, the fraction of shapes with at most a given regret."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in result["rows"] if len(row.get("times", ())) > 1]  # rows that left a choice
    for op in dict.fromkeys(row["op"] for row in rows):
        own = sorted(100 * row["regret"] for row in rows if row["op"] == op)
        shares = [100 * (i + 1) / len(own) for i in range(len(own))]
        axes.step(own, shares, where="post", label=f"{op}, mean {statistics.fmean(own):.1f}%")
    axes.set_xlabel("time of what is chosen over that of the best candidate, % more")
    axes.set_ylabel("shapes, %")
    axes.grid(color="#eaeef2")
    if rows:
        axes.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="*", choices=OPS, default=OPS, help="which ops; default: all")
    parser.add_argument("--seed", type=int, default=0, help="which shapes")
    parser.add_argument("--rows", type=int, default=24, help="how many shapes of an op")
    parser.add_argument(
        "--milliseconds", type=float, default=10, help="how long each candidate is timed a shape"
    )
    some = "build some of the kernels, without a GPU"
    parser.add_argument("--compile", metavar="PART/PARTS", help=some)
    parser.add_argument("--list", action="store_true", help="print the shapes and stop")
    stored_help = "today's choices by stored timings, without a GPU"
    parser.add_argument("--judge", nargs="+", type=Path, metavar="FILE", help=stored_help)
    parser.add_argument("-o", "--output", type=Path, help="the file to write")
    options = parser.parse_args()
    if options.judge:
        stored = [json.loads(path.read_text()) for path in options.judge]
        rows = [row for one in stored for row in judged(one, options.op, options.rows)]
        print(*map(line, sorted(rows, key=lambda row: row.get("regret", -1.0))), summary(rows), sep="\n")
        return
    chosen = [shape for op in options.op for shape in shapes_of(op, options.seed, options.rows)]
    if options.list:
        print("\n".join(f"{shape.op:14} {shape.name}" for shape in chosen))
    elif options.compile:
        run.build(needed(chosen), options.compile)
    else:
        measure(chosen, options)


if __name__ == "__main__":
    main()
