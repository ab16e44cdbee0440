"""PyTorch's attention operators on the kernels: arguments, layouts of outputs, conventions of lse and dropout states.

Outputs have the shapes, strides and dtypes of PyTorch's meta functions (``torch/_meta_registrations.py``), which
compilers rely on; the one exception is a dtype in :func:`_numbers`. They run below autograd: each calls kernels, never
:func:`cute_attn.attention`, which would record a second graph. CPU tensors are computed by :mod:`cute_attn.reference`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.host import memory, record
from cute_attn.host.activation import Options
from cute_attn.host.bias import four_dims
from cute_attn.sdpa.calls import Inputs, Request, _is_capturing, request_of, why_not, why_not_drawn
from cute_attn.sdpa.plans import Results, backward, forward

# ---- calls ----


class Question(NamedTuple):
    """An operator's arguments other than tensors, as far as they decide who serves a call.

    Attributes:
        backend: of ``cute_attn.host.activation.BACKENDS``.
        causal, dropout_p, scale: the operator's.
        heads_first: whether tensors are (batch, heads, rows, dim).
        wants_lse, debug: whether a forward returns lse and the softmax.
        bias_gradient: whether a backward returns the bias's.
        window, longest, learns: see :func:`cute_attn.sdpa.calls.request_of`.
    """

    backend: str
    causal: bool
    dropout_p: float
    scale: float | None
    heads_first: bool = True
    wants_lse: bool = True
    debug: bool = False
    bias_gradient: bool = False
    window: tuple[int | None, int | None] = (None, None)
    longest: tuple[int, int] | None = None
    learns: bool = False


def _request(question: Question, inputs: tuple) -> Request:
    return request_of(
        question.backend,
        _dense(*inputs[:4]) if question.heads_first else Inputs(*inputs),
        causal=question.causal,
        dropout_p=question.dropout_p,
        scale=question.scale,
        window=question.window,
        longest=question.longest,
        learns=question.learns,
    )


def _dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Inputs:
    """From (batch, heads, rows, dim); tensors with other dimensions stay as they are, to be declined."""
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value))
    return Inputs(q, k, v, bias)


def _forward(asked: Question, options: Options, inputs: tuple) -> tuple[Results, Request] | str:
    """A forward's results, or the reason why kernels do not serve it."""
    request = _request(asked, inputs)
    reason = (
        why_not(request)
        or why_not_drawn(request, options.rng, _is_capturing(inputs[0].device))
        or _debug_mask_reason(asked.debug, asked.dropout_p)
    )
    if reason is not None:
        return reason
    rows = request.longest[0]
    found = forward(
        request,
        inputs,
        options.rng,
        heads_first=asked.heads_first,
        wants_lse=asked.wants_lse,
        lse_rows=-(-rows // 32) * 32 if asked.backend == "efficient" and asked.wants_lse else rows,
        return_softmax=asked.debug,
    )
    return found, request


def _backward(
    asked: Question,
    inputs: tuple,
    outer: tuple[Tensor, Tensor, Tensor],
    state: Tensor | tuple[Tensor, Tensor],
) -> tuple[Tensor, ...] | str:
    """The same of a backward; outer: the gradient of out, out and lse."""
    request = _request(asked, inputs)
    return why_not(request) or backward(
        request, inputs, outer, state, heads_first=asked.heads_first, bias_gradient=asked.bias_gradient
    )


def _debug_mask_reason(return_debug_mask: bool, dropout_p: float) -> str | None:
    """PyTorch raises for these arguments, so that no backward follows."""
    if return_debug_mask and not dropout_p:
        return "return_debug_mask is set without dropout; accepted: with dropout"
    return None


def _fresh(like: Tensor, *kinds: tuple) -> list[Tensor]:
    """Memory that is never read, on ``like``'s device; kinds: shapes, strides and dtypes."""
    if like.is_cuda and like.get_device() == memory.current_device():
        return [record.empty(like, *kind) for kind in kinds]
    return [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in kinds]


_NUMBER, _WORD, _TWO_WORDS = ((), (), torch.int64), ((), (), torch.uint64), ((2,), (1,), torch.uint64)


def _numbers(found: Results) -> Sequence[Tensor]:
    """Seed and offset as two tensors, each aligned to 16 bytes: compiled code asserts that.

    PyTorch's are int64. Those of a mask drawn here are uint64, and the backward recognizes them by it
    (:func:`drawn_here`): autograd, hooks of saved tensors and compiled code keep a dtype.
    """
    if found.state is None:
        return _fresh(found.out, _NUMBER, _NUMBER)
    (offset,) = _fresh(found.out, _NUMBER)
    record.step(Tensor.copy_, offset, found.state[1])
    return found.state[0].view(torch.uint64), offset.view(torch.uint64)


def drawn_here(seed: Tensor) -> bool:
    """True if a served forward of memory-efficient or cuDNN attention drew the dropout mask with this seed.

    Its backward must run here, whatever is active by then. PyTorch's kernel of memory-efficient attention would read
    the seed on the host, but it is on the GPU; cuDNN's would draw another mask. Flash attention's masks and states are
    PyTorch's, so that either can compute its backward.
    """
    return seed.dtype == torch.uint64


def _drawn_by_pytorch(dropout_p: float, seed: Tensor) -> str | None:
    """Why a backward is PyTorch's to compute."""
    if dropout_p and not drawn_here(seed):
        return "the forward drew its dropout mask by PyTorch's kernel; accepted: a forward that was served"
    return None


def _flash_state(found: Results) -> Sequence[Tensor]:
    """rng_state, an unused tensor and the debug mask."""
    out, state = found.out, found.state
    if state is None:
        return _fresh(out, _TWO_WORDS, _WORD, ((0,), (1,), out.dtype))
    unused, debug = _fresh(out, _WORD, ((0,), (1,), out.dtype))
    return state.view(torch.uint64), unused, debug if found.softmax is None else _debug_mask(found.softmax)


def _debug_mask(softmax: Tensor) -> Tensor:
    """The softmax with its sizes rounded up to multiples of 128."""
    rows, keys = softmax.shape[2:]
    return torch.nn.functional.pad(softmax, (0, -keys % 128, 0, -rows % 128))


# ---- PyTorch's operators: each returns its outputs, or the reason why not ----


def flash_forward(
    options: Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_flash_attention``."""
    inputs = (query, key, value, None, None, None, None, None)
    question = Question("flash", is_causal, dropout_p, scale, debug=return_debug_mask)
    served = _forward(question, options, inputs)
    if isinstance(served, str):
        return served
    found, request = served
    return found.out, found.lse, None, None, *request.longest, *_flash_state(found)


def flash_backward(
    options: Options,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    inputs, grads = (query, key, value, None, None, None, None, None), (grad_out, out, logsumexp)
    return _backward(Question("flash", is_causal, dropout_p, scale), inputs, grads, philox_seed)


def efficient_forward(
    options: Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_efficient_attention``."""
    inputs = (query, key, value, attn_bias, None, None, None, None)
    question = Question("efficient", is_causal, dropout_p, scale, wants_lse=compute_log_sumexp)
    served = _forward(question, options, inputs)
    if isinstance(served, str):
        return served
    found, _ = served
    lse = found.lse
    if not compute_log_sumexp:
        shape = (*lse.shape[:2], 0)
        (lse,) = _fresh(lse, (shape, memory.contiguous_strides(shape), lse.dtype))
    return found.out, lse, *_numbers(found)


def efficient_backward(
    options: Options,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_efficient_attention_backward``."""
    inputs, grads = (query, key, value, attn_bias, None, None, None, None), (grad_out, out, logsumexp)
    bias_gradient = attn_bias is not None and bool(grad_input_mask[3])
    question = Question("efficient", is_causal, dropout_p, scale, bias_gradient=bias_gradient)
    state = (philox_seed, philox_offset)
    found = _drawn_by_pytorch(dropout_p, philox_seed) or _backward(question, inputs, grads, state)
    if isinstance(found, str):
        return found
    dq, dk, dv, *dbias = found
    return dq, dk, dv, _in_rows_of_16(dbias[0]) if dbias else None


def _in_rows_of_16(x: Tensor) -> Tensor:
    """A copy with a row stride that is a multiple of 16 elements."""
    shape = (*x.shape[:-1], -(-x.shape[-1] // 16) * 16)
    (wide,) = _fresh(x, (shape, memory.contiguous_strides(shape), x.dtype))
    found = wide[..., : x.shape[-1]]
    record.step(Tensor.copy_, found, x)
    return found


def _four_dims(bias: Tensor | None) -> Tensor | None:
    """A bias with four dimensions; only the cuDNN backend may be given one with fewer."""
    return None if bias is None else four_dims(bias)


def cudnn_forward(
    options: Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_cudnn_attention``."""
    inputs = (query, key, value, _four_dims(attn_bias), None, None, None, None)
    question = Question("cudnn", is_causal, dropout_p, scale, learns=compute_log_sumexp)
    served = _forward(question, options, inputs)
    if isinstance(served, str):
        return served
    found, request = served
    return found.out, found.lse.unsqueeze(-1), None, None, *request.longest, *_numbers(found), None


def cudnn_backward(
    options: Options,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple | str:
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""
    inputs = (query, key, value, _four_dims(attn_bias), None, None, None, None)
    grads = (grad_out, out, logsumexp.reshape(logsumexp.shape[:3]))
    question = Question("cudnn", is_causal, dropout_p, scale, learns=True)
    state = (philox_seed, philox_offset)
    return _drawn_by_pytorch(dropout_p, philox_seed) or _backward(question, inputs, grads, state)


def rows_forward(
    options: Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple | str:
    """``aten::_flash_attention_forward``: rows before heads, batches or packed sequences.

    Its backward does not know seqused_k, alibi_slopes, block_table and num_splits; PyTorch computes it without them.
    The backward of a call with the first two is served exactly if that of the same call without them is.
    """
    if block_table is not None:
        return "block_table needs kernels for paged keys; accepted: None"
    inputs = (query, key, value, None, cum_seq_q, cum_seq_k, seqused_k, alibi_slopes)
    question = Question(
        "flash",
        is_causal,
        dropout_p,
        scale,
        heads_first=False,
        debug=return_debug_mask,
        window=(window_size_left, window_size_right),
        longest=None if cum_seq_q is None else (max_q, max_k),  # ignored on batches
    )
    served = _forward(question, options, inputs)
    if isinstance(served, str):
        return served
    found, _ = served
    return found.out, found.lse, *_flash_state(found)


def rows_forward_into(
    options: Options,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | str:
    """``aten::_flash_attention_forward_no_dropout_inplace``: writes ``out``, returns lse, has no backward."""
    found = rows_forward(
        options,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        False,
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
    )
    if isinstance(found, str):
        return found
    record.step(Tensor.copy_, out, found[0])
    return found[1]


def rows_backward(
    options: Options,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple | str:
    """``aten::_flash_attention_backward``."""
    inputs = (query, key, value, None, cum_seq_q, cum_seq_k, None, None)
    grads = (grad_out, out, logsumexp)
    question = Question(
        "flash",
        is_causal,
        dropout_p,
        scale,
        heads_first=False,
        window=(window_size_left, window_size_right),
        longest=None if cum_seq_q is None else (max_q, max_k),  # ignored on batches
    )
    return _backward(question, inputs, grads, rng_state)


OPERATORS: dict[str, dict[str, Callable[..., tuple | Tensor | str]]] = {
    "flash": {
        "_scaled_dot_product_flash_attention": flash_forward,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_flash_attention_forward": rows_forward,
        "_flash_attention_forward_no_dropout_inplace": rows_forward_into,
        "_flash_attention_backward": rows_backward,
    },
    "efficient": {
        "_scaled_dot_product_efficient_attention": efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    },
    "cudnn": {
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    },
}
"""The operators of each backend; not every version of torch has all."""

STATES = {
    "_scaled_dot_product_efficient_attention_backward": 7,
    "_scaled_dot_product_cudnn_attention_backward": 6,
}
"""The position of philox_seed among the arguments of each backward that asks :func:`drawn_here`."""
