"""Gradients of fp32 in one fp16 part: as exact as with operands rounded to tf32, by simulation with exact sums.

What is simulated is the rule. The device code that follows it runs in tests/gpu/test_tf32_backward.py.
"""

import numpy as np
import pytest

from cute_attn.device.gemm_hi_lo import LARGEST_EXPONENT, P_EXPONENT
from cute_attn.device.hi_lo import MOST_BELOW, TOP

QUERIES, KEYS = 32, 64
"""Of a block."""


def to_tf32(x):
    """11 significant bits, half-way cases away from 0."""
    bits = (np.float32(x).view(np.int32) + 0x1000) & np.int32(~0x1FFF)
    return bits.view(np.float32).astype(np.float64)


def in_fp16(x, exponent):
    """Times a power of two in fp16, and back in its own units."""
    return np.float64((x * 2.0**exponent).astype(np.float16)) * 2.0**-exponent


def exponent_of(largest, top):
    return top - int(np.floor(np.log2(largest)))


class OnePart:
    """The kernel's roundings; score gradients have the scale of the largest one of their keys' CTA so far."""

    def operand(self, x):
        return in_fp16(x, exponent_of(np.abs(x).max(), TOP))

    def p(self, p):
        return in_fp16(p, P_EXPONENT)

    def ds(self, ds):
        found = np.empty_like(ds)
        for j in range(0, ds.shape[1], KEYS):
            largest = 0.0
            for i in range(0, ds.shape[0], QUERIES):
                block = ds[i : i + QUERIES, j : j + KEYS]
                largest = max(largest, np.abs(block).max())
                found[i : i + QUERIES, j : j + KEYS] = in_fp16(block, exponent_of(largest, LARGEST_EXPONENT))
        return found


class Tf32:
    """Each operand rounded to tf32."""

    operand = p = ds = staticmethod(to_tf32)


class Exact:
    operand = p = ds = staticmethod(lambda x: x)


def gradients(rounded, q, k, v, grad):
    """dQ, dK and dV of one head; LSE and D are exact."""
    scale = q.shape[1] ** -0.5
    scores = q @ k.T * scale
    p = np.exp(scores - scores.max(1, keepdims=True))
    sums = p.sum(1, keepdims=True)
    lse, out = np.log(sums) + scores.max(1, keepdims=True), (p / sums) @ v
    d = (out * grad).sum(1, keepdims=True)
    q, k, v, grad = (rounded.operand(x) for x in (q, k, v, grad))
    p = np.exp(q @ k.T * scale - lse)
    ds = rounded.ds(p * (grad @ v.T - d))
    return ds @ k * scale, ds.T @ q * scale, rounded.p(p).T @ grad


INPUTS = ("normal", "small rows", "growing gradients", "sink", "heavy tails")


def inputs(what):
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.standard_normal((256, 64)) for _ in range(4))
    if what == "small rows":  # as small as fits
        factors = 2.0 ** -rng.uniform(0, MOST_BELOW[1] - 1, (256, 1))
        v, grad = v * factors, grad * factors[::-1]
    elif what == "growing gradients":  # the scale changes with each block of queries
        grad = grad * 2.0 ** np.linspace(-20, 0, 256)[:, None]
    elif what == "sink":
        q[:, 0], k[:, 0], k[0, 0], v[0] = 8.0, 0.0, 14.0, 0.0
    elif what == "heavy tails":
        q, k, v, grad = (x**3 for x in (q, k, v, grad))
    return [np.float64(np.float32(x)) for x in (q, k, v, grad)]


@pytest.mark.parametrize("what", INPUTS)
def test_gradients_of_one_part_are_as_exact_as_tf32(what):
    given = inputs(what)
    exact, one, tf32 = (gradients(rounded, *given) for rounded in (Exact(), OnePart(), Tf32()))
    for name, right, own, other in zip(("dq", "dk", "dv"), exact, one, tf32, strict=True):
        for axis in (None, 1):  # of all, and of each row
            errors = [np.sqrt(((x - right) ** 2).mean(axis)) for x in (own, other)]
            ratio = np.median(errors[0] / errors[1])
            assert ratio <= 1.1, f"{name}: {ratio}"
