"""Common to all drop-ins: the number of calls through each, and who watches them."""

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.compiler import default_target, why_no_kernels
from cute_attn.host.record import thread


class Served(Counter[tuple[str, str]]):
    """Counts that threads add to at the same time.

    Keys are (door, "" or why no kernel of this package ran). A door is the name of a PyTorch operator or of a function
    here: ``transformers.attention_forward``, or ``flash_attn.flash_attn_func`` and its siblings, also private ones and
    the ones of ``flash_attn_3``. Calls of these functions in compiled code are not counted. Calls with packed qkv or kv
    count as calls with separate tensors, calls of the extension ``flash_attn_2_cuda`` as calls of private functions.
    """

    lock: threading.Lock
    """Guards all counters of calls; not to be kept, since a forked process has another."""

    def add(self, door: str, reason: str = "") -> None:
        """One more call, also of each that repeats it from a record."""
        with self.lock:
            self[door, reason] += 1
        if thread.recording is not None:
            thread.recording.counts.append((self, (door, reason)))


def _new_lock() -> None:
    Served.lock = threading.Lock()


_new_lock()
os.register_at_fork(after_in_child=_new_lock)  # another thread may have held it


served = Served()
"""The calls of this process."""

observer: Callable[..., Any] | None = None
"""Set by :mod:`cute_attn.sdpa.observe` while it watches how PyTorch's operators are called."""

watcher: Callable[[str, dict[str, Any], str], None] | None = None
"""The same for all other doors; called with the door, its arguments by name and why no kernel ran, or ""."""


def note(door: str, given: dict[str, Any]) -> None:
    """Count a call of one of our functions, except in compiled code. given: its arguments, query among them."""
    if torch.compiler.is_compiling():
        return
    query = given["query"]
    reason = "" if query.is_cuda else f"query is on {query.device}, where the reference computes it"
    served.add(door, reason)
    if watcher is not None:
        watcher(door, given, reason)


# ---- activation ----


def why_nothing_is_served() -> str | None:
    """Why no call can be served on this machine, as one sentence, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device; accepted: a GPU of compute capability 8.x, 9.x, 10.x or 12.x"
    try:
        default_target("sm90")
    except ValueError as error:
        return str(error)
    return why_no_kernels()


_warned: set[str] = set()


def warn_once(what: str, text: str) -> None:
    """Warn the caller's caller, once per ``what``."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, stacklevel=3)
