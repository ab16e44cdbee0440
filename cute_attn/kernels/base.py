"""What attention kernels have in common, and reasons to decline traits that several ``supports`` have."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import cuda.bindings.driver as cuda
from cutlass import Float32, cute

from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.kernels import fakes
from cute_attn.tiles import Sizes
from cute_attn.tiles.table import Table
from cute_attn.traits import LARGE_HEAD_DIM, Traits, head_dims_text

HALF = ("fp16", "bf16")


class AttentionKernel:
    """Base of the attention kernels, which are frozen dataclasses of traits and a tile.

    Attributes:
        table, keys: default tiles, and the function of traits and target by which their rows are matched.
    """

    traits: Traits
    tile: Any

    table: ClassVar[Table]
    keys: ClassVar[Callable[..., tuple]]

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> Any:
        """The tile that is used if none is named."""
        return cls.table.first(traits, target, *cls.keys(traits, target))

    def for_lengths(
        self,
        seqlen_q: int,
        seqlen_k: int,
        group: int,
        target: str = "",
        pairs: int | None = None,
        window: int = 0,
    ) -> Self:
        """This kernel with its default tile replaced by the tile for sequences of at most these lengths.

        target: the GPU that the kernel is built for, by default its generation. Others: see :class:`Sizes`.
        """
        tile = self.tile_for(target or self.traits.arch, Sizes(seqlen_q, seqlen_k, group, pairs, window))
        return dataclasses.replace(self, tile=tile)  # type: ignore[type-var]

    def tile_for(self, target: str, sizes: Sizes) -> Any:
        """The tile that :meth:`for_lengths` chooses; by default the kernel's."""
        return self.tile

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The chain of score epilogues for the traits."""
        return EpilogueChain.of(self.traits, self.tile if self.can_visit_lists else None)

    @property
    def can_visit_lists(self) -> bool:
        """True if the kernel can skip blocks that a block list omits."""
        return True

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The epilogues' arguments for one launch."""
        return self.epilogues.host_args(inputs)

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V, the results and gradients."""
        return fakes.CUTE_DTYPES[self.traits.dtype]


class DualLaunch:
    """Base that precedes a forward class in a jvp kernel's bases. ``launch_duals`` launches: values, then tangents."""

    launch_duals: Any

    def tile_for(self, target: str, sizes: Sizes) -> Any:
        """This kernel's tile, which serves all lengths."""
        return self.tile  # type: ignore[attr-defined]

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mQdot: fakes.HeadRows,
        mKdot: fakes.HeadRows,
        mVdot: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        mOdot: fakes.HeadRows,
        mLSEdot: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. A tangent has its tensor's shape and dtype, and any strides."""
        tensors, results = ((mQ, mK, mV), (mQdot, mKdot, mVdot)), ((mO, mLSE), (mOdot, mLSEdot))
        self.launch_duals(tensors, results, seqlens, softmax_scale, schedule, score_args, stream)


# ---- limits ----


def beyond(
    traits: Traits,
    computes: str = "",
    *,
    dtypes: tuple[str, ...] = HALF,
    most: int = LARGE_HEAD_DIM,
    multiple: int = 8,
) -> str | None:
    """Why a kernel with these limits cannot serve ``traits``, or None.

    Args:
        computes: the kernel's operation and generation, such as ``"forward-sm80"``; "" if the registry knows.
        dtypes: supported dtypes of q, k, v and o.
        most: the largest supported head dim.
        multiple: head dims are multiples of this, or of the traits' ``alignment`` if given.
    """
    if computes and f"{traits.op}-{traits.arch}" != computes:
        return f"it computes {computes}, not {traits.op}-{traits.arch}"
    multiple = traits.alignment or multiple
    if traits.dtype not in dtypes:
        return f"dtype is {traits.dtype}; accepted: {', '.join(dtypes)}"
    for name in ("head_dim", "head_dim_v"):
        dim = getattr(traits, name)
        if dim > most or dim % multiple:
            return f"{name} is {dim}; accepted: {head_dims_text(multiple, most)}"
    return None


def more_than(traits: Traits, ops: Sequence[str], used: Sequence[str], words: str) -> str | None:
    """Why a kernel that computes ``ops`` with the features ``used`` alone cannot serve ``traits``, or None.

    words: what it uses, for the message.
    """
    if traits.op not in ops:
        return f"it computes {' and '.join(ops)}, not {traits.op}"
    own = {name: getattr(traits, name) for name in ("arch", "dtype", "head_dim", *used)}
    plain = Traits(traits.op, **own)
    return None if traits == plain else f"it uses {words}; accepted: {plain}"


def beyond_cache(
    traits: Traits,
    arch: str,
    lacks: tuple[str, ...] = (),
    most: int = LARGE_HEAD_DIM,
    dtypes: tuple[str, ...] = HALF,
    folds: bool = False,
) -> str | None:
    """Why a kvcache kernel of ``arch`` cannot serve ``traits``, or None.

    Args:
        lacks: features that the kernel does not support.
        most: the largest supported head dim.
        dtypes: supported dtypes of q, k, v and o.
        folds: True if the kernel supports the split "folded".
    """
    for name in ("dropout", "seqused_q", *lacks):
        if getattr(traits, name):
            return f"{name} is {getattr(traits, name)}; accepted: none"
    if traits.split == "fixed" and traits.sinks:
        return f"sinks is {traits.sinks} with split fixed; accepted: none, since combine adds them"
    if traits.split == "folded" and not folds:
        return f"split is {traits.split}; accepted: the others"
    if traits.top_left:
        return f"mask is {traits.mask}; accepted: bottom right ones"
    return beyond(traits, f"kvcache-{arch}", dtypes=dtypes, most=most, multiple=traits.row_alignment)


Loops = tuple[tuple[int, int], ...]
PRODUCTS_OF = {1: 1, 2: 3}
"""Numbers of an operand, which are a value and perhaps its tangent -> matrix products for each of a forward's."""


@dataclass(frozen=True)
class StepContent:
    """Instructions of one warp in a steady step: one query block times one key block that needs no mask.

    Attributes:
        mma: matrix instructions: mma.sync of 16 x 8 x 16 (16 x 8 x 8 for tf32), or wgmma of 64 x n x 16, issued by four
            warps together.
        exp2: exponentials (MUFU.EX2) of the softmax and of softcap, without those of users' epilogues.
        elements: scores that a thread holds.
        warps: warps of a CTA that run such steps.
        loops: products that are loops within the step, in order: (matrix instructions per iteration, iterations). A
            product with one iteration is not a loop.
        async_bytes: bytes that TMA and bulk reductions write to or read from shared memory in a step.
        added_bytes: bytes that bulk reductions add to global memory in a step.
        other_wgmma: (count, n) of wgmma of 64 x n x 16, with both operands in shared memory, that the CTA's other
            warpgroups issue in a step.
        ctas: CTAs of a cluster that compute the same scores.
    """

    mma: int
    exp2: int
    elements: int
    warps: int
    loops: Loops = ()
    async_bytes: int = 0
    added_bytes: int = 0
    other_wgmma: tuple[int, int] = (0, 0)
    ctas: int = 1


def mma_sync_count(m: int, n: int, k: int, warps: int, depth: int = 16) -> int:
    """Number of mma.sync, 16 x 8 x depth, that each of ``warps`` warps issues for an (m, k) by (k, n) product."""
    return m * n * k // (16 * 8 * depth * warps)


def wgmma_count(m: int, n: int, k: int, warpgroups: int, warpgroups_n: int = 1) -> int:
    """Number of wgmma that each warpgroup issues for an (m, k) by (k, n) product; ``warpgroups_n`` of them divide n."""
    widest = 256
    rows = 64 * (warpgroups // warpgroups_n)
    return m // rows * (k // 16) * -(-n // (warpgroups_n * widest))


def product_loop(mma: int, steps: int, at_once: int) -> Loops:
    """The ``loops`` entry of a product: ``mma`` instructions over ``steps`` along K, ``at_once`` per iteration."""
    iterations = steps // at_once
    return ((mma // iterations, iterations),) if iterations > 1 else ()
