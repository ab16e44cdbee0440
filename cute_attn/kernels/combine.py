"""Merges partial results of attention over disjoint sets of keys. Runs on every target.

    m       = max over i of lse[i]              of one query of one head, over its partial results i
    w[i]    = exp(lse[i] - m)
    out     = sum over i of w[i] * o[i] / sum over i of w[i]
    lse_out = m + log(sum over i of w[i])

A partial result with an LSE of -inf saw no key: its weight is 0 and its row is not read, so that it may be unwritten
memory. So does +inf, which some libraries use instead. Where all did, out is 0 and lse_out -inf. NaN stays NaN.

A CTA merges a few rows. The threads of a row load its LSEs to shared memory and turn them into weights there. Then
groups of threads each add up every groups-th partial row, 16 bytes a thread and several rows in flight, and the first
group adds the groups' sums in their order. So the order of all sums depends on the number of partial results and the
tile alone: results repeat bit for bit.

Limits: up to 256 fp32 partial results; out in fp16, bf16 or fp32; head dims up to 256, multiples of 8.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory

from cute_attn.device.math import LOG2_E, convert_to_16_bits, exp2, fmax, log, reciprocal
from cute_attn.kernels.arguments import CUTE_DTYPES, combine_fake_args
from cute_attn.kernels.limits import beyond
from cute_attn.tiles.inference import MAX_PARTIALS, CombineTile
from cute_attn.traits import DTYPES, Traits


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: fp32 (rows, MAX_PARTIALS) twice, (rows, groups, head_dim_v), (rows, groups).

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
        plain = Traits("combine", traits.arch, traits.dtype, traits.head_dim, variant=traits.variant)
        if traits != plain:
            return f"it uses no features; accepted: {plain}"
        return beyond(traits, dtypes=DTYPES)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> CombineTile:
        """The tile for many partial results; see ``CombineTile.of``."""
        return CombineTile.of(MAX_PARTIALS)

    def fake_args(self) -> tuple:
        """The arguments of ``__call__`` for compiling, without the stream."""
        return combine_fake_args(self.traits)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mOpartial: cute.Tensor,
        mLSEpartial: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Shapes: see ``cute_attn.kernels.arguments``."""
        batch, queries, heads, _ = mO.shape
        rows = batch * queries * heads
        divisors = tuple(cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (queries, heads))
        self.kernel(mOpartial, mLSEpartial, mO, mLSE, rows, divisors).launch(
            grid=[cute.ceil_div(rows, self.tile.rows), 1, 1],
            block=[self.tile.num_threads(self.traits), 1, 1],
            stream=stream,
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
        rows: Int32,
        divisors: tuple,
    ) -> None:
        if cutlass.const_expr(self.traits.arch == "sm90"):
            cute.arch.griddepcontrol_wait()  # for the kernel that writes the partial results
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        base = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), 16)
        shared = self.shared_memory(cute.recast_ptr(base, dtype=Float32))
        place = self.place(block, thread, rows, divisors)
        self.load_lse(mLSEpartial, shared, place)
        cute.arch.barrier()
        row_max, largest = self.compute_weights(mLSEpartial.shape[0], shared, place)
        cute.arch.barrier()
        acc, total = self.add_partials(mOpartial, largest, shared, place)
        if cutlass.const_expr(self.tile.groups > 1):
            self.store_sums(acc, total, shared, place)
            cute.arch.barrier()
            total = self.add_groups(acc, shared, place)
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
            area("lse", tile.rows, MAX_PARTIALS),
            area("weights", tile.rows, MAX_PARTIALS),
            area("sums", tile.rows, tile.groups, self.traits.head_dim_v),
            area("totals", tile.rows, tile.groups),
        )

    @cute.jit
    def place(self, block: Int32, thread: Int32, rows: Int32, divisors: tuple) -> Place:
        """Of a CTA's thread. Heads run fastest, as they are adjacent in memory."""
        per_row, groups = self.tile.threads_per_row(self.traits), self.tile.groups
        own = thread // (per_row * groups)
        flat = block * self.tile.rows + own
        queries, heads = divisors
        plane, head = divmod(cutlass.min(flat, rows - 1), heads)
        batch, query = divmod(plane, queries)
        return Place(own, thread // per_row % groups, thread % per_row, flat < rows, batch, query, head)

    @cute.jit
    def load_lse(self, mLSEpartial: cute.Tensor, shared: Shared, place: Place) -> None:
        """The row's LSEs to shared memory, +inf as -inf."""
        step_partial, step_batch, step_head, step_query = mLSEpartial.stride
        start = Int64(place.batch) * step_batch + Int64(place.head) * step_head
        start += Int64(place.query) * step_query
        first, step = self.own_partials(place)
        for i in cutlass.range(first, mLSEpartial.shape[0], step, unroll=1):
            source = mLSEpartial.iterator + start + Int64(i) * step_partial
            lse = cute.make_tensor(source, cute.make_layout(1))[0]
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
    def add_partials(self, mOpartial: cute.Tensor, largest: Int32, shared: Shared, place: Place):
        """The group's sums: of weighted rows, this thread's columns (4, vectors), and of weights.

        The rows of ``unroll`` partial results are loaded at once, without a branch: in place of those without weight,
        and of columns out of bounds, others that are in the cache.
        """
        traits, groups, unroll = self.traits, self.tile.groups, self.tile.unroll
        vectors: Constexpr = self.tile.vectors(traits)
        partials = Int32(0) if largest < 0 else Int32(mOpartial.shape[0])
        step_partial, step_batch, step_query, step_head, _ = mOpartial.stride
        start = Int64(place.batch) * step_batch + Int64(place.query) * step_query
        start += Int64(place.head) * step_head
        acc = cute.make_rmem_tensor(cute.make_layout((4, vectors)), Float32)
        acc.fill(0.0)
        total = Float32(0.0)
        values = cute.make_rmem_tensor(cute.make_layout((4, vectors, unroll)), Float32)
        weights = cute.make_rmem_tensor(cute.make_layout(unroll), Float32)
        for first in cutlass.range(place.group, partials, groups * unroll, unroll=1):
            for u in cutlass.range_constexpr(unroll):
                i = first + u * groups
                weight = shared.weights[place.row, cutlass.min(i, partials - 1)]
                weights[u] = weight if i < partials else Float32(0.0)
                row = start + Int64(largest if weights[u] == 0.0 else i) * step_partial
                for j in cutlass.range_constexpr(vectors):
                    col = cutlass.min(self.column(place, j), traits.head_dim_v - 4)
                    source = mOpartial.iterator + cute.assume(row + col, divby=4)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), values[None, j, u])
            for u in cutlass.range_constexpr(unroll):
                total += weights[u]
                for j in cutlass.range_constexpr(vectors):
                    for e in cutlass.range_constexpr(4):
                        product = Float32(0.0) if weights[u] == 0.0 else weights[u] * values[e, j, u]
                        acc[e, j] = acc[e, j] + product
        return acc, total

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
        dtype = CUTE_DTYPES[self.traits.dtype]
        factor = Float32(0.0) if total == 0.0 else reciprocal(total)
        out = cute.make_rmem_tensor(acc.layout, dtype)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        if cutlass.const_expr(dtype is Float32):
            out.store(acc.load())
        else:
            convert_to_16_bits(acc, out)
        step_batch, step_query, step_head, _ = mO.stride
        start = Int64(place.batch) * step_batch + Int64(place.query) * step_query
        start += Int64(place.head) * step_head
        for j in cutlass.range_constexpr(self.tile.vectors(self.traits)):
            col = self.column(place, j)
            if col < self.traits.head_dim_v:
                target = mO.iterator + cute.assume(start + col, divby=4)
                cute.autovec_copy(out[None, j], cute.make_tensor(target, cute.make_layout(4)))
        if place.lane == 0:
            start = Int64(place.batch) * mLSE.stride[0] + Int64(place.head) * mLSE.stride[1]
            target = cute.make_tensor(
                mLSE.iterator + start + Int64(place.query) * mLSE.stride[2], cute.make_layout(1)
            )
            target[0] = -Float32.inf if total == 0.0 else row_max + log(total)
