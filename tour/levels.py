"""All levels, registered: ``cute-attn --load tour.levels list`` has them."""

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
"""One or two words for each level of the forward, for a picture."""
MODULES = (level1, level2, level3, level4, level5, level6, level7, level8, level9, level10)


@dataclass(frozen=True)
class Entry:
    """A level: its number and its file."""

    number: int
    module: ModuleType

    @property
    def kernel(self) -> Any:
        return KERNELS[self.op, self.arch, self.variant]

    @property
    def op(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "forward" if self.number <= len(SHORT) else "backward"

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
    def text(self) -> str:
        """Its docstring without the first line."""
        return (self.module.__doc__ or "").partition("\n")[2].strip()

    @property
    def plain_text(self) -> str:
        """Its text as Markdown: without the marks of roles."""
        return self.text.replace("``", "`").replace(":meth:", "")

    def traits(self, head_dim: int = 128, causal: bool = False) -> Traits:
        mask = "causal" if causal else ""
        return Traits(self.op, self.arch, "bf16", head_dim, mask=mask, variant=self.variant)


LEVELS = {number: Entry(number, module) for number, module in enumerate(MODULES, 1)}
FORWARD_LEVELS = {number: entry for number, entry in LEVELS.items() if entry.op == "forward"}
"""The levels that are timed together."""
