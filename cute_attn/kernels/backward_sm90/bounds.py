"""Rows out of bounds in the Hopper backward's operands are zeroed: they may be NaN, and 0 * NaN is NaN."""

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.pipeline import consumer_barrier
from cute_attn.kernels.backward_sm90.params import BackwardStorage, HeadContext


@cute.jit
def zero_keys_out_of_bounds(kernel: Constexpr, shared: BackwardStorage, rows: Int32, thread: Int32) -> None:
    """Zero K and V from row ``rows`` of the key block on, the first one beyond the sequence."""
    if cutlass.const_expr(kernel.traits.varlen or kernel.traits.seqused_k):
        if rows < kernel.tile.tile_n:
            zero_rows(kernel, shared.s_k[None, None, 0], cutlass.max(rows, 0), thread)
            zero_rows(kernel, shared.s_v[None, None, 0], cutlass.max(rows, 0), thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            consumer_barrier(kernel.tile.warpgroups)


@cute.jit
def zero_queries_out_of_bounds(kernel: Constexpr, ctx: HeadContext, block: Int32, n: Int32) -> None:
    """Zero Q, dO and the bias beyond the sequence's last query."""
    if cutlass.const_expr(kernel.traits.varlen or kernel.traits.seqused_q):
        rows = ctx.seqlen_q - block * kernel.tile.tile_m
        if rows < kernel.tile.tile_m:
            shared = ctx.shared
            shared.pipeline_do.consumer_wait(n)
            zero_rows(kernel, shared.s_q[None, None, shared.pipeline_q.stage(n)], rows, ctx.thread)
            zero_rows(kernel, shared.s_do[None, None, shared.pipeline_do.stage(n)], rows, ctx.thread)
            if cutlass.const_expr(kernel.loads_bias_by_tma):
                zero_rows(
                    kernel, shared.bias.tensor[None, None, shared.pipeline_q.stage(n)], rows, ctx.thread
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            consumer_barrier(kernel.tile.warpgroups)


@cute.jit
def zero_rows(kernel: Constexpr, tile: cute.Tensor, first: Int32, thread: Int32) -> None:
    """Zero (rows, cols) in shared memory from row ``first`` on, by all consumer threads."""
    rows, cols = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    vectors = cols // 8
    zeros = cute.make_rmem_tensor(cute.make_layout(8), tile.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(thread, (rows - first) * vectors, kernel.tile.mma_threads, unroll=1):
        row = cute.local_tile(tile, (1, 8), (first + i // vectors, i % vectors))
        cute.autovec_copy(zeros, row[0, None])
