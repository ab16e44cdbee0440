"""PyTorch's attention operators on the kernels: arguments, layouts of outputs, conventions of lse and dropout states.

Outputs have the shapes, strides and dtypes of PyTorch's meta functions (``torch/_meta_registrations.py``), which
compilers rely on. They run below autograd: each calls kernels, never :func:`cute_attn.attention`, which would record a
second graph. CPU tensors are computed by :mod:`cute_attn.reference`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn import ops, random_states
from cute_attn.backward import gradients
from cute_attn.launcher import as_strided
from cute_attn.params import is_aligned, rows_are_regular
from cute_attn.sdpa.calls import BACKENDS, Call, Inputs, call_of, parameters, why_not


@dataclass(frozen=True)
class Options:
    """Arguments of :func:`activate`."""

    backends: Sequence[str] = BACKENDS
    unsupported: str = "fall_back"
    rng: str = "ours"

    def __post_init__(self) -> None:
        """Raise ValueError for what is not accepted."""
        if isinstance(self.backends, str) or not set(self.backends) <= set(BACKENDS):
            raise ValueError(
                f"backends is {self.backends!r}; accepted: a tuple of {', '.join(map(repr, BACKENDS))}"
            )
        for name, accepted in (("unsupported", ("fall_back", "error")), ("rng", ("ours", "torch"))):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; accepted: {', '.join(map(repr, accepted))}"
                )


# ---- data ----


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy where kernels cannot read its strides or its address."""
    if rows_are_regular(x) and is_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _narrow_bias(bias: Tensor) -> Tensor:
    """A bias with dimensions of stride 0 as size 1, which costs kernels less; the last one as it is."""
    dims = list(zip(bias.shape, bias.stride(), strict=True))
    shape = [1 if stride == 0 else size for size, stride in dims[:-1]]
    return _last_contiguous(as_strided(bias, (*shape, bias.shape[-1]), tuple(bias.stride())))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _prepared(inputs: Inputs, *, bias_gradient: bool = False) -> Inputs:
    """Tensors as kernels read them. A bias with a gradient keeps its shape, which is the gradient's."""
    q, k, v = map(_readable, inputs[:3])
    bias = inputs.bias
    if bias is not None:
        bias = _last_contiguous(bias) if bias_gradient else _narrow_bias(bias)
    return Inputs(q, k, v, bias, *inputs[4:])


class Results(NamedTuple):
    """A forward's: out with rows before heads, lse with +inf for a row without keys, int64 (2,) seed and offset."""

    out: Tensor
    lse: Tensor
    state: Tensor
    softmax: Tensor | None


def _forward(call: Call, inputs: Inputs, options: Options, *, return_softmax: bool = False) -> Results:
    q = inputs.q
    state = _draw(call, q.device, options.rng) if call.dropout_p else None
    params = parameters(call, _prepared(inputs), state)._replace(return_softmax=return_softmax)
    # Below autograd: the public functions would record a second graph.
    out, lse, softmax = (ops.forward_cuda if q.is_cuda else ops.forward_cpu)(params)
    if _may_see_nothing(call, inputs):
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    return Results(out, lse, q.new_empty(2, dtype=torch.int64) if state is None else state, softmax)


def _may_see_nothing(call: Call, inputs: Inputs) -> bool:
    """Whether there may be a query that sees no key."""
    if call.bias is not None or call.packed or inputs.seqused_k is not None or max(call.window) >= 0:
        return True
    return call.causal and call.backend == "flash" and call.longest[0] > call.longest[1]


def _draw(call: Call, device: torch.device, rng: str) -> Tensor:
    """Seed and offset of a mask; under rng="torch" those that PyTorch's kernel would take from its generator."""
    if rng != "torch":
        return random_states.draw(device)
    generator = _generator(device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _advance(call))
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63, offset], dtype=torch.int64, device=device)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def _advance(call: Call) -> int:
    """What PyTorch's forward adds to the generator's offset: a number for each thread or score, in fours."""
    if call.lengths[0] is not None:
        batch = call.lengths[0][0][0] - 1
    else:
        batch = call.q[0]
    planes = batch * call.q[-2]
    count = planes * 32 if call.backend == "flash" else planes * call.longest[0] * call.longest[1]
    return (count + 3) // 4 * 4


def _backward(
    call: Call,
    inputs: Inputs,
    grads: tuple[Tensor, Tensor, Tensor],
    rng_state: Tensor | tuple[Tensor, Tensor],
    *,
    bias_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and perhaps bias.

    grads: of out, then out and lse, all with rows before heads.
    """
    state = _joined(rng_state, inputs.q.device) if call.dropout_p else None
    params = parameters(call, _prepared(inputs, bias_gradient=bias_gradient), state)
    grad_out, out, lse = grads
    needed = (True, True, True, bias_gradient)
    if inputs.q.is_cuda:
        found = gradients(params, grad_out, None, out, lse, needed)
    else:
        found = torch.ops.cute_attn.backward.default(grad_out, None, out, lse, list(needed), *params)
    dq, dk, dv, dbias = found
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, dbias if bias_gradient else None


def _joined(rng_state: Tensor | tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Seed and offset as one int64 tensor."""
    if isinstance(rng_state, Tensor):
        return rng_state.view(torch.int64).to(device)
    return torch.stack([x.to(device) for x in rng_state])


# ---- layouts of PyTorch's outputs ----


def _strides_like(x: Tensor, last: int) -> tuple[int, ...]:
    """Strides of an output with the order of x's dimensions and its last size ``last``."""
    if x.shape[-1] == last:
        return torch.empty_like(x, device="meta").stride()
    strides, step = [0] * x.dim(), 1
    shape = (*x.shape[:-1], last)
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``x`` with these strides: itself where they address the same memory, otherwise a copy."""
    if all(
        size == 1 or own == wanted for size, own, wanted in zip(x.shape, x.stride(), strides, strict=True)
    ):
        return x if x.stride() == strides else as_strided(x, tuple(x.shape), strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Inputs:
    """From (batch, heads, rows, dim); what has other dimensions is declined as it is."""
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (query, key, value))
    return Inputs(q, k, v, bias)


def _gradients_like(grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients with rows before heads in the layouts of PyTorch's inputs, which have heads before rows."""
    pairs = zip(grads, inputs, strict=True)
    return tuple(
        _laid_out(g.transpose(1, 2), _strides_like(x, x.shape[-1])) for g, x in pairs if g is not None
    )


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
    inputs = _dense(query, key, value)
    call = call_of("flash", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale, rng=options.rng)
    reason = why_not(call) or _debug_mask_reason(return_debug_mask, dropout_p)
    if reason is not None:
        return reason
    found = _forward(call, inputs, options, return_softmax=return_debug_mask)
    out = _laid_out(found.out.transpose(1, 2), _strides_like(query, value.shape[-1]))
    return out, found.lse, None, None, *call.longest, *_flash_state(found)


def _flash_state(found: Results) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, an unused tensor and the debug mask."""
    debug = found.out.new_empty(0) if found.softmax is None else _debug_mask(found.softmax)
    return found.state.view(torch.uint64), found.out.new_empty((), dtype=torch.uint64), debug


def _debug_mask_reason(return_debug_mask: bool, dropout_p: float) -> str | None:
    """PyTorch raises then, so that there is no backward."""
    if return_debug_mask and not dropout_p:
        return "return_debug_mask is set without dropout; accepted: with dropout"
    return None


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
    inputs = _dense(query, key, value)
    call = call_of("flash", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale, rng=options.rng)
    reason = why_not(call)
    if reason is not None:
        return reason
    grads = _backward(call, inputs, (grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp), philox_seed)
    return _gradients_like(grads[:3], (query, key, value))


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
    inputs = _dense(query, key, value, attn_bias)
    call = call_of("efficient", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale, rng=options.rng)
    reason = why_not(call)
    if reason is not None:
        return reason
    found = _forward(call, inputs, options)
    batch, heads, rows = found.lse.shape
    if not compute_log_sumexp:
        lse = found.lse.new_empty((batch, heads, 0))
    elif rows % 32:
        lse = torch.nn.functional.pad(found.lse, (0, -rows % 32), value=math.inf)
    else:
        lse = found.lse
    return found.out.transpose(1, 2), lse, *found.state.unbind()


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
    inputs = _dense(query, key, value, attn_bias)
    call = call_of("efficient", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale, rng=options.rng)
    reason = why_not(call)
    if reason is not None:
        return reason
    lse = logsumexp[:, :, : query.shape[2]]
    bias_gradient = attn_bias is not None and bool(grad_input_mask[3])
    *grads, dbias = _backward(
        call,
        inputs,
        (grad_out.transpose(1, 2), out.transpose(1, 2), lse),
        (philox_seed, philox_offset),
        bias_gradient=bias_gradient,
    )
    if dbias is not None:  # rows of a multiple of 16 elements
        shape = (*dbias.shape[:-1], -(-dbias.shape[-1] // 16) * 16)
        dbias = dbias.new_empty(shape)[..., : dbias.shape[-1]].copy_(dbias)
    return *(x.transpose(1, 2) for x in grads if x is not None), dbias


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
    inputs = _dense(query, key, value, attn_bias)
    call = call_of("cudnn", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale)
    reason = why_not(call)
    if reason is not None:
        return reason
    found = _forward(call, inputs, options)
    out = _laid_out(found.out.transpose(1, 2), _strides_like(query, value.shape[-1]))
    return out, found.lse.unsqueeze(-1), None, None, *call.longest, *found.state.unbind(), None


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
    inputs = _dense(query, key, value, attn_bias)
    call = call_of("cudnn", inputs, causal=is_causal, dropout_p=dropout_p, scale=scale)
    reason = why_not(call)
    if reason is not None:
        return reason
    lse = logsumexp.reshape(logsumexp.shape[:3])
    grads = _backward(
        call, inputs, (grad_out.transpose(1, 2), out.transpose(1, 2), lse), (philox_seed, philox_offset)
    )
    return _gradients_like(grads[:3], (query, key, value))


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

    seqused_k, alibi_slopes, block_table and num_splits are unknown to its backward, which PyTorch computes without
    them: that of a call with the first two is served exactly if that of the same call without them is.
    """
    inputs = Inputs(query, key, value, None, cum_seq_q, cum_seq_k, seqused_k, alibi_slopes)
    call = call_of(
        "flash",
        inputs,
        causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        window=(window_size_left, window_size_right),
        longest=None if cum_seq_q is None else (max_q, max_k),  # ignored on batches
        rng=options.rng,
    )
    reason = why_not(call) or _debug_mask_reason(return_debug_mask, dropout_p)
    if block_table is not None:
        reason = "block_table needs kernels for paged keys; accepted: None"
    if reason is not None:
        return reason
    found = _forward(call, inputs, options, return_softmax=return_debug_mask)
    return _laid_out(found.out, _strides_like(query, value.shape[-1])), found.lse, *_flash_state(found)


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
    out.copy_(found[0])
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
    inputs = Inputs(query, key, value, None, cum_seq_q, cum_seq_k)
    call = call_of(
        "flash",
        inputs,
        causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        window=(window_size_left, window_size_right),
        longest=None if cum_seq_q is None else (max_q, max_k),  # ignored on batches
        rng=options.rng,
    )
    reason = why_not(call)
    if reason is not None:
        return reason
    grads = _backward(call, inputs, (grad_out, out, logsumexp), rng_state)
    pairs = zip(grads[:3], (query, key, value), strict=True)
    return tuple(_laid_out(g, _strides_like(x, x.shape[-1])) for g, x in pairs if g is not None)


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
