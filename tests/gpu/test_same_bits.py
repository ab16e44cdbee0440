"""same_bits: at every door, a row's output, LSE and gradients depend only on its sequence."""

import random

import pytest
import torch

from cute_attn import attention, attention_varlen, attention_with_kvcache, block_mask
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import int32, with_gradients

pytestmark = pytest.mark.skipif("sm90" not in runnable_archs(), reason="same_bits is Hopper's")

CAPACITY, PAGE = 4096, 16
# head dim, heads, key heads, dtype, factor of the scores, options
CASES = {
    "d128": (128, 8, 2, torch.bfloat16, 1.0, {"causal": True}),
    "d128-large-scores": (128, 8, 2, torch.bfloat16, 40.0, {}),
    "d64": (64, 8, 2, torch.float16, 1.0, {"causal": True}),
    "d64-large-scores": (64, 4, 4, torch.float16, 40.0, {"causal": True}),
    "d96": (96, 4, 2, torch.bfloat16, 1.0, {"causal": True}),
    "d256-window": (256, 4, 2, torch.bfloat16, 1.0, {"causal": True, "window": (700, 0)}),
    "sinks": (128, 4, 1, torch.bfloat16, 1.0, {"causal": True, "sinks": True, "softcap": 5.0}),
}
CALLS = 34


class Sequences:
    """Sequences of a case with random lengths: their rows, and the results of each alone."""

    def __init__(self, name, seed):
        self.dim, heads, heads_kv, self.dtype, factor, options = CASES[name]
        self.pick = random.Random(seed)
        generator = torch.Generator("cuda").manual_seed(seed)

        def rows(count, n):
            return torch.randn(count, n, self.dim, generator=generator, device="cuda").to(self.dtype)

        self.options = dict(options, same_bits=True, return_lse=True)
        if "sinks" in options:
            self.options["sinks"] = torch.linspace(-3, 6, heads, device="cuda")
        self.lengths = [
            self.pick.choice((1, 77, 1023, 1025, 2048, self.pick.randint(2, CAPACITY))) for _ in range(3)
        ]
        self.q, self.k, self.v = ([rows(n, h) for n in self.lengths] for h in (heads, heads_kv, heads_kv))
        for k in self.k:
            k[self.pick.randrange(97) :: 97] *= factor
        self.alone = [
            tuple(x[0] for x in attention(q[None], k[None], v[None], **self.options))
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def cache(self):
        """K and V in a cache, NaN behind their ends."""
        found = []
        for rows in (self.k, self.v):
            cache = rows[0].new_full((3, CAPACITY, *rows[0].shape[1:]), torch.nan)
            for own, x in zip(cache, rows, strict=True):
                own[: len(x)] = x
            found.append(cache)
        return found

    def in_pages(self, caches):
        table = torch.randperm(3 * CAPACITY // PAGE).int().cuda().view(3, -1)
        found = []
        for x in caches:
            pages = x.new_empty(table.numel(), PAGE, *x.shape[2:])
            pages[table.long()] = x.view(3, -1, PAGE, *x.shape[2:])
            found.append(pages)
        return found, table


def check(found, expected):
    for one, alone in zip(found, expected, strict=True):
        assert one.equal(alone), f"{int((one != alone).sum())} of {one.numel()} elements differ"


@pytest.mark.parametrize("name", CASES)
def test_doors_of_random_calls(name):
    """Seeded calls: packed, a cache or its pages, of a few last queries or of many."""
    for seed in range(CALLS):
        given = Sequences(name, seed)
        last = given.pick.choice((1, 1, 2, 4, 17, 150, 1000))
        queries = [min(last, n) for n in given.lengths]
        starts = torch.tensor([0, *queries]).cumsum(0).int().cuda()
        expected = [(out[-n:], lse[:, -n:]) for (out, lse), n in zip(given.alone, queries, strict=True)]
        if seed % 3 == 0 and "window" not in given.options:
            whole = torch.tensor([0, *given.lengths]).cumsum(0).int().cuda()
            rows, most = (torch.cat(x) for x in (given.q, given.k, given.v)), max(given.lengths)
            out, lse = attention_varlen(*rows, whole, whole, most, most, **given.options)
            starts, queries = whole, given.lengths
            expected = given.alone
        else:
            caches, table = given.cache(), None
            if seed % 3 == 1:
                caches, table = given.in_pages(caches)
            out, lse = attention_with_kvcache(
                torch.cat([q[-n:] for q, n in zip(given.q, queries, strict=True)]),
                *caches,
                cache_seqlens=int32(*given.lengths),
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=max(queries),
                **given.options,
            )
        for i, alone in enumerate(expected):
            own = slice(int(starts[i]), int(starts[i + 1]))
            check((out[own], lse[:, own]), alone)


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_accurate_as_without(name):
    given = Sequences(name, 5)
    options = {key: x for key, x in given.options.items() if key != "same_bits"}
    on_cpu = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    for i, (out, lse) in enumerate(given.alone):
        rows = [x[i][None] for x in (given.q, given.k, given.v)]
        plain, _ = attention(*rows, **options)
        whole, whole_lse = attention(*(x.double().cpu() for x in rows), **on_cpu)
        worst, own = ((x.double().cpu() - whole[0]).abs().max() for x in (plain[0], out))
        assert own <= 3 * worst + 1e-5
        torch.testing.assert_close(lse.double().cpu(), whole_lse[0], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "heads", "heads_kv"), [(128, 8, 2), (64, 4, 4), (256, 4, 2)])
def test_gradients_alone_batched_and_packed(dim, heads, heads_kv, causal):
    generator = torch.Generator("cuda").manual_seed(dim)
    options, n = {"causal": causal, "same_bits": True}, 1500

    def rows(*sizes):
        return torch.randn(*sizes, dim, generator=generator, device="cuda").bfloat16()

    def batched(q, k, v):
        return attention(q, k, v, **options)

    given = [rows(1, n, h) for h in (heads, heads_kv, heads_kv, heads)]
    alone = with_gradients(batched, given[:3], given[3])
    *tensors, grad = (torch.cat((rows(1, *x.shape[1:3]), x)) for x in given)
    check([x[1] for x in with_gradients(batched, tensors, grad)], [x[0] for x in alone])
    starts = int32(0, 333, 333 + n, 342 + 2 * n)
    *tensors, grad = (torch.cat((rows(333, x.shape[2]), x[0], rows(n + 9, x.shape[2]))) for x in given)
    found = with_gradients(
        lambda q, k, v: attention_varlen(q, k, v, starts, starts, n + 9, n + 9, **options), tensors, grad
    )
    check([x[333 : 333 + n] for x in found], [x[0] for x in alone])
    plain = with_gradients(lambda q, k, v: attention(q, k, v, causal=causal), given[:3], given[3])
    torch.testing.assert_close(alone, plain, rtol=2e-2, atol=2e-2)


def test_decoding_gives_what_training_saw():
    """Each decoding step appends a token's key and then attends; one call with gradients computes all tokens."""
    n, (q, k, v) = 1100, (torch.randn(1, 1100, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    trained = attention(q.requires_grad_(), k, v, causal=True, same_bits=True).detach()
    caches = [torch.zeros(1, 2048, 2, 128, device="cuda").bfloat16() for _ in range(2)]
    for i in range(n):
        step = slice(i, i + 1)
        new = {"k": k[:, step], "v": v[:, step], "cache_seqlens": int32(i)}
        out = attention_with_kvcache(q.detach()[:, step], *caches, **new, causal=True, same_bits=True)
        assert out.equal(trained[:, step])


def test_splits_of_listed_blocks_and_folded_ones():
    """A CTA that folds all splits of a row visits hidden blocks; CTAs with a split each do not."""
    q, k, v = (
        torch.randn(1, n, heads, 128, device="cuda").bfloat16() for n, heads in ((3, 8), (4096, 2), (4096, 2))
    )
    mask = block_mask(
        lambda b, h, i, j: (j // 128 % 3 == i) | ((j // 128 % 5 == 2) & (j % 3 == 0)), None, None, 3, 4096
    )
    options = {"block_mask": mask, "same_bits": True, "return_lse": True}
    alone = attention_with_kvcache(q, k, v, cache_seqlens=3001, **options)
    many = {"cache_batch_idx": int32(*[0] * 600), "cache_seqlens": int32(*[3001] * 600)}
    found = attention_with_kvcache(q.repeat(600, 1, 1, 1), k, v, **many, **options)
    for i in (0, 299, 599):
        check([x[i] for x in found], [x[0] for x in alone])
