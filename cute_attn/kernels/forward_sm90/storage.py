"""Parameters, shared storage and register fragments of the Hopper forward."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute, memory

import layouts
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.pipeline import WARPGROUP, PingPong, Pipeline
from cute_attn.device.seqlen import Seqlens
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.rows.tma import QueryBuffer
from cute_attn.rows.tma_bias import ROWS, TmaBias
from cute_attn.tiles import padded
from cute_attn.work.block_range import Partials
from cute_attn.work.broadcast import STAGES, WorkBroadcast
from cute_attn.work.query_tiles import QueryTileOrder
from cute_attn.work.replay import Replay


@dataclass(frozen=True)
class ForwardStorage:
    """Shared storage: operands (stages are the last mode), their pipelines, the work broadcast and the replay list."""

    q: QueryBuffer
    s_k: cute.Tensor
    s_v: cute.Tensor
    s_o: cute.Tensor  # (64, head_dim_v, warpgroup)
    pipeline_k: Pipeline
    pipeline_v: Pipeline
    work: WorkBroadcast
    replay: Replay
    bias: Any  # TmaBias, or None

    @cute.jit
    def init(self, warpgroups: Constexpr, lane: Int32) -> None:
        """Initialize the barriers and the replay list; called by one warp before the CTA synchronizes."""
        with cute.arch.elect_one():
            for pipeline in (self.q.pipeline, self.pipeline_k, self.pipeline_v):
                pipeline.init(4 * warpgroups)
            bias_warps = 1 if self.bias is not None else 0
            self.work.pipeline.init((4 + bias_warps) * warpgroups)
            if cutlass.const_expr(self.bias is not None):
                self.bias.init()
        cute.arch.mbarrier_init_fence()
        self.replay.clear(lane)


@dataclass(frozen=True)
class ForwardParams:
    """Lengths, scale, epilogue arguments and the order of work tiles. The last three fields are set only with a cache.

    Attributes:
        counters: see ``ForwardSchedule``.
        splits: divides an index into that of a work tile and that of a split; None unless the split is "fixed".
        partials: partial results, or None without a split.
    """

    seqlens: Seqlens
    softmax_scale: Float32
    score_args: tuple
    order: QueryTileOrder
    counters: cute.Tensor
    nheads: Int32
    rows: KeyRows | None = None
    splits: cute.FastDivmodDivisorV2 | None = None
    partials: Partials | None = None


@dataclass(frozen=True)
class ForwardInputs:
    """Operands in global memory: ``TmaTiles`` or, for k and v of a cache, the classes of ``cute_attn.rows.cached``."""

    q: Any
    k: Any
    v: Any
    bias: Any  # TmaTiles, or None


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's wgmma operands and accumulators."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor  # P in 16 bits, laid out as the scores
    p_operand: cute.Tensor  # the same registers as wgmma's A operand
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)
    factors: cute.Tensor  # (rows): rescaling factors of O from the last step


@dataclass(frozen=True)
class PipelineState:
    """Numbers of uses so far: ``queries`` of Q's pipeline, ``keys`` of K's and V's pipelines."""

    queries: Int32
    keys: Int32


@dataclass(frozen=True)
class ConsumerThread:
    """A consumer thread: its warpgroup, its index among all consumers, its ping-pong barrier, its fragments."""

    group: Int32
    index: Int32
    ping_pong: PingPong
    fragments: Fragments

    @property
    def lane(self) -> Int32:
        """The thread's index in its warpgroup."""
        return self.index % WARPGROUP

    @staticmethod
    def make(kernel: Any, storage: ForwardStorage, index: Int32) -> "ConsumerThread":
        """The running thread, whose index among all consumers is ``index``."""
        group, groups = cute.arch.make_warp_uniform(index // WARPGROUP), kernel.tile.warpgroups
        ping_pong = PingPong(group, groups, groups > 1)
        return ConsumerThread(group, index, ping_pong, make_fragments(kernel, storage, group))


def make_storage(kernel: Any) -> ForwardStorage:
    """Allocate barriers, stages of Q, K and V, each warpgroup's O (in Q's memory with ``share_qo_smem``) and bias."""
    d, dv, tile = kernel.traits.head_dim, kernel.traits.head_dim_v, kernel.tile
    numbers = tile.NUMBERS
    base = memory.SmemAllocator().allocate(tile.smem_bytes(kernel.traits), byte_alignment=1024)
    barriers = cute.recast_ptr(base, dtype=Int64)
    pipelines: list[Pipeline] = []
    start = 0
    for stages, rows, head_dim in (
        (1, tile.tile_m, d),
        (tile.num_stages, tile.tile_n, d),
        (tile.num_stages, tile.tile_n, dv),
    ):
        pipelines.append(Pipeline(barriers + start, stages, numbers * 2 * rows * padded(head_dim)))
        start += Pipeline.barrier_bytes(stages) // 8
    area = {name: base + begin for name, (begin, _) in tile.smem_areas(kernel.traits).items()}
    work = WorkBroadcast.make(barriers + start, base + tile.BROADCAST_START, kernel.traits.divides_keys)
    start += Pipeline.barrier_bytes(STAGES) // 8
    threads = 32 + (128 + 32 * kernel.loads_bias_by_tma) * tile.warpgroups
    return ForwardStorage(
        QueryBuffer(smem_tensor(kernel, area["q"], 64, d, numbers * tile.warpgroups), pipelines[0], tile),
        smem_tensor(kernel, area["k"], tile.tile_n, d, numbers * tile.num_stages),
        smem_tensor(kernel, area["v"], tile.tile_n, dv, numbers * tile.num_stages),
        smem_tensor(kernel, area["o"], 64, dv, tile.warpgroups),
        pipelines[1],
        pipelines[2],
        work,
        Replay.make(base + tile.REPLAY_START, threads),
        _tma_bias(kernel, area["bias"], barriers + start) if kernel.loads_bias_by_tma else None,
    )


def _tma_bias(kernel: Any, pointer: cute.Pointer, barriers: cute.Pointer) -> TmaBias:
    """Every warpgroup's bias tiles at ``pointer``."""
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
    return TmaBias(cute.make_tensor(tiles, outer), address, barriers, tile.bias_stages, tile.warpgroups)


def smem_tensor(kernel: Any, pointer: cute.Pointer, rows: int, head_dim: int, stages: int) -> cute.Tensor:
    """A shared-memory tensor (rows, padded head_dim, stages) at ``pointer``."""
    return tensor_at(pointer, kernel.smem_layout(rows, head_dim, stages), kernel.dtype)


def tensor_at(pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: Any) -> cute.Tensor:
    """A shared-memory tensor with ``layout`` at ``pointer``."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def all_rows(tensor: cute.Tensor) -> cute.Tensor:
    """View of a tensor (64, columns, warpgroup) as (rows of all warpgroups, columns)."""
    rows, cols, groups = tensor.layout.shape
    d_rows, d_cols, d_groups = tensor.layout.stride
    layout = cute.make_layout(((rows, groups), cols), stride=((d_rows, d_groups), d_cols))
    return cute.make_tensor(tensor.iterator, layout)


def make_fragments(kernel: Any, storage: ForwardStorage, group: Int32) -> Fragments:
    """Make the descriptors of a warpgroup's operands, and its registers."""
    first, columns = group * WARPGROUP, padded(kernel.traits.head_dim_v)
    return fragments_of(kernel, storage, first, first, all_rows(storage.q.tensor), columns)


def fragments_of(
    kernel: Any,
    storage: ForwardStorage,
    thread_qk: Int32 | int,
    thread_pv: Int32 | int,
    s_q: cute.Tensor,
    columns: int,
    s_p: cute.Tensor | None = None,
    s_v: cute.Tensor | None = None,
) -> Fragments:
    """The fragments of a warpgroup whose first threads of the two MMAs are ``thread_qk`` and ``thread_pv``.

    Args:
        s_q: Q of the rows of S.
        columns: columns of O, of all warpgroups that the MMA has.
        s_p: P in shared memory, or None if P is an operand in registers.
        s_v: V of these columns, (columns, keys, stage); None for all of V.
    """
    tile, qk, pv = kernel.tile, kernel.mma_qk(), kernel.mma_pv()
    mine_qk, mine_pv = qk.get_slice(thread_qk), pv.get_slice(thread_pv)
    acc_o = cute.make_rmem_tensor(mine_pv.partition_shape_C((tile.tile_m, columns)), Float32)
    p = cute.make_rmem_tensor(mine_qk.partition_shape_C((tile.tile_m, tile.tile_n)), kernel.dtype)
    acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(pv, tile.tile_m, columns))
    return Fragments(
        qk.make_fragment_A(mine_qk.partition_A(s_q)),
        qk.make_fragment_B(mine_qk.partition_B(storage.s_k)),
        pv.make_fragment_B(mine_pv.partition_B(layouts.transposed(storage.s_v) if s_v is None else s_v)),
        p,
        layouts.as_operand_a(p) if s_p is None else pv.make_fragment_A(mine_pv.partition_A(s_p)),
        acc_o,
        acc_o_rows,
        cute.make_rmem_tensor(cute.make_layout(cute.size(acc_o_rows, mode=[0])), Float32),
    )
