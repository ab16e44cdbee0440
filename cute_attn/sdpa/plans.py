"""PyTorch's operators as calls of the kernels: inputs that kernels can read, outputs in the layouts PyTorch promises.

Inputs are views with rows before heads, and outputs are written in PyTorch's layouts. Tensors that kernels cannot read
or write in place are copied. CPU tensors are computed by the reference.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_attn.api import operators
from cute_attn.host import backward as _backward
from cute_attn.host import forward as _forward
from cute_attn.host import random_states, record
from cute_attn.host.bias import last_contiguous
from cute_attn.host.call import ATTENTION
from cute_attn.host.memory import ALIGNMENT_BYTES, as_strided, contiguous_strides, on_device, regular
from cute_attn.host.record import Layout
from cute_attn.sdpa.calls import Inputs, Request, translated

# ---- inputs as kernels read them ----


def _readable(x: Tensor) -> Tensor:
    """``x``, perhaps with other strides in dimensions of size 1; a copy if kernels cannot read its memory."""
    return record.readable(regular(x))


def _narrow_bias(bias: Tensor) -> Tensor:
    """A bias whose dimensions of stride 0, except the last, are shrunk to size 1, which is faster for kernels."""
    dims = list(zip(bias.shape, bias.stride(), strict=True))
    shape = [1 if stride == 0 else size for size, stride in dims[:-1]]
    return last_contiguous(as_strided(bias, (*shape, bias.shape[-1]), tuple(bias.stride())))


def _kernel_inputs(inputs: tuple, heads_first: bool, *, bias_gradient: bool = False) -> Inputs:
    """Inputs with rows before heads, readable by kernels. bias_gradient: keep the bias's shape for its gradient."""
    q, k, v = map(_readable, map(rows_first, inputs[:3]) if heads_first else inputs[:3])
    bias = inputs[3]
    if bias is not None:
        bias = last_contiguous(bias) if bias_gradient else _narrow_bias(bias)
    return Inputs(q, k, v, bias, *inputs[4:])


# ---- layouts of outputs ----


def strides_like(x: Tensor, last: int) -> tuple[int, ...]:
    """Strides of an output with x's order of dimensions and with ``last`` as its last size."""
    if x.shape[-1] == last:
        return torch.empty_like(x, device="meta").stride()
    strides, step = [0] * x.dim(), 1
    shape = (*x.shape[:-1], last)
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def rows_first(x: Tensor) -> Tensor:
    """``x`` (batch, heads, rows, ...) as (batch, rows, heads, ...)."""
    return x.transpose(1, 2)


def _swapped(layout: Layout) -> Layout:
    """The layout with its second and third dimensions exchanged."""
    (shape, strides) = layout
    return (shape[0], shape[2], shape[1], shape[3]), (strides[0], strides[2], strides[1], strides[3])


@dataclass(frozen=True, slots=True)
class Output:
    """The memory layout of one of PyTorch's outputs, which kernels write with rows before heads.

    Attributes:
        layout: shape and strides that PyTorch promises.
        heads_first: whether the layout has heads before rows.
    """

    layout: Layout
    heads_first: bool

    @classmethod
    def of(cls, x: Tensor, last: int, heads_first: bool, backend: str) -> "Output":
        """The output whose order of dimensions follows the input ``x``, with ``last`` as its last size.

        Memory-efficient attention's outputs are contiguous with rows before heads.
        """
        shape = (*x.shape[:-1], last)
        if backend != "efficient":
            return cls((shape, strides_like(x, last)), heads_first)
        batch, heads, rows, _ = shape
        own = (batch, rows, heads, last)
        return cls(_swapped((own, contiguous_strides(own))), heads_first)

    def memory(self, like: Tensor) -> Tensor | None:
        """New memory with rows before heads; None if kernels cannot write this layout."""
        shape, strides = _swapped(self.layout) if self.heads_first else self.layout
        if not _writable(strides, like.element_size()):
            return None
        return record.empty(like, shape, strides, like.dtype)

    def of_rows(self, x: Tensor) -> Tensor:
        """Convert the kernels' output, with rows before heads, to this layout: a view, or a copy if strides differ."""
        shape, strides = self.layout
        x = rows_first(x) if self.heads_first else x
        own = x.stride()
        if own == strides:
            return x
        if all(size == 1 or a == b for size, a, b in zip(shape, own, strides, strict=True)):
            return as_strided(x, shape, strides)
        with on_device(x.get_device()):
            made = record.empty(x, shape, strides, x.dtype)
            record.step(Tensor.copy_, made, x)
        return made


def _writable(strides: tuple[int, ...], element_size: int) -> bool:
    whole = ALIGNMENT_BYTES // element_size
    return strides[-1] == 1 and all(step % whole == 0 and step > 0 for step in strides[:-1])


# ---- the forward ----


class Results(NamedTuple):
    """The results of a forward.

    Attributes:
        out: in the layout that PyTorch promises.
        lse: (batch, heads, rows), or packed (heads, total), with +inf for a row without keys.
        state: seed and offset, int64 (2,), or None without dropout.
        softmax: the softmax if requested, else None.
    """

    out: Tensor
    lse: Tensor
    state: Tensor | None
    softmax: Tensor | None


def forward(
    request: Request,
    inputs: tuple,
    rng: str,
    *,
    heads_first: bool,
    wants_lse: bool = True,
    lse_rows: int = 0,
    return_softmax: bool = False,
) -> Results:
    """Compute a forward that kernels serve.

    Args:
        request: the call's metadata.
        inputs: q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes as PyTorch passes them.
        rng: how dropout masks are drawn, see :func:`cute_attn.sdpa.activate`.
        heads_first: whether q, k and v have heads before rows.
        wants_lse: whether lse is used; if not, it may contain -inf.
        lse_rows: rows of lse, +inf beyond the queries; by default the number of queries.
        return_softmax: also return the softmax.
    """
    state, rows = None, request.longest[0]
    if request.dropout_p:
        state = record.drawn(functools.partial(draw, request, inputs[0].device, rng))
    prepared = _kernel_inputs(inputs, heads_first)
    call = translated(request, prepared, state)._replace(return_softmax=return_softmax)
    output = Output.of(inputs[0], request.v[-1], heads_first, request.backend)
    if runs_kernels(prepared.q):
        with on_device(prepared.q.get_device()):
            out, shape = output.memory(prepared.q), call.output_shapes()[1]
            shape = (*shape[:2], lse_rows) if lse_rows > rows else shape
            lse = record.contiguous(prepared.q, shape, torch.float32)
            written, lse, softmax = _forward.forward(call, out, lse, keeps_rows=False)
    else:
        written, lse, softmax = operators.forward_cpu(call)
        if lse_rows > rows:
            lse = F.pad(lse, (0, lse_rows - rows))
    if wants_lse and _may_see_nothing(request, inputs[6]):
        record.step(Tensor.nan_to_num_, lse, math.nan, math.inf, math.inf)
    if lse_rows > rows:
        record.step(Tensor.fill_, lse.narrow(2, rows, lse_rows - rows), math.inf)
    return Results(output.of_rows(written), lse, state, softmax)


def runs_kernels(q: Tensor) -> bool:
    """True if kernels compute a call, False if the reference does."""
    return q.is_cuda


def _may_see_nothing(request: Request, seqused_k: Tensor | None) -> bool:
    """True if a query may see no key."""
    if request.bias is not None or request.packed or seqused_k is not None or max(request.window) >= 0:
        return True
    if not request.longest[1]:
        return True
    return request.causal and request.backend == "flash" and request.longest[0] > request.longest[1]


# ---- seeds and offsets of dropout masks ----


def draw(request: Request, device: torch.device, rng: str) -> Tensor:
    """Seed and offset of a mask; with rng="torch", the ones that PyTorch's kernel would get from its generator."""
    if rng != "torch":
        return random_states.draw(device)
    with random_states.lock:
        seed, offset = random_states.advance(_generator(device), _advance(request))
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63, offset], dtype=torch.int64, device=device)


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _advance(request: Request) -> int:
    """How far PyTorch's forward advances the generator's offset: one per thread or score, rounded up to fours."""
    starts = request.lengths[0]
    batch = request.q[0] if starts is None else starts[0][0] - 1
    heads = batch * request.q[-2]
    count = heads * 32 if request.backend == "flash" else heads * math.prod(request.longest)
    return (count + 3) // 4 * 4


def _joined(rng_state: Tensor | tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Seed and offset as one int64 tensor."""
    if isinstance(rng_state, Tensor):
        return rng_state.view(torch.int64).to(device)
    numbers = tuple(x.view(torch.int64).to(device) for x in rng_state)
    with on_device(numbers[0].get_device()):
        both = record.empty(numbers[0], (2,), (1,), torch.int64)
        record.step(_stack_into, numbers, both)
    return both


def _stack_into(numbers: tuple[Tensor, ...], out: Tensor) -> None:
    torch.stack(numbers, out=out)


# ---- the backward ----


def backward(
    request: Request,
    inputs: tuple,
    outer: tuple[Tensor, Tensor, Tensor],
    rng_state: Tensor | tuple[Tensor, Tensor],
    *,
    heads_first: bool,
    bias_gradient: bool = False,
) -> tuple[Tensor, ...]:
    """Compute gradients of q, k and v in PyTorch's layouts, then of bias with bias_gradient, for a served call.

    inputs: see :func:`forward`; outer: the gradient of out, then out and lse.
    """
    state = _joined(rng_state, inputs[0].device) if request.dropout_p else None
    prepared = _kernel_inputs(inputs, heads_first, bias_gradient=bias_gradient)
    call = translated(request, prepared, state)
    grad_out, out = map(rows_first, outer[:2]) if heads_first else outer[:2]
    lse = outer[2][:, :, : request.longest[0]] if heads_first else outer[2]
    needed = (True, True, True, bias_gradient, False)
    results = [Output.of(x, x.shape[-1], heads_first, request.backend) for x in inputs[:3]]
    if runs_kernels(prepared.q):
        given = (grad_out, None, out, lse)
        with on_device(prepared.q.get_device()):
            dq, dk, dv = (one.memory(x) for one, x in zip(results, prepared[:3], strict=True))
            plan = _backward.plan_of(call, given, needed)
            found: Any = _backward.launch(plan, call, given, needed, (dq, dk, dv, None, None))
    else:
        found = torch.ops.cute_attn.backward.default(
            grad_out, None, out, lse, list(needed), *call.values(ATTENTION)
        )
    own: list[Any] = [one.of_rows(x) for one, x in zip(results, found, strict=False)]
    return (*own, found[3]) if bias_gradient else tuple(own)
