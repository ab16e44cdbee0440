"""Attention kernels in the CUTLASS Python DSL: pick one by its traits, change its tile, compile, measure, ship.

    import cute_attn

    out = cute_attn.attention(q, k, v, causal=True)                                 the operator
    kernel = cute_attn.compile("forward-sm80-bf16-d128-causal", "tile_n=128")       a kernel that it launches
    kernel.resources, kernel.instructions, kernel.ptx, kernel.sass
    cute_attn.sdpa.activate()                                                       PyTorch's attention on the kernels
    cute_attn.flex, cute_attn.flash_attn, cute_attn.transformers                    the APIs of those packages
    cute_attn.lab                                                                   what a tile costs, and which is best

Names are imported on first use: ``import cute_attn`` itself loads neither torch nor the DSL. Programs saved by
``torch.export`` and AOTInductor still find the operators. With a bundle and without the DSL, the import loads every
module that a call needs, so that the first call waits only for its kernels.
"""

import sys
import time
from importlib import import_module
from typing import Any

if sys.platform != "linux":
    raise ImportError(f"cute_attn runs on Linux, as its compiler does; this system is {sys.platform}")
from cute_attn import _without_dsl
from cute_attn.host.imports import after_import

__version__ = "0.1.0"
_imported_at = time.time()  # sources that changed later may not be what runs

_NAMES: dict[str, tuple[str, ...]] = {
    "traits": ("Traits",),
    "compiler": ("compile", "prebuild", "CompiledKernel", "Resources", "SpillWarning"),
    "compiler.registry": ("Unsupported", "defaults", "lookup", "register"),
    "epilogues.base": ("Epilogue",),
    "epilogues.names": ("register_epilogue",),
    "epilogues.functions.registered": ("mask_mod", "score_mod"),
    "reference.check_epilogue": ("check_epilogue",),
    "api.attention": (
        *("attention", "attention_backward", "attention_varlen", "attention_varlen_backward"),
        "draw_rng_state",
    ),
    "api.kvcache": ("attention_with_kvcache",),
    "api.append": ("append_kv",),
    "api.merge": ("merge_attention",),
    "api.sums": ("attention_sums",),
    "api.block_mask": ("block_mask",),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
_OPERATORS = ("api.attention", "api.kvcache", "api.append", "api.merge")
"""Modules that register operators with torch."""
_CALLS = (*_OPERATORS, "compiler.registry")
"""Modules that calls on a GPU import."""
_MODULES = ("flash_attn", "flex", "lab", "sdpa", "transformers")
# Spelled out, which type checkers and linters need.
__all__ = [
    "CompiledKernel", "Epilogue", "Resources", "SpillWarning", "Traits", "Unsupported", "__version__",
    "append_kv", "attention", "attention_backward", "attention_sums", "attention_varlen",
    "attention_varlen_backward", "attention_with_kvcache", "block_mask", "check_epilogue", "compile", "defaults",
    "draw_rng_state", "lookup", "mask_mod", "merge_attention", "prebuild", "register", "register_epilogue", "score_mod",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        # With both, Python suggests a similar name.
        raise AttributeError(
            f"module 'cute_attn' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


def _do_without_dsl() -> None:
    """Install placeholders for the DSL; if a bundle is usable, import the modules that calls need."""
    _without_dsl.install()
    from cute_attn.compiler import registry, why_no_kernels  # only where there is no DSL

    if why_no_kernels() is None:
        _import(_CALLS)
        registry.KERNELS  # noqa: B018  (which imports them)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        import_module(f".{name}", __name__)


if not _without_dsl.is_installed():
    _do_without_dsl()
# Through these, torch.export.load and aoti_load_package find the operators of a program.
after_import("torch.export.pt2_archive._package", lambda: _import(_OPERATORS))
