"""FlashAttention-2's functions, with its signatures and conventions, on the kernels of this package.

    from cute_attn.flash_attn import flash_attn_func       instead of  from flash_attn import flash_attn_func
    cute_attn.flash_attn.install()                         where code that imports flash_attn cannot be edited

Submodules have the names of FlashAttention-2's. Source of names, arguments and conventions: Dao-AILab/flash-attention
2.8, whose kernels take fp16 and bf16 on CUDA; here CPU tensors of any float dtype are computed too, by
:mod:`cute_attn.reference`.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

from cute_attn.doors import served
from cute_attn.flash_attn import bert_padding, distribution, flash_attn_interface
from cute_attn.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"
"""The FlashAttention whose functions these are; programs compare it."""

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "served",
]
FUNCTIONS = [name for name in __all__ if name not in ("install", "served")]
"""FlashAttention-2's."""

_NAME = "flash_attn"


def install() -> None:
    """Let ``import flash_attn`` in this process give this package, where no ``flash_attn`` is installed.

    ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding`` come with it; other submodules do not exist.
    ``importlib.metadata`` finds flash-attn of version ``__version__``. Libraries such as transformers ask once whether
    there is a flash_attn: call this before they are imported. A second call changes nothing.

    Raises
    ------
    ValueError
        A ``flash_attn`` is installed.
    """
    present = sys.modules.get(_NAME)
    if present is not None and getattr(present, "flash_attn_func", None) is flash_attn_func:
        return
    if find_spec(_NAME) is not None:
        raise ValueError(f"flash_attn {_installed_version()} is installed; accepted: install() where none is")
    package = _module(_NAME, sys.modules[__name__], FUNCTIONS)
    package.__path__ = []  # a file found here would be imported a second time, under another name
    package.__version__ = __version__  # type: ignore[attr-defined]
    for submodule in (flash_attn_interface, bert_padding):
        name = submodule.__name__.rpartition(".")[2]
        setattr(package, name, _module(f"{_NAME}.{name}", submodule, submodule.__all__))
        sys.modules[f"{_NAME}.{name}"] = getattr(package, name)
    sys.modules[_NAME] = package
    distribution.announce(__version__)


def _module(name: str, source: ModuleType, public: list[str]) -> ModuleType:
    """A module of that name with the public names of ``source``; ``find_spec`` finds its spec."""
    module = ModuleType(name, source.__doc__)
    module.__spec__ = ModuleSpec(name, None, is_package=name == _NAME)
    vars(module).update({each: getattr(source, each) for each in public})
    return module


def _installed_version() -> str:
    try:
        return version(_NAME)
    except PackageNotFoundError:  # imported from a folder, or only a part such as flash_attn.cute
        return "of unknown version"
