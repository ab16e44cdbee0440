"""State of the Ampere backward for a launch, for a query head of a key block, and for a sub-tile of its queries."""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int32, Int64, cute

from cute_attn.device.gemm import below_1024
from cute_attn.device.math import optimization_barrier, rematerialize
from cute_attn.device.score_tile import Band
from cute_attn.device.seqlen import Seqlens, workspace_rows
from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels.backward_sm80.loads import BlockLoad
from cute_attn.kernels.backward_sm80.products import Operands
from cute_attn.kernels.backward_sm80.storage import BAND, BackwardSm80Storage, factor_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_tiles import HeadSplits, KeyTileOrder, KeyTiles, QueryHeads, key_tile_of


@dataclass(frozen=True)
class BackwardParams:
    """A launch: its tensors and lengths, and values derived from them."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mDO: cute.Tensor
    mLSElog2: cute.Tensor
    mMinusD: cute.Tensor
    mDQaccum: cute.Tensor
    mDK: cute.Tensor
    mDV: cute.Tensor
    seqlens: Seqlens
    softmax_scale: Float32
    scale_log2: Float32
    split_stride: Int64
    nheads: Int32
    head_splits: HeadSplits
    score_args: tuple
    order: KeyTileOrder
    skipped: Int32  # key blocks of each CTA that launches before this one computed
    scales: cute.Tensor | None  # scales of operands in terms; the fallback kernel has them too

    def key_tile(self, index: Int32) -> KeyTiles:
        """The key tiles of CTA ``index``."""
        return key_tile_of(self.order, self.seqlens, optimization_barrier(index))

    def query_heads(self, key_tile: KeyTiles) -> QueryHeads:
        """Query heads of a CTA's key tiles."""
        return self.head_splits.of(key_tile.head_dkv)

    def first_key(self, key_tile: KeyTiles, tile_n: int) -> Int32:
        """The first key of this launch's key block."""
        return (key_tile.first + self.skipped) * tile_n

    def dq_blocks(
        self, key_tile: KeyTiles, head: Int32, row0: Int32, columns: int, varlen: bool
    ) -> cute.Pointer:
        """A query head's rows of the fp32 accumulator of dQ of these key tiles' split, from padded row ``row0`` on."""
        mDQ = self.mDQaccum
        accumulator = mDQ[0, None, None] if varlen else mDQ[0, None, None, None]
        rows = workspace_rows(accumulator, key_tile.batch, head, row0, columns, varlen)
        return rows.iterator + Int64(key_tile.first) * self.split_stride


@dataclass(frozen=True)
class Gradients:
    """dK and dV of a key block, accumulated in fp32 registers."""

    dk: cute.Tensor
    dv: cute.Tensor


@dataclass(frozen=True)
class ReadAhead:
    """Registers loaded before S of one query sub-tile: its dropout mask and the epilogues' inputs."""

    dropped: tuple
    loaded: tuple


class HeadContext:
    """Base of what steps of one query head of a CTA's key block share."""

    smem: Any  # with ``scales``
    thread: Int32

    def factor(self, name: str) -> Float32:
        """A scale factor for operands in terms; see ``storage.FACTORS``."""
        return factor_of(self.smem.scales, name)

    def thread_again(self) -> Int32:
        """The thread's index, recomputed so that values derived from it need not stay in registers between steps."""
        return below_1024(rematerialize(self.thread))


@dataclass(frozen=True)
class MainloopContext(HeadContext):
    """One query head of a CTA's key block: the inputs and outputs of a mainloop step."""

    smem: BackwardSm80Storage
    operands: Operands
    gradients: Gradients
    load_q: BlockLoad
    load_do: BlockLoad
    blocks: BlockRange
    state: ScoreState
    dq_blocks: cute.Pointer  # fp32 accumulator of dQ, one query block after the other
    key0: Int32
    scale_log2: Float32
    thread: Int32

    def band(self) -> Band:
        """The mask's band, reloaded from where :meth:`BackwardSm80Storage.spill` stored it."""
        return replace(self.state.band, **{name: self.smem.reload_int(name) for name in BAND})

    def full_blocks(self) -> tuple[Int32, Int32]:
        """The query blocks [begin, end) that need no mask, reloaded from shared memory."""
        return self.smem.reload_int("full_begin"), self.smem.reload_int("full_end")
