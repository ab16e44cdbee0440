"""``cute-attn hub``: write folders that Hugging Face's ``kernels`` library loads as FlashAttention's kernels.

For a folder's layout and fields see https://huggingface.co/docs/kernels. Its modules import the installed package.
"""

import importlib
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from cute_attn.cli import options
from cute_attn.lab.tables import template

KERNELS = {
    "flash-attn2": ("bert_padding, flash_attn_interface", "cute_attn.flash_attn.flash_attn_interface"),
    "flash-attn3": ("flash_attn_3 as flash_attn_interface", "cute_attn.flash_attn.flash_attn_3"),
}
"""A kernel's folder -> modules that it imports from cute_attn.flash_attn, and the module of its functions."""
REPOSITORIES = {
    "kernels-community/flash-attn2": "flash-attn2",
    "kernels-community/flash-attn3": "flash-attn3",
    "varunneal/flash-attention-3": "flash-attn3",
}
"""Repository -> folder: for transformers (flash_attention_2, _3), diffusers (flash_hub, _flash_3_hub), nanochat."""

_OWN, _OWN_ID = "from the cute_attn that is installed", "_cute_attn_hub_"
"""Text in each .py file, and in each .json file, that this command writes; no other files are overwritten."""


def hub(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write.")]) -> None:
    """Write local kernels for Hugging Face and print how to use them.

    Programs that ask the hub for FlashAttention-2's or -3's kernels then run on those of this package, unchanged.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"FOLDER is {str(folder)!r}, a file; accepted: a folder, or a name for one")
    for path in write(folder):
        print(path)
    print("\nFor programs that take FlashAttention from Hugging Face's hub, as transformers does for")
    print("attn_implementation='flash_attention_2' where flash_attn is not installed:\n")
    print(f"    export LOCAL_KERNELS={shlex.quote(local_kernels(folder))}")


def local_kernels(folder: Path) -> str:
    """The value of LOCAL_KERNELS for the kernels that :func:`write` wrote to ``folder``."""
    return ":".join(f"{name}={folder.resolve() / kernel}" for name, kernel in REPOSITORIES.items())


def write(folder: Path) -> list[Path]:
    """Write the kernels to ``folder``; returns their files.

    Raises:
        ValueError: the folder cannot be made, its path has a character by which LOCAL_KERNELS separates entries, or a
            file or link is in the way.
    """
    if set(":=") & set(str(folder.resolve())):
        raise ValueError(f"FOLDER is {str(folder)!r}; accepted: a path without ':' and '='")
    with options.writes("FOLDER", folder, "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / kernel / "build" / f"torch-{backend}" / name: text
        for kernel in KERNELS
        for backend in ("cuda", "cpu")
        for name, text in (("__init__.py", _module(kernel)), ("metadata.json", _metadata(kernel, backend)))
    }
    for path in texts:
        _check_own(folder, path)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(texts)


def _check_own(folder: Path, path: Path) -> None:
    """Raise ValueError if a file, folder or link is in the way that this command did not write."""
    below = [one for one in (*reversed(path.parents), path) if folder in one.parents]
    wrong = [one for one in below if one.is_symlink() or (one.exists() and one.is_dir() == (one == path))]
    mark = _OWN if path.suffix == ".py" else _OWN_ID
    if not wrong and path.exists() and mark.encode() not in path.read_bytes():
        wrong = [path]
    if wrong:
        raise ValueError(f"{str(wrong[0])!r} is not what this command wrote; accepted: a FOLDER without it")


def _module(kernel: str) -> str:
    modules, functions = KERNELS[kernel]
    names = [n for n in importlib.import_module(functions).__all__ if not n.startswith("_")]
    beside = [module.rpartition(" ")[2] for module in modules.split(", ")]
    quoted = ", ".join(f'"{name}"' for name in [*beside, *names])
    return template("hub_module.py.txt").format(
        own=_OWN, modules=modules, functions=functions, names=", ".join(names), quoted=quoted
    )


def _metadata(kernel: str, backend: str) -> str:
    said = {
        "id": f"{_OWN_ID}{kernel[-1]}_{backend}",
        "name": "cute-attn",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(said, indent=2) + "\n"
