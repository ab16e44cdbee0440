"""Keys or values of a paged cache of any page size, copied row by row by several warps with cp.async.

To keep up with the memory, the warps together start a copy of 512 bytes every 27 cycles, so that each copy has to take
few instructions: a lane finds a row and computes its address for all the lanes that copy the row, and where a lane's 16
bytes go differs between rows and between stages by constants.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync

import layouts
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.math import optimization_barrier
from cute_attn.device.seqlen import SeqlenInfo

WARP = 32
CHUNK = 8
"""Rows after which a swizzle repeats."""


@dataclass(frozen=True)
class OwnRows:
    """The rows of a key block that one of several warps copies: every ``warps``-th chunk of 8.

    The warp copies some rows of a chunk by one instruction, ``lanes`` lanes each. Lane i finds one of the rows to which
    it copies, in register k one of chunk 32 k / 8 and the following ones, so that the others get it from a lane of
    their own row, whose index differs from theirs in bits that are constants.
    """

    tile_n: Constexpr
    warps: Constexpr
    lanes: Constexpr  # of a row: a power of two
    warp: Int32

    @staticmethod
    def make(tile_n: int, warps: int, cols: int, warp: Int32) -> "OwnRows":
        """cols: the most of K and V; a lane copies 8 of them, and some lanes may be idle."""
        return OwnRows(tile_n, warps, next(n for n in (4, 8, 16, 32) if 8 * n >= cols), warp)

    @property
    def at_once(self) -> int:
        """Rows that the warp copies by one instruction."""
        return WARP // self.lanes

    @property
    def steps(self) -> int:
        """Instructions for a chunk."""
        return CHUNK // self.at_once

    @property
    def chunks(self) -> int:
        """Chunks of the first warps; the last ones may have one less."""
        return -(-self.tile_n // (CHUNK * self.warps))

    @property
    def registers(self) -> int:
        """Registers of a lane."""
        return -(-CHUNK * self.chunks // WARP)

    def row(self, lane: Int32, k: int) -> Int32:
        """The row of the block that a lane finds in register k; beyond its last one where the warp has fewer."""
        within = lane % self.lanes
        chunk = (k * WARP // CHUNK + within // self.steps) * self.warps + self.warp
        return chunk * CHUNK + within % self.steps * self.at_once + lane // self.lanes

    def of_row(self, value: Any, n: int) -> Any:
        """What was found of the row that a lane copies by the n-th instruction for the rows of a register."""
        return cute.arch.shuffle_sync(value, n, mask_and_clamp=self.row_bits << 8 | WARP - 1)

    @property
    def row_bits(self) -> int:
        """Bits of a lane's index that say which row of an instruction it copies: those of the lane that found it."""
        return WARP - self.lanes

    @cute.jit
    def find(self, rows: KeyRows, batch: Int32, block: Int32, info: SeqlenInfo) -> cute.Tensor:
        """By the whole warp: the pages of its rows, -1 for rows that the sequence does not have."""
        pages = cute.make_rmem_tensor(cute.make_layout(self.registers), Int32)
        end = cutlass.min(info.seqlen_k, rows.capacity)
        for k in cutlass.range_constexpr(self.registers):
            own = self.row(cute.arch.lane_idx(), k)
            row = block * self.tile_n + own
            exists = (own < self.tile_n) & (row >= 0) & (row < end)
            if cutlass.const_expr(info.first_key is not None):
                exists = exists & (row >= info.first_key)
            pages[k] = Int32(-1)
            if exists:
                pages[k] = rows.place(batch, row)[0]
        return pages


@dataclass(frozen=True)
class RowCopies:
    """A paged cache, (pages, page_size, nheads_kv, dim) of any page size.

    A lane copies 16 bytes of a row; rows that the sequence does not have become zeros.
    """

    cache: cute.Tensor
    tile_n: Constexpr
    cols: Constexpr  # padded dim
    dim: Constexpr

    @property
    def tma(self) -> None:
        """No TMA descriptor."""
        return None

    @property
    def chunk_bytes(self) -> int:
        """Bytes from a chunk to the next one."""
        return 2 * CHUNK * layouts.atom_cols(self.cols, self.cache.element_type.width)

    def targets(self, own: OwnRows, lane: Int32) -> list[Int32]:
        """Bytes from a stage's start to where a lane copies to in the first chunk, by instruction."""
        layout = layouts.smem_layout(self.tile_n, self.cols, self.cache.element_type)
        row, col = lane // own.lanes, cutlass.min(8 * (lane % own.lanes), self.cols - 8)
        return [2 * cute.crd2idx((i * own.at_once + row, col), layout) for i in range(own.steps)]

    @cute.jit
    def load(
        self,
        pages: cute.Tensor,
        own: OwnRows,
        rows: KeyRows,
        row0: Int32,
        head: Int32,
        stage: Int32,
        targets: list[Int32],
    ) -> None:
        """By one of the warps: start copying its rows of the key block from ``row0`` on of one head.

        Args:
            pages: of these rows, see :meth:`OwnRows.find`.
            stage: the address in shared memory.
            targets: see :meth:`targets`.
        """
        lane = cute.arch.lane_idx()
        col, start = 8 * (lane % own.lanes), stage + own.warp * self.chunk_bytes
        within_row = Int64(Uint32(optimization_barrier(2 * col)))  # otherwise multiplied at each copy
        per_register: Constexpr = WARP // CHUNK
        for k in cutlass.range_constexpr(own.registers):
            address, exists = self.source(pages[k], rows, row0 + own.row(lane, k), head)
            valid = cute.arch.vote_ballot_sync(exists) >> (lane // own.lanes * own.lanes)
            if cutlass.const_expr(own.lanes * 8 != self.dim):
                valid = cutlass.select_(col < self.dim, valid, Int32(0))
            for chunk in cutlass.range_constexpr(k * per_register, min((k + 1) * per_register, own.chunks)):
                if (chunk * own.warps + own.warp) * CHUNK < self.tile_n:
                    for i in cutlass.range_constexpr(own.steps):
                        n: Constexpr = chunk % per_register * own.steps + i
                        source = own.of_row(address, n) + within_row
                        target = start + targets[i] + chunk * own.warps * self.chunk_bytes
                        if col < self.cols:
                            self.copy(source, target, ((valid >> n) & 1) != 0)

    @cute.jit
    def source(self, page: Int32, rows: KeyRows, row: Int32, head: Int32) -> tuple[Int64, Boolean]:
        """The address of a row, and whether it exists; otherwise it is not to be read, but aligned."""
        exists = page >= 0
        place = (cutlass.max(page, 0), rows.row_in_page(cutlass.select_(exists, row, Int32(0))))
        return Int64(rows.row(self.cache, place, head).iterator.toint()), exists

    @cute.jit
    def copy(self, source: Int64, target: Int32, exists: Boolean) -> None:
        """Start copying 16 bytes, or zeros."""
        dtype = self.cache.element_type
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
        )
        predicate = cute.make_rmem_tensor(cute.make_layout((1, 1)), Boolean)
        predicate[0, 0] = exists
        vector = cute.make_layout(((8, 1), 1))
        g = cute.make_ptr(dtype, source, cute.AddressSpace.gmem, assumed_align=16)
        s = cute.make_ptr(dtype, target, cute.AddressSpace.smem, assumed_align=16)
        cute.copy(atom, cute.make_tensor(g, vector), cute.make_tensor(s, vector), pred=predicate)
