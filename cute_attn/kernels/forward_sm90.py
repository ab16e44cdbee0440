"""The Hopper forward: attention with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

One warp loads: Q once a query block, then K and V block by block, last one first, into rings of ``num_stages`` buffers.
One to three warpgroups compute, each 64 of the block's queries:

    S[0] = Q K[0]; softmax                              the first key block
    take the turn                                       then, for j = 1, 2, ...
        start S[j] = Q K[j]
        start O += P[j - 1] V[j - 1]
    give the turn to the next warpgroup
    wait for S[j]; epilogues, online softmax            beside P V of this warpgroup and all products of the next
    wait for O; rescale it; P[j] to 16 bits
    O += P V of the last block

Most steps do not look for a maximum (``optimistic``): the one in use after the first step is nearly always large enough
for 2^40 to spare, a row's sum says if it was not, and then its query block is computed a second time, with maxima.
Where a bias may hide whole key blocks, the first one too, 0 is in use until a score exceeds it, which sums tell in the
same way; a warpgroup that once failed looks for maxima from then on (``wary``).

In a cluster of two, both blocks' loading warps bring half of each K and V to both (``cluster``): the blocks have
neighbouring query blocks of a head, walk over the key blocks that either needs, and pass by those that they do not.

Within a warpgroup the tensor cores work while it exponentiates (overlap), and between warpgroups they never stand still
(turns). Blocks are persistent: the next query block's loads start while O is on its way out. The scheme is
FlashAttention-3's (Shah et al. 2024, https://arxiv.org/abs/2407.08608).

Limits: fp16 and bf16; head dims up to 256, multiples of 8, padded to multiples of 32 in shared memory; rows 16-byte
aligned with a contiguous last dimension.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.device.block_range import BlockRange
from cute_attn.device.cluster import meet_cluster
from cute_attn.device.math import LOG2_E, anew, narrow, opaque
from cute_attn.device.output import store_lse
from cute_attn.device.pipeline import WARPGROUP, Turns, warpgroup_any, warpgroup_barrier
from cute_attn.device.redo import SECTION
from cute_attn.device.scheduler import TileOrder
from cute_attn.device.score_tile import ScoreContext, ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens
from cute_attn.device.staged import ROWS, bias_tma
from cute_attn.device.tma import Tma
from cute_attn.device.wgmma import start_gemm
from cute_attn.device.work import QueryBlock
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.arguments import CUTE_DTYPES, forward_fake_args
from cute_attn.kernels.forward_sm90_load import brings_queries, load_all
from cute_attn.kernels.forward_sm90_parts import (
    Crew,
    Fragments,
    Inputs,
    Outputs,
    Problem,
    Shared,
    Walk,
    Work,
    all_rows,
    make_fragments,
    shared_memory,
)
from cute_attn.kernels.forward_sm90_store import (
    share_probabilities,
    store_output,
    store_softmax,
    wait_for_stores,
)
from cute_attn.kernels.forward_sm90_tiles import FITS_ALWAYS, preferred_tiles, tile_for_lengths
from cute_attn.tiles import ForwardSm90Tile, first_that_fits, padded
from cute_attn.traits import Traits

L2_SECTION_BYTES = 32 << 20
"""How many bytes of K and V the heads that are worked on together may have: what stays in a 50 MB L2."""

LARGEST_SUM = 2.0**40
"""What a thread's probabilities of a row may add up to under too small a maximum: far from where fp32 ends."""
SMALLEST_SUM = {"bf16": 2.0**-60, "fp16": 2.0**-6}
"""What a row's may add up to under too large a maximum: of their 16 bits none that count have vanished."""


@dataclass(frozen=True)
class ForwardSm90:
    """Forward kernel of (traits, tile); call it to trace the host side, see ``__call__``."""

    traits: Traits
    tile: ForwardSm90Tile

    # ---- what it serves ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("forward", "sm90"):
            return f"it computes forward-sm90, not {traits.op}-{traits.arch}"
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm90Tile:
        """The tile that is taken when none is named."""
        return first_that_fits([*preferred_tiles(traits), FITS_ALWAYS], traits, target)

    def for_lengths(self, seqlen_q: int, seqlen_k: int, group: int) -> "ForwardSm90":
        """This kernel, which has its default tile, with the one for sequences of at most such lengths.

        ``group``: query heads of a key head.
        """
        tile = tile_for_lengths(self.traits, seqlen_q, seqlen_k, group)
        return dataclasses.replace(self, tile=tile) if tile else self

    def without_staged_bias(self) -> "ForwardSm90":
        """This kernel, which has its default tile, for a bias that TMA cannot read."""
        tiles = [tile for tile in preferred_tiles(self.traits) if not tile.bias_stages]
        return dataclasses.replace(self, tile=first_that_fits([*tiles, FITS_ALWAYS], self.traits, "sm90"))

    @property
    def stages_bias(self) -> bool:
        """Whether TMA brings the bias: its strides and its address then have to be those of q, k and v."""
        return self.tile.bias_stages > 0

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)

    def fake_args(self) -> tuple:
        """The arguments of ``__call__`` for compiling, without the stream."""
        return forward_fake_args(self.traits, (Int32(0), *self.epilogues.fake_args()))

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The GPU's number of multiprocessors and the epilogues' arguments of one launch."""
        return (_multiprocessors(), *self.epilogues.host_args(inputs))

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V and O."""
        return CUTE_DTYPES[self.traits.dtype]

    def smem_layout(self, rows: int, head_dim: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, padded head_dim[, stages]) in shared memory, as TMA writes and wgmma reads it."""
        return layouts.wgmma_smem_layout(rows, padded(head_dim), self.dtype, stages=stages)

    def bias_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """A warpgroup's tile of the bias in shared memory, as TMA writes it: (ROWS, tile_n[, stages])."""
        dtype = CUTE_DTYPES[self.traits.bias]
        return layouts.wgmma_smem_layout(ROWS, self.tile.tile_n, dtype, stages=stages)

    def p_layout(self) -> cute.ComposedLayout:
        """P in shared memory, as wgmma reads it: (64, tile_n, warpgroup)."""
        return layouts.wgmma_smem_layout(64, self.tile.tile_n, self.dtype, stages=self.tile.warpgroups)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T, K from shared memory and Q from there or from registers."""
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            tile.tile_m,
            tile.tile_n,
            warpgroups=tile.warpgroups,
            a_source="rmem" if tile.q_in_regs else "smem",
        )

    def mma_pv(self) -> cute.TiledMma:
        """O += P V, P from registers or shared memory and V as it lies in memory, head_dim_v contiguous."""
        tile, dv = self.tile, padded(self.traits.head_dim_v)
        source = "smem" if tile.p_in_smem else "rmem"
        return layouts.tiled_mma_sm90(
            self.dtype, tile.tile_m, dv, warpgroups=tile.warpgroups, a_source=source, b_major="mn"
        )

    def gmem_store(self) -> cute.TiledCopy:
        """Shared to global memory by one warpgroup, where TMA would write rows that are not there."""
        return layouts.gmem_tiled_copy(
            self.dtype, WARPGROUP, padded(self.traits.head_dim_v), asynchronous=False
        )

    @property
    def stores_by_tma(self) -> bool:
        """Whether a query block's rows end where the tensor's do, so that TMA leaves out what does not exist."""
        return not (self.traits.varlen or self.traits.seqused_q)

    @property
    def foreign_values(self) -> bool:
        """Whether rows of V behind a sequence's last are somebody else's: they may be NaN, and 0 * NaN is NaN."""
        return self.traits.varlen or self.traits.seqused_k

    @property
    def walks(self) -> int:
        """How often K and V are walked over: once more to write the probabilities, when LSE is known."""
        return 2 if self.traits.return_softmax else 1

    @property
    def may_be_wary(self) -> bool:
        """Whether a warpgroup's optimism ends with its first failure: something may hide keys from whole rows."""
        return self.tile.optimistic and self.epilogues.may_mask_rows

    @property
    def releases_q_late(self) -> bool:
        """Whether Q's shared memory is needed until the output has been stored."""
        return self.tile.share_qo_smem or self.traits.return_softmax

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSoftmax: cute.Tensor | None,
        seqlens: Seqlens,
        softmax_scale: Float32,
        score_args: tuple,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Shapes: see ``cute_attn.kernels.arguments``; score_args starts with the number of multiprocessors."""
        traits, tile = self.traits, self.tile
        batch = seqlens.batch(mQ)
        nheads, nheads_kv = (mQ.shape[1], mK.shape[1]) if traits.varlen else (mQ.shape[2], mK.shape[2])
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, tile.queries * tile.cluster)
        head_bytes = cutlass.max(seqlens.max_seqlen_k, 1) * (2 * (traits.head_dim + traits.head_dim_v))
        packs = nheads // tile.pack_heads
        planes = cutlass.max(L2_SECTION_BYTES // head_bytes, 1) * (packs // cutlass.max(nheads_kv, 1))
        blocks = m_blocks * packs * batch
        if cutlass.const_expr(tile.persistent):
            blocks = tile.blocks_per_sm * score_args[0] // tile.cluster
        order = TileOrder.make(
            m_blocks, packs, nheads_kv, batch, planes, blocks, traits.causal, tile.pack_heads, tile.cluster
        )
        load, load_parts = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SOp()
        if cutlass.const_expr(tile.cluster > 1):
            load_parts = cpasync.CopyBulkTensorTileG2SMulticastOp()
        inputs = Inputs(
            self.tma(load, mQ, 64, traits.head_dim, tile.pack_heads),
            self.tma(load_parts, mK, tile.tile_n, traits.head_dim, cluster=tile.cluster),
            self.tma(load_parts, mV, tile.tile_n, traits.head_dim_v, cluster=tile.cluster),
            bias_tma(self.epilogues.bias(score_args[1:]), self.bias_layout()) if self.stages_bias else None,
        )
        tma_o = self.tma(cpasync.CopyBulkTensorTileS2GOp(), mO, 64, traits.head_dim_v, tile.pack_heads)
        problem = Problem(seqlens, softmax_scale, score_args[1:], order, nheads)
        self.kernel(problem, inputs, Outputs(tma_o, mO, mLSE, mSoftmax)).launch(
            grid=[order.blocks * tile.cluster, 1, 1],
            block=[tile.num_threads, 1, 1],
            cluster=[tile.cluster, 1, 1] if tile.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=tile.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def tma(
        self, op: Any, tensor: cute.Tensor, rows: int, head_dim: int, heads: int = 1, cluster: int = 1
    ) -> Tma:
        """TMA's view of (batch, rows, heads, head_dim) or packed (rows, heads, head_dim), by tiles.

        heads: how many of them alternate as a tile's rows; cluster: by how many parts of a tile.
        """
        packed = self.traits.varlen
        rows //= cluster
        layout = cute.select(tensor.layout, mode=[0, 2, 1] if packed else [1, 3, 2, 0])
        extents: Any = rows
        if heads > 1:
            order = [1, 0, 2] if packed else [2, 1, 3, 0]
            layout = cute.group_modes(cute.select(tensor.layout, mode=order), 0, 2)
            extents = (heads, rows // heads)
        view = cute.make_tensor(tensor.iterator, layout)
        smem_layout = self.smem_layout(rows, head_dim)
        atom, coords = cpasync.make_tiled_tma_atom(op, view, smem_layout, (extents, padded(head_dim)))
        return Tma(atom, coords, heads, cluster)

    # ---- device ----

    @cute.kernel
    def kernel(self, problem: Problem, inputs: Inputs, outputs: Outputs) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        shared = shared_memory(self)
        if warp == 0:
            for tma in (inputs.q, inputs.k, inputs.v):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for ring in (shared.ring_q, shared.ring_k, shared.ring_v):
                    ring.init(4 * self.tile.warpgroups)
                if cutlass.const_expr(self.stages_bias):
                    shared.bias.init()
            cute.arch.mbarrier_init_fence()
            shared.redo.clear(thread)
        if cutlass.const_expr(self.tile.cluster > 1):
            meet_cluster()  # before this, its peer's barriers are not to be touched
        else:
            cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                load_all(self, problem, inputs, shared, None)
            if cutlass.const_expr(self.stages_bias):
                if (warp > 0) & (warp <= self.tile.warpgroups):
                    load_all(self, problem, inputs, shared, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            self.compute_all(problem, outputs, shared, thread - WARPGROUP)

    def begin(self, problem: Problem, place: QueryBlock) -> tuple[ScoreContext, ScoreState]:
        """The epilogues of one query block."""
        chain, args = self.epilogues, problem.score_args
        context = chain.context(
            args, problem.seqlens, place.info, place.batch, place.head, problem.nheads, problem.softmax_scale
        )
        return context, chain.begin(args, context)

    def key_blocks(self, place: QueryBlock, state: ScoreState) -> BlockRange:
        """The key blocks that one query block visits."""
        end_row = cutlass.min(place.row0 + self.tile.queries, place.info.seqlen_q)
        return BlockRange.of_queries(state.band, place.row0, end_row, self.tile.tile_n)

    # ---- the computing warpgroups ----

    @cute.jit
    def compute_all(self, problem: Problem, outputs: Outputs, shared: Shared, thread: Int32) -> None:
        """Every query block that this block is dealt."""
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        turns = Turns(group, self.tile.warpgroups, self.tile.take_turns and self.tile.warpgroups > 1)
        fragments = make_fragments(self, shared, group)
        crew = Crew(group, thread, turns, fragments)
        turns.open()
        counts = (Int32(0), Int32(0), Int32(0)) if self.may_be_wary else (Int32(0), Int32(0))
        for first in cutlass.range(0, problem.order.rounds, SECTION, unroll=1):
            end = cutlass.min(first + SECTION, problem.order.rounds)
            if cutlass.const_expr(self.may_be_wary):
                counts = self.compute_warily(problem, outputs, shared, crew, first, end, counts)
            else:
                for deal in cutlass.range(first, end, unroll=1):
                    counts = self.compute_deal(
                        problem, outputs, shared, crew, deal, counts, self.tile.optimistic
                    )
            if cutlass.const_expr(self.tile.optimistic and not self.may_be_wary):
                cute.arch.cp_async_bulk_wait_group(0)  # what may be wrong has arrived before what is right
                shared.redo.meet()
                if shared.redo.any():
                    for deal in cutlass.range(first, end, unroll=1):
                        if shared.redo.failed(deal):
                            counts = self.compute_deal(problem, outputs, shared, crew, deal, counts, False)
                    shared.redo.forget(thread, False)
        turns.close()
        cute.arch.cp_async_bulk_wait_group(0)
        if cutlass.const_expr(self.tile.cluster > 1):
            meet_cluster()  # until then another block may load into this one's shared memory, or arrive there

    @cute.jit
    def compute_warily(
        self,
        problem: Problem,
        outputs: Outputs,
        shared: Shared,
        crew: Crew,
        first: Int32,
        end: Int32,
        counts: tuple,
    ) -> tuple:
        """Deals [first, end), then what failed of them again; by the same code, so that there is little of it.

        counts: as for ``compute_deal``, and whether this warpgroup failed before.
        """
        queries, keys, failures = counts
        for again in cutlass.range(2, unroll=1):
            if again == 1:
                cute.arch.cp_async_bulk_wait_group(0)  # what may be wrong has arrived before what is right
                shared.redo.meet()
            for deal in cutlass.range(first, end, unroll=1):
                if (again == 0) | shared.redo.failed(deal):
                    wary = cute.arch.make_warp_uniform(failures + again)
                    queries, keys, failures = self.compute_deal(
                        problem, outputs, shared, crew, deal, (queries, keys, failures), True, wary != 0
                    )
        if shared.redo.any():
            shared.redo.forget(crew.thread, False)
        return queries, keys, failures

    @cute.jit
    def compute_deal(
        self,
        problem: Problem,
        outputs: Outputs,
        shared: Shared,
        crew: Crew,
        deal: Int32,
        counts: tuple,
        optimistic: Constexpr,
        wary: Boolean | None = None,
    ) -> tuple:
        """One query block; counts: fillings so far of Q's ring, and of K's and V's."""
        queries, keys = counts[0], counts[1]
        failures = counts[2] if cutlass.const_expr(self.may_be_wary) else None
        fragments, thread = crew.fragments, crew.thread
        place = problem.order.place(deal, problem.seqlens, self.tile.queries)
        context, state = self.begin(problem, place)
        blocks = self.key_blocks(place, state)
        first = keys
        if cutlass.const_expr(self.tile.cluster > 1):
            walk = Walk.of(self, place, blocks, state)
            shared.pass_by(keys, walk.before)
            first = keys + walk.before
        if place.row0 < place.info.seqlen_q:
            score_map = self.score_map(thread)
            rows = len(score_map.modes.rows)
            scale_log2, may_mask = context.unit * LOG2_E, self.epilogues.may_mask_rows
            tile = self.tile
            softmax = OnlineSoftmax.make(
                rows,
                scale_log2,
                may_mask,
                threshold=tile.rescale_threshold,
                polynomial=tile.polynomial,
                lowest=cutlass.select_(wary, -Float32.inf, Float32(0.0)) if self.may_be_wary else None,
            )
            work = Work(
                shared,
                fragments,
                crew.turns,
                blocks,
                state,
                score_map,
                place,
                crew.group,
                thread % WARPGROUP,
                softmax,
                first,
                optimistic,
                wary,
            )
            fragments.acc_o.fill(0.0)
            if brings_queries(self, blocks):
                shared.ring_q.wait(queries)
            if blocks.begin < blocks.end:
                if cutlass.const_expr(self.tile.q_in_regs):
                    self.read_queries(shared, fragments, thread)
                    if cutlass.const_expr(not self.releases_q_late):
                        shared.ring_q.release(queries)
                self.compute_one(work, queries)
                if cutlass.const_expr(self.tile.cluster > 1):
                    shared.pass_by(first + (blocks.end - blocks.begin), walk.after)
                if cutlass.const_expr(self.may_be_wary):
                    late_map = self.score_map(anew(thread))
                    failures = failures | Int32(self.verify_warily(work, deal, late_map))
                elif cutlass.const_expr(optimistic):
                    self.verify(work, deal)
            thread = anew(thread)  # or what follows from it would wait in registers for the main loop to end
            lse = cute.make_rmem_tensor(cute.make_layout(rows), Float32)
            softmax.normalize(fragments.acc_o_rows, lse, self.epilogues.rescale(state))
            store_lse(outputs.mLSE, lse, self.score_map(thread), place, self.traits.varlen)
            if cutlass.const_expr(self.traits.return_softmax):
                store_softmax(self, outputs.mSoftmax, lse, work, place)
            store_output(self, outputs, shared, fragments, place, crew.group, thread % WARPGROUP)
            if brings_queries(self, blocks):
                if cutlass.const_expr(self.releases_q_late):
                    wait_for_stores(self, crew.group, thread % WARPGROUP)
                    shared.ring_q.release(queries)
                queries += 1
                if cutlass.const_expr(self.tile.cluster == 1):
                    keys += (blocks.end - blocks.begin) * self.walks
        if cutlass.const_expr(self.tile.cluster > 1):
            keys += walk.count
        return (queries, keys, failures) if cutlass.const_expr(self.may_be_wary) else (queries, keys)

    @cute.jit
    def verify_warily(self, work: Work, deal: Int32, score_map: ScoreMap) -> Boolean:
        """As ``verify``, where a maximum in use may have been too large too; whether any row of all failed."""
        failed, seqlen_q = self.overflowed(work), work.place.info.seqlen_q
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            exists = work.place.row0 + score_map.query(r) < seqlen_q
            vanished = work.softmax.vanished(r, SMALLEST_SUM[self.traits.dtype])
            failed = failed | (exists & vanished)
        failed = failed & ~work.wary
        if failed:
            work.shared.redo.mark(deal)
        return warpgroup_any(work.group, failed)

    @cute.jit
    def verify(self, work: Work, deal: Int32) -> None:
        """Mark the deal if a maximum in use was too small for its row, so that numbers may have overflowed."""
        if self.overflowed(work):
            work.shared.redo.mark(deal)

    @cute.jit
    def overflowed(self, work: Work) -> Boolean:
        """Whether the thread's part of a row has numbers that are too large, or none."""
        failed = work.softmax.exceeded(LARGEST_SUM)
        if cutlass.const_expr(self.traits.dtype == "fp16"):
            # A probability beyond 2^16 is infinite there, and its product with V, whatever that is, not finite.
            for r in cutlass.range_constexpr(len(work.score_map.modes.rows)):
                o = work.fragments.acc_o_rows[r, 0]
                failed = failed | ~(o - o == 0.0)
        return failed

    def score_map(self, thread: Int32) -> ScoreMap:
        """Which scores a thread that computes holds."""
        tile = self.tile
        return ScoreMap.make(self.mma_qk(), tile.tile_m, tile.tile_n, thread, heads=tile.pack_heads)

    @cute.jit
    def read_queries(self, shared: Shared, fragments: Fragments, thread: Int32) -> None:
        """Q from shared memory into registers, where it stays for the whole query block."""
        copy = layouts.ldmatrix_copy_a(self.mma_qk(), self.dtype)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.partition_S(all_rows(shared.s_q)), mine.retile(fragments.q))

    @cute.jit
    def compute_one(self, work: Work, queries: Int32) -> None:
        """All key blocks of one query block, last first."""
        blocks = work.blocks
        self.first_step(work)
        last = blocks.end - 1
        self.steps(work, cutlass.min(blocks.full_end, last), last, True)
        begin, end = blocks.full_begin, cutlass.min(blocks.full_end, last)
        if cutlass.const_expr(self.may_be_wary):
            looking = dataclasses.replace(work, optimistic=False)
            if work.wary:
                self.steps(looking, begin, end, False)
            else:
                self.steps(work, begin, end, False)
        else:
            self.steps(work, begin, end, False)
        if cutlass.const_expr(self.traits.windowed):
            self.steps(work, blocks.begin, cutlass.min(blocks.full_begin, last), True)
        if cutlass.const_expr(not (self.releases_q_late or self.tile.q_in_regs)):
            work.shared.ring_q.release(queries)
        if cutlass.const_expr(self.tile.overlap):
            self.last_product(work)

    @cute.jit
    def steps(self, work: Work, begin: Int32, end: Int32, masked: Constexpr) -> None:
        """Blocks [begin, end), from the last down."""
        begin, end = opaque(begin), opaque(end)  # or their minima and maxima are found again in every step
        for i in cutlass.range(end - begin, unroll=1):
            if cutlass.const_expr(self.tile.overlap):
                self.step_overlapped(work, end - 1 - i, masked)
            else:
                self.step(work, end - 1 - i, masked)

    @cute.jit
    def first_step(self, work: Work) -> None:
        """The last key block, which nothing precedes."""
        block = work.blocks.end - 1
        if cutlass.const_expr(self.tile.overlap):
            shared, n = work.shared, work.first_filling
            tile, acc_s, loaded = self.score_tile(work, block, n)
            shared.ring_k.wait(n)
            self.start_qk(work, acc_s, n)
            warpgroup.wait_group(0)
            shared.ring_k.release(n)
            self.probabilities(work, tile, loaded, True)
            self.convert(work, tile, acc_s)
            self.clear_foreign_values(work, block, n)
        else:
            self.step(work, block, True)

    @cute.jit
    def step_overlapped(self, work: Work, block: Int32, masked: Constexpr) -> None:
        """Scores of ``block`` beside the output of the block before it."""
        shared, n = work.shared, work.first_filling + (work.blocks.end - 1 - block)
        tile, acc_s, loaded = self.score_tile(work, block, n)
        shared.ring_k.wait(n)
        work.turns.take()
        self.start_qk(work, acc_s, n)
        shared.ring_v.wait(n - 1)
        self.start_pv(work, n - 1)
        work.turns.give()
        warpgroup.wait_group(1)
        shared.ring_k.release(n)
        self.probabilities(work, tile, loaded, masked)
        warpgroup.wait_group(0)
        shared.ring_v.release(n - 1)
        self.convert(work, tile, acc_s)
        self.rescale(work, masked)

    @cute.jit
    def last_product(self, work: Work) -> None:
        """The output of the first key block, which is the last one visited."""
        n = work.first_filling + (work.blocks.end - 1 - work.blocks.begin)
        work.shared.ring_v.wait(n)
        self.start_pv(work, n)
        warpgroup.wait_group(0)
        work.shared.ring_v.release(n)

    @cute.jit
    def step(self, work: Work, block: Int32, masked: Constexpr) -> None:
        """One key block, one product after the other."""
        shared, n = work.shared, work.first_filling + (work.blocks.end - 1 - block)
        tile, acc_s, loaded = self.score_tile(work, block, n)
        shared.ring_k.wait(n)
        work.turns.take()
        self.start_qk(work, acc_s, n)
        warpgroup.wait_group(0)
        work.turns.give()
        shared.ring_k.release(n)
        self.probabilities(work, tile, loaded, masked)
        self.rescale(work, masked)
        self.convert(work, tile, acc_s)
        if cutlass.const_expr(masked):
            self.clear_foreign_values(work, block, n)
        shared.ring_v.wait(n)
        self.start_pv(work, n)
        warpgroup.wait_group(0)
        shared.ring_v.release(n)

    @cute.jit
    def score_tile(self, work: Work, block: Int32, n: Int32):
        """Registers for the scores of ``block``, filling n, and what the epilogues read of global memory meanwhile."""
        tile = self.tile
        acc_s = cute.make_rmem_tensor(
            self.mma_qk().get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        scores = work.score_map.tile(acc_s, work.place.row0, block * tile.tile_n)
        if cutlass.const_expr(self.stages_bias):
            scores = dataclasses.replace(scores, staged=work.shared.bias.tile(work.group, work.lane, n))
        return scores, acc_s, self.epilogues.load(work.state, scores)

    @cute.jit
    def start_qk(self, work: Work, acc_s: cute.Tensor, n: Int32) -> None:
        """acc_s = Q K^T, K from filling n."""
        op, stage = work.fragments, work.shared.ring_k.stage(n)
        start_gemm(self.mma_qk(), acc_s, op.q, op.k[None, None, None, stage], False)

    @cute.jit
    def start_pv(self, work: Work, n: Int32) -> None:
        """O += P V, V from filling n."""
        op, stage = work.fragments, work.shared.ring_v.stage(n)
        start_gemm(self.mma_pv(), op.acc_o, op.p_operand, op.v[None, None, None, stage], True)

    @cute.jit
    def probabilities(self, work: Work, tile: ScoreTile, loaded: tuple, masked: Constexpr) -> None:
        """Scores to probabilities; ``factors`` says what the output has to be multiplied with."""
        self.epilogues.forward(work.state, tile, loaded, masked)
        if cutlass.const_expr(work.optimistic and not masked):
            work.softmax.advance_unseen(tile.acc)
        else:
            work.softmax.advance(tile.acc, work.fragments.factors, masked)

    @cute.jit
    def rescale(self, work: Work, masked: Constexpr) -> None:
        """Bring the output under the maxima in use, if the step may have changed them."""
        if cutlass.const_expr(masked or not work.optimistic):
            work.softmax.rescale(work.fragments.acc_o_rows, work.fragments.factors)

    @cute.jit
    def convert(self, work: Work, tile: ScoreTile, acc_s: cute.Tensor) -> None:
        """P to 16 bits, dropped elements to zero, to where P V reads it; nothing may be reading the old P."""
        p = work.fragments.p
        narrow(acc_s, p)
        self.epilogues.drop(work.state, tile, work.score_map.view(p))
        if cutlass.const_expr(self.tile.p_in_smem):
            share_probabilities(self, work)

    @cute.jit
    def clear_foreign_values(self, work: Work, block: Int32, n: Int32) -> None:
        """Rows of V behind the sequence's last key become zeros, where they are somebody else's."""
        if cutlass.const_expr(self.foreign_values):
            rows = work.state.band.seqlen_k - block * self.tile.tile_n
            if rows < self.tile.tile_n:
                shared = work.shared
                shared.ring_v.wait(n)
                tile = shared.s_v[None, None, shared.ring_v.stage(n)]
                lane = cute.arch.thread_idx()[0] % WARPGROUP
                vectors = padded(self.traits.head_dim_v) // 8
                zeros = cute.make_rmem_tensor(cute.make_layout(8), self.dtype)
                zeros.fill(0.0)
                for i in cutlass.range(lane, (self.tile.tile_n - rows) * vectors, WARPGROUP, unroll=1):
                    row = cute.local_tile(tile, (1, 8), (rows + i // vectors, i % vectors))
                    cute.autovec_copy(zeros, row[0, None])
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup_barrier(work.turns.warpgroup)


def _multiprocessors() -> int:
    """Of torch's current GPU."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
