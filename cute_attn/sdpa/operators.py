"""PyTorch's attention operators on the kernels: arguments, output layouts, conventions of lse and dropout states.

Outputs have the shapes, strides and dtypes of PyTorch's meta functions (``torch/_meta_registrations.py``), which
compilers rely on, except for a dtype in :func:`_numbers`. Inputs are views with rows before heads. Tensors that kernels
cannot read or write in place are copied. Operators run below autograd: they call kernels, never
:func:`cute_attn.attention`, which would record a second graph. CPU tensors are computed by :mod:`cute_attn.reference`.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_attn.api.operators import forward_cpu
from cute_attn.host import backward as _backward
from cute_attn.host import forward as _forward
from cute_attn.host import memory, random_states, record
from cute_attn.host.activation import BACKENDS, Options
from cute_attn.host.bias import four_dims, last_contiguous
from cute_attn.host.call import ATTENTION, Call
from cute_attn.host.checks import check_like
from cute_attn.host.memory import ALIGNMENT_BYTES, as_strided, contiguous_strides, regular
from cute_attn.sdpa.calls import Request, _is_capturing, request_of, why_not, why_not_drawn

# ---- inputs as kernels read them ----


def _narrow_bias(bias: Tensor) -> Tensor:
    """A bias whose dimensions of stride 0, except the last, are shrunk to size 1, which is faster for kernels."""
    dims = list(zip(bias.shape, bias.stride(), strict=True))
    shape = [1 if stride == 0 else size for size, stride in dims[:-1]]
    return last_contiguous(as_strided(bias, (*shape, bias.shape[-1]), tuple(bias.stride())))


def _for_kernels(call: Call, *, bias_gradient: bool = False) -> Call:
    """The call of tensors that kernels can read. bias_gradient: keep the bias's shape for its gradient."""
    q, k, v = (record.readable(regular(x)) for x in call[:3])
    bias = call.bias
    if bias is not None:
        bias = last_contiguous(bias) if bias_gradient else _narrow_bias(bias)
    return call._replace(q=q, k=k, v=v, bias=bias)


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


@dataclass(frozen=True, slots=True)
class Output:
    """The memory layout of one of PyTorch's outputs, which kernels write with rows before heads.

    Attributes:
        layout: a meta tensor of the shape and strides that PyTorch promises.
        heads_first: whether the layout has heads before rows.
    """

    layout: Tensor
    heads_first: bool

    @classmethod
    def of(cls, x: Tensor, last: int, heads_first: bool, backend: str) -> "Output":
        """The output whose order of dimensions follows the input ``x``, rows first, with ``last`` as its last size.

        Memory-efficient attention's outputs are contiguous with rows before heads.
        """
        shape = (*x.shape[:-1], last)
        if backend == "efficient":
            return cls(rows_first(torch.empty(shape, device="meta")), heads_first)
        x = rows_first(x) if heads_first else x
        shape = (*x.shape[:-1], last)
        return cls(torch.empty_strided(shape, strides_like(x, last), device="meta"), heads_first)

    def memory(self, like: Tensor) -> Tensor | None:
        """New memory with rows before heads; None if kernels cannot write this layout."""
        rows = rows_first(self.layout) if self.heads_first else self.layout
        strides, whole = rows.stride(), ALIGNMENT_BYTES // like.element_size()
        if strides[-1] != 1 or any(step % whole or step <= 0 for step in strides[:-1]):
            return None
        return record.empty(like, tuple(rows.shape), strides, like.dtype)

    def of_rows(self, x: Tensor) -> Tensor:
        """Convert the kernels' output, with rows before heads, to this layout: a view, or a copy if strides differ."""
        shape, strides = tuple(self.layout.shape), self.layout.stride()
        x = rows_first(x) if self.heads_first else x
        own = x.stride()
        if own == strides:
            return x
        if all(size == 1 or a == b for size, a, b in zip(shape, own, strides, strict=True)):
            return as_strided(x, shape, strides)
        made = record.empty(x, shape, strides, x.dtype)
        record.step(Tensor.copy_, made, x)
        return made


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
    options: Options,
    *,
    heads_first: bool = True,
    wants_lse: bool = True,
    return_softmax: bool = False,
) -> Results | str:
    """Compute a forward, or return the reason why kernels do not serve it.

    Args:
        heads_first: whether PyTorch's tensors have heads before rows.
        wants_lse: whether lse is used; if not, it may contain -inf.
    """
    call, device, state = request.call, request.call.q.device, None
    reason = why_not(request) or why_not_drawn(request, options.rng, _is_capturing(device))
    if reason is None and return_softmax and not call.dropout:  # PyTorch raises, so that no backward follows
        reason = "return_debug_mask is set without dropout; accepted: with dropout"
    if reason is not None:
        return reason
    rows, output = call.max_seqlen_q, Output.of(call.q, call.v.shape[-1], heads_first, request.backend)
    lse_rows = -(-rows // 32) * 32 if request.backend == "efficient" and wants_lse else rows
    if call.dropout:
        state = record.drawn(functools.partial(draw, request, device, options.rng))
    call = _for_kernels(call)._replace(rng_state=state, aux="softmax" if return_softmax else "")
    if runs_kernels(call.q):
        out, shape = output.memory(call.q), call.output_shapes()[1]
        shape = (*shape[:2], lse_rows) if lse_rows > rows else shape
        lse = record.contiguous(call.q, shape, torch.float32)
        written, lse, softmax = _forward.forward(call, out, lse, keeps_rows=False)
    else:
        written, lse, softmax = forward_cpu(call)
        if lse_rows > rows:
            lse = F.pad(lse, (0, lse_rows - rows))
    if wants_lse and _may_see_nothing(call):
        record.step(Tensor.nan_to_num_, lse, math.nan, math.inf, math.inf)
    if lse_rows > rows:
        record.step(Tensor.fill_, lse.narrow(2, rows, lse_rows - rows), math.inf)
    return Results(output.of_rows(written), lse, state, softmax)


def runs_kernels(q: Tensor) -> bool:
    """True if kernels compute a call, False if the reference does."""
    return q.is_cuda


def _may_see_nothing(call: Call) -> bool:
    """True if a query may see no key."""
    if call.bias is not None or call.varlen or call.seqused_k is not None or call.mask.startswith("window"):
        return True
    return not call.max_seqlen_k or (call.mask == "causal" and call.max_seqlen_q > call.max_seqlen_k)


# ---- seeds and offsets of dropout masks ----


def draw(request: Request, device: torch.device, rng: str) -> Tensor:
    """Seed and offset of a mask; with rng="torch", the ones that PyTorch's kernel would get from its generator.

    It advances the generator's offset by one per thread or score, rounded up to fours.
    """
    if rng != "torch":
        return random_states.draw(device)
    call = request.call
    count = 32 if request.backend == "flash" else call.max_seqlen_q * call.max_seqlen_k
    with random_states.lock:
        step = (call.batch * call.nheads * count + 3) // 4 * 4
        seed, offset = random_states.advance(_generator(device), step)
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63, offset], dtype=torch.int64, device=device)


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _joined(rng_state: Tensor | tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Seed and offset as one int64 tensor."""
    if isinstance(rng_state, Tensor):
        return rng_state.view(torch.int64).to(device)
    numbers = tuple(x.view(torch.int64).to(device) for x in rng_state)
    both = record.empty(numbers[0], (2,), (1,), torch.int64)
    record.step(_stack_into, numbers, both)
    return both


def _stack_into(numbers: tuple[Tensor, ...], out: Tensor) -> None:
    torch.stack(numbers, out=out)


# ---- the backward ----


def backward(
    request: Request,
    outer: tuple[Tensor, Tensor, Tensor],
    rng_state: Tensor | tuple[Tensor, Tensor],
    *,
    heads_first: bool = True,
    bias_gradient: bool = False,
) -> tuple[Tensor, ...] | str:
    """Compute gradients of q, k and v in PyTorch's layouts, then of bias with bias_gradient, or return why not.

    outer: the gradient of out, then out and lse.
    """
    reason = why_not(request)
    if reason is not None:
        return reason
    given = request.call
    state = _joined(rng_state, given.q.device) if given.dropout else None
    call = _for_kernels(given, bias_gradient=bias_gradient)._replace(rng_state=state)
    grad_out, out = map(rows_first, outer[:2]) if heads_first else outer[:2]
    lse = outer[2][:, :, : given.max_seqlen_q] if heads_first else outer[2]
    needed, outputs = (True, True, True, bias_gradient, False), (grad_out, None, out, lse)
    results = [Output.of(x, x.shape[-1], heads_first, request.backend) for x in given[:3]]
    if runs_kernels(call.q):
        dq, dk, dv = (one.memory(x) for one, x in zip(results, call[:3], strict=True))
        plan = _backward.plan_of(call, outputs, needed)
        found: Any = _backward.launch(plan, call, outputs, needed, (dq, dk, dv, None, None))
    else:
        found = torch.ops.cute_attn.backward.default(*outputs, list(needed), *call.values(ATTENTION))
    own: list[Any] = [one.of_rows(x) for one, x in zip(results, found, strict=False)]
    return (*own, found[3]) if bias_gradient else tuple(own)


# ---- calls ----


def _asked(backend: str, given: Any, bias: Tensor | None = None, *, learns: bool = False) -> Request:
    """The request of tensors (batch, heads, rows, dim). Other ranks are kept, and declined later."""
    q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (given.query, given.key, given.value))
    options = {"causal": given.is_causal, "dropout_p": given.dropout_p, "scale": given.scale}
    return request_of(backend, Call(q, k, v, bias=bias), **options, learns=learns)


def _fresh(like: Tensor, *kinds: tuple) -> list[Tensor]:
    """Uninitialized tensors on ``like``'s device. kinds: for each tensor a shape, strides and a dtype."""
    return [record.empty(like, *kind) for kind in kinds]


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
    if found.softmax is not None:  # padded with zeros to multiples of 128 queries and keys
        rows, keys = found.softmax.shape[2:]
        debug = F.pad(found.softmax, (0, -keys % 128, 0, -rows % 128))
    return state.view(torch.uint64), unused, debug


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


@_of("flash", "_scaled_dot_product_flash_attention")
def flash_forward(options: Options, given: Any) -> tuple | str:
    found = forward(_asked("flash", given), options, return_softmax=given.return_debug_mask)
    if isinstance(found, str):
        return found
    longest = given.query.shape[2], given.key.shape[2]
    return found.out, found.lse, None, None, *longest, *_flash_state(found)


@_of("flash", "_scaled_dot_product_flash_attention_backward")
def flash_backward(options: Options, given: Any) -> tuple | str:
    grads = (given.grad_out, given.out, given.logsumexp)
    return backward(_asked("flash", given), grads, given.philox_seed)


@_of("efficient", "_scaled_dot_product_efficient_attention")
def efficient_forward(options: Options, given: Any) -> tuple | str:
    wants_lse = given.compute_log_sumexp
    found = forward(_asked("efficient", given, given.attn_bias), options, wants_lse=wants_lse)
    if isinstance(found, str):
        return found
    lse = found.lse
    if not wants_lse:
        shape = (*lse.shape[:2], 0)
        (lse,) = _fresh(lse, (shape, contiguous_strides(shape), lse.dtype))
    return found.out, lse, *_numbers(found)


@_of("efficient", "_scaled_dot_product_efficient_attention_backward")
def efficient_backward(options: Options, given: Any) -> tuple | str:
    bias, state = given.attn_bias, (given.philox_seed, given.philox_offset)
    grads = (given.grad_out, given.out, given.logsumexp)
    wanted = bias is not None and given.grad_input_mask[3]
    found = _drawn_by_pytorch(given) or backward(
        _asked("efficient", given, bias), grads, state, bias_gradient=bool(wanted)
    )
    if isinstance(found, str):
        return found
    dq, dk, dv, *dbias = found
    return dq, dk, dv, _in_rows_of_16(dbias[0]) if dbias else None


def _in_rows_of_16(x: Tensor) -> Tensor:
    """A copy whose row stride is a multiple of 16 elements."""
    shape = (*x.shape[:-1], -(-x.shape[-1] // 16) * 16)
    (wide,) = _fresh(x, (shape, contiguous_strides(shape), x.dtype))
    found = wide[..., : x.shape[-1]]
    record.step(Tensor.copy_, found, x)
    return found


@_of("cudnn", "_scaled_dot_product_cudnn_attention")
def cudnn_forward(options: Options, given: Any) -> tuple | str:
    bias = None if given.attn_bias is None else four_dims(given.attn_bias)  # only cuDNN's may have fewer
    request = _asked("cudnn", given, bias, learns=given.compute_log_sumexp)
    found = forward(request, options)
    if isinstance(found, str):
        return found
    longest = given.query.shape[2], given.key.shape[2]
    return found.out, found.lse.unsqueeze(-1), None, None, *longest, *_numbers(found), None


@_of("cudnn", "_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(options: Options, given: Any) -> tuple | str:
    bias = None if given.attn_bias is None else four_dims(given.attn_bias)
    lse, state = given.logsumexp, (given.philox_seed, given.philox_offset)
    grads = (given.grad_out, given.out, lse.reshape(lse.shape[:3]))
    request = _asked("cudnn", given, bias, learns=True)
    return _drawn_by_pytorch(given) or backward(request, grads, state)


def _rows(
    given: Any, seqused_k: Tensor | None = None, slopes: Tensor | None = None, *, same_bits: bool = False
) -> Request:
    """The request of tensors with rows before heads: batches, or packed sequences."""
    lengths = (given.cum_seq_q, given.cum_seq_k)
    inputs = Call(given.query, given.key, given.value, *lengths, seqused_k=seqused_k, alibi_slopes=slopes)
    options: dict[str, Any] = {"causal": given.is_causal, "dropout_p": given.dropout_p, "scale": given.scale}
    options["same_bits"] = same_bits
    window = (given.window_size_left, given.window_size_right)
    longest = None if lengths[0] is None else (given.max_q, given.max_k)  # ignored on batches
    return request_of("flash", inputs, **options, window=window, longest=longest)


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
    request = _rows(given, given.seqused_k, given.alibi_slopes, same_bits=num_splits == 1)
    found = forward(request, options, heads_first=False, return_softmax=given.return_debug_mask)
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
    grads = (given.grad_out, given.out, given.logsumexp)
    return backward(_rows(given), grads, given.rng_state, heads_first=False)


STATES = {
    name: [*inspect.signature(OPERATORS[backend][name]).parameters].index("philox_seed") - 1
    for backend in ("efficient", "cudnn")
    for name in OPERATORS[backend]
    if name.endswith("_backward")
}
"""Position of philox_seed among a backward's arguments, by name, for backwards that use :func:`drawn_here`."""
