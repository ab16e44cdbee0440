"""Writes new keys and values into a cache, and rotates keys and queries. Runs on every target.

    cache row  cache_seqlens[b] + i  of sequence b = new key i, rotated, and new value i
    rotated query i                                = query i rotated by the angles of its position

All new rows are written, whether a query sees them or not, in a separate launch before attention. Attention threads
thus never wait for each other's rows, and this file serves both archs. Rows beyond the cache's capacity are dropped.

A CTA handles one row with all its heads: a key and its value, or a query. A thread handles 16 bytes, or ``alignment``
elements if the traits have one; the grid's y extent divides rows that are longer than a CTA. ``KeyRows`` gives the
rows' addresses.

Rotation is in fp32 and rounds once. With 16-bit cosines and sines, products are exact in fp32, so it does not matter
where the compiler fuses multiply and add: results equal the definition's bit for bit.

Limits: fp16, bf16 and fp32; head dims up to 576; rows with a contiguous last dimension and any other strides; any even
number of rotated elements.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cute_attn.device.key_rows import KeyRows
from cute_attn.device.math import convert_to_16_bits
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.rows.new_rows import Angles, NewKeys, NewRow, Queries, number_of_rows
from cute_attn.tiles.inference import AppendTile
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, Traits


def _new_fake(kernel: Any) -> NewKeys:
    traits = kernel.traits
    dtype, ndim = fakes.CUTE_DTYPES[traits.dtype], 3 if traits.varlen_new else 4
    k, v = (fakes.rows(dtype, ndim, traits.alignment) for _ in range(2))
    return NewKeys(k, v, fakes.plain(Int32, 1), fakes.numbers(traits.varlen_new))


def _angles_fake(kernel: Any) -> Angles | None:
    if not kernel.traits.rotary:
        return None
    cos, sin = (fakes.plain(fakes.CUTE_DTYPES[kernel.traits.dtype], 2) for _ in range(2))
    return Angles(cos, sin, fakes.plain(Int32, 1))


def _queries_fake(kernel: Any) -> Queries | None:
    traits = kernel.traits
    if not traits.rotate_q:
        return None
    q, rotated = (fakes.head_rows(kernel) for _ in range(2))
    return Queries(q, rotated, fakes.numbers(traits.varlen), Int32(0))


@dataclass(frozen=True)
class AppendKv:
    """The append kernel for (traits, tile); ``__call__`` traces the host side."""

    traits: Traits
    tile: AppendTile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        used = (
            *("head_dim_v", "varlen", "rotary", "rotate_q", "varlen_new", "paged", "batch_idx"),
            *("alignment", "variant"),
        )
        if reason := more_than(traits, ("append",), used, "no score features"):
            return reason
        if traits.varlen and not traits.rotate_q:
            return "varlen is of the queries; accepted: with rotate_q"
        return beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=traits.row_alignment)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> AppendTile:
        return AppendTile()

    @property
    def vector(self) -> int:
        return self.traits.row_alignment

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mKcache: fakes.CacheRows,
        mVcache: fakes.CacheRows,
        tables: fakes.Tables,
        new: Annotated[NewKeys | Any, _new_fake],
        angles: Annotated[Angles | None, _angles_fake],
        queries: Annotated[Queries | None, _queries_fake],
        stream: cuda.CUstream,
    ) -> None:
        per_row = new.k.shape[-2] * ((self.traits.head_dim + self.traits.head_dim_v) // self.vector)
        new_rows = number_of_rows(new.k)
        rows = new_rows
        if cutlass.const_expr(queries is not None):
            q: cute.Tensor = queries.q  # type: ignore[union-attr]
            rows += number_of_rows(q)
            per_row = cutlass.max(per_row, q.shape[-2] * (self.traits.head_dim // self.vector))
        key_rows = KeyRows.make(mKcache, tables)
        self.kernel(mKcache, mVcache, key_rows, new, new_rows, angles, queries).launch(
            grid=[rows, cute.ceil_div(per_row, self.tile.num_threads), 1],
            block=[self.tile.num_threads, 1, 1],
            stream=stream,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        mKcache: cute.Tensor,
        mVcache: cute.Tensor,
        key_rows: KeyRows,
        new: NewKeys,
        new_rows: Int32,
        angles: Angles | None,
        queries: Queries | None,
    ) -> None:
        number, part, _ = cute.arch.block_idx()
        vector = part * self.tile.num_threads + cute.arch.thread_idx()[0]
        if number < new_rows:
            self.append_vector(mKcache, mVcache, key_rows, new, angles, number, vector)
        elif cutlass.const_expr(queries is not None):
            self.rotate_query(queries, angles, number - new_rows, vector)

    @cute.jit
    def append_vector(
        self,
        mKcache: cute.Tensor,
        mVcache: cute.Tensor,
        key_rows: KeyRows,
        new: NewKeys,
        angles: Angles | None,
        number: Int32,
        vector: Int32,
    ) -> None:
        """Write vector ``vector`` of new row ``number``, counted over the key's heads and then the value's."""
        row = NewRow.find(new.k, new.cu_seqlens, number)
        size = self.vector
        per_key, per_value = self.traits.head_dim // size, self.traits.head_dim_v // size
        of_keys = new.k.shape[-2] * per_key
        of_values = new.k.shape[-2] * per_value
        target = new.seqlens[row.batch] + row.index
        if row.exists and target >= 0 and target < key_rows.capacity and vector < of_keys + of_values:
            place = key_rows.place(row.batch, target)
            if vector < of_keys:
                head, col = vector // per_key, vector % per_key * size
                source = row.elements(new.k, head)
                values = self.load(source, col)
                if cutlass.const_expr(angles is not None):
                    values = self.rotate(values, source, col, angles, row.batch, row.index)
                self.store(values, key_rows.row(mKcache, place, head), col)
            else:
                head, col = (vector - of_keys) // per_value, (vector - of_keys) % per_value * size
                values = self.load(row.elements(new.v, head), col)
                self.store(values, key_rows.row(mVcache, place, head), col)

    @cute.jit
    def rotate_query(self, queries: Queries, angles: Angles, number: Int32, vector: Int32) -> None:
        """Rotate vector ``vector`` of query row ``number`` and write it to ``queries.rotated``."""
        row = NewRow.find(queries.q, queries.cu_seqlens, number)
        per_head = self.traits.head_dim // self.vector
        if row.exists and vector < queries.q.shape[-2] * per_head:
            head, col = vector // per_head, vector % per_head * self.vector
            source = row.elements(queries.q, head)
            values = self.load(source, col)
            values = self.rotate(values, source, col, angles, row.batch, row.index * queries.step)
            self.store(values, row.elements(queries.rotated, head), col)

    @cute.jit
    def load(self, source: cute.Tensor, col: Int32) -> cute.Tensor:
        """Load the vector of a row that starts at element ``col``."""
        values = cute.make_rmem_tensor(cute.make_layout(self.vector), source.element_type)
        start = cute.assume(Int64(col), divby=self.vector)
        cute.autovec_copy(cute.make_tensor(source.iterator + start, cute.make_layout(self.vector)), values)
        return values

    @cute.jit
    def store(self, values: cute.Tensor, target: cute.Tensor, col: Int32) -> None:
        """Store the vector of a row that starts at element ``col``."""
        start = cute.assume(Int64(col), divby=self.vector)
        cute.autovec_copy(values, cute.make_tensor(target.iterator + start, cute.make_layout(self.vector)))

    @cute.jit
    def rotate(
        self, values: cute.Tensor, source: cute.Tensor, col: Int32, angles: Angles, batch: Int32, index: Int32
    ) -> cute.Tensor:
        """Rotate the pairs in ``values``, the vector of row ``source`` that starts at element ``col``.

        Its position is ``index`` after the sequence's first one. Positions beyond the table use the table's last row.
        """
        pairs = Int32(angles.cos.shape[1])
        last = angles.cos.shape[0] - 1
        first = cutlass.min(angles.seqlens[batch], last - index)  # the sum stays in 32 bits
        position = cutlass.max(first + index, 0)
        wide = cute.make_rmem_tensor(cute.make_layout(self.vector), Float32)
        cos, sin = (self.angle_row(table, position) for table in (angles.cos, angles.sin))
        for e in cutlass.range_constexpr(self.vector):
            # Indices out of bounds are clamped, to avoid a branch.
            at = cutlass.min(col + e, 2 * pairs - 1)
            if cutlass.const_expr(self.traits.rotary == "interleaved" and self.vector > 1):
                first, pair, other = Boolean(e % 2 == 0), at // 2, values[e ^ 1]
            elif cutlass.const_expr(self.traits.rotary == "interleaved"):
                first, pair, other = at % 2 == 0, at // 2, source[at ^ 1]
            else:
                first = at < pairs
                pair = at if first else at - pairs
                other = source[at + pairs if first else at - pairs]
            x, y = Float32(values[e]), Float32(other)
            c, s = Float32(cos[pair]), Float32(sin[pair])
            turned = x * c - y * s if first else y * s + x * c
            wide[e] = turned if col + e < 2 * pairs else x
        result = cute.make_rmem_tensor(cute.make_layout(self.vector), values.element_type)
        if cutlass.const_expr(result.element_type is Float32):
            result.store(wide.load())
        else:
            convert_to_16_bits(wide, result)
        return result

    @cute.jit
    def angle_row(self, table: cute.Tensor, position: Int32) -> cute.Tensor:
        """The row of a table of cosines or sines for a position."""
        return cute.make_tensor(
            table.iterator + Int64(position) * table.stride[0], cute.make_layout(table.shape[1])
        )
