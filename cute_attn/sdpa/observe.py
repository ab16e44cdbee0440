"""A program's attention calls, which of them kernels serve, and how they compare with PyTorch's.

While watching, :class:`Observer` stands between PyTorch's functions and :mod:`cute_attn.sdpa` and
:mod:`cute_attn.flex`. The other entry points, :mod:`cute_attn.transformers` and :mod:`cute_attn.flash_attn`, report
calls to the observer. Without a GPU the observer watches ``scaled_dot_product_attention`` itself.
"""

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function

from cute_attn import sdpa
from cute_attn.host import doors
from cute_attn.sdpa.calls import _is_capturing

Run = Callable[..., Any]
_NAME = "scaled_dot_product_attention"
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(slots=True)
class Row:
    """Calls of one operator with one signature.

    Attributes:
        signature: shapes and options as text.
        reason: why no kernel here computes these calls, or None.
        uncompared: why no call was compared with PyTorch's kernel.
        ours_us, pytorch_us: microseconds of each shadowed call.
        difference: maximum difference of both results, in float32, relative to PyTorch's largest value; None if no
            call was compared.
    """

    operator: str
    signature: str
    reason: str | None
    uncompared: str = ""
    calls: int = 0
    ours_us: list[float] = field(default_factory=list)
    pytorch_us: list[float] = field(default_factory=list)
    difference: float | None = None

    @property
    def gain_us(self) -> float | None:
        """Microseconds gained over all calls, from the mean times of shadowed calls; None if no call was shadowed."""
        if not self.ours_us or not self.pytorch_us:
            return None
        means = (sum(times) / len(times) for times in (self.pytorch_us, self.ours_us))
        return self.calls * (next(means) - next(means))

    @property
    def gain(self) -> str:
        """The gain per call as text, or why there is none, or why it is unknown."""
        if self.reason is not None:
            return f"nothing: {self.reason}"
        if self.gain_us is None:
            return f"unknown: {self.uncompared}"
        theirs = sum(self.pytorch_us) / len(self.pytorch_us)
        us = self.gain_us / self.calls
        return f"{us:.1f} us of {theirs:.1f}" if us > 0 else f"nothing: PyTorch's is {-us:.1f} us faster"

    def as_dict(self) -> dict[str, Any]:
        """The row as a dictionary for JSON."""
        names = "operator signature reason calls ours_us pytorch_us difference gain_us gain"
        return {name: getattr(self, name) for name in names.split()}


class Observer:
    """Counts calls by signature and compares some of them with PyTorch's kernels.

    A shadowed call runs twice here and twice in PyTorch: the first runs give the results, the second ones are timed.
    The generator's state is restored. Calls are not compared within CUDA graph capture, with dropout (masks differ), if
    the operator writes into an argument, or if a program calls this package by name. Watching never makes it fail.

    Attributes:
        shadow: how many calls of each signature to compare.
        rows: rows by operator and signature.
    """

    def __init__(self, shadow: int = 0) -> None:
        self.shadow = shadow
        self.rows: dict[tuple, Row] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch PyTorch's operators while :mod:`cute_attn.sdpa` is active, and the other entry points."""
        doors.observer = self
        try:
            yield
        finally:
            doors.observer = None

    @contextlib.contextmanager
    def watching_functions(self) -> Iterator[None]:
        """Watch ``scaled_dot_product_attention`` and the other entry points if no operator can be served.

        The function is replaced, since a mode would not see calls made inside functions that modes see, such as
        ``F.multi_head_attention_forward``. The fast path for whole layers is disabled, so that modules call it.
        """
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        _install(self._function)
        try:
            with self.watching():
                yield
        finally:
            _remove()
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def __call__(
        self, name: str, implementation: Run, options: Any, stock: Run | None, args: tuple, kwargs: dict
    ) -> Any:
        """A call's outputs, or the reason why PyTorch computes it; stock: PyTorch's kernel."""
        given = inspect.signature(implementation).bind(options, *args, **kwargs).arguments
        given.pop("options")
        row, count = self._counted(name, given)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        own = lambda: implementation(options, *args, **kwargs)  # noqa: E731
        unlike = _incomparable(name, given, tensors[0], stock)
        if unlike or count > self.shadow:
            found = own()
            row.uncompared = unlike or row.uncompared or "no call was shadowed (--shadow N)"
        else:
            found = self._both(row, own, lambda: stock(*args, **kwargs), tensors[0].device)  # type: ignore[misc]
        row.reason = found if isinstance(found, str) else None
        return found

    def note(self, door: str, given: dict[str, Any], reason: str | None) -> None:
        """Count a call that is not made by an operator of PyTorch. reason: why no kernel computes it, or empty."""
        row, _ = self._counted(door, given)
        row.reason = reason or None
        row.uncompared = "it is made here by name, and PyTorch has no such call"

    def _counted(self, name: str, given: dict[str, Any]) -> tuple[Row, int]:
        """The row of a call with these named arguments, and the row's number of calls including this call."""
        try:
            text = describe(given)
        except Exception as error:  # a tensor that is no ordinary one
            text = f"not described: {type(error).__name__}"
        with doors.served.lock:
            row = self.rows.setdefault((name, text), Row(name, text, None))
            row.calls += 1
            return row, row.calls

    def _function(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Call scaled_dot_product_attention, and note the call unless it is compiled or traced."""
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # traces record reads of shapes
            return _pytorchs(query, key, value, attn_mask, dropout_p, is_causal, **options)
        given = {"query": query, "key": key, "value": value, "attn_bias": attn_mask}
        try:
            reason = sdpa.reason(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[arg-type]
        except Exception as error:  # as in _counted; wrong arguments are PyTorch's to name
            reason = f"its tensors cannot be read: {type(error).__name__}"
        self.note(_NAME, given | {"dropout_p": dropout_p, "is_causal": is_causal}, reason)
        return _by_pytorch(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def _both(self, row: Row, own: Callable[[], Any], stock: Callable[[], Any], device: torch.device) -> Any:
        found = own()
        if isinstance(found, str):
            return found
        row.uncompared = "PyTorch has no kernel for it"
        with _generator_kept(device), contextlib.suppress(RuntimeError):
            theirs = stock()
            row.difference = max(row.difference or 0.0, difference(found, theirs))
            row.ours_us.append(_microseconds(own, device))
            row.pytorch_us.append(_microseconds(stock, device))
        return found


# ---- PyTorch's function, replaced ----

_pytorchs: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""PyTorch's function, also while it is replaced."""
_installed: Callable[..., Tensor] | None = None


def _install(function: Callable[..., Tensor]) -> None:
    """Replace PyTorch's function by one with the same arguments, unless it has been replaced already."""
    global _installed
    if F.scaled_dot_product_attention is _pytorchs:
        _installed = F.scaled_dot_product_attention = function
        torch.jit._builtins._register_builtin(_installed, f"aten::{_NAME}")


def _remove() -> None:
    """Put PyTorch's function back. Modules that imported the replacement keep it, and it calls PyTorch's."""
    global _installed
    own, _installed = _installed, None
    if own is not None and F.scaled_dot_product_attention is own:
        F.scaled_dot_product_attention = _pytorchs


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Call PyTorch's function, put back during the call if overrides may see it: they compare functions by identity."""
    own = F.scaled_dot_product_attention
    seen = _function_modes() or has_torch_function((query, key, value, mask))
    if not seen or own is not _installed:
        return _pytorchs(query, key, value, mask, *args, **kwargs)
    F.scaled_dot_product_attention = _pytorchs
    try:
        return _pytorchs(query, key, value, mask, *args, **kwargs)
    finally:
        if own is _installed:
            F.scaled_dot_product_attention = own


_function_modes = torch._C._len_torch_function_stack


# ---- a call ----


def _incomparable(name: str, given: dict[str, Any], first: Tensor, stock: Any) -> str:
    """Why a call is not compared with PyTorch's, or empty."""
    if given.get("dropout_p"):
        return "dropout masks differ"
    if name.endswith("inplace"):
        return "it writes into an argument"
    if _is_capturing(first.device):
        return "it was captured in a CUDA graph"
    return "PyTorch has no kernel for it" if stock is None else ""


def describe(given: dict[str, Any]) -> str:
    """Shapes and options of an operator's arguments by name, as text."""
    q = given["query"]
    words = [_SHORT.get(q.dtype, str(q.dtype)), _sizes(q)]
    words += [f"{name[0]} {_sizes(given[name])}" for name in ("key", "value")]
    if given.get("attn_bias") is not None:
        words.append(f"bias {_SHORT.get(given['attn_bias'].dtype, given['attn_bias'].dtype)} ")
        words[-1] += _sizes(given["attn_bias"], narrow=True)
    if given.get("cum_seq_q") is not None:
        words.append(f"{given['cum_seq_q'].shape[0] - 1} sequences")
    if given.get("is_causal"):
        words.append("causal")
    for name in ("dropout_p", "window_size_left", "window_size_right", "softcap"):
        if given.get(name) not in (None, -1, 0.0):
            words.append(f"{name} {given[name]}")
    for name in ("seqused_k", "alibi_slopes", "block_table", "score_mod", "block_mask"):
        if given.get(name) is not None:
            words.append(name)
    return ", ".join(words)


def _sizes(x: Tensor, narrow: bool = False) -> str:
    """A tensor's sizes as text. narrow: dimensions of stride 0 count as 1."""
    if x.is_nested:
        return f"{x.size(0)} nested"
    steps = x.stride() if narrow else x.shape
    return "x".join(
        str(1 if step == 0 and narrow else size) for size, step in zip(x.shape, steps, strict=True)
    )


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two results, in float32, relative to the largest value of PyTorch's, ``theirs``.

    Only tensors of the first output's dtype are compared. The difference is infinite if only ours is NaN, or only one
    is infinite. Elements that are NaN in ``theirs`` are skipped.
    """
    first = ours[0] if isinstance(ours, tuple) else ours
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    worst = 0.0
    for a, b in pairs:
        if isinstance(a, Tensor) and a.dtype == first.dtype and a.shape == b.shape and a.numel():
            a, b = a.float(), b.float()
            apart = torch.where((a == b) | b.isnan(), 0.0, a - b).abs().nan_to_num_(math.inf, math.inf)
            largest = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
            worst = max(worst, float(apart.max()) / largest)
    return worst


@contextlib.contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's generator of ``device`` on exit."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        offset = generator.get_offset()
        try:
            yield
        finally:
            generator.set_offset(offset)
    else:
        with torch.random.fork_rng(devices=[]):
            yield


def _microseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Time of one call of ``run``; waits for the GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) * 1e3
