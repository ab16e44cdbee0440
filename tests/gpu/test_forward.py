"""The forward kernels on the GPU: every named case by the tolerance rule, and properties between calls."""

import functools
from dataclasses import replace

import pytest
import torch

from cute_attn import attention
from cute_attn.compiler import registry
from tests.cases import BY_NAME, CASES
from tests.checks import assert_same, check_forward
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import captured, expectations
from tests.gpu.tile_cases import tile_cases
from tests.problem import Case, Problem

ARCHS = runnable_archs()
D256 = ("causal-d256",)
OVER_D80 = ("causal-d96", "causal-d128", "causal-d256")
EPILOGUES_OF_A_HEAD = ("dropout-causal", "everything-causal-dropout", "everything-window-mem_efficient")
TILES: dict[str, dict[str, tuple[str, ...]]] = {
    "sm80": {
        "tile_m=64,tile_n=32,num_warps=4": (),
        "tile_m=64,tile_n=64,num_warps=4,q_in_regs=true": (),
        "tile_m=128,tile_n=64,num_warps=8": (),
        "tile_m=128,tile_n=32,num_warps=4,num_stages=2": D256,
        "tile_m=64,tile_n=128,num_warps=4,num_stages=1,swizzle_bits=2": (),
        "tile_m=64,tile_n=32,num_warps=4,num_stages=1,pack_heads=4": EPILOGUES_OF_A_HEAD,
        "tile_m=16,tile_n=64,num_warps=1,num_stages=2,qk_unroll=0,key_groups=4,q_in_regs=true": (
            *("dropout-causal", "everything-causal-dropout"),
        ),
        "tile_m=64,tile_n=64,num_warps=4,num_stages=1,qk_unroll=0,key_groups=2,pack_heads=2": EPILOGUES_OF_A_HEAD,
    },
    "sm90": {
        "tile_m=64,tile_n=64,num_stages=1": (),
        "tile_m=128,tile_n=96,num_stages=3,speculative=true": D256,
        "tile_m=128,tile_n=64,share_qo_smem=true": (),
        "tile_m=192,tile_n=32,speculative=false": D256,
        "tile_m=256,tile_n=64,num_stages=4,speculative=true": OVER_D80,
        "tile_m=256,tile_n=32,rescale_threshold=8,pack_heads=2": (*OVER_D80[1:], *EPILOGUES_OF_A_HEAD),
        "tile_m=128,tile_n=64,pack_heads=2": EPILOGUES_OF_A_HEAD,
        "tile_m=64,tile_n=64,pack_heads=4": EPILOGUES_OF_A_HEAD,
        "tile_m=64,tile_n=32,num_stages=1,bias_stages=0,share_qo_smem=true,blocks_per_sm=2": D256,
        "tile_m=64,tile_n=48,num_stages=3,speculative=true": ("dropout-causal", "everything-causal-dropout"),
    },
}
"""Tiles, and the cases that each declines."""


def has_short_tile(case: Case, arch: str) -> bool:
    """True if the kernel has another tile for the case's lengths and heads."""
    kernel = registry.lookup(case.traits(arch))
    return (
        kernel.for_lengths(*case.longest, case.group, arch, case.pairs, case.seen_by_window).tile
        != kernel.tile
    )


def long_tile(case: Case, arch: str) -> str:
    """The default tile of long sequences as text; the case's sequences are too short to get it."""
    kernel = registry.lookup(case.traits(arch))
    by_threads = case.longest[1] % 8 or (case.bias and "q" in case.bias_broadcast)  # not by TMA
    if getattr(kernel.tile, "bias_stages", 0) and by_threads:
        kernel = kernel.without_tma_bias()
    return kernel.tile.text


SHORT = [(case, arch) for case in CASES for arch in ARCHS if case.launches and has_short_tile(case, arch)]


@functools.lru_cache(maxsize=2)
def prepared(case: Case) -> tuple[Problem, dict, dict, dict]:
    """A case's problem, and expected results for its compared batches in float64, in its dtype and in float32."""
    problem = case.build("cuda")
    return problem, *expectations(problem.compared())


def check_case(case: Case, **options) -> None:
    problem, *expected = prepared(case)
    actual = problem.run(**options)
    if case.compare:
        actual = {name: value[list(case.compare)] for name, value in actual.items()}
    check_forward(actual, *expected)


@pytest.mark.parametrize(
    "case, arch, tile",
    [
        pytest.param(
            case, arch, long_tile(case, arch) if (case, arch) in SHORT else None, id=f"{case.name}-{arch}"
        )
        for case in CASES
        for arch in ARCHS
    ],
)
def test_case(case, arch, tile):
    check_case(case, kernel=arch, tile=tile)


@pytest.mark.parametrize(
    ("case", "arch"), [pytest.param(*one, id=f"{one[0].name}-{one[1]}") for one in SHORT]
)
def test_tile_for_short_sequences(case, arch):
    check_case(case, kernel=arch)


@pytest.mark.parametrize(
    ("arch", "tile", "case"), tile_cases("forward", {a: TILES.get(a, {}) for a in ARCHS})
)
def test_any_tile_equals_any_tile(case, arch, tile):
    check_case(case, kernel=arch, tile=tile)


# ---- properties ----


CAUSAL = BY_NAME["causal-203x113"]


SEVEN = replace(CAUSAL, name="batch-of-7", batch=7, nheads=6, nheads_kv=3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", [SEVEN], ids=lambda case: case.name)
def test_a_batch_does_not_depend_on_its_neighbours(case, arch):
    problem = case.build("cuda")
    whole = problem.run(kernel=arch)
    for b in range(7):
        alone = replace(problem, tensors=tuple(x[b : b + 1] for x in problem.tensors)).run(kernel=arch)
        assert_same(alone, {name: value[b : b + 1] for name, value in whole.items()})


# ---- operator, streams, graphs, compilers, devices ----


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [
        torch.randn(2, n, h, 64, dtype=torch.bfloat16, device="cuda")
        for n, h in ((113, 4), (203, 2), (203, 2))
    ]


def test_a_replayed_graph_uses_a_new_mask(tensors):
    graph, out = captured(lambda: attention(*tensors, dropout_p=0.5))
    # PyTorch writes the seed at the capture's begin and before each replay, on two streams that it leaves unordered.
    torch.cuda.synchronize()
    results = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            results.append(out.clone())
    differ = [[int((x != y).sum()) for y in results] for x in results]
    assert differ[0][1], "two replays, one mask"
    assert differ[0][2] == differ[1][3] == 0, f"a seed repeats its masks: {differ}"
    assert differ[0][4]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_device(tensors):
    out = attention(*(x.to("cuda:1") for x in tensors), causal=True)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), attention(*tensors, causal=True))
