"""What follows from the metadata of an operator's arguments, computed once: the decision, the launch, the layouts.

A call is then a lookup, a view of each input with rows before heads, outputs allocated in the layouts that PyTorch
promises, and the launch. Inputs that kernels cannot read are copied; CPU tensors are computed by the reference.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_attn.api import operators
from cute_attn.host import backward, random_states, record
from cute_attn.host.bias import last_contiguous
from cute_attn.host.call import ATTENTION, NUM_TENSORS, Call
from cute_attn.host.launcher import Launcher, launcher_for
from cute_attn.host.memory import (
    ALIGNMENT_BYTES,
    as_strided,
    contiguous_strides,
    on_device,
    readable,
    regular,
)
from cute_attn.host.record import Layout
from cute_attn.sdpa.calls import Inputs, Request, translated

# ---- inputs as kernels read them ----


def _readable(x: Tensor) -> Tensor:
    """``x``, perhaps with other strides of dimensions of size 1, or a copy where kernels cannot read its memory."""
    return readable(regular(x))


def _narrow_bias(bias: Tensor) -> Tensor:
    """A bias with dimensions of stride 0 as size 1, which costs kernels less; the last one as it is."""
    dims = list(zip(bias.shape, bias.stride(), strict=True))
    shape = [1 if stride == 0 else size for size, stride in dims[:-1]]
    return last_contiguous(as_strided(bias, (*shape, bias.shape[-1]), tuple(bias.stride())))


def _prepared(inputs: Inputs, *, bias_gradient: bool = False) -> Inputs:
    """Tensors as kernels read them. A bias with a gradient keeps its shape, which is the gradient's."""
    q, k, v = map(_readable, inputs[:3])
    bias = inputs.bias
    if bias is not None:
        bias = last_contiguous(bias) if bias_gradient else _narrow_bias(bias)
    return Inputs(q, k, v, bias, *inputs[4:])


def _views(
    raw: Sequence[Tensor | None], prepared: Sequence[Tensor | None]
) -> tuple[Layout | None, ...] | None:
    """Layouts in which ``raw`` tensors are the ``prepared`` ones; None where one of those is a copy."""
    layouts: list[Layout | None] = []
    for x, y in zip(raw, prepared, strict=True):
        if x is None or y is None:
            layouts.append(None)
        elif x.data_ptr() != y.data_ptr():
            return None
        else:
            layouts.append(_other_layout(x, y))
    return tuple(layouts)


def _other_layout(x: Tensor, y: Tensor) -> Layout | None:
    """``y``'s layout, or None where it is ``x``'s."""
    layout = tuple(y.shape), tuple(y.stride())
    return None if layout == (tuple(x.shape), tuple(x.stride())) else layout


def _viewed(x: Tensor, layout: Layout | None) -> Tensor:
    """``x`` in that layout: a view, which costs as much host time as all else of an input, only where they differ."""
    return x if layout is None else as_strided(x, *layout)


# ---- layouts of outputs ----


def strides_like(x: Tensor, last: int) -> tuple[int, ...]:
    """Strides of an output with the order of x's dimensions and its last size ``last``."""
    if x.shape[-1] == last:
        return torch.empty_like(x, device="meta").stride()
    strides, step = [0] * x.dim(), 1
    shape = (*x.shape[:-1], last)
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def laid_out(x: Tensor, layout: Layout) -> Tensor:
    """``x`` with these strides: itself where they address the same memory, otherwise a copy."""
    shape, strides = layout
    own = x.stride()
    if own == strides:
        return x
    if all(size == 1 or a == b for size, a, b in zip(shape, own, strides, strict=True)):
        return as_strided(x, shape, strides)
    with on_device(x.get_device()):
        made = record.empty(x, shape, strides, x.dtype)
        record.step(Tensor.copy_, made, x)
    return made


def rows_first(x: Tensor) -> Tensor:
    """(batch, heads, rows, ...) as (batch, rows, heads, ...)."""
    return x.transpose(1, 2)


def _swapped(layout: Layout) -> Layout:
    """The layout with its second and third dimensions exchanged."""
    (shape, strides) = layout
    return (shape[0], shape[2], shape[1], shape[3]), (strides[0], strides[2], strides[1], strides[3])


@dataclass(frozen=True, slots=True)
class Output:
    """How an output that kernels write with rows before heads reaches PyTorch.

    Attributes:
        layout: as PyTorch promises it.
        heads_first: whether it has heads before rows.
        written: strides with rows before heads in which kernels write it; None where they cannot, and it is copied.
        in_place: whether what kernels wrote has those strides, and needs no look at them.
    """

    layout: Layout
    heads_first: bool
    written: tuple[int, ...] | None
    in_place: bool = False

    @classmethod
    def of(cls, x: Tensor, last: int, heads_first: bool, backend: str) -> "Output":
        """For ``x``, the input that decides its order of dimensions, and a last size ``last``.

        Memory-efficient attention's outputs are contiguous with rows before heads.
        """
        shape = (*x.shape[:-1], last)
        if backend == "efficient":
            batch, heads, rows, _ = shape
            layout = _swapped(((batch, rows, heads, last), contiguous_strides((batch, rows, heads, last))))
        else:
            layout = (shape, strides_like(x, last))
        _, strides = _swapped(layout) if heads_first else layout
        return cls(layout, heads_first, strides if _writable(strides, x.element_size()) else None)

    def of_rows(self, x: Tensor) -> Tensor:
        """From what kernels wrote."""
        if self.in_place:
            return as_strided(x, *self.layout) if self.heads_first else x
        return laid_out(rows_first(x) if self.heads_first else x, self.layout)


def _writable(strides: tuple[int, ...], element_size: int) -> bool:
    whole = ALIGNMENT_BYTES // element_size
    return strides[-1] == 1 and all(step % whole == 0 and step > 0 for step in strides[:-1])


# ---- the forward ----


class Results(NamedTuple):
    """What a forward returns.

    Attributes:
        out: as PyTorch promises it.
        lse: (batch, heads, rows), packed (heads, total), with +inf for a row without keys.
        state: int64 (2,), seed and offset, or None without dropout.
        softmax: or None.
    """

    out: Tensor
    lse: Tensor
    state: Tensor | None
    softmax: Tensor | None


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """A forward that kernels serve.

    Attributes:
        request: its metadata.
        rng: where dropout masks come from, see :func:`cute_attn.sdpa.activate`.
        out: how the output reaches PyTorch.
        views: of q, k, v and bias as kernels read them, None for one that they read as it is; None where one has to
            be copied.
        launcher: None on the CPU.
        lse_rows: rows of lse, of which kernels write the first; +inf follows.
        empty_rows: whether lse is wanted and some query may see no key.
        return_softmax: whether softmax is wanted.
    """

    request: Request
    rng: str
    out: Output
    views: tuple[Layout | None, ...] | None
    launcher: Launcher | None
    lse_rows: int
    empty_rows: bool
    return_softmax: bool

    def run(self, inputs: tuple) -> Results:
        """inputs: q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes as PyTorch gives them."""
        state = None
        if self.request.dropout_p:
            state = record.drawn(functools.partial(draw, self.request, inputs[0].device, self.rng))
        if self.launcher is None:
            return self._by_reference(inputs, state)
        out, lse, softmax = self.launch(inputs, state)
        if self.empty_rows:
            record.step(Tensor.nan_to_num_, lse, math.nan, math.inf, math.inf)
        rows = self.request.longest[0]
        if self.lse_rows > rows:
            record.step(Tensor.fill_, lse.narrow(2, rows, self.lse_rows - rows), math.inf)
        return Results(out, lse, state, softmax)

    def launch(self, inputs: tuple, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, as PyTorch promises it, lse as kernels leave it, and softmax."""
        assert self.launcher is not None
        tensors = _launched(inputs, self.views, self._kernel_inputs, state)
        written, lse, softmax = self.launcher.launch(tensors)
        return self.out.of_rows(written), lse, softmax

    def _kernel_inputs(self, inputs: tuple) -> Inputs:
        return _kernel_inputs(inputs, self.out.heads_first)

    def _by_reference(self, inputs: tuple, state: Tensor | None) -> Results:
        call = translated(self.request, self._kernel_inputs(inputs), state)
        out, lse, softmax = operators.forward_cpu(call._replace(return_softmax=self.return_softmax))
        if self.empty_rows:
            lse = lse.nan_to_num_(math.nan, math.inf, math.inf)
        if self.lse_rows > self.request.longest[0]:
            lse = F.pad(lse, (0, self.lse_rows - self.request.longest[0]), value=math.inf)
        return Results(self.out.of_rows(out), lse, state, softmax)


def _kernel_inputs(inputs: tuple, heads_first: bool, *, bias_gradient: bool = False) -> Inputs:
    """Inputs with rows before heads, copied where kernels cannot read them."""
    q, k, v = map(rows_first, inputs[:3]) if heads_first else inputs[:3]
    return _prepared(Inputs(q, k, v, *inputs[3:]), bias_gradient=bias_gradient)


def _launched(
    inputs: tuple,
    views: tuple[Layout | None, ...] | None,
    prepare: Callable[[tuple], Inputs],
    state: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The tensors of a launch; q, k, v and bias as ``views`` of PyTorch's, or where it is None prepared."""
    q, k, v, bias, cu_seqlens_q, cu_seqlens_k, seqused_k, slopes = inputs
    if views is not None:
        of_q, of_k, of_v, of_bias = views
        q, k, v = _viewed(q, of_q), _viewed(k, of_k), _viewed(v, of_v)
        if of_bias is not None:
            bias = as_strided(bias, *of_bias)
    else:
        q, k, v, bias, *_ = prepare(inputs)
    return q, k, v, cu_seqlens_q, cu_seqlens_k, None, seqused_k, slopes, bias, None, state


def plan_forward(
    request: Request,
    inputs: tuple,
    rng: str,
    *,
    heads_first: bool,
    wants_lse: bool = True,
    lse_rows: int = 0,
    return_softmax: bool = False,
) -> ForwardPlan:
    """The plan of a call that kernels serve; its kernel is built.

    inputs: as of :meth:`ForwardPlan.run`. lse_rows: as of :class:`ForwardPlan`, by default as many as queries.
    """
    prepared = _kernel_inputs(inputs, heads_first)
    out = Output.of(inputs[0], request.v[-1], heads_first, request.backend)
    plan = ForwardPlan(
        request=request,
        rng=rng,
        out=out,
        views=None,
        launcher=None,
        lse_rows=lse_rows or request.longest[0],
        empty_rows=wants_lse and _may_see_nothing(request, inputs[6]),
        return_softmax=return_softmax,
    )
    if not runs_kernels(prepared.q):
        return plan
    state = _any_state(request, inputs)
    made = launcher_for(translated(request, prepared, state)._replace(return_softmax=return_softmax))
    made = replace(made, aligned=False)  # the plan's key says where rows start
    if out.written is not None:
        made = replace(made, strides=(out.written, made.strides[1]))
        plan = replace(plan, out=replace(out, in_place=True))
    if plan.lse_rows > request.longest[0]:
        shape = (*made.shapes[1][:2], plan.lse_rows)
        strides = (made.strides[0], contiguous_strides(shape))
        made = replace(made, shapes=(made.shapes[0], shape), strides=strides)
    return replace(plan, views=_views(inputs[:4], prepared[:4]), launcher=made)


def _any_state(request: Request, inputs: tuple) -> Tensor | None:
    """A tensor like a dropout state, or None without dropout."""
    return inputs[0].new_empty(2, dtype=torch.int64) if request.dropout_p else None


def runs_kernels(q: Tensor) -> bool:
    """Whether kernels compute a call, rather than the reference."""
    return q.is_cuda


def _may_see_nothing(request: Request, seqused_k: Tensor | None) -> bool:
    """Whether there may be a query that sees no key."""
    if request.bias is not None or request.packed or seqused_k is not None or max(request.window) >= 0:
        return True
    if not request.longest[1]:
        return True
    return request.causal and request.backend == "flash" and request.longest[0] > request.longest[1]


# ---- seeds and offsets of dropout masks ----


def draw(request: Request, device: torch.device, rng: str) -> Tensor:
    """Seed and offset of a mask; under rng="torch" those that PyTorch's kernel would take from its generator."""
    if rng != "torch":
        return random_states.draw(device)
    generator = _generator(device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _advance(request))
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63, offset], dtype=torch.int64, device=device)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def _advance(request: Request) -> int:
    """What PyTorch's forward adds to the generator's offset: a number for each thread or score, in fours."""
    if request.lengths[0] is not None:
        batch = request.lengths[0][0][0] - 1
    else:
        batch = request.q[0]
    planes = batch * request.q[-2]
    count = planes * 32 if request.backend == "flash" else planes * request.longest[0] * request.longest[1]
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


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """A backward that kernels serve.

    Attributes:
        request: its metadata.
        grads: how the gradients of q, k and v reach PyTorch.
        views: as of :class:`ForwardPlan`.
        outputs: layouts of grad_out and out with rows before heads, and of lse without padding; None for one that has
            it.
        launcher: None on the CPU.
        rest: the parameters after the tensors.
        bias_gradient: whether the bias's gradient is wanted.
    """

    request: Request
    grads: tuple[Output, Output, Output]
    views: tuple[Layout | None, ...] | None
    outputs: tuple[Layout | None, ...]
    launcher: backward.BackwardLauncher | None
    rest: tuple
    bias_gradient: bool

    def run(
        self, inputs: tuple, grads: tuple[Tensor, Tensor, Tensor], rng_state: Tensor | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k and v in PyTorch's layouts, then of bias where it is wanted.

        inputs: as of :meth:`ForwardPlan.run`; grads: of out, then out and lse, in layouts of the call that was planned.
        """
        state = _joined(rng_state, inputs[0].device) if self.request.dropout_p else None
        grad_out, out, lse = map(_viewed, grads, self.outputs)
        if self.launcher is None:
            call = translated(self.request, self._kernel_inputs(inputs), state)
            needed = [True, True, True, self.bias_gradient, False]
            found = torch.ops.cute_attn.backward.default(
                grad_out, None, out, lse, needed, *call.values(ATTENTION)
            )
        else:
            found = self.launcher.launch(self._call(inputs, state), (grad_out, None), (out, lse))
        dq, dk, dv = map(Output.of_rows, self.grads, found)
        return (dq, dk, dv, found[3]) if self.bias_gradient else (dq, dk, dv)

    def _kernel_inputs(self, inputs: tuple) -> Inputs:
        heads_first = self.grads[0].heads_first
        return _kernel_inputs(inputs, heads_first, bias_gradient=self.bias_gradient)

    def _call(self, inputs: tuple, state: Tensor | None) -> Call:
        tensors = _launched(inputs, self.views, self._kernel_inputs, state)
        return Call._make((*tensors, *self.rest))


def plan_backward(
    request: Request,
    inputs: tuple,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    heads_first: bool,
    bias_gradient: bool = False,
) -> BackwardPlan:
    """The plan of a call whose forward kernels serve; its kernels are built.

    inputs, grads: as of :meth:`BackwardPlan.run`.
    """
    prepared = _kernel_inputs(inputs, heads_first, bias_gradient=bias_gradient)
    results = tuple(Output.of(x, x.shape[-1], heads_first, request.backend) for x in inputs[:3])
    grad_out, out = map(rows_first, grads[:2]) if heads_first else grads[:2]
    lse = grads[2][:, :, : request.longest[0]] if heads_first else grads[2]
    plan = BackwardPlan(
        request=request,
        grads=results,  # type: ignore[arg-type]
        views=None,
        outputs=tuple(map(_other_layout, grads, (grad_out, out, lse))),
        launcher=None,
        rest=(),
        bias_gradient=bias_gradient,
    )
    if not runs_kernels(prepared.q):
        return plan
    state = _any_state(request, inputs)
    call = translated(request, prepared, state)
    needed = (True, True, True, bias_gradient, False)
    made = backward.launcher_for(call, grad_out, None, out, lse, needed)
    placed = tuple(
        replace(output, in_place=output.written is not None and shape[-2] == _heads(output))
        for shape, output in zip(made.shapes, results, strict=True)
    )
    strides = tuple(
        output.written if output.in_place and output.written else own
        for own, output in zip(made.strides, placed, strict=True)
    )
    return replace(
        plan,
        grads=placed,  # type: ignore[arg-type]
        views=_views(inputs[:4], prepared[:4]),
        launcher=replace(made, strides=strides),
        rest=call[NUM_TENSORS:],
    )


def _heads(output: Output) -> int:
    """Heads of a gradient; kernels may write several partial sums of each."""
    return output.layout[0][1 if output.heads_first else -2]
