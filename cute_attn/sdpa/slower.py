"""Calls that PyTorch's kernels compute faster than those here, with the measurements.

Kernels here support these calls, but drop-ins leave them to PyTorch until the kernels are faster.
``python -m bench.drop_ins`` measures each row again, with and without the row. Remove a row once its calls are faster
here; if only some of them are, narrow its condition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One kind of call.

    Attributes:
        kind: a description that users understand.
        applies: whether a :class:`cute_attn.sdpa.calls.Request` is of this kind.
        pytorch_ms, ours_ms: time of all attention calls of the measured program.
        measured: the program and the GPU.
    """

    kind: str
    applies: Callable[[Any], bool]
    pytorch_ms: float
    ours_ms: float
    measured: str

    @property
    def reason(self) -> str:
        """Why PyTorch computes such a call, as one sentence."""
        return (
            f"PyTorch's kernel is faster for {self.kind}: {self.pytorch_ms:.1f} ms, here {self.ours_ms:.1f} ms "
            f"({self.measured}); accepted: other calls"
        )


MASKED_QUERIES = 1
"""PyTorch computes calls with a mask and at most this many queries."""

ROWS: tuple[Row, ...] = (
    Row(
        "one query with a mask",
        lambda request: request.call.bias is not None and request.call.max_seqlen_q <= MASKED_QUERIES,
        pytorch_ms=12.0,
        ours_ms=19.9,
        measured="gpt-fast's static cache, H200",
    ),
    Row(
        "inference with head dim 72 under cuDNN",  # with one they gain: 0.95 ms, here 0.78
        lambda request: (
            request.backend == "cudnn"
            and not request.learns
            and request.call.q.shape[-1] == request.call.v.shape[-1] == 72
            and request.target == "sm90"
        ),
        pytorch_ms=19.3,
        ours_ms=21.1,
        measured="DiT, inference, H200",
    ),
)


def faster_by_pytorch(request: Any) -> str | None:
    """Why PyTorch computes a :class:`cute_attn.sdpa.calls.Request` that kernels support; None if kernels here do."""
    return next((row.reason for row in ROWS if row.applies(request)), None)
