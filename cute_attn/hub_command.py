"""``cute-attn hub``: a folder that Hugging Face's ``kernels`` library takes for FlashAttention-2's kernels.

Layout and fields of the folder: https://huggingface.co/docs/kernels. Its modules import the installed package.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

REPOSITORY = "kernels-community/flash-attn2"
"""What transformers loads for ``attn_implementation="flash_attention_2"`` where flash_attn is not installed."""

_MODULE = '''"""FlashAttention-2's functions from the cute_attn that is installed."""

from cute_attn.flash_attn import {names}

__all__ = [{quoted}]
'''


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("hub", no_args_is_help=True)(hub)


def hub(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; its parent exists.")],
) -> None:
    """Write a local kernel for Hugging Face and print how to use it.

    transformers' flash_attention_2 then runs on the kernels of this package, without any change to a program.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"FOLDER is {str(folder)!r}, a file; accepted: a folder, or a name for one")
    for path in write(folder):
        print(path)
    print("\nFor a program that loads models with attn_implementation='flash_attention_2':\n")
    print(f"    export LOCAL_KERNELS={shlex.quote(f'{REPOSITORY}={folder.resolve()}')}")


def write(folder: Path) -> list[Path]:
    """Write the folder; returns its files.

    Raises
    ------
    ValueError
        The folder's path has a character by which LOCAL_KERNELS separates entries.
    """
    if set(":=") & set(str(folder.resolve())):
        raise ValueError(f"FOLDER is {str(folder)!r}; accepted: a path without ':' and '='")
    files = []
    for backend in ("cuda", "cpu"):
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        files += [variant / "__init__.py", variant / "metadata.json"]
        files[-2].write_text(_module())
        files[-1].write_text(json.dumps(metadata(backend), indent=2) + "\n")
    return files


def _module() -> str:
    from cute_attn import flash_attn

    names = flash_attn.FUNCTIONS
    return _MODULE.format(names=", ".join(names), quoted=", ".join(f'"{name}"' for name in names))


def metadata(backend: str) -> dict[str, Any]:
    """What describes a variant."""
    return {
        "id": f"_cute_attn_hub_{backend}",
        "name": "cute-attn",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }
