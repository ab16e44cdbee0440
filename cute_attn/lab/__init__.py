"""The laboratory: what a tile costs, whether it is faster, which one is best.

    cute_attn.lab.verdict.verdict("forward-sm90-bf16-d128", "tile_n=160")

Its modules are imported on first use. Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with
``static_only``. With one: ``race.ab`` and ``tune``. ``report`` writes one page of verdicts or of a study.
"""

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_MODULES = tuple(module.name for module in pkgutil.iter_modules(__path__))
_PLACES = {
    "ab": "race.ab",
    "diff": "compare.compare",
    "estimate": "rank.estimate",
    "show": "pictures.pictures",
    "shown": "verdict.shown",
    "verdict_at": "revision.verdict_at",
}
"""What is looked for here -> where it is."""


class _Module(ModuleType):
    """A module that says where its function is when it is called itself."""

    def __call__(self, *args: Any, **options: Any) -> None:
        own = self.__name__.rpartition(".")[2]
        place = f"; its function is {self.__name__}.{own}" if hasattr(self, own) else ""
        raise TypeError(f"{self.__name__} is a module{place}")


class _Laboratory(_Module):
    def __setattr__(self, name: str, value: Any) -> None:  # Python's import sets a module here
        if type(value) is ModuleType:
            value.__class__ = _Module
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Laboratory


def __getattr__(name: str) -> Any:
    if name == "best":
        return import_module(".findings", __name__).best
    if name not in _MODULES:
        place = f"; it is {__name__}.{_PLACES[name]}" if name in _PLACES else ""
        # With both, Python suggests a similar name.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{place}", name=name, obj=sys.modules[__name__]
        )
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted(("best", *_MODULES))
