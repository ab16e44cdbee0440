"""Merges partial results of attention over disjoint sets of keys. Runs on every target.

:class:`Combine` merges given ones, :class:`CombineShares` those of a kvcache kernel that divides all key blocks.

    m       = max over i of lse[i]              of one query of one head, over its partial results i
    w[i]    = exp(lse[i] - m)
    out     = sum over i of w[i] * o[i] / sum over i of w[i]
    lse_out = m + log(sum over i of w[i])       with exp(sink - m) of the head in both sums, where there are sinks

A partial result with an LSE of -inf saw no key: its weight is 0 and its row is not read, so that it may be unwritten
memory. So does +inf, which some libraries use instead. Where all did, out is 0 and lse_out -inf, or the sink. NaN stays
NaN.

A CTA merges a few rows. The threads of a row load its LSEs to shared memory and turn them into weights there. Then
groups of threads each add up every groups-th partial row, 16 bytes per thread and several rows in flight, and the first
group adds the groups' sums in their order. So the order of all sums depends on the number of partial results and the
tile alone: results repeat bit for bit.

Limits: up to ``MAX_PARTIALS`` fp32 partial results; out in fp16, bf16 or fp32; head dims up to 256, multiples of 8.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.math import LOG2_E, convert_to_16_bits, exp2, fmax, log, reciprocal
from cute_attn.device.seqlen import SeqlenInfo, Seqlens, first_block, sequence_of_block, warm_lengths
from cute_attn.epilogues.mask import Mask
from cute_attn.kernels import fakes
from cute_attn.kernels.limits import beyond
from cute_attn.tiles.inference import MAX_PARTIALS, CombineSharesTile, CombineTile
from cute_attn.traits import DTYPES, Traits
from cute_attn.work.key_parts import Partials
from cute_attn.work.key_shares import OVERHEAD, KeyShares, VisibleBlocks


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: fp32 (rows, most_partials) twice, (rows, groups, head_dim_v), (rows, groups).

    The latter two have no memory, and no use, with one group.
    """

    lse: cute.Tensor
    weights: cute.Tensor
    sums: cute.Tensor
    totals: cute.Tensor


@dataclass(frozen=True)
class Place:
    """What a thread works on: one row, one group's part of its partial results, some of its columns."""

    row: Int32  # in the CTA
    group: Int32
    lane: Int32  # in the group
    exists: Boolean
    batch: Int32
    query: Int32
    head: Int32


@dataclass(frozen=True)
class RowPartials:
    """Where the partial results of one row are, in elements, and how many.

    Partial result i is at ``start + i * step``, or with ``alternates`` the first one is one index further: a share at
    the end of a slot's line has the odd index, see :class:`cute_attn.work.key_shares.Share`.
    """

    count: Int32
    out: Int64
    out_step: Int64
    lse: Int64
    lse_step: Int64
    alternates: Constexpr = False

    @cute.jit
    def out_row(self, i: Int32) -> Int64:
        """Where row i of O starts."""
        return self._place(i, self.out, self.out_step)

    @cute.jit
    def lse_place(self, i: Int32) -> Int64:
        """Where LSE i is."""
        return self._place(i, self.lse, self.lse_step)

    @cute.jit
    def _place(self, i: Int32, start: Int64, step: Int64) -> Int64:
        index = Int64(i)
        if cutlass.const_expr(self.alternates):
            index = Int64(2 * i + cutlass.select_(i == 0, Int32(1), Int32(0)))
        return start + index * step


@dataclass(frozen=True)
class Combine:
    """Combine of (traits, tile); call it to trace the host side, see ``__call__``."""

    traits: Traits
    tile: CombineTile

    # ---- what it serves ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if traits.op != "combine":
            return f"it computes combine, not {traits.op}"
        own = {name: getattr(traits, name) for name in ("sinks", "variant")}
        plain = Traits("combine", traits.arch, traits.dtype, traits.head_dim, **own)
        if traits != plain:
            return f"it uses no features but sinks; accepted: {plain}"
        return beyond(traits, dtypes=DTYPES)

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
        """Launch. mOpartial (partials, batch, queries, nheads, head_dim_v) and mLSEpartial (partials, batch, nheads,
        queries): fp32. Packed rows are one batch.
        """
        batch, queries, heads, _ = mO.shape
        rows = batch * queries * heads
        divisors = tuple(cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (queries, heads))
        self.kernel(mOpartial, mLSEpartial, mO, mLSE, mSinks, rows, divisors).launch(
            grid=[cute.ceil_div(rows, self.tile.rows), 1, 1],
            block=[self.tile.num_threads(self.traits), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # otherwise registers are saved, and few loads are in flight
            use_pdl=self.traits.arch == "sm90",
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        mOpartial: cute.Tensor,
        mLSEpartial: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
        rows: Int32,
        divisors: tuple,
    ) -> None:
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        base = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), 16)
        shared = self.shared_memory(cute.recast_ptr(base, dtype=Float32))
        place = self.place(block, thread, rows, divisors)
        partials = self.row_partials(mOpartial, mLSEpartial, place)
        self.wait_for_partials()
        self.merge(mOpartial.iterator, mLSEpartial.iterator, partials, shared, place, mO, mLSE, mSinks)

    @cute.jit
    def wait_for_partials(self) -> None:
        """Wait for the kernel that writes the partial results; the one after this may start, and waits for its end."""
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
        """Merge the rows of a CTA: ``partials`` are this thread's row's, at ``out`` and ``lse``."""
        self.load_lse(lse, partials, shared, place)
        loaded = self.load_first(out, partials, place) if cutlass.const_expr(self.tile.eager) else None
        cute.arch.barrier()
        row_max, largest = self.compute_weights(partials.count, shared, place)
        cute.arch.barrier()
        acc, total = self.add_partials(out, partials, largest, shared, place, loaded)
        if cutlass.const_expr(self.tile.groups > 1):
            self.store_sums(acc, total, shared, place)
            cute.arch.barrier()
            total = self.add_groups(acc, shared, place)
        if cutlass.const_expr(mSinks is not None):
            row_max, total = self.add_sink(acc, total, row_max, mSinks, place)
        if place.exists and place.group == 0:
            self.store(acc, total, row_max, mO, mLSE, place)

    def shared_memory(self, base: Any) -> Shared:
        """The areas of shared memory from ``base`` on, fp32."""
        tile, areas = self.tile, self.tile.smem_areas(self.traits)

        def area(name: str, *shape: int) -> cute.Tensor:
            return cute.make_tensor(
                base + areas[name][0] // 4,
                cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))),
            )

        return Shared(
            area("lse", tile.rows, tile.most_partials),
            area("weights", tile.rows, tile.most_partials),
            area("sums", tile.rows, tile.groups, self.traits.head_dim_v),
            area("totals", tile.rows, tile.groups),
        )

    @cute.jit
    def place(self, block: Int32, thread: Int32, rows: Int32, divisors: tuple) -> Place:
        """The place of a CTA's thread. Heads run fastest, as they are adjacent in memory."""
        per_row, groups = self.tile.threads_per_row(self.traits), self.tile.groups
        own = thread // (per_row * groups)
        flat = block * self.tile.rows + own
        queries, heads = divisors
        plane, head = divmod(cutlass.min(flat, rows - 1), heads)
        batch, query = divmod(plane, queries)
        return Place(own, thread // per_row % groups, thread % per_row, flat < rows, batch, query, head)

    @cute.jit
    def row_partials(self, mOpartial: cute.Tensor, mLSEpartial: cute.Tensor, place: Place) -> RowPartials:
        """Partial results of a thread's row."""
        step_partial, step_batch, step_query, step_head, _ = mOpartial.stride
        out = (
            Int64(place.batch) * step_batch + Int64(place.query) * step_query + Int64(place.head) * step_head
        )
        step_lse, lse_batch, lse_head, lse_query = mLSEpartial.stride
        lse = Int64(place.batch) * lse_batch + Int64(place.head) * lse_head + Int64(place.query) * lse_query
        return RowPartials(Int32(mOpartial.shape[0]), out, Int64(step_partial), lse, Int64(step_lse))

    @cute.jit
    def load_lse(self, lses: cute.Pointer, partials: RowPartials, shared: Shared, place: Place) -> None:
        """The row's LSEs to shared memory, +inf as -inf."""
        first, step = self.own_partials(place)
        for i in cutlass.range(first, partials.count, step, unroll=1):
            lse = cute.make_tensor(lses + partials.lse_place(i), cute.make_layout(1))[0]
            shared.lse[place.row, i] = -Float32.inf if lse == Float32.inf else lse

    @cute.jit
    def compute_weights(self, partials: Int32, shared: Shared, place: Place) -> tuple[Float32, Int32]:
        """Weights from LSEs, in shared memory; returns the row's maximum, and where it or a NaN is, -1 for nowhere."""
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
        """First and step of the partial results whose LSE and weight this thread handles."""
        per_row = self.tile.threads_per_row(self.traits)
        return place.group * per_row + place.lane, per_row * self.tile.groups

    @cute.jit
    def add_partials(
        self,
        outs: cute.Pointer,
        partials: RowPartials,
        largest: Int32,
        shared: Shared,
        place: Place,
        loaded: cute.Tensor | None = None,
    ):
        """The group's sums: of weighted rows, this thread's columns (4, vectors), and of weights.

        The rows of ``unroll`` partial results are loaded at once; ``loaded``: the first ones, by :meth:`load_first`.
        """
        step: Constexpr = self.tile.groups * self.tile.unroll
        count = Int32(0) if largest < 0 else partials.count
        acc = cute.make_rmem_tensor(cute.make_layout((4, self.tile.vectors(self.traits))), Float32)
        acc.fill(0.0)
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
        return acc, total

    def row_values(self) -> cute.Tensor:
        """Registers for this thread's columns of ``unroll`` partial rows."""
        return cute.make_rmem_tensor(
            cute.make_layout((4, self.tile.vectors(self.traits), self.tile.unroll)), Float32
        )

    @cute.jit
    def load_first(self, outs: cute.Pointer, partials: RowPartials, place: Place) -> cute.Tensor:
        """Load the group's first rows before their weights are known: beside the LSEs."""
        values = self.row_values()
        for u in cutlass.range_constexpr(self.tile.unroll):
            i = cutlass.min(place.group + u * self.tile.groups, partials.count - 1)
            self.load_row(values, u, outs, partials.out_row(i), place)
        return values

    @cute.jit
    def load_row(
        self, values: cute.Tensor, u: Constexpr, outs: cute.Pointer, row: Int64, place: Place
    ) -> None:
        """Load this thread's columns of a partial row; in place of those out of bounds, others."""
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = cutlass.min(self.column(place, j), self.traits.head_dim_v - 4)
            source = outs + cute.assume(row + col, divby=4)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), values[None, j, u])

    @cute.jit
    def weight(self, i: Int32, count: Int32, shared: Shared, place: Place) -> Float32:
        """Weight of partial result i; 0 from ``count`` on."""
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
        """Add the weighted ``values`` to ``acc``, and their weights to ``total``. Rows without weight may be NaN."""
        for u in cutlass.range_constexpr(self.tile.unroll):
            weight = self.weight(first + u * self.tile.groups, count, shared, place)
            total += weight
            for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                for e in cutlass.range_constexpr(4):
                    product = Float32(0.0) if weight == 0.0 else weight * values[e, j, u]
                    acc[e, j] = acc[e, j] + product
        return total

    def column(self, place: Place, vector: int) -> Int32:
        """The first column of this thread's vector."""
        return (place.lane + vector * self.tile.threads_per_row(self.traits)) * 4

    @cute.jit
    def store_sums(self, acc: cute.Tensor, total: Float32, shared: Shared, place: Place) -> None:
        """The group's sums to shared memory."""
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = self.column(place, j)
            if col < self.traits.head_dim_v:
                for e in cutlass.range_constexpr(4):
                    shared.sums[place.row, place.group, col + e] = acc[e, j]
        shared.totals[place.row, place.group] = total

    @cute.jit
    def add_groups(self, acc: cute.Tensor, shared: Shared, place: Place) -> Float32:
        """All groups' sums, in their order: to ``acc``, and the weights' as the result."""
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
        """The row's maximum and sum of weights with its head's sink; ``acc`` is scaled to them."""
        sink = Float32(sinks[place.head])
        largest = fmax(row_max, sink)
        shift = Float32(0.0) if largest == -Float32.inf else largest
        factor = exp2((row_max - shift) * LOG2_E)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        return largest, total * factor + exp2((sink - shift) * LOG2_E)

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
        factor = Float32(0.0) if total == 0.0 else reciprocal(total)
        out = cute.make_rmem_tensor(acc.layout, dtype)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        if cutlass.const_expr(dtype is Float32):
            out.store(acc.load())
        else:
            convert_to_16_bits(acc, out)
        start = Int64(place.query) * mO.stride[-3] + Int64(place.head) * mO.stride[-2]
        if cutlass.const_expr(len(mO.shape) == 4):
            start += Int64(place.batch) * mO.stride[0]
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = self.column(place, j)
            if col < self.traits.head_dim_v:
                target = mO.iterator + cute.assume(start + col, divby=4)
                cute.autovec_copy(out[None, j], cute.make_tensor(target, cute.make_layout(4)))
        if place.lane == 0:
            start = Int64(place.head) * mLSE.stride[-2] + Int64(place.query) * mLSE.stride[-1]
            if cutlass.const_expr(len(mLSE.shape) == 3):
                start += Int64(place.batch) * mLSE.stride[0]
            target = cute.make_tensor(mLSE.iterator + start, cute.make_layout(1))
            target[0] = -Float32.inf if total == 0.0 else row_max + log(total)


@dataclass(frozen=True)
class CombineUnits:
    """Units, query blocks of packs of heads, in chunks of a CTA's rows: block -> (batch, pack, m_block, chunk).

    Packed queries have the query blocks of all sequences, padded as in :func:`first_block`. Where the tile says so the
    chunks are of a slot's unit instead: block -> (slot, chunk).
    """

    chunks: cute.FastDivmodDivisorV2
    m_blocks: cute.FastDivmodDivisorV2
    packs: cute.FastDivmodDivisorV2
    packs_per_kvhead: cute.FastDivmodDivisorV2
    group: Int32
    total: Int32

    @staticmethod
    def make(
        mO: cute.Tensor, seqlens: Seqlens, nheads_kv: Int32, slots: Int32, tile: CombineSharesTile
    ) -> "CombineUnits":
        """On the host."""
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
        if cutlass.const_expr(tile.by_slot):
            total = slots * chunks
        chunks, m_blocks, packs, packs_per_kvhead = (
            cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (chunks, m_blocks, packs, packs_per_kvhead)
        )
        return CombineUnits(chunks, m_blocks, packs, packs_per_kvhead, group, total)


@dataclass(frozen=True)
class CombineLine:
    """The line of all key blocks, and where a CTA's unit is looked up on it.

    Attributes:
        number: of sequences.
        lane: of the warp that looks it up.
    """

    number: Int32
    seqlens: Seqlens
    mask_args: tuple
    units: CombineUnits
    slots: Int32
    lane: Int32


@dataclass(frozen=True)
class CombineUnit:
    """A CTA's unit and rows: ``first`` and ``last``, the slots that have parts of it, are equal if it is whole."""

    batch: Int32
    pack: Int32
    row0: Int32
    chunk: Int32
    info: SeqlenInfo
    first: Int32
    last: Int32


@dataclass(frozen=True)
class CombineShares(Combine):
    """Merges what a kvcache kernel with split "shares" left in parts. A CTA handles some rows of one unit.

    Its first warp finds the unit's slots by the arithmetic of :class:`KeyShares`. The CTA leaves at once where a single
    slot wrote the result.
    """

    tile: CombineSharesTile

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if traits.op != "combine_shares":
            return f"it computes combine_shares, not {traits.op}"
        used = ("mask", "sinks", "varlen", "seqused_k", "leftpad", "varlen_k", "variant")
        own = {name: getattr(traits, name) for name in used}
        plain = Traits("combine_shares", traits.arch, traits.dtype, traits.head_dim, **own)
        if traits != plain:
            return f"it uses lengths, the mask and sinks alone; accepted: {plain}"
        return beyond(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> CombineSharesTile:
        """The tile after a kernel with 64 rows and keys per block; calls have one that follows the kernel's."""
        return CombineSharesTile()

    @property
    def mask(self) -> Mask:
        """The kvcache kernel's."""
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
        slots: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. mask_args: None where the mask has none."""
        units = CombineUnits.make(mO, seqlens, nheads_kv, slots, self.tile)
        self.kernel(partials, mO, mLSE, mSinks, seqlens, mask_args, units, slots).launch(
            grid=[units.total, 1, 1],
            block=[self.tile.num_threads(self.traits), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # otherwise registers are saved, and few loads are in flight
            use_pdl=self.traits.arch == "sm90",
        )

    @cute.kernel
    def kernel(
        self,
        partials: Partials,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSinks: cute.Tensor | None,
        seqlens: Seqlens,
        mask_args: Any,
        units: CombineUnits,
        slots: Int32,
    ) -> None:
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        base = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), 16)
        shared, found = self.shared_memory(cute.recast_ptr(base, dtype=Float32)), self.found_unit(base)
        number = seqlens.batch(mO)
        if cutlass.const_expr(mask_args is None):
            mask_args = ()
        index, chunk = divmod(cute.arch.block_idx()[0], units.chunks)
        if thread < 32:
            warm_lengths(seqlens, number, lane)
            self.find(index, CombineLine(number, seqlens, mask_args, units, slots, lane), found)
        cute.arch.barrier()
        unit = self.unit(found, chunk, seqlens)
        self.wait_for_partials()  # what wrote the lengths has ended before that kernel began
        if unit.first < unit.last:
            place, rows = self.place_of_unit(thread, unit, partials, units)
            self.merge(partials.out.iterator, partials.lse.iterator, rows, shared, place, mO, mLSE, mSinks)

    def found_unit(self, base: cute.Pointer) -> cute.Tensor:
        """(5,) int32 in shared memory: what :meth:`find` found."""
        start = self.tile.smem_areas(self.traits)["unit"][0]
        return cute.make_tensor(cute.recast_ptr(base + start, dtype=Int32), cute.make_layout(5))

    @cute.jit
    def find(self, index: Int32, line: CombineLine, found: cute.Tensor) -> None:
        """A CTA's batch, pack, first row, and first and last slot, by a whole warp."""
        look = self.unit_of_slot if self.tile.by_slot else self.unit_of_all
        numbers = look(index, line)
        if line.lane == 0:
            for i in cutlass.range_constexpr(5):
                found[i] = numbers[i]

    def unit(self, found: cute.Tensor, chunk: Int32, seqlens: Seqlens) -> CombineUnit:
        """The unit that was found."""
        batch, pack, row0, first, last = (found[i] for i in range(5))
        return CombineUnit(batch, pack, row0, chunk, SeqlenInfo.read(seqlens, batch), first, last)

    @cute.jit
    def unit_of_all(self, plane: Int32, line: CombineLine) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The unit at a place among all."""
        queries: Constexpr = self.tile.tile_m // self.tile.pack_heads
        seqlens, units = line.seqlens, line.units
        plane, m_block = divmod(plane, units.m_blocks)
        batch, pack = Int32(0), plane
        if cutlass.const_expr(self.traits.varlen):
            batch = sequence_of_block(seqlens.cu_seqlens_q, m_block, queries)
            m_block -= first_block(seqlens.cu_seqlens_q, batch, queries)
        else:
            batch, pack = divmod(plane, units.packs)
        info = SeqlenInfo.read(seqlens, batch)
        row0 = m_block * queries
        first, last = Int32(0), Int32(0)
        if (row0 >= 0) & (row0 < info.seqlen_q):
            blocks = VisibleBlocks(seqlens, line.mask_args, self.mask, queries, self.tile.tile_n)
            heads = units.packs.divisor
            shares, start = KeyShares.measure(
                blocks, line.number, heads, line.slots, line.lane, OVERHEAD, batch
            )
            first, last = shares.slots_of(start, batch, pack, m_block)
        return batch, pack, row0, first, last

    @cute.jit
    def unit_of_slot(self, slot: Int32, line: CombineLine) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The unit that a slot begins and does not end."""
        queries: Constexpr = self.tile.tile_m // self.tile.pack_heads
        blocks = VisibleBlocks(line.seqlens, line.mask_args, self.mask, queries, self.tile.tile_n)
        heads = line.units.packs.divisor
        shares = KeyShares.make(blocks, line.number, heads, line.slots, line.lane, OVERHEAD)
        batch, pack, m_block, last = shares.divided_unit(slot)
        return batch, pack, m_block * queries, slot, last

    @cute.jit
    def place_of_unit(
        self, thread: Int32, unit: CombineUnit, partials: Partials, units: CombineUnits
    ) -> tuple[Place, RowPartials]:
        """What a thread works on, and where its row's partial results are."""
        tile, per_row = self.tile, self.tile.threads_per_row(self.traits)
        own = thread // (per_row * tile.groups)
        row = unit.chunk * tile.rows + own
        head_kv, of_kvhead = divmod(unit.pack, units.packs_per_kvhead)
        in_group = of_kvhead * tile.pack_heads + row % tile.pack_heads
        query = unit.row0 + row // tile.pack_heads
        exists = (row < tile.tile_m) & (query < unit.info.seqlen_q) & (in_group < units.group)
        head = cutlass.min(head_kv * units.group + in_group, units.group * (head_kv + 1) - 1)
        group, lane = thread // per_row % tile.groups, thread % per_row
        place = Place(own, group, lane, exists, unit.batch, unit.info.offset_q + query, head)
        return place, self.unit_partials(partials, unit.first, unit.last, row)

    @cute.jit
    def unit_partials(self, partials: Partials, first: Int32, last: Int32, row: Int32) -> RowPartials:
        """The partial results of a row, which the slots from ``first`` to ``last`` wrote."""
        row = Int64(cutlass.min(row, self.tile.tile_m - 1))
        step, step_row, _ = partials.out.stride
        lse_step, lse_row = partials.lse.stride
        before = Int64(2 * first)
        return RowPartials(
            last - first + 1,
            before * step + row * step_row,
            Int64(step),
            before * lse_step + row * lse_row,
            Int64(lse_step),
            True,
        )
