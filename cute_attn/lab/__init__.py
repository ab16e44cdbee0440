"""The laboratory: what a tile costs, whether it is faster, which one is best.

    cute_attn.lab.verdict.verdict("forward-sm90-bf16-d128", "tile_n=160")

Its modules are imported on first use. Without a GPU: ``verdict``, ``compare``, ``space``, ``tune`` with
``static_only``. With one: ``race.ab`` and ``tune``. ``report`` writes one page of verdicts or of a study.
"""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

missing = [name for name in ("matplotlib", "networkx", "rich", "typer") if find_spec(name) is None]
if missing:
    raise ImportError(
        f"the laboratory and the commands need {', '.join(missing)}; pip install 'cute-attn[lab]' brings them"
    )

_MODULES = tuple(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name == "best":
        return import_module(".findings", __name__).best
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted(("best", *_MODULES))
