"""Repeats of a call under changing traffic give equal bits.

A race loses rarely, and at other times when memory answers faster or slower: one comparison with a reference proves
nothing about it. So each kind of call is repeated with an empty L2, with a warm one, and next to a stream that keeps
the GPU's memory and multiprocessors busy. Grids fill the GPU several times.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import attention_with_kvcache
from cute_attn.compiler import registry
from tests.gpu.archs import runnable_archs
from tests.problem import Case

pytestmark = pytest.mark.unguarded  # guarded memory is kept until a test ends
REPEATS = 200
ARCHS = runnable_archs()

SHORT: dict[str, Any] = {"batch": 32, "seqlen_q": 512, "seqlen_k": 512, "nheads": 16, "nheads_kv": 16}
GQA: dict[str, Any] = {"batch": 8, "seqlen_q": 1024, "seqlen_k": 1024, "nheads": 16, "nheads_kv": 4}
ODD: dict[str, Any] = {"batch": 24, "seqlen_q": 413, "seqlen_k": 503, "nheads": 12, "nheads_kv": 12}
PACKED: dict[str, Any] = {"lengths_q": (700, 3, 130, 511) * 8, "lengths_k": (700, 90, 0, 800) * 8}
PACKED |= {"nheads": 12, "nheads_kv": 4}
EVERYTHING: dict[str, Any] = {"causal": True, "softcap": 12.0, "alibi": "batches", "dropout_p": 0.1}
EVERYTHING |= {"bias": "bf16", "bias_broadcast": "b"}

FORWARD = [
    Case("bias-of-heads-d64", bias="bf16", bias_broadcast="b", **SHORT),
    Case("bias-of-all-d64", bias="bf16", bias_broadcast="bh", **SHORT),
    Case("bias-of-heads-gqa-d64", bias="bf16", bias_broadcast="b", **(SHORT | {"nheads_kv": 4})),
    Case("bias-of-sequences-d64", bias="bf16", **SHORT),
    Case("bias-of-heads-d32", bias="bf16", bias_broadcast="b", head_dim=32, **SHORT),
    Case("bias-of-heads-d128", bias="bf16", bias_broadcast="b", head_dim=128, **SHORT),
    Case("bias-of-heads-fp16", bias="fp16", dtype="fp16", bias_broadcast="b", **SHORT),
    Case("bias-of-heads-causal", bias="bf16", bias_broadcast="b", causal=True, **SHORT),
    Case("bias-of-heads-softcap", bias="bf16", bias_broadcast="b", softcap=5.0, **SHORT),
    Case("bias-hides", bias="bf16", bias_broadcast="b", bias_hides=True, **(SHORT | {"seqlen_k": 504})),
    Case("bias-fp32", bias="fp32", bias_broadcast="b", **SHORT),
    Case("full-d64", **SHORT),
    Case("full-d128", head_dim=128, **SHORT),
    Case("causal-d64-gqa", causal=True, **GQA),
    Case("causal-d128-gqa", causal=True, head_dim=128, **GQA),
    Case("causal-d256", causal=True, head_dim=256, **GQA),
    Case("window-d128", window=(300, 0), head_dim=128, **GQA),
    Case("softcap-d128", softcap=5.0, logits=6.0, head_dim=128, **ODD),
    Case("alibi-d64", alibi="heads", causal=True, **ODD),
    Case("sinks-d64", sinks="bf16", causal=True, **ODD),
    Case("dropout-d64", dropout_p=0.2, **ODD),
    Case("mem-efficient-dropout-d128", dropout_p=0.2, dropout_mask="mem_efficient", head_dim=128, **ODD),
    Case("everything-d64", **EVERYTHING, **ODD),
    Case("varlen-d64", causal=True, **PACKED),
    Case("varlen-d128", causal=True, head_dim=128, **PACKED),
    Case("varlen-d256", head_dim=256, **PACKED),
    Case("varlen-bias-d64", bias="bf16", bias_broadcast="b", **PACKED),
    Case("used-keys-d128", head_dim=128, seqused_k=(500, 64, 413, 1) * 6, **ODD),
    Case("d192x128", causal=True, head_dim=192, head_dim_v=128, **GQA),
    Case("d512", causal=True, head_dim=512, **GQA),
    Case("d512-varlen", head_dim=512, **PACKED),
    Case("fp32-d64", causal=True, dtype="fp32", **(GQA | {"batch": 2})),
]
ROWS_256 = "tile_m=256,tile_n=64,num_stages=4,speculative=true"
TILES = [
    (FORWARD[0], "speculative=false"),
    (FORWARD[0], "bias_stages=0"),
    (FORWARD[12], "q_in_regs=true"),
    (FORWARD[12], "q_in_regs=false"),
    (FORWARD[23], "tile_m=128,tile_n=64,share_qo_smem=true"),
    (Case("full-d64", **SHORT), ROWS_256),
    (Case("causal-d64-gqa", causal=True, **GQA), f"{ROWS_256},pack_heads=4"),
    (Case("sinks-d64", sinks="bf16", causal=True, **ODD), ROWS_256),
    (
        Case("full-d72", head_dim=72, **ODD),
        "tile_m=256,tile_n=48,num_stages=4,rescale_threshold=8,speculative=true",
    ),
]
BACKWARD = [
    Case("full-d64", **SHORT),
    Case("causal-d64-gqa", causal=True, **GQA),
    Case("causal-d128-gqa", causal=True, head_dim=128, **GQA),
    Case("causal-d256", causal=True, head_dim=256, **GQA),
    Case("causal-d192x128-gqa", causal=True, head_dim=192, head_dim_v=128, **GQA),
    Case("window-d64", window=(300, 0), **GQA),
    Case("bias-of-heads-d64", bias="bf16", bias_broadcast="b", **SHORT),
    Case("bias-of-sequences-d128", bias="bf16", head_dim=128, **(SHORT | {"batch": 8})),
    Case("dropout-d64", dropout_p=0.2, **ODD),
    Case("softcap-d128", softcap=5.0, logits=6.0, head_dim=128, **ODD),
    Case("alibi-d64", alibi="heads", causal=True, **ODD),
    Case("everything-d64", **EVERYTHING, **ODD),
    Case("varlen-d64", causal=True, **PACKED),
    Case("varlen-d128", head_dim=128, **PACKED),
    Case("varlen-d256", causal=True, head_dim=256, **PACKED),
    Case("d512", causal=True, head_dim=512, **(GQA | {"batch": 2})),
    Case("d512-varlen", head_dim=512, **PACKED),
    Case("d384-bias-of-heads", head_dim=384, bias="bf16", bias_broadcast="b", **(SHORT | {"batch": 8})),
    Case("fp32-d64", causal=True, dtype="fp32", **(GQA | {"batch": 2})),
]
AMPERE = ("bias-of-heads-d64", "causal-d128-gqa", "everything-d64", "varlen-d64", "dropout-d64")
"""Also tested on the Ampere kernels, which have no TMA and no proxies. They run all cases that Hopper declines too."""


def served_by_hopper(case: Case, op: str) -> bool:
    """True if a Hopper kernel serves it."""
    try:
        registry.lookup(case.traits("sm90", op))
    except registry.Unsupported:
        return False
    return True


def with_archs(cases: list[Case], op: str) -> list[Any]:
    """(case, arch) of each case."""
    ampere = [case for case in cases if case.name in AMPERE or not served_by_hopper(case, op)]
    pairs = [(case, "sm80") for case in ampere]
    if "sm90" in ARCHS:
        pairs += [(case, "sm90") for case in cases if served_by_hopper(case, op)]
    return [pytest.param(case, arch, id=f"{case.name}-{arch}") for case, arch in pairs]


@functools.cache
def other_stream() -> torch.cuda.Stream:
    """A neighbour's."""
    return torch.cuda.Stream()


@functools.cache
def scratch() -> tuple[Tensor, Tensor, Tensor]:
    """Memory of several times the L2, and matrices to multiply."""
    return (
        torch.empty(2**28, dtype=torch.uint8, device="cuda"),
        *(torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2)),
    )


def empty_cache(n: int) -> None:
    """Before repeat n, evict the call's inputs from L2."""
    scratch()[0].fill_(n % 256)


def warm_cache(n: int) -> None:
    """Nothing: the last repeat's operands are in L2."""


def busy_neighbour(n: int) -> None:
    """Copies and products of another stream run at the same time as the call."""
    memory, a, b = scratch()
    half = memory.numel() // 2
    with torch.cuda.stream(other_stream()):
        memory[:half].copy_(memory[half:])
        torch.mm(a, b)


TRAFFIC = (empty_cache, warm_cache, busy_neighbour)


def hunt(call: Callable[[], dict[str, Tensor]]) -> None:
    """Repeat ``call`` under each kind of traffic; all results must equal the first bit for bit."""
    first = {name: x.clone() for name, x in call().items()}
    for traffic in TRAFFIC:
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for n in range(REPEATS):
            traffic(n)
            again = call()
            differ += torch.stack([unequal(again[name], first[name]) for name in first]).any()
            if n % 20 == 19:
                torch.cuda.synchronize()  # or a neighbour's work piles up
        assert differ.item() == 0, (
            f"{traffic.__name__}: {differ.item()} of {REPEATS} calls differ from the first"
        )


def unequal(a: Tensor, b: Tensor) -> Tensor:
    """True if any bit differs, without waiting for the GPU."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(bits) != b.view(bits)).any()


@pytest.mark.parametrize(("case", "arch"), with_archs(FORWARD, "forward"))
def test_forward(case, arch):
    problem = case.build("cuda")
    hunt(lambda: problem.run(kernel=arch))


@pytest.mark.skipif("sm90" not in ARCHS, reason="tiles of Hopper's kernels")
@pytest.mark.parametrize(
    ("case", "tile"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in TILES]
)
@pytest.mark.parametrize("arch", ["sm90"])
def test_forward_with_a_tile(case, arch, tile):
    problem = case.build("cuda")
    hunt(lambda: problem.run(kernel=arch, tile=tile))


@pytest.mark.parametrize(("case", "arch"), with_archs(BACKWARD, "backward"))
@pytest.mark.parametrize("op", ["backward"])
def test_deterministic_backward(case, arch, op):
    problem = case.build("cuda")
    start = problem.start()
    hunt(lambda: problem.gradients(start, kernel=arch, deterministic=True))


@pytest.mark.parametrize("case", BACKWARD[2:5:2], ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ARCHS[-1:])
@pytest.mark.parametrize("op", ["backward"])
def test_gradients_of_keys_and_values(case, arch, op):
    """Without ``deterministic``, only dQ depends on the order of additions."""
    problem = case.build("cuda")
    start = problem.start()
    hunt(lambda: {x: g for x, g in problem.gradients(start, kernel=arch).items() if x in ("dk", "dv")})


CACHES = {
    "decode": {"batch": 64, "capacity": 2048, "queries": 1},
    "decode-d64": {"batch": 64, "capacity": 2048, "queries": 1, "dim": 64},
    "few-long": {"batch": 2, "capacity": 16384, "queries": 1},
    "few-long-splits": {"batch": 2, "capacity": 16384, "queries": 1, "num_splits": 8},
    "four-queries": {"batch": 32, "capacity": 2048, "queries": 4, "causal": True},
    "chunk": {"batch": 8, "capacity": 2048, "queries": 300, "causal": True},
    "pages-of-16": {"batch": 64, "capacity": 2048, "queries": 1, "page": 16},
    "pages-of-64-chunk": {"batch": 8, "capacity": 2048, "queries": 300, "page": 64, "causal": True},
    "pages-of-16-few-long": {"batch": 2, "capacity": 16384, "queries": 1, "page": 16},
    "append-rotary": {"batch": 64, "capacity": 2048, "queries": 1, "new": 1},
}


@pytest.mark.parametrize("name", CACHES)
def test_attention_with_a_cache(name):
    hunt(cache_call(**CACHES[name]))


def cache_call(
    batch: int, capacity: int, queries: int, dim: int = 128, page: int = 0, new: int = 0, **options: Any
) -> Callable[[], dict[str, Tensor]]:
    """A call with 32 heads on 8; ``new``: rows that it appends, which every repeat appends again."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = randn(batch, queries, 32, dim)
    pages = batch * capacity // page if page else 0
    shape = (pages, page, 8, dim) if page else (batch, capacity, 8, dim)
    k, v = randn(*shape), randn(*shape)
    lengths = torch.randint(capacity // 2, capacity - new, (batch,), generator=generator, device="cuda")
    given: dict[str, Any] = {"cache_seqlens": lengths.int(), **options}
    if page:
        order = torch.randperm(pages, generator=generator, device="cuda")
        given["page_table"] = order.int().view(batch, capacity // page)
    if new:
        angles = torch.randn(capacity, dim // 2, generator=generator, device="cuda")
        given |= {"k": randn(batch, new, 8, dim), "v": randn(batch, new, 8, dim)}
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}

    def call() -> dict[str, Tensor]:
        out, lse = attention_with_kvcache(q, k, v, return_lse=True, **given)
        return {"out": out, "lse": lse}

    return call
