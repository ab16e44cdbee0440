"""Attention with a cache whose keys are divided among CTAs: by properties, and against the definition."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from cute_attn import reference
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.host import record, split_kv
from cute_attn.reference import kvcache as ref
from tests import machine
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, captured, int32, randn

ARCHS = runnable_archs("kvcache")
GIVEN = [{"num_splits": 1}, {"num_splits": 3}]
"""With these, bits do not depend on the capacity, which pages round up."""
SPLITS = [{}, *GIVEN]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Results and workspaces are NaN before a launch."""
    allocate = record.allocate

    def poisoned(*arguments):
        return allocate(*arguments).fill_(math.nan)

    monkeypatch.setattr(record, "allocate", poisoned)


@dataclasses.dataclass
class Call:
    """Contiguous caches, whose rows that no sequence uses are NaN, and queries; packed where their numbers differ."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    capacity: int = 0
    leftpad: tuple[int, ...] = ()

    def __post_init__(self):
        self.capacity = self.capacity or max(*self.lengths, 1) + 70
        shape, (heads, heads_kv) = (len(self.lengths), self.capacity), self.heads
        self.k, self.v = (randn(*shape, heads_kv, dim, seed=i) for i, dim in enumerate(self.dims))
        for b, length in enumerate(self.lengths):
            pad = self.leftpad[b] if self.leftpad else 0
            for x in (self.k, self.v):
                x[b, length:], x[b, : min(pad, length)] = math.nan, math.nan
        packed = len(set(self.queries)) > 1
        self.cu_q = int32(0, *itertools.accumulate(self.queries)) if packed else None
        self.q = randn(sum(self.queries), heads, self.dims[0], seed=2)
        self.q = self.q if packed else self.q.view(len(self.queries), -1, heads, self.dims[0])

    @property
    def options(self):
        return {
            "cache_seqlens": int32(*self.lengths),
            "cache_leftpad": int32(*self.leftpad) if self.leftpad else None,
            "cu_seqlens_q": self.cu_q,
            "max_seqlen_q": max(self.queries) if self.cu_q is not None else None,
        }

    def run(self, **options):
        return attention_with_kvcache(self.q, self.k, self.v, return_lse=True, **self.options | options)

    def expected(self, causal=False, window=(None, None), softcap=0.0, **tensors):
        """Results by the definition in fp32."""
        mask = "causal" if causal else "window" if window != (None, None) else ""
        bounds = (UNBOUNDED if bound is None else bound for bound in window)
        lengths = ref.Lengths(int32(*self.lengths), self.options["cache_leftpad"], self.cu_q)
        inputs = ScoreInputs(*bounds, softcap=softcap, **tensors)
        cache = ref.Cache(self.k.float(), self.v.float())
        scale = self.dims[0] ** -0.5
        return ref.attention(self.q.float(), cache, scale, lengths, reference.Features(mask), inputs)

    def check(self, found, **options):
        assert_near(found, self.expected(**options))

    def paged(self, page, heads_first=False):
        """The same cache in shuffled pages; table entries that no sequence uses are invalid."""
        per_entry, pages = -(-self.capacity // page), []
        order = list(range(len(self.lengths) * per_entry + 3))
        random.Random(0).shuffle(order)
        table = torch.full((len(self.lengths), per_entry + 2), 2**31 - 1, dtype=torch.int32)
        table[:, per_entry + 1 :] = -1
        for x in (self.k, self.v):
            shape = (len(order), page, *x.shape[2:])
            if heads_first:
                cache = x.new_full((shape[0], shape[2], shape[1], shape[3]), math.nan).transpose(1, 2)
            else:
                cache = x.new_full(shape, math.nan)
            for b, length in enumerate(self.lengths):
                for i in range(-(-length // page)):
                    own = order[b * per_entry + i]
                    rows = x[b, i * page : (i + 1) * page]
                    cache[own, : len(rows)] = rows
                    if not self.leftpad or (i + 1) * page > self.leftpad[b]:
                        table[b, i] = own
            pages.append(cache)
        return pages, table.cuda()

    def run_paged(self, page, heads_first=False, **options):
        """Run a call with a paged cache; if a page has no rows, with a contiguous one."""
        if not page:
            return self.run(**options)
        (k, v), table = self.paged(page, heads_first)
        options = self.options | {"page_table": table} | options
        return attention_with_kvcache(self.q, k, v, return_lse=True, **options)


def assert_near(found, expected):
    for one, whole, tolerance in zip(found, expected, (1e-2, 2e-3), strict=True):
        torch.testing.assert_close(one.float(), whole, rtol=tolerance, atol=tolerance)


# ---- splits ----


def ragged() -> Call:
    return Call((1, 0, 63, 64, 65, 700, 2049, 5000), (1,) * 8)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("splits", [0, 1, 2, 3, 7, 17, 133, 512])
def test_any_number_of_splits(splits, arch):
    call = ragged()
    found = call.run(num_splits=splits, kernel=arch)
    call.check(found)
    assert (found[0][1] == 0).all() and (found[1][1] == -math.inf).all()


CAUSAL = {"causal": True}
CALLS = {
    **{f"{n}-queries": (((n + 1, 3, 900, 0, 3000), (n,) * 5), {}, CAUSAL) for n in (2, 5, 16, 17, 64, 200)},
    **{
        f"group-of-{n}": (((70, 0, 1500), (2, 2, 2)), {"heads": (2 * n, 2)}, CAUSAL)
        for n in (1, 3, 5, 7, 8, 12, 48, 80)
    },
    # Prefill and decoding in one call, and sequences without queries.
    "packed": (((300, 900, 0, 77, 1, 2000), (300, 1, 2, 0, 3, 64)), {}, CAUSAL),
    **{
        f"d{d}x{dv}": (((70, 0, 1500), (2, 2, 2)), {"dims": (d, dv)}, {})
        for d, dv in ((64, 64), (256, 256), (192, 128), (40, 72))
    },
    **{
        name: (((70, 0, 1500, 400), (3,) * 4), {"leftpad": (5, 0, 1111, 460)}, options)
        for name, options in (
            ("window", {"window": (200, 0)}),
            ("window-ahead", {"window": (64, 3)}),
            ("softcap", {"softcap": 5.0, "causal": True}),
            ("alibi", {"alibi_slopes": True, "causal": True}),
            ("sinks", {"sinks": True, "causal": True}),
        )
    },
}
"""Lengths and queries, other fields of a Call, and options."""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, split, arch):
    rows, sizes, options = CALLS[name]
    call, options = Call(*rows, **sizes), dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(4, 8, device="cuda")
    if "sinks" in options:
        options["sinks"] = 3 * torch.randn(8, device="cuda")
    call.check(call.run(kernel=arch, **split, **options), **options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("queries", [(4,) * 4, (33, 1, 0, 70)], ids=str)
def test_trees_of_draft_tokens(queries, page, split, arch):
    """Tree masks across key blocks and words of bits, with fewer keys than queries; the last sequence has a leftpad."""
    call = Call((64, 3, 900, 2100), queries, leftpad=(0, 0, 0, 2050))
    bits = torch.randint(-(2**31), 2**31, (sum(queries), 3), device="cuda").int()
    options = {"tree_mask": bits, "kernel": arch, **split}
    call.check(call.run_paged(page, **options), tree_mask=bits)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        *(((59, 59), dtype) for dtype in (torch.bfloat16, torch.float32)),
        *(((128, 251), dtype) for dtype in (torch.bfloat16, torch.float32)),
        *((dims, torch.bfloat16) for dims in ((34, 50), (100, 36), (300, 261), (572, 508))),
        ((128, 128), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_splits_of_rows_that_start_anywhere(queries, dims, dtype, monkeypatch):
    """fp32 as well, by the Ampere kernel; also with pages, and from a record."""
    monkeypatch.setattr(split_kv, "_best_split", lambda *given: split_kv.Split("fixed", 5))
    machine.forget_plans(monkeypatch)
    call = Call((1, 0, 63, 700, 2049, 5000), (queries,) * 6, dims=dims)
    call.q, call.k, call.v = (x.to(dtype) for x in (call.q, call.k, call.v))
    found = call.run(causal=True)
    call.check(found, causal=True)
    for _ in range(3):
        assert_equal(call.run(causal=True), found)
        assert_equal(call.run_paged(7, causal=True), found)


@pytest.mark.parametrize("arch", ARCHS)
def test_few_and_many_sequences(arch):
    """More work tiles than CTAs, and fewer key blocks than CTAs."""
    pick = random.Random(7)
    for batch, longest in ((1, 40), (1, 3000), (33, 64), (300, 500), (1100, 90)):
        call = Call(tuple(pick.randint(0, longest) for _ in range(batch)), (1,) * batch, heads=(4, 2))
        call.check(call.run(kernel=arch))


# ---- where rows are ----


RAGGED = (1, 0, 63, 700, 1030)
PAGES = [(n, arch, 2, {}) for arch in ARCHS for n in (8, 16, 48, 64, 128, 256)]
# Ampere's kernel loads row by row; tiles of 16, 64 and 128 rows.
PAGES += [(n, "sm80", 2, {}) for n in (1, 3, 19)]
PAGES += [(n, "sm80", queries, {"causal": True}) for n in (1, 3, 19) for queries in (1, 17, 70)]


@pytest.mark.parametrize("split", GIVEN, ids=str)
@pytest.mark.parametrize(("page", "arch", "queries", "options"), PAGES)
def test_pages_equal_entries_bit_for_bit(page, arch, queries, options, split):
    call, options = Call(RAGGED, (queries,) * 5), {"kernel": arch, **split, **options}
    expected = call.run(**options)
    for heads_first in (False, True):
        assert_equal(call.run_paged(page, heads_first, **options), expected)


# Many lookups in the table by each CTA, one of which looks up pages of up to 32 boxes; rows of 4 to 32 vectors.
HOPPERS = {
    **{f"long-pages-of-{n}": ((9000, 2049, 4097), (128, 128), n, {"num_splits": 1}) for n in (16, 64)},
    **{f"d{d}x{dv}": (RAGGED, (d, dv), 8, {}) for d, dv in ((32, 32), (96, 64), (192, 128), (256, 256))},
}


@pytest.mark.skipif("sm90" not in ARCHS, reason="Hopper's ways to load pages")
@pytest.mark.parametrize("name", HOPPERS)
def test_hoppers_pages_equal_entries_bit_for_bit(name):
    lengths, dims, page, options = HOPPERS[name]
    call = Call(lengths, (1 if options else 2,) * len(lengths), dims=dims)
    assert_equal(call.run_paged(page, kernel="sm90", **options), call.run(kernel="sm90", **options))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "dim"), [(16, 128), (64, 128), (16, 320)])
def test_many_work_tiles_per_cta(page, dim, arch):
    """A CTA has four whole work tiles, again and again: nothing that one leaves reaches the next."""
    call = Call((2000,) * 66, (1,) * 66, heads=(16, 8), dims=(dim, dim), capacity=2048)
    expected = call.run(kernel=arch)
    call.check(expected)
    for _ in range(20):
        assert_equal(call.run_paged(page, kernel=arch), expected)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 1, 16])
def test_leftpad(page, split, arch):
    """Results equal the ones on the rest of the cache; earlier rows and pages are NaN, their table entries invalid."""
    if arch != "sm80" and page % split_kv.BOX_ROWS:
        pytest.skip("Ampere's kernel loads such pages")
    call = Call((1, 70, 700, 1030, 500), (2,) * 5, leftpad=(0, 64, 333, 1029, 500))
    options = {"causal": True, "kernel": arch, **split}
    call.check(call.run_paged(page, **options), causal=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("page", [0, 16])
def test_beyond_two_to_the_31(page, arch):
    """Entries, or pages, more than 2**31 elements apart, which a row is appended to."""
    rows, step = 16, 2**31 + 1024
    storage = torch.full((step + rows * 128,), math.nan, dtype=torch.bfloat16, device="cuda")
    k = storage.as_strided((2, rows, 1, 128), (step, 128, 128, 1))
    k.copy_(randn(2, rows, 1, 128))
    v, q, lengths = randn(2, rows, 1, 128, seed=1), randn(2, 1, 4, 128, seed=2), int32(13, 15)
    new = [randn(2, 1, 1, 128, seed=3 + i) for i in range(2)]
    table = int32([1], [0]) if page else None
    options = {"cache_seqlens": lengths, "page_table": table, "return_lse": True}
    found = attention_with_kvcache(q, k, v, k=new[0], v=new[1], **options, kernel=arch)
    for b, row in enumerate((13, 15)):
        assert_equal([x[1 - b if page else b, row] for x in (k, v)], [x[b, 0] for x in new])
    cache = ref.Cache(k.float(), v.float(), table)
    assert_near(found, ref.attention(q.float(), cache, 128**-0.5, ref.Lengths(lengths + 1)))


# ---- repeats, batches and graphs ----


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_a_graph_replays_with_other_lengths_and_tables(page, split, arch):
    """Rows are appended, too."""
    call = Call((1000,) * 6, (2,) * 6)
    (k, v), table = call.paged(16) if page else ((call.k, call.v), None)
    lengths, new = int32(*(0,) * 6), [randn(6, 2, 2, 128, seed=3 + i) for i in range(2)]
    options = {"cache_seqlens": lengths, "page_table": table, "causal": True, "kernel": arch, **split}
    options |= {"k": new[0], "v": new[1]}

    def run():
        return attention_with_kvcache(call.q, k, v, return_lse=True, **options)

    graph, found = captured(run)
    for given in ((0,) * 6, (1000, 0, 3, 64, 65, 999), (17,) * 6, (1000,) * 6):
        lengths.copy_(int32(*given))
        if page:
            table.copy_(table.roll(1, 0))
        for x in found:
            x.fill_(math.nan)
        graph.replay()
        assert_equal(found, run())


@pytest.mark.parametrize("arch", ARCHS)
def test_two_streams_at_once(arch):
    call = Call((3000,) * 4, (1,) * 4)
    expected, streams = call.run(kernel=arch), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call.run(kernel=arch))
        torch.cuda.synchronize()
        for found in results:
            assert_equal(found, expected)
