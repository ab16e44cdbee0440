"""Merges partial results of attention over disjoint sets of keys. Runs on every target.

:class:`Combine` merges given results, :class:`CombineStreamK` the results of a kvcache kernel with stream-K scheduling.
Both run the same device code; :class:`GivenRows` and :class:`StreamKRows` locate a row's partial results.

    m       = max over i of lse[i]              for one query of one head, over its partial results i
    w[i]    = exp(lse[i] - m)
    out     = sum over i of w[i] * o[i] / sum over i of w[i]
    lse_out = m + log(sum over i of w[i])       with exp(sink - m) of the head in both sums, if it has a sink

A partial result whose LSE is -inf, or +inf as in some libraries, saw no key: its weight is 0 and its row, which may be
unwritten memory, does not affect the result. If no partial result saw a key, out is 0 and lse_out is -inf or the sink.
NaN stays NaN.

A CTA merges a few rows. The threads of a row load its LSEs to shared memory and turn them into weights there. Then each
group of threads adds up every groups-th partial row, with 16 bytes per thread and several rows in flight, and the first
group adds the groups' sums in order. The order of all sums thus depends only on the number of partial results and the
tile, and results repeat bit for bit. With ``in_order``, partial results are added from last to first, as in
:mod:`cute_attn.outputs.fold`, so that empty partial results change no bit.

Limits: up to ``MAX_PARTIALS`` fp32 partial results, with rows of multiples of 16 bytes; out in fp16, bf16 or fp32; head
dims up to 512.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.math import LOG2_E, convert_to_16_bits, exp2, fmax, product
from cute_attn.device.seqlen import (
    RowPlaces,
    SeqlenInfo,
    Seqlens,
    first_block,
    sequence_of_block,
    warm_lengths,
)
from cute_attn.epilogues.mask import Mask
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.outputs.fold import RowSums, added, normalized, with_sink
from cute_attn.tiles.inference import MAX_PARTIALS, CombineStreamKTile, CombineTile, partial_columns
from cute_attn.traits import DTYPES, MAX_HEAD_DIM_V, Traits
from cute_attn.work.block_range import Partials
from cute_attn.work.stream_k import OVERHEAD, StreamK, VisibleBlocks


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory, fp32: lse and weights (rows, most_partials), sums (rows, groups, columns), totals (rows,
    groups). With one group, sums and totals are unused and have no memory.
    """

    lse: cute.Tensor
    weights: cute.Tensor
    sums: cute.Tensor
    totals: cute.Tensor


@dataclass(frozen=True)
class Place:
    """Work of one thread: one row, one group's subset of its partial results, some of its columns."""

    row: Int32  # in the CTA
    group: Int32
    lane: Int32  # in the group
    exists: Boolean
    batch: Int32
    query: Int32
    head: Int32


@dataclass(frozen=True)
class RowPartials:
    """Number of the partial results of one row, and their offsets in elements.

    Partial result i is at ``start + i * step``. With ``alternates`` its index is 2 * i, or 1 for the first: a range at
    the end of a CTA's range has the odd index, see :class:`cute_attn.work.stream_k.TileRange`.
    """

    count: Int32
    out: Int64
    out_step: Int64
    lse: Int64
    lse_step: Int64
    alternates: Constexpr = False

    @cute.jit
    def out_row(self, i: Int32) -> Int64:
        """Offset of the row's O in partial result i."""
        return self._place(i, self.out, self.out_step)

    @cute.jit
    def lse_place(self, i: Int32) -> Int64:
        """Offset of the row's LSE in partial result i."""
        return self._place(i, self.lse, self.lse_step)

    @cute.jit
    def _place(self, i: Int32, start: Int64, step: Int64) -> Int64:
        index = Int64(i)
        if cutlass.const_expr(self.alternates):
            index = Int64(2 * i + cutlass.select_(i == 0, Int32(1), Int32(0)))
        return start + index * step


@dataclass(frozen=True)
class GivenRows:
    """The rows of results given by a caller. A CTA has ``tile.rows`` consecutive rows; the head runs fastest.

    ctas: number of CTAs of the grid.
    """

    places: RowPlaces
    ctas: Int32

    @staticmethod
    def make(mO: cute.Tensor, tile: CombineTile) -> "GivenRows":
        """Make the rows on the host."""
        places = RowPlaces.make(mO)
        return GivenRows(places, cute.ceil_div(places.count, tile.rows))

    @cute.jit
    def of(
        self, kernel: Constexpr, partials: tuple, block: Int32, thread: Int32
    ) -> tuple[Place, RowPartials]:
        """The work of a CTA's thread, and the offsets of its row's partial results."""
        per_row, groups = kernel.tile.threads_per_row(kernel.traits), kernel.tile.groups
        own = thread // (per_row * groups)
        flat = block * kernel.tile.rows + own
        plane, head = divmod(cutlass.min(flat, self.places.count - 1), self.places.heads)
        batch, query = divmod(plane, self.places.seqlen)
        group, lane = thread // per_row % groups, thread % per_row
        place = Place(own, group, lane, flat < self.places.count, batch, query, head)
        step_partial, step_batch, step_query, step_head, _ = partials[0].stride
        out = Int64(batch) * step_batch + Int64(query) * step_query + Int64(head) * step_head
        step_lse, lse_batch, lse_head, lse_query = partials[1].stride
        lse = Int64(batch) * lse_batch + Int64(head) * lse_head + Int64(query) * lse_query
        count = Int32(partials[0].shape[0])
        return place, RowPartials(count, out, Int64(step_partial), lse, Int64(step_lse))


@dataclass(frozen=True)
class Combine:
    """The combine kernel for (traits, tile); ``__call__`` traces the host side."""

    traits: Traits
    tile: CombineTile

    # ---- supported traits ----

    op: ClassVar[str] = "combine"
    uses: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[str] = "no features but sinks"

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        more = more_than(traits, (cls.op,), (*cls.uses, "sinks", "alignment", "variant"), cls.words)
        return more or beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM_V, multiple=traits.row_alignment)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> CombineTile:
        """The tile for many partial results; see ``CombineTile.of``."""
        return CombineTile.of(MAX_PARTIALS)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mOpartial: Annotated[cute.Tensor, lambda kernel: fakes.rows(Float32, 5)],
        mLSEpartial: Annotated[cute.Tensor, lambda kernel: fakes.strided(Float32, 4)],
        mO: fakes.HeadRows,
        mLSE: Annotated[cute.Tensor, lambda kernel: fakes.strided(Float32, 3)],
        mSinks: fakes.Sinks,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. Packed rows form one batch.

        Args:
            mOpartial, mLSEpartial: fp32 (partials, batch, queries, nheads, columns) and (partials, batch, nheads,
                queries). columns: head_dim_v rounded up to a multiple of 4.
        """
        self.launch((mOpartial, mLSEpartial), mO, mLSE, mSinks, GivenRows.make(mO, self.tile), stream)

    def launch(
        self,
        partials: Any,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
        rows: Any,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. partials: begins with the tensors of O and LSE. rows: ``GivenRows`` or ``StreamKRows``."""
        self.kernel(partials, mO, mLSE, mSinks, rows).launch(
            grid=[rows.ctas, 1, 1],
            block=[self.tile.num_threads(self.traits), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # otherwise registers are saved, and few loads are in flight
            use_pdl=self.traits.arch == "sm90",
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self, partials: tuple, mO: cute.Tensor, mLSE: cute.Tensor, mSinks: cute.Tensor | None, rows: Any
    ) -> None:
        _, shared = self.allocated()
        place, own = rows.of(self, partials, cute.arch.block_idx()[0], cute.arch.thread_idx()[0])
        self.wait_for_partials()
        self.merge(partials[0].iterator, partials[1].iterator, own, shared, place, mO, mLSE, mSinks)

    @cute.jit
    def wait_for_partials(self) -> None:
        """On sm90, wait for the kernel that writes the partial results, then let the next kernel start early."""
        if cutlass.const_expr(self.traits.arch == "sm90"):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def merge(
        self,
        out: cute.Pointer,
        lse: cute.Pointer,
        partials: RowPartials,
        shared: Shared,
        place: Place,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
    ) -> None:
        """Merge the rows of a CTA. partials: of this thread's row, with offsets from ``out`` and ``lse``."""
        self.load_lse(lse, partials, shared, place)
        acc = cute.make_rmem_tensor(cute.make_layout((4, self.tile.vectors(self.traits))), Float32)
        acc.fill(0.0)
        if cutlass.const_expr(self.tile.in_order):
            cute.arch.barrier()
            row_max, total = self.add_in_order(acc, out, partials, shared, place)
        else:
            loaded = self.load_first(out, partials, place) if cutlass.const_expr(self.tile.eager) else None
            cute.arch.barrier()
            row_max, largest = self.compute_weights(partials.count, shared, place)
            cute.arch.barrier()
            total = self.add_partials(acc, out, partials, largest, shared, place, loaded)
            if cutlass.const_expr(self.tile.groups > 1):
                self.store_sums(acc, total, shared, place)
                cute.arch.barrier()
                total = self.add_groups(acc, shared, place)
        if cutlass.const_expr(mSinks is not None):
            row_max, total = self.add_sink(acc, total, row_max, mSinks, place)
        if place.exists and place.group == 0:
            self.store(acc, total, row_max, mO, mLSE, place)

    def allocated(self) -> tuple[cute.Pointer, Shared]:
        """The CTA's shared memory: its start and its areas."""
        base = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), 16)
        return base, self.shared_memory(cute.recast_ptr(base, dtype=Float32))

    def shared_memory(self, base: Any) -> Shared:
        """The areas of shared memory, which starts at ``base``."""
        tile, areas = self.tile, self.tile.smem_areas(self.traits)

        def area(name: str, *shape: int) -> cute.Tensor:
            return cute.make_tensor(
                base + areas[name][0] // 4,
                cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))),
            )

        return Shared(
            area("lse", tile.rows, tile.most_partials),
            area("weights", tile.rows, tile.most_partials),
            area("sums", tile.rows, tile.groups, partial_columns(self.traits)),
            area("totals", tile.rows, tile.groups),
        )

    @cute.jit
    def load_lse(self, lses: cute.Pointer, partials: RowPartials, shared: Shared, place: Place) -> None:
        """Copy the row's LSEs to shared memory, with +inf replaced by -inf."""
        first, step = self.own_partials(place)
        for i in cutlass.range(first, partials.count, step, unroll=1):
            lse = cute.make_tensor(lses + partials.lse_place(i), cute.make_layout(1))[0]
            shared.lse[place.row, i] = -Float32.inf if lse == Float32.inf else lse

    @cute.jit
    def add_in_order(
        self, acc: cute.Tensor, outs: cute.Pointer, partials: RowPartials, shared: Shared, place: Place
    ) -> tuple[Float32, Float32]:
        """Sum this thread's columns, weighted, in ``acc``; return the row's largest LSE and its sum of weights."""
        sums, values, unroll = RowSums.make(1), self.row_values(), self.tile.unroll
        filled = Int32(0)  # a partial result of the row that is in the cache
        for batch in cutlass.range(0, partials.count, unroll, unroll=1):
            for u in cutlass.range_constexpr(unroll):
                i = cutlass.max(partials.count - 1 - batch - u, 0)
                filled = i if shared.lse[place.row, i] != -Float32.inf else filled
                self.load_row(values, u, outs, partials.out_row(filled), place)
            for u in cutlass.range_constexpr(unroll):
                i = partials.count - 1 - batch - u
                lse = shared.lse[place.row, cutlass.max(i, 0)] if i >= 0 else -Float32.inf
                kept, weight = sums.add(0, lse)
                for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    for e in cutlass.range_constexpr(4):
                        acc[e, j] = added(acc[e, j], kept, values[e, j, u], weight)
        return sums.largest[0], sums.total[0]

    @cute.jit
    def compute_weights(self, partials: Int32, shared: Shared, place: Place) -> tuple[Float32, Int32]:
        """Write weights to shared memory; return the row's maximum LSE and the index of it or of a NaN, -1 if none."""
        row_max, largest = -Float32.inf, Int32(-1)
        for i in cutlass.range(partials, unroll=8):
            lse = shared.lse[place.row, i]
            largest = i if lse > row_max or lse != lse else largest
            row_max = fmax(row_max, lse)
        shift = Float32(0.0) if row_max == -Float32.inf else row_max
        first, step = self.own_partials(place)
        for i in cutlass.range(first, partials, step, unroll=1):
            shared.weights[place.row, i] = exp2((shared.lse[place.row, i] - shift) * LOG2_E)
        return row_max, largest

    def own_partials(self, place: Place) -> tuple[Int32, int]:
        """First index and step of the partial results whose LSE and weight this thread handles."""
        per_row = self.tile.threads_per_row(self.traits)
        return place.group * per_row + place.lane, per_row * self.tile.groups

    @cute.jit
    def add_partials(
        self,
        acc: cute.Tensor,
        outs: cute.Pointer,
        partials: RowPartials,
        largest: Int32,
        shared: Shared,
        place: Place,
        loaded: cute.Tensor | None = None,
    ) -> Float32:
        """Add the group's weighted rows to ``acc``, this thread's columns (4, vectors); return the sum of weights.

        The rows of ``unroll`` partial results are loaded at once. loaded: the first rows, from :meth:`load_first`.
        """
        step: Constexpr = self.tile.groups * self.tile.unroll
        count = Int32(0) if largest < 0 else partials.count
        total, first = Float32(0.0), place.group
        values = self.row_values() if loaded is None else loaded
        if cutlass.const_expr(loaded is not None):
            total = self.add_batch(acc, total, values, first, count, shared, place)
            first += step
        for batch in cutlass.range(first, count, step, unroll=1):
            for u in cutlass.range_constexpr(self.tile.unroll):
                # Without a branch: in place of rows without weight one that is in the cache.
                i = batch + u * self.tile.groups
                weight = self.weight(i, count, shared, place)
                self.load_row(values, u, outs, partials.out_row(largest if weight == 0.0 else i), place)
            total = self.add_batch(acc, total, values, batch, count, shared, place)
        return total

    def row_values(self) -> cute.Tensor:
        """Registers for this thread's columns of ``unroll`` partial rows."""
        return cute.make_rmem_tensor(
            cute.make_layout((4, self.tile.vectors(self.traits), self.tile.unroll)), Float32
        )

    @cute.jit
    def load_first(self, outs: cute.Pointer, partials: RowPartials, place: Place) -> cute.Tensor:
        """Load the group's first rows before their weights are known, together with the LSEs."""
        values = self.row_values()
        for u in cutlass.range_constexpr(self.tile.unroll):
            i = cutlass.min(place.group + u * self.tile.groups, partials.count - 1)
            self.load_row(values, u, outs, partials.out_row(i), place)
        return values

    @cute.jit
    def load_row(
        self, values: cute.Tensor, u: Constexpr, outs: cute.Pointer, row: Int64, place: Place
    ) -> None:
        """Load this thread's columns of a partial row. Out-of-bounds columns are clamped to the last vector."""
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = cutlass.min(self.column(place, j), partial_columns(self.traits) - 4)
            source = outs + cute.assume(row + col, divby=4)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), values[None, j, u])

    @cute.jit
    def weight(self, i: Int32, count: Int32, shared: Shared, place: Place) -> Float32:
        """Weight of partial result i, 0 if i >= ``count``."""
        weight = shared.weights[place.row, cutlass.max(cutlass.min(i, count - 1), 0)]
        return weight if i < count else Float32(0.0)

    @cute.jit
    def add_batch(
        self,
        acc: cute.Tensor,
        total: Float32,
        values: cute.Tensor,
        first: Int32,
        count: Int32,
        shared: Shared,
        place: Place,
    ) -> Float32:
        """Add the weighted ``values`` to ``acc``, and their weights to ``total``. Rows of weight 0 may be NaN."""
        for u in cutlass.range_constexpr(self.tile.unroll):
            weight = self.weight(first + u * self.tile.groups, count, shared, place)
            total += weight
            for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for e in cutlass.range_constexpr(4):
                    product = Float32(0.0) if weight == 0.0 else weight * values[e, j, u]
                    acc[e, j] = acc[e, j] + product
        return total

    def column(self, place: Place, vector: int) -> Int32:
        """The first column of this thread's vector ``vector``."""
        return (place.lane + vector * self.tile.threads_per_row(self.traits)) * 4

    @cute.jit
    def store_sums(self, acc: cute.Tensor, total: Float32, shared: Shared, place: Place) -> None:
        """Store the group's sums to shared memory."""
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = self.column(place, j)
            if col < self.traits.head_dim_v:
                for e in cutlass.range_constexpr(4):
                    shared.sums[place.row, place.group, col + e] = acc[e, j]
        shared.totals[place.row, place.group] = total

    @cute.jit
    def add_groups(self, acc: cute.Tensor, shared: Shared, place: Place) -> Float32:
        """Sum the groups' rows, in order, into ``acc``; return the sum of their weights."""
        total = Float32(0.0)
        acc.fill(0.0)
        for group in cutlass.range_constexpr(self.tile.groups):
            total += shared.totals[place.row, group]
            for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
                col = self.column(place, j)
                if col < self.traits.head_dim_v:
                    for e in cutlass.range_constexpr(4):
                        acc[e, j] = acc[e, j] + shared.sums[place.row, group, col + e]
        return total

    @cute.jit
    def add_sink(self, acc: cute.Tensor, total: Float32, row_max: Float32, sinks: cute.Tensor, place: Place):
        """Add the head's sink: return the row's new maximum and sum of weights, and rescale ``acc`` to the maximum."""
        largest, total, factor = with_sink(row_max, total, Float32(sinks[place.head]))
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = product(acc[i], factor)
        return largest, total

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        total: Float32,
        row_max: Float32,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        place: Place,
    ) -> None:
        """Normalise and write the row and its LSE."""
        dtype = fakes.CUTE_DTYPES[self.traits.dtype]
        factor, natural_lse = normalized(row_max, total)
        out = cute.make_rmem_tensor(acc.layout, dtype)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = product(acc[i], factor)
        if cutlass.const_expr(dtype is Float32):
            out.store(acc.load())
        else:
            convert_to_16_bits(acc, out)
        width: Constexpr = min(4, self.traits.row_alignment)
        start = Int64(place.query) * mO.stride[-3] + Int64(place.head) * mO.stride[-2]
        if cutlass.const_expr(len(mO.shape) == 4):
            start += Int64(place.batch) * mO.stride[0]
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = self.column(place, j)
            for e in cutlass.range_constexpr(0, 4, width):
                if col + e < self.traits.head_dim_v:
                    target = mO.iterator + cute.assume(start + col + e, divby=width)
                    some = cute.make_tensor(out[None, j].iterator + e, cute.make_layout(width))
                    cute.autovec_copy(some, cute.make_tensor(target, cute.make_layout(width)))
        if place.lane == 0:
            start = Int64(place.head) * mLSE.stride[-2] + Int64(place.query) * mLSE.stride[-1]
            if cutlass.const_expr(len(mLSE.shape) == 3):
                start += Int64(place.batch) * mLSE.stride[0]
            target = cute.make_tensor(mLSE.iterator + start, cute.make_layout(1))
            target[0] = natural_lse


@dataclass(frozen=True)
class CombinedTile:
    """A CTA's work tile and rows. ``first == last``: a single CTA computed the tile, and there is nothing to merge."""

    batch: Int32
    pack: Int32
    row0: Int32
    chunk: Int32
    info: SeqlenInfo
    first: Int32
    last: Int32


@dataclass(frozen=True)
class StreamKRows:
    """Rows of a kvcache kernel with split "stream_k". A CTA has a chunk of the rows of one of that kernel's work tiles.

    A work tile is a query block of a pack of heads: CTA -> (batch, pack, m_block, chunk). With ``by_range`` the CTA's
    work tile is the one that starts but does not end in a stream-K range: CTA -> (range, chunk). With packed queries,
    m_block counts the query blocks of all sequences, padded as in :func:`first_block`.

    Attributes:
        ctas: number of CTAs of the grid.
        kernel_ctas: number of CTAs of the kvcache kernel, each with a stream-K range.
    """

    seqlens: Seqlens
    mask_args: tuple | None
    chunks: cute.FastDivmodDivisorV2
    m_blocks: cute.FastDivmodDivisorV2
    packs: cute.FastDivmodDivisorV2
    packs_per_kvhead: cute.FastDivmodDivisorV2
    group: Int32
    ctas: Int32
    kernel_ctas: Int32

    @staticmethod
    def make(
        mO: cute.Tensor,
        seqlens: Seqlens,
        mask_args: tuple | None,
        nheads_kv: Int32,
        kernel_ctas: Int32,
        tile: CombineStreamKTile,
    ) -> "StreamKRows":
        """Make the rows on the host."""
        queries = tile.tile_m // tile.pack_heads
        group = cutlass.max(mO.shape[-2] // cutlass.max(nheads_kv, 1), 1)
        packs_per_kvhead = cute.ceil_div(group, tile.pack_heads)
        rows = cutlass.min(Int64(seqlens.max_seqlen_q) * tile.pack_heads, Int64(tile.tile_m))
        chunks = cute.ceil_div(Int32(rows), tile.rows)
        packs, batch = nheads_kv * packs_per_kvhead, seqlens.batch(mO)
        if seqlens.cu_seqlens_q is None:
            m_blocks = cute.ceil_div(Int32(seqlens.max_seqlen_q), queries)
            total = batch * packs * m_blocks * chunks
        else:
            m_blocks = Int32(mO.shape[0]) // queries + batch
            total = packs * m_blocks * chunks
        if cutlass.const_expr(tile.by_range):
            total = kernel_ctas * chunks
        chunks, m_blocks, packs, packs_per_kvhead = (
            cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (chunks, m_blocks, packs, packs_per_kvhead)
        )
        return StreamKRows(
            seqlens, mask_args, chunks, m_blocks, packs, packs_per_kvhead, group, total, kernel_ctas
        )

    @cute.jit
    def find(self, kernel: Constexpr, mO: cute.Tensor, base: cute.Pointer) -> CombinedTile:
        """The CTA's work tile, which the CTA's first warp looks up. Reads no outputs of the previous kernel."""
        start = kernel.tile.smem_areas(kernel.traits)["work_tile"][0]
        found = cute.make_tensor(cute.recast_ptr(base + start, dtype=Int32), cute.make_layout(5))
        number, lane = self.seqlens.batch(mO), cute.arch.lane_idx()
        index, chunk = divmod(cute.arch.block_idx()[0], self.chunks)
        if cute.arch.thread_idx()[0] < 32:
            warm_lengths(self.seqlens, number, lane)
            self.look_up(kernel, index, number, lane, found)
        cute.arch.barrier()
        return self.read(found, chunk)

    def are_divided(self, found: CombinedTile) -> Boolean:
        """False if a single CTA computed the work tile and wrote the result directly."""
        return found.first < found.last

    @cute.jit
    def look_up(
        self, kernel: Constexpr, index: Int32, number: Int32, lane: Int32, found: cute.Tensor
    ) -> None:
        """Write a CTA's batch, pack, first row, and first and last range to ``found``; called by a whole warp.

        number: number of sequences.
        """
        tile, seqlens = kernel.tile, self.seqlens
        queries: Constexpr = tile.tile_m // tile.pack_heads
        mask_args: Any = () if cutlass.const_expr(self.mask_args is None) else self.mask_args
        blocks = VisibleBlocks(seqlens, mask_args, kernel.mask, queries, tile.tile_n)
        line = (blocks, number, self.packs.divisor, self.kernel_ctas, lane, OVERHEAD)
        if cutlass.const_expr(tile.by_range):
            batch, pack, m_block, last = StreamK.make(*line).divided_tile(index)
            row0, first = m_block * queries, index
        else:
            plane, m_block = divmod(index, self.m_blocks)
            batch, pack = Int32(0), plane
            if cutlass.const_expr(kernel.traits.varlen):
                batch = sequence_of_block(seqlens.cu_seqlens_q, m_block, queries)
                m_block -= first_block(seqlens.cu_seqlens_q, batch, queries)
            else:
                batch, pack = divmod(plane, self.packs)
            row0, first, last = m_block * queries, Int32(0), Int32(0)
            if (row0 >= 0) & (row0 < SeqlenInfo.read(seqlens, batch).seqlen_q):
                ranges, start = StreamK.measure(*line, batch)
                first, last = ranges.ranges_of(start, batch, pack, m_block)
        if lane == 0:
            numbers = (batch, pack, row0, first, last)
            for i in cutlass.range_constexpr(5):
                found[i] = numbers[i]

    def read(self, numbers: cute.Tensor, chunk: Int32) -> CombinedTile:
        """The work tile that :meth:`look_up` found."""
        batch, pack, row0, first, last = (numbers[i] for i in range(5))
        return CombinedTile(batch, pack, row0, chunk, SeqlenInfo.read(self.seqlens, batch), first, last)

    @cute.jit
    def of_thread(
        self, kernel: Constexpr, found: CombinedTile, partials: Partials, thread: Int32
    ) -> tuple[Place, RowPartials]:
        """The thread's work, and the offsets of its row's partial results from ranges first to last."""
        tile, per_row = kernel.tile, kernel.tile.threads_per_row(kernel.traits)
        own = thread // (per_row * tile.groups)
        row = found.chunk * tile.rows + own
        head_kv, of_kvhead = divmod(found.pack, self.packs_per_kvhead)
        in_group = of_kvhead * tile.pack_heads + row % tile.pack_heads
        query = found.row0 + row // tile.pack_heads
        exists = (row < tile.tile_m) & (query < found.info.seqlen_q) & (in_group < self.group)
        head = cutlass.min(head_kv * self.group + in_group, self.group * (head_kv + 1) - 1)
        group, lane = thread // per_row % tile.groups, thread % per_row
        place = Place(own, group, lane, exists, found.batch, found.info.offset_q + query, head)
        (step, step_row, _), (lse_step, lse_row) = partials.out.stride, partials.lse.stride
        row, before = Int64(cutlass.min(row, tile.tile_m - 1)), Int64(2 * found.first)
        out, lse = before * step + row * step_row, before * lse_step + row * lse_row
        count = found.last - found.first + 1
        return place, RowPartials(count, out, Int64(step), lse, Int64(lse_step), True)


@dataclass(frozen=True)
class CombineStreamK(Combine):
    """Merges partial results of a kvcache kernel with split "stream_k". A CTA handles some rows of one work tile.

    The first warp finds the tile's stream-K ranges by the arithmetic of :class:`StreamK`. The CTA exits at once if a
    single CTA of the kvcache kernel wrote the result.
    """

    tile: CombineStreamKTile

    op: ClassVar[str] = "combine_stream_k"
    uses: ClassVar[tuple[str, ...]] = ("mask", "varlen", "seqused_k", "leftpad", "varlen_k")
    words: ClassVar[str] = "lengths, the mask and sinks alone"

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> CombineStreamKTile:
        """The tile for a kvcache kernel with 64 rows and keys per block; calls derive a tile from the kernel's."""
        return CombineStreamKTile()

    @property
    def mask(self) -> Mask:
        return Mask.of(self.traits)

    @cute.jit
    def __call__(
        self,
        partials: fakes.PartialResults,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        mSinks: fakes.Sinks,
        seqlens: fakes.Lengths,
        mask_args: Annotated[tuple | None, lambda kernel: kernel.mask.fake_args() or None],
        nheads_kv: Int32,
        kernel_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. mask_args: the mask's arguments, or None if the mask has none."""
        rows = StreamKRows.make(mO, seqlens, mask_args, nheads_kv, kernel_ctas, self.tile)
        self.launch(partials, mO, mLSE, mSinks, rows, stream)

    @cute.kernel
    def kernel(
        self, partials: tuple, mO: cute.Tensor, mLSE: cute.Tensor, mSinks: cute.Tensor | None, rows: Any
    ) -> None:
        base, shared = self.allocated()
        found = rows.find(self, mO, base)
        self.wait_for_partials()  # the lengths' writer had ended before that kernel began
        if rows.are_divided(found):
            place, own = rows.of_thread(self, found, partials, cute.arch.thread_idx()[0])
            self.merge(partials[0].iterator, partials[1].iterator, own, shared, place, mO, mLSE, mSinks)
