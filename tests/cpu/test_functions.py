"""score_mod and mask_mod: device code of traced functions against torch, identity, refusals, gradients on the CPU."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from cute_attn import Traits, attention, check_epilogue, compile, lookup
from cute_attn.epilogues.functions import device, epilogue, gradients, graph, known, operations
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.call import Call
from cute_attn.host.choose import user_classes
from cute_attn.reference import emulate
from cute_attn.reference.check_epilogue import _function, for_each
from cute_attn.reference.tilings import Scores
from tests import refusals
from tests.cpu.test_examples import load
from tests.fuzz import oracle

torch.manual_seed(0)
NHEADS = 3
SLOPES = torch.rand(NHEADS)
TABLE = torch.randn(NHEADS, 32)
DOCUMENT = torch.randint(0, 3, (2, 100)).sort().values
LENGTHS = torch.tensor([60, 90], dtype=torch.int16)
KEPT = torch.rand(100, 2).T > 0.3  # last stride 2
BIAS = torch.randn(NHEADS, 100).bfloat16()
LIMITS = torch.tensor([5, 20, 60])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= 17)


def prefix_lm(b, h, q_idx, kv_idx):
    return torch.logical_or(kv_idx < LENGTHS[b] // 2, q_idx >= kv_idx)


def document(b, h, q_idx, kv_idx):
    return DOCUMENT[b, q_idx] == DOCUMENT[b][kv_idx]


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def t5(score, b, h, q_idx, kv_idx):
    n = torch.abs(kv_idx - q_idx)
    far = 8 + (torch.log(n.float() / 8 + 1e-6) / math.log(16) * 8).to(torch.long)
    bucket = torch.where(n < 8, n, torch.minimum(far, torch.full_like(far, 15)))
    return score + TABLE[h, bucket + torch.where(kv_idx > q_idx, 16, 0)]


def pieces(score, b, h, q_idx, kv_idx):
    near = torch.clamp(score, -2, 2) + torch.maximum(score, score * 0.5) + torch.rsqrt(score * score + 1)
    near = near + TABLE[h, :][q_idx % 32] + TABLE[h, ...][..., kv_idx % 32]
    return torch.where(KEPT[b, kv_idx], near * BIAS[h, kv_idx] - score.abs(), -torch.inf) + 2.0 ** -(h + 1.0)


def integers(score, b, h, q_idx, kv_idx):
    d = q_idx - kv_idx
    return (
        score
        + (d // 3 + -d % 7 + ((q_idx ^ kv_idx) & 5) + (~q_idx >> 1) + (kv_idx << 1) + (d * 0.75).floor())
        * 0.1
    )


def composed(score, b, h, q_idx, kv_idx):
    smooth = (
        F.silu(score) + F.gelu(score) + F.gelu(score, approximate="tanh") + F.softplus(score) + F.mish(score)
    )
    steps = torch.round(score) * 0.1 + torch.frac(score * 0.3) + F.leaky_relu(score) + F.elu(score)
    others = torch.atan(score) + torch.expm1(score * 0.2) + torch.log1p(score.abs()) + torch.erf(score)
    return (smooth + steps + others).masked_fill((q_idx + kv_idx) % 7 == 0, -torch.inf)


def pointwise(score, b, h, q_idx, kv_idx):
    bounded, distance = torch.tanh(score), (q_idx - kv_idx).float()
    angles = (
        torch.atan2(score, distance)
        + torch.copysign(bounded, -distance)
        + torch.copysign(score, kv_idx - q_idx)
    )
    powers = (
        (bounded + 1.5) ** BIAS[h, q_idx].float() + bounded ** (h + 1) + (bounded + 2) ** -2.5 + bounded**5
    )
    smooth = (
        torch.sinc(score)
        + torch.logaddexp(score, bounded)
        + torch.acos(0.9 * bounded)
        + torch.asinh(9 * score)
    )
    steps = torch.fmod(q_idx - kv_idx, 7) + torch.bucketize(kv_idx, LIMITS) + (7 * q_idx).byte() * 0.01
    return angles + powers + smooth + steps + TABLE[:, 3:][h, kv_idx % 29] + torch.fmod(score, 0.7).detach()


FUNCTIONS = (prefix_lm, t5, pieces, composed, pointwise)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_device_code_equals_torch(function):
    found = check_epilogue(function, seqlen_q=80)
    assert found.passed, str(found)
    expected = 6 if len(function.__code__.co_varnames) >= 5 and function is not prefix_lm else 5
    assert len(found.comparisons) >= expected


def test_a_wrong_derivative_is_found(monkeypatch):
    wrong = operations.OPERATIONS["tanh"]._replace(slope=operations.OPERATIONS["sin"].slope)
    monkeypatch.setitem(operations.OPERATIONS, "tanh", wrong)
    found = check_epilogue(lambda s, b, h, q_idx, kv_idx: 19 * torch.tanh(s / 19))
    assert {one.what.split(",")[0] for one in found.comparisons if not one.passed} == {"backward"}


def test_a_wrong_trace_is_found(monkeypatch):
    monkeypatch.setattr(
        graph.Graph,
        "cast",
        lambda self, x, kind, dtype="": x if x.op != "const" else self.const(float(x.value)),
    )
    found = check_epilogue(lambda s, b, h, q_idx, kv_idx: s * 1.5 + (s * 0.5).int())
    failed = [one.what for one in found.comparisons if not one.passed]
    assert "forward, the trace" in failed


# ---- values as torch has them ----

BYTES, SIGNED = torch.arange(100).mul(37).to(torch.uint8), torch.arange(100).mul(91).to(torch.int8)
WORDS, LONGS = torch.arange(1, 101).mul(2**31 // 101).int(), torch.arange(100) * 2**33 + 5
DOUBLES, HALF = torch.randn(100, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float16)
AROUND = torch.randn(NHEADS, 201)


def hashed(s, b, h, i, j):
    wide = (i * 1000003 + j * 998244353) % 97 + (i + 40000) * (j + 70000) % 7 + ((i << 40) >> 38) + (i >> 33)
    narrow = (BYTES[i] - BYTES[j]) + SIGNED[i] * SIGNED[j] + WORDS[i] * WORDS[j] % 7 + LONGS[i] * 3 % 5
    long = (
        WORDS[i].long() * WORDS[j] % 13
        + (WORDS[i].to(torch.int64) + WORDS[j]) % 11
        + (i.long() * 2**40 + j) % 19
        + KEPT[b, i].long() * BYTES[j].long()
        + BIAS[h, i].long()
    )
    bounded = (torch.nn.functional.hardtanh(i - j, -1.5, 2.5) & 3) + torch.threshold(i - j, 0.5, -2.5)
    return s + (wide + narrow + long + bounded + i.int() * 1000003 * 4001 % 11) * 0.1


BOUNDARIES = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
COMPOSED_CALLS = """
F.silu(s); F.gelu(s); F.gelu(s, approximate="tanh"); F.softplus(s, 2.0); F.logsigmoid(s); F.mish(s); F.elu(s, 0.5)
F.selu(s); F.celu(s, 0.7); F.leaky_relu(s); F.relu6(3 * s); F.hardtanh(s); F.hardsigmoid(s); F.hardswish(s)
F.hardshrink(s); F.softshrink(s, 0.3); F.tanhshrink(s); F.softsign(s); F.threshold(s, 0.1, 0.2); torch.frac(s)
torch.tan(torch.tanh(s)); torch.sinh(s); torch.cosh(s); torch.asinh(s); torch.acosh(s * s + 1.5); s.erfc()
torch.atanh(0.9 * torch.tanh(s)); torch.log10(s * s + 1); torch.hypot(s, s + 1); torch.logaddexp(s, 0.5 * s)
torch.lerp(s, s * s, 0.3); torch.addcmul(s, s, s, value=0.5); torch.addcdiv(s, s, 2 + s * s); s.masked_fill(i < j, 0.5)
torch.where(torch.isnan(s) | torch.isinf(s), 0.0, s); torch.where(torch.isfinite(s), s, 0.0); torch.deg2rad(s)
torch.where(torch.isposinf(s) | torch.isneginf(s), 0.0, s); torch.rad2deg(s); torch.round(s) + s; torch.rsub(s, 2)
torch.asin(0.9 * torch.tanh(s)) + torch.arccos(0.9 * torch.tanh(s)); torch.atan2(s, i - j); torch.asinh(100 * s)
torch.copysign(s, (j - i).float()) * torch.copysign(s, -2.0); torch.copysign(DOUBLES[i], s) * s; torch.fmod(s, 0.7) + s
s + torch.fmod(i - j, 7) + torch.div(j - i, 7, rounding_mode="trunc"); torch.fmax(s, 0.5 * s); s.fmin(DOUBLES[i])
torch.add(s, i, alpha=2) - s.sub(s * s, alpha=0.3); torch.rsub(s, s * s, alpha=2); torch.round(s, decimals=2) * s
torch.ldexp(s, i % 3); torch.logit(torch.sigmoid(s)); torch.sigmoid(s).logit(eps=0.1); torch.logaddexp2(s, 0.5 * s)
torch.nan_to_num(torch.where(i < j, math.inf, s), posinf=3.0); torch.where(i < j, math.nan, s).nan_to_num(0.5)
torch.where(torch.signbit(s), 0.2 * s, s); torch.sinc(s) + s.mul(0.01).sinc(); torch.special.xlogy(s * s, 1 + s * s)
torch.special.xlog1py(s * s, s * s) + torch.special.entr(s * s); torch.special.ndtr(s) + torch.special.expit(s)
(1.5 + torch.tanh(s)) ** DOUBLES[i] + torch.tanh(s) ** (i % 4) + torch.tanh(s) ** 7; torch.float_power(s * s + 1, 0.3)
(s * s + 1) ** 2.5 * s.abs() ** -0.3; (1.5 + torch.tanh(s)) ** -3; s * torch.isclose(s, s + 1, 0.1, 0.2)
s * torch.heaviside(s.detach(), DOUBLES[0]); F.prelu(s, DOUBLES[:1]); s * torch.bucketize(s.detach(), BOUNDARIES)
s * torch.bucketize(i, WORDS[:3], right=True) + torch.searchsorted(WORDS[:3], i); (i > j).where(i > 3, False) * s
s.unsqueeze(0).exp().view(()) + s[None][0]; s * (i[None] - j.reshape(1)).squeeze(0); s * torch.as_tensor(s).half()
torch.where(i < j, s, torch.tensor(-0.5, dtype=s.dtype, device=s.device)); s * torch.full((), 0.3, dtype=torch.bfloat16)
s * (torch.ones((), dtype=torch.bool) & (i > j)); s.lerp(torch.zeros((), dtype=s.dtype), 0.3) * torch.scalar_tensor(2.0)
s + i.short() + i.char() * 2 + (i * 7).byte() + s.to(torch.int8); torch.where(condition=i < j, input=s, other=0.0)
torch.hypot(s, BYTES[i]); torch.hypot(SIGNED[j], s); s + torch.asinh(SIGNED[i]) + torch.acosh(WORDS[i])
torch.addcmul(s, SIGNED[i], SIGNED[j]); s + torch.atan2(SIGNED[i], SIGNED[j]) + torch.special.entr(BYTES[i])
s * torch.isclose(BYTES[i], BYTES[j], 0.1, 5.0); torch.addcdiv(s, SIGNED[i], DOUBLES[j], value=3); s + i * 0.1 // 0.1
s % 0.7 + torch.remainder(s, DOUBLES[i]); torch.div(s, 0.3, rounding_mode="floor") * s; torch.fmod(1e9 * s, DOUBLES[i])
torch.remainder(torch.tensor(2.5), s) + torch.div(torch.tensor(2.5), s, rounding_mode="floor")
torch.remainder(s, math.inf).clamp(max=3) + torch.remainder(s, -0.7) + (i * 0.1 - 2) // math.inf + (i - j) * 0.5 // 1.0
F.softplus(1e3 * s); F.logsigmoid(1e3 * s); F.mish(1e3 * s); F.elu(1e3 * s); F.selu(1e3 * s); F.celu(1e3 * s, 0.5)
F.relu6(s - s.detach() + 6); F.relu6(s - s.detach()); F.hardtanh(s - s.detach() - 1); F.hardtanh(s - s.detach() + 1)
F.hardsigmoid(s - s.detach() + 3); F.hardswish(s - s.detach() - 3); F.hardswish(s - s.detach() + 3)
torch.nan_to_num(F.relu(torch.where(i < j, math.nan, s)), 0.5)
"""


@pytest.mark.parametrize("call", re.split(r"; |\n", COMPOSED_CALLS.strip()))
def test_functions_that_are_made_of_others_have_torchs_values_and_derivatives(call):
    function = eval(f"lambda s, b, h, i, j: {call}", globals())
    name, tensors = epilogue_of(function, None, dtype=torch.float64)
    found = _function(function, "score_mod", Scores.random(1, 2, 40, 50, extra={name: tensors}), name)
    assert len(found) == 2 and all(one.passed for one in found), list(map(str, found))


@pytest.mark.parametrize(
    ("function", "captures"),
    [
        (lambda s, b, h, i, j: torch.where(i >= j, s, torch.tensor(-math.inf, dtype=s.dtype)), 0),
        (lambda s, b, h, i, j: s + torch.full((), 0.3) * torch.ones(1)[0], 0),
        (lambda s, b, h, i, j: s * float(torch.tensor(0.3)), 0),
        (lambda s, b, h, i, j: s + (TABLE * torch.tensor(2.0))[h, j], 1),
    ],
)
def test_numbers_that_a_function_makes_tensors_of_are_not_captured(function, captures):
    name, tensors = epilogue_of(function, None)
    assert len(tensors) == captures
    found = _function(function, "score_mod", Scores.random(1, 3, 20, 30, extra={name: tensors}), name)
    assert all(one.passed for one in found), list(map(str, found))
    before = known.traces_alone()
    assert epilogue_of(function, None)[0] == name
    assert known.traces_alone() - before == captures + ("float" in function.__code__.co_names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_have_torchs_dtypes(dtype):
    """This includes operations composed of others with several dtypes, and numbers that have a dtype."""
    others = "torch.full_like(s, 0.5) * s; s.new_zeros(()) + i; (s * DOUBLES[:1].float()).squeeze(); torch.sign(s) + s"
    for call in re.split(r"; |\n", f"{COMPOSED_CALLS.strip()}; {others}"):
        if "prelu" in call or "heaviside" in call:  # torch wants operands of one dtype
            continue
        seen = []

        def reports(s, b, h, i, j, call=call, seen=seen):
            seen.append(eval(call, globals(), {"s": s.to(dtype), "i": i, "j": j}).dtype)
            return s

        epilogue_of(reports, None)
        reports(torch.tensor(0.5), *map(torch.tensor, (1, 2, 5, 3)))
        assert seen[0] == seen[1], call


def buckets(s, b, h, i, j):
    near = torch.log(((j - i).abs() + 1).to(torch.float32) / 8) / math.log(16) * 8
    return s + near.to(torch.int32) + torch.where((i - j) % 2 == 0, 0.4, 0.0)


def promoted(s, b, h, i, j):
    halves = HALF * BIAS[h, j] + BIAS[h, i] * BIAS[h, j] + s.to(torch.bfloat16)
    whole = i / 3 + i // 3 + torch.sqrt(i + 1) + torch.minimum(s, s * 0 + 1) + (i < j) * 1.5
    return s * DOUBLES[i] + halves + whole - (i < j).to(torch.float32) + torch.clamp(s, -1, 1.5)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [hashed, buckets, promoted, t5, integers])
def test_the_definition_has_torchs_values(function, dtype, default):
    """Its dtypes and roundings are the ones under a default dtype of float32, whatever the current default is."""
    name, tensors = epilogue_of(function, None)
    problem = Scores.random(2, NHEADS, 90, 100, extra={name: tensors})
    scores = torch.randn(problem.shape, dtype=dtype)
    expected = for_each(function, True)(scores, *(torch.arange(n) for n in scores.shape)).to(dtype)
    torch.set_default_dtype(default)
    try:
        coords = problem.coords(Traits.parse("forward-sm80-fp16-d64"))
        got = user_epilogue(name).reference(scores, coords, problem.inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_integers_of_kernels_are_torchs():
    found = check_epilogue(hashed)
    assert found.passed and not any(one.precision for one in found.comparisons), str(found)


def remainders(s, b, h, i, j):
    far = (i * j * 99991.0) % 0.7 + torch.fmod((i - j) * 99991.0, 0.3) + (i - j) / 3.0 % math.inf
    return s + far + ((i - j) * 0.1 // 0.1 + (i * 0.1) % -0.1 + torch.remainder(j - i, h + 1.5)) * 0.01


def quotients(b, h, q_idx, kv_idx):
    by_column = (q_idx / 41).floor() + (q_idx / 49).int() == (kv_idx / 41).floor() + (kv_idx / 49).int()
    return by_column | ((q_idx - kv_idx) / 47 == (q_idx - kv_idx) // 47) | (kv_idx / (h + 46.0) == 1.0)


@pytest.mark.parametrize("function", [remainders, quotients])
def test_steps_see_quotients_as_torch_rounds_them(function):
    found = check_epilogue(function)
    assert found.passed and not any(one.precision for one in found.comparisons), str(found)


def test_a_branch_that_autograd_needs_guarded_costs_kernels_nothing():
    lowered = user_epilogue(epilogue_of(lambda s, *_: F.softplus(s), None)[0]).lowered
    for node in (lowered.forward, lowered.slope.node):
        assert [x.op for x in graph.ordered(node)].count("where") == 1


@pytest.mark.parametrize("function", [sliding_window, document, alibi, integers])
def test_usual_indices_have_32_bits_in_kernels(function):
    names = (None, function) if function in (sliding_window, document) else (function, None)
    lowered = user_epilogue(epilogue_of(*names)[0]).lowered
    wide = [x for x in graph.ordered(lowered.forward) if x.kind == graph.LONG and x.op != "load"]
    assert not wide


def test_a_difference_of_precision_is_no_error():
    table = torch.arange(200).double() + 2.0**30
    found = check_epilogue(lambda s, b, h, i, j: s + BIAS[h, j] * BIAS[h, i] + table[i] - table[j])
    assert found.passed, str(found)
    assert "differs in precision: kernels do not round to 16 bits" in str(found)


def test_a_score_of_fp32s_least_number_is_infinite_in_kernels():
    found = check_epilogue(lambda s, b, h, i, j: torch.where(i >= j, s, torch.finfo(torch.float32).min))
    assert found.passed and "scores over the scale leave fp32's range" in str(found)


def test_a_wrong_gradient_of_a_captured_tensor_is_found(monkeypatch):
    offset = gradients.offset_in
    monkeypatch.setattr(epilogue, "offset_in", lambda *args: offset(*args) + 1)
    found = check_epilogue(lambda s, b, h, i, j: s * AROUND[h, i - j])
    failed = [one.what for one in found.comparisons if not one.passed]
    assert len(failed) == 2 and all(one.startswith("gradient of tensor 0") for one in failed), str(found)


# ---- tables ----

GRID = torch.randn(3, 60, dtype=torch.float64, requires_grad=True)
TABLE_READS = """
GRID[h, d]; GRID[h][d]; GRID[h, :][d]; GRID[h, ...][..., d]; GRID[:, d][h]; GRID[..., d][h]; GRID.T[d, h]; GRID.mT[d][h]
GRID.view(-1)[60 * h + d % 60]; GRID.reshape(3, 6, 10)[h, d // 10, d % 10]; GRID[h].view(6, 10)[d // 10][d % 10]
GRID.select(0, h)[d]; torch.select(GRID[h], 0, d); GRID[h].flip(0)[-1 - d]; GRID.take(60 * h + d % 60)
GRID[h].gather(0, d % 60); torch.gather(GRID[1:], 1, (d % 60).view(1, 1))[0, 0] * 0 + GRID[h, d]
GRID.index_select(0, h)[0, d]; GRID[h].index_select(0, d[None]).squeeze(); GRID[h.unsqueeze(0), d.view(1)].squeeze()
F.embedding(d % 60, GRID.t())[h]; torch.embedding(GRID, h)[d]; GRID[None, h, None][0, 0, d]; GRID[h].double()[d]
torch.where(d % 60 > 19, GRID[h, 20:][d % 60 - 20], GRID[h, :20][d % 20]); GRID[h, d % GRID.shape[1]]
GRID[h][d % GRID[h].size(0)]; (2 * GRID[h])[d] / 2; torch.cat((GRID[:1], GRID[1:]))[h, d]
GRID[h].clone()[:, None][d][0]
"""


@pytest.mark.parametrize("read", re.split(r"; |\n", TABLE_READS.strip()))
def test_every_read_of_a_table_has_a_gradient(read):
    """The gradients equal the ones of GRID[h, d], where a negative distance d counts from the end."""
    q, k, v = (x.detach() for x in inputs(20, 30, 3, 3))
    function = eval(f"lambda s, b, h, i, j: (lambda d: s * (1 + {read}))(i - j)", globals())
    got = attention(q, k, v, score_mod=function)
    expected = oracle.batched(q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + GRID[h, i - j]))[0]
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(out.square().sum(), GRID)[0] for out in (got, expected)]
    torch.testing.assert_close(*grads)


def viewed(table):
    return lambda s, b, h, i, j: s + table.T[j, h] * table[h, 1:][i] + table[h].view(5, 6)[i % 5, j % 6]


def test_views_of_tables_are_those_of_the_next_call():
    q, k, v = (x.detach() for x in inputs(20, 30, 3, 3))
    attention(q, k, v, score_mod=viewed(torch.randn(3, 30, dtype=torch.float64)))
    before, whole = known.traces_alone(), torch.randn(5, 3, 30, dtype=torch.float64, requires_grad=True)
    for table in whole.unbind():
        got = attention(q, k, v, score_mod=viewed(table))
        expected = oracle.batched(q, k, v, score_mod=viewed(table))[0]
        torch.testing.assert_close(got, expected)
        grads = [torch.autograd.grad(out.square().sum(), whole)[0] for out in (got, expected)]
        torch.testing.assert_close(*grads)
    assert known.traces_alone() == before


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x[:, 1:]

    @staticmethod
    def backward(ctx, grad):
        return F.pad(grad, (1, 0)) * 3


def unlearned(table):
    with torch.no_grad():
        return table[:, 1:]


@pytest.mark.parametrize(
    "made",
    [unlearned, Passing.apply, lambda table: Passing.apply(table).T.T, lambda table: table.detach()[:, 1:]],
)
def test_views_with_another_gradient_are_made_in_each_call(made):
    """The first table requires no gradient, so that the trace cannot see how the function uses it."""
    q, k, v = (x.detach() for x in inputs(20, 25, 3, 3))
    for learnt in (False, True):
        table = torch.randn(3, 30, dtype=torch.float64, requires_grad=learnt)
        found = attention(q, k, v, score_mod=lambda s, b, h, i, j, x=table: s + made(x)[h, j])
    view = made(table)
    expected = oracle.batched(q, k, v, score_mod=lambda s, b, h, i, j: s + view[h, j])[0]
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad
    if found.requires_grad:  # it may be a view without gradients
        grads = [
            torch.autograd.grad(out.square().sum(), table, allow_unused=True)[0] for out in (found, expected)
        ]
        assert (grads[0] is None) == (grads[1] is None) == (made is unlearned)
        if grads[0] is not None:
            torch.testing.assert_close(*grads)


# ---- indices ----


@pytest.mark.parametrize(("shift", "index"), [(100, 119), (-110, -139)])
def test_an_index_beyond_a_tensor_is_an_error_on_the_cpu(shift, index):
    q, k, v = (x.detach() for x in inputs())
    table = torch.randn(4, 110)
    sentence = rf"index {index} of dimension 1 of its tensor of shape \(4, 110\).*; accepted: -110 to 109"
    with pytest.raises(IndexError, match=sentence):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + shift], causal=True)
    with pytest.raises(IndexError, match="dimension 1"):
        check_epilogue(lambda s, b, h, i, j: s + table[h, i + 100])


def test_indices_of_rows_that_no_sequence_has_are_none():
    q, k, v = (x.detach() for x in inputs())
    table, used = torch.randn(10), torch.tensor([10, 10], dtype=torch.int32)
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], seqused_k=used)
    expected = oracle.batched(q, k[:, :10], v[:, :10], score_mod=lambda s, b, h, i, j: s + table[j])[0]
    torch.testing.assert_close(out, expected)


# ---- attention on the CPU ----


def inputs(seqlen_q=20, seqlen_k=30, nheads=4, nheads_kv=2):
    torch.manual_seed(0)
    shapes = ((2, seqlen_q, nheads, 8), (2, seqlen_k, nheads_kv, 8), (2, seqlen_k, nheads_kv, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_users_epilogues_come_first():
    load("custom_epilogue")
    q, k, v = inputs()
    table = torch.randn(4, 9, dtype=torch.float64)
    got = attention(q, k, v, epilogues={"relative_position": table}, score_mod=softcap)

    def both(score, b, h, q_idx, kv_idx):
        return softcap(score + table[h, (kv_idx - 10 - q_idx).clamp(-4, 4) + 4], b, h, q_idx, kv_idx)

    torch.testing.assert_close(got, oracle.batched(q, k, v, score_mod=both)[0])


# ---- identity ----


def penalty(slopes, calls=None, factor=1.0):
    def score_mod(score, b, h, q_idx, kv_idx):
        if calls is not None:
            calls.append(0)
        return score - slopes[h] * (q_idx - kv_idx) * factor

    return score_mod


def test_equal_graphs_are_one_epilogue_and_one_kernel():
    other = torch.rand(8)
    first, one = epilogue_of(penalty(torch.rand(4)), None)
    second, two = epilogue_of(lambda s, b, head, i, j: s.sub(torch.mul(torch.sub(i, j), other[head])), None)
    assert first != second and len(one) == len(two) == 1  # operands in another order
    third, _ = epilogue_of(lambda s, b, head, i, j: torch.sub(s, other[head] * (i - j)), None)
    assert first == third and user_epilogue(first) is user_epilogue(third)
    q = torch.empty(1, 8, 4, 64, dtype=torch.bfloat16)
    calls = [Call(q, q, q, epilogue_tensors=(x,), epilogues=(f"{first}:t",)) for x in (one[0], other)]
    assert user_classes(calls[0]) == user_classes(calls[1])
    assert calls[0].traits("sm80") == calls[1].traits("sm80")
    names = {
        epilogue_of(penalty(torch.rand(4, dtype=dtype)), None)[0] for dtype in (torch.float32, torch.float16)
    }
    assert len(names | {epilogue_of(penalty(other, factor=2.0), None)[0]}) == 3


def test_a_known_function_is_not_called(monkeypatch):
    first = epilogue_of(penalty(SLOPES, factor=3.5), document)
    monkeypatch.setattr("cute_attn.epilogues.functions.known.trace", None)
    slopes = torch.rand(NHEADS)
    name, tensors = epilogue_of(penalty(slopes, factor=3.5), document)
    assert name == first[0] and len(tensors) == 2 and tensors[0] is DOCUMENT and tensors[1] is slopes
    with pytest.raises(TypeError, match="NoneType"):
        epilogue_of(penalty(SLOPES, factor=4.5), document)


def test_one_tensor_in_two_places_is_not_mixed_up_with_two():
    def pair(a, b):
        return lambda s, batch, h, q, k: s + a[h] - b[h]

    x, y = torch.rand(4), torch.rand(4)
    assert len(epilogue_of(pair(x, x), None)[1]) == 1
    tensors = epilogue_of(pair(x, y), None)[1]
    assert tensors[0] is x and tensors[1] is y


def test_flex_attentions_own_combinations():
    mask = and_masks(causal, or_masks(document, lambda b, h, q, k: k < 4))
    by_hand = epilogue_of(None, lambda b, h, q, k: causal(b, h, q, k) & (document(b, h, q, k) | (k < 4)))[0]
    q, k, v = inputs(30, 30, 3, 3)
    torch.testing.assert_close(attention(q, k, v, mask_mod=mask), oracle.batched(q, k, v, mask_mod=mask)[0])
    assert epilogue_of(None, mask)[0] and by_hand and epilogue_of(None, noop_mask)[0] == ""


def test_what_leaves_scores_alone_is_no_epilogue():
    q, k, v = inputs()
    assert torch.equal(attention(q, k, v, score_mod=lambda s, *_: s), attention(q, k, v))


# ---- what is refused ----


def score(function):
    return {"score_mod": function}


REFUSED = """
score_mod=lambda s, *_: torch.lgamma(s) -> TypeError: score_mod uses lgamma; accepted: + -
score_mod=lambda s, *_: s.cap() -> AttributeError: has no attribute 'cap'; accepted: those of a torch.Tensor
score_mod=lambda s, *_: s + SLOPES.add_(s) -> TypeError: changes a value in place by add_
score_mod=lambda s, b, h, q, k: s if q > k else 0.0 -> TypeError: tests a traced value, as if, and, or
score_mod=lambda s, *_: math.exp(s) -> TypeError: makes a Python number of a traced value; accepted: torch.exp
score_mod=lambda s, b, *_: sum(range(b)) -> TypeError: uses a traced value in range(), or as the index of a list
score_mod=lambda s, b, h, *_: s * {0: 1.0}[h] -> TypeError: looks up a traced value in a dict; accepted: an element
score_mod=lambda s, *_: s.numpy() -> TypeError: hands a traced value to NumPy
score_mod=lambda s, *_: s + SLOPES -> TypeError: a tensor of shape (3,) as a whole; accepted: its
score_mod=lambda s, b, h, q, k: s + TABLE[h] -> TypeError: a tensor of shape (32,) as a whole
score_mod=lambda s, b, h, q, k: s + TABLE[..., h, ...] -> TypeError: indexes a tensor by Ellipsis
score_mod=lambda s, *_: s + SLOPES[s] -> TypeError: indexes a tensor by a float; accepted: traced int
score_mod=lambda s, b, h, q, k: s + SLOPES[h, q] -> TypeError: of 1 dimensions by 2 integers
score_mod=lambda s, b, h, *_: s + torch.ones(3, dtype=torch.complex64)[h]
    -> TypeError: captures a tensor of torch.complex64, ...; accepted: dense ones of torch.bool
score_mod=lambda s, b, h, *_: s + torch.ones(0)[h] -> ValueError: of shape (0,); accepted: one with
score_mod=lambda s, b, h, *_: s + 2 ** h -> TypeError: uses __rpow__ with arguments that are not traced
score_mod=lambda s, *_: s & 1 -> TypeError: uses __and__, which torch refuses: ... (line 1 of <string>)
score_mod=lambda s, b, h, q, k: ~s -> TypeError: uses __invert__, which torch refuses
score_mod=lambda s, b, h, q, k: s + torch.where(q, s, 0.0) -> TypeError: uses where, which torch refuses: where expected
score_mod=lambda s, *_: s[None] -> TypeError: returned a value of shape (1,); accepted: one of no dimensions
score_mod=lambda s, *_: s.expand(3) -> TypeError: makes a tensor of shape (3,) of a traced value by expand
score_mod=lambda s, b, h, *_: s + F.embedding(h, TABLE, padding_idx=0)[0] -> TypeError: uses embedding with arguments
score_mod=lambda s, b, h, *_: s + (TABLE[h] + SLOPES)[0] -> TypeError: uses add of a row of a tensor (
score_mod=lambda s, *_: None -> TypeError: score_mod returned None; accepted: traced values
score_mod=lambda s, b, h, q, k: q >= k -> TypeError: score_mod returned a bool; accepted: a score, such as torch.where
score_mod=1.0 -> TypeError: score_mod is a float; accepted: a function of (score, batch
mask_mod=lambda b, h, q, k: q - k -> TypeError: mask_mod returned an integer; accepted: a bool
"""


@refusals.each(REFUSED)
def test_refused_in_one_sentence(call, sentence):
    refusals.check(f"attention(*inputs(), {call})", sentence, globals())


def test_a_function_of_other_arguments_is_not_checked():
    with pytest.raises(TypeError, match="a function takes 3 arguments; accepted: score_mod"):
        check_epilogue(lambda a, b, c: a)


def test_a_kept_value_can_be_printed():
    kept = []
    attention(*inputs(), score_mod=lambda s, *_: kept.append(s) or s)
    assert f"{kept[0]} {kept}" == "<traced float> [<traced float>]"


def test_an_error_in_a_function_is_its_own():
    with pytest.raises(ZeroDivisionError):
        attention(*inputs(), score_mod=lambda s, *_: s * (1 / 0))


# ---- kernels ----


@pytest.mark.slow
def test_a_kernel_costs_what_one_by_hand_costs():
    """A relative bias, once traced and once as the example's class, on the example's tile."""
    example = load("custom_epilogue")
    table = torch.randn(4, 257)
    name, _ = epilogue_of(lambda s, b, h, q, k: s + table[h, (k - q).clamp(-128, 128) + 128], None)
    by_hand, traced = (
        compile(x, example.NARROW) for x in (example.NAME, example.NAME.replace("relative_position", name))
    )
    assert traced.resources.spill_store_bytes == 0
    assert sum(traced.instructions.values()) < 1.1 * sum(by_hand.instructions.values())


def test_distances_are_looked_up_once_a_diagonal(monkeypatch):
    loads, tiles = [], []
    load, over_tile = device.Expressions._load, epilogue.over_tile
    monkeypatch.setattr(device.Expressions, "_load", lambda *args: loads.append(args) or load(*args))
    monkeypatch.setattr(
        epilogue, "over_tile", lambda tile, *args: tiles.append(tile) or over_tile(tile, *args)
    )
    name, tensors = epilogue_of(t5, None)
    kernel = lookup(Traits.parse(f"forward-sm80-bf16-d64-{name}"))
    emulate.scores_on_host(kernel, torch.randn(1, NHEADS, 128, 96), 0.1, ScoreInputs(extra={name: tensors}))
    diagonals = [{row - col for row in tile.rows for col in tile.cols} for tile in tiles]
    assert tiles and len(loads) == sum(map(len, diagonals))
    assert 3 * len(loads) < 2 * sum(len(tile.rows) * len(tile.cols) for tile in tiles)
