"""Pointwise functions of torch that are composed of other functions, written as torch code on traced values.

Each has torch's name, parameters and values. Its derivative follows from the derivatives of its operations. So where
the function is finite, no operation may be infinite, unless ``torch.where`` chooses the other branch there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)
        return 0.5 * input * (1 + torch.tanh(inner))
    return 0.5 * input * (1 + torch.erf(input * math.sqrt(0.5)))


def _up_to(input: Tensor, limit: float = 0.0) -> Tensor:
    """The input, or 0 above the limit, where another branch is chosen: its exponential has a finite derivative."""
    return torch.where(input > limit, 0.0, input)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = input * beta
    return torch.where(x > threshold, input, torch.log1p(torch.exp(_up_to(x, threshold))) / beta)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, alpha * torch.expm1(_up_to(input)))


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """The input between the bounds; at a bound the derivative is 0, unlike the derivative of clamp."""
    return torch.where(input >= max_val, max_val, torch.where(input <= min_val, min_val, input))


def _float(x: Any) -> Any:
    return 1.0 * x if isinstance(x, Tensor) and not x.is_floating_point() else x


def _of_floats(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its integers converted to floats first: integer arithmetic would wrap."""
    return lambda *inputs, **options: function(*map(_float, inputs), **options)


def _asinh(input: Tensor) -> Tensor:
    size = torch.where(input < 0, -input, input)
    square = size * size
    found = torch.log1p(size + square / (1 + torch.sqrt(1 + square)))
    return torch.where(input < 0, -found, found)


def _logaddexp(input: Tensor, other: Tensor) -> Tensor:
    distance = torch.where(input == other, 0.0, input - other)  # 0 for two equal infinities
    return torch.maximum(input, other) + torch.log1p(torch.exp(-torch.abs(distance)))


def _atan2(input: Tensor, other: Tensor) -> Tensor:
    steep = torch.abs(input) > torch.abs(other)
    above, below = torch.where(steep, other, input), torch.where(steep, input, other)
    angle = torch.atan(above / torch.where(below == 0, 1.0, below))
    half = _copysign(math.pi / 2 * torch.ones_like(angle), input)
    flat = torch.where(torch.signbit(other), angle + 2 * half, angle)
    return torch.where(steep, half - angle, flat)


def _copysign(input: Tensor, other: Any) -> Tensor:
    size = torch.abs(_float(input))
    if not isinstance(other, Tensor):
        return size if math.copysign(1, other) > 0 else -size
    return torch.where(torch.signbit(other), -size, size)


def _addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    if input.is_floating_point():
        tensor1, tensor2 = _float(tensor1), _float(tensor2)
    return input + value * tensor1 * tensor2


def _isclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    distance = torch.abs(input - other)
    found = (input == other) | ((distance < math.inf) & (distance <= atol + torch.abs(rtol * other)))
    return found | ((input != input) & (other != other)) if equal_nan else found


def _logit(input: Tensor, eps: float | None = None) -> Tensor:
    x = input if eps is None else torch.clamp(input, eps, 1 - eps)
    return torch.log(x / (1 - x))


def _nan_to_num(
    input: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not input.is_floating_point():
        return input
    ends = torch.finfo(input.dtype)
    finite = torch.where(input == math.inf, ends.max if posinf is None else posinf, input)
    finite = torch.where(input == -math.inf, ends.min if neginf is None else neginf, finite)
    return torch.where(input != input, 0.0 if nan is None else nan, finite)


def _sinc(input: Tensor) -> Tensor:
    x = input * math.pi
    near = torch.abs(x) < 0.05  # where the derivative of the quotient is a difference of large numbers
    square, x = x * x, torch.where(near, 1.0, x)
    return torch.where(near, 1 - square / 6 + square * square / 120, torch.sin(x) / x)


def _xlogy(input: Tensor, other: Tensor) -> Tensor:
    none = (input == 0) & (other <= 0)
    return torch.where(none, 0.0, input * torch.log(torch.where(none, 1.0, other)))


def _xlog1py(input: Tensor, other: Tensor) -> Tensor:
    none = (input == 0) & (other <= -1)
    return torch.where(none, 0.0, input * torch.log1p(torch.where(none, 0.0, other)))


def _entr(input: Tensor) -> Tensor:
    seen = input > 0
    return torch.where(input < 0, -math.inf, -input * torch.log(torch.where(seen, input, 1.0)))


COMPOSED: dict[str, Callable[..., Tensor]] = {
    # activations
    "silu": lambda input, inplace=False: input * torch.sigmoid(input),
    "gelu": _gelu,
    "softplus": _softplus,
    "logsigmoid": lambda input: -_softplus(-input),
    "mish": lambda input, inplace=False: input * torch.tanh(_softplus(input)),
    "elu": _elu,
    "selu": lambda input, inplace=False: 1.0507009873554805 * _elu(input, 1.6732632423543772),
    "celu": lambda input, alpha=1.0, inplace=False: torch.where(
        input > 0, input, alpha * torch.expm1(_up_to(input) / alpha)
    ),
    "leaky_relu": lambda input, negative_slope=0.01, inplace=False: torch.where(
        input > 0, input, input * negative_slope
    ),
    "prelu": lambda input, weight: torch.where(input > 0, input, weight.squeeze() * input),
    "relu6": lambda input, inplace=False: _hardtanh(input, 0, 6),
    "hardtanh": _hardtanh,
    "hardsigmoid": lambda input, inplace=False: _hardtanh(input + 3, 0, 6) / 6,
    "hardswish": lambda input, inplace=False: input * _hardtanh(input + 3, 0, 6) / 6,
    "hardshrink": lambda input, lambd=0.5: torch.where(torch.abs(input) > lambd, input, 0.0),
    "softshrink": lambda input, lambd=0.5: input - torch.clamp(input, -lambd, lambd),
    "tanhshrink": lambda input: input - torch.tanh(input),
    "softsign": lambda input: input / (1 + torch.abs(input)),
    "threshold": lambda input, threshold, value, inplace=False: torch.where(input > threshold, input, value),
    "relu": lambda input, inplace=False: torch.where(input <= 0, 0, input),  # NaN stays NaN
    # functions of one operand
    "square": lambda input: torch.pow(input, 2),
    "reciprocal": lambda input: 1.0 / input,
    "frac": lambda input: input - torch.trunc(input),
    "tan": lambda input: torch.sin(input) / torch.cos(input),
    "asin": _of_floats(lambda input: torch.atan(input / torch.sqrt((1 - input) * (1 + input)))),
    "acos": _of_floats(lambda input: 2 * torch.atan(torch.sqrt((1 - input) / (1 + input)))),
    "sinh": lambda input: 0.5 * (torch.exp(input) - torch.exp(-input)),
    "cosh": lambda input: 0.5 * (torch.exp(input) + torch.exp(-input)),
    "asinh": _of_floats(_asinh),
    "acosh": _of_floats(lambda input: torch.log(input + torch.sqrt(input * input - 1))),
    "atanh": _of_floats(lambda input: 0.5 * torch.log((1 + input) / (1 - input))),
    "erfc": lambda input: 1 - torch.erf(input),
    "log10": lambda input: torch.log2(input) * math.log10(2),
    "logit": _of_floats(_logit),
    "sinc": _sinc,
    "entr": _of_floats(_entr),
    "ndtr": lambda input: 0.5 + 0.5 * torch.erf(input * math.sqrt(0.5)),
    "deg2rad": lambda input: input * (math.pi / 180),
    "rad2deg": lambda input: input * (180 / math.pi),
    "isnan": lambda input: input != input,
    "isinf": lambda input: torch.abs(input) == math.inf,
    "isfinite": lambda input: torch.abs(input) < math.inf,
    "isposinf": lambda input: input == math.inf,
    "isneginf": lambda input: input == -math.inf,
    "nan_to_num": _nan_to_num,
    # functions of several operands
    "hypot": _of_floats(lambda input, other: torch.sqrt(input * input + other * other)),
    "logaddexp": _logaddexp,
    "logaddexp2": lambda input, other: _logaddexp(input * math.log(2), other * math.log(2)) / math.log(2),
    "lerp": lambda input, end, weight: input + weight * (end - input),
    "addcmul": _addcmul,
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: input + value * _float(tensor1) / tensor2,
    "masked_fill": lambda input, mask, value: torch.where(mask, value, input),
    "atan2": _of_floats(_atan2),
    "copysign": _copysign,
    "fmax": lambda input, other: torch.where((input >= other) | (other != other), input, other),
    "fmin": lambda input, other: torch.where((input <= other) | (other != other), input, other),
    "float_power": lambda input, exponent: torch.pow(input.double(), exponent),
    "heaviside": lambda input, values: torch.where(input == 0, values, (input > 0).to(values.dtype)),
    "isclose": _of_floats(_isclose),
    "ldexp": lambda input, other: input * torch.exp2(other),
    "xlogy": _xlogy,
    "xlog1py": _xlog1py,
}
COMPOSED |= {
    f"arc{name[1:]}": COMPOSED[name] for name in ("asin", "acos", "atan2", "asinh", "acosh", "atanh")
}
"""Functions by torch's names."""
