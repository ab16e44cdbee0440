"""The backward kernels on the GPU: every named case by the tolerance rule, and properties between calls."""

import functools
from dataclasses import replace

import pytest
import torch

from cute_attn import attention, attention_backward, attention_varlen, attention_varlen_backward, reference
from cute_attn.api.attention import draw_rng_state
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host import backward, record
from tests.cases import BACKWARD_CASES, BY_NAME, FOR_EVERY_TILE
from tests.checks import GRADIENT, assert_same, check, check_backward
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, captured, int32, with_gradients
from tests.gpu.tile_cases import tile_cases
from tests.problem import Case, Problem, Start

OP = "backward"  # tests/gpu/conftest.py builds this op beforehand
ARCHS = runnable_archs(OP)
ALLOCATE = record.allocate
_BARE = "dq_bulk=false,mask_warps=0"
_PLAIN = "p_in_regs=false,v_in_regs=false,queries_at_once=0"
D256, D96_D256 = ("causal-d256",), ("causal-d96", "causal-d256")


def all_but(*names: str) -> tuple[str, ...]:
    """The cases that every tile is tested with, without some."""
    return tuple(case.name for case in FOR_EVERY_TILE if case.name not in names)


UNTIL_D96 = all_but("causal-d128", "causal-d256")
WHOLE_64S = (*D96_D256, "dropout-causal", "everything-causal-dropout", "everything-window-mem_efficient")
WITHOUT_FLASH_DROPOUT = all_but("dropout-causal", "everything-causal-dropout")
TILES: dict[str, dict[str, tuple[str, ...]]] = {
    "sm80": {
        f"{_PLAIN},tile_m=64,tile_n=64,num_warps=4,sdp_warps_m=2,dkv_warps_m=2,dq_warps_m=2,stages_q=1,"
        "stages_do=1": D256,
        f"{_PLAIN},tile_m=64,tile_n=128,num_warps=8,sdp_warps_m=4,dkv_warps_m=4,dq_warps_m=2,stages_q=2,"
        "stages_do=1": D96_D256,
        f"{_PLAIN},tile_m=32,tile_n=64,num_warps=4,sdp_warps_m=1,dkv_warps_m=2,dq_warps_m=1,stages_q=2,"
        "stages_do=2": D96_D256,
        "p_in_regs=true,v_in_regs=false,queries_at_once=0,tile_m=64,tile_n=64,num_warps=4,sdp_warps_m=1,"
        "dkv_warps_m=4,dq_warps_m=2,stages_q=1,stages_do=1": D256,
        "stages_q=1,stages_do=1": (),
        "p_in_regs=false,v_in_regs=true,queries_at_once=0,tile_m=64,tile_n=64,num_warps=8,sdp_warps_m=4,"
        "dkv_warps_m=2,dq_warps_m=2,stages_q=1,stages_do=1,sdp_unroll=2,dkv_unroll=2,dq_unroll=1,dq_vector=1": D96_D256,
        "p_in_regs=true,v_in_regs=true,queries_at_once=16,tile_m=32,tile_n=64,num_warps=4,sdp_warps_m=1,"
        "dkv_warps_m=4,dq_warps_m=2,stages_q=1,stages_do=1": D96_D256,
        "dq_vector=2": (),
    },
    "sm90": {
        "num_stages_q=1,num_stages_do=1": (),
        f"{_BARE},p_in_smem=true,tile_m=64,tile_n=64": (),
        f"{_BARE},p_in_smem=true,tile_m=64,tile_n=64,num_stages_ds=1": (),
        f"{_BARE},p_in_smem=true,tile_m=128,tile_n=64,num_stages_q=1,num_stages_do=1,num_stages_ds=1": D256,
        f"{_BARE},p_in_smem=true,dkv_transposed=true,tile_m=64,tile_n=96,num_stages_do=1": WHOLE_64S,
        f"{_BARE},p_in_smem=true,dkv_transposed=true,tile_m=64,tile_n=112,num_stages_ds=1,num_stages_do=1": WHOLE_64S,
        "mask_warps=0,p_in_smem=true,dkv_transposed=true,dq_bulk=true,tile_m=64,tile_n=96,num_stages_ds=1": WHOLE_64S,
        "mask_warps=0,p_in_smem=true,dq_bulk=true,tile_m=64,tile_n=64": D256,
        "dq_bulk=true,mask_warps=0": D256,
        "dq_bulk=true,mask_warps=0,tile_m=64,num_stages_do=1": D256,
        f"{_BARE},tile_m=64": (),
        f"{_BARE},dq_transposed=true,tile_m=64": UNTIL_D96,
        "dq_bulk=true,staggered=true,mask_warps=0": D256,
        "mask_warps=1": WITHOUT_FLASH_DROPOUT,
        "dq_bulk=true,mask_warps=1": WITHOUT_FLASH_DROPOUT,
        "mask_warps=2": WITHOUT_FLASH_DROPOUT,
    },
}
"""Tiles, and the cases that each declines."""


@functools.lru_cache(maxsize=2)
def prepared(case: Case, lse: bool = False, out: bool = True) -> tuple[Problem, Start, dict, dict]:
    """A case's problem, the gradients of its outputs, and expected gradients in float64 and in its dtype."""
    problem = case.build("cuda")
    start = problem.start(out=out, lse=lse)
    part, own = problem.compared(), start.of(case.compare) if case.compare else start
    dtypes = (torch.float64, problem.tensors[0].dtype)
    exact, plain = (part.expected_gradients(own, dtype) for dtype in dtypes)
    return problem, start, exact, plain


def check_case(case: Case, lse: bool = False, out: bool = True, **options) -> None:
    problem, start, exact, plain = prepared(case, lse, out)
    actual = problem.gradients(start, **options)
    if case.compare:
        actual = {name: value[list(case.compare)] for name, value in actual.items()}
    check_backward(actual, exact, plain)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda case: case.name)
def test_case(case, arch):
    check_case(case, kernel=arch)


@pytest.mark.parametrize(("arch", "tile", "case"), tile_cases(OP, {a: TILES.get(a, {}) for a in ARCHS}))
def test_any_tile_equals_any_tile(case, arch, tile):
    check_case(case, kernel=arch, backward_tile=tile)


DIVIDED = [
    Case("groups-of-6", seqlen_q=203, seqlen_k=300, nheads=12, nheads_kv=2, head_dim=128, causal=True),
    Case("group-of-7", seqlen_q=300, seqlen_k=203, nheads=7, nheads_kv=1, causal=True),
    replace(BY_NAME["varlen-causal"], name="packed-groups-of-6", nheads=12, nheads_kv=2, dropout_p=0.2),
    replace(BY_NAME["bias-over-b"], name="bias-for-groups-of-6", nheads=12, nheads_kv=2),
]


def divide_heads(monkeypatch, splits: int) -> list:
    """Divide a kv head's query heads among ``splits`` work tiles; the returned list collects the call of each plan."""
    planned = []
    monkeypatch.setattr(backward, "head_splits", lambda call, *_: planned.append(call) or splits)
    return planned


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("case", DIVIDED, ids=lambda case: case.name)
def test_query_heads_may_be_divided(case, splits, arch, monkeypatch):
    """The number of work tiles that divide a kv head's query heads may vary; its default depends on the GPU."""
    planned = divide_heads(monkeypatch, splits)
    check_case(case, kernel=arch)
    assert planned


FEW_KEYS = [
    Case("text", seqlen_q=1030, seqlen_k=77, nheads=3, nheads_kv=3),
    Case("text-of-154", batch=1, seqlen_q=1030, seqlen_k=154, nheads=2),
    Case("causal", seqlen_q=120, seqlen_k=77, causal=True),
    Case("as-many-keys", batch=5, nheads_kv=4, causal=True, dtype="fp16"),
    Case("d80", seqlen_q=203, seqlen_k=100, head_dim=80, layout="odd_strides"),
    Case("d40", seqlen_q=203, seqlen_k=1, nheads=2, nheads_kv=1, head_dim=40),
    Case("d128-dropout", seqlen_q=203, seqlen_k=100, nheads_kv=1, head_dim=128, dropout_p=0.2),
    Case("d192x128", seqlen_q=203, seqlen_k=100, nheads=2, head_dim=192, head_dim_v=128),
    Case("d256", seqlen_q=203, seqlen_k=60, nheads=2, nheads_kv=1, head_dim=256, softcap=12.0),
    Case("bias", seqlen_q=200, bias="bf16"),
    Case("odd-head-dim", seqlen_q=203, seqlen_k=100, nheads=2, head_dim=59),
]
ON_HOPPER = pytest.mark.skipif("sm90" not in ARCHS, reason="needs Hopper")


def check_tile_with(field: str, case: Case, monkeypatch) -> None:
    """Check a case by the Hopper kernel, whose tile has ``field``; three more calls give the same bits."""
    tiles, build = [], backward.compiler.build
    monkeypatch.setattr(
        backward.compiler, "build", lambda kernel, *_: tiles.append(kernel.tile) or build(kernel, *_)
    )
    check_case(case, kernel="sm90")
    assert getattr(tiles[-1], field)
    problem = case.build("cuda")
    first, *others = (problem.gradients(problem.start()) for _ in range(3))
    for other in others:
        assert_same(other, first)


@ON_HOPPER
@pytest.mark.parametrize("splits", [1, 2, 6])
@pytest.mark.parametrize("case", FEW_KEYS, ids=lambda case: case.name)
def test_few_keys(case, splits, monkeypatch):
    """dQ is stored directly, and the queries of a head may be divided."""
    planned = divide_heads(monkeypatch, case.group * splits if splits > 1 else 1)
    check_tile_with("dq_direct", case, monkeypatch)
    assert planned


SHORT = [
    Case("full", batch=3, seqlen_q=197, seqlen_k=197, nheads=2),
    Case("causal", seqlen_q=300, seqlen_k=500, nheads=2, causal=True),
    Case("fewer-keys", seqlen_q=512, seqlen_k=150, nheads=2, causal=True, dtype="fp16"),
    Case("window", seqlen_q=200, seqlen_k=500, nheads=2, window=(70, 20)),
    Case("dropout", seqlen_q=250, seqlen_k=300, nheads=2, dropout_p=0.2),
    Case("d72", seqlen_q=256, seqlen_k=256, nheads=2, head_dim=72, softcap=12.0),
    Case("d40", seqlen_q=130, seqlen_k=700, nheads=2, head_dim=40, layout="odd_strides"),
    Case("bias", seqlen_q=200, seqlen_k=200, nheads=2, bias="bf16", head_dim=32),
    Case("alibi", seqlen_q=450, seqlen_k=450, nheads=2, alibi="heads", causal=True),
]


@ON_HOPPER
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_short_sequences(case, monkeypatch):
    """dQ of a sequence is summed in shared memory, on a GPU with as many multiprocessors as there are heads."""
    monkeypatch.setattr(backward, "multiprocessors", lambda device: case.batch * case.nheads)
    check_tile_with("dq_rows", case, monkeypatch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", DIVIDED[:3], ids=lambda case: case.name)
def test_deterministic_gradients_of_unevenly_divided_heads_repeat_bitwise(case, arch, monkeypatch):
    planned = divide_heads(monkeypatch, 4)
    check_case(case, kernel=arch, deterministic=True)
    assert planned
    monkeypatch.setattr(record, "allocate", ALLOCATE)  # guarded memory is kept until the test ends
    problem, start, _, _ = prepared(case)
    first = problem.gradients(start, kernel=arch, deterministic=True)
    for _ in range(200):
        assert_same(problem.gradients(start, kernel=arch, deterministic=True), first)


PRIME = Case("71-heads-on-1", batch=3, seqlen_q=300, seqlen_k=300, nheads=71, nheads_kv=1, causal=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", [PRIME], ids=lambda case: case.name)
def test_a_prime_number_of_query_heads(case, arch):
    """The host chooses the number of splits."""
    check_case(case, kernel=arch)
    check_case(case, kernel=arch, deterministic=True)


def tma_bias_cases() -> list:
    """(arch, tile, case) of biases that TMA can read, with the tiles that load them by TMA."""
    params = []
    for case in BACKWARD_CASES:
        if case.name.startswith("bias-by-tma") and not (case.bias_broadcast or case.varlen):
            traits = replace(case.traits("sm90", OP), bias_grad=True)
            tile = registry.lookup(traits, None, "sm90").tile
            assert tile.bias_stages, f"{case.name} is given {tile}"
            params.append(pytest.param("sm90", tile.text, case, id=case.name))
    return params if "sm90" in ARCHS else []


@pytest.mark.parametrize(("arch", "tile", "case"), tma_bias_cases())
def test_a_bias_loaded_by_tma(case, arch, tile):
    check_case(case, kernel=arch, backward_tile=tile)


# ---- determinism ----

EVERYTHING = BY_NAME["everything-causal-dropout"]
REPEATED = [
    BY_NAME[name]
    for name in ("causal-203x113", "varlen-causal", "window-1000x256", "window-5-300", "bias-over-bhq")
]
FILLS = {"name": "gqa-that-fills-the-card", "batch": 8, "nheads": 8, "seqlen_q": 600, "seqlen_k": 600}
LONG = {"name": "varlen-d256", "lengths_q": (700, 3, 40) * 6, "lengths_k": (700, 90, 0) * 6}
REPEATED += [
    replace(BY_NAME["causal-d128"], **FILLS),
    replace(BY_NAME["window-5-300"], name="window-that-fills-the-card", batch=8, seqlen_q=900, seqlen_k=900),
    replace(BY_NAME["varlen-causal-d256"], **LONG),
    EVERYTHING,
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name)
def test_deterministic_gradients(case, arch):
    """``test_races.py`` checks that they repeat bit for bit."""
    check_case(case, kernel=arch, deterministic=True)


# ---- agreement ----


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case", [BY_NAME["causal-203x113"], BY_NAME["varlen-causal"]], ids=lambda case: case.name
)
def test_rows_without_scores_have_zero_gradients(case, arch):
    """Rows that see no key, and rows out of bounds, have gradients of exactly zero."""
    problem, start, exact, _ = prepared(case)
    actual = problem.gradients(start, kernel=arch)
    lse = problem.expected(torch.float64)["lse"]
    # A query of a single key has no gradient either, but by cancellation.
    seen = torch.zeros(actual["dq"].shape[:-1], dtype=torch.bool, device="cuda")
    seen[problem.owned] = (lse.T if case.varlen else lse.transpose(1, 2)).isfinite()
    assert not seen.all()
    assert not actual["dq"][~seen].any()
    for name in ("dk", "dv"):
        unseen = (exact["dk"] == 0).all(-1) & (exact["dv"] == 0).all(-1)
        assert not actual[name][unseen].any(), name


# ---- subsets of gradients ----

LSE_CASES = [
    BY_NAME[name]
    for name in (
        *("causal-203x113", "full-129x129", "window-left-is-all", "everything-causal-dropout"),
        *("varlen-causal", "varlen-seqused", "large-logits-causal", "causal-d256"),
    )
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("out", [False, True], ids=["lse alone", "out and lse"])
@pytest.mark.parametrize("case", LSE_CASES, ids=lambda case: case.name)
def test_gradient_of_the_lse(case, out, arch):
    check_case(case, lse=True, out=out, kernel=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("broadcast", ["", "b", "h", "q", "bh", "bq", "hq", "bhq"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradient_of_a_bias(dtype, broadcast, deterministic, arch):
    odd = {"seqlen_q": 113, "seqlen_k": 203} if dtype == "bf16" else {"seqlen_q": 70, "seqlen_k": 144}
    case = Case(f"bias-{dtype}-over-{broadcast}", bias=dtype, bias_broadcast=broadcast, causal=True, **odd)
    problem, start, exact, plain = prepared(case)
    actual = problem.gradients(start, wanted="dbias", kernel=arch, deterministic=deterministic)
    check("dbias", actual["dbias"], exact["dbias"], plain["dbias"], factor=GRADIENT)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dbias", "dq dbias", "dk dv"])
@pytest.mark.parametrize("case", [EVERYTHING], ids=lambda case: case.name)
def test_any_of_the_gradients_alone(case, wanted, arch):
    problem, start, exact, plain = prepared(case)
    actual = problem.gradients(start, wanted, kernel=arch)
    assert list(actual) == wanted.split()
    check_backward(actual, *({name: x[name] for name in actual} for x in (exact, plain)))


# ---- continuing PyTorch's forward ----


def torch_inputs(batch, nheads, seqlen_q, seqlen_k, nheads_kv=None, head_dim=64):
    torch.manual_seed(1)
    sizes = ((seqlen_q, nheads), (seqlen_k, nheads_kv or nheads), (seqlen_k, nheads_kv or nheads))
    q, k, v = (torch.randn(batch, n, h, head_dim, dtype=torch.bfloat16, device="cuda") for n, h in sizes)
    return q, k, v, torch.randn_like(q)


def check_continued(names, ours, theirs, tensors, grad_out, mask, dropout="", dropout_p=0.0, rng_state=None):
    """Gradients of q, k, v and perhaps a bias, with PyTorch's as plain torch's."""
    leaves = [x.double().requires_grad_() for x in tensors]
    inputs = ScoreInputs(dropout_p=dropout_p, rng_state=rng_state, bias=dict(enumerate(leaves)).get(3))
    features = reference.Features(mask, dropout if dropout_p else "")
    out = reference.attention(*leaves[:3], tensors[0].shape[-1] ** -0.5, features, inputs)[0]
    exact = torch.autograd.grad(out, leaves, grad_out.double())
    for name, own, right, other in zip(names, ours, exact, theirs, strict=True):
        # Torch's is NaN in rows that see no key, and it does not write the bias gradient in blocks that the mask hides.
        other = torch.where(other.isfinite(), other, right.to(other.dtype))
        check(f"d{name}", own, right, other, factor=GRADIENT)


CONTINUED = [(2, 3, 113, 203), (2, 3, 203, 113), (1, 2, 256, 512)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", CONTINUED, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_continues_torchs_flash_attention(shape, head_dim, causal, dropout_p, arch):
    *tensors, grad_out = torch_inputs(*shape, nheads_kv=1, head_dim=head_dim)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse, state, *_ = torch.ops.aten._flash_attention_forward(
        *leaves, None, None, shape[2], shape[3], dropout_p, causal, False
    )
    theirs = torch.autograd.grad(out, leaves, grad_out)
    options = {"causal": causal, "dropout_p": dropout_p, "kernel": arch}
    ours = attention_backward(grad_out, *tensors, out.detach(), lse, rng_state=state, **options)
    seed = state.view(torch.int64).cuda() if dropout_p else None
    check_continued("qkv", ours, theirs, tensors, grad_out, "causal" * causal, "flash", dropout_p, seed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.35])
@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("shape", CONTINUED, ids=str)
def test_continues_torchs_memory_efficient_attention(shape, mask, dropout_p, arch):
    *tensors, grad_out = torch_inputs(*shape)
    # Torch's operator requires aligned rows of a bias.
    tensors += [torch.randn(shape, dtype=torch.bfloat16, device="cuda")] if shape[3] % 8 == 0 else []
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, bias = (*leaves, None)[:4]
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q, k, v, bias, None, None, None, None, dropout_p, mask, True
    )
    theirs = torch.autograd.grad(out, leaves, grad_out)
    names = ("q", "k", "v", "bias")[: len(leaves)]
    options = {"causal": (False, "top_left", "bottom_right")[mask], "dropout_mask": "mem_efficient"}
    options |= {"dropout_p": dropout_p, "rng_state": (seed, offset), "kernel": arch, "wanted": names}
    options |= {"bias": None if bias is None else tensors[3]}
    ours = attention_backward(grad_out, *tensors[:3], out.detach(), lse, **options)
    state = torch.stack([seed, offset]).view(torch.int64).flatten().cuda() if dropout_p else None
    own_mask = ("", "causal_top_left", "causal")[mask]
    check_continued(names, ours, theirs, tensors, grad_out, own_mask, "mem_efficient", dropout_p, state)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "mem_efficient"])
def test_continues_torchs_packed_forward(flash, arch):
    q, k, v, grad_out = (x[0] for x in torch_inputs(1, 2, 300, 300))
    cu = int32(0, 100, 101, 300)
    if flash:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 199, 199, 0.0, True, False)
    else:
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, cu, cu, 199, 199, 0.0, 2, True
        )
        out = out[0]
    options = {"causal": True, "kernel": arch, "deterministic": True}
    ours = attention_varlen_backward(grad_out, q, k, v, out, lse, cu, cu, 199, 199, **options)
    own = with_gradients(lambda *x: attention_varlen(*x, cu, cu, 199, 199, **options), (q, k, v), grad_out)
    torch.testing.assert_close(ours, tuple(own[1:]), atol=0.02, rtol=0.02)


# ---- operator, streams, graphs, compilers ----


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return [
        torch.randn(2, n, h, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n, h in ((113, 4), (203, 2), (203, 2))
    ]


def test_the_operator_passes_opcheck(tensors, monkeypatch):
    # opcheck compares storage offsets, and a guarded output has another one.
    monkeypatch.setattr(record, "allocate", ALLOCATE)
    bias = torch.randn(1, 4, 1, 203, dtype=torch.bfloat16, device="cuda")
    state = torch.tensor([1, 2], device="cuda")
    sinks = torch.randn(4, device="cuda")
    for extra in ((None, None, None, "", 0.0), (bias, sinks, state, "flash", 0.25)):
        arguments = (*tensors, *(None,) * 5, *extra[:3], [], 113, 203, 0.125, "causal", 0, 0, 0.0, *extra[3:])
        arguments = (*arguments, [], [], False, "", "", True, "", "", False)
        torch.library.opcheck(torch.ops.cute_attn.forward.default, arguments)
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        out, lse, _ = torch.ops.cute_attn.forward.default(*detached)
        needed = [True, True, True, extra[0] is not None, extra[1] is not None]
        torch.library.opcheck(torch.ops.cute_attn.backward.default, (out, lse, out, lse, needed, *detached))


def test_a_replayed_graph_uses_one_new_mask_in_forward_and_backward(tensors):
    grad = torch.randn_like(tensors[0])
    options = {"dropout_p": 0.5, "causal": True, "deterministic": True}

    def step():
        state = draw_rng_state("cuda")
        out = attention(*tensors, rng_state=state, **options)
        return state, torch.autograd.grad(out, tensors, grad)

    graph, (state, grads) = captured(step)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(state.tolist())
        out = attention(*tensors, rng_state=state.clone(), **options)
        assert_equal(grads, torch.autograd.grad(out, tensors, grad))
    assert seen[0] != seen[1] != seen[2], "two replays, one mask"


def test_saved_tensors_may_move_to_the_cpu_and_back(tensors):
    odd = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    grad = torch.randn_like(tensors[0])
    expected = torch.autograd.grad(attention(*odd, causal=True, deterministic=True), odd, grad)
    with torch.autograd.graph.save_on_cpu():
        out = attention(*odd, causal=True, deterministic=True)
    assert_equal(torch.autograd.grad(out, odd, grad), expected)
