"""Calls that follow the record of an earlier one, on tensors of their own, beside calls that nothing is known of."""

import pytest
import torch

from cute_attn import append_kv, attention, attention_varlen, attention_with_kvcache, merge_attention, sdpa
from cute_attn.host import plans

pytestmark = pytest.mark.once  # each call is made several times here


def randn(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def rows(seed, *, q=(2, 130, 4, 64), k=(2, 140, 2, 64), leaves=False):
    found = [randn(*shape, seed=seed + i) for i, shape in enumerate((q, k, k))]
    return [x.requires_grad_() for x in found] if leaves else found


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense(**options):
    return lambda seed: attention(*rows(seed), causal=True, return_lse=True, **options)


def with_tensors(**made):
    return lambda seed: attention(*rows(seed), **{name: make(seed) for name, make in made.items()})


def packed(seed):
    starts = lengths(0, 30 + seed, 130)
    return attention_varlen(
        *rows(seed, q=(130, 4, 64), k=(130, 2, 64)), starts, starts, 130, 130, causal=True
    )


def packed_of_two_lengths(seed):
    starts, others = lengths(0, 30 + seed, 130), lengths(0, 90 - seed, 140)
    tensors = rows(seed, q=(130, 4, 64), k=(140, 2, 64))
    return attention_varlen(*tensors, starts, others, 130, 140, causal=True, return_lse=True)


def gradients(**options):
    def call(seed):
        leaves = rows(seed, leaves=True)
        out = attention(*leaves, deterministic=True, **options)
        return torch.autograd.grad(out, leaves, randn(*out.shape, seed=seed + 9))

    return call


def packed_gradients(seed):
    qkv = randn(2, 130, 3, 4, 64, seed=seed).requires_grad_()
    out = attention(*qkv.unbind(2), causal=True, deterministic=True)
    return torch.autograd.grad(out, qkv, randn(*out.shape, seed=seed + 9))


def cached(*, entries=2, pages=False, new=0, rotary=False, queries=1, **options):
    def call(seed):
        torch.manual_seed(seed)
        q = randn(2, queries, 8, 128, seed=seed)
        k_cache, v_cache = (randn(entries, 64 if pages else 5000, 2, 128, seed=seed + i) for i in (1, 2))
        given = dict(options, cache_seqlens=lengths(60 + seed, 40), causal=True, return_lse=True)
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
    append_kv(*caches, *new, lengths(seed, 200))
    return caches


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
            return out, *torch.autograd.grad(out, leaves, randn(*out.shape, seed=seed + 9))

    return call


BACKENDS = torch.nn.attention.SDPBackend
CALLS = {
    "dense": (dense(), True),
    "top left": (dense(window=(30, 0)), True),
    "sm80": (dense(kernel="sm80"), True),
    "bias": (with_tensors(bias=lambda seed: randn(2, 4, 130, 140, seed=seed + 5)), True),
    "bias of one row": (with_tensors(bias=lambda seed: randn(1, 4, 1, 140, seed=seed + 5)), True),
    "slopes": (with_tensors(alibi_slopes=lambda seed: randn(4, seed=seed).float().abs()), True),
    "sinks": (with_tensors(sinks=lambda seed: randn(4, seed=seed)), True),
    "lengths": (with_tensors(seqused_k=lambda seed: lengths(100 - seed, 140)), True),
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
    "return_softmax": (dense(return_softmax=True), False),
    "cache": (cached(), True),
    "cache, several queries": (cached(queries=5), True),
    "cache in parts": (cached(num_splits=3), True),
    "cache in pages": (cached(entries=8, pages=True), True),
    "cache, append": (cached(new=2, queries=2), True),
    "cache, append and rotary": (cached(new=2, queries=2, rotary=True), True),
    "append": (appended, True),
    "merge": (merged, True),
    "SDPA flash": (by_pytorch(backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA flash, one query": (by_pytorch((2, 1, 4, 64), backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA flash, one head": (by_pytorch((2, 130, 1, 64), backend=BACKENDS.FLASH_ATTENTION), True),
    "SDPA efficient": (by_pytorch(backend=BACKENDS.EFFICIENT_ATTENTION), True),
    "SDPA efficient, mask": (by_pytorch(backend=BACKENDS.EFFICIENT_ATTENTION, mask=True), True),
    "SDPA cuDNN": (by_pytorch(backend=BACKENDS.CUDNN_ATTENTION), True),
}
"""A call for a seed, and whether it is repeated from a record."""


def repeats_of(plan):
    """The records of a plan: one, of packed gradients a second, or none."""
    found = getattr(plan, "repeats", None) or ()
    return found if isinstance(found, tuple) else (found,)


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
            tolerance = 2e-2 if name.startswith("SDPA") else 0  # their backward adds up in any order
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
    kept = [one for plan in plans._plans.values() for one in repeats_of(plan)]
    replays = [repeats.replay for repeats in kept if repeats.replay is not None]
    assert bool(replays) == is_recorded, f"{len(kept)} plans repeat, {len(replays)} from a record"
