"""Attention under torch.func's transforms: ``grad``, ``vjp``, ``jacrev``, ``jvp``, ``jacfwd`` and ``vmap``.

A call whose tensors have tangents, from ``jvp`` or ``torch.autograd.forward_ad``, becomes one call of the operator
``cute_attn::jvp``, which returns the outputs and their tangents.

Gradients and tangents are differentiable once more, here and without transforms: by the operator ``cute_attn::second``.

Under ``vmap``, a batch of calls becomes one call with all their sequences. Calls that cannot be merged run in turn:
with packed sequences, with epilogues, or with batched sinks or dropout states, which a call has only once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.backward import Needed
from cute_attn.host.call import ATTENTION, BIAS, NUM_TENSORS, SLOPES, Call
from cute_attn.host.dispatch import DIFFERENTIABLE, LEVEL, NO_GRADIENT, NO_TANGENT, not_in_jvp, unpacked

_FIELDS = Call._fields[:NUM_TENSORS]
_BY_SEQUENCE = ("q", "k", "v", "seqused_q", "seqused_k")
INDICES = tuple(_FIELDS.index(name) for name in DIFFERENTIABLE)
EPILOGUES = Call._fields.index("epilogues") - NUM_TENSORS - 1
"""Position of the epilogues' names in ``rest``: the arguments of a call that follow its tensors."""
_RANKS = {"alibi_slopes": 1, "bias": 4}
Dims = tuple[int | None, ...]
Some = Sequence[Any]
Results = tuple[Tensor | None, ...]
_NO_MORE = (
    "a third derivative of attention, or a tangent of its tangent, is asked for; accepted: first and second ones, as "
    "gradients of gradients, gradients of tangents and tangents of gradients"
)


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


def with_tangents(call: Call) -> tuple[Tensor, Tensor] | None:
    """out and lse as dual tensors with their tangents; None if no tensor of the call has a visible tangent.

    Under a transform other than ``jvp``, tangents belong to an outer transform, which passes them to ``_Forward.jvp``.
    """
    primals, tangents = unpacked((*call[:NUM_TENSORS], *call.epilogue_tensors))
    if all(tangent is None for tangent in tangents):
        return None
    with before_operators():
        outputs = _jvp(call[NUM_TENSORS + 1 :], primals, tangents)
    pairs = zip(outputs[:2], outputs[2:], strict=True)
    out, lse = (forward_ad.make_dual(*pair, level=LEVEL) for pair in pairs)
    return out, lse


def refuse_out(call: Call) -> None:
    """Raise NotImplementedError if a tensor of the call has a tangent, since ``out`` cannot have one."""
    _, tangents = unpacked((*call[:NUM_TENSORS], *call.epilogue_tensors))
    if any(tangent is not None for tangent in tangents):
        raise not_in_jvp("out is given", ": a call without out")


def _jvp(rest: tuple, tensors: Some, tangents: Some) -> tuple[Tensor, ...]:
    """out, lse and their tangents; tangents: a tangent or None for each tensor."""
    wanted = _wanted(rest, tensors, tangents)
    return _Jvp.apply(rest, len(wanted), *wanted, *tensors)


def _wanted(rest: tuple, tensors: Some, tangents: Some) -> Results:
    if tangents[SLOPES] is not None:
        raise NotImplementedError(NO_TANGENT)
    aux = Call.joined(tensors, rest).aux
    if aux:
        raise not_in_jvp(f"return_{aux} is True", ": False")
    return *(tangents[i] for i in INDICES), *tangents[NUM_TENSORS:]


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
        ctx.rest, ctx.epilogues = rest, epilogues_of(rest)
        if len(output) > 2:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple:
        *tensors, out, lse = ctx.saved_tensors
        given = (grad_out, grad_lse, out, lse, *tensors)
        return None, *_placed(gradients(ctx.rest, _flags(ctx.needs_input_grad[1:]), given))

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


def gradients(rest: tuple, needed: Needed, given: Some) -> Results:
    """The gradients of a call, which are differentiable again.

    needed: flags for q, k, v, bias, sinks and the tensors of epilogues.
    given: gradients of out and lse, out, lse, and the call's tensors.
    """
    grad_out, grad_lse, out, lse, *tensors = given
    if not any(needed) or (grad_out is None and grad_lse is None):
        return (None,) * len(needed)
    found = _Backward.apply(rest, needed, grad_out, grad_lse, out.detach(), lse.detach(), *tensors)
    return _spread(needed, found)


def _seconds(rest: tuple, needed: Needed, tangents: Some, cotangents: Some, tensors: Some) -> Results:
    """J t, and the gradient of u . J t, see :mod:`cute_attn.reference.second`. needed: flags for u, and as above."""
    outer = zip(needed, cotangents, strict=False)
    needed = (*(wanted and x is not None for wanted, x in outer), *needed[len(cotangents) :])
    zeros = all(x is None for x in tangents) or all(x is None for x in cotangents)
    if zeros or not any(needed):
        return (None,) * len(needed)
    return _spread(needed, _Second.apply(rest, needed, *tangents, *cotangents, *tensors))


def _spread(needed: Sequence[bool], found: Sequence[Any]) -> tuple[Any, ...]:
    """``found``, with None between for what is not needed."""
    own = iter(found)
    return tuple([next(own) if wanted else None for wanted in needed])


def _flags(asked: Sequence[bool]) -> tuple[bool, ...]:
    """Flags for q, k, v, bias, sinks and the tensors of epilogues, of those for a call's tensors."""
    if asked[SLOPES]:
        raise NotImplementedError(NO_GRADIENT)
    return (*(asked[i] for i in INDICES), *asked[NUM_TENSORS:])


def _placed(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The inverse of :func:`_flags`, for gradients."""
    found: list[Tensor | None] = [None] * NUM_TENSORS
    for i, x in zip(INDICES, grads, strict=False):
        found[i] = x
    return [*found, *grads[len(INDICES) :]]


def _sums(some: Some, others: Some) -> Results:
    pairs = zip(some, others, strict=True)
    return tuple([y if x is None else x if y is None else x + y for x, y in pairs])


class _Derivative(torch.autograd.Function):
    """A derivative, which cannot be differentiated again unless a subclass does so."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:
        raise NotImplementedError(_NO_MORE)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> tuple:
        raise NotImplementedError(_NO_MORE)


class _Backward(_Derivative):
    """Arguments: ``rest``, flags of needed gradients, gradients of out and lse, out, lse, tensors of :class:`_Forward`.

    Returns the needed gradients.
    """

    @staticmethod
    def forward(rest: tuple, needed: Needed, *given: Any) -> tuple[Tensor, ...]:
        arguments = Call.joined(given[4:], rest).values(ATTENTION)
        *grads, own = torch.ops.cute_attn.backward.default(*given[:4], list(needed), *arguments)
        return tuple(x for x, wanted in zip((*grads, *own), needed, strict=True) if wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        rest, needed, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        ctx.rest, ctx.needed, ctx.epilogues = rest, needed, epilogues_of(rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        """Gradients by the gradients of out and lse, and by the tensors, from which out and lse follow."""
        asked, (grad_out, grad_lse, _, _, *tensors) = ctx.needs_input_grad[2:], ctx.saved_tensors
        needed, tangents = (*asked[:2], *_flags(asked[4:])), _spread(ctx.needed, grads)
        found = _seconds(ctx.rest, needed, tangents, (grad_out, grad_lse), tensors)
        return None, None, *found[:2], None, None, *_placed(found[2:])

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *dots: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse, out, lse, *tensors = ctx.saved_tensors
        needed, tangents = (False, False, *ctx.needed), _wanted(ctx.rest, tensors, dots[4:])
        of_tensors = _seconds(ctx.rest, needed, tangents, (grad_out, grad_lse), tensors)[2:]
        of_outputs = gradients(ctx.rest, ctx.needed, (*dots[:2], out, lse, *tensors))
        sums = _sums(of_tensors, of_outputs)
        return tuple([x for x, wanted in zip(sums, ctx.needed, strict=True) if wanted])

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
        bias, at = tensors[BIAS], dims[4 + BIAS]
        if needed[3] and (bias.shape[0] if at is None else bias.movedim(at, 0).shape[1]) == 1:
            found[-1] = found[-1].sum(1, keepdim=True)
        return tuple(found), (0,) * len(found)


class _Jvp(_Derivative):
    """Arguments: ``rest``, the number of tangents, a tangent or None for each of q, k, v, bias, sinks and the tensors
    of epilogues, and the tensors of :class:`_Forward`.

    Returns out, lse and their tangents.
    """

    @staticmethod
    def forward(rest: tuple, number: int, *given: Any) -> tuple[Tensor, ...]:
        tangents, tensors = list(given[:number]), given[number:]
        return torch.ops.cute_attn.jvp.default(tangents, *Call.joined(tensors, rest).values(ATTENTION))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        rest, number, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, *output[:2])
        ctx.rest, ctx.number, ctx.epilogues = rest, number, epilogues_of(rest)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *of_dots: Tensor | None
    ) -> tuple:
        *given, out, lse = ctx.saved_tensors
        tangents, tensors = given[: ctx.number], given[ctx.number :]
        moved, asked = ctx.needs_input_grad[2:][: ctx.number], ctx.needs_input_grad[2 + ctx.number :]
        needed, primals = _flags(asked), (out, lse, *tensors)
        found = gradients(ctx.rest, needed, (grad_out, grad_lse, *primals))
        more = _seconds(ctx.rest, (False, False, *needed), tangents, of_dots, tensors)[2:]
        of_tangents = gradients(ctx.rest, moved, (*of_dots, *primals))
        return None, None, *of_tangents, *_placed(_sums(found, more))

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


class _Second(_Derivative):
    """Arguments: ``rest``, flags of needed results, a tangent or None for each of q, k, v, bias, sinks and the tensors
    of epilogues, gradients of out and lse, and the tensors of :class:`_Forward`.

    Returns the needed ones of what the operator ``cute_attn::second`` returns.
    """

    @staticmethod
    def forward(rest: tuple, needed: tuple[bool, ...], *given: Any) -> tuple[Tensor, ...]:
        number = len(needed) - 2
        tangents, cotangents, tensors = given[:number], given[number : number + 2], given[number + 2 :]
        arguments = Call.joined(tensors, rest).values(ATTENTION)
        found = torch.ops.cute_attn.second.default(list(tangents), *cotangents, list(needed), *arguments)
        return tuple(x for x, wanted in zip(found, needed, strict=True) if wanted)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, rest: tuple, needed: tuple, *given: Any) -> tuple[tuple, tuple]:
        found = _looped(lambda own: _Second.apply(rest, needed, *own), info.batch_size, given, in_dims[2:])
        return tuple(found), (0,) * len(found)


def epilogues_of(rest: tuple) -> list[Any]:
    """The epilogues that a call names, which must live as long as the call may be repeated."""
    return [user_epilogue(item.partition(":")[0]) for item in rest[EPILOGUES]]


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
