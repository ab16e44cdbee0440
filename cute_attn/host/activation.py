"""Arguments of :func:`cute_attn.sdpa.activate`, and ``with`` blocks of activations.

Commands check arguments before anything loads torch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BACKENDS = ("flash", "efficient", "cudnn")


@dataclass(frozen=True)
class Options:
    """Arguments of :func:`cute_attn.sdpa.activate`."""

    backends: Sequence[str] = BACKENDS
    unsupported: str = "fall_back"
    rng: str = "ours"

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not accepted."""
        named = isinstance(self.backends, tuple | list) and all(isinstance(x, str) for x in self.backends)
        if not named or not set(self.backends) <= set(BACKENDS):
            raise ValueError(
                f"backends is {self.backends!r}; accepted: a tuple of {', '.join(map(repr, BACKENDS))}"
            )
        object.__setattr__(self, "backends", tuple(self.backends))
        choices = {"unsupported": ("fall_back", "error"), "rng": ("ours", "torch")}
        for name, accepted in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in accepted:
                raise ValueError(f"{name} is {value!r}; accepted: {', '.join(map(repr, accepted))}")


Switch = Callable[[], Any]


@contextlib.contextmanager
def for_a_block(
    start: Switch, restore: Switch, serving: Switch, resume: Callable[..., Any]
) -> Iterator[None]:
    """Serve calls for a ``with`` block, then as before it: by the activation that ``serving`` returned, if any."""
    before = serving()
    start()
    try:
        yield
    finally:
        restore()
        if before is not None:
            resume(before)
