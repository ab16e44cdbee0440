"""What the Hopper forward's functions hand to each other, and where that lies in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute, memory

import layouts
from cute_attn.device.block_range import BlockRange
from cute_attn.device.cluster import rank_in_cluster
from cute_attn.device.pipeline import WARPGROUP, Ring, Turns
from cute_attn.device.redo import Redo
from cute_attn.device.scheduler import TileOrder
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.seqlen import Seqlens
from cute_attn.device.staged import ROWS, StagedBias
from cute_attn.device.tma import Tma
from cute_attn.device.work import QueryBlock
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.arguments import CUTE_DTYPES
from cute_attn.tiles import padded


@dataclass(frozen=True)
class Shared:
    """Shared memory: operands with their stages last, and the rings that guard them."""

    s_q: cute.Tensor  # (64, head_dim, warpgroup)
    s_k: cute.Tensor
    s_v: cute.Tensor
    s_o: cute.Tensor  # (64, head_dim_v, warpgroup)
    s_p: Any  # (64, tile_n, warpgroup), or None
    ring_q: Ring
    ring_k: Ring
    ring_v: Ring
    redo: Redo
    bias: Any  # StagedBias, or None

    @cute.jit
    def pass_by(self, n: Int32, count: Int32) -> None:
        """By every warp that computes: ``count`` key blocks from filling ``n`` on are for the other block."""
        for i in cutlass.range(count, unroll=1):
            self.ring_k.pass_by(n + i)
            self.ring_v.pass_by(n + i)


@dataclass(frozen=True)
class Problem:
    """What is computed, and in which order."""

    seqlens: Seqlens
    softmax_scale: Float32
    score_args: tuple
    order: TileOrder
    nheads: Int32


@dataclass(frozen=True)
class Inputs:
    """Where operands come from."""

    q: Tma
    k: Tma
    v: Tma
    bias: Any  # Tma, or None


@dataclass(frozen=True)
class Outputs:
    """Where results go."""

    tma_o: Tma
    mO: cute.Tensor
    mLSE: cute.Tensor
    mSoftmax: cute.Tensor | None


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's operands as wgmma takes them, and its accumulators."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor  # P in 16 bits, laid out as the scores
    p_operand: cute.Tensor  # and as wgmma takes it, in registers or shared memory
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)
    factors: cute.Tensor  # (rows): what the output has to be multiplied with


@dataclass(frozen=True)
class Work:
    """What a warpgroup works on, and everything a step needs of it."""

    shared: Shared
    fragments: Fragments
    turns: Turns
    blocks: BlockRange
    state: ScoreState
    score_map: ScoreMap
    place: QueryBlock
    group: Int32
    lane: Int32
    softmax: OnlineSoftmax
    first_filling: Int32  # of the rings of K and V
    optimistic: Constexpr  # the maxima in use are right, until the sums say otherwise
    wary: Any  # Boolean: but not for this warpgroup; or None


@dataclass(frozen=True)
class Walk:
    """Key blocks that the blocks of a cluster walk over together, last one first, as the running one sees them.

    It computes some of them, and passes the others by, ``before`` these and ``after`` them.
    """

    begin: Int32
    end: Int32
    before: Int32
    after: Int32

    @staticmethod
    def of(kernel: Any, place: QueryBlock, own: BlockRange, state: ScoreState) -> "Walk":
        """What all the cluster's query blocks visit, of which ``own`` is the running one's."""
        tile, seqlen_q = kernel.tile, place.info.seqlen_q
        first_row = place.row0 - tile.tile_m * rank_in_cluster()
        end_row = cutlass.min(first_row + tile.tile_m * tile.cluster, seqlen_q)
        visited = BlockRange.of_queries(state.band, first_row, end_row, tile.tile_n)
        begin, end = visited.begin, cutlass.select_(first_row < seqlen_q, visited.end, visited.begin)
        some = (place.row0 < seqlen_q) & (own.begin < own.end)
        before = cutlass.select_(some, end - own.end, end - begin)
        return Walk(begin, end, before, cutlass.select_(some, own.begin - begin, Int32(0)))

    @property
    def count(self) -> Int32:
        """How many there are."""
        return self.end - self.begin


@dataclass(frozen=True)
class Crew:
    """A thread's place among those that compute, and what it works with."""

    group: Int32
    thread: Int32
    turns: Turns
    fragments: Fragments


def shared_memory(kernel: Any) -> Shared:
    """Barriers, Q, K and V by stages, O by warpgroups (over Q if they share), what is as large as the scores."""
    d, dv, tile = kernel.traits.head_dim, kernel.traits.head_dim_v, kernel.tile
    base = memory.SmemAllocator().allocate(tile.smem_bytes(kernel.traits), byte_alignment=1024)
    barriers = cute.recast_ptr(base, dtype=Int64)
    rings: list[Ring] = []
    start = 0
    for stages, rows, head_dim, cluster in (
        (1, tile.tile_m, d, 1),
        (tile.num_stages, tile.tile_n, d, tile.cluster),
        (tile.num_stages, tile.tile_n, dv, tile.cluster),
    ):
        rings.append(Ring(barriers + start, stages, 2 * rows * padded(head_dim), cluster))
        start += Ring.barrier_bytes(stages) // 8
    q_bytes, o_bytes = 2 * tile.tile_m * padded(d), 2 * tile.tile_m * padded(dv)
    k_start = tile.BARRIER_BYTES + (max(q_bytes, o_bytes) if tile.share_qo_smem else q_bytes)
    v_start = k_start + 2 * tile.tile_n * padded(d) * tile.num_stages
    o_start = v_start + 2 * tile.tile_n * padded(dv) * tile.num_stages
    bias_start = o_start + (0 if tile.share_qo_smem else o_bytes)
    p_start = bias_start + 2 * tile.tile_m * tile.tile_n * tile.bias_stages
    if tile.share_qo_smem:
        o_start = tile.BARRIER_BYTES
    return Shared(
        smem_tensor(kernel, base + tile.BARRIER_BYTES, 64, d, tile.warpgroups),
        smem_tensor(kernel, base + k_start, tile.tile_n, d, tile.num_stages),
        smem_tensor(kernel, base + v_start, tile.tile_n, dv, tile.num_stages),
        smem_tensor(kernel, base + o_start, 64, dv, tile.warpgroups),
        _tensor(base + p_start, kernel.p_layout(), kernel.dtype) if tile.p_in_smem else None,
        rings[0],
        rings[1],
        rings[2],
        Redo.make(
            base + tile.REDO_START, 32 + (128 + 32 * kernel.stages_bias) * tile.warpgroups, tile.cluster
        ),
        _staged_bias(kernel, base + bias_start, barriers + start) if kernel.stages_bias else None,
    )


def _staged_bias(kernel: Any, pointer: cute.Pointer, barriers: cute.Pointer) -> StagedBias:
    """Every warpgroup's tiles of the bias at ``pointer``."""
    tile = kernel.tile
    layout = kernel.bias_layout(1)
    rows, cols, _ = layout.outer.shape
    d_rows, d_cols, _ = layout.outer.stride
    size = ROWS * tile.tile_n
    outer = cute.make_layout(
        (rows, cols, tile.bias_stages, tile.warpgroups),
        stride=(d_rows, d_cols, size, size * tile.bias_stages),
    )
    tiles = cute.recast_ptr(pointer, layout.inner, dtype=CUTE_DTYPES[kernel.traits.bias])
    address = Int32(pointer.toint())
    return StagedBias(cute.make_tensor(tiles, outer), address, barriers, tile.bias_stages, tile.warpgroups)


def smem_tensor(kernel: Any, pointer: cute.Pointer, rows: int, head_dim: int, stages: int) -> cute.Tensor:
    """(rows, padded head_dim, stages) at ``pointer``."""
    return _tensor(pointer, kernel.smem_layout(rows, head_dim, stages), kernel.dtype)


def _tensor(pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: Any) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def all_rows(tensor: cute.Tensor) -> cute.Tensor:
    """(64, columns, warpgroup) as (rows of all warpgroups, columns)."""
    rows, cols, groups = tensor.layout.shape
    d_rows, d_cols, d_groups = tensor.layout.stride
    layout = cute.make_layout(((rows, groups), cols), stride=((d_rows, d_groups), d_cols))
    return cute.make_tensor(tensor.iterator, layout)


def make_fragments(kernel: Any, shared: Shared, group: Int32) -> Fragments:
    """Descriptors of the warpgroup's operands, and its registers."""
    tile, dv = kernel.tile, padded(kernel.traits.head_dim_v)
    qk, pv = kernel.mma_qk(), kernel.mma_pv()
    mine_qk, mine_pv = qk.get_slice(group * WARPGROUP), pv.get_slice(group * WARPGROUP)
    acc_o = cute.make_rmem_tensor(mine_pv.partition_shape_C((tile.tile_m, dv)), Float32)
    p = cute.make_rmem_tensor(mine_qk.partition_shape_C((tile.tile_m, tile.tile_n)), kernel.dtype)
    p_operand = layouts.as_operand_a(p)
    if tile.p_in_smem:
        p_operand = pv.make_fragment_A(mine_pv.partition_A(all_rows(shared.s_p)))
    acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(pv, tile.tile_m, dv))
    return Fragments(
        qk.make_fragment_A(mine_qk.partition_A(all_rows(shared.s_q))),
        qk.make_fragment_B(mine_qk.partition_B(shared.s_k)),
        pv.make_fragment_B(mine_pv.partition_B(layouts.transposed(shared.s_v))),
        p,
        p_operand,
        acc_o,
        acc_o_rows,
        cute.make_rmem_tensor(cute.make_layout(cute.size(acc_o_rows, mode=[0])), Float32),
    )
