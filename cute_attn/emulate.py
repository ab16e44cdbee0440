"""A kernel's score tiles on the CPU: its own MMA tiling, its own epilogues, every thread, compiled for the host.

What a kernel does to scores between its two matrix products is ordinary code that the DSL also compiles for the host.
Here it runs there, for every thread of every tile, on products that torch has computed.
"""

from typing import Any

import cutlass
import torch
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from cute_attn.device.score_tile import ScoreContext, ScoreMap
from cute_attn.epilogues.inputs import ScoreInputs


def scores_on_host(kernel: Any, products: Tensor, softmax_scale: float, inputs: ScoreInputs) -> Tensor:
    """What a kernel's epilogues and mask make of q k^T.

    Args:
        kernel: a forward kernel, from ``registry.lookup``, of batches without a bias.
        products: q k^T, float32 (batch, nheads, seqlen_q, seqlen_k), on the CPU.
        softmax_scale: as for ``attention``.
        inputs: the epilogues' arguments.

    Returns:
        the scores, as ``products``, in natural units; -inf where the mask hides a key.
    """
    batch, nheads, seqlen_q, seqlen_k = products.shape
    tile_m, tile_n = kernel.tile.tile_m, kernel.tile.tile_n
    rows, cols = -(-seqlen_q // tile_m) * tile_m, -(-seqlen_k // tile_n) * tile_n
    padded = torch.zeros(batch, nheads, rows, cols)
    padded[:, :, :seqlen_q, :seqlen_k] = products
    out = torch.full_like(padded, float("nan"))
    args = _as_cute(kernel.epilogues.host_args(inputs))
    tensors = from_dlpack(padded, assumed_align=16), from_dlpack(out, assumed_align=16)
    unit = inputs.softcap or softmax_scale
    _every_tile(
        *tensors, args, Int32(seqlen_q), Int32(seqlen_k), Float32(softmax_scale), Float32(unit), kernel
    )
    return out[:, :, :seqlen_q, :seqlen_k] * unit


def _as_cute(args: Any) -> Any:
    if isinstance(args, tuple):
        return tuple(_as_cute(arg) for arg in args)
    if isinstance(args, Tensor):
        return from_dlpack(args.contiguous(), assumed_align=4)
    return Float32(args) if isinstance(args, float) else Int32(args)


@cute.jit
def _every_tile(
    products: cute.Tensor,
    out: cute.Tensor,
    args: Any,
    seqlen_q: Int32,
    seqlen_k: Int32,
    scale: Float32,
    unit: Float32,
    kernel: Constexpr,
):
    batches, nheads, rows, cols = products.shape
    for batch in cutlass.range(batches):
        for head in cutlass.range(nheads):
            context = ScoreContext(
                batch=batch,
                head=head,
                nheads=Int32(nheads),
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                max_seqlen_q=seqlen_q,
                max_seqlen_k=seqlen_k,
                shift=Int32(0) if cutlass.const_expr(kernel.traits.top_left) else seqlen_k - seqlen_q,
                softmax_scale=scale,
                unit=unit,
                inv_unit=1.0 / unit,
            )
            for thread in cutlass.range(kernel.tile.num_threads):
                for row0 in cutlass.range(0, rows, kernel.tile.tile_m):
                    for col0 in cutlass.range(0, cols, kernel.tile.tile_n):
                        _one_tile(products, out, args, context, thread, row0, col0, kernel)


@cute.jit
def _one_tile(
    products: cute.Tensor,
    out: cute.Tensor,
    args: Any,
    context: ScoreContext,
    thread: Int32,
    row0: Int32,
    col0: Int32,
    kernel: Constexpr,
):
    tile_m, tile_n = kernel.tile.tile_m, kernel.tile.tile_n
    tiled_mma = kernel.tiled_mma()
    acc = cute.make_rmem_tensor(tiled_mma.get_slice(thread).partition_shape_C((tile_m, tile_n)), Float32)
    score_map = ScoreMap.make(tiled_mma, tile_m, tile_n, thread)
    tile = score_map.tile(acc, row0, col0)
    plane = products[context.batch, context.head, None, None]
    result = out[context.batch, context.head, None, None]
    for r in cutlass.range_constexpr(len(tile.rows)):
        for c in cutlass.range_constexpr(len(tile.cols)):
            tile.acc[r, c] = plane[tile.row0 + tile.rows[r], tile.col0 + tile.cols[c]]
    chain = kernel.epilogues
    state = chain.begin(args, context)
    chain.forward(state, tile, chain.load(state, tile), True)
    for r in cutlass.range_constexpr(len(tile.rows)):
        for c in cutlass.range_constexpr(len(tile.cols)):
            result[tile.row0 + tile.rows[r], tile.col0 + tile.cols[c]] = tile.acc[r, c]
