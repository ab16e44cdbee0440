"""The consumer warpgroups for head dims above 256, and their shared storage.

One computes S and P, and both divide the columns of O.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.gemm import start_gemm
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP, Accessed, PingPong, Pipeline
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.softmax import multiply_rows, rescale_rows
from cute_attn.kernels.forward_sm90.consumer import MainLoop
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardParams,
    ForwardStorage,
    PipelineState,
    fragments_of,
    smem_tensor,
    tensor_at,
)
from cute_attn.outputs.partial import store_lse
from cute_attn.outputs.staged_output import ForwardOutputs, OutputStore
from cute_attn.rows.tma import LastUse, QueryBuffer
from cute_attn.tiles import padded
from cute_attn.work.broadcast import WorkBroadcast
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import Replay, WorkItemId

SCORES, VALUES = 0, 1
"""Indices of the consumer warpgroups and of their halves of O's columns. SCORES also computes P."""


@dataclass(frozen=True)
class SharedProbabilities:
    """P of one step and the factors that rescale the rows of O: written by one warpgroup, read by two.

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

    Attributes:
        score_warps: warps that compute scores and no columns of O.
        latent: V is the first columns of K, in K's memory and with K's pipeline.
    """

    p: SharedProbabilities
    score_warps: Constexpr = 0
    latent: Constexpr = False

    @cute.jit
    def init(self, warpgroups: Constexpr, lane: Int32) -> None:
        both: Constexpr = 4 * warpgroups
        with cute.arch.elect_one():
            self.q.pipeline.init(self.score_warps or both)
            self.pipeline_k.init(both if self.latent else 4)
            if cutlass.const_expr(not self.latent):
                self.pipeline_v.init(both)
            self.p.pipeline.init(both, producers=4)
            self.work.pipeline.init(both + self.score_warps)
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
        Replay.make(base + tile.REPLAY_START, tile.num_threads - 96),  # one warp loads
        None,
        SharedProbabilities(p, factors, pipelines[3]),
        tile.score_warps,
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


@dataclass(frozen=True)
class HalfOutput:
    """Half of O's columns, in one warpgroup's registers: O += P V, with P in shared memory."""

    kernel: Constexpr
    storage: LargeStorage
    thread: ConsumerThread

    @cute.jit
    def rescale(self) -> None:
        """Multiply O's rows by the thread's ``factors``."""
        op = self.thread.fragments
        rescale_rows(op.acc_o_rows, op.factors, self.kernel.tile.rescale_threshold > 0)

    @cute.jit
    def start(self, n: Int32, use: Int32) -> None:
        """Issue O += P V with use n of V's pipeline and ``use`` of P's, whose P has arrived."""
        storage, op = self.storage, self.thread.fragments
        storage.pipeline_v.consumer_wait(n)
        p = op.p_operand[None, None, None, storage.p.pipeline.stage(use)]
        v = op.v[None, None, None, storage.pipeline_v.stage(n)]
        start_gemm(self.kernel.mma_pv(), op.acc_o, p, v, True)

    @cute.jit
    def release(self, n: Int32, use: Int32) -> None:
        """Release the stages of V and P, after the product is complete."""
        self.storage.pipeline_v.consumer_release(n, Accessed.BY_WGMMA)
        self.storage.p.pipeline.consumer_release(use, Accessed.BY_THREADS)


@dataclass(frozen=True)
class ScoreLoop(MainLoop):
    """The loop of the warpgroup that computes P: S, softmax and P of a key block, during P V of the previous block."""

    storage: LargeStorage

    @property
    def tiles_before(self) -> Int32:
        """Number of the CTA's previous work tiles. Each used P's pipeline once more than it has key blocks."""
        return self.uses.queries

    @property
    def output(self) -> HalfOutput:
        """The warpgroup's half of O."""
        return HalfOutput(self.kernel, self.storage, self.thread)

    @cute.jit
    def first_step(self) -> None:
        scores, acc_s = self.first_probabilities()
        self.zero_values_out_of_bounds(self.blocks.end - 1, self.uses.keys)
        self.publish(scores, acc_s, self.uses.keys)

    @cute.jit
    def step(self, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Compute S and P of ``block``, and P V of the block visited before."""
        storage, n = self.storage, self.uses.keys + (self.blocks.end - 1 - block)
        scores, acc_s, loaded = self.score_tile(block, n)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(acc_s, n)
        self.start_pv(n - 1)
        warpgroup.wait_group(1)
        self.release_keys(n)
        self.probabilities(scores, loaded, masked, False)
        self.publish(scores, acc_s, n)
        warpgroup.wait_group(0)
        self.output.release(n - 1, n - 1 + self.tiles_before)
        self.output.rescale()

    @cute.jit
    def last_product(self) -> None:
        n = self.uses.keys + (self.blocks.end - 1 - self.blocks.begin)
        self.start_pv(n)
        warpgroup.wait_group(0)
        self.output.release(n, n + self.tiles_before)

    @cute.jit
    def start_pv(self, n: Int32) -> None:
        """Issue the first half of O += P V with use n of V's pipeline, once all warps have written P."""
        self.storage.p.pipeline.consumer_wait(n + self.tiles_before)
        self.output.start(n, n + self.tiles_before)

    @cute.jit
    def publish(self, scores: ScoreTile, acc_s: cute.Tensor, n: Int32) -> None:
        """Store P, in 16 bits with dropout, and O's rescaling factors to shared memory."""
        kernel, p, use = self.kernel, self.storage.p, n + self.tiles_before
        self.convert(scores, acc_s)
        p.pipeline.producer_wait(use)
        store = layouts.store_copy_c(kernel.mma_qk(), kernel.dtype, "sm90")
        mine = store.get_slice(self.thread.index)
        target = mine.partition_D(p.tensor[None, None, p.pipeline.stage(use)])
        cute.copy(store, mine.retile(self.thread.fragments.p), target)
        p.write_factors(self.thread.fragments.factors, self.score_map, use)
        p.commit(use)

    @cute.jit
    def finish_rows(self, sinks: Constexpr) -> cute.Tensor:
        """Set the thread's factors to normalize O's rows; returns the rows' LSE. sinks: one per row, or None."""
        factors, rescale = self.thread.fragments.factors, self.kernel.epilogues.rescale(self.state)
        lse = cute.make_rmem_tensor_like(factors)
        for r in cutlass.range_constexpr(cute.size(factors)):
            factors[r], lse[r] = self.softmax.finish_row(r, rescale, sinks)
        return lse

    @cute.jit
    def publish_factors(self, score_map: ScoreMap) -> Int32:
        """Publish the factors that normalize O; returns the use of P's pipeline."""
        p, use = self.storage.p, self.uses.keys + (self.blocks.end - self.blocks.begin) + self.tiles_before
        p.pipeline.producer_wait(use)
        p.write_factors(self.thread.fragments.factors, score_map, use)
        p.commit(use)
        return use


@dataclass(frozen=True)
class ScoreResults:
    """Stores the results of the warpgroup that computes S and P: LSE, and the first half of O's columns."""

    params: ForwardParams
    outputs: ForwardOutputs

    @cute.jit
    def store(self, loop: ScoreLoop) -> OutputStore:
        """Publish the factors that normalize O; store LSE and the first half of O's columns."""
        kernel, storage, own = loop.kernel, loop.storage, loop.thread
        thread, fragments, tile = rematerialize(own.index), own.fragments, loop.query_tile
        score_map = kernel.score_map(thread)
        lse = loop.finish_rows(loop.sinks(self.params, thread))
        use = loop.publish_factors(score_map)
        storage.p.pipeline.consumer_release(use, Accessed.BY_THREADS)  # this warpgroup has the factors
        multiply_rows(fragments.acc_o_rows, fragments.factors)
        store_lse(self.outputs.mLSE, lse, score_map, tile, kernel.traits.varlen)
        kernel.epilogues.store_maxima(loop.state, loop.softmax.seen, score_map, tile.row0)
        s_o = storage.s_o[None, None, SCORES]
        output = OutputStore(kernel, self.outputs, s_o, own.group, thread, SCORES)
        output.store(fragments.acc_o, tile)
        return output


@dataclass(frozen=True)
class ValueConsumer(ForwardRole):
    """The warpgroup with the second half of O's columns; it multiplies another warpgroup's P by V.

    outputs: where O is stored; a subclass may use another class.
    """

    storage: LargeStorage
    outputs: Any
    thread: ConsumerThread

    stores_by_tma: ClassVar[bool] = True

    def run(self) -> None:
        super().run()
        if self.stores_by_tma:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        queries, keys = pipeline_state.queries, pipeline_state.keys
        q, op, blocks = self.storage.q, self.thread.fragments, self.blocks_of(tile)
        op.acc_o.fill(0.0)
        q.pipeline.consumer_wait(queries)  # O reuses its memory
        end = keys + (blocks.end - blocks.begin)
        self.multiply(keys, end, queries)
        s_o = self.storage.s_o[None, None, VALUES]
        output = OutputStore(self.kernel, self.outputs, s_o, self.thread.group, self.thread.index, VALUES)
        output.store(op.acc_o, tile)
        output.wait()
        q.release_after(LastUse.STORE, queries)
        return PipelineState(queries + 1, end)

    @cute.jit
    def multiply(self, begin: Int32, end: Int32, queries: Int32) -> None:
        """Compute normalised O from uses [begin, end) of V's pipeline; queries: number of previous work tiles."""
        p, op, score_map = self.storage.p, self.thread.fragments, self.score_map()
        for n in cutlass.range(begin, end, unroll=1):
            self.step(score_map, n, n + queries)
        p.pipeline.consumer_wait(end + queries)
        p.read_factors(op.factors, score_map, end + queries)
        p.pipeline.consumer_release(end + queries, Accessed.BY_THREADS)
        multiply_rows(op.acc_o_rows, op.factors)

    def score_map(self) -> ScoreMap:
        """The map of the rows and columns of O that the thread holds."""
        kernel, tile = self.kernel, self.kernel.tile
        columns = tile.columns_of_v(kernel.traits)
        return ScoreMap.make(kernel.mma_pv(), tile.tile_m, columns, self.thread.index)

    @cute.jit
    def step(self, score_map: ScoreMap, n: Int32, use: Int32) -> None:
        """Rescale O and add P V, with use n of V's pipeline and ``use`` of P's."""
        p, output = self.storage.p, HalfOutput(self.kernel, self.storage, self.thread)
        p.pipeline.consumer_wait(use)
        p.read_factors(self.thread.fragments.factors, score_map, use)
        output.rescale()
        output.start(n, use)
        warpgroup.wait_group(0)
        output.release(n, use)
