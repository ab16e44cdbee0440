"""fp32 numbers as fp16 parts: x * 2^e = hi + lo, or hi alone, with one power of two for a whole tensor.

hi = fp16(x * 2^e) and lo = fp16(x * 2^e - hi) have 11 significant bits each. 2^e puts the tensor's largest element
between 2^14 and 2^15; then hi + lo is x * 2^e to 2^-23 of itself down to 2^-1, and below that to 2^-25. So a row of the
tensor keeps fp32's precision as long as its largest element is not far below the tensor's: ``fits`` has the limit. A
product of two such numbers is hi hi + hi lo + lo hi; what is left out, lo lo, is 2^-24 of it. Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341, have the products of parts and the scale by a power of two.

hi alone has the 11 significant bits of tf32, for elements down to 2^-14: 2^-28 of the tensor's largest. Smaller ones
err by 2^-25 at most, which is 2^-15 of their row's largest element where that is 2^-10 or more: ``fits``' limit.

Magnitudes are the bits of |x|, which as integers have the order of |x|; those of inf and NaN are the largest.
"""

from cutlass import Boolean, Float16, Float32, Int32, cute

TOP = 14
"""The exponent of a tensor's largest element after the scale."""
MOST_BELOW = {2: 13, 1: 24}
"""Parts -> by how many powers of two the largest element of a row may be below the tensor's."""
MOST_SCALE = 48
"""The largest |e|: products of two scales, and their inverses, then are normal fp32 numbers."""
NO_ROW = 0x7FFFFFFF
"""In place of the smallest row's magnitude, for a tensor of zeros."""
_BIAS, _MANTISSA_BITS = 127, 23


def magnitude(x: Float32) -> Int32:
    """The bits of |x|."""
    return x.bitcast(Int32) & Int32(0x7FFFFFFF)


@cute.jit
def scale_exponent(largest: Int32) -> Int32:
    """e, of the magnitude of a tensor's largest element; 0 for a tensor of zeros."""
    return Int32(0) if largest == 0 else TOP + _BIAS - (largest >> _MANTISSA_BITS)


def fits(largest: Int32, smallest: Int32, parts: int) -> Boolean:
    """Whether a tensor keeps the precision of fp32 in two parts, or of tf32 in one.

    Args:
        largest: the magnitude of its largest element.
        smallest: of the row that has the smallest largest element, rows of zeros aside; or ``NO_ROW``.
        parts: 1 or 2.
    """
    exponent = scale_exponent(largest)
    near = (smallest >> _MANTISSA_BITS) + MOST_BELOW[parts] >= (largest >> _MANTISSA_BITS)
    return (exponent <= MOST_SCALE) & (exponent >= -MOST_SCALE) & near


def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, for exponents of normal numbers."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).bitcast(Float32)


def inverse_of_power_of_two(power: Float32) -> Float32:
    """1 / 2^e, for exponents of normal numbers."""
    return (Int32(2 * _BIAS << _MANTISSA_BITS) - power.bitcast(Int32)).bitcast(Float32)


def hi_lo(x: Float32) -> tuple[Float16, Float16]:
    """The parts of a number that has been scaled."""
    hi = Float16(x)
    return hi, Float16(x - Float32(hi))
