"""The backward's first launch: computes LSE and D of query rows and zeroes accumulators. Runs on every target.

    minus_d[i] = (dLSE[i] - sum_j dO[i, j] * O[i, j]) / rp  rp = 1 / (1 - dropout_p)
    lse_log2[i] = LSE[i] * log2(e)                          so that P = exp2(score * log2(e) - lse_log2)
    dQ accumulators = 0, the main kernel's counters = 0;  varlen dQ, dK and dV: rows out of bounds = 0

A CTA computes some rows of one head. A few adjacent threads work on a row: each multiplies 16-byte vectors of dO and O,
shuffles add the products, and the thread that writes both statistics reads the row's sum from shared memory. The
kernel is bound by memory bandwidth: each thread has as many loads in flight as its registers allow.

A row that saw no key has an LSE of -inf in this package, and +inf in PyTorch's kernels. These rows, and the rows that
pad a sequence to whole blocks of ``tile_m``, get lse_log2 = +inf and minus_d = 0: P and its gradient are 0 for any
score. D is negated because the accumulator of dP may start from -D.

Limits: fp16, bf16 and fp32; head dims up to 576; rows of dO and O 16-byte aligned with a contiguous last dimension and
any other strides; dLSE of any strides.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.math import LOG2_E, clamped
from cute_attn.device.seqlen import SeqlenInfo, Seqlens, padded_row0, sequence, workspace_rows
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.kernels.dq_order import accumulator_rows
from cute_attn.tiles import BackwardPreprocessTile, padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, PART_FIELDS, Traits


@dataclass(frozen=True)
class RowGrid:
    """A one-dimensional grid of (batch, blocks of rows, heads). Heads are adjacent in memory and run fastest."""

    nheads: cute.FastDivmodDivisorV2
    blocks: cute.FastDivmodDivisorV2

    @staticmethod
    def make(nheads: Int32, blocks: Int32) -> "RowGrid":
        """Make the grid on the host. An empty grid is not launched; its divisors are 1 instead of 0."""
        return RowGrid(*(cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (nheads, blocks)))


@dataclass(frozen=True)
class Rows:
    """The query rows of a CTA."""

    row0: Int32
    head: Int32
    batch: Int32
    info: SeqlenInfo
    padded0: Int32  # row0's row in the workspace

    @staticmethod
    @cute.jit
    def read(seqlens: Seqlens, grid: RowGrid, rows: Constexpr, tile_m: Constexpr) -> "Rows":
        """Rows of the running CTA."""
        plane, head = divmod(cute.arch.block_idx()[0], grid.nheads)
        batch, block = divmod(plane, grid.blocks)
        batch, head, block = (cute.arch.make_warp_uniform(x) for x in (batch, head, block))
        return Rows.at(seqlens, batch, head, block * rows, tile_m)

    @staticmethod
    @cute.jit
    def at(seqlens: Seqlens, batch: Int32, head: Int32, row0: Int32, tile_m: Constexpr) -> "Rows":
        """Rows of a sequence, starting at ``row0``."""
        info = SeqlenInfo.read(seqlens, batch)
        return Rows(row0, head, batch, info, padded_row0(seqlens, info, batch, tile_m) + row0)

    def of_workspace(self, tensor: cute.Tensor, varlen: bool) -> cute.Tensor:
        """The rows of mLSElog2 or mMinusD, from ``row0`` on."""
        return workspace_rows(tensor, self.batch, self.head, self.padded0, 1, varlen)

    def existing(self, row: Int32) -> Int32:
        """The index in the sequence of row ``row`` of the block, clamped to the sequence's last row."""
        return cutlass.min(self.row0 + row, self.info.seqlen_q - 1)


@dataclass(frozen=True)
class BackwardPreprocess:
    """The preprocess kernel for (traits, tile); ``__call__`` traces the host side."""

    traits: Traits
    tile: BackwardPreprocessTile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        used = (*PART_FIELDS, "lse_grad")
        more = more_than(traits, ("backward_preprocess",), used, "no score features")
        return more or beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=16 // traits.element_bytes)

    @classmethod
    def beside(cls, traits: Traits, tile: Any) -> BackwardPreprocessTile:
        """The preprocess tile that fits a main kernel's tile."""
        return BackwardPreprocessTile.of(traits, tile.tile_m)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mDO: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        mDLSE: Annotated[
            cute.Tensor | None,
            lambda kernel: (
                fakes.strided(Float32, fakes.rank(kernel.traits) - 1) if kernel.traits.lse_grad else None
            ),
        ],
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: fakes.Accumulators,
        mCounters: fakes.Counters,
        gradients: Annotated[
            tuple | None,
            lambda kernel: tuple(map(fakes.head_rows, (kernel,) * 3)) if kernel.traits.varlen else None,
        ],
        seqlens: fakes.Lengths,
        keep_prob: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. gradients: (mDQ, mDK, mDV) if varlen, or None. keep_prob: 1 - dropout_p.

        seqlens: only the queries' lengths are read, and cu_seqlens_k for ``gradients``.

        Writes each sequence's rows of the statistics and the accumulators, padded to whole blocks of tile_m; other
        rows stay unwritten. Zeroes the rows of varlen gradients before the first and after the last sequence.
        """
        tile = self.tile
        nheads = mO.shape[1] if self.traits.varlen else mO.shape[2]
        blocks = cute.ceil_div(seqlens.max_seqlen_q, tile.tile_m) * (tile.tile_m // tile.rows)
        grid = RowGrid.make(nheads, blocks)
        workspace = (mLSElog2, mMinusD, mDQaccum, mCounters)
        self.kernel(mDO, mO, mLSE, mDLSE, *workspace, gradients, seqlens, keep_prob, grid).launch(
            grid=[blocks * nheads * seqlens.batch(mO), 1, 1], block=[tile.num_threads, 1, 1], stream=stream
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        mDO: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mDLSE: cute.Tensor | None,
        mLSElog2: cute.Tensor,
        mMinusD: cute.Tensor,
        mDQaccum: cute.Tensor,
        mCounters: cute.Tensor,
        gradients: tuple | None,
        seqlens: Seqlens,
        keep_prob: Float32,
        grid: RowGrid,
    ) -> None:
        tile = self.tile
        if cutlass.const_expr(self.traits.arch == "sm90"):
            cute.arch.griddepcontrol_launch_dependents()  # the main kernel waits for this grid's end
        thread, _, _ = cute.arch.thread_idx()
        query_rows = Rows.read(seqlens, grid, tile.rows, tile.tile_m)
        if query_rows.row0 < cute.round_up(query_rows.info.seqlen_q, tile.tile_m):
            sums = cute.make_tensor(
                cute.recast_ptr(
                    memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), 16), dtype=Float32
                ),
                cute.make_layout(tile.rows),
            )
            lse, dlse = Float32(0.0), Float32(0.0)
            if thread < tile.rows:
                lse = self.load_number(mLSE, query_rows, thread)
                if cutlass.const_expr(mDLSE is not None):
                    dlse = self.load_number(mDLSE, query_rows, thread)
            do = self.load_rows(mDO, query_rows, thread)
            o = self.load_rows(mO, query_rows, thread)
            self.sum_rows(do, o, sums, thread)
            self.zero_accumulators(mDQaccum, query_rows, thread)
            cute.arch.barrier()
            if thread < tile.rows:
                varlen = self.traits.varlen
                lse_log2, minus_d = (query_rows.of_workspace(m, varlen) for m in (mLSElog2, mMinusD))
                exists = query_rows.row0 + thread < query_rows.info.seqlen_q
                lse_log2[thread], minus_d[thread] = self.statistics(
                    exists, sums[thread], lse, dlse, keep_prob
                )
        threads = cute.arch.grid_dim()[0] * tile.num_threads
        first = cute.arch.block_idx()[0] * tile.num_threads + thread
        for i in cutlass.range(first, mCounters.shape[0], threads, unroll=1):
            mCounters[i] = Float32(0.0)
        if cutlass.const_expr(gradients is not None):
            block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            cu_seqlens = (seqlens.cu_seqlens_q, seqlens.cu_seqlens_k, seqlens.cu_seqlens_k)
            for gradient, ends in zip(gradients, cu_seqlens, strict=True):  # type: ignore[arg-type]
                self.zero_out_of_bounds_rows(gradient, ends, block, blocks, thread)

    @cute.jit
    def load_rows(self, tensor: cute.Tensor, query_rows: Rows, thread: Int32) -> cute.Tensor:
        """Load this thread's vectors of the block's rows of dO or O: (length of a vector, vectors, passes).

        Out-of-bounds coordinates are clamped to avoid a branch; the sums omit their values.
        """
        tile, traits = self.tile, self.traits
        per_row = tile.threads_per_row(traits)
        rows = sequence(tensor, query_rows.batch, query_rows.head, query_rows.info.offset_q, traits.varlen)
        length = tile.length(traits)
        shape = (length, tile.vectors(traits), tile.passes(traits))
        values = cute.make_rmem_tensor(cute.make_layout(shape), tensor.element_type)
        for i in cutlass.range_constexpr(tile.passes(traits)):
            row = query_rows.existing(thread // per_row + i * tile.rows_at_once(traits))
            first = rows.iterator + cute.assume(Int64(row) * rows.stride[0], divby=length)
            for j in cutlass.range_constexpr(tile.vectors(traits)):
                col = (thread % per_row + j * per_row) * length
                col = cutlass.min(col, traits.head_dim_v - length)
                source = cute.make_tensor(first + cute.assume(col, divby=length), cute.make_layout(length))
                cute.autovec_copy(source, values[None, j, i])
        return values

    @cute.jit
    def load_number(self, tensor: cute.Tensor, query_rows: Rows, thread: Int32) -> Float32:
        """Load LSE or dLSE of row ``thread``. tensor: (batch, nheads, seqlen_q), or (nheads, total_q) with varlen."""
        if cutlass.const_expr(self.traits.varlen):
            start = (
                Int64(query_rows.head) * tensor.stride[0] + Int64(query_rows.info.offset_q) * tensor.stride[1]
            )
        else:
            start = Int64(query_rows.batch) * tensor.stride[0] + Int64(query_rows.head) * tensor.stride[1]
        start += Int64(query_rows.existing(thread)) * tensor.stride[-1]
        return cute.make_tensor(tensor.iterator + start, cute.make_layout(1))[0]

    @cute.jit
    def zero_accumulators(self, mDQaccum: cute.Tensor, query_rows: Rows, thread: Int32) -> None:
        """Zero the block's rows of every accumulator, 16 bytes at a time."""
        tile, width = self.tile, padded(self.traits.head_dim)
        zeros = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        zeros.fill(0.0)
        vectors: Constexpr = tile.rows * width // 4
        for accumulator in cutlass.range(mDQaccum.shape[0], unroll=1):
            rows = accumulator_rows(
                mDQaccum, accumulator, query_rows.batch, query_rows.head, query_rows.padded0, width,
                self.traits.varlen,
            )  # fmt: skip
            for first in cutlass.range_constexpr(0, vectors, tile.num_threads):
                target = rows.iterator + cute.assume((first + thread) * 4, divby=4)
                exists = (
                    True
                    if cutlass.const_expr(first + tile.num_threads <= vectors)
                    else first + thread < vectors
                )
                if exists:
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def zero_out_of_bounds_rows(
        self, gradient: cute.Tensor, cu_seqlens: cute.Tensor, block: Int32, blocks: Int32, thread: Int32
    ) -> None:
        """Zero the rows of a packed gradient outside all sequences; CTA ``block`` zeroes every ``blocks``-th row."""
        begin, end = cu_seqlens[0], cu_seqlens[cu_seqlens.shape[0] - 1]
        length = self.tile.length(self.traits)
        per_head = gradient.shape[2] // length
        zeros = cute.make_rmem_tensor(cute.make_layout(length), gradient.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(block, gradient.shape[0] - (end - begin), blocks, unroll=1):
            row = i if i < begin else i + end - begin
            for j in cutlass.range(thread, gradient.shape[1] * per_head, self.tile.num_threads, unroll=1):
                start = Int64(row) * gradient.stride[0] + Int64(j // per_head) * gradient.stride[1]
                target = gradient.iterator + cute.assume(start + j % per_head * length, divby=length)
                cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(length)))

    @cute.jit
    def sum_rows(self, do: cute.Tensor, o: cute.Tensor, sums: cute.Tensor, thread: Int32) -> None:
        """Write ``sums[row]`` = sum of dO * O over the row, in fp32."""
        per_row = self.tile.threads_per_row(self.traits)
        for i in cutlass.range_constexpr(self.tile.passes(self.traits)):
            total = self.part_of_row(do, o, i, thread)
            for step in cutlass.range_constexpr(per_row.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            row = thread // per_row + i * self.tile.rows_at_once(self.traits)
            if thread % per_row == 0 and row < self.tile.rows:
                sums[row] = total

    @cute.jit
    def part_of_row(self, do: cute.Tensor, o: cute.Tensor, i: Constexpr, thread: Int32) -> Float32:
        """The sum of dO * O over this thread's columns of its row in pass i."""
        per_row, length = self.tile.threads_per_row(self.traits), self.tile.length(self.traits)
        dv, total = self.traits.head_dim_v, Float32(0.0)
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            products = do[None, j, i].load().to(Float32) * o[None, j, i].load().to(Float32)
            part = products.reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
            if cutlass.const_expr((j + 1) * per_row * length > dv):
                part = part if (thread % per_row + j * per_row) * length < dv else Float32(0.0)
            total += part
        return total

    @cute.jit
    def statistics(self, exists: Boolean, total: Float32, lse: Float32, dlse: Float32, keep_prob: Float32):
        """(lse_log2, minus_d) of a row; total: the row's sum of dO * O."""
        seen = exists and lse != Float32.inf and lse != -Float32.inf
        lse_log2 = clamped(lse * LOG2_E) if seen else Float32.inf
        minus_d = (dlse - total) * keep_prob if seen else Float32(0.0)
        return lse_log2, minus_d
