"""Kernels that build in a second, registered as the variant ``toy``, to test everything but kernels.

They have the interface of real ones: frozen traits and tile, ``supports``, ``default_tile`` and a host ``__call__``
that launches.
"""

from dataclasses import dataclass
from typing import Annotated

import cutlass
from cutlass import BFloat16, Float32, cute, memory
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor

import layouts
from cute_attn.compiler import registry
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

NAME = "forward-sm80:toy-bf16-d64"
WGMMA_NAME = "forward-sm90:toy-bf16-d64"
THREADS = 128
Numbers = Annotated[
    cute.Tensor, lambda kernel: make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16)
]


@dataclass(frozen=True)
class ToyTile(Tile):
    """``values``: numbers that a thread holds; too many spill. ``staged``: x goes through shared memory."""

    values: int = 8
    staged: bool = True

    def smem_bytes(self, traits: Traits) -> int:
        return 4 * THREADS if self.staged else 0

    def registers(self, traits: Traits) -> int:
        return self.values + 16

    def reject(self, traits: Traits, target: str) -> str | None:
        return None if self.values > 0 else f"values is {self.values}; accepted: 1 or more"


@dataclass(frozen=True)
class Toy:
    """y[i] = a recurrence over x that keeps ``tile.values`` numbers of each thread alive."""

    traits: Traits
    tile: ToyTile

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        return None if traits.head_dim == 64 else f"head_dim is {traits.head_dim}; accepted: 64"

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ToyTile:
        return ToyTile()

    @cute.jit
    def __call__(self, mX: Numbers, mY: Numbers, scale: Float32, stream):
        self.kernel(mX, mY, scale).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(self.tile.values, Float32)
        for i in cutlass.range_constexpr(self.tile.values):
            values[i] = mX[thread + THREADS * i] * scale
        if cutlass.const_expr(self.tile.staged):
            staged = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS), 16)
            staged[thread] = mX[thread]
            cute.arch.barrier()
            for k in cutlass.range(mX.shape[0], unroll=1):
                for i in cutlass.range_constexpr(self.tile.values):
                    values[i] = (
                        values[i] * staged[(thread + k) % THREADS] + values[(i + 1) % self.tile.values]
                    )
        for i in cutlass.range_constexpr(self.tile.values):
            mY[thread + THREADS * i] = values[i]


@dataclass(frozen=True)
class ToyWgmma:
    """A loop of wgmma that waits for each product only if ``tile.staged``; ptxas puts in the wait that is missing."""

    traits: Traits
    tile: ToyTile

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ToyTile:
        return ToyTile()

    @cute.jit
    def __call__(self, mX: Numbers, stream):
        self.kernel(mX).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        tiled_mma = layouts.tiled_mma_sm90(BFloat16, 64, 64, warpgroups=1)
        layout = layouts.wgmma_smem_layout(64, 64, BFloat16)
        mine = tiled_mma.get_slice(thread)
        smem = memory.SmemAllocator()
        s_a = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        s_b = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        a = mine.make_fragment_A(mine.partition_A(s_a))
        b = mine.make_fragment_B(mine.partition_B(s_b))
        acc = cute.make_rmem_tensor(mine.partition_shape_C((64, 64)), Float32)
        acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        for _ in cutlass.range(mX.shape[0], unroll=1):
            warpgroup.fence()
            for k in cutlass.range_constexpr(4):
                cute.gemm(tiled_mma, acc, a[None, None, k], b[None, None, k], acc)
            warpgroup.commit_group()
            if cutlass.const_expr(self.tile.staged):
                warpgroup.wait_group(0)
            acc.store(acc.load() * 2.0)
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            mX[thread + THREADS * i] = acc[i]


registry.register(Toy, variant="toy")
registry.register(ToyWgmma, variant="toy", arch="sm90")
