"""fp32 numbers as terms: the rule, the split in registers, and the precision of products, outputs and gradients.

Precision is simulated: sums exact, or as a tensor core adds them. Where kernels read and write terms is tested with the
kernels, which run in tests/gpu.
"""

import cutlass
import numpy as np
import pytest
from cutlass import Constexpr, Float16, Float32, Int32, TFloat32, cute

from cute_attn.device.terms import (
    MOST_GRADIENT_SCALE,
    NO_ROW,
    P_EXPONENT,
    TOP,
    fits,
    power_of_two,
    products_fit,
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
    *((1.0, 1.0, (1, 2), 14), (1.999, 2.0**-13, (1, 2), 14), (1.0, 2.0**-13 * 0.999, (1,), 14)),
    *((1.999, 2.0**-24, (1,), 14), (1.0, 2.0**-24 * 0.999, (), 0), (3.0e4, 4.0, (1, 2), 0)),
    *((2.0**62, 2.0**60, (1, 2), -48), (2.0**63, 2.0**63, (), 0), (2.0**-34, 2.0**-40, (1, 2), 48)),
    *((2.0**-35, 2.0**-35, (), 0), (1e-40, 1e-40, (), 0), (0.0, None, (1, 2), 0)),
    *((np.inf, 1.0, (), 0), (np.nan, 1.0, (), 0)),
]


@cute.jit
def write_rule(largest: Int32, smallest: Int32, count: Constexpr, out: cute.Tensor):
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


# (largest and smallest of V, of dO, in how many terms score gradients fit); each tensor by itself does
PRODUCTS = [
    *(((1.0, 1.0), (1.0, 1.0), (1, 2)), ((1.0, 2.0**-8), (1.0, 2.0**-9), (1, 2))),
    *(((1.0, 2.0**-9), (1.0, 2.0**-9), (1,)), ((1.0, 2.0**-12), (1.0, 2.0**-13), ())),
    *(((2.0**48, 2.0**48), (1.0, 1.0), (1, 2)), ((2.0**25, 2.0**25), (2.0**24, 2.0**24), ())),
    *(((2.0**-24, 2.0**-24), (2.0**-25, 2.0**-25), ()), ((0.0, None), (1.0, 2.0**-13), (1, 2))),
    ((1.0, 2.0**-13), (0.0, None), (1, 2)),
]


@cute.jit
def write_products(v: Constexpr, do: Constexpr, count: Constexpr, out: cute.Tensor):
    v, do = (tuple(Int32(x) for x in magnitudes) for magnitudes in (v, do))
    out[0] = Int32(products_fit(v, do, count))


@pytest.mark.parametrize("count", [1, 2])
def test_which_score_gradients_fit(count):
    pairs = [
        [(bits(large)[0], NO_ROW if small is None else bits(small)[0]) for large, small in pair]
        for *pair, _ in PRODUCTS
    ]
    found = run_on_host(
        lambda out: [write_products(*pair, count, out[i, None]) for i, pair in enumerate(pairs)],
        *(len(pairs), 1),
    )
    assert [bool(x) for x in found[:, 0]] == [count in fitting for *_, fitting in PRODUCTS]


@cute.jit
def write_scales(largest: Constexpr, out: cute.Tensor):
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
def write_terms(dtype: Constexpr, count: Constexpr, out: cute.Tensor):
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
    """The error is relative, or absolute for an fp16 term below fp16's normal numbers."""
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
