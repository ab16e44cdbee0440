"""Checks of single arguments of any call. Each error is one sentence that names the argument.

:mod:`cute_attn.host.checks` checks arguments against each other.
"""

import contextlib
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from cute_attn.tiles import Tile, text_of
from cute_attn.traits import kind_of as kind_of

_MAX_SHOWN = 100


def check_dense(name: str, tensor: Any) -> None:
    """Raise TypeError unless ``tensor`` is a tensor, neither sparse nor nested."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {kind_of(tensor)}; accepted: a torch.Tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(f"{name} is {kind}; accepted: a dense torch.Tensor, of layout torch.strided")


def check_dtype(name: str, x: Tensor, *accepted: torch.dtype, of: str = "", on: str = "") -> None:
    """Raise TypeError unless x's dtype is accepted. of, on: whose dtype is required, and where, for the error."""
    if x.dtype not in accepted:
        whose = f", {of}'s" if of else ""
        raise TypeError(f"{name} has dtype {x.dtype}; accepted{on}: {', '.join(map(str, accepted))}{whose}")


def wrong_shape(name: str, x: Tensor, accepted: Any) -> ValueError:
    """The error for a tensor whose shape is not accepted."""
    return ValueError(f"{name} has shape {tuple(x.shape)}; accepted: {accepted}")


def check_present(named: Iterable[tuple[str, Any]], required: Collection[str], first: str = "q") -> None:
    """Raise for an argument that is missing, not a dense tensor, or on another device than ``first``."""
    device = None
    for name, x in sorted(named, key=lambda item: item[0] != first):
        if x is None and name not in required:
            continue
        check_dense(name, x)
        device = device or x.device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}; accepted: {device}, where {first} is")


def tensors_of(name: str, values: Any, count: int | None = None, what: str = "") -> tuple[Tensor, ...]:
    """A list or tuple of ``count`` dense tensors as a tuple; raises TypeError otherwise. what: text for the error."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} is {kind_of(values)}; accepted: a list or a tuple of tensors{what}")
    for i, x in enumerate(values):
        check_dense(f"{name}[{i}]", x)
    if count is not None and len(values) != count:
        raise TypeError(f"{name} has {len(values)} tensors; accepted: {count}{what}")
    return tuple(values)


def shown(value: Any) -> str:
    """``value`` as short text on one line, for errors. Elements of a tensor with dimensions are not read."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided or value.dim()):
        return "a nested Tensor" if value.is_nested else f"a Tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def check_flags(**values: Any) -> None:
    """Raise TypeError for an argument that is neither True nor False."""
    for name, value in values.items():
        if not is_one_of(value, (False, True)):
            raise TypeError(f"{name} is {shown(value)}; accepted: False or True")


def check_choice(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raise ValueError for an argument that is none of the accepted values."""
    if not is_one_of(value, accepted):
        raise ValueError(f"{name} is {shown(value)}; accepted: {', '.join(map(repr, accepted))}")


def is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """True if ``value`` is interchangeable with an accepted value. A tensor is not, since it may change."""
    try:  # hash() itself is nothing that torch.compile of PyTorch 2.11 can trace
        return value in frozenset(accepted)
    except TypeError:
        return False


def python_number(value: Any) -> Any:
    """A numpy number as a Python number; other values unchanged, even tensors, whose reading may wait for a device."""
    if isinstance(value, int | float | Tensor):  # first: compilers trace no attributes of their numbers
        return value
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_int(value: Any) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(name: str, value: Any) -> float:
    """A Python or numpy number as a float; raises TypeError for another value."""
    value = python_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {shown(value)}; accepted: a Python number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def scale_of(softmax_scale: Any, q: Tensor) -> float:
    """``softmax_scale`` as a float; None means the default for q's head dim."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    return number("softmax_scale", softmax_scale)


def length(name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """``value`` as an int from ``least`` to ``most``, or a compiler's symbolic int."""
    value = python_number(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} is {shown(value)}; accepted: a Python int")
    if isinstance(value, int) and not least <= value <= most:
        raise ValueError(f"{name} is {value}; accepted: {least} to {most}")
    return value  # type: ignore[return-value]


def check_device(device: Any) -> torch.device:
    """A device by its name; raises ValueError for any other value."""
    if isinstance(device, str | torch.device):
        with contextlib.suppress(RuntimeError):
            return torch.device(device)
    raise ValueError(
        f"device is {shown(device)}; accepted: a torch.device, or text such as 'cpu' or 'cuda:0'"
    )


def kernel_name(kernel: Any) -> str:
    """A call's ``kernel``, "" for None; raises TypeError unless it is a name."""
    if not isinstance(kernel, str | None):
        raise TypeError(f"kernel is {shown(kernel)}; accepted: 'ARCH', 'ARCH:VARIANT', or None")
    return kernel or ""


def tile_text(name: str, tile: Any) -> str:
    """A call's tile as text, "" for None; raises TypeError unless it is a tile or text."""
    if not isinstance(tile, Tile | str | None):
        raise TypeError(f"{name} is {shown(tile)}; accepted: a Tile, text such as 'tile_n=32', or None")
    return text_of(tile)
