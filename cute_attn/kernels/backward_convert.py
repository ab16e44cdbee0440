"""The backward's last launch: computes dQ from the fp32 accumulators. Runs on every target.

    dQ = rp * softmax_scale * (sum of the accumulators, first to last)        rp = 1 / (1 - dropout_p)

A CTA converts one query block of one head, with the MMA of the main kernel and as many threads as its consumers. Thread
t loads the fragments that thread t of the main kernel's CTAs added, sums them, converts them and stores them to shared
memory. From there rows are stored 16 bytes at a time.

Limits: fp16, bf16 and fp32; head dims up to 576; rows of dQ 16-byte aligned with a contiguous last dimension and any
other strides. The tile is the main kernel's; ``cute_attn.kernels.dq_order`` lists the fields that matter.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import warp

import layouts
from cute_attn.device.seqlen import Seqlens, existing_rows, padded_row0, sequence
from cute_attn.kernels import dq_order as dq
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.kernels.copies import Copies, Part, SmemLayout
from cute_attn.outputs.accumulate import load_fragment
from cute_attn.tiles import padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, PART_FIELDS, Traits
from cute_attn.work.query_tiles import QueryGrid, QueryTile


@dataclass(frozen=True)
class BackwardConvert:
    """The convert kernel for (traits, the main kernel's tile); ``__call__`` traces the host side."""

    traits: Traits
    tile: Any

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        more = more_than(traits, ("backward_convert",), PART_FIELDS, "no score features")
        return more or beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=16 // traits.element_bytes)

    @classmethod
    def beside(cls, traits: Traits, tile: Any) -> Any:
        """The main kernel's tile with only the fields that affect dQ's order in memory."""
        return tile.for_convert()

    # ---- layouts, copies and the MMA ----

    @property
    def dtype(self) -> Any:
        return fakes.CUTE_DTYPES[self.traits.dtype]

    @property
    def follows_early(self) -> bool:
        """True if programmatic dependent launch (sm90) lets this kernel start while the main kernel still runs."""
        return self.traits.arch == "sm90"

    def smem_layout(self) -> cute.ComposedLayout:
        """Layout of a pass of dQ in shared memory: (tile_m, padded head_dim of the pass).

        On sm90 each warpgroup along head_dim has a separate buffer, since its columns may end within a swizzle atom.
        """
        parts = self.tile.dq_warps_n if self.traits.arch == "sm90" else 1
        cols = padded(self.traits.head_dim) // (parts * self.tile.dq_passes)
        layout = layouts.smem_layout(self.tile.tile_m, cols, self.dtype, stages=parts)
        return cute.make_composed_layout(layout.inner, layout.offset, cute.group_modes(layout.outer, 1, 3))

    def tiled_mma(self) -> cute.TiledMma:
        """The main kernel's MMA."""
        return dq.mma_dq(self.traits, self.tile)

    def store_copy(self, tiled_mma: cute.TiledMma) -> cute.TiledCopy:
        """The copy of the accumulator to shared memory; transposes a transposed accumulator (sm90 only)."""
        if self.tile.dq_transposed:
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
            return cute.make_tiled_copy_C(atom, tiled_mma)
        return layouts.store_copy_c(tiled_mma, self.dtype, self.traits.arch)

    def copies(self) -> Copies:
        """The copy of a pass of dQ from registers to shared memory, with its layout and MMA."""
        found = Copies(self, self.tile.mma_threads)
        shape = (self.tile.tile_m, padded(self.traits.head_dim) // self.tile.dq_passes)
        room = self.traits.element_bytes * math.prod(shape)
        found.layouts["dq"] = SmemLayout("smem_layout", self.smem_layout, shape, self.dtype, room)
        found.part("mma-dq", "tiled_mma")

        def store() -> cute.TiledCopy:
            return self.store_copy(self.tiled_mma())

        found.parts["copy-registers-to-smem"] = Part(
            "store_copy(tiled_mma)", store, "TiledCopy", self.tile.mma_threads
        )
        opcode, side = ("STSM", None) if self.traits.arch == "sm90" else ("STS", "dst")
        return found.move("dQ to shared memory", opcode, store, self.smem_layout, side)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mDQaccum: fakes.Accumulators,
        mDQ: fakes.HeadRows,
        seqlens: fakes.Lengths,
        scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. scale: rp * softmax_scale. seqlens: only the queries' lengths are read.

        Writes all rows of dQ that belong to a sequence; rows beyond seqused_q become 0.
        """
        tile = self.tile
        nheads = mDQ.shape[1] if self.traits.varlen else mDQ.shape[2]
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, tile.tile_m)
        grid = QueryGrid.make(m_blocks, nheads, nheads)
        self.kernel(mDQaccum, mDQ, seqlens, scale, grid).launch(
            grid=[m_blocks * nheads * seqlens.batch(mDQ), 1, 1],
            block=[tile.mma_threads, 1, 1],
            stream=stream,
            use_pdl=self.follows_early,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self, mDQaccum: cute.Tensor, mDQ: cute.Tensor, seqlens: Seqlens, scale: Float32, grid: QueryGrid
    ) -> None:
        traits, tile = self.traits, self.tile
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.follows_early):
            cute.arch.griddepcontrol_wait()  # for the main kernel
        query_tile = grid.tile(seqlens, tile.tile_m)
        exist = existing_rows(seqlens.cu_seqlens_q, mDQ, query_tile.batch) - query_tile.row0
        if exist > 0:
            rows = traits.element_bytes * tile.tile_m * (padded(traits.head_dim) // tile.dq_passes)
            base = memory.SmemAllocator().allocate(rows, byte_alignment=1024)
            s_dq = cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype), self.smem_layout())
            used = query_tile.info.seqlen_q - query_tile.row0
            for index in cutlass.range_constexpr(tile.dq_passes):
                if cutlass.const_expr(index > 0):
                    cute.arch.barrier()  # the last pass has been read
                if used > 0:
                    info, batch = query_tile.info, query_tile.batch
                    row0 = padded_row0(seqlens, info, batch, tile.tile_m) + query_tile.row0
                    acc = self.load(mDQaccum, query_tile, row0, index, thread)
                    self.to_shared(acc, s_dq, scale, thread)
                cute.arch.barrier()
                rows_dq = self.rows_of(mDQ, query_tile)
                self.store_rows(s_dq, rows_dq, index, query_tile.row0, used, exist, thread)

    def rows_of(self, m: cute.Tensor, query_tile: QueryTile) -> cute.Tensor:
        """The rows of dQ of a work tile's sequence and head."""
        return sequence(m, query_tile.batch, query_tile.head, query_tile.info.offset_q, self.traits.varlen)

    @cute.jit
    def load(
        self, mDQaccum: cute.Tensor, query_tile: QueryTile, row0: Int32, index: Constexpr, thread: Int32
    ) -> cute.Tensor:
        """Load this thread's fragments of pass ``index`` and sum them over the accumulators, first to last."""
        traits, tile, width = self.traits, self.tile, padded(self.traits.head_dim)
        start: Constexpr = index * (dq.block_floats(traits, tile) // tile.dq_passes)
        acc = dq.make_accumulator(self.tiled_mma(), traits, tile)
        first = dq.accumulator_rows(
            mDQaccum, 0, query_tile.batch, query_tile.head, row0, width, traits.varlen
        )
        load_fragment(acc, first.iterator + start, thread, tile.dq_vector)
        for i in cutlass.range(1, mDQaccum.shape[0], unroll=1):
            other = dq.accumulator_rows(
                mDQaccum, i, query_tile.batch, query_tile.head, row0, width, traits.varlen
            )
            load_fragment(acc, other.iterator + start, thread, tile.dq_vector, more=True)
        return acc

    @cute.jit
    def to_shared(self, acc: cute.Tensor, s_dq: cute.Tensor, scale: Float32, thread: Int32) -> None:
        """Write acc * scale in the output's type to ``s_dq``, (tile_m, padded head_dim)."""
        fragment = cute.make_rmem_tensor_like(acc, self.dtype)
        fragment.store((acc.load() * scale).to(self.dtype))
        store = self.store_copy(self.tiled_mma())
        mine = store.get_slice(thread)
        target = layouts.transposed(s_dq) if cutlass.const_expr(self.tile.dq_transposed) else s_dq
        cute.copy(store, mine.retile(fragment), mine.partition_D(target))

    @cute.jit
    def store_rows(
        self,
        s_dq: cute.Tensor,
        rows_dq: cute.Tensor,
        index: Constexpr,
        row0: Int32,
        used: Int32,
        exist: Int32,
        thread: Int32,
    ) -> None:
        """Store pass ``index`` of ``used`` rows starting at ``row0``, then zeros up to ``exist`` rows, at most tile_m.

        Adjacent threads store adjacent vectors of 16 bytes.
        """
        tile: Constexpr = self.tile
        length: Constexpr = 16 // self.traits.element_bytes
        cols: Constexpr = padded(self.traits.head_dim) // tile.dq_passes
        per_row: Constexpr = min(cols, self.traits.head_dim - index * cols) // length
        total: Constexpr = tile.tile_m * per_row
        vector = cute.make_rmem_tensor(cute.make_layout(length), self.dtype)
        target_row0 = rows_dq.iterator + cute.assume(Int64(row0) * rows_dq.stride[0], divby=length)
        target_row0 += index * cols
        for first in cutlass.range_constexpr(0, total, tile.mma_threads):
            row, col = (first + thread) // per_row, (first + thread) % per_row * length
            if row < cutlass.min(exist, tile.tile_m):
                offset = cute.assume(cute.crd2idx((row, col), s_dq.layout), divby=length)
                cute.autovec_copy(cute.make_tensor(s_dq.iterator + offset, cute.make_layout(length)), vector)
                if cutlass.const_expr(self.traits.seqused_q):
                    if row >= used:
                        vector.fill(0.0)
                target = target_row0 + cute.assume(row * rows_dq.stride[0] + col, divby=length)
                cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(length)))
