"""Tensors in global memory with their TMA descriptors."""

import enum
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync

from cute_attn.device.pipeline import Accessed, Pipeline
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile


def descriptor_address(atom: cute.CopyAtom) -> Int64:
    """Address of a TMA atom's descriptor, for :func:`start_box`."""
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value)
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return Int64(cute_nvgpu.get_tma_desc_addr(pointer, executable).toint())


def start_box(
    target: Int32, descriptor: Int64, where: tuple[Any, ...], barrier: Int32, policy: Int64
) -> None:
    """By one thread: start loading the box at coordinates ``where`` to the address ``target`` of shared memory.

    Unlike this function, ``cute.copy`` has to be called by a whole warp for each box.
    """
    coordinates = ", ".join(f"{{$r{i + 4}}}" for i in range(len(where)))
    cute.arch.inline_ptx(
        f"cp.async.bulk.tensor.{len(where)}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[{{$r0}}], [{{$r1}}, {{{coordinates}}}], [{{$r2}}], {{$r3}};",
        read_only_args=[target, descriptor, barrier, policy, *where],
    )


@dataclass(frozen=True)
class TmaTiles:
    """A tensor that TMA loads or stores by tiles of rows: (rows, head_dim, heads[, batch]).

    With ``heads`` > 1 (packed GQA), that many neighbouring heads of a kv head alternate as a tile's rows: ((heads of a
    kv head, rows), head_dim, kv heads[, batch]). For heads beyond the last one, TMA loads zeros and stores nothing.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    shape: Constexpr  # of a tile: (rows, columns)
    varlen: Constexpr
    heads: Constexpr = 1
    policy: Int64 | None = None  # of L2, for loads

    @staticmethod
    def make(
        op: Any,
        tensor: cute.Tensor,
        smem_layout: Any,
        shape: tuple[int, int],
        varlen: bool,
        heads: int = 1,
        nheads_kv: Int32 | int = 1,
    ) -> "TmaTiles":
        """Make the tiles on the host; tensor: (batch, rows, heads, head_dim), or varlen (rows, heads, head_dim).

        Args:
            op: the TMA operation, a load or a store.
            smem_layout: layout of one tile.
            shape: (rows, columns) of a tile.
            heads: number of heads that alternate as a tile's rows.
            nheads_kv: number of kv heads, for several ``heads``: the tensor's heads are divided among these.
        """
        rows, cols = shape
        layout = cute.select(tensor.layout, mode=[0, 2, 1] if varlen else [1, 3, 2, 0])
        extents: Any = rows
        if heads > 1:
            (length, *sizes), (row, *steps) = layout.shape, layout.stride
            group, of_head = sizes[1] // cutlass.max(nheads_kv, 1), steps[1]
            of_group = cute.assume(Int64(of_head) * group, divby=8)
            layout = cute.make_layout(
                ((group, length), sizes[0], nheads_kv, *sizes[2:]),
                stride=((of_head, row), steps[0], of_group, *steps[2:]),
            )
            extents = (heads, rows // heads)
        view = cute.make_tensor(tensor.iterator, layout)
        atom, coords = cpasync.make_tiled_tma_atom(op, view, smem_layout, (extents, cols))
        return TmaTiles(atom, coords, shape, varlen, heads)

    @cute.jit
    def sequence(self, first_row: Int32, head: Int32, batch: Int32, column: Int32 | int = 0) -> cute.Tensor:
        """All tiles of one head from ``first_row`` on, in tile column ``column``: (rows, columns, n)."""
        where = () if cutlass.const_expr(self.varlen) else (batch,)
        plane = cute.domain_offset((first_row, 0), self.tensor[(None, None, head, *where)])
        return cute.local_tile(plane, self.shape, (None, column))

    @cute.jit
    def sequence_of_tile(self, first_row: Int32, tile: QueryTile, column: Constexpr = 0) -> cute.Tensor:
        """Like :meth:`sequence`, for a work tile's head or its ``heads`` heads."""
        if cutlass.const_expr(self.heads == 1):
            return self.sequence(first_row, tile.head, tile.batch, column)
        rows, cols = self.shape
        where = () if cutlass.const_expr(self.varlen) else (tile.batch,)
        heads = self.tensor[(None, None, tile.head_kv, *where)]
        plane = cute.domain_offset(((tile.head_in_group, first_row), 0), heads)
        return cute.local_tile(plane, ((self.heads, rows // self.heads), cols), ((0, None), column))

    @cute.jit
    def load(self, tiles: cute.Tensor, n: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32) -> None:
        """Start loading tile n of ``tiles`` into its stage of ``target`` (rows, cols, stage)."""
        self.load_part(tiles, n, target[None, None, pipeline.stage(use)], pipeline, use)

    @cute.jit
    def load_part(
        self, tiles: cute.Tensor, n: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading tile n of ``tiles`` into ``target`` (rows, cols), one of several loads of a use."""
        t_s, t_g = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        policy = {} if cutlass.const_expr(self.policy is None) else {"cache_policy": self.policy}
        cute.copy(self.atom, t_g[None, n], t_s, tma_bar_ptr=pipeline.full_barrier(use), **policy)

    @cute.jit
    def store(self, source: cute.Tensor, tiles: cute.Tensor, n: Int32) -> None:
        """Start storing ``source`` (rows, cols) to tile n of ``tiles``, and commit the store as a bulk group."""
        t_s, t_g = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        cute.copy(self.atom, t_s, t_g[None, n])
        cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class TmaVectors:
    """fp32 workspace rows that TMA loads by blocks: (rows, heads[, batch]).

    A bulk copy without a descriptor would do, but compute-sanitizer's racecheck treats it as writes by a thread that no
    mbarrier orders.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tile: Constexpr  # rows of a block
    varlen: Constexpr

    @staticmethod
    def make(rows: cute.Tensor, tile: int, varlen: bool) -> "TmaVectors":
        """Make the vectors on the host; rows: (batch, heads, rows), or varlen (heads, rows)."""
        view = cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0] if varlen else [2, 1, 0]))
        op = cpasync.CopyBulkTensorTileG2SOp()
        atom, coords = cpasync.make_tiled_tma_atom(op, view, cute.make_layout(tile), (tile,))
        return TmaVectors(atom, coords, tile, varlen)

    @cute.jit
    def sequence(self, head: Int32, batch: Int32) -> cute.Tensor:
        """All blocks of one head: (tile, n)."""
        where = () if cutlass.const_expr(self.varlen) else (batch,)
        return cute.local_tile(self.tensor[(None, head, *where)], (self.tile,), (None,))

    @cute.jit
    def load(
        self, blocks: cute.Tensor, n: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading block n into its stage of ``target`` (tile, stage)."""
        t_s, t_g = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), target[None, pipeline.stage(use)], blocks
        )
        cute.copy(self.atom, t_g[None, n], t_s, tma_bar_ptr=pipeline.full_barrier(use))


class LastUse(enum.Enum):
    """The last use that a work tile makes of Q's buffer."""

    COPY = enum.auto()
    """The copy of Q into registers, with ``q_in_regs``."""
    PRODUCTS = enum.auto()
    """The last S = Q K^T."""
    STORE = enum.auto()
    """The store of O, which reuses the memory with ``share_qo_smem``."""


@dataclass(frozen=True)
class QueryBuffer:
    """One stage for Q, with its pipeline; use n is the n-th work tile that uses it."""

    tensor: cute.Tensor  # (64, head_dim, warpgroups along the rows)
    pipeline: Pipeline
    tile: Constexpr  # ForwardSm90Tile

    @property
    def last_use(self) -> LastUse:
        """The use after which the consumers release the buffer."""
        if self.tile.share_qo_smem:
            return LastUse.STORE
        return LastUse.COPY if self.tile.q_in_regs else LastUse.PRODUCTS

    @property
    def used_without_keys(self) -> bool:
        """With ``share_qo_smem``, even work tiles that see no key use the buffer: they store O's zeros from it."""
        return self.tile.share_qo_smem

    @cute.jit
    def used(self, blocks: BlockRange) -> Boolean | bool:
        """If False, the work tile that visits ``blocks`` neither loads nor releases the buffer."""
        return True if self.used_without_keys else blocks.begin < blocks.end

    @cute.jit
    def load(self, q: TmaTiles, tile: QueryTile, n: Int32) -> None:
        """By the producer warp: load Q of one work tile, 64 rows at a time."""
        tiles = q.sequence_of_tile(tile.info.offset_q + tile.row0, tile)
        self.pipeline.producer_acquire(n)
        for group in cutlass.range_constexpr(cute.size(self.tensor, mode=[2])):
            q.load_part(tiles, group, self.tensor[None, None, group], self.pipeline, n)

    @cute.jit
    def release_after(self, use: Constexpr, n: Int32) -> None:
        """By each consumer warp after ``use``, a :class:`LastUse`: release the buffer if it is :attr:`last_use`."""
        if cutlass.const_expr(use is self.last_use):
            products: Constexpr = use is LastUse.PRODUCTS
            self.pipeline.consumer_release(n, Accessed.BY_WGMMA if products else Accessed.BY_THREADS)
