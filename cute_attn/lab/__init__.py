"""The laboratory: what a tile costs, whether it is faster, which one is best.

    cute_attn.lab.verdict.verdict("forward-sm90-bf16-d128", "tile_n=160")

Its modules are imported on first use. Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with
``static_only``. With one: ``race.ab`` and ``tune``. ``report`` writes one page of verdicts or of a study.
"""

import pkgutil
from importlib import import_module
from typing import Any

_MODULES = tuple(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name == "best":
        return import_module(".findings", __name__).best
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted(("best", *_MODULES))
