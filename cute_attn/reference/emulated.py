"""Functions that :mod:`cute_attn.reference.emulate` compiles for the host: kernels' device code in loops over batches,
heads, blocks and threads.

A phase is a function of one thread. It is called for all threads before the next phase, so threads run in lock-step.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, cute

from cute_attn.device.math import convert_to_16_bits, fmax
from cute_attn.device.probabilities import probabilities, score_gradient
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.epilogues.tangents import RowTangents

UNVISITED, UNMASKED, MASKED = 0, 1, 2


def packed_heads(kernel: Any) -> int:
    """Number of heads packed into one tile's rows."""
    return getattr(kernel.tile, "pack_heads", 1)


GradientBuffers = namedtuple("GradientBuffers", "products grad_p lse_log2 minus_d p scores visits")
"""The tensors of an emulated backward, for all batches and heads."""
Buffers = namedtuple(
    "Buffers", "products values scores signs p visits out lse factors maxima sums statistics"
)
"""The tensors of an emulated forward, and values exchanged between threads."""
DualBuffers = namedtuple(
    "DualBuffers",
    "products values scores p visits out lse factors maxima sums statistics products_dot values_dot exact_p dots "
    "out_dot lse_dot unseen block_sums totals row_tangents",
)
"""``Buffers`` with tangents. exact_p: P before rounding. block_sums: sums of P and P S_dot over a key block."""


@dataclass(frozen=True)
class QueryBlockContext:
    """The state that the threads of a query block, of one head or one pack of heads, have in common."""

    buffers: Any  # Buffers, DualBuffers or GradientBuffers, of this batch and head
    state: ScoreState
    row0: Int32
    seqlen_q: Int32
    scale_log2: Float32
    kernel: Constexpr

    @property
    def transposed(self) -> bool:
        """True if accumulators are (keys, queries)."""
        return getattr(self.kernel, "transposed", False)

    @property
    def mma(self) -> cute.TiledMma:
        """The MMA of Q K^T, or if transposed of K Q^T."""
        return self.kernel.mma_qk() if hasattr(self.kernel, "mma_qk") else self.kernel.tiled_mma()

    @property
    def threads(self) -> int:
        """Number of threads that hold scores."""
        return self.mma.size

    def score_map(self, thread: Int32) -> ScoreMap:
        size = self.kernel.tile
        return ScoreMap.make(self.mma, size.tile_m, size.tile_n, thread, self.transposed, self.heads)

    def score_tile(self, thread: Int32, acc: cute.Tensor, col0: Int32) -> ScoreTile:
        return self.score_map(thread).tile(acc, self.row0 // self.heads, col0)

    def rows(self, thread: Int32) -> list[Int32]:
        """The indices of the thread's rows in the buffers."""
        score_map = self.score_map(thread)
        return [self.row0 + score_map.thr_row + row for row in score_map.modes.rows]

    @property
    def heads(self) -> int:
        """Number of heads packed into the tile's rows."""
        return packed_heads(self.kernel)

    @property
    def has_tangents(self) -> bool:
        return hasattr(self.buffers, "dots")

    def _ordered(self, query: Any, key: Any) -> tuple[Any, Any]:
        """A value for queries and one for keys in the order of the accumulator's modes."""
        return (key, query) if self.transposed else (query, key)

    def fragment(self, thread: Int32, dtype: Any) -> cute.Tensor:
        """A thread's registers for a score tile."""
        size = self.kernel.tile
        mine = self.mma.get_slice(thread)
        shape = mine.partition_shape_C(self._ordered(size.tile_m, size.tile_n))
        return cute.make_rmem_tensor(shape, dtype)

    def part(self, plane: cute.Tensor, thread: Int32, block: Int32) -> cute.Tensor:
        """The thread's elements of a key block of a (query, key) tensor, by the MMA's partition."""
        size = self.kernel.tile
        plane = cute.make_tensor(plane.iterator, cute.select(plane.layout, list(self._ordered(0, 1))))
        sizes = self._ordered(size.tile_m, size.tile_n)
        tile = cute.local_tile(plane, sizes, self._ordered(self.row0 // size.tile_m, block))
        return self.mma.get_slice(thread).partition_C(tile)

    def statistics(self, thread: Int32, rows: int) -> cute.Tensor:
        """A thread's row maxima and sums, (rows, 2), laid out as in shared memory."""
        return self._pairs(self.buffers.statistics, thread, rows)

    def _pairs(self, of_threads: cute.Tensor, thread: Int32, rows: int) -> cute.Tensor:
        """A thread's numbers, (rows, 2), in a buffer of all threads."""
        layout = cute.make_layout((rows, 2, self.threads), stride=(1, rows, 2 * rows))
        return cute.make_tensor(of_threads.iterator, layout)[None, None, thread]

    def row_tangents(self, thread: Int32, rows: int, scale: Float32 | float = 1.0) -> RowTangents:
        """A thread's current row statistics of tangents. scale: the softmax scale."""
        pairs = self._pairs(self.buffers.row_tangents, thread, rows)
        return RowTangents(
            pairs[None, 0], pairs[None, 1], self.kernel.epilogues.tangent_scale(Float32(scale))
        )

    def online_softmax(self, thread: Int32, rows: int) -> OnlineSoftmax:
        """A thread's online softmax with its current row statistics."""
        stored = self.statistics(thread, rows)
        chain, threshold = self.kernel.epilogues, getattr(self.kernel.tile, "rescale_threshold", 0)
        p_exponent = getattr(self.kernel, "p_exponent", 0)
        return OnlineSoftmax(
            *(stored[None, 0], stored[None, 1], self.scale_log2),
            *(chain.may_mask_rows, threshold, chain.may_be_large, p_exponent, Float16),
        )


@cute.jit
def every_sequence(buffers: Any, seqlens: Seqlens, args: Any, scale: Float32, kernel: Constexpr):
    """Run all sequences of a forward, with tangents if there are buffers for them."""
    batches, packs, _, _ = buffers.products.shape
    heads: Constexpr = packed_heads(kernel)
    for batch in cutlass.range(batches):
        info = SeqlenInfo.read(seqlens, batch)
        for pack in cutlass.range(packs):
            chain = kernel.epilogues
            sizes = (pack * heads, packs * heads, scale, Int32(heads))
            context = chain.context(args, seqlens, info, batch, *sizes)
            state = chain.begin(args, context)
            plane = _plane(buffers, batch, pack)
            for row0 in cutlass.range(0, info.seqlen_q * heads, kernel.tile.tile_m):
                scale_log2 = chain.scale_log2(context.score_scale)
                ctx = QueryBlockContext(plane, state, row0, info.seqlen_q, scale_log2, kernel)
                _query_block(ctx, args, pack * heads, scale)


@cute.jit
def _plane(buffers: Any, batch: Int32, head: Int32) -> Any:
    """The buffers of one batch and head."""
    own = {
        name: tensor[(batch, head, *[None] * (cute.rank(tensor) - 2))]
        for name, tensor in zip(buffers._fields, buffers, strict=True)
        if name not in ("statistics", "row_tangents")
    }
    return buffers._replace(**own)


@cute.jit
def _query_block(ctx: QueryBlockContext, args: Any, head: Int32, scale: Float32):
    size, chain, buffers = ctx.kernel.tile, ctx.kernel.epilogues, ctx.buffers
    end_row = cutlass.min(ctx.row0 + size.tile_m, ctx.seqlen_q * ctx.heads)
    queries = (ctx.row0 // ctx.heads, end_row // ctx.heads)
    blocks = chain.key_blocks(ctx.state, *queries, size.tile_n)
    for thread in cutlass.range(ctx.threads):
        rows = len(ctx.score_map(thread).modes.rows)
        OnlineSoftmax.make(rows, ctx.scale_log2, False, ctx.statistics(thread, rows))
        if cutlass.const_expr(ctx.has_tangents):
            tangents = ctx.row_tangents(thread, rows)
            tangents.center.fill(0.0)
            tangents.total.fill(0.0)
    for i in cutlass.range(blocks.end - blocks.begin):
        step = blocks.end - 1 - i
        block = blocks.block(step)
        # On Hopper the first step is masked whatever its block is.
        first = chain.visits_lists and step == blocks.end - 1
        if step >= blocks.full_begin and step < blocks.full_end and not first:
            _key_block(ctx, block, scale, False)
        else:
            _key_block(ctx, block, scale, True, blocks.visit(step)[1])
        for row in cutlass.range(ctx.row0, end_row):
            _add_products(ctx, row, block)
    for thread in cutlass.range(ctx.threads):
        _add_up(ctx, thread)
    for thread in cutlass.range(ctx.threads):
        _finish(ctx, thread, args, head)
    if cutlass.const_expr(ctx.has_tangents):
        for thread in cutlass.range(ctx.threads):
            _finish_tangents(ctx, thread, end_row, args, head)
    else:
        for row in cutlass.range(ctx.row0, end_row):
            for d in cutlass.range(buffers.out.shape[1]):
                buffers.out[row, d] = buffers.out[row, d] * buffers.factors[row]


@cute.jit
def _key_block(
    ctx: QueryBlockContext, block: Int32, scale: Float32, masked: Constexpr, partial: Boolean | None = None
):
    """Run the phases of a key block: threads exchange row maxima after the first, with tangents row sums after the
    second.
    """
    buffers = ctx.buffers
    buffers.visits[ctx.row0 // ctx.kernel.tile.tile_m, block] = Int32(MASKED if masked else UNMASKED)
    for thread in cutlass.range(ctx.threads):
        _score(ctx, thread, block, masked, partial)
    if cutlass.const_expr(ctx.has_tangents):
        for row in cutlass.range(ctx.row0, ctx.row0 + ctx.kernel.tile.tile_m):
            buffers.block_sums[row, 0] = 0.0
            buffers.block_sums[row, 1] = 0.0
        for thread in cutlass.range(ctx.threads):
            _weigh(ctx, thread, block, scale, masked, partial)
        for thread in cutlass.range(ctx.threads):
            _center(ctx, thread, block, scale, masked)
    else:
        for thread in cutlass.range(ctx.threads):
            _exponentiate(ctx, thread, block, masked)
        if cutlass.const_expr(ctx.kernel.epilogues.dropout is not None):
            for thread in cutlass.range(ctx.threads):
                _drop(ctx, thread, block)


@cute.jit
def _add_products(ctx: QueryBlockContext, row: Int32, block: Int32):
    """Add the product of P with V to one row of O; with tangents that of P + P S_dot e with V + V_dot e."""
    buffers, tile_n = ctx.buffers, ctx.kernel.tile.tile_n
    for d in cutlass.range(buffers.out.shape[1]):
        total = buffers.out[row, d] * buffers.factors[row]
        for key in cutlass.range(block * tile_n, (block + 1) * tile_n):
            total = total + buffers.p[row, key] * buffers.values[key, d]
        buffers.out[row, d] = total
        if cutlass.const_expr(ctx.has_tangents):
            dot = buffers.out_dot[row, d] * buffers.factors[row]
            for key in cutlass.range(block * tile_n, (block + 1) * tile_n):
                dot = dot + buffers.dots[row, key] * buffers.values[key, d]
                dot = dot + buffers.p[row, key] * buffers.values_dot[key, d]
            buffers.out_dot[row, d] = dot


@cute.jit
def _score(
    ctx: QueryBlockContext, thread: Int32, block: Int32, masked: Constexpr, partial: Boolean | None = None
):
    """Turn a thread's products into scores, and update its rows' maxima."""
    chain, acc = ctx.kernel.epilogues, ctx.fragment(thread, Float32)
    tile, rows = ctx.score_tile(thread, acc, block * ctx.kernel.tile.tile_n), ctx.rows(thread)
    loaded = chain.load(ctx.state, tile)
    _copy(ctx.part(ctx.buffers.products, thread, block), acc)
    chain.forward(ctx.state, tile, loaded, masked, partial)
    _copy(acc, ctx.part(ctx.buffers.scores, thread, block))
    softmax = ctx.online_softmax(thread, len(tile.rows)).load_stats()
    maxima = ctx.buffers.maxima
    for r in cutlass.range_constexpr(len(rows)):
        maxima[rows[r]] = fmax(maxima[rows[r]], softmax.block_max(tile.acc, r))


@cute.jit
def _exponentiate(ctx: QueryBlockContext, thread: Int32, block: Int32, masked: Constexpr):
    """Turn a thread's scores into 16-bit probabilities relative to the new row maxima."""
    acc, p = ctx.fragment(thread, Float32), ctx.fragment(thread, Float16)
    tile, rows = ctx.score_tile(thread, acc, block * ctx.kernel.tile.tile_n), ctx.rows(thread)
    _copy(ctx.part(ctx.buffers.scores, thread, block), acc)
    stored = ctx.online_softmax(thread, len(rows))
    softmax = stored.load_stats()
    for r in cutlass.range_constexpr(len(rows)):
        row_max = softmax.max_to_use(r, ctx.buffers.maxima[rows[r]])
        ctx.buffers.factors[rows[r]] = softmax.replace_max(r, row_max, masked)
        softmax.exponentiate(tile.acc, r, masked)
    stored.store_stats(softmax)
    _copy(acc, p)
    _copy(p, ctx.part(ctx.buffers.p, thread, block))


@cute.jit
def _drop(ctx: QueryBlockContext, thread: Int32, block: Int32):
    """Apply dropout to P, and set ``signs`` to -1 for visible elements that are dropped, else to 1."""
    chain, score_map, acc = ctx.kernel.epilogues, ctx.score_map(thread), ctx.fragment(thread, Float32)
    kept, p = ctx.fragment(thread, Float16), ctx.fragment(thread, Float16)
    tile = score_map.tile(acc, ctx.row0, block * ctx.kernel.tile.tile_n)
    kept.fill(1.0)
    acc.fill(0.0)
    chain.drop(ctx.state, tile, score_map.view(kept))
    chain.mask.forward(ctx.state.band, tile)
    for i in cutlass.range_constexpr(cute.size(acc)):
        dropped = (kept[i] == 0.0) & (acc[i] == 0.0)
        kept[i] = Float16(-1.0) if dropped else Float16(1.0)
    _copy(kept, ctx.part(ctx.buffers.signs, thread, block))
    _copy(ctx.part(ctx.buffers.p, thread, block), p)
    chain.drop(ctx.state, tile, score_map.view(p))
    _copy(p, ctx.part(ctx.buffers.p, thread, block))


@cute.jit
def _copy(source: cute.Tensor, target: cute.Tensor):
    for i in cutlass.range(cute.size(source)):
        target[i] = target.element_type(source[i])


@cute.jit
def _add_up(ctx: QueryBlockContext, thread: Int32):
    """Add a thread's partial row sums, and those of tangents, to its rows' sums."""
    rows, buffers = ctx.rows(thread), ctx.buffers
    row_sum = ctx.online_softmax(thread, len(rows)).load_stats().row_sum
    for r in cutlass.range_constexpr(len(rows)):
        buffers.sums[rows[r]] = buffers.sums[rows[r]] + row_sum[r]
        if cutlass.const_expr(ctx.has_tangents):
            total = ctx.row_tangents(thread, len(rows)).total
            buffers.totals[rows[r]] = buffers.totals[rows[r]] + total[r]


@cute.jit
def _finish(ctx: QueryBlockContext, thread: Int32, args: Any, head: Int32):
    """Compute each row's output factor and LSE from complete row sums."""
    chain = ctx.kernel.epilogues
    rows, rescale = ctx.rows(thread), chain.rescale(ctx.state)
    softmax = ctx.online_softmax(thread, len(rows)).load_stats()
    for r in cutlass.range_constexpr(len(rows)):
        row_sum = ctx.buffers.sums[rows[r]]
        if cutlass.const_expr(chain.sinks is None):
            factor, lse = softmax.finish(r, row_sum, rescale)
        else:
            sinks = chain.sinks_of_rows(args, head, Int32(ctx.heads), ctx.score_map(thread))
            factor, lse = softmax.finish_with_sink(r, row_sum, rescale, sinks[r])
        ctx.buffers.factors[rows[r]], ctx.buffers.lse[rows[r]] = factor, lse
        if cutlass.const_expr(chain.maxima is not None):
            largest, score_map = ctx.buffers.maxima[rows[r]], ctx.score_map(thread)
            chain.maxima.store_row(ctx.state.maxima, largest, score_map, ctx.row0 // ctx.heads, r)


# ---- tangents ----


@cute.jit
def _weigh(
    ctx: QueryBlockContext,
    thread: Int32,
    block: Int32,
    scale: Float32,
    masked: Constexpr,
    partial: Boolean | None = None,
):
    """Turn a thread's scores into P relative to the new row maxima, and tangents of products into S_dot."""
    chain, buffers, rows = ctx.kernel.epilogues, ctx.buffers, ctx.rows(thread)
    acc, dot, p = (ctx.fragment(thread, x) for x in (Float32, Float32, Float16))
    tile = ctx.score_tile(thread, acc, block * ctx.kernel.tile.tile_n)
    loaded = chain.load(ctx.state, tile)
    _copy(ctx.part(buffers.products, thread, block), acc)
    saved = chain.forward(ctx.state, tile, loaded, masked, partial)
    stored = ctx.online_softmax(thread, len(rows))
    softmax = stored.load_stats()
    for r in cutlass.range_constexpr(len(rows)):
        buffers.unseen[rows[r]] = Float32(1.0) if softmax.row_max[r] == -Float32.inf else Float32(0.0)
        row_max = softmax.max_to_use(r, buffers.maxima[rows[r]])
        buffers.factors[rows[r]] = softmax.replace_max(r, row_max, masked)
        softmax.exponentiate(tile.acc, r, masked)
    stored.store_stats(softmax)
    _copy(ctx.part(buffers.products_dot, thread, block), dot)
    dots = tile.of(ctx.score_map(thread).view(dot))
    chain.tangents(ctx.state, dots, saved)
    for r in cutlass.range_constexpr(len(rows)):
        guarded = chain.tangents_may_be_nan(masked)
        own = ctx.row_tangents(thread, len(rows), scale).sums(r, tile.acc, dots.acc, guarded)
        for i in cutlass.range_constexpr(2):
            buffers.block_sums[rows[r], i] = buffers.block_sums[rows[r], i] + own[i]
    _copy(acc, ctx.part(buffers.exact_p, thread, block))
    _copy(dot, ctx.part(buffers.dots, thread, block))
    _copy(acc, p)
    chain.zero_dropped(chain.dropout_mask(ctx.state, tile), ctx.score_map(thread).view(p))
    _copy(p, ctx.part(buffers.p, thread, block))


@cute.jit
def _center(ctx: QueryBlockContext, thread: Int32, block: Int32, scale: Float32, masked: Constexpr):
    """Turn a thread's S_dot into P (S_dot - center), in 16 bits."""
    chain, buffers, rows = ctx.kernel.epilogues, ctx.buffers, ctx.rows(thread)
    acc, dot, half = (ctx.fragment(thread, x) for x in (Float32, Float32, Float16))
    tile = ctx.score_tile(thread, acc, block * ctx.kernel.tile.tile_n)
    dots = tile.of(ctx.score_map(thread).view(dot))
    _copy(ctx.part(buffers.exact_p, thread, block), acc)
    _copy(ctx.part(buffers.dots, thread, block), dot)
    tangents = ctx.row_tangents(thread, len(rows), scale)
    for r in cutlass.range_constexpr(len(rows)):
        row = rows[r]
        of_row = (buffers.block_sums[row, 0], buffers.block_sums[row, 1])
        tangents.set_center(r, of_row, buffers.unseen[row] != 0.0)
        tangents.weigh(r, tile.acc, dots.acc, buffers.factors[row], chain.tangents_may_be_nan(masked))
    _copy(dot, half)
    chain.zero_dropped(chain.dropout_mask(ctx.state, tile), ctx.score_map(thread).view(half))
    _copy(half, ctx.part(buffers.dots, thread, block))


@cute.jit
def _finish_tangents(ctx: QueryBlockContext, thread: Int32, end_row: Int32, args: Any, head: Int32):
    """Compute LSE_dot, O and O_dot of the rows whose first column this thread holds."""
    chain, buffers, score_map = ctx.kernel.epilogues, ctx.buffers, ctx.score_map(thread)
    rows, sinks = ctx.rows(thread), chain.sinks_of_rows(args, head, Int32(ctx.heads), score_map)
    sink_tangents = chain.sink_tangents_of_rows(args, head, score_map)
    softmax = ctx.online_softmax(thread, len(rows)).load_stats()
    tangents = ctx.row_tangents(thread, len(rows))
    for r in cutlass.range_constexpr(len(rows)):
        row = rows[r]
        if (score_map.thr_col == 0) & (row < end_row):
            found = tangents.finish(
                *(r, softmax, buffers.sums[row], buffers.totals[row], buffers.lse[row]), sinks, sink_tangents
            )
            buffers.lse_dot[row] = found[0]
            for d in cutlass.range(buffers.out.shape[1]):
                o = buffers.out[row, d] * buffers.factors[row]
                buffers.out[row, d] = o
                buffers.out_dot[row, d] = buffers.out_dot[row, d] * buffers.factors[row] - found[1] * o


# ---- the backward ----


@cute.jit
def every_key_block(buffers: GradientBuffers, seqlens: Seqlens, args: Any, scale: Float32, kernel: Constexpr):
    batches, nheads, _, _ = buffers.products.shape
    for batch in cutlass.range(batches):
        info = SeqlenInfo.read(seqlens, batch)
        for head in cutlass.range(nheads):
            chain, size = kernel.epilogues, kernel.tile
            context = chain.context(args, seqlens, info, batch, head, nheads, scale)
            state = chain.begin(args, context)
            plane = _plane(buffers, batch, head)
            for col0 in cutlass.range(0, info.seqlen_k, size.tile_n):
                blocks = chain.query_blocks(state, col0, col0 + size.tile_n, info.seqlen_q, size.tile_m)
                for step in cutlass.range(blocks.begin, blocks.end):
                    block = blocks.block(step)
                    row0, scale_log2 = block * size.tile_m, chain.scale_log2(context.score_scale)
                    ctx = QueryBlockContext(plane, state, row0, info.seqlen_q, scale_log2, kernel)
                    masked = (step < blocks.full_begin) | (step >= blocks.full_end)
                    visit = Int32(MASKED) if masked else Int32(UNMASKED)
                    plane.visits[block, col0 // size.tile_n] = visit
                    column, partial = col0 // size.tile_n, blocks.visit(step)[1]
                    for thread in cutlass.range(ctx.threads):
                        if cutlass.const_expr(not chain.visits_lists):
                            _differentiate(ctx, thread, column, masked)
                        elif masked:
                            _differentiate(ctx, thread, column, masked, partial)
                        else:
                            _differentiate(ctx, thread, column, masked)


@cute.jit
def _differentiate(
    ctx: QueryBlockContext, thread: Int32, block: Int32, masked: Boolean, partial: Boolean | None = None
):
    """Turn a thread's products into P, and dP into dS.

    The mask is a separate branch, so that all other code is compiled once for all blocks. Listed blocks, which have
    ``partial``, are an exception: the epilogues of a masked block differ.
    """
    chain, score_map, buffers = ctx.kernel.epilogues, ctx.score_map(thread), ctx.buffers
    acc, dp = ctx.fragment(thread, Float32), ctx.fragment(thread, Float32)
    p = ctx.fragment(thread, Float16)
    tile = score_map.tile(acc, ctx.row0, block * ctx.kernel.tile.tile_n)
    rows = cute.make_layout(len(tile.rows))
    lse_log2, minus_d = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
    for r in cutlass.range_constexpr(len(tile.rows)):
        row = tile.row0 + tile.rows[r]
        lse_log2[r], minus_d[r] = buffers.lse_log2[row], buffers.minus_d[row]
    loaded, dropout_mask = chain.load(ctx.state, tile), chain.dropout_mask(ctx.state, tile)
    _copy(ctx.part(buffers.products, thread, block), acc)
    listed: Constexpr = partial is not None
    saved = chain.forward(ctx.state, tile, loaded, listed, partial)
    if cutlass.const_expr(not listed):
        if masked:
            chain.mask.forward(ctx.state.band, tile)
    visible_keys = ctx.state.band.visible_keys if chain.may_be_large else None
    probabilities(tile, lse_log2, ctx.scale_log2, visible_keys)
    convert_to_16_bits(acc, p)
    _copy(ctx.part(buffers.grad_p, thread, block), dp)
    chain.zero_dropped(dropout_mask, score_map.view(p))
    chain.zero_dropped(dropout_mask, score_map.view(dp))
    score_gradient(tile.acc, score_map.view(dp), minus_d)
    chain.backward(ctx.state, tile.of(score_map.view(dp)), saved)
    _copy(p, ctx.part(buffers.p, thread, block))
    _copy(dp, ctx.part(buffers.scores, thread, block))
