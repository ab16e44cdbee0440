"""Whether two calls have the same results and the same gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tensors import randn


def gradients(outputs: Tensor | Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum of the outputs, with weights that depend only on their shapes and are 0 where they are inf."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [randn(*x.shape, seed=90 + i).to(x.dtype) for i, x in enumerate(outputs)]
    shown = [torch.where(x.detach().isfinite(), w, 0.0) for x, w in zip(outputs, weights, strict=True)]
    return torch.autograd.grad(outputs, leaves, shown)


def same(
    found: Any, expected: Any, leaves: Sequence[Tensor] = (), others: Sequence[Tensor] = (), **limits: Any
):
    """Outputs of two calls are close, one tensor or several, and so are their gradients by the leaves.

    others: the leaves of ``expected``, if it has its own. limits: of ``torch.testing.assert_close``.
    """
    torch.testing.assert_close(found, expected, **limits)
    if leaves:
        own = (gradients(found, leaves), gradients(expected, others or leaves))
        torch.testing.assert_close(*own, **limits)
