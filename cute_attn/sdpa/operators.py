"""PyTorch's attention operators on the kernels: arguments, layouts of outputs, conventions of lse and dropout states.

Outputs have the shapes, strides and dtypes of PyTorch's meta functions (``torch/_meta_registrations.py``), which
compilers rely on; the one exception is a dtype in :func:`_numbers`. They run below autograd: each calls kernels, never
:func:`cute_attn.attention`, which would record a second graph. CPU tensors are computed by :mod:`cute_attn.reference`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cute_attn.host import memory, record
from cute_attn.host.activation import Options
from cute_attn.host.bias import four_dims
from cute_attn.sdpa.calls import Inputs, Request, _is_capturing, request_of, why_not, why_not_drawn
from cute_attn.sdpa.plans import Results, backward, forward

# ---- calls ----


def _asked(
    backend: str,
    inputs: tuple,
    causal: bool,
    dropout_p: float,
    scale: float | None,
    *,
    learns: bool = False,
) -> Request:
    """The request of tensors (batch, heads, rows, dim); others stay as they are, to be declined."""
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in inputs[:3])
    own = Inputs(q, k, v, inputs[3])
    return request_of(backend, own, causal=causal, dropout_p=dropout_p, scale=scale, learns=learns)


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

    heads_first: tensors are (batch, heads, rows, dim). wants_lse, debug: return lse, and the softmax.
    """
    capturing = _is_capturing(inputs[0].device)
    reason = why_not(request) or why_not_drawn(request, options.rng, capturing)
    if reason is None and debug and not request.dropout_p:  # PyTorch raises, so that no backward follows
        reason = "return_debug_mask is set without dropout; accepted: with dropout"
    if reason is not None:
        return reason
    rows = request.longest[0]
    return forward(
        request,
        inputs,
        options.rng,
        heads_first=heads_first,
        wants_lse=wants_lse,
        lse_rows=-(-rows // 32) * 32 if request.backend == "efficient" and wants_lse else rows,
        return_softmax=debug,
    )


def _backward(
    request: Request,
    inputs: tuple,
    outer: tuple[Tensor, Tensor, Tensor],
    state: Tensor | tuple[Tensor, Tensor],
    *,
    heads_first: bool = True,
    bias_gradient: bool = False,
) -> tuple[Tensor, ...] | str:
    """The same of a backward; outer: the gradient of out, out and lse; bias_gradient: return the bias's."""
    return why_not(request) or backward(
        request, inputs, outer, state, heads_first=heads_first, bias_gradient=bias_gradient
    )


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
    request = _asked("flash", inputs, is_causal, dropout_p, scale)
    found = _forward(request, options, inputs, debug=return_debug_mask)
    if isinstance(found, str):
        return found
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
    return _backward(_asked("flash", inputs, is_causal, dropout_p, scale), inputs, grads, philox_seed)


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
    request = _asked("efficient", inputs, is_causal, dropout_p, scale)
    found = _forward(request, options, inputs, wants_lse=compute_log_sumexp)
    if isinstance(found, str):
        return found
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
    request, state = _asked("efficient", inputs, is_causal, dropout_p, scale), (philox_seed, philox_offset)
    found = _drawn_by_pytorch(dropout_p, philox_seed) or _backward(
        request, inputs, grads, state, bias_gradient=bias_gradient
    )
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
    bias = None if attn_bias is None else four_dims(attn_bias)  # only cuDNN's may have fewer
    inputs = (query, key, value, bias, None, None, None, None)
    request = _asked("cudnn", inputs, is_causal, dropout_p, scale, learns=compute_log_sumexp)
    found = _forward(request, options, inputs)
    if isinstance(found, str):
        return found
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
    bias = None if attn_bias is None else four_dims(attn_bias)
    inputs = (query, key, value, bias, None, None, None, None)
    grads = (grad_out, out, logsumexp.reshape(logsumexp.shape[:3]))
    request = _asked("cudnn", inputs, is_causal, dropout_p, scale, learns=True)
    state = (philox_seed, philox_offset)
    return _drawn_by_pytorch(dropout_p, philox_seed) or _backward(request, inputs, grads, state)


def _asked_in_rows(
    inputs: tuple,
    causal: bool,
    dropout_p: float,
    scale: float | None,
    window: tuple[int | None, int | None],
    longest: tuple[int, int],
) -> Request:
    """The request of tensors with rows before heads; longest: ignored on batches."""
    return request_of(
        "flash",
        Inputs(*inputs),
        causal=causal,
        dropout_p=dropout_p,
        scale=scale,
        window=window,
        longest=None if inputs[4] is None else longest,
    )


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
    window = (window_size_left, window_size_right)
    request = _asked_in_rows(inputs, is_causal, dropout_p, scale, window, (max_q, max_k))
    found = _forward(request, options, inputs, heads_first=False, debug=return_debug_mask)
    if isinstance(found, str):
        return found
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
        options, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, False, scale=scale,
        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
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
    window = (window_size_left, window_size_right)
    request = _asked_in_rows(inputs, is_causal, dropout_p, scale, window, (max_q, max_k))
    return _backward(request, inputs, grads, rng_state, heads_first=False)


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
