"""What all calls of a process share: how many there were, and who watches them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

served: Counter[tuple[str, str]] = Counter()
"""Calls of PyTorch's operators while active, by (operator, "" or the reason why PyTorch's kernel ran)."""

observer: Callable[..., Any] | None = None
"""Of :mod:`cute_attn.sdpa.observe`, while it watches."""
