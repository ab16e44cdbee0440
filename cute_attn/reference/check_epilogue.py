"""Compares a user's epilogue with its reference on the CPU: scores, and the derivative with autograd's.

print(check_epilogue("relative_position", table))
print(check_epilogue(score_mod))  # against torch's evaluation of the function
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.device.math import LARGEST
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.functions.definition import AS_TORCH, Precision
from cute_attn.epilogues.functions.epilogue import FunctionEpilogue
from cute_attn.epilogues.functions.gradients import one_copy
from cute_attn.epilogues.functions.graph import FLOAT, ordered
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.functions.trace import kind_of
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import example_args, user_epilogue
from cute_attn.reference.tilings import SMALL, TILINGS, TINY, Gradients, Scores, Tiling
from cute_attn.traits import Traits
from layouts import html

FORWARD = {SMALL: TILINGS[SMALL], "wgmma1-64x16": TINY["wgmma1-64x16"]}
BACKWARD = ("warps2x1-32x16", "wgmma1-16x64-transposed")
"""Tilings of both generations, one of them transposed, for a backward."""
_ROUNDING = 1e-4
"""Allowed error relative to the largest value: far above float32's rounding, far below a wrong formula's error."""


@dataclass(frozen=True)
class Checked:
    """A comparison of an epilogue's device code with its reference.

    Attributes:
        what: "forward", "backward" or "gradient of" a captured tensor, and the tiling.
        error: the largest absolute difference; infinite if one side masks a score that the other does not.
        allowed: the largest difference that rounding explains.
        precision: a property of kernel arithmetic that explains a larger difference, such as no rounding to 16 bits.
    """

    what: str
    error: float
    allowed: float
    precision: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed or bool(self.precision)  # False for NaN

    @property
    def verdict(self) -> str:
        if self.error <= self.allowed:
            return "ok"
        return f"differs in precision: {self.precision}" if self.precision else "wrong"


@dataclass(frozen=True)
class EpilogueCheck:
    """The result of :func:`check_epilogue`.

    Attributes:
        name: the name of the epilogue, or of the function.
        comparisons: comparisons of scores and, if the epilogue is differentiable, of gradients; () for a function that
            returns its score.
        differentiable: True if the epilogue has a derivative.
    """

    name: str
    comparisons: tuple[Checked, ...]
    differentiable: bool

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.comparisons)

    def _repr_html_(self) -> str:
        heads = ("largest difference", "allowed", "")
        rows = [(one.what, f"{one.error:.1e}", f"{one.allowed:.1e}", one.verdict) for one in self.comparisons]
        columns = [{row[0]: row[i] for row in rows} for i in (1, 2, 3)]
        return html.table(f"epilogue {self.name!r} against its reference", heads, columns)

    def __str__(self) -> str:
        width = max((len(one.what) for one in self.comparisons), default=0)
        lines = [
            f"{one.what:{width}}  largest difference {one.error:.1e}, allowed {one.allowed:.1e}  {one.verdict}"
            for one in self.comparisons
        ]
        if not self.comparisons:
            lines.append("nothing to compare: it changes no score")
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

    For a score_mod or a mask_mod the reference itself is also compared: with torch's result of calling the function by
    vmap, and with autograd's derivative of that result. Kernels compute a function's floats in fp32, without rounding
    to 16 bits; a difference that this explains is reported as a difference of precision, not as an error.

    Scores are compared, and for an epilogue with a ``backward`` gradients of scores and of captured tensors, on tilings
    of Ampere and of Hopper. The check needs no GPU and takes seconds.

    Args:
        epilogue: the class, or the name under which it is registered; or a function that ``attention`` accepts as
            score_mod or mask_mod, with captured tensors on the CPU.
        args: the epilogue's arguments, as in ``attention(..., epilogues={name: args})``, on the CPU and for the sizes
            below; by default its ``example_args``.
        batch, nheads, seqlen_q, seqlen_k: sizes of the scores; their values are random.

    Raises:
        TypeError: ``epilogue`` has another type.
        ValueError: nothing is registered under the name, or the epilogue needs arguments and has none.
        IndexError: for one of the scores, a function reads an element beyond the end of its tensor.
    """
    sizes, found, title = (batch, nheads, seqlen_q, seqlen_k), [], ""
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
        kind, title = kind_of(epilogue), getattr(epilogue, "__name__", type(epilogue).__name__)
        score_mod, mask_mod = (epilogue, None) if kind == "score_mod" else (None, epilogue)
        name, args = epilogue_of(score_mod, mask_mod, dtype=torch.float64)  # the dtype of the reference below
        if not name:
            return EpilogueCheck(title, (), True)
        found = _function(epilogue, kind, Scores.random(*sizes, extra={name: args}), name)
    problem = Scores.random(*sizes, extra={name: args or example_args(name, *sizes)})
    check = _Check(problem, name)
    found += [check.forward(tiling.of(name), what) for what, tiling in FORWARD.items()]
    if check.cls.differentiable():
        for tiling in BACKWARD:
            found += check.backward(tiling)
    return EpilogueCheck(title or name, tuple(found), check.cls.differentiable())


def for_each(function: Callable, takes_score: bool = False) -> Callable[..., Tensor]:
    """A function of FlexAttention's signature, mapped over all scores (batch, nheads, seqlen_q, seqlen_k) by vmap.

    Arguments: the scores if ``takes_score``, and the indices of each dimension as a one-dimensional tensor.
    """

    def tensor_of(*args: Any) -> Tensor:
        return torch.as_tensor(function(*args))

    mapped: Callable[..., Any] = tensor_of
    for axis in (3, 2, 1, 0):
        over = tuple(0 if axis == i else None for i in range(4))
        mapped = torch.vmap(mapped, (0, *over) if takes_score else over)
    return mapped


def _function(function: Callable, kind: str, problem: Scores, name: str) -> list[Checked]:
    """Compare the reference of a traced function with torch's evaluation of the function, both in float64."""
    tiling = TILINGS[SMALL].of(name)
    coords = problem.coords(tiling.traits)
    indices = [x.flatten() for x in (coords.batch, coords.head, coords.query, coords.key)]
    scores = [(problem.products.double() * problem.scale).requires_grad_() for _ in range(2)]
    got = user_epilogue(name).reference(scores[0], coords, problem.inputs)
    if kind == "mask_mod":
        expected = scores[1].masked_fill(~for_each(function)(*indices), -torch.inf)
    else:
        expected = for_each(function, True)(scores[1], *indices).double()
    rounding = _rounding_of(name)
    checked = [_compared("forward, the trace", got.detach(), expected.detach(), 1.0, rounding)]
    if expected.requires_grad:
        seen = expected.detach().isfinite()
        for result in (got, expected):
            result.backward(torch.where(seen, 1.0, 0.0).double())
        slope, right = (torch.zeros_like(x) if x.grad is None else x.grad for x in scores)
        checked.append(_compared("backward, the trace", slope, right, 1.0, rounding))
    return checked


def _rounding_of(name: str) -> float:
    """Relative error to allow for a function's 16-bit numbers, as torch's vmap rounds at other steps; 0 without any."""
    dtypes = {x.dtype for x in ordered(user_epilogue(name).output)}
    return max(
        (4 * torch.finfo(getattr(torch, x)).eps for x in dtypes & {"float16", "bfloat16"}), default=0.0
    )


_STEP = 4e-6
"""Relative error of a float after a few fp32 operations: a step function's threshold may move by this much."""


def _precisions(cls: Any) -> dict[str, list[Precision]]:
    """Text that explains a difference -> the precisions in which a traced function's kernels may compute."""
    if not isinstance(cls, FunctionEpilogue):
        return {}
    dtypes = {x.dtype for x in ordered(cls.output)}
    as_kernels = "kernels compute floats in fp32"
    if dtypes & {"float16", "bfloat16"}:
        as_kernels = "kernels do not round to 16 bits"
    elif "float64" in dtypes:
        as_kernels = "kernels round float64 to fp32"
    steps = [Precision(dtype, sign * _STEP) for dtype in (None, torch.float32) for sign in (1, -1)]
    return {
        as_kernels: [Precision(torch.float32), Precision(torch.float64)],
        "a step where fp32 rounds": steps,
        "kernels have 32-bit integers here": [Precision(wraps=True)],
    }


class _Check:
    """Compares an epilogue's device code with its reference, and explains differences of precision."""

    def __init__(self, problem: Scores, name: str) -> None:
        self.problem, self.name = problem, name
        self.cls = user_epilogue(name)
        self.precisions = _precisions(self.cls)
        self.computed: Tensor | None = None  # scores of kernels, where they differ from the reference's

    def _features(
        self, traits: Traits, precision: Precision, args: Sequence[Any] | None = None
    ) -> reference.Features:
        args = self.problem.inputs.extra[self.name] if args is None else args

        def evaluated(scores: Tensor, coords: reference.ScoreCoords, inputs: ScoreInputs) -> Tensor:
            return self.cls.evaluated(scores, coords, args, precision)

        return reference.Features(traits.mask, traits.dropout, (evaluated,))

    def _explained(
        self,
        found: Checked,
        got: Tensor,
        expected: Tensor,
        of: Callable[[Precision], Tensor],
        rounding: Callable[[], Tensor] | None = None,
    ) -> Checked:
        """``found``, with reasons of precision added if these explain all elements that differ.

        of: computes the reference in a precision. rounding: each element's error from fp32 rounding of large numbers.
        """
        if found.passed or not self.precisions:
            return found
        differ, reasons = ~_equal(got, expected, found.allowed), []
        for reason, precisions in self.precisions.items():
            for precision in precisions:
                explained = differ & _equal(got, of(precision), found.allowed)
                differ = differ & ~explained
                if explained.any() and reason not in reasons:
                    reasons.append(reason)
        infinite = differ & got.isinf() & (expected.abs() > LARGEST * self.problem.scale)
        differ = differ & ~infinite
        reasons += ["scores over the scale leave fp32's range"] * bool(infinite.any())
        if rounding is not None and differ.any():
            explained = differ & ((got - expected).abs() <= rounding())
            differ = differ & ~explained
            reasons += ["fp32 rounds large numbers, which cancel"] * bool(explained.any())
        return found if differ.any() else replace(found, precision="; ".join(reasons))

    def _rounding(self, coords: reference.ScoreCoords) -> Tensor:
        """For each score, the error of a few fp32 operations on the largest number that the function computes."""
        raw, args = self.problem.products.double() * self.problem.scale, self.problem.inputs.extra[self.name]
        largest = torch.zeros_like(raw)
        for node in ordered(self.cls.output):
            if node.kind == FLOAT:
                value = self.cls.evaluated(raw, coords, args, output=node)
                largest = torch.maximum(largest, torch.where(value.isfinite(), value.abs(), 0.0))
        return largest * 2.0**-20

    def forward(self, tiling: Tiling, what: str) -> Checked:
        traits, problem = tiling.traits, self.problem
        got, expected = problem.emulate(tiling).scores, problem.expected_scores(traits)
        coords = problem.coords(traits)

        def of(precision: Precision) -> Tensor:
            features, raw = self._features(traits, precision), problem.products.double() * problem.scale
            return reference.modify_scores(raw, coords, features, problem.inputs).float()

        found = _compared(f"forward, {what}", got, expected, 1.0)
        found = self._explained(found, got, expected, of, lambda: self._rounding(coords))
        if found.precision:
            self.computed = got
        return found

    def backward(self, what: str) -> list[Checked]:
        """Compare the gradients of scores and of captured tensors."""
        problem, tiling = self.problem, TINY[what].of(self.name, op="backward")
        traits = tiling.traits
        grad_out = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1))
        # A gradient is a difference of two numbers as large as the elements of dO V^T.
        largest = float(torch.einsum("bqhd,bkhd->bhqk", grad_out, problem.v).abs().max())
        expected = self._gradients(traits, grad_out, AS_TORCH)
        seen = torch.ones_like(expected.scores, dtype=torch.bool)
        if self.computed is not None:  # a row with an infinite score has no gradient
            seen = (self.computed.isfinite() | self.computed.isneginf()).all(-1, keepdim=True).expand_as(seen)

        def of(precision: Precision) -> Tensor:
            return self._gradients(traits, grad_out, precision).scores[seen].float()

        scores = problem.differentiate(tiling, grad_out, expected.lse, -expected.dpsum).scores
        if not seen.all():  # slopes may overflow near scores that do
            seen = seen & scores.isfinite()
        got, right = scores[seen], expected.scores[seen].float()
        found = self._explained(_compared(f"backward, {what}", got, right, largest), got, right, of)
        return [found, *self._captured(what, grad_out, largest)]

    def _gradients(
        self, traits: Traits, grad_out: Tensor, precision: Precision, args: Sequence[Any] | None = None
    ) -> Gradients:
        features = self._features(traits, precision, args) if self.precisions else None
        return self.problem.expected_gradients(traits, grad_out, features, self.computed)

    def _captured(self, what: str, grad_out: Tensor, largest: float) -> list[Checked]:
        """Compare the gradients of captured tensors."""
        args = self.problem.inputs.extra[self.name]
        floats = tuple(i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point())
        own, numbers = (self.precisions and self.cls.with_gradients(floats)) or ("", ())
        overflows = self.computed is not None and not (self.computed < torch.inf).all()
        if not numbers or overflows:
            return []
        leaves = [
            x.detach().clone().double().requires_grad_() if i in numbers else x for i, x in enumerate(args)
        ]
        tiling = TINY[what].of(self.name, op="backward")
        expected = self._gradients(tiling.traits, grad_out, AS_TORCH, leaves)
        targets = [one_copy(leaves[i]) for i in numbers]
        inputs = replace(self.problem.inputs, extra={own: (*args, *targets)})
        given = replace(self.problem, inputs=inputs)
        given.differentiate(TINY[what].of(own, op="backward"), grad_out, expected.lse, -expected.dpsum)
        return [
            _compared(
                f"gradient of tensor {i}, {what}",
                found.view(leaves[i].shape),
                leaves[i].grad.float(),
                largest,
            )
            for i, found in zip(numbers, targets, strict=True)
        ]


def _equal(got: Tensor, expected: Tensor, allowed: float) -> Tensor:
    """Elements that are equal except for rounding; NaN and infinities are equal to themselves."""
    return ((got - expected).abs() <= allowed) | (got == expected) | (got.isnan() & expected.isnan())


def _compared(what: str, got: Tensor, expected: Tensor, least: float, rounding: float = 0.0) -> Checked:
    """Compare two tensors. rounding: relative error of 16-bit numbers, counted as a difference of precision."""
    finite = expected.isfinite()
    largest = max(least, float(expected[finite].abs().max()) if finite.any() else 0.0)
    allowed = _ROUNDING * largest
    error = float("inf")
    if torch.equal(got.isneginf(), expected.isneginf()):
        error = float((got - expected)[finite].abs().max()) if finite.any() else 0.0
    rounds = allowed < error <= rounding * largest
    return Checked(what, error, allowed, "torch rounds 16-bit numbers in other places" if rounds else "")
