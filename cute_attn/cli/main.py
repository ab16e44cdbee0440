"""List, compile, check, time and draw attention kernels, say what bounds them, and keep their cache.

A kernel is named by its traits, such as forward-sm80-bf16-d128-causal-dropout; list --features has the words, explain
what they mean.
"""

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import cute_attn

# The laboratory's modules are loaded on first use (``lab.tune``), and torch inside commands: --help needs neither.
from cute_attn import lab
from cute_attn.cli import bundle, doctor, hub, laboratory, options, run, table
from cute_attn.cli.errors import described
from cute_attn.compiler import compile, default_target, prebuild, registry
from cute_attn.compiler.cache import needed_cache
from cute_attn.epilogues.names import example_args
from cute_attn.lab.tables import Table, brief_tile, counted, sized
from cute_attn.tiles import SHARED_MEMORY_BYTES, TARGETS, text_of
from cute_attn.traits import FEATURES, OPS, Traits, did_you_mean

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
cache_app = typer.Typer(no_args_is_help=True, help="The kernels on disk.")
app.add_typer(cache_app, name="cache")

# The instructions that a cost table lists.
_NOTABLE = {
    "tensor cores": ("HMMA", "HGMMA", "IMMA", "QGMMA"),
    "async copies": ("LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP"),
    "matrix loads, stores": ("LDSM", "STSM"),
    "shared memory": ("LDS", "STS"),
    "global memory": ("LDG", "STG", "RED", "ATOMG"),
    "special functions": ("MUFU",),
    "local memory": ("LDL", "STL"),
    "barriers": ("BAR", "SYNCS", "WARPSYNC"),
}


def main() -> None:
    """Run the command; errors in arguments or files become one sentence."""
    warnings.formatwarning = _as_a_line
    try:
        app(prog_name="cute-attn")
    except Exception as error:
        text = described(error, verbose=options.is_verbose())
        if text is None:
            raise
        print(text, file=sys.stderr)
        sys.exit(2)


_default_format = warnings.formatwarning


def _as_a_line(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning; a warning of the package does not state where it was raised."""
    if Path(filename).is_relative_to(Path(cute_attn.__file__).parent):
        return f"warning: {message}\n"
    return _default_format(message, category, filename, lineno, line)


def _file(name: str) -> Any:
    """The specification of a user's file, or None for a module; raises ValueError for a name that is neither."""
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is not None and spec.loader is not None:
        return spec
    there = False
    with contextlib.suppress(ImportError, ValueError):  # no such package; no name of a module
        there = importlib.util.find_spec(name) is not None
    if not there:
        raise ValueError(f"--load is {name!r}; accepted: a Python file, or a module that is installed")
    return None


def _load(name: str) -> None:
    """Run a user's file, which registers variants and epilogues, or import a module that does."""
    spec = _file(name)
    if spec is None:
        importlib.import_module(name)
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cute-attn {cute_attn.__version__}")
        raise typer.Exit


@app.callback()
def load(
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--load", help="A Python file, or a module, that registers kernels or epilogues; may be repeated."
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version, and end."),
    ] = False,
    pager: Annotated[
        bool, typer.Option("--pager/--no-pager", help="Page what is longer than the screen.")
    ] = True,
    verbose: options.Verbose = False,
) -> None:
    options.set_pager(pager)
    if files:  # the first is refused before the DSL is loaded; the others may need what it makes importable
        _file(files[0])
        options.import_kernels()
    for file in files or ():
        _load(file)


@app.command("list")
def list_kernels(
    names: options.Names = None,
    target: options.Target = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every default tile, and not only how many there are.")
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="The words that a kernel's name may have.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Kernels with their default tiles, or why there is none; without NAMEs, how many defaults each kernel has.

    The beginning of a name, such as forward-sm80, lists all defaults that begin so. Below a default tile stand the
    tiles that replace it for some calls.
    """
    if features:
        words = Table("feature", "what it means", title=escape("OP-ARCH-DTYPE-dDIM[xDIM_V][-FEATURE...]"))
        for feature in FEATURES:
            words.add_row(feature, lab.explain.feature_text(feature))
        options.show(words)
        return
    if not (names or everything or as_json):
        with options.working("choosing default tiles"):
            counts = _counts(target)
        options.show(counts)
        return
    options.import_names()
    pairs = registry.defaults_on(target)
    if names:
        pairs = [one for name in names for one in _named(name, pairs, [target] if target else TARGETS)]
    else:
        pairs = [(t, on) for t, on in pairs if t == Traits(t.op, t.arch, t.dtype, t.head_dim)]
    rows = [_listed(traits, on) for traits, on in pairs]
    options.answer(as_json, rows, lambda: _defaults(rows))


def _named(name: str, known: list[Any], targets: Sequence[str]) -> list[Any]:
    """(traits, target) of the ``known`` defaults whose names begin with ``name``, else of ``name`` on each target."""
    begin = [one for one in known if f"{one[0]}-".startswith(f"{name}-")] if name.count("-") < 3 else []
    labels = [*map(registry.label, registry.KERNELS), *OPS]
    meant = did_you_mean(name, labels)
    if name in labels and not begin:
        if ":" in name:
            raise ValueError(
                f"{name} is a variant, of which no name is listed; accepted: a name such as {name}-bf16-d128"
            )
        raise ValueError(f"no default kernel of {name} is for {', '.join(targets)}")
    if not begin and name.count("-") < 3:
        raise ValueError(f"name is {name!r}{meant}; accepted: a kernel's name or its beginning")
    return begin or [(Traits.parse(name), on) for on in targets]


def _defaults(rows: list[dict[str, Any]]) -> Table:
    """A table of default tiles, or why there is none; rows that differ only in the target are merged."""
    table = Table("kernel", "targets", "default tile", "shared memory", "registers")
    if not options.is_verbose():
        table.caption = "fields of tiles that have their class's default are left out; -v shows all"
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str([row["name"], row["tile"], row["reason"]]), []).append(row)
    for row, *others in groups.values():
        name, targets = row["name"], " ".join(one["target"] for one in (row, *others))
        if row["reason"]:
            table.add_row(name, targets, f"[red]{row['reason']}")
            continue
        costs = (f"{row['shared_memory_bytes']:,}", f"about {row['registers']}")
        table.add_row(name, targets, _shown(name, row["tile"]), *costs)
        for other in row["other_tiles"]:
            table.add_row(f"  for {other['for']}", targets, _shown(name, other["tile"]))
    return table


def _counts(target: str | None) -> Table:
    """A table with a row for each kernel: where it runs, how many default tiles it has, and an example of a name."""
    options.import_names()
    known = registry.defaults_on(target)
    table = Table("kernel", "runs on", "tiles", "such as")
    table.columns[0].no_wrap = True  # the others fold in a narrow terminal
    table.caption = (
        "`list --all` has every default tile, `list forward-sm80` a kernel's, `list --features` words"
    )
    for op, arch, variant in registry.KERNELS:
        label, runs_on = registry.label((op, arch, variant)), registry.RUNS_ON[arch]
        runs = " to ".join(dict.fromkeys((runs_on[0], runs_on[-1])))
        own = [one for one in known if (one[0].op, one[0].arch, "") == (op, arch, variant)]
        if own:
            tiles = {registry.lookup(traits, None, on).tile.text for traits, on in own}
            such = min((traits for traits, _ in own), key=lambda one: (one.head_dim != 128, len(one.name)))
            table.add_row(label, runs, str(len(tiles)), such.name)
        elif target in (None, *runs_on):
            table.add_row(label, runs, "", f"{label}-bf16-d128" if variant else "")
    return table


def _listed(traits: Traits, target: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": traits.name, "target": target, "tile": None, "reason": None}
    try:
        kernel = registry.lookup(traits, None, target)
    except registry.Unsupported as error:
        return row | {"reason": str(error)}
    return row | {
        "tile": kernel.tile.text,
        "shared_memory_bytes": kernel.tile.smem_bytes(traits),
        "registers": kernel.tile.registers(traits),
        "other_tiles": [{"for": when, "tile": tile.text} for when, tile in registry.other_tiles(kernel)],
    }


@app.command("compile")
def compile_kernel(
    name: options.Name,
    tile: options.TileText = "",
    target: options.Target = None,
    as_json: options.AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=options.writable_folder,
            help="Write PTX, cubin and SASS into this folder.",
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Build a kernel, with or without a GPU, and print what it costs."""
    options.check_kernels([name], tile, target)
    with options.working(f"building {name}: seconds, the first time"):
        options.import_kernels()
        compiled = compile(name, tile or None, target)
    if output is not None:
        base = f"{compiled.name.replace(':', '_')}.{compiled.target}"
        (output / f"{base}.ptx").write_text(compiled.ptx)
        (output / f"{base}.cubin").write_bytes(compiled.cubin)
        (output / f"{base}.sass").write_text(compiled.sass)
    names = ("name", "target", "tile", "resources", "instructions", "seconds")
    found = {name: getattr(compiled, name) for name in names}
    found |= {name: asdict(found[name]) for name in ("tile", "resources")}
    options.answer(as_json, found, lambda: cost_table(compiled), options.make_console().print)


def cost_table(compiled: Any) -> Table:
    table = Table("", f"{compiled.name} on {compiled.target}")
    resources, instructions = compiled.resources, compiled.instructions
    spills = f"{resources.spill_store_bytes} bytes stored, {resources.spill_load_bytes} loaded"
    costs = {
        "tile": _spaced(compiled.tile.text if options.is_verbose() else compiled.tile),
        "registers per thread": str(resources.registers),
        "shared memory per block": f"{resources.shared_memory_bytes:,} bytes",
        "spills": f"[red]{spills}" if resources.spill_store_bytes else "none",
        "local memory per thread": f"{resources.local_bytes} bytes",
    }
    if compiled.warnings:
        costs["ptxas"] = "[red]" + " ".join(compiled.warnings)
    for kind, mnemonics in _NOTABLE.items():
        counts = [f"{m} {instructions[m]}" for m in mnemonics if m in instructions]
        if counts:
            costs[kind] = ", ".join(counts)
    costs["all instructions"] = f"{sum(instructions.values()):,}"
    costs["built"] = "from the cache" if compiled.from_cache else f"in {compiled.seconds:.1f} s"
    for row in costs.items():
        table.add_row(*row)
    return table


def _shown(name: str, tile: str) -> str:
    """A kernel's tile as commands print it: without fields at their class's default, unless -v was given."""
    return _spaced(tile if options.is_verbose() else brief_tile(name, None, tile))


def _spaced(tile: Any) -> str:
    """A tile's text with spaces, which lets it wrap."""
    return str(tile).replace(",", ", ")


@app.command("check")
def check_kernel(name: options.Name, tile: options.TileText = "", target: options.Target = None) -> None:
    """Check a tile's fit, the layouts of shared memory, a build for spills and, on a GPU, against the reference."""
    options.check_kernels([name], tile, target)
    import torch

    options.import_kernels()
    from cute_attn.compiler.smem_layouts import reasons  # loads the DSL

    traits = Traits.parse(name)
    registry.known_class(traits)
    console = options.make_console()
    table = Table("target", "fits", title=traits.name)
    for on in (target,) if target else registry.RUNS_ON.get(traits.arch, ()):
        try:
            fitting = registry.lookup(traits, tile or None, on).tile
            fits = f"{fitting.smem_bytes(traits):,} of {SHARED_MEMORY_BYTES[on]:,} bytes of shared memory"
        except registry.Unsupported as error:
            fits = f"[red]{error}"
        table.add_row(on, fits)
    console.print(table)

    kernel = registry.lookup(traits, tile or None, target or default_target(traits.arch))
    if wrong := next(reasons(kernel), None):
        console.print(f"[red]failed: {escape(wrong)}")
        raise typer.Exit(1)
    with options.working(f"building {traits}: seconds, the first time"):
        compiled = compile(traits, tile or None, target)
    console.print(cost_table(compiled))
    problems = list(compiled.warnings)
    if compiled.resources.spill_store_bytes or compiled.resources.local_bytes:
        problems.append(f"it spills registers; `cute-attn tune {traits} --static` lists tiles that do not")
    declared = compiled.tile.smem_bytes(traits)
    if compiled.resources.shared_memory_bytes > declared:
        problems.append(f"it takes more shared memory than the {declared} bytes its tile states")
    if traits.epilogues:
        problems += _check_epilogues(console, traits)
    runs = torch.cuda.is_available()
    if runs:
        problems += _check_on_gpu(console, traits, kernel.tile if tile else None)
    if problems:
        console.print(f"[red]failed: {'; '.join(problems)}")
        raise typer.Exit(1)
    console.print("passed" if runs else "built, not run: there is no GPU to compare it with the reference on")


def _check_epilogues(console: Console, traits: Traits) -> list[str]:
    """Compare users' epilogues with their references on the CPU; returns what failed."""
    from cute_attn.reference.check_epilogue import check_epilogue  # loads the DSL

    failed = []
    for name in traits.epilogues:
        try:
            example_args(name, 1, 1, 1, 1)
        except ValueError as reason:
            console.print(f"not compared: {reason}", highlight=False, markup=False)
            continue
        with options.working(f"running {name} on the CPU"):
            found = check_epilogue(name)
        console.print(str(found), highlight=False, markup=False, soft_wrap=True)
        if not found.passed:
            failed.append(f"epilogue {name!r} is not what its reference says")
    return failed


def _check_on_gpu(console: Console, traits: Traits, tile: Any) -> list[str]:
    table = Table("workload", "error", "plain torch's", "allowed", "")
    failed = 0
    workloads = lab.check.small_workloads(traits, tile)
    for workload, found in lab.check.check_workloads(traits, workloads, text_of(tile) or None):
        failed += not found.passed
        numbers = (f"{x:.2e}" for x in (found.error, found.plain, found.allowed))
        table.add_row(workload.name, *numbers, "ok" if found.passed else "[red]wrong")
    console.print(table)
    return [f"{failed} workloads are wrong"] if failed else []


@app.command("bench")
def bench_kernel(
    name: options.Name,
    tile: options.TileText = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time torch's backends and FlashAttention-4.")
    ] = False,
    seqlens: Annotated[
        list[int] | None, typer.Option("--seqlen", min=1, help="Sequence lengths; may be repeated.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time a kernel on the GPU, alone or with its peers in the same run."""
    options.check_kernels([name], tile)
    options.need_gpu()
    from cute_attn.lab.benchmark import peers as known
    from cute_attn.lab.benchmark import results, workload

    traits = Traits.parse(name)
    workloads = [workload.of_traits(traits, seqlen) for seqlen in seqlens or (2048, 8192)]
    kernel = known.kernel_of(traits)
    rivals = {f"cute_attn/{traits.op}-{kernel}": known.ours(kernel, tile or None)}
    rivals |= known.PEERS if peers else {}
    result = results.time_workloads(workloads, rivals)
    table = Table(
        "workload", "by", "ms", "TFLOP/s", title=f"{result['gpu']}, {result['clock_mhz']} MHz under load"
    )
    for row in result["rows"]:
        numbers = (row["error"], "") if "error" in row else (f"{row['ms']:.3f}", f"{row['value']:.0f}")
        table.add_row(row["workload"], row["impl"], *numbers)
    options.answer(as_json, result, lambda: table, options.make_console().print)


@app.command("show")
def draw_kernel(
    name: options.Name,
    tile: options.TileText = "",
    target: options.Target = None,
    output: options.OutputFolder = Path("pictures"),
    svg: Annotated[bool, typer.Option("--svg", help="Draw SVG instead of PNG.")] = False,
) -> None:
    """Draw a kernel's shared-memory layouts, copies and MMA."""
    options.check_kernels([name], tile, target)
    options.import_kernels()
    with options.working("drawing"):
        paths = list(
            lab.pictures.pictures(name, tile or None, target).save(output, ".svg" if svg else ".png")
        )
    print(*paths, sep="\n")


@cache_app.command("list")
def cache_list(
    everything: Annotated[bool, typer.Option("--all", help="Every kernel, and not only how many.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """What is on disk: how many kernels, or with --all each of them, the most recently used first."""
    cache = needed_cache("the cache commands need")
    entries = cache.entries()
    rows = [{"key": entry.key, "bytes": entry.size} | entry.meta for entry in entries]
    title = (
        f"{counted(len(entries), 'kernel')}, {sized(sum(entry.size for entry in entries))} in {cache.root}"
    )
    if not entries:
        print(title)
        return
    if everything:
        table = Table("kernel", "target", "tile", "built in", "key", title=title)
        for entry in entries:
            meta = entry.meta
            tile = ", ".join(f"{field}={value}" for field, value in meta["tile"].items())
            table.add_row(meta["name"], meta["target"], tile, f"{meta['seconds']:.1f} s", entry.key[:12])
    else:
        table = Table("kernel", "kernels", "MB", "seconds to build", title=title)
        table.caption = "`cute-attn cache list --all` has each of them"
        groups: dict[str, list[Any]] = {}
        for entry in entries:
            groups.setdefault("-".join(entry.meta["name"].split("-")[:2]), []).append(entry)
        for label, those in sorted(groups.items()):
            size, seconds = sum(one.size for one in those) / 1e6, sum(one.meta["seconds"] for one in those)
            table.add_row(label, str(len(those)), f"{size:.1f}", f"{seconds:.0f}")
    options.answer(as_json, rows, lambda: table)


@cache_app.command("prune")
def cache_prune(
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, help="Remove what was not used for so many days.")
    ] = 30,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
) -> None:
    """Remove kernels that are no longer used, and broken ones."""
    cache = needed_cache("the cache commands need")
    count, size = cache.prune(None if everything else older_than * 86400)
    print(f"removed {counted(count, 'kernel')}, {sized(size)} from {cache.root}")


@cache_app.command("prebuild")
def cache_prebuild(
    names: options.Names = None,
    tile: options.TileText = "",
    target: options.Target = None,
    like: options.Like = None,
    workers: options.Workers = None,
) -> None:
    """Build NAMEs, the kernels of a program, or every default kernel, in parallel processes."""
    if like and (names or tile or target):
        raise ValueError("--like is given beside NAMEs, --tile or --target; accepted: --like alone")
    for path in like or ():
        lab.recorded.listed(path)
    options.check_kernels(names or (), tile, target)
    options.need_compiler()
    requests: list[tuple[Traits, Any, str | None]]
    if like:
        requests = lab.bundles.like(like)
    elif names:
        requests = [(Traits.parse(n), tile or None, target) for n in names]
    else:
        requests = [(t, tile or None, on) for t, on in registry.defaults_on(target)]
    options.show_building(prebuild(requests, workers), len(requests))


def tour(context: typer.Context) -> None:
    """Eight levels from a scalar loop to the shipped Hopper forward: N builds one and says what it costs."""
    if {"--check", "--measure"} & {*context.args}:
        options.need_gpu("checking and timing a level need one")
    if any(word.isdigit() for word in context.args):
        options.need_compiler()
    from tour.__main__ import main  # loads torch and the DSL

    sys.argv = ["cute-attn tour", *context.args]
    main()


app.command("verdict")(laboratory.verdict_of_tiles)
app.command("diff")(laboratory.difference_of_two)
app.command("ab")(laboratory.ab_of_tiles)
app.command("tune")(laboratory.tune_tile)
app.command("table")(table.print_table)
app.command("explain")(table.explain_words)
app.command("doctor")(doctor.examine)
app.command("tour", context_settings=run.ITS_OWN, add_help_option=False)(tour)
app.command("run", context_settings=run.ITS_OWN, no_args_is_help=True)(run.run)
app.command("hub", no_args_is_help=True)(hub.hub)
app.command("bundle", no_args_is_help=True)(bundle.bundle)
app.command("export", no_args_is_help=True)(bundle.export)
for _one in (*app.registered_commands, *cache_app.registered_commands):
    # A paragraph is one line, which a terminal folds at its width.
    _paragraphs = (_one.callback.__doc__ or "").split("\n\n")
    _one.help = "\n\n".join(" ".join(part.split()) for part in _paragraphs)
