"""Shared storage and register fragments of the Hopper forward for head dims above 256."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.pipeline import WARPGROUP, PingPong, Pipeline
from cute_attn.device.score_tile import ScoreMap
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardStorage,
    fragments_of,
    smem_tensor,
    tensor_at,
)
from cute_attn.rows.query_buffer import QueryBuffer
from cute_attn.tiles import padded
from cute_attn.work.broadcast import WorkBroadcast
from cute_attn.work.replay import Replay

SCORES, VALUES = 0, 1
"""Indices of the consumer warpgroups and of their halves of O's columns. SCORES also computes P."""


@dataclass(frozen=True)
class SharedProbabilities:
    """P of one step and the factors that rescale the rows of O: written by one warpgroup, read by both.

    A work tile fills this buffer once per key block, and once more with the factors that normalize O's rows.
    """

    tensor: cute.Tensor  # (64, tile_n, stage)
    factors: cute.Tensor  # (64, stage)
    pipeline: Pipeline

    @cute.jit
    def write_factors(self, factors: cute.Tensor, score_map: ScoreMap, use: Int32) -> None:
        """Write ``factors`` of the thread's rows; all lanes of a row have equal factors."""
        if score_map.thr_col == 0:
            for r in cutlass.range_constexpr(cute.size(factors)):
                row = score_map.thr_row + score_map.modes.rows[r]
                self.factors[row, self.pipeline.stage(use)] = factors[r]

    @cute.jit
    def read_factors(self, factors: cute.Tensor, score_map: ScoreMap, use: Int32) -> None:
        """Read the factors of the thread's rows into ``factors``."""
        for r in cutlass.range_constexpr(cute.size(factors)):
            row = score_map.thr_row + score_map.modes.rows[r]
            factors[r] = self.factors[row, self.pipeline.stage(use)]

    @cute.jit
    def commit(self, use: Int32) -> None:
        """Publish the data that the warp wrote, also to wgmma; called by each warp that wrote."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.pipeline.producer_commit(use)


@dataclass(frozen=True)
class LargeStorage(ForwardStorage):
    """The Hopper forward's storage, with P.

    latent: V is the first columns of K, in K's memory and with K's pipeline.
    """

    p: SharedProbabilities
    latent: Constexpr = False

    @cute.jit
    def init(self, warpgroups: Constexpr, lane: Int32) -> None:
        both: Constexpr = 4 * warpgroups
        with cute.arch.elect_one():
            self.q.pipeline.init(both)
            self.pipeline_k.init(both if self.latent else 4)
            if cutlass.const_expr(not self.latent):
                self.pipeline_v.init(both)
            self.p.pipeline.init(both, producers=4)
            self.work.pipeline.init(both)
        cute.arch.mbarrier_init_fence()
        self.replay.clear(lane)


def make_storage(kernel: Any) -> LargeStorage:
    """Allocate barriers, Q (O reuses its memory), K and V in stages, and P and factors in separate stages."""
    traits, tile = kernel.traits, kernel.tile
    base = memory.SmemAllocator().allocate(tile.smem_bytes(traits), byte_alignment=1024)
    start = {name: base + begin for name, (begin, _) in tile.smem_areas(traits).items()}
    barriers = cute.recast_ptr(base, dtype=Int64)
    pipelines: list[Pipeline] = []
    taken = 0
    q = smem_tensor(kernel, start["q"], tile.tile_m, traits.head_dim, 1)
    k = smem_tensor(kernel, start["k"], tile.tile_n, traits.head_dim, tile.num_stages)
    v = _values(kernel, start)
    p = tensor_at(start["p"], kernel.probabilities_layout(tile.p_stages), kernel.dtype)
    for tensor, stages, loaded in (
        (q, 1, 1),
        (k, tile.num_stages, 1),
        (v, tile.num_stages, 1),
        (p, tile.p_stages, 0),
    ):
        stage_bytes = 2 * cute.size(tensor, mode=[0]) * cute.size(tensor, mode=[1])
        pipelines.append(
            Pipeline(barriers + taken, stages, loaded * stage_bytes, per_lane_arrivals=not loaded)
        )
        taken += Pipeline.barrier_bytes(stages) // 8
    factors = cute.make_tensor(
        cute.recast_ptr(start["factors"], dtype=Float32), cute.make_layout((tile.tile_m, tile.p_stages))
    )
    return LargeStorage(
        QueryBuffer(q, pipelines[0], tile),
        k,
        v,
        smem_tensor(kernel, start["q"], tile.tile_m, kernel.output_columns, tile.warpgroups),
        pipelines[1],
        pipelines[1 if traits.latent else 2],
        WorkBroadcast.make(barriers + taken, base + tile.BROADCAST_START, traits.divides_keys),
        Replay.make(base + tile.REPLAY_START, 32 + WARPGROUP * tile.warpgroups),
        None,
        SharedProbabilities(p, factors, pipelines[3]),
        traits.latent,
    )


def _values(kernel: Any, start: dict[str, cute.Pointer]) -> cute.Tensor:
    """V (tile_n, columns, stages); the first columns of K's stages if V is latent."""
    layout = kernel.values_layout(kernel.tile.num_stages)
    if not kernel.traits.latent:
        return tensor_at(start["v"], layout, kernel.dtype)
    outer, step = layout.outer, kernel.tile.tile_n * padded(kernel.traits.head_dim)
    own = cute.make_layout(outer.shape, stride=(outer.stride[0], outer.stride[1], (0, step)))
    return cute.make_tensor(cute.recast_ptr(start["k"], layout.inner, dtype=kernel.dtype), own)


def consumer_thread(kernel: Any, storage: LargeStorage, group: int, lane: Int32) -> ConsumerThread:
    """The running thread of consumer warpgroup ``group``, with its columns of O; products are not put in order."""
    s_q, columns = storage.q.tensor[None, None, 0], kernel.tile.columns_of_v(kernel.traits)
    fragments = fragments_of(kernel, storage, 0, group * WARPGROUP, s_q, columns, storage.p.tensor)
    ping_pong = PingPong(Int32(group), kernel.tile.warpgroups, False)
    return ConsumerThread(Int32(group), lane, ping_pong, fragments)
