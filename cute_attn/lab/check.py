"""Compare a kernel with the reference on the current GPU."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.api import attention as interface
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.lab.benchmark.peers import call_options, kernel_of, output
from cute_attn.lab.benchmark.workload import Inputs, Workload, of_traits
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

SEQLENS = (1, 127, 128, 513)


@dataclass(frozen=True)
class Accuracy:
    """Largest absolute differences from the reference in float64: ``error`` of the output, ``plain`` of plain torch at
    the kernel's precision. ``allowed``: ``plain`` times 2, or 3 for a gradient, plus a rounding of the largest element.
    """

    error: float
    plain: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    @classmethod
    def of(cls, out: Tensor, exact: Tensor, plain: Tensor, factor: float = 2.0) -> "Accuracy":
        if out.numel() == 0:
            return cls(0.0, 0.0, 0.0)
        error = float((out.double() - exact).abs().max())
        plain_error = float((plain.double() - exact).abs().max())
        rounding = torch.finfo(out.dtype).eps / 2 * float(exact.abs().max())
        return cls(error, plain_error, factor * plain_error + rounding)


def small_workloads(traits: Traits, tile: Tile | None = None) -> list[Workload]:
    """Workloads of a few lengths around a tile's for a kernel with these traits, and with ``tile`` if that is given.

    Query heads per key head are two, or the packed heads. For a bias loaded by TMA, lengths are multiples of 8.
    """
    group, step = max(2, getattr(tile, "pack_heads", 1)), 8 if getattr(tile, "bias_stages", 0) else 1
    workloads = []
    # A query that sees a single key has gradients of zero up to rounding: nothing to compare.
    for seqlen in SEQLENS[traits.op == "backward" :]:
        lengths = (seqlen, 1, 64) if traits.varlen else ()
        workload = replace(of_traits(traits, seqlen), batch=2, nheads=2 * group, nheads_kv=2)
        workloads.append(replace(workload, seqlen=-(-seqlen // step) * step, lengths=lengths))
    return list(dict.fromkeys(workloads))


@dataclass(frozen=True)
class Expected:
    """A workload's inputs and expected results: the output, or for a backward the gradients. ``exact``: computed by the
    reference in float64; ``plain``: by the reference at the kernel's precision.
    """

    workload: Workload
    x: Inputs
    rng_state: Tensor
    grad: Tensor | None
    exact: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]

    @classmethod
    def of(cls, workload: Workload) -> "Expected":
        """Compute expected results for random inputs of a fixed seed. A backward's inputs require gradients."""
        torch.manual_seed(0)
        x = workload.inputs()
        rng_state = interface.draw_rng_state(x.q.device)
        grad = None
        leaves: tuple[Tensor, ...] = ()
        if workload.op == "backward":
            grad = torch.randn((*x.q.shape[:-1], workload.head_dim_v), device=x.q.device, dtype=x.q.dtype)
            leaves = x.leaves(workload)

        def computed(dtype: torch.dtype) -> tuple[Tensor, ...]:
            out = _by_definition(workload, x, rng_state, dtype)
            return (out,) if grad is None else torch.autograd.grad(out, leaves, grad.to(out.dtype))

        return cls(workload, x, rng_state, grad, computed(torch.float64), computed(x.q.dtype))

    def run(self, kernel: str, tile: str | None = None) -> tuple[Tensor, ...]:
        """Run the operator with a kernel, ``"ARCH"`` or ``"ARCH:VARIANT"``; returns the output or the gradients."""
        out = output(self.workload, self.x, kernel, tile, rng_state=self.rng_state)
        if self.grad is None:
            return (out,)
        return torch.autograd.grad(out, self.x.leaves(self.workload), self.grad)

    def accuracy(self, results: Sequence[Tensor]) -> Accuracy:
        """Accuracy of an output, or of the gradient whose error is largest relative to its tolerance."""
        factor = 2.0 if self.grad is None else 3.0
        return max(
            (Accuracy.of(a, b, c, factor) for a, b, c in zip(results, self.exact, self.plain, strict=True)),
            key=lambda accuracy: (not accuracy.passed, accuracy.error / max(accuracy.allowed, 1e-30)),
        )


def check_workloads(
    traits: Traits, workloads: Iterable[Workload], tile: str | None = None
) -> Iterator[tuple[Workload, Accuracy]]:
    """Run a kernel on each workload and compare it with the reference. Raises Unsupported if there is no kernel."""
    for workload in workloads:
        expected = Expected.of(workload)
        yield workload, expected.accuracy(expected.run(kernel_of(traits), tile))


def _by_definition(workload: Workload, x: Inputs, rng_state: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference's output, computed in ``dtype``."""
    options = call_options(workload, x)
    mask, left, right = interface.resolve_mask(options["causal"], options["window"])
    inputs = ScoreInputs(
        window_left=left, window_right=right, alibi_slopes=x.alibi_slopes, bias=x.bias, sinks=x.sinks,
        softcap=options["softcap"], dropout_p=options["dropout_p"], rng_state=rng_state, extra=x.epilogues,
    )  # fmt: skip
    lengths = reference.Lengths(
        x.cu_seqlens, x.cu_seqlens_k, max_seqlen_q=workload.longest, max_seqlen_k=workload.longest_k
    )
    q, k, v = (tensor.to(dtype) for tensor in (x.q, x.k, x.v))
    users = tuple(user_epilogue(name).reference for name in workload.epilogues)
    features = reference.Features(mask, workload.dropout, users)
    return reference.attention(
        q, k, v, workload.head_dim**-0.5, features, inputs, lengths, compute_dtype=dtype
    )[0]
