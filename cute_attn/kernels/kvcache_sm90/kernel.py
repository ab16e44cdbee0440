"""The Hopper forward for attention with a cache of keys and values.

The roles of :mod:`cute_attn.kernels.forward_sm90.kernel` with four differences:

- ``CacheLoads``: keys and values come from a cache, or are packed sequences. A cache has contiguous entries, or pages
  that TMA loads in boxes of 8 rows or more; the Ampere kernel loads other pages. Lengths are read on the device. Key
  indices are rows of an entry; leftpad is the first key that a query may see.
- ``KeySplit``: keys of a query block may be divided among CTAs. With split "fixed" each query block has the same number
  of splits, or splits of the same number of keys, and CTAs claim them. The combine kernel merges partial results.
- ``FoldedConsumer``: with split "folded" a CTA computes all keys, and adds up the results of splits of a fixed size.
- ``CacheResults``: O is stored from registers, since few rows exist in decoding.

The producer runs ahead into the next work tile; Q is copied to registers so that its shared memory is free again. Thus
the pipelines stay full across work tiles: reading at memory speed needs about 100 KB in flight on a multiprocessor.

Limits: those of the forward. By its strides, a cache may store rows before heads or heads before rows. For head dims
above 256 see :mod:`cute_attn.kernels.kvcache_512_sm90.kernel`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from cute_attn.device.key_rows import KeyRows
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond_cache
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.kernels.forward_sm90.consumer import Consumer
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardParams, ForwardStorage
from cute_attn.kernels.kvcache_sm90.heuristics import cache_tile
from cute_attn.kernels.kvcache_sm90.roles import CacheLoads, CacheResults, FoldedConsumer
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.cached import EVICT_FIRST, EVICT_NORMAL, EntryTiles, PagedTiles
from cute_attn.tiles import KvcacheSm90Tile, padded
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import Traits
from cute_attn.work.query_tiles import QueryTileOrder


@dataclass(frozen=True)
class KvcacheSm90(ForwardSm90):
    """Kernel for attention with a cache, for (traits, tile); ``__call__`` launches it."""

    tile: KvcacheSm90Tile

    # ---- support, tiles and arguments ----

    cache_tile: ClassVar[Any] = staticmethod(cache_tile)

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        return beyond_cache(traits, "sm90", lacks=("latent", "alignment"), folds=True)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> Any:
        """The tile for one query per sequence; calls choose a tile by their lengths."""
        return cls.cache_tile(traits, CacheCall(page_size=64 if traits.paged else 0))

    def for_cache(self, call: CacheCall, target: str) -> Self:
        """This kernel with the tile for ``call`` instead of its default tile."""
        return dataclasses.replace(self, tile=self.cache_tile(self.traits, call))

    @property
    def has_values_out_of_bounds(self) -> bool:
        return self.traits.seqused_k or self.traits.paged or self.traits.varlen_k

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.CacheRows,
        mV: fakes.CacheRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        tables: fakes.Tables,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        partials: fakes.PartialResults,
        stream: cuda.CUstream,
    ) -> None:
        traits, tile = self.traits, self.tile
        key_bytes = 2 * (traits.head_dim + traits.head_dim_v)
        order = QueryTileOrder.make(seqlens, mQ, mK, key_bytes, tile.queries, tile.pack_heads, traits.causal)
        load, nheads_kv = cpasync.CopyBulkTensorTileG2SOp(), mK.shape[-2]
        # Bytes that several work tiles read should stay in L2; otherwise every byte is read once.
        again = (seqlens.max_seqlen_q > tile.queries) | (mQ.shape[-2] > nheads_kv * tile.pack_heads)
        policy = cutlass.select_(again, Int64(EVICT_NORMAL), Int64(EVICT_FIRST))
        inputs = ForwardInputs(
            self.rows(load, mQ, 64, traits.head_dim, tile.pack_heads, nheads_kv),
            self.cached(load, mK, traits.head_dim, policy),
            self.cached_values(load, mV, policy),
            None,
        )
        splits, work_items = None, order.total
        if cutlass.const_expr(traits.split == "fixed"):
            splits = cute.FastDivmodDivisorV2(partials.num_splits)  # type: ignore[union-attr]
            work_items *= partials.num_splits  # type: ignore[union-attr]
        grid = cutlass.min(tile.blocks_per_sm * schedule.multiprocessors, work_items)
        params = ForwardParams(
            seqlens, softmax_scale, score_args, order, schedule.counters, mQ.shape[-2],
            KeyRows.make(mK, tables), splits, partials,
        )  # fmt: skip
        self.kernel(params, inputs, ForwardOutputs(None, mO, mLSE)).launch(
            grid=[grid, 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tile.min_blocks_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    def cached(self, op: Any, cache: cute.Tensor, head_dim: int, policy: Int64) -> EntryTiles | PagedTiles:
        """The loads of a cache's key blocks."""
        tile_n = self.tile.tile_n
        if self.traits.paged:
            return PagedTiles.make(op, cache, tile_n, self.tile.page_rows, padded(head_dim), policy)
        tiles = self.rows(op, cache, tile_n, head_dim)
        return EntryTiles(dataclasses.replace(tiles, policy=policy))

    def cached_values(self, op: Any, cache: cute.Tensor, policy: Int64) -> EntryTiles | PagedTiles:
        """The loads of V."""
        return self.cached(op, cache, self.traits.head_dim_v, policy)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: ForwardParams, inputs: ForwardInputs, outputs: ForwardOutputs) -> None:
        self.run(params, inputs, outputs)

    @cute.jit
    def wait_for_inputs(self) -> None:
        """Wait for the previous kernel, which may write lengths, queries and new rows of the cache."""
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.traits.divides_keys):
            cute.arch.griddepcontrol_launch_dependents()

    @property
    def consumer(self) -> type[Consumer]:
        return FoldedConsumer if self.traits.split == "folded" else Consumer

    def loads(self, inputs: ForwardInputs, storage: ForwardStorage, params: ForwardParams) -> Any:
        return CacheLoads(inputs, storage, params)

    def results(self, params: ForwardParams, outputs: ForwardOutputs) -> CacheResults:
        return CacheResults(params, outputs)
