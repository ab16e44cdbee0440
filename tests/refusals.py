"""Wrong calls as text, one a row: a call, an arrow, and the error with the one sentence that refuses it.

    attention(q, k, [1.0]) -> TypeError: v is a list; accepted: a torch.Tensor

A row that is too long goes on in the next line, which begins with the arrow. Three dots in a sentence stand for
anything, and so do its ends.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

NAMES = {"math": math, "np": np, "torch": torch}
"""Names for expressions in a row, in addition to the test's names."""


def each(text: str) -> pytest.MarkDecorator:
    """A test with parameters ``call`` and ``sentence``, for each row of the text."""
    rows = re.sub(r"\n\s*->", " ->", text).strip().splitlines()
    return pytest.mark.parametrize(("call", "sentence"), [row.split(" -> ") for row in rows])


def check(call: str, sentence: str, names: dict[str, Any]) -> str:
    """The call, an expression of ``names``, raises this error, on a single line that contains this sentence.

    Returns the line.
    """
    error, _, wanted = sentence.partition(": ")
    with pytest.raises(Exception) as raised:
        eval(call, NAMES | names)
    assert type(raised.value).__name__ == error, raised.value
    check_sentence(str(raised.value), wanted)
    return str(raised.value)


def check_sentence(said: str | None, wanted: str) -> None:
    """A line that contains it."""
    assert said and "\n" not in said, said
    assert re.search(".*".join(map(re.escape, wanted.split("..."))), said), said
