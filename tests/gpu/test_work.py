"""Work on the card: which work tiles are replayed, and that no result depends on the schedule or on other streams."""

import math
from dataclasses import replace

import pytest
import torch

from cute_attn.host.counters import replayed_tiles
from tests.cases import BY_NAME, FEATURES, VARLEN
from tests.checks import assert_same, check_backward, check_forward
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import expectations
from tests.problem import Case

pytestmark = pytest.mark.once

ARCHS = runnable_archs()
SPECULATIVE = [arch for arch in ARCHS if arch == "sm90"]
OTHER_LENGTHS = ((1300, 1300), (7, 70), (0, 40), (300, 300))
"""Lengths of packed sequences: queries, and keys before the append."""


class Replays:
    """Counts the work tiles that are replayed while it is entered."""

    def __enter__(self):
        torch.cuda.synchronize()
        self.before, self.count = replayed_tiles(), 0
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.count = replayed_tiles() - self.before


# ---- nothing is replayed ----


def more_keys(case: Case, more: int) -> Case:
    """The case with ``more`` keys for each sequence."""
    return replace(case, seqlen_k=case.seqlen_k + more, lengths_k=tuple(n + more for n in case.lengths_k))


def normal_cases():
    """Every kernel once: short sequences, long ones, which have different tiles, and packed ones."""
    masks = {"causal": {"causal": True}}
    masks |= {f"window-{a}-{b}": {"window": (a, b)} for a, b in ((1024, 127), (100, 63), (7, 255))}
    packed = dict(zip(("lengths_q", "lengths_k"), zip(*OTHER_LENGTHS, strict=True), strict=True))
    lengths = {"short": {"seqlen_q": 300, "seqlen_k": 300}, "long": {"seqlen_q": 1100, "seqlen_k": 1100}}
    for dtype in ("bf16", "fp16"):
        for head_dim in (64, 128, 256):
            for mask in masks:
                for name, own in (lengths | {"packed": packed}).items():
                    title = f"{dtype}-d{head_dim}-{mask}-{name}"
                    yield Case(title, dtype=dtype, head_dim=head_dim, **masks[mask], **own)


@pytest.mark.parametrize("arch", SPECULATIVE)
@pytest.mark.parametrize("case", list(normal_cases()), ids=lambda case: case.name)
def test_nothing_is_replayed_of_normal_inputs(case, arch):
    """This holds wherever the diagonal crosses key blocks of 64, 80, 96 or 128."""
    for more in (0, 1, 63, 64, 127, 128, 191, 255) if case.causal else (0, 1, 64):
        problem = more_keys(case, more).build("cuda", seed=more)
        with Replays() as replays:
            actual = problem.run(kernel=arch)
        assert replays.count == 0, f"{replays.count} work tiles were replayed with {more} keys before"
        check_forward(actual, *expectations(problem))


SEQUENCES = {"lengths_q": (300, 64, 700, 5), "lengths_k": (300, 64, 900, 70)}
SEQUENCES |= {"seqused_q": (130, 0, 700, 1), "seqused_k": (300, 10, 801, 69)}
USED = [Case(f"used-d{dim}", head_dim=dim, causal=True, **SEQUENCES) for dim in (64, 128)]


@pytest.mark.parametrize("arch", SPECULATIVE)
@pytest.mark.parametrize("case", USED, ids=lambda case: case.name)
def test_what_does_not_exist_is_never_replayed(case, arch):
    """Queries beyond seqused_q may be NaN."""
    problem = case.build("cuda")
    starts = problem.lengths.cu_seqlens_q.tolist()
    for start, length, used in zip(starts, case.lengths_q, case.seqused_q, strict=False):
        problem.tensors[0][start + used : start + length] = math.nan
    with Replays() as replays:
        actual = problem.run(kernel=arch)
    assert replays.count == 0
    check_forward(actual, *expectations(problem))


# ---- what has to be replayed ----

EARLY = 5
"""The key that all queries see last."""
RISING = [
    Case(f"{dtype}-d{head_dim}-{name}", dtype=dtype, head_dim=head_dim, **mask, **lengths)
    for dtype in ("bf16", "fp16")
    for head_dim in (64, 128)
    for name, mask, lengths in (
        ("full", {}, {"seqlen_q": 600, "seqlen_k": 700}),
        ("causal", {"causal": True}, {"seqlen_q": 1100, "seqlen_k": 1163}),
        ("causal-short", {"causal": True}, {"seqlen_q": 500, "seqlen_k": 627}),
        ("window", {"window": (5000, 63)}, {"seqlen_q": 1100, "seqlen_k": 1100}),
        ("packed", {"causal": True}, {"lengths_q": (900, 0, 70), "lengths_k": (1000, 30, 400)}),
    )
]


def rising(case: Case, nats: float):
    """A problem in which the score of key ``EARLY`` is above all others by about ``nats``."""
    problem = case.build("cuda")
    q, k, _ = problem.tensors
    factor = math.sqrt(nats * math.sqrt(case.head_dim))
    cu_seqlens = problem.lengths.cu_seqlens_k
    starts = [0] if cu_seqlens is None else cu_seqlens[:-1].tolist()
    q[..., 0], k[..., 0] = factor, 0.0
    for start, length in zip(starts, case.lengths_k or (case.seqlen_k,), strict=True):
        if length > EARLY:
            k[..., start + EARLY, :, 0] = factor
    return problem


RISES = [(case, nats) for case in RISING for nats in (15, 40, 200) if nats > 15 or "causal" in case.name]


@pytest.mark.parametrize("arch", SPECULATIVE)
@pytest.mark.parametrize(("case", "nats"), [pytest.param(*x, id=f"{x[0].name}-{x[1]}") for x in RISES])
def test_scores_that_rise_beyond_frozen_maxima_are_replayed(case, arch, nats):
    """Scores rise by more than 2^40: as far as fp32 can hold, and further; in fp16 by e^15, which bf16 can hold."""
    problem = rising(case, nats)
    with Replays() as replays:
        actual = problem.run(kernel=arch)
    assert (replays.count > 0) == (nats > 15 or case.dtype == "fp16")
    check_forward(actual, *expectations(problem))


AGAIN = [case for case in RISING if case.name.endswith(("d64-causal", "d128-causal", "packed"))]


@pytest.mark.parametrize("arch", SPECULATIVE)
@pytest.mark.parametrize("case", AGAIN, ids=lambda case: case.name)
def test_a_graph_replays_work_tiles_too(case, arch):
    """A graph of two launches, whose inputs change between replays from ones that need a replay to others, and back."""
    plain, problem = case.build("cuda"), rising(case, 60.0)
    expected = [x.run(kernel=arch) for x in (problem, plain)]
    static = replace(problem, tensors=tuple(x.clone() for x in problem.tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [static.run(kernel=arch) for _ in range(2)]
    for i in (0, 1, 0, 0):
        for tensor, source in zip(static.tensors, (problem, plain)[i].tensors, strict=True):
            tensor.copy_(source)
        graph.replay()
        for actual in captured:
            assert_same(actual, expected[i])
    check_forward(expected[0], *expectations(problem))


# ---- maximum lengths far above all sequences' ----

PACKED = {"lengths_q": (3, 0, 10, 4), "lengths_k": (9, 3, 12, 1), "causal": True}
NUMBERED = Case("few-tokens", **PACKED, **FEATURES["mem_efficient"])
"""Its mask numbers scores by the stated maximum lengths, so kernels use these as given."""


def stated(problem, longest):
    """The problem with other stated maxima."""
    return replace(problem, lengths=replace(problem.lengths, max_seqlen_q=longest, max_seqlen_k=longest))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ["backward"])  # built along with the forward
@pytest.mark.parametrize("case", [NUMBERED], ids=lambda case: case.name)
def test_stated_maxima_that_count(case, op, arch):
    problem = stated(case.build("cuda"), 2**23)
    start = problem.start()
    check_forward(problem.run(kernel=arch), *expectations(problem))
    exact, plain = (problem.expected_gradients(start, dtype) for dtype in (torch.float64, torch.bfloat16))
    check_backward(problem.gradients(start, kernel=arch), exact, plain)


# ---- few queries, many keys ----

GROUPED = {"batch": 1, "nheads": 32, "nheads_kv": 8, "seqlen_k": 16384, "causal": True}
FEW_QUERIES = [
    Case(f"few-queries-{rows}-d{dim}", seqlen_q=rows, head_dim=dim, **GROUPED)
    for rows, dim in ((512, 128), (256, 64))
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", FEW_QUERIES, ids=lambda case: case.name)
def test_few_queries_with_many_keys(case, arch):
    """Whose sections of heads have fewer work tiles than there are multiprocessors."""
    problem = case.build("cuda")
    with Replays() as replays:
        actual = problem.run(kernel=arch)
    assert replays.count == 0
    check_forward(actual, *expectations(problem))


# ---- streams ----

OF_1500 = {"name": "causal", "batch": 2, "nheads": 16, "nheads_kv": 4, "seqlen_q": 1500, "seqlen_k": 1500}
BESIDE = [
    replace(BY_NAME["causal-d128"], **OF_1500),
    replace(BY_NAME["full-d256"], name="d256", batch=2, nheads=8, nheads_kv=8, seqlen_q=900, seqlen_k=900),
    Case("packed", causal=True, nheads=16, **{name: lengths * 8 for name, lengths in VARLEN.items()}),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", BESIDE, ids=lambda case: case.name)
def test_two_streams_at_a_time_give_the_same_bits(case, arch):
    """Each stream claims its work tiles from separate counters, also while the other stream replays."""
    other = rising(RISING[1], 60.0)
    problems = [case.build("cuda"), other if arch in SPECULATIVE else RISING[1].build("cuda")]
    expected = [problem.run(kernel=arch) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(problem.run(kernel=arch))
    torch.cuda.synchronize()
    for i, actual in enumerate(results):
        assert_same(actual, expected[i % 2])
