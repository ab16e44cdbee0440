"""``cute-attn hub``: folders that Hugging Face's ``kernels`` library takes for FlashAttention's kernels.

Layout and fields of a folder: https://huggingface.co/docs/kernels. Its modules import the installed package.
"""

import contextlib
import importlib
import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer


class Kernel(NamedTuple):
    """One of the hub's kernels.

    Attributes:
        repositories: of the hub, by which libraries ask for it.
        folder: below the one that is named.
        number: of FlashAttention.
        modules: what its module has beside functions.
        functions: the module of cute_attn they are in.
    """

    repositories: tuple[str, ...]
    folder: str
    number: int
    modules: str
    functions: str


KERNELS = (
    Kernel(
        repositories=("kernels-community/flash-attn2",),
        folder="flash-attn2",
        number=2,
        modules="bert_padding, flash_attn_interface",
        functions="cute_attn.flash_attn.flash_attn_interface",
    ),
    Kernel(
        repositories=("kernels-community/flash-attn3", "varunneal/flash-attention-3"),
        folder="flash-attn3",
        number=3,
        modules="flash_attn_3 as flash_attn_interface",
        functions="cute_attn.flash_attn.flash_attn_3",
    ),
)
"""What transformers loads for flash_attention_2 and _3, diffusers for flash_hub and _flash_3_hub, and nanochat."""

_BACKENDS = ("cuda", "cpu")
_OWN_MODULE, _OWN_ID = "from the cute_attn that is installed.", "_cute_attn_hub_"
"""What the docstring of a module that this command wrote ends with; how a variant's id begins."""

_MODULE = '''"""FlashAttention-{number}'s functions {own}"""

from cute_attn.flash_attn import {modules}
from {functions} import {names}

__all__ = [{quoted}]
'''


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("hub", no_args_is_help=True)(hub)


def hub(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write.")],
) -> None:
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
    """The value of LOCAL_KERNELS for what :func:`write` wrote there."""
    return ":".join(
        f"{repository}={folder.resolve() / kernel.folder}"
        for kernel in KERNELS
        for repository in kernel.repositories
    )


def write(folder: Path) -> list[Path]:
    """Write the folder; returns its files.

    Files that this command wrote before are replaced, all others stay: nothing is written where one is in the way, or
    through a link below the folder.

    Raises
    ------
    ValueError
        The folder's path has a character by which LOCAL_KERNELS separates entries, or a file or link is in the way.
    """
    if set(":=") & set(str(folder.resolve())):
        raise ValueError(f"FOLDER is {str(folder)!r}; accepted: a path without ':' and '='")
    folder.mkdir(parents=True, exist_ok=True)
    texts = _texts()
    for parts in texts:
        _check_own(folder, parts)
    for parts, text in texts.items():
        _write(folder, parts, text)
    return [folder.joinpath(*parts) for parts in texts]


def _texts() -> dict[tuple[str, ...], str]:
    """Of all files, by their paths' parts."""
    texts: dict[tuple[str, ...], str] = {}
    for kernel in KERNELS:
        for backend in _BACKENDS:
            variant = (kernel.folder, "build", f"torch-{backend}")
            texts[*variant, "__init__.py"] = _module(kernel)
            texts[*variant, "metadata.json"] = json.dumps(metadata(kernel, backend), indent=2) + "\n"
    return texts


def _module(kernel: Kernel) -> str:
    names = [n for n in importlib.import_module(kernel.functions).__all__ if not n.startswith("_")]
    beside = [module.rpartition(" ")[2] for module in kernel.modules.split(", ")]
    return _MODULE.format(
        number=kernel.number,
        own=_OWN_MODULE,
        modules=kernel.modules,
        functions=kernel.functions,
        names=", ".join(names),
        quoted=", ".join(f'"{name}"' for name in [*beside, *names]),
    )


def metadata(kernel: Kernel, backend: str) -> dict[str, Any]:
    """What describes a variant."""
    return {
        "id": f"{_OWN_ID}{kernel.number}_{backend}",
        "name": "cute-attn",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }


# ---- files, without following links ----


@contextlib.contextmanager
def _opened(folder: Path, parts: tuple[str, ...], make: bool) -> Iterator[int | None]:
    """The descriptor of a folder below ``folder``, or None where there is none and none is to be made."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for i, part in enumerate(parts):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                yield None
                return
            except OSError:
                where = str(folder.joinpath(*parts[: i + 1]))
                raise ValueError(f"{where!r} is a link or a file; accepted: a folder, or none") from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _check_own(folder: Path, parts: tuple[str, ...]) -> None:
    """Raise where there is a file that this command did not write."""
    with _opened(folder, parts[:-1], make=False) as descriptor:
        if descriptor is None:
            return
        try:
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
        except FileNotFoundError:
            return
        except OSError:
            own = False
        else:
            with open(file, "rb") as opened:
                own = _is_own(
                    parts[-1], opened.read(1 << 16) if stat.S_ISREG(os.fstat(file).st_mode) else b""
                )
    if not own:
        where = str(folder.joinpath(*parts))
        raise ValueError(f"{where!r} is not what this command wrote; accepted: a FOLDER without it")


def _is_own(name: str, content: bytes) -> bool:
    if name == "__init__.py":
        return content.partition(b"\n")[0].endswith(f'{_OWN_MODULE}"""'.encode())
    try:
        said = json.loads(content)
    except ValueError:
        return False
    return isinstance(said, dict) and str(said.get("id")).startswith(_OWN_ID)


def _write(folder: Path, parts: tuple[str, ...], text: str) -> None:
    """Write a file beside the old one and rename it, which replaces a link rather than what it names."""
    with _opened(folder, parts[:-1], make=True) as descriptor:
        assert descriptor is not None
        new = f".{parts[-1]}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o666, dir_fd=descriptor), "w") as file:
            file.write(text)
        os.replace(new, parts[-1], src_dir_fd=descriptor, dst_dir_fd=descriptor)
