"""The doors: how a case becomes a call of each, and which features each supports. A new door is a new row."""

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import cute_attn
from cute_attn import attention, attention_varlen, flash_attn, sdpa
from cute_attn.flex import flex_attention
from cute_attn.host.activation import Options
from tests.fuzz.case import DTYPES, SIGNATURES, Case, Functions, Inputs

Results = dict[str, Tensor]
ALL = tuple(DTYPES)
SCORES = ("causal", "window", "scale", "softcap", "alibi", "gqa", "layout")


class NotDrawn(Exception):
    """A case that the door has no call for."""


@dataclass(frozen=True)
class Door:
    """A way to call attention.

    Attributes:
        call: out, and lse where the door returns it, with ``attention``'s dimensions.
        takes: features that cases may have.
        around: contexts that are active during a call and its backward.
    """

    call: Callable[[Case, Inputs, Functions], Results]
    takes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("fp64", *ALL)
    around: Callable[[], Any] = contextlib.nullcontext


def _options(case: Case, inputs: Inputs, functions: Functions | None = None) -> dict[str, Any]:
    """Options of ``attention`` and of functions with the same options."""
    own = {"softmax_scale": case.scale, "causal": case.causal, "window": case.window, "softcap": case.softcap}
    own |= {"alibi_slopes": inputs.alibi, "bias": inputs.bias, "sinks": inputs.sinks, "return_lse": True}
    if functions is not None:
        own |= {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
    return own


def _lengths(case: Case, inputs: Inputs) -> Tensor | None:
    return torch.tensor(case.used, dtype=torch.int32, device=inputs.q.device) if case.used else None


def _named(found: Any) -> Results:
    names = ("out", "lse", "max_scores")
    return dict(zip(names, found, strict=False)) if isinstance(found, tuple) else {"out": found}


def _maxima(case: Case) -> dict[str, bool]:
    """The option for the rows' greatest scores, in every other case."""
    return {"return_max_scores": case.extra % 2 == 1}


def _attention(case: Case, inputs: Inputs, functions: Functions | None = None, **other: Any) -> Results:
    own = _options(case, inputs, functions) | {"seqused_k": _lengths(case, inputs)} | _maxima(case) | other
    return _named(attention(inputs.q, inputs.k, inputs.v, **own))


def _cu_seqlens(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    counts = torch.tensor([(0, 0), *case.lengths], dtype=torch.int32, device=inputs.q.device)
    return tuple(counts[:, i].cumsum(0, dtype=torch.int32) for i in (0, 1))


class _ByBackward(torch.autograd.Function):
    """``attention`` whose backward is ``attention_backward``."""

    @staticmethod
    def forward(ctx: Any, own: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        given = own | dict(zip(("bias", "sinks"), others, strict=True))
        out, lse = attention(q, k, v, **given)
        ctx.own = own
        ctx.save_for_backward(q, k, v, out, lse, *others)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, bias, sinks = ctx.saved_tensors
        names = ("q", "k", "v", "bias", "sinks")
        wanted = [name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=True) if needed]
        own = ctx.own | {"bias": bias, "sinks": sinks}
        del own["return_lse"]
        found = cute_attn.attention_backward(grads[0], *tensors, grad_lse=grads[1], wanted=wanted, **own)
        by_name = dict(zip(wanted, found, strict=True))
        return (None, *(by_name.get(name) for name in names))


def _backward(case: Case, inputs: Inputs, functions: Functions) -> Results:
    own = _options(case, inputs, functions) | {"seqused_k": _lengths(case, inputs)}
    others = own.pop("bias"), own.pop("sinks")
    return _named(_ByBackward.apply(own, inputs.q, inputs.k, inputs.v, *others))


def _varlen(case: Case, inputs: Inputs, functions: Functions) -> Results:
    own = _options(case, inputs, functions) | {"seqused_k": _lengths(case, inputs)} | _maxima(case)
    lengths = (*_cu_seqlens(case, inputs), *case.longest)
    return _named(attention_varlen(inputs.q, inputs.k, inputs.v, *lengths, **own))


def _made_mask(case: Case, inputs: Inputs, functions: Functions, name: str, make: Any) -> Any:
    """A BlockMask with blocks of 32 or 64, of all batches and heads or one."""
    sizes = (case.batch if case.extra & 1 else None, case.nheads if case.extra & 2 else None)
    if re.search(r"\b[bh]\b", case.mask):
        sizes = (case.batch, case.nheads)
    block = {name: 32 if case.extra & 4 else (64, 32)}
    return make(functions.mask_mod, *sizes, case.seqlen_q, case.seqlen_k, device=inputs.q.device, **block)


def _torchs_mask(mask_mod: Any, *args: Any, **options: Any) -> Any:
    if not inspect.isfunction(mask_mod) or mask_mod.__defaults__:  # vmap refuses these
        own = mask_mod
        mask_mod = lambda b, h, q_idx, kv_idx: own(b, h, q_idx, kv_idx)  # noqa: E731
    try:
        return create_block_mask(mask_mod, *args, **options)
    except Exception as error:
        raise NotDrawn(f"create_block_mask: {error}") from error


MAKERS = {"block_size": cute_attn.block_mask, "BLOCK_SIZE": _torchs_mask}


def _block_mask(name: str, case: Case, inputs: Inputs, functions: Functions) -> Results:
    made = _made_mask(case, inputs, functions, name, MAKERS[name])
    return _attention(case, inputs, block_mask=made, score_mod=functions.score_mod)


def _flex(case: Case, inputs: Inputs, functions: Functions) -> Results:
    made = _made_mask(case, inputs, functions, "BLOCK_SIZE", _torchs_mask) if case.mask else None
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    own = {"scale": case.scale, "enable_gqa": True, "return_lse": True}
    out, lse = flex_attention(q, k, v, functions.score_mod, made, **own)
    return {"out": out.transpose(1, 2), "lse": lse}


@contextlib.contextmanager
def _serving_sdpa() -> Iterator[None]:
    """On the CPU, serve the operators that CUDA tensors would reach; the reference computes them."""
    if torch.cuda.is_available():
        with sdpa.active():
            yield
    else:
        activation = sdpa.Activation(Options(unsupported="error"), "CPU")
        try:
            yield
        finally:
            activation.remove()


def _sdpa(case: Case, inputs: Inputs, functions: Functions) -> Results:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    own = {"is_causal": bool(case.causal), "scale": case.scale}
    if q.device.type == "cuda":
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, inputs.bias, **own)
        return {"out": found.transpose(1, 2)}
    bias = None if inputs.bias is None else inputs.bias.expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, **own)
    return {"out": out.transpose(1, 2), "lse": lse[..., : q.shape[2]]}


def _flash_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    left, right = (-1 if x is None else x for x in case.window)
    own = {"softmax_scale": case.scale, "causal": bool(case.causal), "window_size": (left, right)}
    return own | {"softcap": case.softcap, "alibi_slopes": inputs.alibi}


def _minus_infinity(out: Tensor, lse: Tensor) -> Results:
    """FlashAttention's LSE of a row without keys is +inf."""
    return {"out": out, "lse": torch.where(lse == torch.inf, -torch.inf, lse)}


def _flash(case: Case, inputs: Inputs, functions: Functions) -> Results:
    """This includes keys and values, or all three, packed in one tensor."""
    q, k, v = inputs.q, inputs.k, inputs.v
    options = _flash_options(case, inputs) | {"return_attn_probs": True}
    alike = case.head_dim == case.head_dim_v
    if alike and q.shape == k.shape and case.extra % 3 == 1:
        found = flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **options)
    elif alike and case.extra % 3 == 2:
        found = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **options)
    else:
        found = flash_attn.flash_attn_func(q, k, v, **options)
    return _minus_infinity(*found[:2])


def _flash_varlen(case: Case, inputs: Inputs, functions: Functions) -> Results:
    options = _flash_options(case, inputs) | {"return_attn_probs": True}
    lengths = (*_cu_seqlens(case, inputs), *case.longest)
    found = flash_attn.flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, *lengths, **options)
    return _minus_infinity(*found[:2])


def _cache(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The keys as a cache: NaN in rows not in use, perhaps in pages, the last rows perhaps still to append."""
    used = case.used or (case.seqlen_k,) * case.batch
    new = min(case.extra % 3, *used, case.seqlen_k) if used else 0
    own: dict[str, Any] = {}
    lengths = torch.tensor([n - new for n in used], dtype=torch.int32, device=inputs.q.device)
    page = (0, 0, 1, 3, 4)[case.extra // 3 % 5]
    for name, x in (("k", inputs.k), ("v", inputs.v)):
        cache = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        for b, n in enumerate(used):
            cache[b, : n - new] = x[b, : n - new]
        if new:
            own[name] = torch.stack([x[b, n - new : n] for b, n in enumerate(used)])
        own[f"{name}_cache"] = cache
    if page and case.batch and case.seqlen_k:
        pages = -(-case.seqlen_k // page)
        order = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(case.seed))
        for name in ("k_cache", "v_cache"):
            x = own[name]
            whole = x.new_full((case.batch, pages * page, *x.shape[2:]), torch.nan)
            whole[:, : case.seqlen_k] = x
            paged = torch.empty_like(whole.view(-1, page, *x.shape[2:]))
            paged[order.to(x.device)] = whole.view(-1, page, *x.shape[2:])
            own[name] = paged
        own["page_table"] = order.view(case.batch, pages).int().to(inputs.q.device)
    return own | {"cache_seqlens": lengths}


def _kvcache(case: Case, inputs: Inputs, functions: Functions) -> Results:
    own = _options(case, inputs, functions) | _cache(case, inputs) | _maxima(case)
    return _named(cute_attn.attention_with_kvcache(inputs.q, own.pop("k_cache"), own.pop("v_cache"), **own))


def _cached_block_mask(case: Case, inputs: Inputs, functions: Functions) -> Results:
    """A cache without pages, whose capacity is the mask's number of keys."""
    own = _options(case, inputs) | _cache(replace(case, extra=case.extra % 3), inputs)
    own["block_mask"] = _made_mask(case, inputs, functions, "BLOCK_SIZE", _torchs_mask)
    own["score_mod"] = functions.score_mod
    return _named(cute_attn.attention_with_kvcache(inputs.q, own.pop("k_cache"), own.pop("v_cache"), **own))


def _flash_kvcache(case: Case, inputs: Inputs, functions: Functions) -> Results:
    own = _flash_options(case, inputs) | _cache(case, inputs) | {"return_softmax_lse": True}
    own |= {"block_table": own.pop("page_table", None)}
    found = flash_attn.flash_attn_with_kvcache(inputs.q, own.pop("k_cache"), own.pop("v_cache"), **own)
    return _minus_infinity(*found)


def _merge(case: Case, inputs: Inputs, functions: Functions) -> Results:
    """Split the keys into up to three ranges, some of which may be empty, and merge the results."""
    options = _options(case, inputs) | {"sinks": None}
    ends = sorted([0, case.extra % (case.seqlen_k + 1), case.extra // 3 % (case.seqlen_k + 1), case.seqlen_k])
    parts = [
        attention(inputs.q, inputs.k[:, a:b], inputs.v[:, a:b], **options)
        for a, b in itertools.pairwise(ends)
    ]
    outs, lses = zip(*parts, strict=True)
    if case.dtype == "fp64":
        lses = tuple(x.double() for x in lses)
    return _named(cute_attn.merge_attention(outs, lses, sinks=inputs.sinks))


def _sums(case: Case, inputs: Inputs, functions: Functions) -> Results:
    own = _options(case, inputs, functions) | {"seqused_k": _lengths(case, inputs)}
    del own["bias"], own["return_lse"]
    if case.lengths:
        own |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), _cu_seqlens(case, inputs), strict=True))
        own |= dict(zip(("max_seqlen_q", "max_seqlen_k"), case.longest, strict=True))
    return {"sums": cute_attn.attention_sums(inputs.q, inputs.k, **own)}


def _registered(case: Case, inputs: Inputs, functions: Functions) -> Results:
    """Functions registered under names, with captured values as arguments."""
    given = {}
    for kind, body in (("score", case.score), ("mask", case.mask)):
        names = [x for x in case.captured if x in body.replace("\n", " ")]
        values = tuple(functions.values[x] for x in names)
        if any(not isinstance(x, Tensor | float | int) or x is True for x in values):
            raise NotDrawn("arguments are tensors, floats and ints")
        if body:
            given[_registered_name(kind, body, names, values, functions)] = values
    return _attention(case, inputs, epilogues=given)


_names: dict[tuple, str] = {}


def _registered_name(kind: str, body: str, names: list[str], values: tuple, functions: Functions) -> str:
    """Name of a function, which is registered when it first comes with arguments of these kinds."""
    kinds = (
        (x.dtype, x.dim(), x.dim() and x.stride(-1)) if isinstance(x, Tensor) else type(x) for x in values
    )
    key = (kind, body, *kinds)
    if key not in _names:
        text = f"def mod({', '.join([SIGNATURES[kind], *names])}):\n{body}"
        exec(text, functions.scope)
        decorate = cute_attn.score_mod if kind == "score" else cute_attn.mask_mod
        _names[key] = f"fuzz{len(_names)}"
        decorate(_names[key], example=lambda *sizes: values)(functions.scope["mod"])
    return _names[key]


ATTENTION = (*SCORES, "top_left", "head_dim_v", "bias", "any_bias", "sinks", "used", "score", "mask")
DOORS = {
    "attention": Door(_attention, (*ATTENTION, "grads")),
    "attention_backward": Door(_backward, (*ATTENTION, "own_grads")),
    "attention_varlen": Door(_varlen, (*ATTENTION, "lengths", "grads")),
    "block_mask": Door(
        functools.partial(_block_mask, "block_size"),
        (*SCORES, "bias", "sinks", "score", "mask", "only_mask", "mostly_nonempty", "grads"),
    ),
    "create_block_mask": Door(
        functools.partial(_block_mask, "BLOCK_SIZE"),
        (*SCORES, "sinks", "score", "mask", "only_mask", "mostly_nonempty", "grads"),
    ),
    "flex_attention": Door(_flex, ("scale", "gqa", "layout", "head_dim_v", "score", "mask", "grads")),
    "registered": Door(
        _registered, (*SCORES, "bias", "any_bias", "score", "only_score", "arguments", "mask", "grads")
    ),
    "sdpa": Door(
        _sdpa,
        ("nonempty", "aligned", "causal_as_pytorch", "scale", "layout", "bias", "grads"),
        ("fp32", "fp16", "bf16"),
        _serving_sdpa,
    ),
    "flash_attn_func": Door(_flash, (*SCORES, "grads"), ALL),
    "flash_attn_varlen_func": Door(_flash_varlen, (*SCORES, "lengths", "grads"), ALL),
    "flash_attn_with_kvcache": Door(_flash_kvcache, (*SCORES, "mostly_nonempty", "used"), ALL),
    "attention_with_kvcache": Door(
        _kvcache,
        (*SCORES, "mostly_nonempty", "head_dim_v", "bias", "any_bias", "sinks", "used", "score", "mask"),
        ALL,
    ),
    "kvcache_block_mask": Door(
        _cached_block_mask,
        (*SCORES, "mostly_nonempty", "bias", "sinks", "used", "score", "mask", "only_mask"),
        ALL,
    ),
    "attention_sums": Door(_sums, (*SCORES, "sinks", "lengths", "used", "score", "mask")),
    "merge_attention": Door(_merge, ("scale", "softcap", "gqa", "layout", "head_dim_v", "sinks"), ALL),
}
