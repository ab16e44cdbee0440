"""FlexAttention by :func:`cute_attn.attention`: checks of arguments, and conversion of layouts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from cute_attn.api.attention import attention
from cute_attn.host import plans, record
from cute_attn.host.memory import on_device
from cute_attn.host.values import check_dense, check_dtype, check_flags, number, shown, wrong_shape

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]


def attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, *,
    return_aux: AuxRequest | None = None,
) -> Result:  # fmt: skip
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if scale is not None:
        number("scale", scale)
    _check_tensors(query, key, value, enable_gqa)
    _check_outputs(return_lse, kernel_options, return_aux)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    found = attention(
        q, k, v, softmax_scale=scale, score_mod=score_mod, block_mask=block_mask,
        return_lse=return_lse if return_aux is None else return_aux.lse,
    )  # fmt: skip
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = _in_order_of(query, out.transpose(1, 2))
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return out if lse is None else (out, lse)


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """``out`` with its dimensions in memory in query's order, copied if necessary: programs rely on it for views."""
    order = [3]
    for dim in range(3):  # compilers compare lengths that vary, and do not sort them
        larger = [other for other in order[:-1] if query.stride(other) >= query.stride(dim)]
        order.insert(len(larger), dim)
    stored = out.permute(order)
    if stored.is_contiguous():
        return out
    back = [order.index(dim) for dim in range(4)]
    if out.requires_grad or not plans.no_dispatch_mode():
        return stored.contiguous().permute(back)
    with on_device(out.get_device()):
        made = record.contiguous(out, tuple(stored.shape))
        record.step(Tensor.copy_, made, stored)
    return made.permute(back)


# ---- checks that attention lacks, or reports under other names ----


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.dim() != 4:
            raise wrong_shape(name, x, "(batch, heads, seqlen, head_dim)")
        check_dtype(name, x, query.dtype, of="query")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}; accepted: {query.device}, where query is")
    batch, heads, _, head_dim = query.shape
    heads_kv = key.shape[1]
    if key.shape[0] not in (batch, 1):
        raise ValueError(f"key has batch {key.shape[0]}; accepted: {batch}, query's, or 1")
    if value.shape[:3] != key.shape[:3]:
        raise wrong_shape("value", value, f"{tuple(key.shape[:3])} and a head dim, as key")
    if key.shape[3] != head_dim:
        raise ValueError(f"key has head dim {key.shape[3]}; accepted: {head_dim}, query's")
    if not enable_gqa and heads_kv != heads:
        raise ValueError(f"key has {heads_kv} heads; accepted without enable_gqa: {heads}, query's")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"query has {heads} heads; accepted with enable_gqa: a multiple of key's {heads_kv}")


def _check_outputs(return_lse: bool, kernel_options: Any, return_aux: Any) -> None:
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(
            f"kernel_options is {shown(kernel_options)}; accepted: a dict, which is not read, or None"
        )
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux is {shown(return_aux)}; accepted: an AuxRequest, or None")
    if return_aux is None:
        return
    if return_lse:
        raise ValueError("return_lse is True with return_aux; accepted: one of them")
    if return_aux.max_scores:
        raise NotImplementedError(
            "return_aux asks for max_scores, which no kernel here keeps; accepted: AuxRequest(lse=True)"
        )
