"""Forward-mode derivatives of attention on the CPU, against torch's derivatives of a dense definition in float64."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from cute_attn import append_kv, attention, attention_varlen, attention_with_kvcache, flex, merge_attention
from cute_attn.compiler.arguments import fakes
from cute_attn.compiler.registry import lookup
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.names import register_epilogue, user_epilogue
from cute_attn.host.call import ATTENTION, Call
from cute_attn.host.jvp import with_tangents
from cute_attn.kernels.jvp_sm80.kernel import JvpSm80
from cute_attn.kernels.jvp_sm90.kernel import JvpSm90
from cute_attn.reference import Features, Lengths, ScoreInputs
from cute_attn.reference import attention as definition
from cute_attn.reference.emulate import features_of
from cute_attn.reference.tilings import TINY, Scores
from tests import emulated_kvcache, machine, refusals
from tests import tensors as drawn
from tests.cpu.test_function_gradients import FUNCTIONS
from tests.fuzz import oracle
from tests.tensors import int32

randn = functools.partial(drawn.randn, dtype=torch.float64)
SHAPES = {"q": (2, 5, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 4)}


def tensors(seed=0, **shapes):
    return {name: randn(*shape, seed=seed + i) for i, (name, shape) in enumerate((SHAPES | shapes).items())}


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


CAUSAL = (None, 0)
# options of a call, the oracle's, and shapes of more tensors
CALLS = {
    "plain": ({}, {}, {}),
    "causal": ({"causal": True}, {"window": CAUSAL}, {}),
    "window": ({"window": (2, 1)}, {"window": (2, 1)}, {}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}, {}),
    "scale": ({"softmax_scale": -0.3, "causal": True}, {"scale": -0.3, "window": CAUSAL}, {}),
    "bias": ({"softcap": 2.0}, {"softcap": 2.0}, {"bias": (2, 4, 5, 6)}),
    "broadcast bias": ({}, {}, {"bias": (1, 4, 1, 6)}),
    "sinks": ({"causal": True}, {"window": CAUSAL}, {"sinks": (4,)}),
}


@pytest.mark.parametrize("transform", ["jvp", "dual", "vmap"])
@pytest.mark.parametrize("name", CALLS)
def test_tangents_of_every_argument(name, transform):
    options, plain, more = CALLS[name]
    given, dots = tensors(**more), tensors(seed=10, **more)

    def call(given):
        return attention(**given, **options, return_lse=True)

    expected = jvp(lambda x: oracle.batched(**x, **plain), (given,), (dots,))
    if transform == "jvp":
        same(jvp(call, (given,), (dots,)), expected)
    elif transform == "vmap":
        pair = {x: torch.stack((y, -y)) for x, y in dots.items()}
        found = vmap(lambda dots: jvp(call, (given,), (dots,))[1])(pair)
        same(found, tuple(torch.stack((x, -x)) for x in expected[1]))
    else:
        with forward_ad.dual_level():
            duals = {x: forward_ad.make_dual(given[x], dots[x]) for x in given}
            found = [forward_ad.unpack_dual(x) for x in call(duals)]
        same(tuple(x.primal for x in found), expected[0])
        same(tuple(x.tangent for x in found), expected[1])


@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_a_tangent_of_one_tensor(of):
    given, dot = tensors(), tensors(seed=10)[of]
    slopes = torch.tensor([0.5, 0.25, 0.0, 1.0], dtype=torch.float64)

    def call(x):
        return attention(**given | {of: x}, alibi_slopes=slopes)

    expected = jvp(lambda x: oracle.batched(**given | {of: x}, alibi=slopes)[0], (given[of],), (dot,))
    same(jvp(call, (given[of],), (dot,)), expected)


def test_jacfwd_is_jacrev():
    given = tensors()
    for of in SHAPES:
        call = lambda x, of=of: attention(**given | {of: x}, causal=True, return_lse=True)  # noqa: E731
        same(jacfwd(call)(given[of]), jacrev(call)(given[of]))


@pytest.mark.parametrize("mask", ["flash", "mem_efficient"])
def test_dropout(mask):
    given, dots, state = tensors(), tensors(seed=10), torch.tensor([3, 4])

    def call(given):
        return attention(**given, dropout_p=0.4, dropout_mask=mask, rng_state=state)

    _, p = attention(**given, dropout_p=0.4, dropout_mask=mask, rng_state=state, return_softmax=True)
    keep = (~p.signbit()).double() / 0.6
    assert 0 < keep.count_nonzero() < keep.numel()

    def expected(given):
        q, k, v = (x.repeat_interleave(4 // x.shape[2], 2) for x in given.values())
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", keep * p, v)

    same(jvp(call, (given,), (dots,)), jvp(expected, (given,), (dots,)))


def test_packed_sequences():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    given = {x: randn(5, *shape[2:], seed=i) for i, (x, shape) in enumerate(SHAPES.items())}
    dots = {x: randn(*y.shape, seed=10 + i) for i, (x, y) in enumerate(given.items())}

    def call(given):
        return attention_varlen(*given.values(), ends, ends, 3, 3, causal=True)

    def expected(given):
        rows = [slice(0, 2), slice(2, 5)]
        parts = [
            oracle.batched(**{x: y[None, own] for x, y in given.items()}, window=CAUSAL)[0][0] for own in rows
        ]
        return torch.cat(parts)

    same(jvp(call, (given,), (dots,)), jvp(expected, (given,), (dots,)))


def test_functions_and_what_they_capture():
    given, dots = tensors(), tensors(seed=10)
    table, dot = randn(4, seed=20), randn(4, seed=21)
    heads_first = {x: y.transpose(1, 2) for x, y in given.items()}
    dots_first = {x: y.transpose(1, 2) for x, y in dots.items()}

    def call(given, table):
        return flex.flex_attention(
            *given.values(), score_mod=lambda s, b, h, i, j: s * s * table[h], enable_gqa=True
        )

    def expected(given, table):
        q, k, v = given.values()
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        s = (q @ k.transpose(-1, -2)) * 8**-0.5
        return (s * s * table[:, None, None]).softmax(-1) @ v

    primals, wanted = jvp(expected, (heads_first, table), (dots_first, dot))
    with forward_ad.dual_level():
        duals = {x: forward_ad.make_dual(heads_first[x], dots_first[x]) for x in given}
        found = forward_ad.unpack_dual(call(duals, forward_ad.make_dual(table, dot)))
    same(found, (primals, wanted))
    same(jvp(call, (heads_first, table), (dots_first, dot)), (primals, wanted))


def test_rows_without_keys_have_no_tangent():
    given, dots = tensors(k=(2, 2, 2, 8), v=(2, 2, 2, 4)), tensors(seed=10, k=(2, 2, 2, 8), v=(2, 2, 2, 4))
    (_, lse), (dot, lse_dot) = jvp(lambda x: attention(**x, causal=True, return_lse=True), (given,), (dots,))
    assert (lse[:, :, :3] == -math.inf).all()
    assert not dot[:, :3].any() and not lse_dot[:, :, :3].any()
    assert dot.isfinite().all() and lse_dot.isfinite().all()


def test_of_vmap():
    given, dots = tensors(), tensors(seed=10)

    many, dot = torch.stack((given["q"], dots["q"])), randn(2, *SHAPES["q"], seed=30)
    call = lambda q: attention(q, given["k"], given["v"], causal=True)  # noqa: E731
    found = jvp(vmap(call), (many,), (dot,))
    each = lambda x: torch.stack([oracle.batched(y, given["k"], given["v"], window=CAUSAL)[0] for y in x])  # noqa: E731
    same(found, jvp(each, (many,), (dot,)))


@pytest.mark.parametrize("functional", [True, False])
def test_gradients_of_tensors_with_tangents(functional):
    """The loss depends on out and LSE and on their tangents, as in MeanFlow."""
    given, dots = tensors(), tensors(seed=10)
    weights = [randn(2, 5, 4, 4, seed=40), randn(2, 4, 5, seed=41)]

    def loss(found):
        return sum((x * w).sum() for x, w in zip(found, weights, strict=True))

    def of_ours(given):
        return loss(jvp(lambda x: attention(**x, causal=True, return_lse=True), (given,), (dots,))[0])

    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    expected = torch.autograd.grad(loss(oracle.batched(**leaves, window=CAUSAL)), list(leaves.values()))
    if functional:
        found = grad(of_ours)(given).values()
    else:
        found = torch.autograd.grad(of_ours(leaves), list(leaves.values()))
    same(tuple(found), expected)


def test_a_compiled_function_of_dual_tensors():
    given, dots = (tuple(x.values()) for x in (tensors(), tensors(seed=10)))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(given, dots, strict=True)]
        found = forward_ad.unpack_dual(torch.compile(attention, backend="aot_eager")(*duals))
    same(tuple(found), jvp(attention, given, dots))


def of_q(**options):
    """The tangent of a call for one of q."""
    return jvp(lambda q: attention(q, X["k"], X["v"], **options), (X["q"],), (X["q"],))[1]


def loss(q):
    return attention(q, X["k"], X["v"]).square().sum()


def tangent_of(call, *shape):
    x = torch.ones(shape, dtype=torch.float64)
    return jvp(call, (x,), (x,))


X, CACHE, OUT = tensors(), torch.ones(1, 8, 2, 16).double(), torch.empty(2, 5, 4, 4, dtype=torch.float64)
WRONG = """
of_q(return_softmax=True) -> NotImplementedError: return_softmax is True in a forward-mode derivative
of_q(out=OUT) -> NotImplementedError: out is given in a forward-mode derivative
tangent_of(lambda x: attention(**X, alibi_slopes=x), 4) -> NotImplementedError: alibi_slopes has a tangent
tangent_of(lambda q: jvp(loss, (q,), (q,))[1], *X["q"].shape) -> NotImplementedError: a tangent of its tangent
tangent_of(lambda x: attention_with_kvcache(x, CACHE, CACHE), 1, 2, 2, 16)
    -> NotImplementedError: a tensor has a tangent, which attention_with_kvcache does not follow
tangent_of(lambda x: append_kv(CACHE, CACHE.clone(), x, x, cache_seqlens=int32(0)), 1, 2, 2, 16)
    -> NotImplementedError: a tensor has a tangent, which append_kv does not follow
tangent_of(lambda x: merge_attention(x, torch.ones(2, 1, 2, 3)), 2, 1, 3, 2, 16)
    -> NotImplementedError: a tensor has a tangent, which merge_attention does not follow
"""


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    functions = (append_kv, attention_with_kvcache, merge_attention)
    refusals.check(call, sentence, globals() | {function.__name__: function for function in functions})


def test_the_operator_under_fake_tensors():
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 8)
        call = Call(q, q, q, max_seqlen_q=5, max_seqlen_k=5)
        found = torch.ops.cute_attn.jvp([q, None, None, None, None], *call.values(ATTENTION))
    assert [tuple(x.shape) for x in found] == [(2, 5, 4, 8), (2, 4, 5)] * 2


# ---- the kernel ----

DROPOUT = {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])}
SINKS, SLOPES = torch.tensor([0.5, -3.0]), torch.tensor([[0.5, 0.1], [0.0, 1.0]])
FEATURES = {
    "": {},
    "causal": {},
    "window_top_left": {"window_left": 5, "window_right": 3},
    "causal-softcap-alibi": {"softcap": 1.5, "alibi_slopes": SLOPES},
    "dropout": DROPOUT,
    "causal-bias_bf16-dropout_mem_efficient": DROPOUT | {"bias": randn(2, 2, 40, 50).bfloat16()},
    "causal-sinks_bf16": {"sinks": SINKS.bfloat16()},
    "causal-bias_fp32-bias_tangent-sinks_bf16": {
        "bias": randn(2, 2, 40, 50).float(),
        "sinks": SINKS.bfloat16(),
    },
    # The last queries see only their sinks.
    "window_top_left-softcap-alibi-bias_bf16-sinks_fp32-bias_tangent-sinks_tangent": {
        "window_left": -12,
        "window_right": 30,
        "softcap": 1.5,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
        "bias": randn(2, 2, 40, 50).bfloat16(),
    },
    "seqused_q-seqused_k": {},
}


@pytest.mark.parametrize(
    ("features", "tiling"),
    [*((name, "warps2x1-32x16") for name in FEATURES), ("causal-softcap-alibi", "wgmma1-64x16")],
)
def test_threads_compute_the_definition(features, tiling):
    """Scores, P, tangents and rows' statistics by the kernel's code for each thread; sizes are no whole tiles."""
    problem, dots = (Scores.random(2, 2, 40, 50, seed=i, **FEATURES[features]) for i in range(2))
    tiling = TINY[tiling].of(features, op="jvp")
    if "seqused" in features:
        used = (torch.tensor(x, dtype=torch.int32) for x in ([40, 17], [33, 50]))
        problem = replace(problem, lengths=Lengths(None, None, *used, 40, 50))

    more = [x for x in ("bias", "sinks") if f"{x}_tangent" in features]
    moved = {x: getattr(dots.inputs, x).flip(-1) for x in more}
    dots = replace(dots, inputs=replace(dots.inputs, **moved))

    def by_definition(q, k, v, *tensors):
        inputs = replace(problem.inputs, **dict(zip(more, tensors, strict=True)))
        given = (problem.scale, features_of(tiling.traits), inputs, problem.lengths)
        out, lse, _ = definition(q, k, v, *given)
        return out.transpose(1, 2), lse

    def tensors(of):
        return tuple(x.double() for x in (of.q, of.k, of.v, *(getattr(of.inputs, name) for name in more)))

    (out, lse), (out_dot, lse_dot) = jvp(by_definition, tensors(problem), tensors(dots))
    found = problem.tangents(tiling, dots)
    exists = lse.isfinite()  # threads also compute rows of a block beyond the sequence's end
    assert exists.any() and found.lse[exists].isfinite().all()
    rows = exists.unsqueeze(-1).expand_as(out)
    right = {"out": out, "lse": lse, "out_dot": out_dot, "lse_dot": lse_dot}
    for name, limit in {"out": 5e-3, "lse": 2e-6, "out_dot": 5e-3, "lse_dot": 5e-6}.items():
        error = (getattr(found, name).double() - right[name])[rows if name.startswith("out") else exists]
        assert error.abs().max() <= limit, f"{name}: {error.abs().max()}"


COLUMNS = randn(4, 7)
UNKNOWN = torch.where(torch.arange(50) < 30, randn(50).float(), torch.nan)
MOVED = FUNCTIONS | {
    "hidden NaN": lambda s, b, h, q, k: torch.where(k < 30, s * UNKNOWN[k] + UNKNOWN[k], -torch.inf),
}


@pytest.mark.parametrize(
    ("function", "features"),
    [*((name, "causal-softcap") for name in MOVED), ("softcap-and-slopes", "bias_fp32-bias_tangent")],
)
def test_threads_follow_tangents_of_captured_tensors(function, features):
    """By the kernel's code for each thread; some of the tensors have none."""
    name, tensors = epilogue_of(MOVED[function], None)
    moved = range(len(tensors))[-2:]
    own, numbers = user_epilogue(name).with_tangents(tuple(moved))
    assert numbers == tuple(moved)
    given = {"bias": randn(2, 3, 40, 50).float()} if "bias" in features else {"softcap": 1.5}
    problem, dots = (Scores.random(2, 3, 40, 50, seed=i, extra={name: tensors}, **given) for i in range(2))
    changed = [(tensors[i] + i).sin() for i in moved]
    plain = TINY["warps2x1-32x16"].of(f"{features}-{name}", op="jvp").traits

    def by_definition(q, k, v, bias, *more):
        inputs = replace(problem.inputs, bias=bias, extra={name: (*tensors[: moved.start], *more)})
        return definition(q, k, v, problem.scale, features_of(plain), inputs, problem.lengths)[:2]

    def wide(of, more):
        bias = of.inputs.bias if "bias" in given else torch.zeros(1, 1, 1, 1)
        return tuple(x.double() for x in (of.q, of.k, of.v, bias, *more))

    (out, lse), right = jvp(by_definition, wide(problem, tensors[moved.start :]), wide(dots, changed))
    problem = replace(problem, inputs=replace(problem.inputs, extra={own: (*tensors, *changed)}))
    found = problem.tangents(TINY["warps2x1-32x16"].of(f"{features}-{own}", op="jvp"), dots)
    pairs = ((found.out, out), (found.lse, lse), (found.out_dot, right[0]), (found.lse_dot, right[1]))
    for (x, exact), limit in zip(pairs, (5e-3, 1e-5, 1e-2, 1e-4), strict=True):
        error = x.double() - (exact.transpose(1, 2) if exact.dim() == 4 else exact)
        assert error.abs().max() <= limit * max(1.0, float(exact.abs().max()))


def test_what_the_keys_of_a_row_have_in_common_costs_no_digits():
    """A component of S_dot that is equal for all keys changes no output."""
    problem, dots = (Scores.random(1, 1, 32, 64, seed=i) for i in range(2))
    tiling = TINY["warps2x1-32x16"].of("", op="jvp")
    shared = torch.zeros(32, 8)
    shared[:, 0] = 1000.0
    keys = problem.k.clone()
    keys[..., 0] = 1.0
    problem = replace(problem, k=keys)
    plain = problem.tangents(tiling, dots)
    moved = problem.tangents(tiling, replace(dots, q=dots.q + shared[None, :, None]))
    torch.testing.assert_close(moved.out_dot, plain.out_dot, atol=5e-3, rtol=0)
    torch.testing.assert_close(moved.lse_dot, plain.lse_dot + 1000.0 * problem.scale, atol=1e-3, rtol=0)


def test_what_the_kernel_serves():
    assert isinstance(lookup("jvp-sm80-bf16-d256x128-window-softcap", None, "sm90"), JvpSm80)
    assert isinstance(lookup("jvp-sm90-fp16-d40x128-varlen"), JvpSm90)


# ---- the host ----


ADDED, CAPTURED = epilogue_of(lambda s, b, h, q, k: s + COLUMNS[h, k], None)
KEPT = user_epilogue(ADDED)  # for other tests, which trace many functions
HOST = {
    "plain": ({}, {}),
    "odd head dims": ({"d": 59, "dv": 21}, {}),
    "more columns than a launch has": ({"dv": 200}, {}),
    "a negative scale": ({}, {"softmax_scale": -0.5}),
    "a scale of 0": ({}, {"softmax_scale": 0.0}),
    "packed": ({"varlen": True}, {}),
    "rows without an owner": ({}, {"seqused_q": int32(3, 5)}),
    "no keys": ({"keys": 0}, {"sinks": SINKS.repeat(2).bfloat16()}),
    "a bias of one row, and sinks": ({}, {"bias": randn(1, 4, 1, 6).bfloat16(), "sinks": SINKS.repeat(2)}),
    "a function": ({}, {"epilogues": (f"{ADDED}:t",), "epilogue_tensors": CAPTURED}),
    "a bias of all scores": ({"d": 59}, {"softmax_scale": -0.5, "bias": randn(2, 1, 5, 6).float()}),
}


def by_definition(given, traits):
    """Write the kernel's results, by the definition, to rows that sequences own."""
    lengths, own = Lengths(*given.seqlens[:6]), {"bias": traits.bias, "sinks": traits.sinks}
    names = [*traits.epilogues, *(name for name, dtype in own.items() if dtype)]
    features = Features(traits.mask, "", tuple(user_epilogue(name).reference for name in traits.epilogues))

    def call(q, k, v, *more):
        values = dict(zip(names, more, strict=True))
        extra = {name: (values.pop(name),) for name in traits.epilogues}
        inputs = ScoreInputs(**values, extra=extra)
        return definition(q, k, v, given.softmax_scale, features, inputs, lengths)[:2]

    tensors = [[given.mQ, given.mK, given.mV], [given.mQdot, given.mKdot, given.mVdot]]
    for name, (x, *dots) in zip(names, given.score_args[2:], strict=True):
        assert len(dots) == getattr(traits, f"{name}_tangent", name.startswith("traced_tangent"))
        for own, one in zip(tensors, (x, *dots) if dots else (x, torch.zeros_like(x)), strict=True):
            own.append(one)
    (out, lse), (out_dot, lse_dot) = jvp(call, *(tuple(x.double() for x in own) for own in tensors))
    used = [None] * len(out) if lengths.seqused_q is None else lengths.seqused_q.tolist()
    for b, rows in enumerate(used):
        for target, x in ((given.mO, out), (given.mOdot, out_dot)):
            target[b, :rows] = x[b, :rows].to(target.dtype)
    for b, rows in enumerate(used[: len(lse)]):
        for target, x in ((given.mLSE, lse), (given.mLSEdot, lse_dot)):
            target[b][..., :rows] = x[b][..., :rows].float()


@pytest.fixture
def launched(monkeypatch):
    """The kernels that calls launch; the definition computes each from its launch's arguments."""
    found = []

    def build(kernel, target):
        def run(given):
            emulated_kvcache.check_arguments(fakes(kernel), tuple(vars(given).values()))
            assert given.mQ.shape[-1] == kernel.traits.head_dim and given.softmax_scale > 0
            by_definition(given, kernel.traits)
            found.append(kernel)

        return run

    machine.device(monkeypatch)
    machine.kernels(monkeypatch, build)
    machine.poison(monkeypatch)
    return found


@pytest.mark.parametrize("name", HOST)
def test_the_host(name, launched):
    sizes, options = HOST[name]
    sizes = {"d": 16, "dv": 16, "varlen": False, "keys": 6} | sizes
    keys, lead = sizes["keys"], () if sizes["varlen"] else (2,)
    shapes = [(*lead, n, heads, d) for n, heads, d in ((5, 4, "d"), (keys, 2, "d"), (keys, 2, "dv"))]
    given, dots = (
        [randn(*x[:-1], sizes[x[-1]], seed=i + j).bfloat16() for i, x in enumerate(shapes)] for j in (0, 10)
    )
    more = {"softmax_scale": 0.25, "mask": "causal", "max_seqlen_q": 5, "max_seqlen_k": keys} | options
    if sizes["varlen"]:
        more |= {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 3, 6)}
    call = Call(*given, **more)
    more = [None if x is None else x.flip(-1) for x in (call.bias, call.sinks, *call.epilogue_tensors)]
    none = (None,) * len(call.epilogue_tensors)
    for tangents in ([*dots, *more], [dots[0], *(None,) * 4, *none], [None, None, dots[2], None, *more[1:]]):
        found = with_tangents(call, tangents)
        expected = torch.ops.cute_attn.jvp(tangents, *call.values(ATTENTION))
        for x, right in zip(found, expected, strict=True):
            assert x.dtype == right.dtype
            torch.testing.assert_close(x, right, atol=2e-2 if x.dtype != torch.float32 else 1e-5, rtol=1e-2)
    launches = {"no keys": 0, "more columns than a launch has": 2}.get(name, 1)
    assert len(launched) == 3 * launches


HALF, BIAS = randn(1, 4, 2, 16).bfloat16(), torch.zeros(1, 2, 4, 4).bfloat16()
REFUSED = """
told({3: BIAS.float()}, bias=BIAS) -> ValueError: the tangent of bias is (1, 2, 4, 4), torch.float32
told({5: SINKS}, epilogues=("unmoved:t",), epilogue_tensors=(SINKS,))
    -> NotImplementedError: a tensor of epilogue 'unmoved' has a tangent
told({0: HALF}, tile="tile_n=16") -> NotImplementedError: kernel or tile is given
told({1: HALF[:, :2]}) -> ValueError: the tangent of k is (1, 2, 2, 16)
told({}, **dict.fromkeys("qkv", HALF.float())) -> NotImplementedError: q is fp32 in
"""


@register_epilogue("unmoved")
class Unmoved(Epilogue):
    """A class that has a derivative, but takes no tangents of its tensors."""

    def forward(self, state, tile, loaded): ...

    def backward(self, state, tile, saved): ...


def told(tangents, **changes):
    call = Call(HALF, HALF, HALF, max_seqlen_q=4, max_seqlen_k=4)._replace(**changes)
    with_tangents(call, [tangents.get(place) for place in range(5 + len(call.epilogue_tensors))])


@refusals.each(REFUSED)
def test_what_kernels_and_the_host_refuse(call, sentence, launched):
    refusals.check(call, sentence, globals())
