"""Runs layout code on the CPU, compiled for the host by the DSL, for all threads and coordinates.

Use it to check a layout or a partition before a kernel uses it.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import cutlass
import numpy as np
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from .model import no_arguments, trace


def run_on_host(
    body: Callable[[Any], None], *shape: int, alignment: int = 16, arch: str = "sm_90a"
) -> np.ndarray:
    """Compiles ``body(out)`` for the host, runs it and returns ``out``: an int32 tensor of this shape, initially -1.

    body is called in a trace; its dynamic loops must be in ``cute.jit`` functions. alignment: in bytes, of ``out``.
    """
    padded = torch.full((prod(shape) + alignment // 4,), -1, dtype=torch.int32)
    start = -padded.data_ptr() % alignment // 4
    out = padded[start : start + prod(shape)].view(shape)

    @cute.jit
    def host(out: cute.Tensor):
        body(out)

    tensor = from_dlpack(out, assumed_align=alignment)
    with no_arguments():
        compiled = cute.compile[cute.GPUArch(arch)](host, tensor)
    compiled(tensor)
    return out.numpy()


def offset_table(make: Callable[[], Any], *shape: int) -> np.ndarray:
    """table[i, j(, s)] = layout((i, j(, s))) for the layout that ``make()`` builds."""
    padded = shape if len(shape) == 3 else (*shape, 1)
    return run_on_host(lambda out: _write_offsets(make(), len(shape) == 3, out), *padded).reshape(shape)


def coordinate_table(make: Callable[[Any], Any], threads: int) -> np.ndarray:
    """table[thread, value] = (row, col), where ``make(thread)`` partitions an identity tensor.

    Example: ``lambda t: tiled_mma_sm80(dtype, 4).get_slice(t).partition_C(cute.make_identity_tensor((128, 64)))``.
    """
    values = trace(lambda: cute.size(make(0)))
    return run_on_host(lambda out: _write_coordinates(make, out), threads, values, 2)


@cute.jit
def _write_offsets(layout: cutlass.Constexpr, has_stages: cutlass.Constexpr, out: cute.Tensor):
    for i in cutlass.range(cute.size(out.shape[0])):
        for j in cutlass.range(cute.size(out.shape[1])):
            for s in cutlass.range(cute.size(out.shape[2])):
                if cutlass.const_expr(has_stages):
                    out[i, j, s] = layout((i, j, s))
                else:
                    out[i, j, s] = layout((i, j))


@cute.jit
def _write_coordinates(make: cutlass.Constexpr, out: cute.Tensor):
    for thread in cutlass.range(cute.size(out.shape[0])):
        coords = make(thread)
        for value in cutlass.range(cute.size(out.shape[1])):
            out[thread, value, 0] = coords[value][0]
            out[thread, value, 1] = coords[value][1]
