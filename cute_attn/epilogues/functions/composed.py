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
    return torch.log(input + torch.sqrt(input * input + 1))


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
    return other + softplus(input - other)


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


COMPOSED: dict[str, Callable[..., Tensor]] = {
    name: made for name, made in list(globals().items()) if inspect.isfunction(made)
}
"""By torch's names."""
