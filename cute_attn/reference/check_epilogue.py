"""A user's epilogue against its own reference, on the CPU: its scores, and its derivative against autograd's.

print(check_epilogue("relative_position", table))
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.base import Epilogue, example_args, user_epilogue
from cute_attn.reference.tilings import SMALL, TILINGS, TINY, Scores, Tiling

FORWARD = (SMALL, "wgmma1-64x80")
BACKWARD = ("warps2x1-32x32", "wgmma1-32x64-transposed")
"""Tilings of both generations, in a backward also a transposed one."""
_ROUNDING = 1e-4
"""Of the largest value: far above float32's rounding, far below the error of a wrong formula."""


@dataclass(frozen=True)
class Checked:
    """What an epilogue's device code computed beside its reference.

    Attributes:
        what: "forward" or "backward", and the tiling.
        error: the largest absolute difference; infinite where one side masks a score that the other does not.
        allowed: the largest one that rounding explains.
    """

    what: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


@dataclass(frozen=True)
class EpilogueCheck:
    """What :func:`check_epilogue` found.

    Attributes:
        name: the epilogue's.
        comparisons: of its scores, and of its derivative where it has one.
        differentiable: whether it has one.
    """

    name: str
    comparisons: tuple[Checked, ...]
    differentiable: bool

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.comparisons)

    def __str__(self) -> str:
        lines = [
            f"{one.what:40} largest difference {one.error:.1e}, allowed {one.allowed:.1e}  "
            + ("ok" if one.passed else "wrong")
            for one in self.comparisons
        ]
        if not self.differentiable:
            lines.append("no backward: forward kernels alone can use it")
        return "\n".join([f"epilogue {self.name!r} against its reference", *(f"  {line}" for line in lines)])


def check_epilogue(
    epilogue: type[Epilogue] | str,
    *args: Any,
    batch: int = 2,
    nheads: int = 3,
    seqlen_q: int = 70,
    seqlen_k: int = 100,
) -> EpilogueCheck:
    """Run a registered epilogue's device code on the CPU, for every thread, and compare it with its ``reference``.

    Scores, and with a ``backward`` their gradients, on tilings of Ampere and of Hopper. Needs no GPU; takes seconds.

    Args:
        epilogue: the class, or the name that it is registered under.
        args: its arguments as ``attention(..., epilogues={name: args})`` takes them, on the CPU and for the sizes
            below; without any, those of its ``example_args``.
        batch, nheads, seqlen_q, seqlen_k: sizes of the scores, which are random.

    Raises:
        ValueError: nothing is registered under the name, or it takes arguments and there are none.
    """
    name = epilogue if isinstance(epilogue, str) else epilogue.name
    cls = user_epilogue(name)
    sizes = (batch, nheads, seqlen_q, seqlen_k)
    problem = Scores.random(*sizes, extra={name: args or example_args(name, *sizes)})
    found = [_forward(problem, TILINGS[tiling].of(name), tiling) for tiling in FORWARD]
    if cls.differentiable():
        found += [_backward(problem, TINY[tiling].of(name, op="backward"), tiling) for tiling in BACKWARD]
    return EpilogueCheck(name, tuple(found), cls.differentiable())


def _forward(problem: Scores, tiling: Tiling, name: str) -> Checked:
    assert tiling.traits is not None
    got, expected = problem.emulate(tiling).scores, problem.expected_scores(tiling.traits)
    return _compared(f"forward, {name}", got, expected, 1.0)


def _backward(problem: Scores, tiling: Tiling, name: str) -> Checked:
    assert tiling.traits is not None
    grad_out = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1))
    expected = problem.expected_gradients(tiling.traits, grad_out)
    got = problem.differentiate(tiling, grad_out, expected.lse, -expected.dpsum)
    # A gradient is a difference of two numbers as large as those of dO V^T.
    largest = float(torch.einsum("bqhd,bkhd->bhqk", grad_out, problem.v).abs().max())
    return _compared(f"backward, {name}", got.scores, expected.scores.float(), largest)


def _compared(what: str, got: Tensor, expected: Tensor, least: float) -> Checked:
    finite = expected.isfinite()
    values = expected[finite].abs()
    allowed = _ROUNDING * max(least, float(values.max()) if values.numel() else 0.0)
    if not torch.equal(got.isneginf(), expected.isneginf()):
        return Checked(what, float("inf"), allowed)
    return Checked(what, float((got - expected)[finite].abs().max()) if values.numel() else 0.0, allowed)
