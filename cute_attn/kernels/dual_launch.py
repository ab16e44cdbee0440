"""The launch arguments of kernels with tangents, for both generations."""

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, cute

from cute_attn.kernels import fakes


class DualLaunch:
    """Base that precedes a forward class in a jvp kernel's bases. ``launch_duals`` launches: values, then tangents."""

    launch_duals: Any

    def for_lengths(self, *sizes: Any, **more: Any) -> Any:
        """This kernel: its tile serves all lengths."""
        return self

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mQdot: fakes.HeadRows,
        mKdot: fakes.HeadRows,
        mVdot: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        mOdot: fakes.HeadRows,
        mLSEdot: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. A tangent has its tensor's shape and dtype, and any strides."""
        tensors, results = ((mQ, mK, mV), (mQdot, mKdot, mVdot)), ((mO, mLSE), (mOdot, mLSEdot))
        self.launch_duals(tensors, results, seqlens, softmax_scale, schedule, score_args, stream)
