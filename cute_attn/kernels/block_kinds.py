"""Classifies the blocks of a mask as hidden, partial or full. Runs on every target.

    kind[b, h, i, j] = FULL if all queries of block i see all keys of block j, 0 if no query sees any key, else PARTIAL

The mask is a traced ``mask_mod``. Most blocks are classified without evaluating the mask on each element. Values that
depend only on the query, such as its document, are computed for a block's queries and reduced to a minimum and maximum;
likewise for keys. These bounds give bounds of the predicate (``functions.device_operations``): the block is seen
entirely, not at all, or has to be evaluated. A causal mask evaluates the blocks on the diagonal, a document mask the
blocks in which a document ends. A warp evaluates a block, distant rows first, until it finds a seen and a hidden key.

A CTA handles one block of queries and every n-th block of keys, one per warp. The queries' values are computed once and
kept in shared memory; each lane keeps the values of its keys in registers. Indices beyond the sequences are clamped to
the last query or key, so no element is excluded; a block that reaches beyond the sequences is partial, not full.

Limits: query and key blocks of multiples of 32 up to 512; up to 32 values per query.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, Uint8, cute, memory

from cute_attn.device import warp
from cute_attn.epilogues.functions.blocks import (
    BlockPredicate,
    Extremes,
    MaskState,
    Predicate,
    kept_type,
    predicate_of,
)
from cute_attn.epilogues.functions.device_operations import Interval
from cute_attn.epilogues.functions.graph import Graph
from cute_attn.epilogues.names import user_epilogue
from cute_attn.kernels import fakes
from cute_attn.tiles.helpers import BlockKindsTile
from cute_attn.traits import BLOCK_OPS, FULL, LISTED_ROWS, PARTIAL, Traits

_STRIDE = 37
"""Distance, modulo tile_m, between rows evaluated in turn: coprime to tile_m, and mask edges cross few such rows."""


def _mask_fakes(kernel: Any) -> tuple | None:
    traits = kernel.traits
    return tuple(x for name in traits.epilogues for x in user_epilogue(name).of(traits).fake_args()) or None


@dataclass(frozen=True)
class BlockKinds:
    """The block_kinds kernel for (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: BlockKindsTile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.op != BLOCK_OPS[0]:
            return f"it computes {BLOCK_OPS[0]}, not {traits.op}"
        plain = Traits(traits.op, "sm80", "bf16", LISTED_ROWS, epilogues=traits.epilogues)
        if traits != plain:
            return f"it reads no rows and uses no score features; accepted: {plain}"
        if len(traits.epilogues) > 1:
            return f"epilogues is {traits.epilogues}; accepted: one mask_mod"
        predicate = _predicate(traits)
        if predicate is None:
            return f"epilogue {traits.epilogues[0]!r} does more than hide keys; accepted: a mask_mod"
        values, most = len(predicate.of_queries), BlockKindsTile.MOST_VALUES
        if values > most:
            return f"the mask has {values} values of a query; accepted: up to {most}"
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> BlockKindsTile:
        """The tile whose blocks have the size of the blocks that attention kernels list."""
        return BlockKindsTile()

    @property
    def predicate(self) -> Predicate:
        found = _predicate(self.traits)
        assert found is not None
        return found

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mKinds: fakes.Kinds,
        seqlen_q: Int32,
        seqlen_k: Int32,
        groups: Int32,
        mask_args: Annotated[tuple | None, _mask_fakes],
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. groups: CTAs per block of queries. mask_args: the mask's captured tensors, or None."""
        batch, nheads, rows, _ = mKinds.shape
        self.kernel(mKinds, seqlen_q, seqlen_k, groups, mask_args).launch(
            grid=[groups * rows * nheads * batch, 1, 1], block=[self.tile.num_threads, 1, 1], stream=stream
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self, mKinds: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, groups: Int32, mask_args: Any
    ) -> None:
        thread, warps = cute.arch.thread_idx()[0], self.tile.num_warps
        block, (_, nheads, rows, _) = cute.arch.block_idx()[0], mKinds.shape
        number, group = block // groups, block % groups
        number, row = number // rows, number % rows
        batch, head = number // nheads, number % nheads
        values = self.shared_values()
        captured = () if cutlass.const_expr(mask_args is None) else mask_args
        state = MaskState.begin(self.predicate, captured, batch, head)
        self.keep_queries(state, values, row, seqlen_q, thread, self.tile.num_threads)
        cute.arch.barrier()
        kinds = mKinds[batch, head, row, None]
        first = group * warps + thread // warp.LANES
        self.find(state, values, kinds, row, seqlen_q, seqlen_k, first, groups * warps)

    def shared_values(self) -> tuple[cute.Tensor, ...]:
        """Allocate shared memory for the queries' values in the predicate: one array of tile_m per value."""
        nodes = self.predicate.of_queries
        if not nodes:
            return ()
        types = [kept_type(node) for node in nodes]
        starts = [sum(x.width // 8 for x in types[:i]) * self.tile.tile_m for i in range(len(types) + 1)]
        base = memory.SmemAllocator().allocate(starts[-1], byte_alignment=16)
        return tuple(
            cute.make_tensor(cute.recast_ptr(base + start, dtype=x), cute.make_layout(self.tile.tile_m))
            for x, start in zip(types, starts, strict=False)
        )

    # ---- device code that tests also run on the host ----

    @cute.jit
    def keep_queries(
        self, state: MaskState, values: tuple, row: Int32, seqlen_q: Int32, thread: Int32, threads: Constexpr
    ) -> None:
        """Write the values of a block's queries to ``values``; called by each of ``threads`` threads."""
        for i in cutlass.range(thread, self.tile.tile_m, threads):
            found = self.mask(state).of_query(self.query(row, i, seqlen_q))
            for kept, value in zip(values, found, strict=True):
                kept[i] = value

    def mask(self, state: MaskState) -> BlockPredicate:
        """The predicate for the (batch, head) and captured tensors of ``state``."""
        return BlockPredicate(self.predicate, state)

    def query(self, row: Int32, i: Int32, seqlen_q: Int32) -> Int32:
        """The index of a block's i-th query, clamped to the last query."""
        return cutlass.min(row * self.tile.tile_m + i, seqlen_q - 1)

    def key(self, column: Int32, i: Int32, seqlen_k: Int32) -> Int32:
        """The index of a block's i-th key, clamped to the last key."""
        return cutlass.min(column * self.tile.tile_n + i, seqlen_k - 1)

    @cute.jit
    def find(
        self,
        state: MaskState,
        values: tuple,
        kinds: cute.Tensor,
        row: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        first: Int32,
        step: Int32,
    ) -> None:
        """Write the kind of every ``step``-th key block, starting at ``first``; called by a whole warp."""
        lane, (tile_m, tile_n) = warp.lane(), (self.tile.tile_m, self.tile.tile_n)
        queries = _between(row * tile_m, self.query(row, tile_m - 1, seqlen_q))
        bounds_q = self.bounds_of_queries(state, values, lane)
        whole_q = (row + 1) * tile_m <= seqlen_q
        for column in cutlass.range(first, cute.size(kinds), step, unroll=1):
            places = [
                self.key(column, lane + i * warp.width(), seqlen_k) for i in range(tile_n // warp.width())
            ]
            of_keys = [self.mask(state).of_key(place) for place in places]
            bounds_k = _bounds(self.predicate.of_keys, of_keys)
            keys = _between(column * tile_n, self.key(column, tile_n - 1, seqlen_k))
            always, maybe = self.mask(state).bounds(queries, bounds_q, keys, bounds_k)
            seen, hidden = maybe, always == Boolean(False)
            if seen & hidden:
                seen, hidden = self.evaluate(state, values, places, of_keys, row, seqlen_q)
            if lane == 0:
                whole = whole_q & ((column + 1) * tile_n <= seqlen_k)
                listed = Int32(PARTIAL) if hidden | (whole == Boolean(False)) else Int32(FULL)
                kinds[column] = Uint8(listed if seen else Int32(0))

    def bounds_of_queries(self, state: MaskState, values: tuple, lane: Int32) -> list[Interval]:
        """Bounds of the values that :meth:`keep_queries` wrote; called by a whole warp."""
        lanes = warp.width()
        own = [[x[lane + i * lanes] for x in values] for i in range(self.tile.tile_m // lanes)]
        return _bounds(self.predicate.of_queries, own)

    @cute.jit
    def evaluate(
        self,
        state: MaskState,
        values: Constexpr,
        places: Constexpr,
        of_keys: Constexpr,
        row: Int32,
        seqlen_q: Int32,
    ):
        """(some query sees some key, some query does not see some key); called by a warp that has the keys in lanes."""
        tile_m: Constexpr = self.tile.tile_m
        seen, hidden, at = Boolean(False), Boolean(False), Int32(0)
        while at < tile_m * _STRIDE:
            for _ in cutlass.range_constexpr(self.tile.rows):
                i = at % tile_m
                query, of_query = self.query(row, i, seqlen_q), [x[i] for x in values]
                for place, of_key in zip(places, of_keys, strict=True):
                    sees = self.mask(state).sees(query, of_query, place, of_key)
                    seen, hidden = seen | sees, hidden | (sees == Boolean(False))
                at += _STRIDE
            seen, hidden = warp.any_of(seen), warp.any_of(hidden)
            at = tile_m * _STRIDE if seen & hidden else at
        return seen, hidden


def _between(first: Int32, last: Int32) -> Interval:
    return Interval(Int64(first), Int64(last))


def _bounds(nodes: tuple, values: list[list[Any]]) -> list[Interval]:
    """Bounds of each node over a warp, whose lanes have the values of different queries or keys."""
    return [Extremes.of(node, [one[number] for one in values]).of_warp() for number, node in enumerate(nodes)]


def _predicate(traits: Traits) -> Predicate | None:
    if not traits.epilogues:
        graph = Graph()
        return predicate_of(graph, graph.input("score"))
    from cute_attn.epilogues.functions.epilogue import FunctionEpilogue  # loads torch

    epilogue = user_epilogue(traits.epilogues[0])
    return predicate_of(epilogue.graph, epilogue.output) if isinstance(epilogue, FunctionEpilogue) else None
