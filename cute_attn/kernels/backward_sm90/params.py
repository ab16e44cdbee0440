"""Parameters, shared storage and register fragments of the Hopper backward."""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int16, Int32, Int64, cute, memory

from cute_attn.device.pipeline import Pipeline, SharedDoubleBuffer
from cute_attn.device.seqlen import Seqlens
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.outputs.accumulate import DqStaging, PeerSum
from cute_attn.rows.tma import TmaTiles, TmaVectors
from cute_attn.rows.tma_bias import TmaBiasOfQueries
from cute_attn.work.broadcast import ClusterClaims, KeyTile, KeyTileBroadcast
from cute_attn.work.key_tiles import HeadSplits, KeyTileOrder, QueryHeads


@dataclass(frozen=True)
class BackwardStorage:
    """Shared storage: operands, with the stage as last mode, and the pipelines that guard them."""

    s_k: cute.Tensor
    s_v: cute.Tensor
    s_q: cute.Tensor
    s_do: cute.Tensor
    s_ds: cute.Tensor  # (tile_m, tile_n, stage)
    s_p: cute.Tensor  # as s_ds; unused unless p_in_smem
    s_dk: cute.Tensor  # as s_k
    s_dv: cute.Tensor  # as s_v
    s_dq: (
        cute.Pointer
    )  # dQ in register order: a query block's with tile.dq_bulk, a sequence's with tile.dq_rows
    s_lse: cute.Tensor  # (tile_m, stage)
    s_minus_d: cute.Tensor  # (tile_m, stage)
    peer_s: PeerSum  # with a cluster
    peer_dp: PeerSum
    s_mask: cute.Tensor  # 16 bits, (2, thread, word, stage); unused without mask_warps
    pipeline_k: Pipeline
    pipeline_v: Pipeline
    pipeline_q: Pipeline
    pipeline_do: Pipeline
    pipeline_mask: Pipeline
    ds_buffer: SharedDoubleBuffer  # for s_ds, unless p_in_smem
    dq_staging: DqStaging  # for s_dq
    work: KeyTileBroadcast
    cluster_claims: ClusterClaims
    bias: Any  # TmaBiasOfQueries, in Q's pipeline, or None


@dataclass(frozen=True)
class BackwardParams:
    """Lengths, scale, epilogue arguments and the order of key tiles."""

    seqlens: Seqlens
    softmax_scale: Float32
    score_args: tuple
    order: KeyTileOrder
    counter: cute.Tensor
    nheads: Int32
    head_splits: HeadSplits

    def query_heads(self, key_tile: KeyTile) -> QueryHeads:
        """Query heads of a work tile."""
        return self.head_splits.of(key_tile.head_dkv)


@dataclass(frozen=True)
class BackwardInputs:
    """Operands in global memory."""

    k: TmaTiles
    v: TmaTiles
    q: TmaTiles
    do: TmaTiles
    bias: Any  # TmaTiles, or None
    lse: TmaVectors  # LSE * log2(e)
    minus_d: TmaVectors


@dataclass(frozen=True)
class BackwardOutputs:
    """Results in global memory."""

    tma_dk: TmaTiles
    tma_dv: TmaTiles
    tma_dbias: Any  # TmaTiles, or None
    mDK: cute.Tensor
    mDV: cute.Tensor
    mDQaccum: cute.Tensor  # with tile.dq_direct dQ itself
    split_stride: Int64
    turns: cute.Pointer  # counters of all query blocks, as they lie in mDQaccum, with tile.dq_in_order


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's wgmma operands and accumulators."""

    a_scores: cute.Tensor  # operands of S and dP
    b_scores: cute.Tensor
    a_dp: cute.Tensor
    b_dp: cute.Tensor
    do: cute.Tensor  # operand of dV
    q: cute.Tensor  # operand of dK
    a_dq: cute.Tensor
    b_dq: cute.Tensor
    p_smem: cute.Tensor | None  # P and dS as operands of dV and dK, with p_in_smem
    ds_smem: cute.Tensor | None
    acc_dk: cute.Tensor
    acc_dv: cute.Tensor


def shared_memory(kernel: Any) -> BackwardStorage:
    """Allocate shared memory: operands, pipelines and barriers at the offsets of ``tile.smem_areas``."""
    tile, (d, dv) = kernel.tile, kernel.dims
    base = memory.SmemAllocator().allocate(tile.smem_bytes(kernel.traits), byte_alignment=1024)
    start = {name: base + begin for name, (begin, _) in tile.smem_areas(kernel.traits).items()}

    def operand(name: str, layout: cute.ComposedLayout, dtype: Any = kernel.dtype) -> cute.Tensor:
        return cute.make_tensor(cute.recast_ptr(start[name], layout.inner, dtype=dtype), layout.outer)

    def rows(name: str, stages: int) -> cute.Tensor:
        layout = cute.make_layout((tile.tile_m, stages), stride=(1, tile.row_stride))
        return cute.make_tensor(cute.recast_ptr(start[name], dtype=Float32), layout)

    bias = None
    if kernel.loads_bias_by_tma:
        s_bias = operand("bias", kernel.layout_bias(), CUTE_DTYPES[kernel.traits.bias])
        bias = TmaBiasOfQueries(s_bias, kernel.stores_bias_gradient)
    mask = cute.make_layout((2, tile.mma_threads, tile.mask_words, tile.MASK_STAGES))
    barriers = cute.recast_ptr(start["barriers"], dtype=Int64)
    pipelines: list[Pipeline] = []
    for stages, stage_bytes in (
        (1, 2 * tile.tile_n * d),
        (1, 2 * tile.tile_n * dv),
        (tile.num_stages_q, 2 * tile.tile_m * d + 4 * tile.tile_m + (bias.stage_bytes if bias else 0)),
        (tile.num_stages_do, 2 * tile.tile_m * dv + 4 * tile.tile_m),
        (tile.MASK_STAGES, 0),  # written by lanes
    ):
        pipelines.append(Pipeline(barriers, stages, stage_bytes, per_lane_arrivals=stage_bytes == 0))
        barriers = barriers + Pipeline.barrier_bytes(stages) // 8
    sum_bytes = 4 * tile.tile_m * tile.tile_n
    received = cute.recast_ptr(start["sums"], dtype=Float32)
    sums = [PeerSum(received + i * (sum_bytes // 4), barriers + 8 + i, sum_bytes) for i in range(2)]
    return BackwardStorage(
        operand("k", kernel.layout_k()),
        operand("v", kernel.layout_v()),
        operand("q", kernel.layout_q()),
        operand("do", kernel.layout_do()),
        operand("ds", kernel.layout_ds()),
        operand("p" if tile.p_in_smem else "ds", kernel.layout_ds()),
        operand("dk", kernel.layout_k()),
        operand("dv", kernel.layout_v()),
        cute.recast_ptr(start["dq"], dtype=Float32),
        rows("lse", tile.num_stages_q),
        rows("minus_d", tile.num_stages_do),
        sums[0],
        sums[1],
        cute.make_tensor(cute.recast_ptr(start["mask"], dtype=Int16), mask),
        pipelines[0],
        pipelines[1],
        pipelines[2],
        pipelines[3],
        pipelines[4],
        SharedDoubleBuffer(barriers),
        DqStaging(barriers + 2),
        KeyTileBroadcast(cute.recast_ptr(barriers + 4, dtype=Int32), pipelines[0]),
        ClusterClaims(cute.recast_ptr(barriers + 12, dtype=Int32), barriers + 10),
        bias,
    )
