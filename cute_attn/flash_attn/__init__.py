"""FlashAttention's functions, with its signatures and conventions, on the kernels of this package.

    from cute_attn.flash_attn import flash_attn_func                   FlashAttention-2's, instead of  from flash_attn
    from cute_attn.flash_attn.flash_attn_3 import flash_attn_func      FlashAttention-3's, of flash_attn_interface
    cute_attn.flash_attn.install()                                     where code that imports those cannot be edited

Source of names, arguments and conventions: Dao-AILab/flash-attention, 2.8 and hopper/ of 2026-08. FlashAttention's
kernels support fp16 and bf16 on CUDA. This package adds fp32 on CUDA, and CPU tensors of any float dtype, computed by
:mod:`cute_attn.reference`.

:func:`install` provides the attention functions that other libraries import; :data:`MODULES` lists them. The modules
below are missing. Importing one raises ModuleNotFoundError, so libraries assume an older FlashAttention:

    flash_attn.modules, .models            layers and models with their projections, norms and weights
    flash_attn.ops.fused_dense, .layer_norm, .rms_norm, .activations, .losses    no attention
    flash_attn.utils.*                     for generation and tests of those models
    flash_attn.cute                        FlashAttention-4's; its functions take other mask and score programs
    flash_attn.flash_attn_triton, .flash_blocksparse_*    superseded; FlashAttention keeps them for old code only
    flash_attn_2_cuda.fwd_kvcache          flash_attn_with_kvcache is the only function that calls it
    hopper, flashattn_hopper, vllm.vllm_flash_attn        copies of FlashAttention under names of other projects
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from cute_attn.flash_attn import (
    bert_padding,
    distribution,
    extension,
    flash_attn_3,
    flash_attn_interface,
    rotary,
)
from cute_attn.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cute_attn.host.doors import served

__version__ = "2.8.3"
"""The version of FlashAttention that these functions implement. Programs check this version."""

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install",
    "served",
]  # fmt: skip


class _Module(NamedTuple):
    """A module that :func:`install` makes: ``names`` of ``source``, or a package for submodules."""

    source: ModuleType | None = None
    names: Sequence[str] = ()
    is_package: bool = False


_ROTARY = [name for name in rotary.__all__ if name != "apply_rotary"]

MODULES: dict[int, dict[str, _Module]] = {
    2: {
        "flash_attn": _Module(
            flash_attn_interface, [n for n in __all__ if n not in ("install", "served")], is_package=True
        ),
        "flash_attn.flash_attn_interface": _Module(flash_attn_interface, flash_attn_interface.__all__),
        "flash_attn.bert_padding": _Module(bert_padding, bert_padding.__all__),
        "flash_attn.layers": _Module(is_package=True),
        "flash_attn.layers.rotary": _Module(rotary, _ROTARY),
        "flash_attn.ops": _Module(is_package=True),
        "flash_attn.ops.triton": _Module(is_package=True),
        "flash_attn.ops.triton.rotary": _Module(rotary, ["apply_rotary"]),
        "flash_attn_2_cuda": _Module(extension, extension.__all__),
    },
    3: {
        "flash_attn_interface": _Module(flash_attn_3, flash_attn_3.__all__),
        "flash_attn_3": _Module(is_package=True),
        "flash_attn_3.flash_attn_interface": _Module(flash_attn_3, flash_attn_3.__all__),
    },
}
"""The modules that :func:`install` makes, by FlashAttention's version (2 or 3) and name."""

VERSIONS = {2: __version__, 3: "3.0.0"}
_DISTRIBUTIONS = {2: "flash-attn", 3: "flash-attn-3"}


def install(versions: Sequence[int] = (2, 3)) -> None:
    """Make ``import flash_attn`` and ``import flash_attn_interface`` import this package's functions in this process.

    :data:`MODULES` lists the modules and their names; no other submodules exist. ``importlib.metadata`` finds
    flash-attn and flash-attn-3 with :data:`VERSIONS`. Call this before importing libraries that look for flash_attn
    only once, such as transformers. A second call has no effect.

    Parameters
    ----------
    versions : sequence of {2, 3}
        FlashAttention-2 is ``flash_attn``; FlashAttention-3 is ``flash_attn_interface`` and ``flash_attn_3``. Most
        libraries that find both use FlashAttention-3.

    Raises
    ------
    ValueError
        One of these modules exists already, from another package.
    """
    if not isinstance(versions, Iterable) or not versions or not set(versions) <= set(MODULES):
        raise ValueError(f"versions is {versions!r}; accepted: some of {', '.join(map(str, MODULES))}")
    wanted = [number for number in MODULES if number in versions and not _is_ours(number)]
    for number in wanted:
        for name in _top_level(number):
            if name in sys.modules or find_spec(name) is not None:
                raise ValueError(
                    f"{name} {_installed_version(number)} is installed; accepted: install() where none is, or other "
                    "versions alone"
                )
    for number in wanted:
        for name, module in MODULES[number].items():
            sys.modules[name] = _made(name, module, VERSIONS[number])
        distribution.announce(_DISTRIBUTIONS[number], VERSIONS[number], _top_level(number))


def _top_level(number: int) -> list[str]:
    return [name for name in MODULES[number] if "." not in name]


def _is_ours(number: int) -> bool:
    """True if an earlier :func:`install` made the modules of this FlashAttention version."""
    return all(getattr(sys.modules.get(name), "__made_by__", None) == __name__ for name in MODULES[number])


def _made(name: str, module: _Module, of_version: str) -> ModuleType:
    """Make a module that ``find_spec`` can find, and set it as an attribute of its package."""
    made = ModuleType(name, None if module.source is None else module.source.__doc__)
    made.__spec__ = ModuleSpec(name, None, is_package=module.is_package)
    vars(made).update({each: getattr(module.source, each) for each in module.names}, __made_by__=__name__)
    if module.is_package:
        made.__path__ = []  # a file found here would be imported a second time, under another name
    package, _, own = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own, made)
    else:
        vars(made)["__version__"] = of_version
    return made


def _installed_version(number: int) -> str:
    try:
        return version(_DISTRIBUTIONS[number])
    except PackageNotFoundError:  # imported from a folder, or only a subpackage such as flash_attn.cute
        return "of unknown version"
