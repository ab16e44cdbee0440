"""The implementations of the decode benchmark: our kernels and their peers.

Each is a function from a row and one call's inputs to functions of inputs by how they are called, such as a number of
splits; the fastest way counts. One that cannot compute the row raises :class:`cute_attn.lab.benchmark.peers.Declined`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.decode_rows import Inputs, Row
from cute_attn.lab.benchmark.peers import Declined

Call = Callable[[Inputs], Tensor]
Implementation = Callable[[Row, Inputs], dict[str, Call]]

FA3_SPLITS = (4, 16, 32)
"""Numbers of splits for FlashAttention-3, which is also called with the number that it chooses."""
_FA2_PAGE = 256
_FLASHMLA_PAGE = 64


def ours(kernel: str | None, tile: str | None = None, num_splits: int = 0) -> Implementation:
    """``attention_with_kvcache`` with the kernels of an arch or the newest, and a tile's text or the default one."""

    def implementation(row: Row, x: Inputs) -> dict[str, Call]:
        from cute_attn import attention_with_kvcache

        window = (row.window, 0) if row.window else (None, None)
        options: dict[str, Any] = {"kernel": kernel, "tile": tile, "num_splits": num_splits}
        options |= {"causal": row.causal, "window": window}

        def call(x: Inputs) -> Tensor:
            return attention_with_kvcache(**vars(x), return_lse=False, **options)

        return {"": call}

    return implementation


def _cached(x: Inputs, table: str = "page_table") -> dict[str, Any]:
    """Arguments of FlashAttention's flash_attn_with_kvcache other than q and the caches."""
    given: dict[str, Any] = {
        "k": x.k,
        "v": x.v,
        "rotary_cos": x.rotary_cos,
        "rotary_sin": x.rotary_sin,
        "cache_seqlens": x.cache_seqlens,
        table: x.page_table,
    }
    if x.cu_seqlens_q is not None:
        given |= {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": x.max_seqlen_q}
    return given


def _masks(row: Row) -> dict[str, Any]:
    return {"causal": row.causal, "window_size": (row.window, 0) if row.window else (-1, -1)}


def fa3(row: Row, x: Inputs) -> dict[str, Call]:
    """FlashAttention-3: with its number of splits, with others, and with its number and a precomputed schedule."""
    try:
        from flash_attn_interface import (  # type: ignore[import-not-found]
            flash_attn_with_kvcache,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise Declined(f"FA3 is not installed ({error})") from error

    def call(x: Inputs, **how: Any) -> Tensor:
        return flash_attn_with_kvcache(x.q, x.k_cache, x.v_cache, **_cached(x), **_masks(row), **how)

    ways: dict[str, Call] = {f"{n} splits": functools.partial(call, num_splits=n) for n in (0, *FA3_SPLITS)}
    if row.append or row.mixed:
        return ways

    @functools.cache
    def metadata() -> Any:
        return get_scheduler_metadata(
            len(row.sequences),
            row.queries,
            row.capacity,
            *row.heads,
            row.head_dim,
            x.cache_seqlens,
            qkv_dtype=x.q.dtype,
            page_size=row.page or None,
            **_masks(row),
        )

    return ways | {"metadata": lambda x: call(x, scheduler_metadata=metadata())}


def fa2(row: Row, x: Inputs) -> dict[str, Call]:
    """FlashAttention-2: its package or, if that is not installed, torch's version, which also divides keys."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return _fa2_of_torch(row)
    if row.mixed:
        raise Declined("FA2 has no packed queries with a cache")
    if row.page % _FA2_PAGE:
        raise Declined(f"FA2 has pages of multiples of {_FA2_PAGE}")

    def call(x: Inputs) -> Tensor:
        given = _cached(x, "block_table")
        return flash_attn_with_kvcache(x.q, x.k_cache, x.v_cache, **given, **_masks(row))

    return {"": call}


def _fa2_of_torch(row: Row) -> dict[str, Call]:
    """torch's FlashAttention-2: contiguous caches, all of them full."""
    if row.page or row.ragged or row.mixed or row.append:
        raise Declined("torch's FA2 has no lengths, pages or append, and flash-attn is not installed")
    window = {"window_size_left": row.window, "window_size_right": 0} if row.window else {}

    def call(x: Inputs) -> Tensor:
        lengths = (None, None, row.queries, row.capacity)
        causal = row.causal and row.queries > 1 and not row.window
        return torch.ops.aten._flash_attention_forward(
            x.q, x.k_cache, x.v_cache, *lengths, 0.0, causal, False, **window
        )[0]

    return {"": call}


def fa4(row: Row, x: Inputs) -> dict[str, Call]:
    """FlashAttention-4, whose Hopper kernels do not divide keys; pages have the size that it supports."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Declined(f"flash-attn-4 is not installed ({error})") from error
    if row.append:
        raise Declined("FA4 has no append")
    options = {
        "causal": row.causal,
        "window_size": (row.window, 0) if row.window else (None, None),
        "max_seqlen_k": row.capacity,
    }
    if row.window:
        options["causal"] = False

    def call(x: Inputs) -> Tensor:
        lengths: dict[str, Any] = {"seqused_k": x.cache_seqlens, "page_table": x.page_table}
        if x.cu_seqlens_q is not None:
            lengths |= {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": x.max_seqlen_q}
        out = flash_attn_varlen_func(x.q, x.k_cache, x.v_cache, **lengths, **options)
        return out[0] if isinstance(out, tuple) else out

    return {"": call}


def flashmla(row: Row, x: Inputs) -> dict[str, Call]:
    """FlashMLA, as SGLang builds it, with the schedule computed beforehand: latent caches in pages of 64 rows."""
    try:
        from sgl_kernel.flash_mla import (  # type: ignore[import-not-found]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )
    except ImportError as error:
        raise Declined(f"FlashMLA is not installed ({error})") from error
    if not row.latent or row.page != _FLASHMLA_PAGE or row.append or row.mixed or row.window:
        raise Declined(f"FlashMLA decodes latent caches in pages of {_FLASHMLA_PAGE}")

    @functools.cache
    def metadata() -> Any:
        return get_mla_metadata(x.cache_seqlens, row.queries * row.heads[0], 1, row.heads[0])

    def call(x: Inputs) -> Tensor:
        where = (x.k_cache, x.page_table, x.cache_seqlens, row.dims[1])
        return flash_mla_with_kvcache(x.q, *where, *metadata(), causal=row.causal)[0]

    return {"": call}


def cudnn(row: Row, x: Inputs) -> dict[str, Call]:
    """cuDNN through torch's scaled_dot_product_attention: contiguous caches, all of them full."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if row.page or row.ragged or row.mixed or row.append or row.window:
        raise Declined("cuDNN in torch has no lengths, pages, append or window")
    if row.causal and row.queries > 1:
        raise Declined(
            "scaled_dot_product_attention aligns causal to the first query and key, not to the last"
        )

    def call(x: Inputs) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k_cache, x.v_cache))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return {"": call}


OURS = {"cute_attn/sm90": "sm90", "cute_attn/sm80": "sm80"}
PEERS: dict[str, Implementation] = {one.__name__: one for one in (fa3, fa2, fa4, flashmla, cudnn)}
IMPLEMENTATIONS: dict[str, Implementation] = PEERS | {name: ours(arch) for name, arch in OURS.items()}


def names_of(row: Row, target: str) -> tuple[str, ...]:
    """The implementations of a row, peers first: ours for the target, and the Ampere kernel where the row asks."""
    newest = "cute_attn/sm90" if target == "sm90" else "cute_attn/sm80"
    older = ("cute_attn/sm80",) if row.ampere and newest != "cute_attn/sm80" else ()
    return (*PEERS, newest, *older)
