"""A user's epilogue against its own reference, on the CPU: its scores, and its derivative against autograd's.

print(check_epilogue("relative_position", table))
print(check_epilogue(score_mod))  # against torch's evaluation of the function
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_attn.epilogues.base import Epilogue, example_args, user_epilogue
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.functions.trace import kind_of
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
    epilogue: type[Epilogue] | str | Callable,
    *args: Any,
    batch: int = 2,
    nheads: int = 3,
    seqlen_q: int = 70,
    seqlen_k: int = 100,
) -> EpilogueCheck:
    """Run a registered epilogue's device code on the CPU, for every thread, and compare it with its ``reference``.

    Of a score_mod or a mask_mod that reference is compared, too: with what torch computes where it calls the function
    by vmap, its lookups clamped, and with autograd's derivative of that.

    Scores, and with a ``backward`` their gradients, on tilings of Ampere and of Hopper. Needs no GPU; takes seconds.

    Args:
        epilogue: the class, or the name that it is registered under; or a function as ``attention`` takes it for
            score_mod or mask_mod, its captured tensors on the CPU.
        args: its arguments as ``attention(..., epilogues={name: args})`` takes them, on the CPU and for the sizes
            below; without any, those of its ``example_args``.
        batch, nheads, seqlen_q, seqlen_k: sizes of the scores, which are random.

    Raises:
        TypeError: it is none of these.
        ValueError: nothing is registered under the name, or it takes arguments and there are none.
    """
    sizes, found = (batch, nheads, seqlen_q, seqlen_k), []
    if isinstance(epilogue, str):
        name = epilogue
    elif isinstance(epilogue, type) and issubclass(epilogue, Epilogue) and hasattr(epilogue, "name"):
        name = epilogue.name
    elif isinstance(epilogue, type) or not callable(epilogue):
        raise TypeError(
            f"epilogue is {epilogue!r}; accepted: a registered Epilogue or its name, or a function as attention takes "
            "it for score_mod or mask_mod"
        )
    else:
        kind = kind_of(epilogue)
        name, args = epilogue_of(*((epilogue, None) if kind == "score_mod" else (None, epilogue)))
        if not name:
            return EpilogueCheck("", (), True)
        found = _function(epilogue, kind, Scores.random(*sizes, extra={name: args}), name)
    cls = user_epilogue(name)
    problem = Scores.random(*sizes, extra={name: args or example_args(name, *sizes)})
    found += [_forward(problem, TILINGS[tiling].of(name), tiling) for tiling in FORWARD]
    if cls.differentiable():
        found += [_backward(problem, TINY[tiling].of(name, op="backward"), tiling) for tiling in BACKWARD]
    return EpilogueCheck(name, tuple(found), cls.differentiable())


class _ClampedLookups(TorchFunctionMode):
    """``tensor[indices]`` with indices clamped to the tensor's bounds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(x, Tensor) and not x.is_floating_point() for x in index):
                clamped = [x.clamp(0, n - 1) for x, n in zip(index, table.shape, strict=False)]
                return table[tuple(clamped)]
        return func(*args, **(kwargs or {}))


def for_each(function: Callable, takes_score: bool = False) -> Callable[..., Tensor]:
    """A function of FlexAttention's signature for all scores (batch, nheads, seqlen_q, seqlen_k) and indices, by vmap.

    It takes scores, where the function takes one, and one dimension of each index.
    """

    def tensor_of(*args: Any) -> Tensor:
        return torch.as_tensor(function(*args))

    mapped: Callable[..., Any] = tensor_of
    for axis in (3, 2, 1, 0):
        over = tuple(0 if axis == i else None for i in range(4))
        mapped = torch.vmap(mapped, (0, *over) if takes_score else over)
    return mapped


def _function(function: Callable, kind: str, problem: Scores, name: str) -> list[Checked]:
    """The reference of a traced function against torch's evaluation of the function, both in float64."""
    tiling = TILINGS[SMALL].of(name)
    assert tiling.traits is not None
    coords = problem.coords(tiling.traits)
    indices = [x.flatten() for x in (coords.batch, coords.head, coords.query, coords.key)]
    scores = [(problem.products.double() * problem.scale).requires_grad_() for _ in range(2)]
    got = user_epilogue(name).reference(scores[0], coords, problem.inputs)
    with _ClampedLookups():
        if kind == "mask_mod":
            expected = scores[1].masked_fill(~for_each(function)(*indices), -torch.inf)
        else:
            expected = for_each(function, True)(scores[1], *indices).double()
    checked = [_compared("forward, the trace", got.detach(), expected.detach(), 1.0)]
    if expected.requires_grad:
        seen = expected.detach().isfinite()
        for result in (got, expected):
            result.backward(torch.where(seen, 1.0, 0.0).double())
        slope, right = (torch.zeros_like(x) if x.grad is None else x.grad for x in scores)
        checked.append(_compared("backward, the trace", slope, right, 1.0))
    return checked


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
