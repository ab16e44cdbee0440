"""merge_attention and attention_with_kvcache, which appends rows, on the GPU, against the definition."""

import copy
import dataclasses
import math

import pytest
import torch

from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.api.merge import merge_attention
from cute_attn.host.split_kv import BOX_ROWS
from cute_attn.reference.kvcache import merge
from tests import tensors
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, captured
from tests.kvcache_problem import CASES, Case, Problem

# ---- merge ----


def partial_results(partials, *sizes):
    outs, lses = tensors.partial_results(partials, *sizes, seed=partials)
    lses[:, 0, 0, 0], outs[:, 0, 0, 0] = -math.inf, math.nan  # a row without keys
    return outs.cuda(), lses.cuda()


def check_merged(found, outs, lses):
    exact, exact_lse = merge(outs.double(), lses.double())
    out, lse = found
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=max(eps, 1e-5), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("partials", "dim"),
    [*((6, n) for n in (1, 13, 59, 102, 100, 511)), *((n, 256) for n in (1, 2, 17, 97, 512))],
)
def test_merge_attention_of_any_size(partials, dim, dtype):
    outs, lses = partial_results(partials, 2, 33, 5, dim)
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


# ---- attention, and what it appends ----


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int16)


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
