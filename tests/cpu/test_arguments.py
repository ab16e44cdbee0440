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


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


Q, K, V = ones(2, 5, 4, 16), ones(2, 7, 2, 16), ones(2, 7, 2, 16)
PACKED_Q, PACKED_K = ones(9, 4, 16), ones(9, 2, 16)
STARTS, LSE = ints(0, 4, 9), ones(2, 4, 5)
QUERIES, K_CACHE, V_CACHE = ones(3, 2, 4, 16), ones(3, 16, 2, 16), ones(3, 16, 2, 16)
NEW, LENGTHS = ones(3, 1, 2, 16), ints(0, 0, 0)
TABLE = ints(0, 1, 2).view(3, 1)
ALL = ones(400)
NESTED = torch.nested.nested_tensor([ones(5, 4, 16)] * 2)
JAGGED = torch.nested.nested_tensor([ones(5, 4, 16)] * 2, layout=torch.jagged)


def dense(**changes):
    return lambda: attention(**({"q": Q, "k": K, "v": V} | changes))


def varlen(**changes):
    given = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    return lambda: attention_varlen(**(given | {"max_seqlen_q": 5, "max_seqlen_k": 5} | changes))


def backward(*, of=attention_backward, **changes):
    given = dict.fromkeys(("grad_out", "q", "k", "v", "out"), Q) | {"lse": LSE}
    return lambda: of(**(given | changes))


def cached(**changes):
    given = {"q": QUERIES, "k_cache": K_CACHE, "v_cache": V_CACHE}
    return lambda: attention_with_kvcache(**(given | changes))


def packed_cached(starts, **changes):
    return cached(q=PACKED_Q, cu_seqlens_q=starts, **changes)


def append(**changes):
    given = {"k_cache": K_CACHE, "v_cache": V_CACHE, "k": NEW, "v": NEW, "cache_seqlens": LENGTHS}
    return lambda: append_kv(**(given | changes))


def flash_pages(table, longest=5, **changes):
    lengths = (STARTS, STARTS, 5, longest)
    return lambda: flash_attn.flash_attn_varlen_func(
        PACKED_Q, K_CACHE, V_CACHE, *lengths, block_table=table, **changes
    )


WRONG = {
    "sparse": (dense(q=Q.to_sparse()), "q is of layout torch.sparse_coo; accepted: a dense torch.Tensor"),
    "nested": (dense(q=NESTED), "q is nested; accepted: a dense torch.Tensor"),
    "nested-beside-a-bias": (dense(q=NESTED, k=NESTED, bias=ones(5, 5)), "q is nested; accepted"),
    "jagged": (dense(q=JAGGED, k=JAGGED, v=JAGGED), "q is nested; accepted: a dense torch.Tensor"),
    "sparse-slopes": (dense(alibi_slopes=ones(4).to_sparse()), "alibi_slopes is of layout torch.sparse_coo; accepted"),
    "meta": (dense(q=Q.to("meta"), k=K.to("meta"), v=V.to("meta")), "q is on meta; accepted: cuda and cpu"),
    "causal-tensor": (dense(causal=torch.tensor(True)), r"causal is tensor\(True\); accepted: False, True, 'bot"),
    "causal-list": (dense(causal=[True]), r"causal is \[True\]; accepted: False, True"),
    "return-lse-tensor": (dense(return_lse=torch.tensor(True)), r"return_lse is tensor\(True\); accepted: False or"),
    "deterministic": (dense(deterministic=torch.tensor(True)), r"deterministic is tensor\(True\); accepted: False"),
    "kernel-number": (dense(kernel=3), "kernel is 3; accepted: 'ARCH', 'ARCH:VARIANT', or None"),
    "epilogue-unknown": (dense(epilogues=("nope",)), "no epilogue is registered as 'nope'; accepted: "),
    "epilogues-number": (dense(epilogues=3), "epilogues is 3; accepted: a tuple of names, or a dict of names to arg"),
    "epilogues-of-numbers": (dense(epilogues=(3,)), r"epilogues is \(3,\); accepted: a tuple of names, or a dict of"),
    "epilogues-of-lists": (dense(epilogues=(["q"],)), r"epilogues is \(\['q'\],\); accepted: a tuple of names, or"),
    "epilogues-keys": (dense(epilogues={3: 4}), r"epilogues is \{3: 4\}; accepted: a tuple of names, or a dict of"),
    "epilogues-tensor": (dense(epilogues=ones(3)), r"epilogues is a Tensor of shape \(3,\); accepted: a tuple of nam"),
    "epilogues-generator": (dense(epilogues=(x for x in "ab")), "epilogues is <generator .*>; accepted: a tuple of na"),
    "epilogues-none": (dense(epilogues=None), "epilogues is None; accepted: a tuple of names, or a dict"),
    "epilogues-letters": (dense(epilogues=("x:t",)), "epilogues has the name 'x:t'; accepted: names without a colon"),
    "epilogues-of-functions": (
        dense(score_mod=lambda s, *_: s * 2, epilogues="ab"), "epilogues is 'ab'; accepted: a tuple of names, or a dict"
    ),
    "score-mod-class": (dense(score_mod=dict), "score_mod is the class dict; accepted: a function of"),
    "score-mod-nested": (dense(score_mod=NESTED), "score_mod is a Tensor; accepted: a function of"),
    "causal-in-a-tuple": (dense(causal=([],)), r"causal is \(\[\],\); accepted: False, True, 'bottom_right'"),
    "causal-matrix": (dense(causal=ones(2, 2)), r"causal is a Tensor of shape \(2, 2\); accepted: False, True"),
    "dropout-tensor": (dense(dropout_p=ones(3)), r"dropout_p is a Tensor of shape \(3,\); accepted: a Python number"),
    "dropout-one": (dense(dropout_p=torch.tensor(0.5)), r"dropout_p is tensor\(0.5000\); accepted: a Python number"),
    "dropout-mask-array": (dense(dropout_mask=np.ones(3)), r"dropout_mask is array\(.*\); accepted: 'flash', 'mem_eff"),
    "precision-array": (dense(precision=np.ones(3)), r"precision is array\(.*\); accepted: 'fp32', 'tf32', or None"),
    "softcap-large": (dense(softcap=10**400), "softcap is inf; accepted: a finite number above 0"),
    "return-lse-text": (dense(return_lse="yes"), "return_lse is 'yes'; accepted: False or True"),
    "return-lse-list": (dense(return_lse=([],)), r"return_lse is \(\[\],\); accepted: False or True"),
    "tile-number": (dense(tile=3), "tile is 3; accepted: a Tile, text such as 'tile_n=32', or None"),
    "backward-tile-list": (dense(backward_tile=[]), r"backward_tile is \[\]; accepted: a Tile, text such as"),
    "devices": (dense(bias=ones(1, 4, 5, 7).to("meta")), "bias is on meta; accepted: cpu, where q is"),
    "used-negative": (dense(seqused_k=ints(-1, 3)), r"seqused_k\[0\] is -1; accepted: 0 to 7"),
    "used-beyond": (dense(seqused_k=ints(7, 8)), r"seqused_k\[1\] is 8; accepted: 0 to 7"),
    "packed-used-negative": (varlen(seqused_q=ints(4, -2)), r"seqused_q\[1\] is -2; accepted: 0 to 5"),
    "packed-used-beyond": (varlen(seqused_k=ints(5, 5)), r"seqused_k\[0\] is 5; accepted: 0 to 4"),
    "longest-2^70": (varlen(max_seqlen_q=2**70), f"max_seqlen_q is {2**70}; accepted: 0 to {2**31 - 1}"),
    "out-is-q": (dense(out=Q), "out shares memory with q; accepted: memory of its own"),
    "out-in-k": (dense(q=Q[:, :, :2], out=K[:, 2:]), "out shares memory with k; accepted: memory of its own"),
    "out-overlaps": (
        dense(out=ones(400).as_strided((2, 5, 4, 16), (150, 30, 8, 1))),
        r"out has shape \(2, 5, 4, 16\) and strides \(150, 30, 8, 1\), so that elements share memory; accepted",
    ),
    "out-zeros": (dense(out=torch._efficientzerotensor((2, 5, 4, 16))), "out is a tensor of zeros without memory; acc"),
    "starts-number": (varlen(cu_seqlens_q=torch.tensor(0)), r"cu_seqlens_q has shape \(\); accepted: \(batch \+ 1,"),
    "starts-list": (varlen(cu_seqlens_q=[0, 4, 9]), "cu_seqlens_q is a list; accepted: a torch.Tensor"),
    "lse-number": (backward(lse=3), "lse is an int; accepted: a torch.Tensor"),
    "out-none": (backward(out=None), "out is a NoneType; accepted: a torch.Tensor"),
    "wanted-number": (backward(wanted=3), r"wanted is 3; accepted: a tuple of 'q', 'k', 'v', each once"),
    "wanted-list": (backward(wanted=(["q"],)), r"wanted is \(\['q'\],\); accepted: a tuple of 'q', 'k', 'v', each"),
    "wanted-twice": (backward(wanted=("q", "q")), r"wanted is \('q', 'q'\); accepted: a tuple of 'q', 'k', 'v', each"),
    "into-number": (backward(into=3), r"into is an int; accepted: a list or a tuple of tensors, one for each of"),
    "into-generator": (backward(into=(x for x in (Q, Q, Q))), "into is a generator; accepted: a list or a tuple of te"),
    "into-tensor": (backward(into=Q), "into is a Tensor; accepted: a list or a tuple of tensors, one for each"),
    "into-numbers": (backward(into=[Q.clone(), 3, 4]), r"into\[1\] is an int; accepted: a torch.Tensor"),
    "into-few": (backward(into=[Q.clone()]), r"into has 1 tensors; accepted: 3, one for each of \('q', 'k', 'v'\)"),
    "into-shape": (
        backward(into=[ones(2, 5, 4, 8)], wanted=("q",)), r"dq has shape \(2, 5, 4, 8\); accepted: \(2, 5, 4, 16\)$"
    ),
    "grad-out-number": (backward(grad_out=3), "grad_out is an int; accepted: a torch.Tensor"),
    "grad-lse-device": (backward(grad_lse=LSE.to("meta")), "grad_lse is on meta; accepted: cpu, where q is"),
    "backward-devices": (backward(k=Q.to("meta")), "k is on meta; accepted: cpu, where q is"),
    "backward-tile": (backward(tile=3), "backward_tile is 3; accepted: a Tile, text such as"),
    "state-text": (backward(rng_state="ab"), r"rng_state is 'ab'; accepted: int64 or uint64 \(2,\), or \(seed, off"),
    "state-number": (backward(rng_state=3, dropout_p=0.5), "rng_state is 3; accepted: int64 or uint64"),
    "state-short": (backward(rng_state=(3,), dropout_p=0.5), r"rng_state is \(3,\); accepted: int64 or uint64"),
    "state-floats": (backward(rng_state=(0.5, 1.0), dropout_p=0.5), r"rng_state is \(0.5, 1.0\); accepted: int64"),
    "state-large": (backward(rng_state=(2**64, 0), dropout_p=0.5), f"rng_state is .{2**64}, 0.; accepted: int64"),
    "state-meta": (backward(rng_state=torch.zeros(2).long().to("meta")), "rng_state is on meta; accepted: a device"),
    "device-number": (lambda: draw_rng_state(3.5), "device is 3.5; accepted: a torch.device, or text such as"),
    "device-name": (lambda: draw_rng_state("gpu"), "device is 'gpu'; accepted: a torch.device, or text such as"),
    "into-one": (backward(into=[ones(2, 5, 4, 16)[:]] * 3), "dk shares memory with dq; accepted: memory of its own"),
    "into-negated": (
        backward(into=[torch._neg_view(ones(2, 5, 4, 16))], wanted=("q",)), "dq is a view that torch negates where it",
    ),
    "into-q": (
        backward(into=[Q], wanted=("q",), grad_out=Q.clone(), out=Q.clone()),
        "dq shares memory with q; accepted: memory of its own",
    ),
    "packed-backward-starts": (
        backward(
            of=attention_varlen_backward, q=PACKED_Q, k=PACKED_K, v=PACKED_K, grad_out=PACKED_Q, out=PACKED_Q,
            cu_seqlens_q=torch.tensor(3), cu_seqlens_k=STARTS, max_seqlen_q=5, max_seqlen_k=5,
        ),
        r"cu_seqlens_q has shape \(\); accepted",
    ),
    "cache-nested": (cached(q=NESTED), "q is nested; accepted: a dense torch.Tensor"),
    "cache-sparse": (cached(q=QUERIES.to_sparse()), "q is of layout torch.sparse_coo; accepted: a dense"),
    "cache-starts-list": (packed_cached([0, 3, 6, 9], cache_seqlens=3), "cu_seqlens_q is a list; accepted: a torch.T"),
    "cache-starts-number": (packed_cached(torch.tensor(3), cache_seqlens=3), r"cu_seqlens_q has shape \(\); accepted"),
    "cache-starts-none": (packed_cached(ints(), cache_seqlens=3), r"cu_seqlens_q has shape \(0,\); accepted: \(batch"),
    "cache-starts-alone": (packed_cached(torch.tensor(3)), r"cu_seqlens_q has shape \(\); accepted"),
    "cache-length-2^40": (cached(cache_seqlens=2**40), "cache_seqlens is 1099511627776; accepted: 0 to 16, the cache"),
    "cache-length-negative": (cached(cache_seqlens=-1), "cache_seqlens is -1; accepted: 0 to"),
    "cache-length-float": (cached(cache_seqlens=3.0), r"cache_seqlens is 3.0; accepted: int32 \(batch,\), an int or"),
    "cache-lengths-negative": (cached(cache_seqlens=ints(3, -1, 4)), r"cache_seqlens\[1\] is -1; accepted: 0 to 16"),
    "cache-lengths-beyond": (cached(cache_seqlens=ints(3, 4, 17)), r"cache_seqlens\[2\] is 17; accepted: 0 to 16"),
    "cache-leftpad-negative": (cached(cache_leftpad=ints(0, -2, 1)), r"cache_leftpad\[1\] is -2; accepted: 0 to 16"),
    "cache-scale-nan": (cached(softmax_scale=float("nan")), "softmax_scale is nan; accepted: a finite number"),
    "cache-scale-text": (cached(softmax_scale="1"), "softmax_scale is '1'; accepted: a Python number"),
    "cache-softcap": (cached(softcap=-1.0), "softcap is -1.0; accepted: a finite number above 0, or 0 for none"),
    "cache-causal": (cached(causal=torch.tensor(True)), r"causal is tensor\(True\); accepted: False or True"),
    "cache-slopes": (cached(alibi_slopes=ones(4).half()), "alibi_slopes has dtype torch.float16; accepted: torch"),
    "cache-slopes-strides": (cached(alibi_slopes=ones(8)[::2]), r"alibi_slopes has strides \(2,\); accepted: a last"),
    "cache-head-dim": (
        cached(q=QUERIES[..., :12], k_cache=K_CACHE[..., :12]), "k_cache has head dim 12; accepted: multiples of 8",
    ),
    "cache-strides": (
        cached(v_cache=ones(3, 16, 2, 32)[..., ::2]), r"v_cache has strides \(1024, 64, 32, 2\); accepted: a last stri",
    ),
    "cache-no-kernel": (cached(kernel="sm70"), r"kernel is 'sm70' \(did you mean 'sm.0'.*; accepted: 'sm80', 'sm90'"),
    "cache-no-tile": (cached(tile="nonsense"), "tile has 'nonsense'; accepted: FIELD=VALUE with a field of tile_m"),
    "cache-tile-of-another": (cached(tile="num_warps=8", kernel="sm90"), "tile has 'num_warps=8'; accepted: FIELD=VAL"),
    "tile-33": (lambda: attention(Q, K, V, tile="tile_n=33"), "forward-sm80 declined .* tile_n is 33; accepted: "),
    "tile-negative": (lambda: attention(Q, K, V, tile="tile_n=-16"), "forward-sm80 .* tile_n is -16; accepted: multip"),
    "tile-backward": (lambda: attention(Q, K, V, backward_tile="tile_n=33"), "backward-sm80 declined .*; accepted: "),
    "q-of-numpy": (lambda: attention(np.ones(3), K, V), "q is an ndarray; accepted: a torch.Tensor"),
    "score-mod-number": (lambda: attention(Q, K, V, score_mod=3), "score_mod is an int; accepted: a function of"),
    "cache-tile-number": (cached(tile=3), "tile is 3; accepted: a Tile, text such as"),
    "cache-kernel-list": (cached(kernel=[]), r"kernel is \[\]; accepted: 'ARCH', 'ARCH:VARIANT', or None"),
    "cache-longest": (cached(max_seqlen_q="a"), "max_seqlen_q is 'a'; accepted: a Python int"),
    "cache-longest-beyond": (packed_cached(ints(0, 3, 6, 9), max_seqlen_q=2**70), "max_seqlen_q is .*; accepted: 0 to"),
    "cache-lse-text": (cached(return_lse="yes"), "return_lse is 'yes'; accepted: False or True"),
    "cache-check-text": (cached(check_lengths="no"), "check_lengths is 'no'; accepted: False or True"),
    "cache-check-tensor": (cached(check_lengths=ones(3)), r"check_lengths is a Tensor of shape \(3,\); accepted: Fals"),
    "cache-split-keys-large": (cached(split_keys=2**70), "split_keys is 1180591620717411303424; accepted: multiples"),
    "cache-out-shape": (cached(out=ones(3, 2, 4, 8)), r"out has shape \(3, 2, 4, 8\); accepted: \(3, 2, 4, 16\)$"),
    "cache-out-in-sinks": (
        cached(sinks=ALL[:4], out=ALL[:384].view(3, 2, 4, 16)), "out shares memory with sinks; accepted: memory of its"
    ),
    "cache-kernel": (cached(kernel=3), "kernel is 3; accepted: 'ARCH', 'ARCH:VARIANT', or None"),
    "cache-interleaved": (cached(rotary_interleaved=torch.tensor(1)), r"rotary_interleaved is tensor\(1\); accepted: "),
    "cache-entry": (cached(cache_batch_idx=ints(0, -1, 1)), r"cache_batch_idx\[1\] is -1; accepted: 0 to 2"),
    "cache-page": (cached(page_table=ints(0, 7, 1).view(3, 1)), r"page_table\[1, 0\] is 7; accepted: 0 to 2"),
    "cache-out-expanded": (
        cached(out=ones(1, 1, 1, 16).expand(3, 2, 4, 16)),
        r"out has shape \(3, 2, 4, 16\) and strides \(0, 0, 0, 1\), so that elements share memory; accepted: elements",
    ),
    "cache-out-overlaps": (
        cached(out=ones(400).as_strided((3, 2, 4, 16), (100, 50, 8, 1))), "out has shape .*, so that elements"
    ),
    "cache-out-is-q": (cached(out=QUERIES), "out shares memory with q; accepted: memory of its own"),
    "cache-out-in-cache": (cached(out=V_CACHE.view(-1, 2, 4, 16)[:3]), "out shares memory with v_cache; accepted"),
    "cache-out-gradient": (cached(out=ones(3, 2, 4, 16).requires_grad_()), "out is given where autograd records; acce"),
    "cache-out-list": (cached(out=[1]), "out is a list; accepted: a torch.Tensor"),
    "cache-append-zeros": (
        cached(k=NEW, v=NEW, cache_seqlens=3, k_cache=torch._efficientzerotensor(K_CACHE.shape)),
        "k_cache is a tensor of zeros without memory; accepted: a tensor to write",
    ),
    "cache-append-shared": (
        cached(k=NEW, v=NEW, cache_seqlens=3, v_cache=K_CACHE), "v_cache shares memory with k_cache; accepted: memory",
    ),
    "append-shared": (append(v_cache=K_CACHE), "v_cache shares memory with k_cache; accepted: memory of its own"),
    "append-expanded": (
        append(k_cache=ones(1, 16, 2, 16).expand(3, 16, 2, 16)),
        r"k_cache has shape \(3, 16, 2, 16\) and strides \(0, 32, 16, 1\), so that elements share memory; accepted",
    ),
    "append-expanded-values": (append(v_cache=ones(3, 1, 2, 16).expand(3, 16, 2, 16)), "v_cache has shape .*, so that"),
    "append-zeros": (append(v_cache=torch._efficientzerotensor(V_CACHE.shape)), "v_cache is a tensor of zeros withou"),
    "append-page": (append(page_table=TABLE + 5), r"page_table\[0, 0\] is 5; accepted: 0 to 2"),
    "append-lengths-beyond": (append(cache_seqlens=ints(0, 17, 0)), r"cache_seqlens\[1\] is 17; accepted: 0 to 16"),
    "append-interleaved": (append(rotary_interleaved="no"), "rotary_interleaved is 'no'; accepted: False or True"),
    "append-check-text": (append(check_lengths="no"), "check_lengths is 'no'; accepted: False or True"),
    "append-starts": (append(cu_seqlens_k_new=torch.tensor(3)), r"cu_seqlens_k_new has shape \(\); accepted: \(batch"),
    "append-lengths": (append(cache_seqlens=0), "cache_seqlens is an int; accepted: a torch.Tensor"),
    "append-capacity": (
        append(k_cache=ones(1, 4096, 1, 8), v_cache=ones(1, 4096, 1, 8), k=ones(1, 1, 1, 8), v=ones(1, 1, 1, 8),
               cache_seqlens=ints(0), page_table=torch.zeros(1, 2**19, dtype=torch.int32)),
        f"k_cache has capacity {2**31}; accepted: up to",
    ),
    "merge-dtype": (lambda: merge_attention(ones(2, 1, 3, 4, 8), ones(2, 1, 4, 3), dtype="fp16"), "dtype is 'fp16'"),
    "flash-pages-list": (flash_pages([[0], [1]]), "block_table is a list; accepted: a torch.Tensor"),
    "flash-pages-number": (flash_pages(torch.tensor(1)), r"block_table has shape \(\); accepted: \(batch, pages of a"),
    "flash-pages-longest": (flash_pages(TABLE[:2], longest=-1), "max_seqlen_k is -1; accepted: 0 to 16, the rows of a"),
    "flash-pages-dtype": (flash_pages(TABLE[:2].long()), "block_table has dtype torch.int64; accepted: torch.int32"),
    "flash-pages-flag": (flash_pages(TABLE[:2], deterministic="no"), "deterministic is 'no'; accepted: False or True"),
    "flash-cache-pages": (
        lambda: flash_attn.flash_attn_with_kvcache(QUERIES, K_CACHE, V_CACHE, block_table=[0]), "block_table is a list",
    ),
    "flash-cache-lse": (
        lambda: flash_attn.flash_attn_with_kvcache(QUERIES, K_CACHE, V_CACHE, return_softmax_lse="no"),
        "return_softmax_lse is 'no'; accepted: False or True",
    ),
    "flash-causal": (lambda: flash_attn.flash_attn_func(Q, K, V, causal="no"), "causal is 'no'; accepted: False or T"),
    "flash-causal-tensor": (lambda: flash_attn.flash_attn_func(Q, K, V, causal=ones(3)), "causal is a Tensor of shape"),
    "flash-window": (lambda: flash_attn.flash_attn_func(Q, K, V, window_size=ones(2, 2)), "window_size is a Tensor of"),
    "flash-3-qv": (lambda: flash_attn_3.flash_attn_func(Q, K, V, qv=[]), r"qv is \[\]; accepted: its default"),
    "flash-3-sin": (
        lambda: flash_attn_3._flash_attn_forward(QUERIES, K_CACHE, V_CACHE, rotary_sin=ones(16, 4)),
        "rotary_cos is None; accepted: both rotary_cos and rotary_sin, or neither",
    ),
    "flash-nested": (lambda: flash_attn.flash_attn_func(NESTED, NESTED, NESTED), "q is nested; accepted: a dense"),
    "flash-softcap": (lambda: flash_attn.flash_attn_func(Q, K, V, softcap=None), "softcap is None; accepted: a Python"),
    "flash-dropout": (lambda: flash_attn.flash_attn_func(Q, K, V, None), "dropout_p is None; accepted: a Python"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_in_one_sentence(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="^" + message) as error:
        call()
    assert "accepted" in str(error.value) and "\n" not in str(error.value)


def test_lengths_may_be_0_and_all_rows():
    found = attention(Q, K, V, seqused_k=ints(0, 7))
    assert not found[0].any() and found[1].equal(attention(Q, K, V)[1])
    assert not varlen(seqused_q=ints(0, 5), seqused_k=ints(4, 0))().any()
    seen = cached(cache_seqlens=ints(0, 16, 4), cache_leftpad=ints(0, 16, 0))()
    assert not seen[:2].any() and seen[2].equal(cached(cache_seqlens=4)()[2])


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_cache_takes_any_scale_that_attention_takes(scale):
    k, v = torch.randn(2, 3, 16, 2, 16)
    found = attention_with_kvcache(QUERIES, k, v, softmax_scale=scale)
    torch.testing.assert_close(found, attention(QUERIES, k, v, softmax_scale=scale))


@pytest.mark.parametrize("flag", [1, np.True_, torch.tensor(True), 2.0])
def test_flash_attns_flags_may_be_what_has_a_truth_value(flag):
    """As its extension takes them; None is False."""
    found = flash_attn.flash_attn_func(Q, K, V, causal=flag, return_attn_probs=flag)[0]
    assert found.equal(attention(Q, K, V, causal=True))
    assert flash_attn.flash_attn_func(Q, K, V, causal=None, deterministic=None).equal(attention(Q, K, V))


def test_pages_that_no_row_needs_may_be_any():
    """Those behind a sequence's end, and those before the first valid row."""
    table = ints(-7, 0, 99, 1, 2, -1).view(2, 3)
    k, v = torch.randn(2, 3, 4, 2, 16)
    options = {"page_table": table, "cache_seqlens": ints(6, 7), "cache_leftpad": ints(4, 0)}
    found = attention_with_kvcache(QUERIES[:2], k, v, **options)
    options["page_table"] = ints(0, 0, 0, 1, 2, 0).view(2, 3)
    assert found.equal(attention_with_kvcache(QUERIES[:2], k, v, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_numbers_of_numpy_are_causal_as_well(causal):
    assert attention(Q, K, V, causal=np.bool_(causal)).equal(attention(Q, K, V, causal=causal))
    assert cached(causal=np.bool_(causal))().equal(cached(causal=causal)())


def test_rows_of_no_sequence_keep_what_out_has():
    starts = ints(1, 4, 4, 8)
    out = torch.full((9, 4, 16), 7.0)
    found = packed_cached(starts, out=out)()
    assert found is out and (out[[0, 8]] == 7).all() and out[1:8].equal(packed_cached(starts)()[1:8])
    out = torch.full((9, 4, 16), 7.0)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": ints(0, 4, 8, 9)}
    for more in ({}, {"seqused_q": ints(3, 0, 1)}):
        assert varlen(**given, **more, out=out)() is out
        assert (out[[0, 8]] == 7).all() and out[1:8].equal(varlen(**given, **more)()[1:8])
