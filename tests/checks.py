"""The one rule by which a kernel's numbers are right.

A kernel's error may be twice that of the same computation in plain torch at the kernel's own precision, plus the
rounding of the result itself (gradients: three times). Errors are taken against the definition in float64, both as the
largest and as the root mean square, so that neither one bad element nor many slightly bad ones pass. NaN never passes,
and infinities have to stand where the definition has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FORWARD, GRADIENT = 2.0, 3.0
"""How many times plain torch's error a kernel's may be."""

CANCELLATION = 1e-5
"""Rounding of dP - D in float32 if a query sees one key, so that both are equal: numbers of about 10, added up."""


@dataclass(frozen=True)
class Errors:
    """Largest and root mean square difference from the exact result, over the elements that are finite there."""

    largest: float
    rms: float

    @staticmethod
    def of(actual: Tensor, exact: Tensor) -> "Errors":
        finite = exact.isfinite()
        if not finite.any():
            return Errors(0.0, 0.0)
        difference = (actual.double() - exact)[finite].abs()
        return Errors(difference.max().item(), difference.square().mean().sqrt().item())

    def __str__(self) -> str:
        return f"{self.largest:.2e} (rms {self.rms:.2e})"


def check(
    name: str,
    actual: Tensor,
    exact: Tensor,
    plain: Tensor,
    *,
    factor: float = FORWARD,
    roundings: float = 1.0,
    floor: float = 0.0,
) -> Errors:
    """Assert that the error of ``actual`` is within the limit, and print both errors.

    Args:
        name: name of the result, for the message.
        actual: what a kernel computed.
        exact: the same in float64.
        plain: the same by plain torch at the kernel's precision.
        factor: FORWARD or GRADIENT.
        roundings: how many times ``actual``'s dtype may have rounded on top of that.
        floor: an absolute error that is always allowed, where the exact result cancels to 0.
    """
    assert actual.shape == exact.shape, f"{name} has shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    exact = exact.double()
    kernel, torch_ = Errors.of(actual, exact), Errors.of(plain, exact)
    finite = exact[exact.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    rms = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    # Rounding errs by half an epsilon at most.
    rounding = roundings * torch.finfo(actual.dtype).eps / 2
    print(f"{name}: error {kernel}, plain torch's {torch_}, largest value {largest:.2e}")
    assert not actual.isnan().any(), (
        f"{name} has {int(actual.isnan().sum())} NaN in {actual.numel()} elements"
    )
    infinite = exact.isinf()
    assert torch.equal(actual.isinf(), infinite), (
        f"{name} is infinite where it should not be, or the other way round"
    )
    assert torch.equal(actual[infinite].double(), exact[infinite]), (
        f"{name} has an infinity of the wrong sign"
    )
    for which, ours, theirs, size in (
        ("largest", kernel.largest, torch_.largest, largest),
        ("rms", kernel.rms, torch_.rms, rms),
    ):
        limit = factor * theirs + rounding * size + floor
        # Written so that a NaN limit fails as well.
        assert ours <= limit, (
            f"{name}: {which} error {ours:.3e} is above {limit:.3e}; plain torch's is {theirs:.3e}"
        )
    return kernel


def check_forward(
    actual: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    plain32: Mapping[str, Tensor],
) -> None:
    """Check out, lse and, where there is one, the softmax with its dropout signs.

    Args:
        actual: what a kernel computed, by name.
        exact: the definition in float64.
        plain: plain torch in q's dtype.
        plain32: plain torch in float32, which is the precision that kernels compute lse in.
    """
    check("out", actual["out"], exact["out"], plain["out"])
    # Approximate exp2 and log2, and the order of sums: a dozen roundings of scores and of their sum.
    check("lse", actual["lse"], exact["lse"], plain32["lse"], roundings=32)
    if "softmax" in exact:
        check("softmax", actual["softmax"].abs(), exact["softmax"].abs(), plain["softmax"].abs())
        seen = exact["softmax"].abs() > 0
        dropped = actual["softmax"].signbit() & seen
        wrong = int((dropped != (exact["softmax"].signbit() & seen)).sum())
        assert wrong == 0, f"softmax: {wrong} of {int(seen.sum())} elements have another dropout mask"


def check_backward(
    actual: Mapping[str, Tensor], exact: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> None:
    """Check gradients, each against the reference of the same name.

    Args:
        actual: what kernels computed.
        exact: autograd through the definition in float64.
        plain: autograd through plain torch in q's dtype.
    """
    assert actual.keys() == exact.keys() == plain.keys()
    for name, gradient in actual.items():
        check(name, gradient, exact[name], plain[name], factor=GRADIENT, floor=CANCELLATION)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Results that are equal bit by bit."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name], expected[name]), f"{name} differs"
