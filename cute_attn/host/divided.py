"""Attention of few queries with many keys, on Hopper: by the kernels for a cache, which divide keys among CTAs.

Keys and values are as a cache with an entry for each sequence, or packed sequences. The host takes these kernels where
the forward would have far fewer work tiles than there are multiprocessors.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host.kvcache_launcher import Plan, make_plan
from cute_attn.host.launch import Steps
from cute_attn.host.params import KERNEL_DTYPES, AttentionParams
from cute_attn.kernels.limits import LARGE_HEAD_DIM

FEW_TILES = 0.5
"""Work tiles for each multiprocessor up to which keys are divided."""
LEAST_KEYS = 4096
"""Keys of the longest sequence from which on that pays for a second launch."""


@dataclass(frozen=True, slots=True)
class AsCache:
    """A call of attention with the fields of ``CacheParams`` that a plan reads."""

    call: AttentionParams

    page_table: ClassVar[None] = None
    cache_batch_idx: ClassVar[None] = None
    cache_leftpad: ClassVar[None] = None
    tree_mask: ClassVar[None] = None
    num_splits: ClassVar[int] = 0
    split_keys: ClassVar[int] = 0
    added: ClassVar[int] = 0
    kernel: ClassVar[str] = "sm90"
    tile: ClassVar[str] = ""

    def __getattr__(self, name: str) -> Any:
        """Of the call: q, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, mask, softcap, softmax_scale, batch, ..."""
        return getattr(self.call, name)

    @property
    def k_cache(self) -> Tensor:
        """The keys."""
        return self.call.k

    @property
    def v_cache(self) -> Tensor:
        """The values."""
        return self.call.v

    @property
    def lengths(self) -> Tensor | None:
        """int32 (batch,), or None for whole sequences."""
        return self.call.seqused_k

    @property
    def capacity(self) -> int:
        """Keys of the longest sequence."""
        return self.call.longest[1]

    def output_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of out and lse."""
        return self.call.output_shapes()[:2]

    def score_inputs(self) -> ScoreInputs:
        """The epilogues' inputs."""
        return self.call.score_inputs()


def is_wanted(params: AttentionParams, kernel: Any, query_blocks: int, multiprocessors: int) -> bool:
    """Whether keys are to be divided: few work tiles, many keys, and nothing that kernels for a cache lack.

    Args:
        kernel: the forward kernel that would serve the call.
        query_blocks: its work tiles.
    """
    if kernel.traits.arch != "sm90" or params.kernel or params.tile or params.q.dtype not in KERNEL_DTYPES:
        return False
    if not kernel.traits.aligned or kernel.traits.top_left or params.return_softmax:
        return False
    if max(kernel.traits.head_dim, kernel.traits.head_dim_v) > LARGE_HEAD_DIM:
        return False
    if params.bias is not None or params.dropout or params.epilogues or params.seqused_q is not None:
        return False
    return query_blocks <= FEW_TILES * multiprocessors and params.longest[1] >= LEAST_KEYS


def plan_for_attention(params: AttentionParams) -> Plan:
    """The launches of a call for which :func:`is_wanted`."""
    return make_plan(AsCache(params))  # type: ignore[arg-type]


def launch(
    plan: Plan, params: AttentionParams, out: Tensor, lse: Tensor, steps: Steps
) -> tuple[Tensor, Tensor]:
    """Into out and lse; params: with the tensors' strides as kernels assume them."""
    return plan.launch(AsCache(params), params.q, out, lse, steps)  # type: ignore[arg-type]
