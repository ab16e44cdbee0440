"""The Hopper forward for attention with a cache, for head dims above 256, such as latent attention's 576 and 512.

The consumers of :mod:`cute_attn.kernels.head_dim_512_sm90.kernel`, which divide the columns of O, with the loads and
the key ranges of :mod:`cute_attn.kernels.kvcache_sm90.kernel`. Each warpgroup stores its columns of O from registers.

Where V is the first columns of K (the trait ``latent``), a key block is loaded once, and is free again after both of
its products.

Limits: those of :mod:`cute_attn.kernels.kvcache_sm90.kernel`, with head dims up to 576 for q and k and 512 for v.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Int64, cute

from cute_attn.kernels.base import beyond_cache
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardParams
from cute_attn.kernels.head_dim_512_sm90.kernel import ForwardLargeSm90
from cute_attn.kernels.head_dim_512_sm90.storage import LargeStorage
from cute_attn.kernels.kvcache_512_sm90.heuristics import cache_tile
from cute_attn.kernels.kvcache_512_sm90.roles import (
    CacheScoreLoop,
    CacheScoreResults,
    CacheValueConsumer,
    LatentInOrder,
    LatentLoads,
)
from cute_attn.kernels.kvcache_sm90.kernel import KvcacheSm90
from cute_attn.kernels.kvcache_sm90.roles import CacheResults
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.cached import EntryTiles, PagedTiles
from cute_attn.tiles import KvcacheLargeTile, is_latent_dim
from cute_attn.traits import MAX_HEAD_DIM, MAX_HEAD_DIM_V, Traits


@dataclass(frozen=True)
class KvcacheLargeSm90(KvcacheSm90, ForwardLargeSm90):
    """Kernel for attention with a cache and a head dim above 256, for (traits, tile); ``__call__`` launches it."""

    tile: KvcacheLargeTile  # type: ignore[assignment]
    cache_tile: ClassVar[Any] = staticmethod(cache_tile)

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.head_dim_v > MAX_HEAD_DIM_V:
            return f"head_dim_v is {traits.head_dim_v}; accepted: up to {MAX_HEAD_DIM_V}"
        if traits.latent and not is_latent_dim(traits.head_dim_v):
            return f"head_dim_v is {traits.head_dim_v} with latent; accepted: one of whole 128 columns, padded to 64"
        return beyond_cache(traits, "sm90", lacks=("alignment",), most=MAX_HEAD_DIM)

    def cached_values(self, op: Any, cache: cute.Tensor, policy: Int64) -> EntryTiles | PagedTiles:
        """The loads of V, with each warpgroup's columns in whole swizzle atoms."""
        if self.traits.paged:
            tile, columns = self.tile, self.tile.columns_of_v(self.traits)
            return PagedTiles.make(op, cache, tile.tile_n, tile.page_rows, columns, policy, tile.warpgroups)
        return EntryTiles(dataclasses.replace(self.values(op, cache), policy=policy))

    def loads(self, inputs: ForwardInputs, storage: LargeStorage, params: ForwardParams) -> Any:  # type: ignore[override]
        if self.traits.latent:
            return LatentLoads(inputs, storage, params)
        return super().loads(inputs, storage, params)

    @property
    def score_loop(self) -> type[CacheScoreLoop]:  # type: ignore[override]
        return LatentInOrder if self.tile.p_stages == 1 else CacheScoreLoop

    value_consumer = CacheValueConsumer

    def score_results(self, params: ForwardParams, outputs: ForwardOutputs) -> CacheScoreResults:
        return CacheScoreResults(self.results(params, outputs))

    def value_outputs(self, params: ForwardParams, outputs: ForwardOutputs) -> CacheResults:
        return self.results(params, outputs)
