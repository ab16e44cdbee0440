"""Pointwise functions of torch that are made of others, written as torch code on traced values.

Each has torch's name, parameters and values. A derivative follows from those of its operations, so none of them may
be infinite where the function is not: of two branches the other one is chosen.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.sigmoid(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)
        return 0.5 * input * (1 + torch.tanh(inner))
    return 0.5 * input * (1 + torch.erf(input * math.sqrt(0.5)))


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = input * beta
    return torch.where(x > threshold, input, torch.log1p(torch.exp(x)) / beta)


def logsigmoid(input: Tensor) -> Tensor:
    return -softplus(-input)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.tanh(softplus(input))


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, alpha * torch.expm1(input))


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    return 1.0507009873554805 * elu(input, 1.6732632423543772)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, alpha * torch.expm1(input / alpha))


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return torch.where(input > 0, input, input * negative_slope)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.clamp(input, 0, 6)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    return torch.clamp(input, min_val, max_val)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.clamp(input + 3, 0, 6) / 6


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.clamp(input + 3, 0, 6) / 6


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(torch.abs(input) > lambd, input, 0.0)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    return input - torch.clamp(input, -lambd, lambd)


def tanhshrink(input: Tensor) -> Tensor:
    return input - torch.tanh(input)


def softsign(input: Tensor) -> Tensor:
    return input / (1 + torch.abs(input))


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    return torch.where(input > threshold, input, value)


def frac(input: Tensor) -> Tensor:
    return input - torch.trunc(input)


def tan(input: Tensor) -> Tensor:
    return torch.sin(input) / torch.cos(input)


def sinh(input: Tensor) -> Tensor:
    return 0.5 * (torch.exp(input) - torch.exp(-input))


def cosh(input: Tensor) -> Tensor:
    return 0.5 * (torch.exp(input) + torch.exp(-input))


def asinh(input: Tensor) -> Tensor:
    size = torch.where(input < 0, -input, input)
    square = size * size
    found = torch.log1p(size + square / (1 + torch.sqrt(1 + square)))
    return torch.where(input < 0, -found, found)


def acosh(input: Tensor) -> Tensor:
    return torch.log(input + torch.sqrt(input * input - 1))


def atanh(input: Tensor) -> Tensor:
    return 0.5 * torch.log((1 + input) / (1 - input))


def erfc(input: Tensor) -> Tensor:
    return 1 - torch.erf(input)


def log10(input: Tensor) -> Tensor:
    return torch.log2(input) * math.log10(2)


def hypot(input: Tensor, other: Tensor) -> Tensor:
    return torch.sqrt(input * input + other * other)


def logaddexp(input: Tensor, other: Tensor) -> Tensor:
    distance = torch.where(input == other, 0.0, input - other)  # also of two infinities
    return torch.maximum(input, other) + torch.log1p(torch.exp(-torch.abs(distance)))


def logaddexp2(input: Tensor, other: Tensor) -> Tensor:
    return logaddexp(input * math.log(2), other * math.log(2)) / math.log(2)


def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    return input + weight * (end - input)


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    return input + value * tensor1 * tensor2


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    return input + value * tensor1 / tensor2


def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, value, input)


def isnan(input: Tensor) -> Tensor:
    return input != input


def isinf(input: Tensor) -> Tensor:
    return torch.abs(input) == math.inf


def isfinite(input: Tensor) -> Tensor:
    return torch.abs(input) < math.inf


def isposinf(input: Tensor) -> Tensor:
    return input == math.inf


def isneginf(input: Tensor) -> Tensor:
    return input == -math.inf


def deg2rad(input: Tensor) -> Tensor:
    return input * (math.pi / 180)


def rad2deg(input: Tensor) -> Tensor:
    return input * (180 / math.pi)


def asin(input: Tensor) -> Tensor:
    return torch.atan(input / torch.sqrt((1 - input) * (1 + input)))


def acos(input: Tensor) -> Tensor:
    return 2 * torch.atan(torch.sqrt((1 - input) / (1 + input)))


def atan2(input: Tensor, other: Tensor) -> Tensor:
    steep = torch.abs(input) > torch.abs(other)
    above, below = torch.where(steep, other, input), torch.where(steep, input, other)
    angle = torch.atan(above / torch.where(below == 0, 1.0, below))
    half = copysign(math.pi / 2 * torch.ones_like(angle), input)
    flat = torch.where(torch.signbit(other), angle + 2 * half, angle)
    return torch.where(steep, half - angle, flat)


def copysign(input: Tensor, other: Any) -> Tensor:
    size = 1.0 * torch.abs(input)
    if not isinstance(other, Tensor):
        return size if math.copysign(1, other) > 0 else -size
    return torch.where(torch.signbit(other), -size, size)


def fmod(input: Tensor, other: Any) -> Tensor:
    if torch.result_type(input, other).is_floating_point:
        return input - torch.div(input, other, rounding_mode="trunc") * other
    size = torch.abs(input) % abs(other)
    return torch.where(input < 0, -size, size)


def fmax(input: Tensor, other: Tensor) -> Tensor:
    return torch.where((input >= other) | (other != other), input, other)


def fmin(input: Tensor, other: Tensor) -> Tensor:
    return torch.where((input <= other) | (other != other), input, other)


def float_power(input: Tensor, exponent: Any) -> Tensor:
    return torch.pow(input.double(), exponent)


def heaviside(input: Tensor, values: Tensor) -> Tensor:
    return torch.where(input == 0, values, (input > 0).to(values.dtype))


def isclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    distance = torch.abs(input - other)
    found = (input == other) | ((distance < math.inf) & (distance <= atol + torch.abs(rtol * other)))
    return found | ((input != input) & (other != other)) if equal_nan else found


def ldexp(input: Tensor, other: Tensor) -> Tensor:
    return input * torch.exp2(other)


def logit(input: Tensor, eps: float | None = None) -> Tensor:
    x = input if eps is None else torch.clamp(input, eps, 1 - eps)
    return torch.log(x / (1 - x))


def nan_to_num(
    input: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not input.is_floating_point():
        return input
    ends = torch.finfo(input.dtype)
    finite = torch.where(input == math.inf, ends.max if posinf is None else posinf, input)
    finite = torch.where(input == -math.inf, ends.min if neginf is None else neginf, finite)
    return torch.where(input != input, 0.0 if nan is None else nan, finite)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    return torch.where(input > 0, input, weight.squeeze() * input)


def sinc(input: Tensor) -> Tensor:
    x = input * math.pi
    near = torch.abs(x) < 0.05  # where the derivative of the quotient is a difference of large numbers
    square, x = x * x, torch.where(near, 1.0, x)
    return torch.where(near, 1 - square / 6 + square * square / 120, torch.sin(x) / x)


def xlogy(input: Tensor, other: Tensor) -> Tensor:
    none = (input == 0) & (other <= 0)
    return torch.where(none, 0.0, input * torch.log(torch.where(none, 1.0, other)))


def xlog1py(input: Tensor, other: Tensor) -> Tensor:
    none = (input == 0) & (other <= -1)
    return torch.where(none, 0.0, input * torch.log1p(torch.where(none, 0.0, other)))


def entr(input: Tensor) -> Tensor:
    seen = input > 0
    return torch.where(input < 0, -math.inf, -input * torch.log(torch.where(seen, input, 1.0)))


def ndtr(input: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.erf(input * math.sqrt(0.5))


COMPOSED: dict[str, Callable[..., Tensor]] = {
    name: made for name, made in list(globals().items()) if inspect.isfunction(made)
}
COMPOSED |= {
    f"arc{name[1:]}": COMPOSED[name] for name in ("asin", "acos", "atan2", "asinh", "acosh", "atanh")
}
"""By torch's names."""
