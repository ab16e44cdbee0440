"""merge_attention, append_kv and attention_with_kvcache on the GPU, against the definition."""

import copy
import dataclasses
import math

import pytest
import torch

from cute_attn import compiler
from cute_attn.api.append import append_kv
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.api.merge import merge_attention
from cute_attn.host import append
from cute_attn.host.split_kv import BOX_ROWS
from cute_attn.reference.kvcache import merge, query_positions, rotate
from cute_attn.tiles.inference import CombineTile
from cute_attn.traits import Traits
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, captured
from tests.kvcache_problem import CASES, Case, Problem

ARCHS = runnable_archs("append")
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


# ---- merge ----


def partial_results(partials, batch, queries, heads, dim, empty=0.3):
    """Random ones; where an LSE is -inf or +inf, out is NaN."""
    generator = torch.Generator("cuda").manual_seed(partials)
    outs = torch.randn(partials, batch, queries, heads, dim, generator=generator, device="cuda")
    lses = 4 * torch.randn(partials, batch, heads, queries, generator=generator, device="cuda")
    absent = torch.rand(lses.shape, generator=generator, device="cuda")
    lses[absent < empty] = -math.inf
    lses[absent < empty / 4] = math.inf
    lses[:, 0, 0, 0] = -math.inf
    outs[lses.isinf().transpose(-1, -2)] = math.nan
    return outs, lses


def check_merged(found, outs, lses):
    exact, exact_lse = merge(outs.double(), lses.double())
    out, lse = found
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=max(eps, 1e-5), atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("partials", [1, 2, 3, 5, 17, 32, 55, 97, 133, 512])
def test_merge(partials, arch):
    """Every tile and dtype, several head dims, and numbers of rows that are no multiple of a CTA's."""
    target = compiler.default_target("sm80")
    for dim, dtype in ((8, torch.float32), (40, torch.float16), (64, torch.bfloat16), (256, torch.bfloat16)):
        outs, lses = partial_results(partials, 2, 7, 3, dim)
        for tile in (CombineTile.of(1), CombineTile.of(512), CombineTile(2, 3, 2)):
            out = torch.full(outs.shape[1:], math.nan, dtype=dtype, device="cuda")
            lse = torch.full(lses.shape[1:], math.nan, device="cuda")
            kernel = compiler.compile(Traits("combine", arch, NAMES[dtype], dim), tile, target)
            kernel.function(outs, lses, out, lse, None)
            check_merged((out, lse), outs, lses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 13, 59, 102, 100, 511])
def test_merge_attention_of_any_head_dim(dim, dtype):
    outs, lses = partial_results(6, 2, 33, 5, dim)
    found = merge_attention(outs, lses, dtype=dtype)
    check_merged(found, outs, lses)
    for _ in range(3):  # from its record
        assert_equal(merge_attention(outs, lses, dtype=dtype), found)


@pytest.mark.parametrize("queries", [1, 3, 108, 1024])
def test_merge_attention(queries):
    outs, lses = partial_results(6, 1, queries, 5, 128)
    found = merge_attention(outs, lses)
    check_merged(found, outs, lses)
    packed = merge_attention(outs[:, 0], lses[:, 0])
    listed = merge_attention(list(outs), list(lses))
    for one, other, whole in zip(packed, listed, found, strict=True):
        assert one.equal(whole[0]) and other.equal(whole)
    half, _ = merge_attention(outs.bfloat16(), lses)
    check_merged((half, found[1]), outs.bfloat16().float(), lses)
    for _ in range(50):
        assert merge_attention(outs, lses)[0].equal(found[0])


# ---- append ----


def launched(problem: Problem, arch: str, q: torch.Tensor | None) -> torch.Tensor | None:
    """Append by the kernel of ``arch``, and the rotated copy of q."""
    params = problem.append()._replace(cu_seqlens_q=problem.cu_q, mask=problem.case.mask)
    rotated = None if q is None else torch.full_like(q, math.nan)
    arguments, rows = append.kernel_arguments(params, q, rotated)
    assert rows
    target = compiler.default_target("sm80")
    function, *ordered = compiler.compile(append.traits_of(params, arch, q), None, target).bind(**arguments)
    function(*ordered)
    return rotated


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int16)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.new or case.rotary])
def test_append_is_the_definition_bit_for_bit(name, dtype, arch):
    check_append(dataclasses.replace(CASES[name], dims=(64, 40), heads=(6, 2)), dtype, arch)


def check_append(case: Case, dtype: torch.dtype, arch: str) -> None:
    problem, expected = Problem(case, dtype=dtype).to("cuda"), Problem(case, dtype=dtype)
    expected.run()
    rotated = launched(problem, arch, problem.q if case.rotary and problem.q.numel() else None)
    assert bits(problem.k).equal(bits(expected.k)) and bits(problem.v).equal(bits(expected.v))
    if rotated is not None:
        start = expected.int32(case.lengths) if expected.rotary.seqlens is None else expected.rotary.seqlens
        positions = query_positions(start, expected.cu_q, expected.q.shape[:-2], bool(case.mask))
        whole = rotate(expected.q.flatten(0, -3), positions, expected.rotary).view(expected.q.shape)
        assert bits(rotated).equal(bits(whole))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", [(59, 41), (34, 18), (100, 52), (574, 301)])
@pytest.mark.parametrize(
    "name", ["append-beyond-capacity", "page-3", "packed-append", "rotary-halves-causal", "rotary-seqlens"]
)
def test_append_of_rows_that_start_anywhere(name, dims, arch):
    check_append(dataclasses.replace(CASES[name], dims=dims, heads=(6, 2)), torch.bfloat16, arch)


@pytest.mark.parametrize("page", [0, 16])
def test_append_beyond_two_to_the_31(page):
    """Entries, or pages, are more than 2**31 elements apart."""
    rows, step = 16, 2**31 + 1024
    storage = torch.zeros(step + rows * 64, dtype=torch.float16, device="cuda")
    k_cache = storage.as_strided((2, rows, 1, 64), (step, 64, 64, 1))
    v_cache = torch.zeros_like(k_cache, memory_format=torch.contiguous_format)
    k, v = (torch.randn(2, 3, 1, 64, device="cuda").half() for _ in range(2))
    lengths = torch.tensor([13, 5], dtype=torch.int32, device="cuda")
    table = torch.tensor([[1], [0]], dtype=torch.int32, device="cuda") if page else None
    append_kv(k_cache, v_cache, k, v, lengths, page_table=table)
    for b, start in enumerate((13, 5)):
        entry = 1 - b if page else b
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert cache[entry, start : start + 3].equal(new[b])
    assert storage.count_nonzero() <= 2 * 3 * 64


# ---- attention ----


def cases_of_archs() -> list[tuple[str, str]]:
    """(name, arch); pages of any size are Ampere's."""
    return [
        (name, arch)
        for arch in runnable_archs("kvcache")
        for name, case in CASES.items()
        if arch == "sm80" or case.page % BOX_ROWS == 0
    ]


@pytest.mark.parametrize(("name", "arch"), cases_of_archs())
def test_attention_is_the_definition(name, arch):
    check(problem_of(name, (64, 64)), "cpu", kernel=arch)


def problem_of(name: str, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(dataclasses.replace(CASES[name], dims=dims), dtype=dtype)


def call(problem: Problem, **options):
    """out and lse."""
    given = options | problem.options()
    return attention_with_kvcache(problem.q, problem.k, problem.v, return_lse=True, **given)


def check(problem: Problem, exact: str, repeats: int = 0, **options) -> None:
    """A problem on the CPU, which goes to the GPU, against the definition on the device ``exact``.

    repeats: each appends the same rows at the same places, and has the same bits.
    """
    latent = problem.v.data_ptr() == problem.k.data_ptr()
    expected = copy.deepcopy(problem).to(exact)
    problem.to("cuda")
    for one in (problem, expected):
        one.slopes = None if one.slopes is None else one.slopes.float()
        if latent:
            one.share()
    found = call(problem, **options)
    assert_near(found, expected.run())
    assert bits(problem.k).equal(bits(expected.k)) and bits(problem.v).equal(bits(expected.v))
    for _ in range(repeats):
        assert_equal(call(problem, **options), found)


def assert_near(found, expected) -> None:
    """out and lse, of 16 bits."""
    for one, whole, tolerance in zip(found, expected, (2e-2, 1e-3), strict=True):
        torch.testing.assert_close(one, whole.to("cuda"), rtol=tolerance, atol=tolerance)


ANY_ROWS = [(59, 13), (34, 18), (100, 100), (250, 251)]
"""Head dims whose rows start at multiples of 1, 2, 4 and 1 elements."""
WITH_ANY_ROWS = (
    *("plain", "append", "batch-idx", "page-3", "page-16", "leftpad-append", "leftpad-page", "packed-append"),
    *("rotary-halves-causal", "window-past", "alibi-batch", "sinks-packed", "tree-page-leftpad"),
    *("functions-leftpad-page", "groups-of-5", "bias-leftpad-page", "bias-packed-append", "blocks-leftpad"),
)


@pytest.mark.parametrize("dims", ANY_ROWS[:3])
@pytest.mark.parametrize("name", WITH_ANY_ROWS)
def test_rows_that_start_anywhere(name, dims):
    """The Ampere kernel serves them on every GPU. Memory between rows is NaN, also the columns after a head dim."""
    check(problem_of(name, dims), "cpu")


@pytest.mark.parametrize("dims", [(576, 512), (320, 320), (264, 64)])
@pytest.mark.parametrize("name", [name for name, arch in cases_of_archs() if arch == "sm90"])
def test_large_head_dims(name, dims):
    """Values are separate from keys. In some cases half of the columns has narrower swizzle atoms than the keys."""
    check(problem_of(name, dims), "cpu")


@pytest.mark.parametrize("dims", [(576, 512), (320, 64), (261, 300)])
@pytest.mark.parametrize("name", WITH_ANY_ROWS)
def test_large_head_dims_by_the_ampere_kernel(name, dims):
    """Whose warps divide the columns of O; rows of the last ones start anywhere."""
    check(problem_of(name, dims), "cpu", kernel="sm80")


LENGTHS = (700, 64, 0, 1031, 5)
"""Sequences of several key blocks, and one without keys."""


def many_blocks(heads, queries, dims, page, **scores) -> Case:
    """Sequences to which the queries' keys are appended."""
    of_each = {"new": (queries,) * 5, "queries": (queries,) * 5}
    sizes = {"capacity": 1120, "page": page, "heads": heads, "dims": dims}
    return Case(LENGTHS, **of_each, **sizes, rotary=8, mask="causal", **scores)


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("page", [0, 7])
@pytest.mark.parametrize("dims", ANY_ROWS)
@pytest.mark.parametrize(("heads", "queries"), [((4, 4), 1), ((8, 2), 5), ((8, 2), 80)])
def test_rows_that_start_anywhere_in_many_blocks(heads, queries, dims, page, num_splits):
    """Few and many queries, with keys divided among CTAs; from a record as well."""
    problem = Problem(many_blocks(heads, queries, dims, page), dtype=torch.float16)
    check(problem, "cuda", repeats=10, num_splits=num_splits)


BIASES = [("whole", torch.bfloat16), ("bq", torch.float32), ("h", torch.float16)]


@pytest.mark.parametrize("arch", runnable_archs("kvcache"))
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(("page", "columns"), [(0, 1120), (16, 1111)])
@pytest.mark.parametrize(("bias", "dtype"), BIASES)
@pytest.mark.parametrize(
    ("heads", "queries", "dims"), [((4, 4), 1, (64, 64)), ((8, 1), 5, (128, 128)), ((6, 2), 80, (192, 64))]
)
def test_bias_and_block_mask_in_many_blocks(
    heads, queries, dims, bias, dtype, page, columns, num_splits, arch
):
    """Columns of no sequence are NaN; rows of an odd number of columns start between pairs; from a record as well."""
    blocks = {torch.bfloat16: "", torch.float32: "one", torch.float16: "each"}[dtype]
    case = many_blocks(heads, queries, dims, page, bias=bias, blocks=blocks)
    problem = Problem(case, dtype=torch.bfloat16)
    problem.bias = problem.bias[..., :columns].contiguous().to(dtype)
    check(problem, "cuda", repeats=4, num_splits=num_splits, kernel=arch)


@pytest.mark.parametrize("arch", runnable_archs("kvcache"))
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize(
    ("heads", "queries", "dims", "scores"),
    [
        ((4, 4), 1, (64, 64), {"blocks": "each", "mask": ""}),
        ((8, 1), 5, (128, 128), {"blocks": "one", "functions": True, "sinks": True}),
        ((6, 2), 9, (192, 64), {"blocks": "one", "mask": "window", "window": (300, 2), "packed": True}),
        ((4, 2), 150, (128, 128), {"blocks": "each", "bias": "h", "softcap": 1.5}),
        ((16, 2), 40, (256, 256), {"blocks": "one", "alibi": "heads"}),
        ((2, 2), 3, (64, 64), {"blocks": "each", "tree": True, "rotary": 0}),
    ],
)
def test_hidden_blocks_are_not_read(heads, queries, dims, scores, page, num_splits, arch):
    """Blocks of 128 keys that a BlockMask hides from all queries of a kv head are NaN; from a record as well."""
    case = dataclasses.replace(many_blocks(heads, queries, dims, page), block=128, **scores)
    if case.packed:
        rows = (queries, 1, 0, 2, 3)
        case = dataclasses.replace(case, queries=rows, new=rows)
    problem = Problem(case, dtype=torch.bfloat16)
    expected = copy.deepcopy(problem).to("cuda")
    problem.hide()
    problem.to("cuda")
    for one in (problem, expected):
        one.slopes = None if one.slopes is None else one.slopes.float()
    found = call(problem, num_splits=num_splits, kernel=arch)
    assert_near(found, expected.run())
    for _ in range(3):
        assert_equal(call(problem, num_splits=num_splits, kernel=arch), found)


@pytest.mark.parametrize("arch", runnable_archs("kvcache"))
@pytest.mark.parametrize("leftpad", [(), (3, 130)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_the_smallest_number_are_means(dtype, leftpad, arch):
    """A finite number hides no key; -inf hides keys, also all of a row."""
    case = Case(
        (300, 517), capacity=600, queries=(4, 4), heads=(8, 2), dims=(64, 64), leftpad=leftpad, bias="whole"
    )
    problem = Problem(case, dtype=torch.bfloat16)
    problem.bias = problem.bias.to(dtype)
    problem.bias[:, :, 0], problem.bias[:, :, 1, ::2] = torch.finfo(dtype).min, torch.finfo(dtype).min
    problem.bias[:, :, 1, 1::2], problem.bias[:, :, 2] = -math.inf, -math.inf
    check(problem, "cuda", repeats=2, num_splits=1, kernel=arch)


def test_a_graph_replays_with_another_bias_and_other_blocks():
    case = Case(
        (300, 70), capacity=512, queries=(3, 3), heads=(8, 2), dims=(128, 128), bias="whole", blocks="each"
    )
    problem = Problem(case, dtype=torch.bfloat16).to("cuda")
    options = problem.options()
    graph, found = captured(
        lambda: attention_with_kvcache(problem.q, problem.k, problem.v, return_lse=True, **options)
    )
    for step in range(3):
        problem.bias.copy_(torch.roll(problem.bias[..., :300], step, -1).repeat(1, 1, 1, 2)[..., :512])
        for counts in (problem.blocks.kv_num_blocks, problem.blocks.full_kv_num_blocks):
            counts.fill_(5 * step + 4)
        graph.replay()
        assert_near(found, problem.run())


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", [1, 16, 40])
def test_latent_attention_by_the_ampere_kernel(heads, num_splits):
    """It loads values like other values."""
    case = Case((700, 64, 0, 5), new=(2,) * 4, queries=(2,) * 4, capacity=768, page=12, heads=(heads, 1))
    case = dataclasses.replace(case, dims=(576, 512), mask="causal")
    check(Problem(case, dtype=torch.bfloat16).share(), "cuda", num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    ("heads", "queries", "new"), [(1, 1, 0), (8, 2, 2), (16, 1, 1), (128, 1, 0), (128, 1, 1), (24, 5, 5)]
)
def test_latent_attention(heads, queries, new, num_splits):
    """Values are the first columns of the keys. Long sequences too, so that ranges of keys are divided."""
    of_each = {"new": (new,) * 5 if new else (), "queries": (queries,) * 5}
    sizes = {"capacity": 1088, "page": 64, "heads": (heads, 1), "dims": (576, 512)}
    problem = Problem(Case(LENGTHS, **of_each, **sizes, mask="causal"), dtype=torch.bfloat16)
    check(problem.share(), "cuda", repeats=30, num_splits=num_splits)


def test_latent_attention_in_many_work_tiles():
    """A CTA has several, of several key blocks: its warpgroups pass P on, from one to the next."""
    case = Case((300,) * 300, queries=(1,) * 300, capacity=320, page=64, heads=(128, 1), dims=(576, 512))
    check(Problem(case, dtype=torch.bfloat16).share(), "cuda", repeats=30)


@pytest.mark.parametrize("dims", [(64, 64), (13, 58), (256, 256)])
@pytest.mark.parametrize("name", WITH_ANY_ROWS)
def test_fp32(name, dims):
    """Rows may start at any address; results have fp32's precision."""
    check_fp32(problem_of(name, dims, torch.float32))


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("page", [0, 7])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (59, 201)])
@pytest.mark.parametrize(("heads", "queries"), [((4, 4), 1), ((8, 2), 5), ((8, 2), 80)])
def test_fp32_in_many_blocks(heads, queries, dims, page, num_splits):
    case = many_blocks(heads, queries, dims, page)
    check_fp32(Problem(case, dtype=torch.float32), num_splits=num_splits)


def check_fp32(problem: Problem, **options):
    """Against the definition in fp64 of the same numbers."""
    expected = copy.deepcopy(problem)
    for name in ("q", "k", "v", "sinks", "slopes", "bias"):
        x = getattr(expected, name)
        setattr(expected, name, None if x is None else x.double())
    expected.new = expected.new and [x.double() for x in expected.new]
    if expected.rotary is not None:
        angles = (expected.rotary.cos.double(), expected.rotary.sin.double())
        expected.rotary = dataclasses.replace(expected.rotary, cos=angles[0], sin=angles[1])
    problem.to("cuda")
    whole, whole_lse = expected.run()
    for _ in range(4):  # the later ones from a record, on the rows that the first one appended
        out, lse = call(problem, **options)
        torch.testing.assert_close(out.cpu().double(), whole, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse.cpu().double(), whole_lse, rtol=1e-5, atol=1e-5)
    for found, own in ((problem.k, expected.k), (problem.v, expected.v)):
        torch.testing.assert_close(found.cpu().double(), own, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_fp32_follows_pytorchs_precision(monkeypatch):
    """Calls from a record follow it too."""
    case = Case((300, 70), capacity=512, heads=(4, 2), dims=(64, 64))
    problem = Problem(case, dtype=torch.float32).to("cuda")
    exact, _ = copy.deepcopy(problem).to("cpu").run()
    for allowed in (False, True, False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        for _ in range(3):
            out, _ = call(problem)
            error = (out.cpu() - exact).abs().max().item()
            assert (1e-5 < error < 5e-3) if allowed else error < 1e-5


@pytest.mark.parametrize("dim", [13, 59, 100])
def test_keys_and_values_side_by_side(dim):
    """Views of one tensor, so that values start between multiples of 16 bytes, and calls at several addresses."""
    sizes = {"new": (2, 2), "queries": (2, 2), "capacity": 512, "heads": (4, 2), "dims": (dim, dim)}
    expected = Problem(Case((400, 37), **sizes, mask="causal"), dtype=torch.float16)
    whole = copy.deepcopy(expected).run()
    for shift in (0, 1, 2, 4, 0) if dim % 2 else (0, 4, 8, 4, 0):
        problem = copy.deepcopy(expected).to("cuda")
        both = problem.k.new_full((2 * problem.k.numel() + shift,), math.nan)
        both = both[shift:].view(*problem.k.shape[:3], 2 * dim)
        problem.k, problem.v = both.split(dim, -1)
        for _ in range(3):
            problem.k.copy_(expected.k), problem.v.copy_(expected.v)
            assert_near(call(problem), whole)


def test_a_graph_replays_with_other_lengths():
    """Lengths include zero, and range up to the capacity."""
    case = Case(
        (5, 9, 0), new=(1, 1, 1), dims=(128, 128), heads=(8, 2), capacity=200, rotary=64, mask="causal"
    )
    problem = Problem(case, dtype=torch.bfloat16).to("cuda")
    problem.k.nan_to_num_(0.5), problem.v.nan_to_num_(0.5, 0.5)
    options = problem.options()
    lengths = options["cache_seqlens"]
    start = [x.clone() for x in (problem.k, problem.v)]

    def run():
        return attention_with_kvcache(problem.q, problem.k, problem.v, return_lse=True, **options)

    graph, found = captured(run)
    for given in ((5, 9, 0), (199, 0, 64), (0, 0, 0), (100, 150, 199)):
        results = []
        for replay in (True, False):
            problem.k.copy_(start[0]), problem.v.copy_(start[1])
            lengths.copy_(torch.tensor(given, dtype=torch.int32))
            if replay:
                graph.replay()
            results.append([x.clone() for x in (*(found if replay else run()), problem.k, problem.v)])
        assert_equal(*results)
