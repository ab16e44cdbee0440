"""Compares the calls that reach the host from a door, without computing them.

    flash_attn_func(q, k, v, causal=True, window_size=(2, 3)) == attention(q, k, v, causal=True, window=(2, 0))

is a row of a table: both sides reach the host with an equal :class:`~cute_attn.host.call.Call`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_attn.api import attention, kvcache, operators
from cute_attn.host import checks

OURS = vars(attention) | {"attention_with_kvcache": kvcache.attention_with_kvcache, "torch": torch, "np": np}
"""Names for expressions in a row, in addition to the test's names."""


class _Reached(Exception):
    """Carries the arguments that reached the host up to the test, as an exception."""


def reached(function: Callable[[], Any]) -> tuple[Any, ...]:
    """The host's function that ``function`` calls, by name, and its arguments; the first argument is the Call."""

    def stop(name: str) -> Callable[..., Any]:
        def reach(*arguments: Any, **named: Any) -> Any:
            raise _Reached(name, *arguments, *named.values())

        return reach

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (operators, "forward"),
            (operators, "forward_into"),
            (operators, "backward"),
            (checks, "check_attention"),
        ):
            patch.setattr(module, name, stop(name))
        with pytest.raises(_Reached) as found:
            function()
    return found.value.args


def differences(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Paths at which two values differ; of tensors, dtypes, shapes and elements are compared."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        same = theirs.dtype == ours.dtype and torch.equal(theirs, ours)
        return [] if same else [f"{where}: {theirs!r} and {ours!r}"]
    if isinstance(theirs, Sequence) and isinstance(ours, Sequence) and not isinstance(theirs, str):
        names = getattr(theirs, "_fields", None) or range(max(len(theirs), len(ours)))
        pairs = zip(names, theirs, ours, strict=False)
        lengths = [] if len(theirs) == len(ours) else [f"{where}: {len(theirs)} and {len(ours)} values"]
        return sum((differences(a, b, f"{where}.{name}") for name, a, b in pairs), lengths)
    return [] if type(theirs) is type(ours) and theirs == ours else [f"{where}: {theirs!r} and {ours!r}"]


def each(text: str) -> pytest.MarkDecorator:
    """A test with parameters ``theirs`` and ``ours``, for each row of the text."""
    rows = re.sub(r"\n\s*==", " ==", text).strip().splitlines()
    return pytest.mark.parametrize(("theirs", "ours"), [row.split(" == ") for row in rows])


def check(theirs: str, ours: str, names: dict[str, Any]) -> None:
    """Assert that both expressions, over ``names``, reach the same function of the host with equal arguments."""
    found = [reached(lambda source=source: eval(source, OURS | names)) for source in (theirs, ours)]
    assert not differences(*found)
