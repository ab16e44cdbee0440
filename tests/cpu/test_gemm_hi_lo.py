"""Products of fp32 numbers in two fp16 parts: the split, the scale of score gradients, and the precision of gradients.

Tensor cores are modelled: products exact, terms cut off two bits below fp32's last one of the largest, sums rounded
toward zero. Where a kernel reads its operands is tested with the kernels.
"""

import math

import cutlass
import numpy as np
import torch
from cutlass import Float32, Int32, cute

from cute_attn.device.gemm_hi_lo import LARGEST_EXPONENT, MOST_EXPONENT, P_EXPONENT, scale_of, split
from layouts.host import run_on_host

BLOCK = 64
STEP = 16


@cute.jit
def write_scales(bits: cutlass.Constexpr, out: cute.Tensor):
    for i in cutlass.range_constexpr(len(bits)):
        scale, inverse = scale_of(Int32(bits[i]))
        out[i, 0], out[i, 1] = scale.bitcast(Int32), inverse.bitcast(Int32)


def test_the_largest_score_gradient_is_scaled_to_the_same_size():
    numbers = np.array([1.0, 1.999, 3e-9, 7e12, 2.0**-64, 2.0**92, 2.0**-90, 1e-42, 0.0], np.float32)
    found = run_on_host(
        lambda out: write_scales(tuple(map(int, numbers.view(np.int32))), out), len(numbers), 2
    )
    scale, inverse = (found[:, i].astype(np.int32).view(np.float32).astype(np.float64) for i in range(2))
    assert np.all(scale * inverse == 1)
    exponents = np.log2(scale)
    assert np.all(exponents == np.round(exponents)) and np.all(np.abs(exponents) <= MOST_EXPONENT)
    scaled = numbers * scale
    assert np.all(scaled < 2.0 ** (LARGEST_EXPONENT + 1))
    assert np.all(scaled[:6] >= 2.0**LARGEST_EXPONENT)


@cute.jit
def write_parts(factor: cutlass.Constexpr, out: cute.Tensor):
    """out[i] = bits of a number, and of both parts of it in fp32."""
    words = cute.make_rmem_tensor(8, Float32)
    for first in cutlass.range(0, cute.size(out.shape[0]), 8):
        for i in cutlass.range_constexpr(8):
            bits = (Int32(0x2F000000) + (first + i) * 520_123) ^ ((first + i) << 31)
            out[first + i, 0] = bits
            words[i] = bits.bitcast(Float32)
        parts = split(words, Float32(factor))
        for i in cutlass.range_constexpr(8):
            out[first + i, 1] = Float32(parts.hi[i]).bitcast(Int32)
            out[first + i, 2] = Float32(parts.lo[i]).bitcast(Int32)


def test_two_parts_have_twenty_two_bits():
    """Of numbers from 2^-33 to 2 with a scale of 2^14: relative, or absolute where lo is below fp16's normal ones."""
    found = run_on_host(lambda out: write_parts(2.0**P_EXPONENT, out), 552, 3).astype(np.int32)
    x, hi, lo = (found[:, i].copy().view(np.float32).astype(np.float64) for i in range(3))
    assert np.abs(x).min() < 2.0**-32 and 1 < np.abs(x).max() < 4
    error = np.abs(x * 2.0**P_EXPONENT - hi - lo)
    assert np.all(error <= np.maximum(2.0**-22 * np.abs(x * 2.0**P_EXPONENT), 2.0**-25))
    assert np.any(lo != 0)


def cut(x, exponent):
    unit = torch.exp2(exponent)
    return torch.trunc(x / unit) * unit


def mma(acc, a, b):
    """acc + A B^T of a tensor core; acc fp32 (M, N), a (M, STEP), b (N, STEP)."""
    terms = a.double()[:, None] * b.double()[None]
    largest = torch.maximum(terms.abs().amax(-1), acc.double().abs())
    exponent = torch.frexp(largest)[1].double() - 26
    total = cut(terms, exponent[..., None]).sum(-1) + cut(acc.double(), exponent)
    return cut(total, torch.frexp(total)[1].double() - 24).float()


def parts_of(x, scale):
    hi = (x * scale).half()
    return hi, (x * scale - hi.float()).half()


def product(a, b, scale, length):
    """The product of A and B^T in parts whose scales multiply to ``scale``, ``length`` along K summed from zero."""
    acc = torch.zeros(a[0].shape[0], b[0].shape[0])
    for first in range(0, a[0].shape[1], length):
        total = torch.zeros_like(acc)
        for k in range(first, first + length, STEP):
            for i, j in ((1, 0), (0, 1), (0, 0)):
                total = mma(total, a[i][:, k : k + STEP], b[j][:, k : k + STEP])
        acc = acc + total / scale
    return acc


def scale_of_tensor(x):
    return 2.0 ** (14 - math.floor(math.log2(float(x.abs().max()))))


def transposed(parts):
    return tuple(x.T for x in parts)


def gradients_in_parts(q, k, v, grad, out, lse, length):
    """dQ, dK and dV of one head without a mask and with a scale of 1, as the kernel computes them."""
    scales = [scale_of_tensor(x) for x in (q, k, v, grad)]
    (q2, k2, v2, grad2), (of_q, of_k, of_v, of_grad) = map(parts_of, (q, k, v, grad), scales), scales
    p = torch.exp(product(q2, k2, of_q * of_k, length) - lse[:, None])
    ds = p * (product(grad2, v2, of_grad * of_v, length) - (out * grad).sum(-1, keepdim=True))
    p2 = parts_of(p, 2.0**P_EXPONENT)
    dv = product(transposed(p2), transposed(grad2), 2.0**P_EXPONENT * of_grad, length)
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for i in range(0, q.shape[0], BLOCK):
        for j in range(0, k.shape[0], BLOCK):
            block, rows, keys = ds[i : i + BLOCK, j : j + BLOCK], slice(i, i + BLOCK), slice(j, j + BLOCK)
            scale = scale_of_tensor(block)
            ds2 = parts_of(block, scale)
            dq[rows] += product(ds2, transposed([x[keys] for x in k2]), scale * of_k, length)
            dk[keys] += product(transposed(ds2), transposed([x[rows] for x in q2]), scale * of_q, length)
    return dq, dk, dv


def test_gradients_in_parts_have_the_precision_of_fp32():
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
        return [float((x - y).square().mean().sqrt()) for x, y in zip(found, exact, strict=True)]

    given = (q, k, v, grad, out.float(), lse.float())
    of_torch = errors(plain)
    from_zero, kept = (errors(gradients_in_parts(*given, length)) for length in (STEP, BLOCK))
    for own, other, worse in zip(from_zero, of_torch, kept, strict=True):
        assert own <= 1.5 * other < 1.5 * worse
