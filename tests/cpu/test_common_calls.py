"""Bundles of every kernel: random calls of the common kinds, as far as a card would launch their kernels."""

import functools
import itertools
import random

import pytest
import torch
import tvm_ffi

from cute_attn import append_kv, attention, attention_varlen, attention_with_kvcache
from cute_attn.compiler import registry
from cute_attn.lab import common_calls
from cute_attn.lab.common_calls import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LATENT,
    LATENT_GROUPS,
    MASKS,
    PAGE_SIZES,
    PROCESSORS,
)
from tests import machine

CALLS = 80
kernels = functools.cache(common_calls.kernels)


class Draw(random.Random):
    """Random calls. Their tensors are not written: memory of that size is not needed."""

    def common(self) -> None:
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.choice(DTYPES)]
        self.dim, self.group, self.kv_heads = map(self.choice, (HEAD_DIMS, GROUPS, (1, 2, 8)))
        self.batch, mask = self.choice((1, 2, 5, 16, 64)), self.choice(MASKS)
        window = (None, None)
        if mask == "window":
            window = (self.choice((50, 127, 500, 4000)), self.choice((0, 100)))
        self.mask = {"causal": mask == "causal", "window": window}

    def length(self, most: int) -> int:
        return round(2 ** self.uniform(0, most))

    def rows(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.empty(*shape, self.dim, dtype=self.dtype, requires_grad=grad)

    def starts(self, longest: int) -> torch.Tensor:
        return torch.tensor([0, *(longest * (i + 1) for i in range(self.batch))], dtype=torch.int32)

    def attention(self, grad: bool = False) -> None:
        self.common()
        queries, keys = self.length(13 - 2 * grad), self.length(15 - 4 * grad)
        heads, packed = self.group * self.kv_heads, self.random() < 0.5
        outer_q, outer_k = [(self.batch * n,) if packed else (self.batch, n) for n in (queries, keys)]
        q = self.rows(*outer_q, heads, grad=grad)
        k, v = (self.rows(*outer_k, self.kv_heads, grad=grad) for _ in range(2))
        if packed:
            lengths = self.starts(queries), self.starts(keys), queries, keys
            out, lse = attention_varlen(q, k, v, *lengths, **self.mask, return_lse=True)
        else:
            out, lse = attention(q, k, v, **self.mask, return_lse=True)
        if grad:
            outer = (out, lse) if self.random() < 0.5 else (out,)
            torch.autograd.grad(outer, (q, k, v), [torch.empty_like(x) for x in outer])

    def cache(self, *, append: bool = False, latent: bool = False) -> None:
        self.common()
        if latent:
            self.dim, self.group, self.kv_heads = LATENT[0], self.choice(LATENT_GROUPS), 1
            self.mask = {"causal": self.random() < 0.5}
        queries = self.choice((1, 1, 2, 5, self.length(11)))
        most = 2**29 // (self.batch * self.kv_heads * self.dim)  # a gigabyte
        capacity = min(max(self.length(17), 64), most)
        heads, packed, page = self.group * self.kv_heads, self.random() < 0.4, self.choice((0, *PAGE_SIZES))
        pages = -(-capacity // page) if page else 0
        outer = (self.batch * pages, page) if page else (self.batch, capacity)
        caches = [self.rows(*outer, self.kv_heads) for _ in range(2)]
        caches[1] = caches[0][..., : LATENT[1]] if latent else caches[1]
        table = torch.zeros(self.batch, pages, dtype=torch.int32) if page else None
        q = self.rows(*((self.batch * queries,) if packed else (self.batch, queries)), heads)
        starts = {"cu_seqlens_q": self.starts(queries), "max_seqlen_q": queries} if packed else {}
        given = {"page_table": table, "cache_seqlens": torch.ones(self.batch, dtype=torch.int32)}
        new = {}
        if append:
            packed_new, rotary = self.random() < 0.5, self.random() < 0.7
            outer = (self.batch * 3,) if packed_new else (self.batch, 3)
            new = {name: self.rows(*outer, self.kv_heads) for name in ("k", "v")}
            new["cu_seqlens_k_new"] = self.starts(3) if packed_new else None
            if rotary:
                angles = (torch.empty(1 << 18, 16, dtype=self.dtype) for _ in range(2))
                new |= zip(("rotary_cos", "rotary_sin"), angles, strict=True)
                new["rotary_interleaved"] = self.random() < 0.5
            if self.random() < 0.5:
                append_kv(*caches, **new, **given)
                return
        attention_with_kvcache(q, *caches, **starts, **given, **new, **self.mask)


KINDS = {
    "forward": Draw.attention,
    "backward": functools.partial(Draw.attention, grad=True),
    "cache": Draw.cache,
    "append": functools.partial(Draw.cache, append=True),
    "latent": functools.partial(Draw.cache, latent=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target"), [*itertools.product(list(KINDS)[:4], PROCESSORS), ("latent", "sm90")]
)
def test_a_bundle_of_all_has_every_kernel_that_random_calls_launch(kind, target, monkeypatch):
    launched = set()

    def launch(kernel, on):
        return lambda given: launched.add((kernel.traits, kernel.tile, on))

    machine.gpu(monkeypatch, launch)
    schedule = tvm_ffi.convert((machine.COUNTERS, PROCESSORS[target]))
    machine.device(monkeypatch, PROCESSORS[target], schedule, target)
    for seed in range(CALLS):
        KINDS[kind](Draw(seed))
    assert len(launched) > 40
    lacking = sorted(launched.difference(kernels(target)), key=str)
    missing = [f"{traits} with {tile}" for traits, tile, _ in lacking]
    assert not missing, f"{len(missing)} of {len(launched)}"


@pytest.mark.parametrize("target", PROCESSORS)
def test_rows_of_the_tables_are_kernels_that_fit(target):
    found = list(common_calls.rows(target))
    assert {traits.op for traits, _, _ in found} >= {"forward", "backward", "jvp"}
    assert all(
        registry.lookup(traits, tile, on).tile.reject(traits, on) is None for traits, tile, on in found
    )


def test_a_bundle_of_all_has_each_kernel_once_and_they_fit(monkeypatch):
    monkeypatch.setattr(common_calls, "kernels", kernels)
    everything = common_calls.everything(["sm80"])
    assert len(set(everything)) == len(everything) > 3000
    assert {traits.dtype for traits, _, _ in everything} == {"bf16", "fp16", "fp32"}
    some = random.Random(0).sample(everything, 500)
    assert all(registry.lookup(*one).tile.reject(one[0], "sm80") is None for one in some)
