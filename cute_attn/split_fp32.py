"""fp32 tensors as two fp16 parts on CUDA: the workspace and the launch of :mod:`cute_attn.kernels.split_fp32`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import launcher
from cute_attn.launcher import as_strided, contiguous_strides
from cute_attn.traits import SPLIT_TENSORS, Traits

MAX_ROWS = 2**31 - 2**16
"""The most rows of a tensor, a row being one head's of one query or key."""


class Parts(NamedTuple):
    """Tensors in two fp16 parts each, which another kernel has still to write while the host has this.

    Attributes:
        tensors: of each tensor of rows (..., dim) its parts (..., 2, padded dim), contiguous: hi, then lo;
            ``unbind(-2)`` has them apart. Columns beyond dim are 0. Unwritten where the tensor's scale is 0.
        scales: fp32 (tensors,): 2^-e, the inverse of the power of two that was multiplied by; 0 where a tensor does not
            keep the precision of fp32 in two parts, so that another kernel has to read the tensor itself.
    """

    tensors: tuple[Tensor, ...]
    scales: Tensor


@dataclass(frozen=True, slots=True)
class SplitLauncher:
    """Splits the tensors of calls with the same traits.

    Attributes:
        function: launches the kernels.
        dims: the padded head dim of each tensor.
        blocks: partial results of each tensor.
    """

    function: Callable[..., None]
    dims: tuple[int, ...]
    blocks: int

    @staticmethod
    def of(main: Traits, op: str, target: str) -> "SplitLauncher":
        """For a main kernel's traits; op: ``"forward_split"`` or ``"backward_split"``.

        Raises:
            Unsupported: no kernel splits such tensors.
        """
        from cute_attn import compiler
        from cute_attn.tiles import padded

        compiled = compiler.compile(main.split_fp32(op), None, target)
        dims = tuple(padded(getattr(main, name)) for name in SPLIT_TENSORS[op])
        return SplitLauncher(compiled.function, dims, compiled.tile.blocks)

    def launch(self, tensors: Sequence[Tensor]) -> Parts:
        """Split (q, k, v) or (q, k, v, dO), of strides that kernels read, on the current stream of their device."""
        like = tensors[0]
        shapes = [(*x.shape[:-1], 2, dim) for x, dim in zip(tensors, self.dims, strict=True)]
        sizes = [math.prod(shape) for shape in shapes]
        # One allocation; parts of any tensor are whole lines of 128 bytes.
        memory = launcher.new_empty_strided(like, (sum(sizes),), (1,), torch.float16)
        parts = tuple(
            as_strided(memory, shape, contiguous_strides(shape), sum(sizes[:i]))
            for i, shape in enumerate(shapes)
        )
        partials_shape = (len(tensors), 2, self.blocks)
        partials = launcher.new_empty_strided(
            like, partials_shape, contiguous_strides(partials_shape), torch.int32
        )
        scales = launcher.new_empty_strided(like, (len(tensors),), (1,), torch.float32)
        arguments: tuple[Any, ...] = (tuple(tensors), parts, partials, scales)
        self.function(*arguments)
        return Parts(parts, scales)


def can_split(tensors: Sequence[Tensor]) -> bool:
    """Whether there are few enough rows."""
    return all(math.prod(x.shape[:-1]) <= MAX_ROWS for x in tensors)
