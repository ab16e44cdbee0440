"""The counters in GPU memory by which persistent forward kernels divide their work; see ``ForwardSchedule``.

A kernel leaves them as it found them, so launches that follow each other share them: there are some for each stream. A
CUDA graph may be replayed beside anything else, so each launch that is captured has its own.
"""

import functools
from typing import Any

import torch
from torch import Tensor

_NUMBER = 4
_REPLAYS = 2

_of_streams: dict[tuple[int, int], Tensor] = {}
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def work_counters(device: int) -> Tensor:
    """int32 (4,) for a launch on the current stream of ``device``, which is the current one."""
    key = (device, _current_stream(device))
    counters = _of_streams.get(key)
    if counters is None or _is_capturing():
        counters = torch.zeros(_NUMBER, dtype=torch.int32, device=torch.device("cuda", device))
        if not _is_capturing():
            _of_streams[key] = counters
    return counters


def replayed_tiles() -> int:
    """Work tiles that forward kernels have computed again, on all streams (but for graphs), since the process began.

    Speculation (frozen row maxima) fails only on scores that rise by 2^40 after the masked blocks. Waits for the GPU.
    """
    return sum(int(counters[_REPLAYS]) for counters in _of_streams.values())


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
