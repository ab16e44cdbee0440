"""The commands ``cute-attn bundle``, kernels for machines without a compiler, and ``export``, for C and C++."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from cute_attn import lab
from cute_attn.cli import options
from cute_attn.lab.tables import counted, sized
from cute_attn.tiles import TARGETS


def bundle(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The folder or the wheel (a name that ends in .whl) to write."),
    ],
    names: options.Names = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Kernels of common calls, and of the tables' rows.")
    ] = False,
    like: options.Like = None,
    tile: options.TileText = "",
    targets: Annotated[
        str,
        typer.Option(
            "--target",
            help="Such as sm80,sm90, which --all is for; by default of NAMEs the GPU that is present, or the kernel's "
            "generation.",
        ),
    ] = "",
    workers: options.Workers = None,
) -> None:
    """Write compiled kernels for machines without the DSL: NAMEs, those of a program, or those of common calls.

    Such a machine finds them by CUTE_ATTN_BUNDLE=FOLDER, or by the wheel that is installed. A backward comes with the
    kernels that its calls launch. Kernels are built in parallel processes and linked by the C compiler. --like has
    exactly what a program needed. --all has thousands of kernels, for calls of any lengths, and takes hours.
    """
    given = [what for what, there in (("NAMEs", names), ("--all", everything), ("--like", like)) if there]
    if len(given) != 1:
        raise ValueError(f"given: {' and '.join(given) or 'nothing'}; accepted: NAMEs, --all or --like")
    if tile and not names:
        raise ValueError(f"--tile is {tile!r}; accepted with NAMEs only")
    wanted = list(filter(None, targets.split(",")))
    if not set(wanted) <= set(TARGETS):
        raise ValueError(f"--target is {targets!r}; accepted: some of {', '.join(TARGETS)}, with commas")
    for path in like or ():
        lab.recorded.listed(path)
    options.check_kernels(names or (), tile, wanted[0] if len(wanted) == 1 else None)
    with options.working("choosing kernels"):
        options.import_kernels()
        from cute_attn.lab import common_calls

        if like:
            requests = [one for one in lab.bundles.like(like) if not wanted or one[2] in wanted]
        elif everything:
            requests = common_calls.everything(wanted or common_calls.PROCESSORS)
        else:
            requests = lab.bundles.named_requests(names or (), tile, wanted)
    ops = Counter(traits.op for traits, _, _ in requests)
    print(f"{counted(len(requests), 'kernel')}:", ", ".join(f"{n} {op}" for op, n in ops.most_common()))
    options.show_building(lab.bundles.make_bundle(requests, output, workers), len(requests))
    print(f"{counted(len(requests), 'kernel')}, {sized(lab.bundles.size_of(output))} in {output}")
    print(f"licence: {lab.bundles.LICENCE['kernels']}; {lab.bundles.LICENCE['runtime']}")


def export(
    names: options.KnownNames,
    output: options.OutputFolder,
    tile: options.TileText = "",
    target: options.Target = None,
    workers: options.Workers = None,
) -> None:
    """Write kernels for C and C++: objects, a header, and a CMakeLists.txt that links them, without Python.

    A backward comes with the kernels that its calls launch. examples/cpp calls a forward, a backward and a decode.
    """
    options.check_kernels(names, tile, target)
    with options.working("building: seconds each, the first time"):
        options.import_kernels()
        requests = lab.bundles.named_requests(names, tile, [target] if target else [])
        kernels = lab.exports.export(requests, output, workers)
    for kernel in kernels:
        print(f"{lab.exports.macro_name(kernel.traits, kernel.target)}  {kernel.tile}")
    print(
        f"{counted(len(kernels), 'kernel')} in {output}; licence: {lab.bundles.LICENCE['kernels']}; "
        f"{lab.bundles.LICENCE['runtime']}"
    )
