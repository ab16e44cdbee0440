"""fp32 numbers as terms: the rule, the split in registers, and the precision of products, outputs and gradients.

Precision is simulated: sums exact, or as a tensor core adds them. Where kernels read and write terms is tested with the
kernels, which run in tests/gpu.
"""

import math

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Float16, Float32, Int32, TFloat32, cute

from cute_attn.device.terms import (
    MOST_BELOW,
    MOST_GRADIENT_SCALE,
    NO_ROW,
    P_EXPONENT,
    PRODUCTS,
    TOP,
    fits,
    power_of_two,
    scale_exponent,
    scale_of,
    split,
)
from layouts.host import run_on_host

# Fragments take static indices, so loops over them are unrolled on purpose.


def bits(*values):
    return [int(x) for x in np.array(values, np.float32).view(np.int32)]


# ---- the rule ----

# (largest element, smallest of the rows' largest or None for rows of zeros, in how many terms it fits, exponent)
RULES = [
    (1.0, 1.0, (1, 2), 14),
    (1.999, 2.0**-13, (1, 2), 14),
    (1.0, 2.0**-13 * 0.999, (1,), 14),
    (1.999, 2.0**-24, (1,), 14),
    (1.0, 2.0**-24 * 0.999, (), 0),
    (3.0e4, 4.0, (1, 2), 0),
    (2.0**62, 2.0**60, (1, 2), -48),
    (2.0**63, 2.0**63, (), 0),
    (2.0**-34, 2.0**-40, (1, 2), 48),
    (2.0**-35, 2.0**-35, (), 0),
    (1e-40, 1e-40, (), 0),
    (0.0, None, (1, 2), 0),
    (np.inf, 1.0, (), 0),
    (np.nan, 1.0, (), 0),
]


@cute.jit
def write_rule(largest: Int32, smallest: Int32, count: cutlass.Constexpr, out: cute.Tensor):
    out[0] = Int32(fits(largest, smallest, count))
    out[1] = scale_exponent(largest)
    out[2] = power_of_two(-scale_exponent(largest)).bitcast(Int32)


@pytest.mark.parametrize("count", [1, 2])
def test_which_tensors_fit(count):
    rows = [(*bits(large), NO_ROW if small is None else bits(small)[0]) for large, small, *_ in RULES]
    found = run_on_host(
        lambda out: [write_rule(Int32(a), Int32(b), count, out[i, None]) for i, (a, b) in enumerate(rows)],
        *(len(rows), 3),
    )
    for (large, small, fitting, exponent), (serves, got_exponent, inverse) in zip(RULES, found, strict=True):
        assert bool(serves) == (count in fitting), (large, small)
        if serves:
            assert got_exponent == exponent and inverse == bits(2.0**-exponent)[0], (large, small)


@cute.jit
def write_scales(largest: cutlass.Constexpr, out: cute.Tensor):
    for i in cutlass.range_constexpr(len(largest)):
        scale, inverse = scale_of(Int32(largest[i]))
        out[i, 0], out[i, 1] = scale.bitcast(Int32), inverse.bitcast(Int32)


def test_the_largest_score_gradient_is_scaled_to_the_same_size():
    numbers = np.array([1.0, 1.999, 3e-9, 7e12, 2.0**-64, 2.0**92, 2.0**-90, 1e-42, 0.0], np.float32)
    found = run_on_host(lambda out: write_scales(bits(*numbers), out), len(numbers), 2)
    scale, inverse = (found[:, i].astype(np.int32).view(np.float32).astype(np.float64) for i in range(2))
    assert np.all(scale * inverse == 1)
    exponents = np.log2(scale)
    assert np.all(exponents == np.round(exponents)) and np.all(np.abs(exponents) <= MOST_GRADIENT_SCALE)
    scaled = numbers * scale
    assert np.all(scaled < 2.0 ** (TOP + 1))
    assert np.all(scaled[:6] >= 2.0**TOP)


# ---- the split ----

FACTOR = 2.0**P_EXPONENT


@cute.jit
def write_terms(dtype: cutlass.Constexpr, count: cutlass.Constexpr, out: cute.Tensor):
    """out[i] = bits of a number of 2^-33 to 2, and of its terms in fp32."""
    words = cute.make_rmem_tensor(8, Float32)
    for first in cutlass.range(0, cute.size(out.shape[0]), 8):
        for i in cutlass.range_constexpr(8):
            x = (Int32(0x2F000000) + (first + i) * 520_123) ^ ((first + i) << 31)
            out[first + i, 0] = x
            words[i] = x.bitcast(Float32)
        terms = split(words, dtype, count, None if dtype is TFloat32 else Float32(FACTOR))
        for t in cutlass.range_constexpr(count):
            term = cute.recast_tensor(terms[t], Float32) if dtype is TFloat32 else terms[t]
            for i in cutlass.range_constexpr(8):
                out[first + i, 1 + t] = Float32(term[i]).bitcast(Int32)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [Float16, TFloat32], ids=str)
def test_terms_have_eleven_bits_each(dtype, count):
    """Relative, or for fp16 absolute where a term is below fp16's normal numbers."""
    found = run_on_host(lambda out: write_terms(dtype, count, out), 552, 1 + count).astype(np.int32)
    x, *terms = (found[:, i].copy().view(np.float32).astype(np.float64) for i in range(1 + count))
    assert np.abs(x).min() < 2.0**-32 and 1 < np.abs(x).max() < 4
    if dtype is Float16:
        x = x * FACTOR
        np.testing.assert_array_equal(terms[0], x.astype(np.float32).astype(np.float16))
    else:
        assert np.all(found[:, 1] & 0x1FFF == 0)
    error, least = np.abs(x - sum(terms)), 2.0**-25 if dtype is Float16 else 0.0
    assert np.all(error <= np.maximum(2.0 ** (-11 * count) * np.abs(x), least))
    assert error.max() > 0 or dtype is TFloat32


def test_registers_that_an_instruction_would_mistake_are_refused():
    def of_strided(out):
        words = cute.make_rmem_tensor(cute.make_layout((4, 2), stride=(2, 1)), Float32)
        split(words, TFloat32, 2)

    with pytest.raises(ValueError, match=r"registers \[0, 2, 4, 6\]; accepted: adjacent ones"):
        run_on_host(of_strided, 1)


# ---- precision ----

BLOCK, STEP = 64, 16


def cut(x, exponent):
    unit = torch.exp2(exponent)
    return torch.trunc(x / unit) * unit


def mma(acc, a, b):
    """acc + A B^T of a tensor core, acc fp32 (M, N), a (M, STEP), b (N, STEP): products exact, terms cut off two bits
    below fp32's last one of the largest, sums rounded toward zero."""
    terms = a.double()[:, None] * b.double()[None]
    largest = torch.maximum(terms.abs().amax(-1), acc.double().abs())
    exponent = torch.frexp(largest)[1].double() - 26
    total = cut(terms, exponent[..., None]).sum(-1) + cut(acc.double(), exponent)
    return cut(total, torch.frexp(total)[1].double() - 24).float()


def terms_of(x, scale):
    hi = (x * scale).half()
    return hi, (x * scale - hi.float()).half()


def product(a, b, scale, length):
    """A B^T of terms whose scales multiply to ``scale``, ``length`` along K summed from zero."""
    acc = torch.zeros(a[0].shape[0], b[0].shape[0])
    for first in range(0, a[0].shape[1], length):
        total = torch.zeros_like(acc)
        for i, j in PRODUCTS[2]:
            for k in range(first, first + length, STEP):
                total = mma(total, a[i][:, k : k + STEP], b[j][:, k : k + STEP])
        acc = acc + total / scale
    return acc


def scale_of_tensor(x):
    return 2.0 ** (TOP - math.floor(math.log2(float(x.abs().max()))))


def rms(error):
    return float(error.double().square().mean().sqrt())


@pytest.mark.parametrize("k, length", [(64, 32), (256, 32), (2048, 64)])
@pytest.mark.parametrize("below", [0, 6, MOST_BELOW[2]])
def test_products_have_the_precision_of_fp32(k, length, below):
    """Also of rows up to 2^13 below the tensor's largest element; long sums in tensor cores would err more."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, k, generator=generator) for _ in range(2))
    if k == 2048:
        a = torch.exp(a) / 60  # P and V
    a[1:] *= 2.0**-below * a[0].abs().max() / a[1:].abs().amax(1, keepdim=True)
    scales = [scale_of_tensor(x) for x in (a, b)]
    given = [terms_of(x, scale) for x, scale in zip((a, b), scales, strict=True)]
    exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T

    def error(length):
        return (product(*given, math.prod(scales), length) - exact) / size

    plain = (a @ b.T - exact) / size
    assert rms(error(length)) <= 2 * rms(plain) + 2.0**-25
    assert k < 2048 or rms(error(k)) > 3 * rms(error(length)), "long sums would show"


def gradients_in_terms(q, k, v, grad, out, lse, length):
    """dQ, dK and dV of one head without a mask and with a scale of 1, as the kernel computes them."""
    scales = [scale_of_tensor(x) for x in (q, k, v, grad)]
    (q2, k2, v2, grad2), (of_q, of_k, of_v, of_grad) = map(terms_of, (q, k, v, grad), scales), scales
    p = torch.exp(product(q2, k2, of_q * of_k, length) - lse[:, None])
    ds = p * (product(grad2, v2, of_grad * of_v, length) - (out * grad).sum(-1, keepdim=True))
    dv = product(transposed(terms_of(p, FACTOR)), transposed(grad2), FACTOR * of_grad, length)
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for i in range(0, q.shape[0], BLOCK):
        for j in range(0, k.shape[0], BLOCK):
            block, rows, keys = ds[i : i + BLOCK, j : j + BLOCK], slice(i, i + BLOCK), slice(j, j + BLOCK)
            scale = scale_of_tensor(block)
            ds2 = terms_of(block, scale)
            dq[rows] += product(ds2, transposed([x[keys] for x in k2]), scale * of_k, length)
            dk[keys] += product(transposed(ds2), transposed([x[rows] for x in q2]), scale * of_q, length)
    return dq, dk, dv


def transposed(terms):
    return tuple(x.T for x in terms)


def test_gradients_have_the_precision_of_fp32():
    """Sums from zero each step of K err at most half more than plain torch; kept in tensor cores they err more."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(128, 64, generator=generator) for _ in range(4))
    q = q / 8

    def by_torch(dtype):
        own = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        scores = own[0] @ own[1].T
        out = scores.softmax(-1) @ own[2]
        return torch.autograd.grad(out, own, grad.to(dtype)), out.detach(), scores.detach().logsumexp(-1)

    (exact, out, lse), (plain, _, _) = by_torch(torch.float64), by_torch(torch.float32)

    def errors(found):
        return [rms(x - y) for x, y in zip(found, exact, strict=True)]

    given = (q, k, v, grad, out.float(), lse.float())
    of_torch = errors(plain)
    from_zero, kept = (errors(gradients_in_terms(*given, length)) for length in (STEP, BLOCK))
    for own, other, worse in zip(from_zero, of_torch, kept, strict=True):
        assert own <= 1.5 * other < 1.5 * worse


QUERIES, KEYS = 32, 64
"""Of a block of score gradients."""


def in_fp16(x, exponent):
    """Times a power of two in fp16, and back in its own units."""
    return np.float64((x * 2.0**exponent).astype(np.float16)) * 2.0**-exponent


def exponent_of(largest):
    return TOP - int(np.floor(np.log2(largest)))


class OneTerm:
    """The kernel's roundings; score gradients have the scale of the largest one of their keys' CTA so far."""

    def operand(self, x):
        return in_fp16(x, exponent_of(np.abs(x).max()))

    def p(self, p):
        return in_fp16(p, P_EXPONENT)

    def ds(self, ds):
        found = np.empty_like(ds)
        for j in range(0, ds.shape[1], KEYS):
            largest = 0.0
            for i in range(0, ds.shape[0], QUERIES):
                block = ds[i : i + QUERIES, j : j + KEYS]
                largest = max(largest, np.abs(block).max())
                found[i : i + QUERIES, j : j + KEYS] = in_fp16(block, exponent_of(largest))
        return found


class UnscaledP(OneTerm):
    def p(self, p):
        return in_fp16(p, 0)


def to_tf32(x):
    """11 significant bits, half-way cases away from 0."""
    words = (np.float32(x).view(np.int32) + 0x1000) & np.int32(~0x1FFF)
    return words.view(np.float32).astype(np.float64)


class Tf32:
    operand = p = ds = staticmethod(to_tf32)


class Exact:
    operand = p = ds = staticmethod(lambda x: x)


def attend(rounded, q, k, v, grad):
    """O, dQ, dK and dV of one head; sums, row maxima, LSE and D are exact."""
    scale = q.shape[1] ** -0.5
    scores = q @ k.T * scale
    p = np.exp(scores - scores.max(1, keepdims=True))
    sums = p.sum(1, keepdims=True)
    lse, out = np.log(sums) + scores.max(1, keepdims=True), (p / sums) @ v
    d = (out * grad).sum(1, keepdims=True)
    q, k, v, grad = (rounded.operand(x) for x in (q, k, v, grad))
    scores = q @ k.T * scale
    unnormalised = np.exp(scores - scores.max(1, keepdims=True))
    out = rounded.p(unnormalised) @ v / unnormalised.sum(1, keepdims=True)
    p = np.exp(scores - lse)
    ds = rounded.ds(p * (grad @ v.T - d))
    return out, ds @ k * scale, ds.T @ q * scale, rounded.p(p).T @ grad


def inputs(what):
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.standard_normal((256, 64)) for _ in range(4))
    if what == "small rows":  # as small as fits
        factors = 2.0 ** -rng.uniform(0, MOST_BELOW[1] - 1, (256, 1))
        v, grad = v * factors, grad * factors[::-1]
    elif what == "small keys":
        k = k * 2.0 ** -rng.uniform(0, MOST_BELOW[1] - 1, (256, 1))
    elif what == "small elements":
        v = v * 2.0 ** -rng.uniform(0, 20, v.shape)
    elif what == "growing gradients":  # the scale changes with each block of queries
        grad = grad * 2.0 ** np.linspace(-20, 0, 256)[:, None]
    elif what == "sink":  # nearly all of P for a key whose value is 0: the rest of P is small
        q[:, 0], k[:, 0], k[0, 0], v[0] = 8.0, 0.0, 14.0, 0.0
    elif what == "heavy tails":
        q, k, v, grad = (x**3 for x in (q, k, v, grad))
    return [np.float64(np.float32(x)) for x in (q, k, v, grad)]


@pytest.mark.parametrize(
    "what",
    ["normal", "small rows", "small keys", "small elements", "growing gradients", "sink", "heavy tails"],
)
def test_one_term_is_as_exact_as_tf32(what):
    given = inputs(what)
    exact, one, tf32, unscaled = (attend(x, *given) for x in (Exact(), OneTerm(), Tf32(), UnscaledP()))
    for name, right, own, other in zip(("o", "dq", "dk", "dv"), exact, one, tf32, strict=True):
        for axis in (None, 1):  # of all, and of each row
            errors = [np.sqrt(((x - right) ** 2).mean(axis)) for x in (own, other)]
            ratio = np.median(errors[0] / errors[1])
            assert ratio <= 1.1, f"{name}: {ratio}"
    if what == "sink":
        errors = [np.sqrt(((x[0] - exact[0]) ** 2).mean()) for x in (unscaled, tf32)]
        assert errors[0] > 1.5 * errors[1], "the scale of P would not be needed"
