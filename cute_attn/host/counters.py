"""The counters in GPU memory by which persistent forward kernels claim work tiles; see ``ForwardSchedule``.

A kernel resets them at its end, so all launches of a stream use the same ones. A CUDA graph may be
replayed concurrently with other launches, so each captured launch has separate ones.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

from cute_attn.host.slots import array

_NUMBER = 4
_REPLAYS = 2

_of_streams: dict[tuple[int, int], tuple[Tensor, Any]] = {}
"""By device and stream: counters, and the schedule that contains them."""
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def schedule(device: int) -> Any:
    """A ``ForwardSchedule`` for a launch on the current stream of ``device``, as a launching function takes it.

    device: the current device.
    """
    if _is_capturing():
        zeros = torch.zeros(_NUMBER, dtype=torch.int32, device=torch.device("cuda", device))
        return zeros, multiprocessors(device)
    key = (device, _current_stream(device))
    found = _of_streams.get(key)
    if found is None:
        counters = _allocate(device)
        made = array((tvm_ffi.from_dlpack(counters), multiprocessors(device)))
        found = _of_streams.setdefault(key, (counters, made))
    return found[1]


def _allocate(device: int) -> Tensor:
    """Counters of zeros, ready for any stream.

    Allocates in a separate thread, because a thread that warms up a CUDA graph allocates from the graph's pool, where
    torch accepts no memory that outlives the graph's run.
    """

    def allocate() -> Tensor:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            counters = torch.zeros(_NUMBER, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()
            return counters

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def replayed_tiles() -> int:
    """Work tiles that forward kernels have replayed since the process began, on all streams, CUDA graphs excluded.

    A tile is replayed where a row's sum exceeds 2^40 under its stale maximum. Waits for the GPU.
    """
    known = list(_of_streams.values())  # other threads add to it
    return sum(int(counters[_REPLAYS]) for counters, _ in known)


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_bytes(device: int) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
