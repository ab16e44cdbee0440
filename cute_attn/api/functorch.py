"""Attention under torch.func's transforms: ``grad``, ``vjp``, ``jacrev``, ``jvp``, ``jacfwd`` and ``vmap``.

A call whose tensors have tangents, from ``jvp`` or ``torch.autograd.forward_ad``, becomes one call of the operator
``cute_attn::jvp``, which returns the outputs and their tangents.

Under ``vmap``, a batch of calls becomes one call with all their sequences. Calls that cannot be merged run in turn:
with packed sequences, with epilogues, or with batched sinks or dropout states, which a call has only once.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.host.call import ATTENTION, NUM_TENSORS, Call
from cute_attn.host.checks import check
from cute_attn.host.dispatch import DIFFERENTIABLE, LEVEL, NO_GRADIENT, NO_TANGENT, not_in_jvp, unpacked

_FIELDS = Call._fields[:NUM_TENSORS]
_BY_SEQUENCE = ("q", "k", "v", "seqused_q", "seqused_k")
_INDICES = tuple(_FIELDS.index(name) for name in DIFFERENTIABLE)
_RANKS = {"alibi_slopes": 1, "bias": 4}
Dims = tuple[int | None, ...]
_NO_SECOND = "a second derivative of attention is asked for; accepted: first ones"


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`cute_attn.api.operators.forward` while a transform is active, for a call that has been checked."""
    found = _Forward.apply(call[NUM_TENSORS + 1 :], *call[:NUM_TENSORS], *call.epilogue_tensors)
    return found if call.aux else (*found, None)


def differentiates() -> bool:
    """True within ``grad``, ``vjp`` or ``jacrev``, unless another transform is inside."""
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() == torch._C._functorch.TransformType.Grad


def before_operators() -> AbstractContextManager:
    """The dispatcher's state before an operator was called, for its implementations under a transform.

    A transform hides itself from the operators that implementations call, but the functions here must meet it.
    Operators of torch on tensors of that transform are not possible within this context.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include, exclude - _OF_TRANSFORMS)


_OF_TRANSFORMS = torch._C.DispatchKeySet.from_raw_repr(0)
for _name in (
    "FuncTorchDynamicLayerFrontMode", "FuncTorchBatched", "FuncTorchBatchedDecomposition", "FuncTorchVmapMode",
    "ADInplaceOrView", "AutogradFunctionality",
):  # fmt: skip
    _OF_TRANSFORMS = _OF_TRANSFORMS.add(getattr(torch._C.DispatchKey, _name))


def with_tangents(
    call: Call, state: AbstractContextManager | None = None
) -> tuple[Tensor, Tensor, None] | None:
    """out and lse as dual tensors with their tangents; None if no tensor of the call has a visible tangent.

    Under a transform other than ``jvp``, tangents belong to an outer transform, which passes them to ``_Forward.jvp``.

    state: from an operator's implementation, :func:`before_operators`.
    """
    primals, tangents = _unpacked(call)
    if all(tangent is None for tangent in tangents):
        return None
    if state is None:  # the operator checks
        check(call)
    with state or contextlib.nullcontext():
        outputs = _jvp(call[NUM_TENSORS + 1 :], primals, tangents)
    pairs = zip(outputs[:2], outputs[2:], strict=True)
    return *(forward_ad.make_dual(*pair, level=LEVEL) for pair in pairs), None


def refuse_out(call: Call) -> None:
    """Raise NotImplementedError if a tensor of the call has a tangent, since ``out`` cannot have one."""
    if any(tangent is not None for tangent in _unpacked(call)[1]):
        raise not_in_jvp("out is given", ": a call without out")


def _unpacked(call: Call) -> tuple[tuple, tuple]:
    """The tensors of a call without tangents, and their visible tangents, None for tensors without one."""
    return unpacked((*call[:NUM_TENSORS], *call.epilogue_tensors))


def _jvp(rest: tuple, tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Tensor, ...]:
    """out, lse and their tangents; tangents: a tangent or None for each tensor."""
    wanted = _wanted(rest, tensors, tangents)
    return _Jvp.apply(rest, len(wanted), *wanted, *tensors)


def _wanted(rest: tuple, tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Tensor | None, ...]:
    if tangents[_FIELDS.index("alibi_slopes")] is not None:
        raise NotImplementedError(NO_TANGENT)
    aux = Call.joined(tensors, rest).aux
    if aux:
        raise not_in_jvp(f"return_{aux} is True", ": False")
    return *(tangents[i] for i in _INDICES), *tangents[NUM_TENSORS:]


class _Forward(torch.autograd.Function):
    """Arguments: ``rest``, a tuple of the call's other parameters; tensors q to rng_state; tensors of epilogues."""

    @staticmethod
    def forward(rest: tuple, *tensors: Any) -> tuple[Tensor, ...]:
        call = Call.joined(tensors, rest)
        found = torch.ops.cute_attn.forward.default(*call.values(ATTENTION))
        return found if call.aux else found[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        rest, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:2])
        ctx.save_for_forward(*tensors, *output[:2])
        ctx.rest = rest
        if len(output) > 2:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple:
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], grad_out, grad_lse)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, _, _ = ctx.saved_tensors
        return _jvp(ctx.rest, tensors, tangents)[2:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rest: tuple, *tensors: Any) -> tuple[tuple, tuple]:
        dims = in_dims[1:]
        if _needs_loop(info, rest, tensors, dims, dims[0]):
            found = _looped(lambda own: _Forward.apply(rest, *own), info.batch_size, tensors, dims)
        else:
            merged = _merged(info.batch_size, tensors, dims)
            found = [x.unflatten(0, (info.batch_size, -1)) for x in _Forward.apply(rest, *merged)]
        return tuple(found), (0,) * len(found)


def _gradients(
    ctx: Any, asked: tuple[bool, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> list[Tensor | None]:
    """Gradients of a call's tensors, saved in ``ctx`` together with out and lse; asked: which are needed."""
    *tensors, out, lse = ctx.saved_tensors
    if asked[_FIELDS.index("alibi_slopes")] or any(asked[NUM_TENSORS:]):
        raise NotImplementedError(NO_GRADIENT)
    found: list[Tensor | None] = [None] * len(asked)
    needed = tuple(asked[i] for i in _INDICES)
    if any(needed) and not (grad_out is None and grad_lse is None):
        grads = _Backward.apply(ctx.rest, needed, grad_out, grad_lse, out, lse, *tensors)
        for i in [i for i, wanted in zip(_INDICES, needed, strict=True) if wanted]:
            found[i], *grads = grads
    return found


class _Derivative(torch.autograd.Function):
    """A first derivative, which cannot be differentiated again."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:
        raise NotImplementedError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> tuple:
        raise NotImplementedError(_NO_SECOND)


class _Backward(_Derivative):
    """Arguments: ``rest``, flags of needed gradients, gradients of out and lse, out, lse, tensors of :class:`_Forward`.

    Returns the needed gradients.
    """

    @staticmethod
    def forward(
        rest: tuple,
        needed: tuple[bool, ...],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        given = (grad_out, grad_lse, out, lse, list(needed))
        grads = torch.ops.cute_attn.backward.default(*given, *Call.joined(tensors, rest).values(ATTENTION))
        return tuple(x for x, wanted in zip(grads[:-1], needed, strict=True) if wanted)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rest: tuple, needed: tuple, *given: Any) -> tuple[tuple, tuple]:
        dims, size = in_dims[2:], info.batch_size
        outputs, tensors = given[:4], given[4:]
        if needed[4] or _needs_loop(info, rest, tensors, dims[4:], dims[2]):
            found = _looped(lambda own: _Backward.apply(rest, needed, *own), size, given, dims)
            return tuple(found), (0,) * len(found)
        merged = _merged(size, tensors, dims[4:], own_bias=needed[3])
        sequences = [_flat(size, x, dim) for x, dim in zip(outputs, dims, strict=False)]
        found = [x.unflatten(0, (size, -1)) for x in _Backward.apply(rest, needed, *sequences, *merged)]
        bias, at = tensors[_FIELDS.index("bias")], dims[4 + _FIELDS.index("bias")]
        if needed[3] and (bias.shape[0] if at is None else bias.movedim(at, 0).shape[1]) == 1:
            found[-1] = found[-1].sum(1, keepdim=True)
        return tuple(found), (0,) * len(found)


class _Jvp(_Derivative):
    """Arguments: ``rest``, the number of tangents, a tangent or None for each of q, k, v, bias, sinks and the tensors
    of epilogues, and the tensors of :class:`_Forward`.

    Returns out, lse and their tangents. Only out and lse have gradients: a loss may use them and detach the tangents.
    """

    @staticmethod
    def forward(rest: tuple, number: int, *given: Any) -> tuple[Tensor, ...]:
        tangents, tensors = list(given[:number]), given[number:]
        return torch.ops.cute_attn.jvp.default(tangents, *Call.joined(tensors, rest).values(ATTENTION))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        rest, number, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[number:], *output[:2])
        ctx.rest, ctx.number = rest, number

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *of_tangents: Tensor | None
    ) -> tuple:
        if any(x is not None for x in of_tangents):
            raise NotImplementedError(_NO_SECOND)
        first = 2 + ctx.number
        return *(None,) * first, *_gradients(ctx, ctx.needs_input_grad[first:], grad_out, grad_lse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rest: tuple, number: int, *given: Any) -> tuple[tuple, tuple]:
        dims, size = in_dims[2:], info.batch_size
        tangents, tensors = given[:number], given[number:]
        rows, others = tangents[:3], tangents[3:]
        queries = next((dim for dim in (*dims[:3], *dims[number : number + 3]) if dim is not None), None)
        if any(x is not None for x in others) or _needs_loop(info, rest, tensors, dims[number:], queries):
            found = _looped(lambda own: _Jvp.apply(rest, number, *own), size, given, dims)
        else:
            merged = _merged(size, tensors, dims[number:])
            sequences = [_flat(size, x, dim) for x, dim in zip(rows, dims, strict=False)]
            called = _Jvp.apply(rest, number, *sequences, *others, *merged)
            found = [x.unflatten(0, (size, -1)) for x in called]
        return tuple(found), (0,) * len(found)


def _needs_loop(info: Any, rest: tuple, tensors: Sequence[Any], dims: Dims, queries: int | None) -> bool:
    """True if vmap's calls must run one by one. queries: the batched dimension of q or out, or None.

    Raises
    ------
    ValueError
        The call draws a dropout mask under ``randomness="error"``, vmap's default.
    """
    call, of = Call.joined(tensors, rest), dict(zip(_FIELDS, dims, strict=False))
    if info.batch_size == 0 or call.cu_seqlens_q is not None or call.epilogues or of["sinks"] is not None:
        return True
    if not call.dropout:
        return False
    if of["rng_state"] is None and info.randomness == "error":
        raise ValueError('vmap has randomness "error" with dropout; accepted: "same" or "different"')
    return of["rng_state"] is not None or queries is None or info.randomness == "same"


def _looped(call: Any, size: int, given: Sequence[Any], dims: Dims) -> list[Tensor]:
    """The stacked results of ``size`` calls. If size is 0, a call with zeros determines the shapes."""
    if size == 0:
        zeros = zip(given, dims, strict=True)
        one = call([x if dim is None else x.new_zeros(x.movedim(dim, 0).shape[1:]) for x, dim in zeros])
        return [x.new_empty((0, *x.shape)) for x in one]
    found = [
        call([x if dim is None else x.select(dim, i) for x, dim in zip(given, dims, strict=True)])
        for i in range(size)
    ]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def _flat(size: int, x: Tensor | None, dim: int | None) -> Tensor | None:
    """``x``, (batch, ...) in each call, as (size * batch, ...) of the merged call."""
    if x is None:
        return None
    return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _merged(size: int, tensors: Sequence[Any], dims: Dims, *, own_bias: bool = False) -> list[Any]:
    """Tensors of one call that has the sequences of all calls; own_bias: give each sequence a separate bias."""
    of = dict(zip(_FIELDS, zip(tensors, dims, strict=True), strict=False))
    q, at = of["q"]
    batch = q.shape[0] if at is None else q.movedim(at, 0).shape[1]
    merged: dict[str, Any] = {name: x for name, (x, _) in of.items()}
    for name in _BY_SEQUENCE:
        merged[name] = _flat(size, *of[name])
    for name, rank in _RANKS.items():
        x, dim = of[name]
        shared = x is not None and dim is None and (x.dim() == 1 or (x.dim() == 4 and x.shape[0] == 1))
        if x is None or (shared and not (own_bias and name == "bias")):
            continue
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        if x.dim() == 1 + rank and name == "alibi_slopes":  # (nheads,) each
            x = x.unsqueeze(1)
        merged[name] = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
    return [*merged.values(), *tensors[NUM_TENSORS:]]
