"""Unusual arguments of every function: one sentence each, before anything is launched or written."""

import numpy as np
import pytest
import torch

from cute_attn import (
    append_kv,
    attention,
    attention_varlen,
    attention_with_kvcache,
    flash_attn,
    merge_attention,
)
from cute_attn.api.attention import attention_backward, attention_varlen_backward, draw_rng_state
from cute_attn.flash_attn import flash_attn_3
from tests import refusals
from tests.tensors import int32

NAMES = {"flash_attn_3": flash_attn_3, "merge_attention": merge_attention, "draw_rng_state": draw_rng_state}
NAMES["attention_varlen_backward"] = attention_varlen_backward


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


Q, K, V = ones(2, 5, 4, 16), ones(2, 7, 2, 16), ones(2, 7, 2, 16)
PACKED_Q, PACKED_K = ones(9, 4, 16), ones(9, 2, 16)
STARTS, LSE = int32(0, 4, 9), ones(2, 4, 5)
QUERIES, K_CACHE, V_CACHE = ones(3, 2, 4, 16), ones(3, 16, 2, 16), ones(3, 16, 2, 16)
NEW, LENGTHS = ones(3, 1, 2, 16), int32(0, 0, 0)
TABLE = int32(0, 1, 2).view(3, 1)
ALL = ones(400)
NESTED = torch.nested.nested_tensor([ones(5, 4, 16)] * 2)


def dense(**changes):
    return attention(**({"q": Q, "k": K, "v": V} | changes))


def varlen(**changes):
    given = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    return attention_varlen(**(given | {"max_seqlen_q": 5, "max_seqlen_k": 5} | changes))


def backward(*, of=attention_backward, **changes):
    given = dict.fromkeys(("grad_out", "q", "k", "v", "out"), Q) | {"lse": LSE}
    return of(**(given | changes))


def cached(**changes):
    given = {"q": QUERIES, "k_cache": K_CACHE, "v_cache": V_CACHE}
    return attention_with_kvcache(**(given | changes))


def packed_cached(starts, **changes):
    return cached(q=PACKED_Q, cu_seqlens_q=starts, **changes)


def append(**changes):
    given = {"k_cache": K_CACHE, "v_cache": V_CACHE, "k": NEW, "v": NEW, "cache_seqlens": LENGTHS}
    return append_kv(**(given | changes))


def flash_pages(table, longest=5, **changes):
    lengths = (STARTS, STARTS, 5, longest)
    return flash_attn.flash_attn_varlen_func(
        PACKED_Q, K_CACHE, V_CACHE, *lengths, block_table=table, **changes
    )


WRONG = """
dense(q=Q.to_sparse()) -> TypeError: q is of layout torch.sparse_coo; accepted: a dense torch.Tensor
dense(q=NESTED) -> TypeError: q is nested; accepted: a dense torch.Tensor
dense(q=Q.to("meta"), k=K.to("meta"), v=V.to("meta")) -> ValueError: q is on meta; accepted: cuda and cpu
dense(return_lse=torch.tensor(True)) -> TypeError: return_lse is tensor(True); accepted: False or
dense(kernel=3) -> TypeError: kernel is 3; accepted: 'ARCH', 'ARCH:VARIANT', or None
dense(epilogues=("nope",)) -> ValueError: no feature or epilogue is named 'nope'; accepted:
dense(epilogues=("alibi",)) -> ValueError: epilogues has 'alibi', a feature that has an argument of its own; accepted:
dense(epilogues=("x:t",)) -> ValueError: epilogues has the name 'x:t'; accepted: names without a colon
dense(score_mod=dict) -> TypeError: score_mod is the class dict; accepted: a function of
dense(dropout_p=torch.tensor(0.5)) -> TypeError: dropout_p is tensor(0.5000); accepted: a Python number
dense(dropout_mask=np.ones(3)) -> ValueError: dropout_mask is array(...); accepted: 'flash', 'mem_eff
dense(tile=3) -> TypeError: tile is 3; accepted: a Tile, text such as 'tile_n=32', or None
dense(seqused_k=int32(-1, 3)) -> ValueError: seqused_k[0] is -1; accepted: 0 to 7
varlen(seqused_q=int32(4, -2)) -> ValueError: seqused_q[1] is -2; accepted: 0 to 5
varlen(max_seqlen_q=2 ** 70) -> ValueError: max_seqlen_q is 1180591620717411303424; accepted: 0 to 2147483647
dense(out=Q) -> ValueError: out shares memory with q; accepted: memory of its own
dense(out=ones(400).as_strided((2, 5, 4, 16), (150, 30, 8, 1))) -> ValueError: out has shape (2, 5, 4, 16) and strides (
dense(out=torch._efficientzerotensor((2, 5, 4, 16))) -> ValueError: out is a tensor of zeros without memory; acc
backward(lse=3) -> TypeError: lse is an int; accepted: a torch.Tensor
backward(grad_out=Q[..., :8]) -> ValueError: grad_out has shape (2, 5, 4, 8); accepted: (2, 5, 4, 16)
backward(grad_out=Q.half()) -> TypeError: grad_out has dtype torch.float16; accepted: torch.float32
backward(wanted=("q", "q")) -> ValueError: wanted is ('q', 'q'); accepted: a tuple of 'q', 'k', 'v', each
backward(into=3) -> TypeError: into is an int; accepted: a list or a tuple of tensors, one for each of
backward(into=[Q.clone(), 3, 4]) -> TypeError: into[1] is an int; accepted: a torch.Tensor
backward(into=[Q.clone()]) -> TypeError: into has 1 tensors; accepted: 3, one for each of ('q', 'k', 'v')
backward(into=[ones(2, 5, 4, 8)], wanted=("q",)) -> ValueError: dq has shape (2, 5, 4, 8); accepted: (2, 5, 4, 16)
backward(grad_lse=LSE.to("meta")) -> ValueError: grad_lse is on meta; accepted: cpu, where q is
backward(tile=3) -> TypeError: backward_tile is 3; accepted: a Tile, text such as
backward(rng_state="ab") -> TypeError: rng_state is 'ab'; accepted: int64 or uint64 (2,), or (seed, off
backward(rng_state=(0.5, 1.0), dropout_p=0.5) -> TypeError: rng_state is (0.5, 1.0); accepted: int64
backward(rng_state=(2 ** 64, 0), dropout_p=0.5) -> TypeError: rng_state is (18446744073709551616, 0); accepted: int64
backward(rng_state=torch.zeros(2).long().to("meta")) -> ValueError: rng_state is on meta; accepted: a device
draw_rng_state("gpu") -> ValueError: device is 'gpu'; accepted: a torch.device, or text such as
backward(into=[ones(2, 5, 1, 16).expand(2, 5, 4, 16)], wanted=("q",))
    -> ValueError: dq has shape ..., so that elements share memory
backward(into=[Q.clone().requires_grad_()], wanted=("q",)) -> ValueError: dq requires a gradient
backward(into=[ones(2, 5, 4, 16)[:]] * 3) -> ValueError: dk shares memory with dq; accepted: memory of its own
backward(into=[torch._neg_view(ones(2, 5, 4, 16))], wanted=("q",)) -> ValueError: dq is a view that torch negates where
backward(of=attention_varlen_backward, q=PACKED_Q, k=PACKED_K, v=PACKED_K, grad_out=PACKED_Q, out=PACKED_Q, \
cu_seqlens_q=torch.tensor(3), cu_seqlens_k=STARTS, max_seqlen_q=5, max_seqlen_k=5)
    -> ValueError: cu_seqlens_q has shape (); accepted
cached(q=NESTED) -> TypeError: q is nested; accepted: a dense torch.Tensor
packed_cached([0, 3, 6, 9], cache_seqlens=3) -> TypeError: cu_seqlens_q is a list; accepted: a torch.T
packed_cached(int32(), cache_seqlens=3) -> ValueError: cu_seqlens_q has shape (0,); accepted: (batch
cached(cache_seqlens=2 ** 40) -> ValueError: cache_seqlens is 1099511627776; accepted: 0 to 16, the cache
cached(cache_seqlens=3.0) -> TypeError: cache_seqlens is 3.0; accepted: int32 (batch,), an int or
cached(cache_seqlens=int32(3, 4, 17)) -> ValueError: cache_seqlens[2] is 17; accepted: 0 to 16
cached(cache_leftpad=int32(0, -2, 1)) -> ValueError: cache_leftpad[1] is -2; accepted: 0 to 16
cached(softmax_scale=1e-46) -> ValueError: softmax_scale is 1e-46; accepted: a finite number, 0 or from 2**-60
cached(softcap=-1.0) -> ValueError: softcap is -1.0; accepted: a number from 2**-60 to 2**12, or 0 for none
cached(alibi_slopes=ones(4).half()) -> TypeError: alibi_slopes has dtype torch.float16; accepted: torch
cached(alibi_slopes=ones(8)[::2]) -> ValueError: alibi_slopes has strides (2,); accepted: a last
cached(k_cache=ones(3, 16, 2, 577)) -> ValueError: k_cache has head dim 577; accepted: up to 576
cached(v_cache=ones(3, 16, 2, 32)[..., ::2]) -> ValueError: v_cache has strides (1024, 64, 32, 2); accepted: a last stri
cached(tile="nonsense") -> ValueError: tile has 'nonsense'; accepted: FIELD=VALUE with a field of tile_m
attention(Q, K, V, tile="tile_n=33") -> Unsupported: tile_n is 33; accepted:
attention(Q, K, V, backward_tile="tile_n=33") -> Unsupported: ...; accepted:
attention(Q, K, V, backward_tile="tile_q=3") -> ValueError: backward_tile has 'tile_q=3'
cached(max_seqlen_q="a") -> TypeError: max_seqlen_q is 'a'; accepted: a Python int
packed_cached(int32(0, 3, 6, 9), max_seqlen_q=2 ** 70) -> ValueError: max_seqlen_q is ...; accepted: 0 to
cached(return_lse="yes") -> TypeError: return_lse is 'yes'; accepted: False or True
cached(check_lengths="no") -> TypeError: check_lengths is 'no'; accepted: False or True
cached(same_bits=torch.tensor(1)) -> TypeError: same_bits is tensor(1); accepted: False or True
cached(out=ones(3, 2, 4, 8)) -> ValueError: out has shape (3, 2, 4, 8); accepted: (3, 2, 4, 16)
cached(sinks=ALL[:4], out=ALL[:384].view(3, 2, 4, 16)) -> ValueError: out shares memory with sinks; accepted: memory of
cached(rotary_interleaved=torch.tensor(1)) -> TypeError: rotary_interleaved is tensor(1); accepted:
cached(cache_batch_idx=int32(0, -1, 1)) -> ValueError: cache_batch_idx[1] is -1; accepted: 0 to 2
cached(page_table=int32(0, 7, 1).view(3, 1)) -> ValueError: page_table[1, 0] is 7; accepted: 0 to 2
cached(out=ones(1, 1, 1, 16).expand(3, 2, 4, 16)) -> ValueError: out has shape (3, 2, 4, 16) and strides (0, 0, 0, 1), s
cached(out=ones(3, 2, 4, 16).requires_grad_()) -> ValueError: out is given where autograd records; acce
cached(k=NEW, v=NEW, cache_seqlens=3, k_cache=torch._efficientzerotensor(K_CACHE.shape))
    -> ValueError: k_cache is a tensor of zeros without memory; accepted: a tensor to write
cached(k=NEW, v=NEW.clone(), cache_seqlens=3, v_cache=K_CACHE)
    -> ValueError: v_cache shares memory with k_cache; accepted: memory of its own, or without rotary embedding the \
views k_cache[..., :head_dim_v] and, as v, k[..., :head_dim_v]
append(v_cache=K_CACHE, v=NEW.clone()) -> ValueError: v_cache shares memory with k_cache; accepted: memory of its own
append(v_cache=K_CACHE[..., 8:], v=NEW[..., 8:]) -> ValueError: v_cache shares memory with k_cache; accepted: memory of
append(v_cache=K_CACHE[..., :8], v=NEW[..., 8:]) -> ValueError: v_cache shares memory with k_cache; accepted: memory of
append(k_cache=K_CACHE[..., :8], k=NEW[..., :8], v_cache=K_CACHE) -> ValueError: v_cache shares memory with k_cache; acc
append(v_cache=K_CACHE, rotary_cos=ones(16, 4), rotary_sin=ones(16, 4)) -> ValueError: v_cache shares memory with k_cach
append(v_cache=K_CACHE.as_strided((3, 16, 2, 8), (512, 32, 8, 1)), v=NEW[..., :8])
    -> ValueError: v_cache shares memory with k_cache; accepted: memory of its own
append(k_cache=ones(1, 16, 2, 16).expand(3, 16, 2, 16)) -> ValueError: k_cache has shape (3, 16, 2, 16) and strides (0,
append(page_table=TABLE + 5) -> ValueError: page_table[0, 0] is 5; accepted: 0 to 2
append(cache_seqlens=int32(0, 17, 0)) -> ValueError: cache_seqlens[1] is 17; accepted: 0 to 16
append(check_lengths="no") -> TypeError: check_lengths is 'no'; accepted: False or True
append(cu_seqlens_k_new=torch.tensor(3)) -> ValueError: cu_seqlens_k_new has shape (); accepted: (batch
append(cache_seqlens=0) -> TypeError: cache_seqlens is an int; accepted: a torch.Tensor
append(k_cache=ones(1, 4096, 1, 8), v_cache=ones(1, 4096, 1, 8), k=ones(1, 1, 1, 8), v=ones(1, 1, 1, 8), \
cache_seqlens=int32(0), page_table=torch.zeros(1, 2 ** 19, dtype=torch.int32))
    -> ValueError: k_cache has capacity 2147483648; accepted: up to
merge_attention(ones(2, 1, 3, 4, 8), ones(2, 1, 4, 3), dtype="fp16") -> TypeError: dtype is 'fp16'
flash_pages(TABLE[:2], longest=-1) -> ValueError: max_seqlen_k is -1; accepted: 0 to 16, the rows of a
flash_pages(TABLE[:2].long()) -> TypeError: block_table has dtype torch.int64; accepted: torch.int32
flash_pages(TABLE[:2], deterministic="no") -> TypeError: deterministic is 'no'; accepted: False or True
flash_attn.flash_attn_with_kvcache(QUERIES, K_CACHE, V_CACHE, return_softmax_lse="no")
    -> TypeError: return_softmax_lse is 'no'; accepted: False or True
flash_attn.flash_attn_func(Q, K, V, causal=ones(3)) -> TypeError: causal is a Tensor of shape
flash_attn.flash_attn_func(Q, K, V, window_size=ones(2, 2)) -> ValueError: window_size is a Tensor of
flash_attn_3._flash_attn_forward(QUERIES, K_CACHE, V_CACHE, rotary_sin=ones(16, 4))
    -> ValueError: rotary_cos is None; accepted: both rotary_cos and rotary_sin, or neither
flash_attn.flash_attn_func(Q, K, V, None) -> TypeError: dropout_p is None; accepted: a Python
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_told_in_one_sentence(call, sentence):
    assert "accepted" in refusals.check(call, sentence, globals() | NAMES)


def test_lengths_may_be_0_and_all_rows():
    found = attention(Q, K, V, seqused_k=int32(0, 7))
    assert not found[0].any() and found[1].equal(attention(Q, K, V)[1])
    assert not varlen(seqused_q=int32(0, 5), seqused_k=int32(4, 0)).any()
    seen = cached(cache_seqlens=int32(0, 16, 4), cache_leftpad=int32(0, 16, 0))
    assert not seen[:2].any() and seen[2].equal(cached(cache_seqlens=4)[2])


def test_pages_that_no_row_needs_may_be_any():
    """Invalid page numbers are allowed after a sequence's end and before its first valid row."""
    table = int32(-7, 0, 99, 1, 2, -1).view(2, 3)
    k, v = torch.randn(2, 3, 4, 2, 16)
    options = {"page_table": table, "cache_seqlens": int32(6, 7), "cache_leftpad": int32(4, 0)}
    found = attention_with_kvcache(QUERIES[:2], k, v, **options)
    options["page_table"] = int32(0, 0, 0, 1, 2, 0).view(2, 3)
    assert found.equal(attention_with_kvcache(QUERIES[:2], k, v, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_numbers_of_numpy_are_causal_as_well(causal):
    assert attention(Q, K, V, causal=np.bool_(causal)).equal(attention(Q, K, V, causal=causal))
    assert cached(causal=np.bool_(causal)).equal(cached(causal=causal))


def test_rows_of_no_sequence_keep_what_out_has():
    starts = int32(1, 4, 4, 8)
    out = torch.full((9, 4, 16), 7.0)
    found = packed_cached(starts, out=out)
    assert found is out and (out[[0, 8]] == 7).all() and out[1:8].equal(packed_cached(starts)[1:8])
    out = torch.full((9, 4, 16), 7.0)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": int32(0, 4, 8, 9)}
    for more in ({}, {"seqused_q": int32(3, 0, 1)}):
        assert varlen(**given, **more, out=out) is out
        assert (out[[0, 8]] == 7).all() and out[1:8].equal(varlen(**given, **more)[1:8])
