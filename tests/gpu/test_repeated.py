"""Calls that follow the record of an earlier call, on other tensors, compared with calls that are not known yet."""

import functools

import pytest
import torch
import torch.nn.attention.flex_attention

from cute_attn import (
    append_kv,
    attention,
    attention_varlen,
    attention_with_kvcache,
    flash_attn,
    flex,
    merge_attention,
    score_mod,
    sdpa,
)
from cute_attn.flash_attn import flash_attn_3
from cute_attn.host import plans
from cute_attn.host.record import Record
from tests.gpu.compare import int32, randn

pytestmark = pytest.mark.once  # each call is made several times here


def rows(seed, *, q=(2, 130, 4, 64), k=(2, 140, 2, 64), leaves=False):
    found = [randn(*shape, seed=seed + i) for i, shape in enumerate((q, k, k))]
    return [x.requires_grad_() for x in found] if leaves else found


def dense(**options):
    return lambda seed: attention(*rows(seed), causal=True, return_lse=True, **options)


def with_tensors(**made):
    return lambda seed: attention(*rows(seed), **{name: make(seed) for name, make in made.items()})


PACKED = {"q": (130, 4, 64), "k": (130, 2, 64)}


def packed(seed):
    starts = int32(0, 30 + seed, 130)
    return attention_varlen(*rows(seed, **PACKED), starts, starts, 130, 130, causal=True)


def packed_of_two_lengths(seed):
    starts, others = int32(0, 30 + seed, 130), int32(0, 90 - seed, 140)
    tensors = rows(seed, q=(130, 4, 64), k=(140, 2, 64))
    return attention_varlen(*tensors, starts, others, 130, 140, causal=True, return_lse=True)


def with_rows_used(seed):
    starts = int32(0, 30, 130)
    options = {"seqused_q": int32(20 + seed, 60), "seqused_k": int32(25, 90 - seed), "causal": True}
    return attention_varlen(*rows(seed, **PACKED), starts, starts, 100, 100, **options)


def differentiated(out, leaves, seed):
    return torch.autograd.grad(out, leaves, randn(*out.shape, seed=seed + 9))


def gradients(q=(2, 130, 4, 64), k=(2, 140, 2, 64), **options):
    def call(seed):
        leaves = rows(seed, q=q, k=k, leaves=True)
        return differentiated(attention(*leaves, deterministic=True, **options), leaves, seed)

    return call


def packed_gradients(seed):
    qkv = randn(2, 130, 3, 4, 64, seed=seed).requires_grad_()
    return differentiated(attention(*qkv.unbind(2), causal=True, deterministic=True), qkv, seed)


def cached(*, entries=2, pages=False, new=0, rotary=False, queries=1, **options):
    def call(seed):
        torch.manual_seed(seed)
        q = randn(2, queries, 8, 128, seed=seed)
        k_cache, v_cache = (randn(entries, 64 if pages else 5000, 2, 128, seed=seed + i) for i in (1, 2))
        given = dict(options, cache_seqlens=int32(60 + seed, 40), causal=True, return_lse=True)
        if pages:
            given["page_table"] = torch.randperm(entries, device="cuda").int().view(2, -1)
        if new:
            given |= {"k": randn(2, new, 2, 128, seed=seed + 3), "v": randn(2, new, 2, 128, seed=seed + 4)}
        if rotary:
            given |= {name: randn(5000, 32, seed=5, dtype=q.dtype) for name in ("rotary_cos", "rotary_sin")}
        return (*attention_with_kvcache(q, k_cache, v_cache, **given), k_cache, v_cache)

    return call


def appended(seed):
    caches = [randn(2, 300, 2, 128, seed=seed + i) for i in (1, 2)]
    new = [randn(2, 3, 2, 128, seed=seed + i) for i in (3, 4)]
    append_kv(*caches, *new, int32(seed, 200))
    return caches


def appended_latent(seed):
    """Values that are views of the keys."""
    q, cache, new = (randn(2, n, heads, 128, seed=seed + n) for n, heads in ((2, 8), (300, 1), (3, 1)))
    views = {"v": new[..., :64], "cache_seqlens": int32(60 + seed, 200), "return_lse": True}
    return (*attention_with_kvcache(q, cache, cache[..., :64], k=new, **views), cache)


def merged(seed):
    outs, lses = randn(3, 2, 50, 4, 64, seed=seed, dtype=torch.float32), randn(3, 2, 4, 50, seed=seed + 1)
    return merge_attention(outs, lses.float(), dtype=torch.bfloat16)


def by_pytorch(q=(2, 130, 4, 64), **options):
    def call(seed):
        tensors = rows(seed, q=q, k=(2, 140, q[2], 64))
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
        with sdpa.active(unsupported="error"), torch.nn.attention.sdpa_kernel(options["backend"]):
            mask = randn(2, q[2], q[1], 140, seed=7) if options.get("mask") else None
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, mask)
            return out, *differentiated(out, leaves, seed)

    return call


@score_mod("repeated_slope", example=lambda batch, nheads, *_: (torch.randn(nheads), 0.5))
def repeated_slope(score, b, h, q_idx, kv_idx, slopes, factor):
    return score - slopes[h] * factor * (q_idx - kv_idx).abs()


def distances(table):
    return lambda s, b, h, i, j: s + table[h, (j - i).clamp(-8, 8) + 8]


def with_function(call=attention, **options):
    """Makes a new function in each call, with a separate table."""
    return lambda seed: call(*rows(seed), score_mod=distances(randn(4, 17, seed=seed)), **options)


def with_its_gradients(seed):
    leaves, table = rows(seed, leaves=True), randn(4, 17, seed=seed).float().requires_grad_()
    out = attention(*leaves, score_mod=distances(table), causal=True)
    return differentiated(out, [*leaves, table], seed)


@functools.cache
def compiled():
    return torch.compile(lambda q, k, v: attention(q, k, v, causal=True, deterministic=True))


def compiled_gradients(seed):
    leaves = rows(seed, leaves=True)
    out = compiled()(*leaves)
    return out, *differentiated(out, leaves, seed)


@functools.cache
def near():
    make = torch.nn.attention.flex_attention.create_block_mask
    return make(lambda b, h, i, j: (i - j).abs() < 70, None, None, 130, 140, device="cuda")


def by_flex(**options):
    def call(seed):
        q, k, v = (x.transpose(1, 2) for x in rows(seed))
        return flex.flex_attention(q, k, v, enable_gqa=True, return_lse=True, **options)

    return call


def by_flash(**options):
    return lambda seed: flash_attn.flash_attn_func(*rows(seed), causal=True, **options)


def by_flash_with_cache(seed):
    q, caches = randn(2, 1, 8, 128, seed=seed), [randn(2, 500, 2, 128, seed=seed + i) for i in (1, 2)]
    new = [randn(2, 1, 2, 128, seed=seed + i) for i in (3, 4)]
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=int32(60 + seed, 40), causal=True
    )
    return (out, *caches)


def into(seed):
    out = torch.empty(2, 130, 4, 64, dtype=torch.bfloat16, device="cuda")
    assert attention(*rows(seed), causal=True, out=out) is out
    return out


def shared_bias_gradients(seed):
    leaves, bias = rows(seed, leaves=True), randn(1, 4, 130, 140, seed=seed + 5).requires_grad_()
    out = attention(*leaves, bias=bias, deterministic=True)
    return differentiated(out, [*leaves, bias], seed)


def fp32(seed):
    tensors = rows(seed, q=(2, 1030, 4, 64), k=(2, 1030, 2, 64))
    return attention(*(x.float() for x in tensors), precision="fp32")


BACKENDS = torch.nn.attention.SDPBackend
CALLS = {
    "dense": (dense(), True),
    "top left": (dense(window=(30, 0)), True),
    "sm80": (dense(kernel="sm80"), True),
    "bias": (with_tensors(bias=lambda seed: randn(2, 4, 130, 140, seed=seed + 5)), True),
    "bias of one row": (with_tensors(bias=lambda seed: randn(1, 4, 1, 140, seed=seed + 5)), True),
    "slopes": (with_tensors(alibi_slopes=lambda seed: randn(4, seed=seed).float().abs()), True),
    "sinks": (with_tensors(sinks=lambda seed: randn(4, seed=seed)), True),
    "lengths": (with_tensors(seqused_k=lambda seed: int32(100 - seed, 140)), True),
    "packed": (packed, True),
    "packed, two lengths": (packed_of_two_lengths, True),
    "dropout": (
        lambda seed: attention(*rows(seed), dropout_p=0.3, rng_state=torch.tensor([seed, 4], device="cuda")),
        True,
    ),
    "few queries": (lambda seed: attention(*rows(seed, q=(1, 8, 4, 64), k=(1, 9000, 2, 64))), True),
    "gradients": (gradients(causal=True), True),
    "gradients, sm80": (gradients(causal=True, kernel="sm80"), True),
    "gradients of packed qkv": (packed_gradients, True),
    "gradients, scale below zero": (gradients(softmax_scale=-0.1), False),
    "gradients of a shared bias": (shared_bias_gradients, True),
    # Query heads are divided among work tiles, and their dK and dV added up.
    "gradients of divided heads": (gradients((1, 300, 16, 128), (1, 300, 1, 128)), True),
    "return_softmax": (dense(return_softmax=True), False),
    "rows used": (with_rows_used, True),
    "out": (into, True),
    "fp32": (fp32, True),
    "dropout, drawn": (lambda seed: torch.manual_seed(seed) and attention(*rows(seed), dropout_p=0.3), True),
    "compiled": (lambda seed: compiled()(*rows(seed)), True),
    "compiled, gradients": (compiled_gradients, True),
    "score_mod": (with_function(causal=True), True),
    "score_mod and its gradients": (with_its_gradients, True),
    "BlockMask": (lambda seed: attention(*rows(seed), block_mask=near()), True),
    "a registered function": (
        lambda seed: attention(*rows(seed), epilogues={"repeated_slope": (randn(4, seed=seed).float(), 0.5)}),
        True,
    ),
    "flex": (by_flex(), True),
    "flex, BlockMask": (lambda seed: by_flex(block_mask=near())(seed), True),
    "flash": (by_flash(), True),
    "flash, window": (by_flash(window_size=(30, 0)), True),
    "flash, lse": (by_flash(return_attn_probs=True), True),
    "flash, packed qkv": (
        lambda seed: flash_attn.flash_attn_qkvpacked_func(randn(2, 130, 3, 4, 64, seed=seed), causal=True),
        True,
    ),
    "flash, cache": (by_flash_with_cache, True),
    "flash 3, lse": (
        lambda seed: flash_attn_3.flash_attn_func(*rows(seed), causal=True, return_attn_probs=True),
        True,
    ),
    "cache": (cached(), True),
    "cache, several queries": (cached(queries=5), True),
    "cache in parts": (cached(num_splits=3), True),
    "cache in pages": (cached(entries=8, pages=True), True),
    "cache, append": (cached(new=2, queries=2), True),
    "cache, append and rotary": (cached(new=2, queries=2, rotary=True), True),
    "append": (appended, True),
    "cache, append of latent rows": (appended_latent, True),
    "merge": (merged, True),
    "SDPA flash": (by_pytorch(backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA flash, one query": (by_pytorch((2, 1, 4, 64), backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA flash, one head": (by_pytorch((2, 130, 1, 64), backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA efficient": (by_pytorch(backend=BACKENDS.EFFICIENT_ATTENTION), True),
    "SDPA efficient, mask": (by_pytorch(backend=BACKENDS.EFFICIENT_ATTENTION, mask=True), True),
    "SDPA cuDNN": (by_pytorch(backend=BACKENDS.CUDNN_ATTENTION), True),
}
"""A call for a seed, and whether it is repeated from a record."""


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_equals_a_first_one(name):
    call, is_recorded = CALLS[name]
    expected = []
    for seed in range(6):
        plans.forget()
        expected.append(flat(call(seed)))
    plans.forget()
    found = [flat(call(seed)) for seed in range(6)]
    torch.cuda.synchronize()
    for seed, (ours, first) in enumerate(zip(found, expected, strict=True)):
        for i, (a, b) in enumerate(zip(ours, first, strict=True)):
            assert a.stride() == b.stride() and a.dtype == b.dtype, (seed, i)
            adds = name.startswith("SDPA") or name == "score_mod and its gradients"
            tolerance = 2e-2 if adds else 0  # their backward adds up in any order
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
    records = [one for one in plans._records.values() if isinstance(one, Record)]
    records += [one.record for found in plans._guarded.values() for one in found]
    assert bool(records) == is_recorded
