"""A kernel compared with the reference on the current GPU."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_attn import interface, reference
from cute_attn.benchmark.peers import call_options
from cute_attn.benchmark.workload import Inputs, Workload, of_traits
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.traits import Traits

SEQLENS = (1, 127, 128, 513)


@dataclass(frozen=True)
class Accuracy:
    """An output's error.

    Attributes:
        error: the largest absolute difference from the reference in float64.
        plain: that of plain torch at the kernel's precision.
        allowed: twice ``plain``, for a gradient three times, plus one rounding of the largest element.
    """

    error: float
    plain: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @classmethod
    def of(cls, out: Tensor, exact: Tensor, plain: Tensor, factor: float = 2.0) -> "Accuracy":
        """Compare ``out`` with the exact result and with plain torch's."""
        if out.numel() == 0:
            return cls(0.0, 0.0, 0.0)
        error = float((out.double() - exact).abs().max())
        plain_error = float((plain.double() - exact).abs().max())
        rounding = torch.finfo(out.dtype).eps / 2 * float(exact.abs().max())
        return cls(error, plain_error, factor * plain_error + rounding)


def small_workloads(traits: Traits) -> list[Workload]:
    """A few sizes around a tile's, with two query heads a key head, for a kernel of those traits.

    Raises:
        ValueError: no workload has such traits.
    """
    workloads = []
    # A query that sees a single key has gradients of zero up to rounding: nothing to compare.
    for seqlen in SEQLENS[traits.op == "backward" :]:
        lengths = (seqlen, 1, 64) if traits.varlen else ()
        workload = of_traits(traits, seqlen)
        workloads.append(replace(workload, batch=2, seqlen=seqlen, nheads=4, nheads_kv=2, lengths=lengths))
    return workloads


def check_workloads(
    traits: Traits, workloads: Iterable[Workload], tile: str | None = None
) -> Iterator[tuple[Workload, Accuracy]]:
    """Run the kernel of those traits on each workload, and compare with the reference.

    A backward's accuracy is that of the gradient with the largest error relative to what is allowed.

    Raises:
        Unsupported: no kernel supports them.
    """
    kernel = f"{traits.arch}:{traits.variant}" if traits.variant else traits.arch
    which = "tile" if traits.op == "forward" else "backward_tile"
    for workload in workloads:
        torch.manual_seed(0)
        x = workload.inputs()
        rng_state = interface.draw_rng_state(x.q.device)
        leaves = x.leaves(workload) if workload.op == "backward" else ()
        options = call_options(workload, x) | {"kernel": kernel, which: tile, "rng_state": rng_state}
        if x.cu_seqlens is None:
            out = interface.attention(x.q, x.k, x.v, **options)
        else:
            longest = max(workload.lengths)
            out = interface.attention_varlen(
                x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, **options
            )
        assert isinstance(out, Tensor)
        exact = _by_definition(workload, x, rng_state, torch.float64)
        plain = _by_definition(workload, x, rng_state, x.q.dtype)
        if not leaves:
            yield workload, Accuracy.of(out, exact, plain)
            continue
        grad = torch.randn_like(out)
        gradients = [
            torch.autograd.grad(result, leaves, grad.to(result.dtype)) for result in (out, exact, plain)
        ]
        yield (
            workload,
            max(
                (Accuracy.of(a, b, c, 3.0) for a, b, c in zip(*gradients, strict=True)),
                key=lambda accuracy: (not accuracy.passed, accuracy.error / max(accuracy.allowed, 1e-30)),
            ),
        )


def _by_definition(workload: Workload, x: Inputs, rng_state: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference's output, computed in ``dtype``."""
    options = call_options(workload, x)
    mask, left, right = interface.resolve_mask(options["causal"], options["window"])
    inputs = ScoreInputs(
        window_left=left if workload.window else UNBOUNDED,
        window_right=right if workload.window else UNBOUNDED,
        alibi_slopes=x.alibi_slopes,
        bias=x.bias,
        softcap=options["softcap"],
        dropout_p=options["dropout_p"],
        rng_state=rng_state,
    )
    longest = max(workload.lengths, default=workload.seqlen)
    lengths = reference.Lengths(x.cu_seqlens, x.cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
    q, k, v = (tensor.to(dtype) for tensor in (x.q, x.k, x.v))
    features = reference.Features(mask, workload.dropout)
    return reference.attention(
        q, k, v, workload.head_dim**-0.5, features, inputs, lengths, compute_dtype=dtype
    )[0]
