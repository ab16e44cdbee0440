"""Merges partial results of attention over disjoint sets of keys. Runs on every target.

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
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.math import LOG2_E, convert_to_16_bits, exp2, fmax, product
from cute_attn.device.seqlen import RowPlaces
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.outputs.fold import RowSums, added, normalized, with_sink
from cute_attn.tiles.inference import MAX_PARTIALS, CombineTile, partial_columns
from cute_attn.traits import DTYPES, MAX_HEAD_DIM_V, Traits


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory, fp32: lse and weights (rows, MAX_PARTIALS), sums (rows, groups, columns), totals (rows,
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
    """Number of the partial results of one row, and their offsets in elements: result i is at ``start + i * step``."""

    count: Int32
    out: Int64
    out_step: Int64
    lse: Int64
    lse_step: Int64

    def out_row(self, i: Int32) -> Int64:
        """Offset of the row's O in partial result i."""
        return self.out + Int64(i) * self.out_step

    def lse_place(self, i: Int32) -> Int64:
        """Offset of the row's LSE in partial result i."""
        return self.lse + Int64(i) * self.lse_step


@dataclass(frozen=True)
class OutputRows:
    """The rows of O. A CTA has ``tile.rows`` consecutive rows; the head runs fastest.

    ctas: number of CTAs of the grid.
    """

    places: RowPlaces
    ctas: Int32

    @staticmethod
    def make(mO: cute.Tensor, tile: CombineTile) -> "OutputRows":
        """Make the rows on the host."""
        places = RowPlaces.make(mO)
        return OutputRows(places, cute.ceil_div(places.count, tile.rows))

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

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        more = more_than(traits, ("combine",), ("sinks", "alignment", "variant"), "no features but sinks")
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
        rows = OutputRows.make(mO, self.tile)
        self.kernel((mOpartial, mLSEpartial), mO, mLSE, mSinks, rows).launch(
            grid=[rows.ctas, 1, 1],
            block=[self.tile.num_threads(self.traits), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # otherwise registers are saved, and few loads are in flight
            use_pdl=self.traits.arch == "sm90",
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        partials: tuple,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
        rows: OutputRows,
    ) -> None:
        memory_start = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), 16)
        shared = self.shared_memory(cute.recast_ptr(memory_start, dtype=Float32))
        place, own = rows.of(self, partials, cute.arch.block_idx()[0], cute.arch.thread_idx()[0])
        if cutlass.const_expr(self.traits.arch == "sm90"):
            # The previous kernel wrote the partial results; the next one may start.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.merge(partials[0].iterator, partials[1].iterator, own, shared, place, mO, mLSE, mSinks)

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

    def shared_memory(self, base: Any) -> Shared:
        """The areas of shared memory, which starts at ``base``."""
        tile, areas = self.tile, self.tile.smem_areas(self.traits)

        def area(name: str, *shape: int) -> cute.Tensor:
            return cute.make_tensor(
                base + areas[name][0] // 4,
                cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))),
            )

        return Shared(
            area("lse", tile.rows, MAX_PARTIALS),
            area("weights", tile.rows, MAX_PARTIALS),
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
