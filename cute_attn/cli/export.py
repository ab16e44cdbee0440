"""The command ``cute-attn export``: kernels for programs in C and C++."""

from pathlib import Path
from typing import Annotated

import typer

from cute_attn.cli.options import (
    Target,
    TileText,
    Workers,
    complete_name,
    counted,
    import_kernels,
    working,
    writable_folder,
)


def export(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            autocompletion=complete_name,
            help="Kernels, such as forward-sm80-bf16-d128-causal.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=writable_folder, help="The folder to write into.")
    ],
    tile: TileText = "",
    target: Target = None,
    workers: Workers = None,
) -> None:
    """Write kernels for C and C++: objects, a header, and a CMakeLists.txt that links them, without Python.

    A backward comes with the kernels that its calls launch. examples/cpp calls a forward, a backward and a decode.
    """
    with working("building: seconds each, the first time"):
        import_kernels()
        from cute_attn.lab import bundles, exports

        requests = bundles.named_requests(names, tile, [target] if target else [])
        kernels = exports.export(requests, output, workers)
    for kernel in kernels:
        print(f"{exports.macro_name(kernel.traits, kernel.target)}  {kernel.tile}")
    print(
        f"{counted(len(kernels), 'kernel')} in {output}; licence: {bundles.LICENCE['kernels']}; "
        f"{bundles.LICENCE['runtime']}"
    )
