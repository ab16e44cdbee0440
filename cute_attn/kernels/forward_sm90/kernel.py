"""The Hopper forward: attention with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

The kernel is persistent: each CTA claims work tiles (a query block of a head) until none is left. The producer warp
claims and broadcasts work tiles. For each it loads Q once, then K and V block by block, last block first, into
pipelines of ``num_stages`` stages. One to four consumer warpgroups compute 64 rows of the tile each:

    S[0] = Q K[0]; softmax                              the first key block
    for j = 1, 2, ...
        ping-pong barrier: wait until the previous warpgroup has issued its products
        issue S[j] = Q K[j]
        issue O += P[j - 1] V[j - 1]
        ping-pong barrier: the next warpgroup may issue
        wait for S[j]; epilogues, online softmax        overlaps P V of this warpgroup and the next one's products
        wait for O; rescale it; P[j] to 16 bits
    O += P V of the last block

With ``speculative``, row maxima are stale (no longer updated) after the masked blocks. A work tile with a row whose sum
exceeds 2^40 is replayed with exact online softmax. After the masked blocks every row has seen a key (``BlockRange``),
unless a bias has hidden the row's keys: a warpgroup with such a row runs exact steps at once.

Overlap of products and softmax within a warpgroup and, by ping-pong, between warpgroups follows FlashAttention-3 (Shah
et al. 2024, https://arxiv.org/abs/2407.08608). The next tile's loads overlap the store of O.

Limits: fp16 and bf16; head dims up to 256, multiples of 8, padded to multiples of 32 in shared memory; rows 16-byte
aligned with a contiguous last dimension. For head dims above 256 see :mod:`cute_attn.kernels.head_dim_512_sm90.kernel`.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

import layouts
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.device.score_tile import ScoreMap
from cute_attn.kernels import fakes
from cute_attn.kernels.base import PRODUCTS_OF, AttentionKernel, StepContent, beyond, wgmma_count
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.forward_sm90.consumer import Consumer, MainLoop, StagedResults
from cute_attn.kernels.forward_sm90.heuristics import TABLE, keys
from cute_attn.kernels.forward_sm90.lengths import tile_for_lengths
from cute_attn.kernels.forward_sm90.producer import BiasProducer, Producer, TileLoads
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardInputs,
    ForwardParams,
    ForwardStorage,
    make_storage,
)
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import ROWS, bias_tma
from cute_attn.tiles import ForwardSm90Tile, Sizes, padded
from cute_attn.traits import Traits
from cute_attn.work.query_tiles import QueryTileOrder


@dataclass(frozen=True)
class ForwardSm90(AttentionKernel):
    """The forward kernel for (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: ForwardSm90Tile

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        return beyond(traits, "forward-sm90")

    table: ClassVar[Any] = TABLE
    keys: ClassVar[Any] = staticmethod(keys)

    def tile_for(self, target: str, sizes: Sizes) -> ForwardSm90Tile:
        """A kernel with another tile than the package's default keeps its tile."""
        if self.tile != ForwardSm90.default_tile(self.traits, target):
            return self.tile
        return tile_for_lengths(self.tile, self.traits, sizes)

    def without_tma_bias(self) -> "ForwardSm90":
        """This kernel, whose tile is the default or chosen by lengths, with a bias read by threads instead of TMA."""
        if self.tile.tile_m == 64:
            tile = dataclasses.replace(self.tile, bias_stages=0, speculative=False)
            # Without a bias in shared memory, two CTAs of few rows may fit: twice the loads in flight.
            two = dataclasses.replace(tile, blocks_per_sm=2, speculative=True)
            few = tile.blocks_per_sm == 1 and two.reject(self.traits, "sm90") is None
            return dataclasses.replace(self, tile=two if few else tile)
        tile = TABLE.first(self.traits, "sm90", *keys(self.traits, "sm90", tma=False))
        return dataclasses.replace(self, tile=tile)

    @property
    def loads_bias_by_tma(self) -> bool:
        """True if TMA loads the bias, whose strides and address must then be aligned like those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def can_visit_lists(self) -> bool:
        """True if the kernel can skip blocks that a block list omits; without a cache, packed heads prevent it."""
        op = self.traits.op
        return op == "kvcache" or (op in ("forward", "jvp") and self.tile.pack_heads == 1)

    def step_content(self) -> StepContent:
        """Instruction counts of a step of the unmasked loop.

        Stale row maxima, and those that only a score above the threshold replaces, save two rows' factors.
        """
        tile, d, dv = self.tile, padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        qk = wgmma_count(tile.tile_m, tile.tile_n, d, tile.warpgroups)
        pv = wgmma_count(tile.tile_m, dv, tile.tile_n, tile.warpgroups)
        elements = tile.tile_n // 2
        exp2 = elements * (1 + self.traits.softcap) + (0 if tile.speculative or tile.rescale_threshold else 2)
        loaded = 2 * tile.tile_n * (tile.NUMBERS * (d + dv) + (tile.tile_m if tile.bias_stages else 0))
        mma = PRODUCTS_OF[tile.NUMBERS] * (qk + pv)
        return StepContent(mma, exp2, elements, 4 * tile.warpgroups, async_bytes=loaded)

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    def smem_layout(self, rows: int, head_dim: int, stages: int | None = None) -> cute.ComposedLayout:
        """Layout (rows, padded head_dim[, stages]) in shared memory, with a swizzle for TMA and wgmma."""
        return layouts.wgmma_smem_layout(rows, padded(head_dim), self.dtype, stages=stages)

    def bias_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """Layout of a warpgroup's bias tile in shared memory, written by TMA: (ROWS, tile_n[, stages])."""
        dtype = fakes.CUTE_DTYPES[self.traits.bias]
        return layouts.wgmma_smem_layout(ROWS, self.tile.tile_n, dtype, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """The MMA of S = Q K^T: K from shared memory, Q from shared memory or registers."""
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            tile.tile_m,
            tile.tile_n,
            warpgroups=tile.warpgroups,
            a_source="rmem" if tile.q_in_regs else "smem",
        )

    def mma_pv(self) -> cute.TiledMma:
        """The MMA of O += P V: P from registers, V from shared memory with head_dim_v contiguous."""
        tile, dv = self.tile, padded(self.traits.head_dim_v)
        return layouts.tiled_mma_sm90(
            self.dtype, tile.tile_m, dv, warpgroups=tile.warpgroups, a_source="rmem", b_major="mn"
        )

    def gmem_store(self) -> cute.TiledCopy:
        """A warpgroup's copy of O from shared to global memory, used where TMA would write rows beyond the sequence."""
        return layouts.gmem_tiled_copy(self.dtype, WARPGROUP, self.output_columns, asynchronous=False)

    def copies(self) -> Copies:
        """Layouts, copies and MMAs, see :class:`Copies`. Threads copy only Q into registers and O out of registers."""
        traits, tile, groups = self.traits, self.tile, self.tile.warpgroups
        numbers = tile.NUMBERS
        d, dv, found = traits.head_dim, traits.head_dim_v, Copies(self, WARPGROUP * groups)
        for name, rows, dim, stages in (
            *(("k", tile.tile_n, d, numbers * tile.num_stages), ("q", ROWS, d, numbers * groups)),
            *(("v", tile.tile_n, dv, numbers * tile.num_stages), ("o", ROWS, dv, groups)),
        ):
            found.area(name, (rows, padded(dim), stages), "smem_layout", rows, dim, stages)
        if self.loads_bias_by_tma:
            shape = (ROWS, tile.tile_n, tile.bias_stages)
            found.area("bias", shape, "bias_layout", shape[2], of=fakes.CUTE_DTYPES[traits.bias], by=groups)
        found.part("copy-smem-to-gmem", "gmem_store", threads=WARPGROUP)
        found.part("mma-qk", "mma_qk").part("mma-pv", "mma_pv")
        if tile.q_in_regs:
            found.ldmatrix("Q", "A", self.mma_qk, lambda: self.smem_layout(tile.tile_m, d))
        return self.move_output(found)

    def move_output(self, found: Copies) -> Copies:
        """Add to ``found`` the copy of a warpgroup's O from registers to shared memory."""
        mma = functools.partial(layouts.tiled_mma_sm90, warpgroups=1, a_source="rmem", b_major="mn")
        columns = self.output_columns
        layout = functools.partial(self.smem_layout, ROWS, columns)
        return found.store("O", lambda: mma(self.dtype, ROWS, columns), layout)

    @property
    def divides_columns(self) -> bool:
        """True if warpgroups divide the columns of O. False here: they divide its rows."""
        return False

    @property
    def output_columns(self) -> int:
        """Columns of O that a warpgroup has in registers and stores."""
        return padded(self.traits.head_dim_v)

    @property
    def stores_by_tma(self) -> bool:
        """True if sequences end at the tensor's end, so that TMA's bounds check suffices to store O."""
        return not (self.traits.varlen or self.traits.seqused_q)

    @property
    def has_values_out_of_bounds(self) -> bool:
        """True if loads of V include rows outside the sequence. These must be zeroed, since 0 * NaN is NaN."""
        return self.traits.varlen or self.traits.seqused_k

    @property
    def may_hide_rows(self) -> bool:
        """True if a row may have seen no key after the masked blocks of a speculative kernel, because of a bias."""
        return self.tile.speculative and self.epilogues.may_mask_rows

    def score_map(self, thread: Int32) -> ScoreMap:
        """The map of the scores that a consumer thread holds."""
        tile = self.tile
        return ScoreMap.make(self.mma_qk(), tile.tile_m, tile.tile_n, thread, heads=tile.pack_heads)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        inputs = self.inputs(mQ, mK, mV, score_args)
        outputs = self.outputs(mO, mLSE, mK)
        self.launch(mQ, mK, inputs, outputs, seqlens, softmax_scale, schedule, score_args, stream)

    def inputs(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, score_args: tuple) -> ForwardInputs:
        """The operands as tiles that TMA loads."""
        traits, tile, load = self.traits, self.tile, cpasync.CopyBulkTensorTileG2SOp()
        return ForwardInputs(
            self.rows(load, mQ, 64, traits.head_dim, tile.pack_heads, mK.shape[-2]),
            self.rows(load, mK, tile.tile_n, traits.head_dim),
            self.values(load, mV),
            bias_tma(self.epilogues.bias(score_args), self.bias_layout()) if self.loads_bias_by_tma else None,
        )

    def outputs(self, mO: cute.Tensor, mLSE: cute.Tensor, mK: cute.Tensor) -> ForwardOutputs:
        """O as tiles that TMA stores, O and LSE."""
        store, heads = cpasync.CopyBulkTensorTileS2GOp(), self.tile.pack_heads
        return ForwardOutputs(self.rows(store, mO, 64, self.output_columns, heads, mK.shape[-2]), mO, mLSE)

    def launch(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        inputs: ForwardInputs,
        outputs: Any,
        seqlens: Any,
        softmax_scale: Float32,
        schedule: Any,
        score_args: tuple,
        stream: cuda.CUstream,
    ) -> None:
        """Launch as many CTAs as fit on the multiprocessors, but at most one per work tile."""
        traits, tile = self.traits, self.tile
        key_bytes = 2 * (traits.head_dim + traits.head_dim_v)
        order = QueryTileOrder.make(seqlens, mQ, mK, key_bytes, tile.queries, tile.pack_heads, traits.causal)
        params = ForwardParams(seqlens, softmax_scale, score_args, order, schedule.counters, mQ.shape[-2])
        self.kernel(params, inputs, outputs).launch(
            grid=[cutlass.min(tile.blocks_per_sm * schedule.multiprocessors, order.total), 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tile.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def values(self, op: Any, mV: cute.Tensor) -> TmaTiles:
        return self.rows(op, mV, self.tile.tile_n, self.traits.head_dim_v)

    def rows(
        self, op: Any, tensor: cute.Tensor, rows: int, head_dim: int, heads: int = 1, nheads_kv: Any = 1
    ) -> TmaTiles:
        """TMA tiles of (rows, padded head_dim): see ``TmaTiles.make``. Tensors of three dimensions are packed."""
        layout, shape = self.smem_layout(rows, head_dim), (rows, padded(head_dim))
        return TmaTiles.make(op, tensor, layout, shape, cute.rank(tensor) == 3, heads, nheads_kv)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: ForwardParams, inputs: ForwardInputs, outputs: ForwardOutputs) -> None:
        self.run(params, inputs, outputs)

    @cute.jit
    def run(self, params: ForwardParams, inputs: ForwardInputs, outputs: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        storage = self.storage()
        if warp == 0:
            for tma in (inputs.q, inputs.k, inputs.v):
                cpasync.prefetch_descriptor(tma.atom)
            storage.init(self.tile.warpgroups, thread)
        self.wait_for_inputs()
        cute.arch.sync_threads()
        self.run_roles(params, storage, inputs, outputs, warp, thread)

    def wait_for_inputs(self) -> None:
        """Wait for a kernel that writes this one's inputs, if this one starts early."""

    def storage(self) -> ForwardStorage:
        """The CTA's shared storage."""
        return make_storage(self)

    @cute.jit
    def run_roles(
        self,
        params: ForwardParams,
        storage: ForwardStorage,
        inputs: ForwardInputs,
        outputs: ForwardOutputs,
        warp: Int32,
        thread: Int32,
    ) -> None:
        """Set each warpgroup's register count and run its role: the first warpgroup loads, the others compute."""
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                self.produce(params, storage, inputs)
            if cutlass.const_expr(self.loads_bias_by_tma):
                if (warp > 0) & (warp <= self.tile.warpgroups):
                    BiasProducer(self, params, storage, inputs.bias, warp - 1).run()
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            self.consume(params, storage, outputs, warp, thread)

    def produce(self, params: ForwardParams, storage: ForwardStorage, inputs: ForwardInputs) -> None:
        """Claim and load work tiles, by the producer warp."""
        Producer(self, params, storage, self.loads(inputs, storage, params)).run()

    def loads(self, inputs: ForwardInputs, storage: ForwardStorage, params: ForwardParams) -> Any:
        """How the producer loads a work tile."""
        return TileLoads(inputs, storage)

    def consume(
        self,
        params: ForwardParams,
        storage: ForwardStorage,
        outputs: ForwardOutputs,
        warp: Int32,
        thread: Int32,
    ) -> None:
        """Compute a consumer warpgroup's rows of all work tiles."""
        consumer = ConsumerThread.make(self, storage, thread - WARPGROUP)
        self.consumer(self, params, storage, consumer, MainLoop, self.results(params, outputs)).run()

    @property
    def consumer(self) -> type[Consumer]:
        """The class that consumer warpgroups run."""
        return Consumer

    def results(self, params: ForwardParams, outputs: ForwardOutputs) -> Any:
        return StagedResults(params, outputs)
