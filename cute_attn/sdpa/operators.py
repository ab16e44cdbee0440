"""PyTorch's attention operators on the kernels: arguments, output layouts, conventions of lse and dropout states.

Outputs have the shapes, strides and dtypes of PyTorch's meta functions (``torch/_meta_registrations.py``), which
compilers rely on, except for a dtype in :func:`_numbers`. Operators run below autograd: they call kernels, never
:func:`cute_attn.attention`, which would record a second graph. CPU tensors are computed by :mod:`cute_attn.reference`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import memory, record
from cute_attn.host.activation import BACKENDS, Options
from cute_attn.host.bias import four_dims
from cute_attn.host.checks import check_like
from cute_attn.sdpa.calls import Inputs, Request, _is_capturing, request_of, why_not, why_not_drawn
from cute_attn.sdpa.plans import Results, backward, forward

# ---- calls ----


def _asked(backend: str, given: Any, bias: Tensor | None = None, *, learns: bool = False) -> Request:
    """The request of tensors (batch, heads, rows, dim). Other ranks are kept, and declined later."""
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (given.query, given.key, given.value))
    options = {"causal": given.is_causal, "dropout_p": given.dropout_p, "scale": given.scale}
    return request_of(backend, Inputs(q, k, v, bias), **options, learns=learns)


def _forward(
    request: Request,
    options: Options,
    inputs: tuple,
    *,
    heads_first: bool = True,
    wants_lse: bool = True,
    debug: bool = False,
) -> Results | str:
    """A forward's results, or the reason why kernels do not serve it.

    heads_first: tensors are (batch, heads, rows, dim). wants_lse: return lse. debug: return the softmax.
    """
    capturing = _is_capturing(inputs[0].device)
    reason = why_not(request) or why_not_drawn(request, options.rng, capturing)
    if reason is None and debug and not request.dropout_p:  # PyTorch raises, so that no backward follows
        reason = "return_debug_mask is set without dropout; accepted: with dropout"
    if reason is not None:
        return reason
    rows = request.longest[0]
    lse_rows = -(-rows // 32) * 32 if request.backend == "efficient" and wants_lse else rows
    layout: dict[str, Any] = {"heads_first": heads_first, "lse_rows": lse_rows}
    return forward(request, inputs, options.rng, **layout, wants_lse=wants_lse, return_softmax=debug)


def _backward(
    request: Request,
    inputs: tuple,
    outer: tuple[Tensor, Tensor, Tensor],
    state: Tensor | tuple[Tensor, Tensor],
    *,
    heads_first: bool = True,
    bias_gradient: bool = False,
) -> tuple[Tensor, ...] | str:
    """Gradients, or the reason why kernels do not serve a backward. outer: gradient of out, out, lse."""
    return why_not(request) or backward(
        request, inputs, outer, state, heads_first=heads_first, bias_gradient=bias_gradient
    )


def _fresh(like: Tensor, *kinds: tuple) -> list[Tensor]:
    """Uninitialized tensors on ``like``'s device. kinds: for each tensor a shape, strides and a dtype."""
    if like.is_cuda and like.get_device() == memory.current_device():
        return [record.empty(like, *kind) for kind in kinds]
    return [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in kinds]


_NUMBER, _WORD, _TWO_WORDS = ((), (), torch.int64), ((), (), torch.uint64), ((2,), (1,), torch.uint64)


def _numbers(found: Results) -> Sequence[Tensor]:
    """Seed and offset as two tensors, each aligned to 16 bytes, since compiled code asserts the alignment.

    PyTorch's are int64. For a mask drawn here they are uint64, by which the backward recognizes them
    (:func:`drawn_here`): autograd, hooks of saved tensors and compiled code preserve a dtype.
    """
    if found.state is None:
        return _fresh(found.out, _NUMBER, _NUMBER)
    (offset,) = _fresh(found.out, _NUMBER)
    record.step(Tensor.copy_, offset, found.state[1])
    return found.state[0].view(torch.uint64), offset.view(torch.uint64)


def drawn_here(seed: Tensor) -> bool:
    """True if a served forward of memory-efficient or cuDNN attention drew the dropout mask with this seed.

    The backward must then run here, even after :func:`cute_attn.sdpa.restore`. PyTorch's memory-efficient kernel would
    read the seed on the host, but it is on the GPU; cuDNN would draw another mask. For flash attention, masks and
    states are the same as PyTorch's, so its backward can run here or in PyTorch.
    """
    return seed.dtype == torch.uint64


def _drawn_by_pytorch(given: Any) -> str | None:
    """Why PyTorch must compute a backward with dropout, or None."""
    if given.dropout_p and not drawn_here(given.philox_seed):
        return "the forward drew its dropout mask by PyTorch's kernel; accepted: a forward that was served"
    return None


def _flash_state(found: Results) -> Sequence[Tensor]:
    """The last three outputs of flash attention: rng_state, an unused tensor and the debug mask."""
    out, state = found.out, found.state
    if state is None:
        return _fresh(out, _TWO_WORDS, _WORD, ((0,), (1,), out.dtype))
    unused, debug = _fresh(out, _WORD, ((0,), (1,), out.dtype))
    return state.view(torch.uint64), unused, debug if found.softmax is None else _debug_mask(found.softmax)


def _debug_mask(softmax: Tensor) -> Tensor:
    """The softmax padded with zeros, so that its last two sizes are multiples of 128."""
    rows, keys = softmax.shape[2:]
    return torch.nn.functional.pad(softmax, (0, -keys % 128, 0, -rows % 128))


# ---- PyTorch's operators: each returns its outputs, or the reason why not ----

OPERATORS: dict[str, dict[str, Callable[..., tuple | Tensor | str]]] = {name: {} for name in BACKENDS}
"""Implementations by backend and name, for the operators that this version of torch has."""


def _of(backend: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for implementations of ``aten::name``, which get options and arguments named as in PyTorch's schema."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(name)

        @functools.wraps(run)
        def implementation(*args: Any, **kwargs: Any) -> tuple | Tensor | str:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return run(given.arguments.pop("options"), SimpleNamespace(**given.arguments))

        implementation.__signature__ = signature  # type: ignore[attr-defined]
        if hasattr(torch.ops.aten, name):
            OPERATORS[backend][name] = implementation
        return implementation

    return decorate


def _signature(name: str) -> inspect.Signature:
    either, own = inspect.Parameter.POSITIONAL_OR_KEYWORD, getattr(torch.ops.aten, name, None)
    parameters = [inspect.Parameter("options", either)]
    for one in () if own is None else own.default._schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if one.kwarg_only else either
        default = one.default_value if one.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(one.name.rstrip("_"), kind, default=default))
    return inspect.Signature(parameters)


def _inputs(given: Any, bias: Tensor | None = None) -> tuple:
    return given.query, given.key, given.value, bias, None, None, None, None


@_of("flash", "_scaled_dot_product_flash_attention")
def flash_forward(options: Options, given: Any) -> tuple | str:
    request = _asked("flash", given)
    found = _forward(request, options, _inputs(given), debug=given.return_debug_mask)
    if isinstance(found, str):
        return found
    return found.out, found.lse, None, None, *request.longest, *_flash_state(found)


@_of("flash", "_scaled_dot_product_flash_attention_backward")
def flash_backward(options: Options, given: Any) -> tuple | str:
    grads = (given.grad_out, given.out, given.logsumexp)
    return _backward(_asked("flash", given), _inputs(given), grads, given.philox_seed)


@_of("efficient", "_scaled_dot_product_efficient_attention")
def efficient_forward(options: Options, given: Any) -> tuple | str:
    inputs, wants_lse = _inputs(given, given.attn_bias), given.compute_log_sumexp
    found = _forward(_asked("efficient", given, inputs[3]), options, inputs, wants_lse=wants_lse)
    if isinstance(found, str):
        return found
    lse = found.lse
    if not wants_lse:
        shape = (*lse.shape[:2], 0)
        (lse,) = _fresh(lse, (shape, memory.contiguous_strides(shape), lse.dtype))
    return found.out, lse, *_numbers(found)


@_of("efficient", "_scaled_dot_product_efficient_attention_backward")
def efficient_backward(options: Options, given: Any) -> tuple | str:
    bias, state = given.attn_bias, (given.philox_seed, given.philox_offset)
    grads = (given.grad_out, given.out, given.logsumexp)
    wanted = bias is not None and given.grad_input_mask[3]
    found = _drawn_by_pytorch(given) or _backward(
        _asked("efficient", given, bias), _inputs(given, bias), grads, state, bias_gradient=bool(wanted)
    )
    if isinstance(found, str):
        return found
    dq, dk, dv, *dbias = found
    return dq, dk, dv, _in_rows_of_16(dbias[0]) if dbias else None


def _in_rows_of_16(x: Tensor) -> Tensor:
    """A copy whose row stride is a multiple of 16 elements."""
    shape = (*x.shape[:-1], -(-x.shape[-1] // 16) * 16)
    (wide,) = _fresh(x, (shape, memory.contiguous_strides(shape), x.dtype))
    found = wide[..., : x.shape[-1]]
    record.step(Tensor.copy_, found, x)
    return found


@_of("cudnn", "_scaled_dot_product_cudnn_attention")
def cudnn_forward(options: Options, given: Any) -> tuple | str:
    bias = None if given.attn_bias is None else four_dims(given.attn_bias)  # only cuDNN's may have fewer
    request = _asked("cudnn", given, bias, learns=given.compute_log_sumexp)
    found = _forward(request, options, _inputs(given, bias))
    if isinstance(found, str):
        return found
    return found.out, found.lse.unsqueeze(-1), None, None, *request.longest, *_numbers(found), None


@_of("cudnn", "_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(options: Options, given: Any) -> tuple | str:
    bias = None if given.attn_bias is None else four_dims(given.attn_bias)
    lse, state = given.logsumexp, (given.philox_seed, given.philox_offset)
    grads = (given.grad_out, given.out, lse.reshape(lse.shape[:3]))
    request = _asked("cudnn", given, bias, learns=True)
    return _drawn_by_pytorch(given) or _backward(request, _inputs(given, bias), grads, state)


def _rows(
    given: Any, seqused_k: Tensor | None = None, slopes: Tensor | None = None, *, same_bits: bool = False
) -> tuple[Request, tuple]:
    """The request and the inputs for tensors with rows before heads: batches, or packed sequences."""
    lengths = (given.cum_seq_q, given.cum_seq_k)
    inputs = (given.query, given.key, given.value, None, *lengths, seqused_k, slopes)
    options: dict[str, Any] = {"causal": given.is_causal, "dropout_p": given.dropout_p, "scale": given.scale}
    options["same_bits"] = same_bits
    window = (given.window_size_left, given.window_size_right)
    longest = None if lengths[0] is None else (given.max_q, given.max_k)  # ignored on batches
    return request_of("flash", Inputs(*inputs), **options, window=window, longest=longest), inputs


@_of("flash", "_flash_attention_forward")
def rows_forward(options: Options, given: Any) -> tuple | str:
    """Serve ``_flash_attention_forward``, unless it has a block_table or a number of splits other than 1.

    With num_splits=1 no other sequence may change a bit of a sequence's output. The backward operator has no
    num_splits, seqused_k or alibi_slopes, here and in PyTorch, so gradients ignore them. Whether a backward is served
    does not depend on them.
    """
    if getattr(given, "block_table", None) is not None:  # not every version has it
        return "block_table needs kernels for paged keys; accepted: None"
    num_splits = getattr(given, "num_splits", None)
    if num_splits not in (None, 0, 1):
        return f"num_splits is {num_splits}; accepted: None, or 1"
    request, inputs = _rows(given, given.seqused_k, given.alibi_slopes, same_bits=num_splits == 1)
    found = _forward(request, options, inputs, heads_first=False, debug=given.return_debug_mask)
    if isinstance(found, str):
        return found
    return found.out, found.lse, *_flash_state(found)


@_of("flash", "_flash_attention_forward_no_dropout_inplace")
def rows_forward_into(options: Options, given: Any) -> Tensor | str:
    """Write the result to ``out``, except rows that no sequence owns, and return lse. This operator has no backward."""
    arguments = vars(given) | {"dropout_p": 0.0, "return_debug_mask": False}
    out, q = arguments.pop("out"), given.query
    try:
        check_like("out", out, device=q.device, dtype=q.dtype, shape=q.shape)
    except ValueError as error:
        return str(error)
    found = rows_forward(options, **arguments)
    if isinstance(found, str):
        return found
    record.step(memory.write_owned, out, found[0], given.cum_seq_q)
    return found[1]


@_of("flash", "_flash_attention_backward")
def rows_backward(options: Options, given: Any) -> tuple | str:
    request, inputs = _rows(given)
    grads = (given.grad_out, given.out, given.logsumexp)
    return _backward(request, inputs, grads, given.rng_state, heads_first=False)


STATES = {
    name: [*inspect.signature(OPERATORS[backend][name]).parameters].index("philox_seed") - 1
    for backend in ("efficient", "cudnn")
    for name in OPERATORS[backend]
    if name.endswith("_backward")
}
"""Position of philox_seed among a backward's arguments, by name, for backwards that use :func:`drawn_here`."""
