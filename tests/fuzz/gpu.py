"""The same cases on a GPU: few functions and many calls, so that kernels are built before, in parallel, without one.

python -m tests.fuzz --gpu --compile 0/16 &  ...  python -m tests.fuzz --gpu --compile 15/16 &  wait
python -m tests.fuzz --gpu
"""

import contextlib
import random
import warnings
from dataclasses import replace
from typing import Any

from cute_attn import compiler
from tests import machine
from tests.fuzz.case import Case, Functions, Inputs, draw_case
from tests.fuzz.doors import DOORS
from tests.fuzz.grammar import Choices
from tests.fuzz.judge import _gradients

FUNCTIONS, CALLS = 60, 50
ROOM = (4, 12, 300)
"""How many cases are drawn, and how often each is called with other lengths, heads, layouts and values."""


def cases(functions: int = FUNCTIONS, calls: int = CALLS, seed: int = 0) -> list[list[Case]]:
    """The calls of each drawn case; they differ only in lengths, so they launch the same kernels."""
    found = []
    for number in range(functions):
        choices = Choices(random.Random(seed * 1_000_003 + number).randbytes(1200))
        case = draw_case(choices, DOORS)
        cached = "kvcache" in case.door  # its kernels read rows that start anywhere
        size = choices.of((64, 128, 59, 100, 34, 250) if cached else (64, 128, 64, 128, 40, 256))
        wide = choices.of((64, 123) if cached else (64, 128)) if case.head_dim_v != case.head_dim else size
        grads = tuple(x for x in case.grads if x != "alibi")
        dtype = choices.of(("bf16", "fp16", "bf16", "fp32")) if case.dtype == "fp64" else case.dtype
        sizes = {"head_dim": size, "head_dim_v": wide, "room": ROOM}
        case = replace(case, dtype=dtype, grads=grads, scale=abs(case.scale or 0.125), **sizes)
        found.append([_another(case, random.Random(number * calls + i)) for i in range(calls)])
    return found


def _another(case: Case, draw: random.Random) -> Case:
    """The case with other sizes and values."""
    batch, heads = draw.choice((1, 2, 2, 3, 0)), draw.choice((1, 2, 4))
    group = case.nheads // case.nheads_kv
    own: dict[str, Any] = {"batch": batch, "nheads": heads * group, "nheads_kv": heads}
    own["seed"] = draw.randrange(1000)
    lengths = (1, 17, 64, 129, 200, 300, 0)
    own |= {"seqlen_q": draw.choice(lengths), "seqlen_k": draw.choice(lengths), "extra": draw.randrange(64)}
    if case.lengths:
        own["lengths"] = tuple((draw.choice(lengths), draw.choice(lengths)) for _ in range(1 + batch))
    if case.used:
        counts = own.get("lengths") or ((own["seqlen_q"], own["seqlen_k"]),) * batch
        own["used"] = tuple(draw.randint(0, n) for _, n in counts)
    if case.scale != 0.125:
        own["scale"] = draw.choice((0.1, 0.25, 0.5))
    return replace(case, **own)


def build(part: int, parts: int, functions: int = FUNCTIONS, calls: int = CALLS) -> int:
    """Build one range of the cases' kernels into the cache on disk, and return how many. Needs no GPU."""
    with machine.launches() as (_, wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in (one for calls_of_one in cases(functions, calls)[part::parts] for one in calls_of_one):
            inputs, made = Inputs.of(case), Functions.of(case)
            with contextlib.suppress(Exception), DOORS[case.door].around():  # the run finds and judges it
                found = DOORS[case.door].call(case, inputs, made)
                _gradients(case, found, inputs.leaves(case, made))
    for name, (kernel, target) in wanted.items():
        try:
            compiler.build(kernel, target)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return len(wanted)
