"""Hugging Face transformers with this package's kernels: ``attn_implementation="cute_attn"``.

    import cute_attn.transformers
    cute_attn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cute_attn")

transformers calls two functions. :func:`attention_mask` returns, once for all layers of a kind, the hidden keys as

* None, if causality and a sliding window suffice: kernels compute both, and no mask is read;
* key padding, bool (batch, keys), if causality, a window and padding suffice: it becomes one row of a bias;
* else the bool (batch, 1, queries, keys) of transformers' ``sdpa_mask``: for packed sequences without their lengths,
  chunks, blocks, static caches and masks that a model adds.

:func:`attention_forward` computes one layer's attention with that mask. Unsupported masks raise; padding is never
attended to. A query that sees no key, such as padding before a sequence, has an output of 0.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.api.attention import Window, attention, attention_varlen
from cute_attn.host import doors, plans
from cute_attn.host.doors import served
from cute_attn.host.values import kind_of

__all__ = ["NAME", "attention_forward", "attention_mask", "register", "served"]

NAME = "cute_attn"
"""The default name. transformers takes a name with "flash" for FlashAttention, and a name with a slash for a
repository."""


def register(name: str = NAME) -> None:
    """Let models use these kernels by ``attn_implementation=name``.

    Raises
    ------
    ModuleNotFoundError
        transformers is not installed.
    TypeError
        The name is not a str.
    ValueError
        transformers would give the name another meaning.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; accepted: text such as 'cute_attn'")
    if "flash" in name or "/" in name or "|" in name:
        raise ValueError(
            f"name is {name!r}; accepted: one without 'flash', '/' and '|', which mean something to transformers"
        )
    try:
        from transformers.masking_utils import AttentionMaskInterface  # a library that few users have
        from transformers.modeling_utils import AttentionInterface  # as above
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("transformers"):
            raise
        raise ModuleNotFoundError(
            "cute_attn.transformers.register needs transformers and its masking_utils, which are not installed",
            name=error.name,
        ) from None

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)  # without it transformers passes no mask at all


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """Make the attention_mask of :func:`attention_forward`; transformers calls this in place of its mask functions.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset : int
        Sizes of a layer's queries and keys, and positions of the first query and key. With a static cache, q_offset is
        a tensor.
    mask_function : callable
        transformers' definition of the mask, without padding.
    attention_mask : Tensor (batch, seen keys), bool, optional
        False for padding.
    local_size : int, optional
        Size of the sliding window or of a chunk.
    allow_is_causal_skip, allow_is_bidirectional_skip : bool
        True if mask_function is the causal mask, perhaps with local_size, or a mask that hides nothing.
    use_vmap : bool
        True if a model added a mask.
    config : the model's configuration
    others : device and dtype

    Returns
    -------
    None, Tensor (batch, kv_length), or Tensor (batch, 1, q_length, kv_length), bool
    """
    causal = (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length  # the last query is at the last key
        and (local_size is None or local_size == getattr(config, "sliding_window", None))
        and (local_size is None or getattr(config, "attention_chunk_size", None) is None)
    )  # layers pass a sliding window to the attention function, but no chunk
    everything = allow_is_bidirectional_skip and local_size is None
    long_enough = attention_mask is None or attention_mask.shape[1] >= kv_length
    if not use_vmap and (causal or everything) and long_enough:
        if attention_mask is None:
            return None
        padding = attention_mask[:, attention_mask.shape[1] - kv_length :].to(torch.bool)
        # To read it would wait for the device, once a forward pass, and a compiler cannot.
        return None if not torch.compiler.is_compiling() and bool(padding.all()) else padding
    from transformers.masking_utils import sdpa_mask  # as above

    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, config=config,
        **others,
    )  # fmt: skip


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention.

    Parameters
    ----------
    module : Module
        The layer; its attribute is_causal applies if the argument is_causal is None.
    query : Tensor (batch, nheads, seqlen_q, head_dim)
    key, value : Tensor (batch, nheads_kv, seqlen_k, head_dim)
    attention_mask : Tensor, optional
        The result of :func:`attention_mask`, or a model's (batch, 1 or nheads, seqlen_q, seqlen_k or more), bool or
        added to scores. A mask of four dimensions replaces causality and the window.
    dropout, scaling, softcap
        dropout_p, softmax_scale and softcap of :func:`cute_attn.attention`.
    sliding_window : int, optional
        Number of keys that a query sees, up to and including the one at its position.
    s_aux : Tensor (nheads,), optional
        Attention sinks: for each head the score of an extra key with value 0 (gpt-oss).
    position_bias : Tensor (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k), optional
        Added to scores.
    kwargs
        cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of packed sequences, used without a mask and with
        a batch of 1; others are ignored.

    Returns
    -------
    out : Tensor (batch, seqlen_q, nheads, head_dim of value)
    None
        In place of attention weights.

    Raises
    ------
    NotImplementedError
        cache or output_attentions is set.
    ValueError
        A mask has another shape, or a layer does not pass its sliding window; see also :func:`cute_attn.attention`.
    """
    if cache is not None:
        raise NotImplementedError(f"cache is {kind_of(cache)}; accepted: None, since no kernel reads it")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("output_attentions is True; accepted: False, since no kernel keeps weights")
    _check_window(module, sliding_window)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    lengths: list[Any] = [
        kwargs.get(f"{name}_{side}") for name in ("cu_seq_lens", "max_length") for side in "qk"
    ]
    tensors = (query, key, value, attention_mask, s_aux, position_bias, *lengths[:2])
    scores = _Scores(causal, sliding_window, dropout, scaling, softcap, *lengths[2:])
    call = functools.partial(_attend, tensors, scores)
    repeated = ("transformers", scores)
    return plans.repeat(repeated, tensors, call) if plans.may_repeat(repeated, query) else call(), None


class _Scores(NamedTuple):
    """A layer's arguments other than tensors. longest_q, longest_k: longest packed sequences of queries and keys."""

    causal: bool
    sliding_window: int | None
    dropout: float
    scaling: float | None
    softcap: float | None
    longest_q: int | None
    longest_k: int | None


def _attend(tensors: tuple[Any, ...], scores: _Scores) -> Tensor:
    """Run a call for which no recorded call can be replayed."""
    query, key, value, mask, sinks, position_bias, *starts = tensors
    rows, keys = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": query.shape[-1] ** -0.5 if scores.scaling is None else float(scores.scaling),
        "softcap": scores.softcap or 0.0,
        "dropout_p": scores.dropout,
        "causal": False,
        "sinks": sinks if sinks is None or sinks.dtype == query.dtype else sinks.float(),
    }
    if mask is None or mask.dim() == 2:
        window = _window(scores.sliding_window, scores.causal, keys)
        options |= {"causal": scores.causal, "window": window}
    lengths = (*starts, scores.longest_q, scores.longest_k)
    if mask is None and all(x is not None for x in lengths) and query.shape[0] == 1:
        if position_bias is not None:
            raise NotImplementedError("position_bias with packed sequences is given; accepted: one of them")
        found: Any = attention_varlen(q[0], k[0], v[0], *starts, *map(int, lengths[2:]), **options)
    else:
        bias = _bias(mask, position_bias, query.dtype, (rows, keys))
        found = attention(q, k, v, bias=bias, **options)
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_bias": mask}
    given |= {"is_causal": options["causal"], "dropout_p": scores.dropout, "softcap": scores.softcap}
    doors.note("transformers.attention_forward", given | {"window_size_left": scores.sliding_window})
    return found.reshape(query.shape[0], rows, *found.shape[-2:])


def _check_window(module: torch.nn.Module, sliding_window: int | None) -> None:
    """Raise if the mask function relies on a window that the layer does not pass."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if sliding_window is None and kinds and isinstance(layer, int) and layer < len(kinds):
        if kinds[layer] == "sliding_attention":
            window = getattr(config, "sliding_window", None)
            raise ValueError(
                f"sliding_window is None in a layer with one of {window}; accepted: the layer's own"
            )


def _window(sliding_window: int | None, causal: bool, keys: int) -> Window:
    """The window's keys before and after a query's position, or (None, None) if the window hides no key."""
    if sliding_window is None or sliding_window > keys:
        return None, None
    if not causal:
        raise ValueError(
            f"sliding_window is {sliding_window} without causality and without a mask of four dimensions; "
            "accepted: one of them"
        )
    return sliding_window - 1, 0


def _bias(
    mask: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype, sizes: tuple[int, int]
) -> Tensor | None:
    """The bias added to scores: (batch or 1, nheads or 1, queries or 1, keys)."""
    if mask is None:
        return position_bias
    rows, keys = sizes
    if mask.dim() == 2 and mask.shape[1] == keys:
        mask = mask[:, None, None, :].to(torch.bool)
    elif mask.dim() == 4 and mask.shape[2] in (1, rows) and mask.shape[3] >= keys:
        mask = mask[..., :keys]
    else:
        shape = tuple(mask.shape)
        raise ValueError(
            f"attention_mask has shape {shape}; accepted: (batch, {keys}) or (batch, 1, {rows}, {keys})"
        )
    if mask.dtype == torch.bool:
        hidden = torch.zeros((), dtype=dtype, device=mask.device)
        mask = torch.where(mask, hidden, -math.inf)
    return (mask if position_bias is None else mask + position_bias).contiguous()
