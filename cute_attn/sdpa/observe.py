"""What a program's attention calls are, which of them kernels serve, and how they compare with PyTorch's.

:class:`Observer` stands between PyTorch's dispatcher and :mod:`cute_attn.sdpa` while it is watching. Where there is no
GPU it watches ``scaled_dot_product_attention`` itself.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_attn import sdpa
from cute_attn.sdpa import state

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(slots=True)
class Row:
    """Calls of one operator with one signature.

    Attributes:
        operator: PyTorch's.
        signature: shapes and options as text.
        reason: why PyTorch computes it, or None.
        calls: how many.
        ours_us, pytorch_us: microseconds of each shadowed call.
        difference: the largest between both results, in float32, as a share of PyTorch's largest value; None where
            nothing was compared.
    """

    operator: str
    signature: str
    reason: str | None
    calls: int = 0
    ours_us: list[float] = field(default_factory=list)
    pytorch_us: list[float] = field(default_factory=list)
    difference: float | None = None

    @property
    def gain_us(self) -> float | None:
        """What all calls gain, from the shadowed ones' means; None without any."""
        if not self.ours_us or not self.pytorch_us:
            return None
        means = (sum(times) / len(times) for times in (self.pytorch_us, self.ours_us))
        return self.calls * (next(means) - next(means))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("operator", "signature", "reason", "calls", "ours_us", "pytorch_us", "difference", "gain_us")
        return {name: getattr(self, name) for name in names}


class Observer:
    """Counts calls by signature and compares some with PyTorch's.

    A shadowed call is computed by both, after a call of each that is not timed; what it draws from a generator does not
    count. Within CUDA graph capture, with dropout, whose masks differ, and of operators that write into an argument
    nothing is compared.

    Attributes:
        shadow: how many calls of each signature to compare.
        rows: by operator and signature.
    """

    def __init__(self, shadow: int = 0) -> None:
        """shadow: as above."""
        self.shadow = shadow
        self.rows: dict[tuple, Row] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch PyTorch's operators while :mod:`cute_attn.sdpa` is active."""
        state.observer = self
        try:
            yield
        finally:
            state.observer = None

    def __call__(
        self,
        name: str,
        implementation: Callable[..., Any],
        options: Any,
        stock: Callable[..., Any] | None,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """A call's outputs, or the reason why they are PyTorch's to compute; stock: PyTorch's kernel."""
        given = inspect.signature(implementation).bind(options, *args, **kwargs).arguments
        given.pop("options")
        row = self.row(name, given)
        row.calls += 1
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        own = lambda: implementation(options, *args, **kwargs)  # noqa: E731
        unlike = given.get("dropout_p") or name.endswith("inplace") or _capturing(tensors[0])
        if row.calls > self.shadow or stock is None or unlike:
            found = own()
        else:
            found = self._both(row, own, lambda: stock(*args, **kwargs), tensors[0].device)
        row.reason = found if isinstance(found, str) else None
        return found

    def row(self, name: str, given: dict[str, Any]) -> Row:
        """The row of a call with these arguments by name."""
        text = describe(given)
        return self.rows.setdefault((name, text), Row(name, text, None))

    def _both(self, row: Row, own: Callable[[], Any], stock: Callable[[], Any], device: torch.device) -> Any:
        found = own()
        if isinstance(found, str):
            return found
        with _generator_kept(device), contextlib.suppress(RuntimeError):  # PyTorch may have no such kernel
            theirs = stock()
            row.difference = max(row.difference or 0.0, difference(found, theirs))
            row.ours_us.append(_microseconds(own, device))
            row.pytorch_us.append(_microseconds(stock, device))
        return found


def describe(given: dict[str, Any]) -> str:
    """Shapes and options of an operator's arguments by name, as text."""
    q = given["query"]
    words = [_SHORT.get(q.dtype, str(q.dtype)), "x".join(map(str, q.shape))]
    words += [f"{name[0]} {'x'.join(map(str, given[name].shape))}" for name in ("key", "value")]
    if given.get("attn_bias") is not None:
        bias = given["attn_bias"]
        sizes = (1 if step == 0 else size for size, step in zip(bias.shape, bias.stride(), strict=True))
        words.append(f"bias {_SHORT.get(bias.dtype, bias.dtype)} {'x'.join(map(str, sizes))}")
    if given.get("cum_seq_q") is not None:
        words.append(f"{given['cum_seq_q'].shape[0] - 1} sequences")
    if given.get("is_causal"):
        words.append("causal")
    for name in ("dropout_p", "window_size_left", "window_size_right"):
        if given.get(name) not in (None, -1, 0.0):
            words.append(f"{name} {given[name]}")
    for name in ("seqused_k", "alibi_slopes", "block_table"):
        if given.get(name) is not None:
            words.append(name)
    return ", ".join(words)


def difference(ours: Any, theirs: Any) -> float:
    """The largest between floating tensors of q's dtype, in float32, as a share of the largest value of ``theirs``."""
    first = ours[0] if isinstance(ours, tuple) else ours
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    worst = 0.0
    for a, b in pairs:
        if isinstance(a, Tensor) and a.dtype == first.dtype and a.shape == b.shape and a.numel():
            largest = float(b.float().abs().max()) or 1.0
            worst = max(worst, float((a.float() - b.float()).abs().max()) / largest)
    return worst


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    """torch's generator of ``device`` has its state again afterwards."""
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
    """Of one call; waits for the GPU."""
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


class FunctionObserver(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention where no operator can be served.

    Attributes:
        observer: keeps the rows.
    """

    def __init__(self, observer: Observer) -> None:
        """observer: as above."""
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Note a call, then make it."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        given = {"query": query, "key": key, "value": value, "attn_bias": attn_mask}
        row = self.observer.row(
            "scaled_dot_product_attention", given | {"dropout_p": dropout_p, "is_causal": is_causal}
        )
        row.calls += 1
        row.reason = sdpa.reason(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
