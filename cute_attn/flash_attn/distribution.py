"""The metadata that ``importlib.metadata`` finds for flash_attn after :func:`cute_attn.flash_attn.install`.

Programs such as transformers and diffusers read this metadata before they import flash_attn. pip does not see it.
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any


class _FlashAttention(Distribution):
    """A distribution with a name, a version and top-level modules, not installed on disk: a finder of itself alone."""

    def __init__(self, name: str, version: str, modules: Iterable[str]) -> None:
        self._name = name
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: cute_attn's functions\n",
            "top_level.txt": "".join(f"{module}\n" for module in modules),
        }

    def read_text(self, filename: Any) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Return None, since this finder finds no modules."""

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterable[Distribution]:  # noqa: B008
        """Return the distribution if ``context`` asks for its name, or for all distributions."""
        asked = context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == self._name
        return [self] if asked else []


def announce(name: str, version: str, modules: Iterable[str]) -> None:
    """Let ``importlib.metadata`` find a distribution with these top-level modules; a second call has no effect.

    name: a name with hyphens, such as ``flash-attn``.
    """
    if not any(isinstance(finder, _FlashAttention) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.append(_FlashAttention(name, version, modules))
