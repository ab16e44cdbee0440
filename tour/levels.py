"""All levels, registered: ``cute-attn --load tour.levels list`` has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cute_attn.compiler.registry import KERNELS
from cute_attn.traits import Traits
from tour import (
    level1,
    level2,
    level3,
    level4,
    level5,
    level6,
    level7,
    level8,
    level9,
    level10,
    name_of,
)

SHORT = (
    *("scalar", "mma.sync", "shared memory", "cp.async", "TMA, wgmma", "specialised", "ping-pong"),
    "speculation",
)
MODULES = (level1, level2, level3, level4, level5, level6, level7, level8)
BACKWARD_MODULES = (level9, level10)


@dataclass(frozen=True)
class Entry:
    """A level: its number, its file and its kernel's class."""

    number: int
    module: ModuleType
    kernel: Any

    @property
    def op(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "forward" if self.number <= len(MODULES) else "backward"

    @property
    def arch(self) -> str:
        """The generation it is written for, ``"sm80"`` or ``"sm90"``."""
        return self.name.partition(":")[0]

    @property
    def variant(self) -> str:
        """The name under which it is registered; of the shipped kernel none."""
        return self.name.partition(":")[2]

    @property
    def name(self) -> str:
        """What ``attention``, or ``attention_backward``, takes as ``kernel``."""
        return name_of(self.number)

    @property
    def title(self) -> str:
        """The first line of its docstring, without the level's number."""
        return (self.module.__doc__ or "").splitlines()[0].partition(": ")[2].rstrip(".")

    @property
    def short(self) -> str:
        """One or two words, for a picture."""
        return SHORT[self.number - 1]

    @property
    def text(self) -> str:
        """Its docstring without the first line."""
        return (self.module.__doc__ or "").partition("\n")[2].strip()

    @property
    def plain_text(self) -> str:
        """Its text as Markdown: without the marks of roles."""
        return self.text.replace("``", "`").replace(":meth:", "")

    def traits(self, head_dim: int = 128, causal: bool = False) -> Traits:
        """Its kernel's traits."""
        mask = "causal" if causal else ""
        return Traits(self.op, self.arch, "bf16", head_dim, mask=mask, variant=self.variant)


def _entries(op: str, modules: Sequence[ModuleType], first: int) -> dict[int, Entry]:
    names = [name_of(first + i).partition(":") for i in range(len(modules))]
    return {
        first + i: Entry(first + i, module, KERNELS[op, arch, variant])
        for i, (module, (arch, _, variant)) in enumerate(zip(modules, names, strict=True))
    }


LEVELS = _entries("forward", MODULES, 1)
"""Levels of the forward."""
BACKWARD_LEVELS = _entries("backward", BACKWARD_MODULES, 1 + len(MODULES))
"""Levels of the backward; they are not timed with the others."""
