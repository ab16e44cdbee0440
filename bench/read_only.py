"""How fast can the GPU read memory, and do nothing else? The ceiling of attention with a cache.

A kernel that adds up a tensor of int32, 16 bytes a load and many loads in flight: each CTA takes every grid-th tile of
consecutive elements, and each thread keeps its own sum, so that nothing but a few bytes is written and no CTA waits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from cute_attn.compiler.arguments import fakes

VECTOR = 4
"""Elements of a load."""


def numbers_fake(size: Any, align: int) -> cute.Tensor:
    """A vector of int32, to compile with."""
    return make_fake_tensor(Int32, (size,), stride=(1,), assumed_align=align)


@dataclass(frozen=True)
class ReadOnly:
    """The kernel; ``__call__`` launches it.

    Attributes:
        threads: of a CTA.
        unroll: loads of a thread in flight.
        blocks_per_sm: CTAs per multiprocessor.
    """

    threads: int = 512
    unroll: int = 8
    blocks_per_sm: int = 2

    @property
    def tile(self) -> int:
        """Elements that a CTA reads at once; data is a multiple of it."""
        return self.threads * self.unroll * VECTOR

    @cute.jit
    def __call__(
        self,
        data: Annotated[cute.Tensor, lambda kernel: numbers_fake(cute.sym_int64(), 16)],
        sums: Annotated[cute.Tensor, lambda kernel: numbers_fake(cute.sym_int(), 4)],
        stream: cuda.CUstream,
    ) -> None:
        """Launch a CTA for every ``threads`` of ``sums``."""
        blocks = sums.shape[0] // self.threads
        self.kernel(data, sums).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Tensor, sums: cute.Tensor) -> None:
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        total = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
        total.fill(0)
        values = cute.make_rmem_tensor(cute.make_layout((VECTOR, self.unroll)), Int32)
        tiles = Int32(data.shape[0] // self.tile)
        for tile in cutlass.range(block, tiles, cute.arch.grid_dim()[0], unroll=1):
            start = Int64(tile) * self.tile + thread * VECTOR
            for u in cutlass.range_constexpr(self.unroll):
                source = data.iterator + cute.assume(start + u * self.threads * VECTOR, divby=VECTOR)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), values[None, u])
            for u in cutlass.range_constexpr(self.unroll):
                for e in cutlass.range_constexpr(VECTOR):
                    total[e] = total[e] + values[e, u]
        sums[block * self.threads + thread] = total[0] + total[1] + total[2] + total[3]


@functools.cache
def compiled(kernel: ReadOnly, target: str = "sm_90a", options: str = "") -> Any:
    """The kernel for a GPU architecture."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    own = f"--gpu-arch {target} --enable-tvm-ffi {options}"
    return cute.compile(kernel, *fakes(kernel), stream, options=own)


def readers(data: Tensor, kernel: ReadOnly | None = None) -> dict[str, Callable[[], Tensor]]:
    """Functions that read all of ``data``, int32 on the GPU, by name; this kernel's returns each thread's sum.

    Raises:
        ValueError: data is no multiple of the kernel's tile.
    """
    kernel = kernel or ReadOnly()
    if data.dtype != torch.int32 or not data.is_contiguous() or data.numel() % kernel.tile:
        raise ValueError(
            f"data has {data.numel()} elements; accepted: contiguous int32, multiples of {kernel.tile}"
        )
    major, minor = torch.cuda.get_device_capability(data.device)
    processors = torch.cuda.get_device_properties(data.device).multi_processor_count
    function = compiled(kernel, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    count = kernel.blocks_per_sm * processors * kernel.threads
    sums = torch.empty(count, dtype=torch.int32, device=data.device)

    def read() -> Tensor:
        function(data, sums)
        return sums

    return {"cute_attn/read_only": read, "torch.sum": lambda: data.sum()}
