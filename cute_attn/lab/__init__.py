"""The laboratory: what a tile costs, whether it is faster, which one is best.

    cute_attn.lab.verdict.verdict("forward-sm90-bf16-d128", "tile_n=160")

Its modules are imported on first use. Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with
``static_only``. With one: ``race.ab`` and ``tune``. ``report`` writes one page of verdicts or of a study.
"""

import pkgutil
import sys
from importlib import import_module
from typing import Any

from layouts.modules import Package

_MODULES = tuple(module.name for module in pkgutil.iter_modules(__path__))
_PLACES = {
    "ab": "race.ab",
    "diff": "compare.compare",
    "estimate": "rank.estimate",
    "show": "pictures.pictures",
    "shown": "verdict.shown",
    "verdict_at": "revision.verdict_at",
}
"""Name that this package lacks -> where to find it, for the error message."""


sys.modules[__name__].__class__ = Package


def __getattr__(name: str) -> Any:
    if name == "best":
        return import_module(".findings", __name__).best
    if name not in _MODULES:
        raise sys.modules[__name__].missing(name, _PLACES.get(name))
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted(("best", *_MODULES))
