"""State of all drop-ins: the number of calls of each, functions that watch calls, and why a call is not served."""

import contextlib
import functools
import os
import threading
import warnings
from collections import Counter
from typing import Any

import torch

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.compiler.registry import Unsupported as Unsupported
from cute_attn.host.call import Call
from cute_attn.host.record import thread


class Served(Counter[tuple[str, str]]):
    """Call counts to which several threads may add at the same time.

    Keys are (door, reason why no kernel of this package ran, or ""). A door is the name of a PyTorch operator or of a
    drop-in function: ``transformers.attention_forward``, or ``flash_attn.flash_attn_func`` and its siblings, including
    private functions and those of ``flash_attn_3``. Calls of these functions in compiled code are not counted. Calls
    with packed qkv or kv count as calls with separate tensors, calls of the extension ``flash_attn_2_cuda`` as calls of
    private functions.
    """

    lock = threading.Lock()
    """Guards all call counters."""

    def add(self, door: str, reason: str = "") -> None:
        """Count a call, and later each call that repeats it from a record."""
        with self.lock:
            self[door, reason] += 1
        if thread.recording is not None:
            thread.recording.counts.append((self, (door, reason)))


os.register_at_fork(after_in_child=Served.lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


served = Served()
"""The calls of this process."""

observer: Any = None
"""The :class:`cute_attn.sdpa.observe.Observer` while it watches: called with PyTorch's calls, and notes others."""


def note(door: str, given: dict[str, Any]) -> None:
    """Count a call of one of our functions, except in compiled code. given: its arguments, query among them."""
    if torch.compiler.is_compiling():
        return
    query = given["query"]
    reason = "" if query.is_cuda else f"query is on {query.device}, where the reference computes it"
    served.add(door, reason)
    if observer is not None:
        observer.note(door, given, reason)


# ---- activation ----


def why_nothing_is_served() -> str | None:
    """Why no call can be served on this machine, as one sentence, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device; accepted: a GPU of compute capability 8.x, 9.x, 10.x or 12.x"
    try:
        compiler.default_target("sm90")
    except ValueError as error:
        return str(error)
    return compiler.why_no_kernels()


def why_no_kernel(call: Call, target: str, op: str) -> str | None:
    """Why no kernel built for ``target`` computes ``op``, "forward" or "backward", of a call; None where one does."""
    bias_grad = op == "backward" and call.bias is not None
    kinds = [call.traits(arch, op=op, bias_grad=bias_grad) for arch in registry.generations(target)]
    reasons = [_declined(traits, target) for traits in kinds]
    return None if None in reasons else "; ".join(map(str, reasons))


@functools.lru_cache(maxsize=1024)
def _declined(traits: Any, target: str) -> str | None:
    try:
        registry.lookup(traits, None, target)
    except Unsupported as error:
        return str(error)
    return None


@functools.cache
def target_of(device: torch.device) -> str:
    """:func:`cute_attn.compiler.default_target`, or empty where that raises; "sm90" without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "sm90"
    with torch.cuda.device(device), contextlib.suppress(ValueError):
        return compiler.default_target("sm90")
    return ""


_warned: set[str] = set()


def warn_once(what: str, text: str) -> None:
    """Warn the caller's caller, once per ``what``."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, stacklevel=3)
