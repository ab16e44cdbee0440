"""All doors and the arguments that each accepts, for tests that apply to every door."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cute_attn import append_kv, attention, attention_varlen, attention_with_kvcache, flash_attn, flex
from cute_attn.flash_attn import flash_attn_3

aten = torch.ops.aten


class Sizes(NamedTuple):
    """Sizes of a call. A mask's tables have TABLE elements per head."""

    batch: int = 2
    seqlen_q: int = 16
    seqlen_k: int = 16
    nheads: int = 2
    nheads_kv: int = 2
    head_dim: int = 64


TABLE = 64
EMPTY = {
    "no sequence": Sizes(batch=0),
    "no query": Sizes(seqlen_q=0),
    "no key": Sizes(seqlen_k=0),
    "no head": Sizes(nheads=0, nheads_kv=0),
    "nothing": Sizes(0, 0, 0, 0, 0),
}


class Door(NamedTuple):
    """A function that computes attention, with a call of it.

    Attributes:
        inputs: the call's tensors by name; the learnt ones require a gradient.
        call: its results, a tensor or a tuple of them.
        declines: the cases of ``EMPTY`` that it refuses.
    """

    inputs: Callable[[Sizes], dict[str, Any]]
    call: Callable[..., Any]
    declines: tuple[str, ...] = ()


def _learnt(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def _batch(s: Sizes) -> dict[str, Any]:
    return {
        "q": _learnt(s.batch, s.seqlen_q, s.nheads, s.head_dim),
        "k": _learnt(s.batch, s.seqlen_k, s.nheads_kv, s.head_dim),
        "v": _learnt(s.batch, s.seqlen_k, s.nheads_kv, s.head_dim),
    }


def _odd(s: Sizes) -> dict[str, Any]:
    """Sizes with a head dim that kernels cannot read in place."""
    return _batch(s._replace(head_dim=s.head_dim - 4))


def _heads_first(s: Sizes) -> dict[str, Any]:
    return {
        name: x.detach().transpose(1, 2).contiguous().requires_grad_()
        for name, x in zip(("query", "key", "value"), _batch(s).values(), strict=True)
    }


def _packed(s: Sizes) -> dict[str, Any]:
    starts = torch.arange(s.batch + 1, dtype=torch.int32)
    return {name: x.detach().flatten(0, 1).requires_grad_() for name, x in _batch(s).items()} | {
        "cu_seqlens_q": starts * s.seqlen_q,
        "cu_seqlens_k": starts * s.seqlen_k,
        "max_seqlen_q": s.seqlen_q,
        "max_seqlen_k": s.seqlen_k,
    }


def _cache(s: Sizes) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache")
    tensors = {name: x.detach() for name, x in zip(names, _batch(s).values(), strict=True)}
    return tensors | {"cache_seqlens": torch.full((s.batch,), s.seqlen_k // 2, dtype=torch.int32)}


def _new_rows(s: Sizes) -> dict[str, Any]:
    shape = (s.batch, min(s.seqlen_q, 1), s.nheads_kv, s.head_dim)
    return {name: torch.randn(shape, dtype=torch.float64) for name in "kv"}


def _table(s: Sizes) -> dict[str, Any]:
    return {"table": _learnt(max(s.nheads, 1), TABLE)}  # one without elements is refused


def _lengths(s: Sizes, *names: str) -> dict[str, Any]:
    return {name: torch.full((s.batch,), min(s[1:3]) // 2, dtype=torch.int32) for name in names}


def _slopes(s: Sizes) -> dict[str, Any]:
    return {"alibi_slopes": torch.rand(s.nheads)}


def _blocks(s: Sizes) -> dict[str, Any]:
    shape = (1, 1, -(-s.seqlen_q // 128) or 1)
    return {
        "counts": torch.ones(shape, dtype=torch.int32),
        "columns": torch.zeros(*shape, 1, dtype=torch.int32),
    }


def _with_table(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a door with a score_mod that reads the table."""

    def call(table: Tensor, **given: Any) -> Any:
        return function(**given, score_mod=lambda s, b, h, i, j: s * table[h, (i - j).abs()])

    return call


def _with_blocks(counts: Tensor, columns: Tensor, **given: Any) -> Any:
    lengths = (given["query"].shape[2] or 1, given["key"].shape[2] or 1)

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    mask = BlockMask.from_kv_blocks(counts, columns, mask_mod=sees, seq_lengths=lengths)
    return flex.flex_attention(**given, block_mask=mask, return_lse=True)


def _bias(s: Sizes, *shape: int) -> dict[str, Any]:
    return _batch(s) | {"bias": _learnt(*shape)}


def with_lse(**given: Any) -> Any:
    """out and lse."""
    return attention(**given, return_lse=True)


def _packed_with_lse(**given: Any) -> Any:
    return attention_varlen(**given, return_lse=True)


def _cached_with_lse(**given: Any) -> Any:
    return attention_with_kvcache(**given, return_lse=True)


NO_CACHE = ("no key", "no head", "nothing")
"""Empty calls that doors with a cache decline."""

DOORS = {
    "attention": Door(_batch, with_lse),
    "attention out": Door(_batch, attention),
    "attention causal": Door(_batch, lambda **a: attention(**a, causal=True)),
    "attention odd": Door(_odd, with_lse),
    "attention negative scale": Door(_batch, lambda **a: with_lse(**a, softmax_scale=-0.5)),
    "attention broadcast": Door(_batch, lambda q, k, v: attention(q, k[:, :, :1].expand(-1, -1, q.shape[2], -1), v)),
    "attention bias": Door(lambda s: _bias(s, s.batch, s.nheads, s.seqlen_q, s.seqlen_k), with_lse),
    "attention bias of rows": Door(lambda s: _bias(s, 1, 1, s.seqlen_q, s.seqlen_k), with_lse),
    "attention bias of keys": Door(lambda s: _bias(s, 1, s.nheads, 1, s.seqlen_k), with_lse),
    "attention bias of queries": Door(lambda s: _bias(s, 1, 1, s.seqlen_q, 1), attention),
    "attention bool": Door(lambda s: _batch(s) | {"bias": torch.rand(s.seqlen_q, s.seqlen_k) > 0.3}, attention),
    "attention sinks": Door(lambda s: _batch(s) | {"sinks": _learnt(s.nheads)}, with_lse),
    "attention slopes": Door(lambda s: _batch(s) | _slopes(s), attention),
    "attention seqused": Door(lambda s: _batch(s) | _lengths(s, "seqused_k"), with_lse),
    "attention dropout": Door(
        lambda s: _batch(s) | {"rng_state": torch.tensor([4, 8])}, lambda **a: with_lse(**a, dropout_p=0.5)
    ),
    "attention softmax": Door(_batch, lambda **a: attention(**a, return_softmax=True)[0]),
    "attention score_mod": Door(lambda s: _batch(s) | _table(s), _with_table(with_lse)),
    "varlen": Door(_packed, _packed_with_lse),
    "varlen bias": Door(
        lambda s: _packed(s) | {"bias": _learnt(s.batch, s.nheads, s.seqlen_q, s.seqlen_k)}, attention_varlen
    ),
    "varlen sinks": Door(lambda s: _packed(s) | {"sinks": _learnt(s.nheads)}, _packed_with_lse),
    "varlen seqused": Door(lambda s: _packed(s) | _lengths(s, "seqused_q", "seqused_k"), attention_varlen),
    "varlen score_mod": Door(lambda s: _packed(s) | _table(s), _with_table(attention_varlen)),
    "flash_attn": Door(_batch, lambda **a: flash_attn.flash_attn_func(**a, return_attn_probs=True)[:2]),
    "flash_attn odd": Door(_odd, flash_attn.flash_attn_func),
    "flash_attn slopes": Door(lambda s: _batch(s) | _slopes(s), flash_attn.flash_attn_func),
    "flash_attn varlen": Door(_packed, flash_attn.flash_attn_varlen_func),
    "flash_attn kvpacked": Door(
        lambda s: {"q": _batch(s)["q"], "kv": _learnt(s.batch, s.seqlen_k, 2, s.nheads_kv, s.head_dim)},
        flash_attn.flash_attn_kvpacked_func,
    ),
    "flash_attn_3": Door(_batch, flash_attn_3.flash_attn_func),
    "flash_attn_3 varlen": Door(_packed, flash_attn_3.flash_attn_varlen_func),
    "flex": Door(_heads_first, lambda **a: flex.flex_attention(**a, return_lse=True)),
    "flex score_mod": Door(lambda s: _heads_first(s) | _table(s), _with_table(flex.flex_attention)),
    "flex block_mask": Door(lambda s: _heads_first(s) | _blocks(s), _with_blocks),
    "kvcache": Door(_cache, _cached_with_lse, NO_CACHE),
    "kvcache sinks": Door(lambda s: _cache(s) | {"sinks": torch.rand(s.nheads)}, _cached_with_lse, NO_CACHE),
    "kvcache append": Door(lambda s: _cache(s) | _new_rows(s), attention_with_kvcache, NO_CACHE),
    "append_kv": Door(
        lambda s: {name: x for name, x in _cache(s).items() if name != "q"} | _new_rows(s),
        lambda **a: append_kv(**a) or a["k_cache"],
        NO_CACHE,
    ),
    "flash_attn cache": Door(
        _cache, lambda **a: flash_attn.flash_attn_with_kvcache(**a, return_softmax_lse=True), NO_CACHE
    ),
}  # fmt: skip
"""All doors by name, for tensors on any device."""


def _efficient(**given: Any) -> Any:
    return aten._scaled_dot_product_efficient_attention(**given, compute_log_sumexp=True)[0]


def _cudnn(**given: Any) -> Any:
    return aten._scaled_dot_product_cudnn_attention(**given, attn_bias=None, compute_log_sumexp=True)[0]


def _biased(s: Sizes) -> dict[str, Any]:
    return _heads_first(s) | {"attn_bias": _learnt(s.batch, s.nheads, s.seqlen_q, s.seqlen_k)}


OPERATORS = {
    "flash operator": Door(_heads_first, lambda **a: aten._scaled_dot_product_flash_attention(**a)[0]),
    "efficient operator": Door(_heads_first, lambda **a: _efficient(**a, attn_bias=None)),
    "efficient operator bias": Door(_biased, _efficient),
    "efficient operator dropout": Door(_heads_first, lambda **a: _efficient(**a, attn_bias=None, dropout_p=0.5)),
    "cudnn operator": Door(_heads_first, _cudnn),
}  # fmt: skip
"""PyTorch's, which scaled_dot_product_attention calls; served where CPU tensors are a GPU's, and on a GPU."""


def results(found: Any) -> tuple[Tensor, ...]:
    """A call's, as a tuple."""
    return found if isinstance(found, tuple) else (found,)


def given(inputs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """A door's inputs on a device, with floats in a dtype of the kernels; captured tensors stay fp32."""

    def one(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.dtype == torch.float64:
            found = x.detach().to(device, torch.float32 if name == "table" and dtype.itemsize < 4 else dtype)
            return found.requires_grad_(x.requires_grad)
        return x.to(device)

    return {name: one(name, x) for name, x in inputs.items()}


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The inputs that require a gradient."""
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
