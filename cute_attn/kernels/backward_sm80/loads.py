"""The Ampere backward's loads by cp.async: Q with LSE, and dO with D."""

import itertools
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_attn.device.gemm import below_1024
from cute_attn.device.math import rematerialize


@dataclass(frozen=True)
class BlockLoad:
    """One head's Q with LSE, or dO with D: in global memory, and their stages in shared memory."""

    g: cute.Tensor  # (seqlen_q, head_dim)
    valid_cols: Constexpr  # head_dim
    s: cute.Tensor  # (queries, padded head_dim, sub-tile and stage)
    spilled: cute.Tensor  # to shared memory: the stride of g's rows
    g_row: cute.Tensor  # LSE or D of the padded rows
    s_row: cute.Tensor  # (tile_m, stage)
    seqlen_q: Int32
    thread: Int32
    num_threads: Constexpr
    stored_terms: Constexpr = 1  # terms of an operand: lo follows hi in a row of g, and in the stages of s

    @cute.jit
    def start(self, block: Int32, stage: Int32) -> None:
        """Start loading query block ``block``. Queries out of bounds become zeros, since 0 * NaN would be NaN."""
        tile_m = cute.size(self.s_row, mode=[0])
        if (block + 1) * tile_m <= self.seqlen_q:
            self.rows(block, stage, True)
        else:
            self.rows(block, stage, False)
        self.row_statistics(block, stage)

    @cute.jit
    def rows(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading Q or dO of ``block``, 16 bytes at a time; ``whole``: all its rows are in bounds.

        A thread's vectors are whole swizzle periods apart, so one address in shared memory serves all vectors. The row
        stride is read from shared memory; otherwise each vector's offset would be kept in registers.
        """
        (tile_m, _), (queries, cols, _) = (
            tuple(cute.size(x, mode=[i]) for i in range(n)) for x, n in ((self.s_row, 2), (self.s, 3))
        )
        size = self.s.element_type.width // 8
        length = 16 // size  # elements of a vector
        per_row = 8 if cols * size % 128 == 0 else 4
        row_step, col_step = self.num_threads // per_row, per_row * length
        thread = below_1024(rematerialize(self.thread))
        row, col = thread // per_row, thread % per_row * length
        layout = self.s.layout
        stages = tile_m // queries * self.stored_terms
        first = (self.s.iterator + cute.crd2idx((row, col, stage * stages), layout)).toint()
        stride = self.spilled[0]
        source = self.g.iterator.toint() + (Int64(block * tile_m + row) * stride + Int64(col)) * size
        exists = cute.make_rmem_tensor(cute.make_layout((1, 1)), Boolean)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), self.s.element_type, num_bits_per_copy=128
        )
        vector = cute.make_layout(((length, 1), 1))
        for m in cutlass.range_constexpr(0, tile_m, row_step):
            for term, k in itertools.product(range(self.stored_terms), range(0, cols, col_step)):
                distance = cute.crd2idx(
                    (m % queries, k, m // queries * self.stored_terms + term), layout.outer
                )
                g, s = (
                    cute.make_tensor(
                        cute.make_ptr(self.s.element_type, address, space, assumed_align=16), vector
                    )
                    for address, space in (
                        (source + (m * stride + (term * cols + k)) * size, cute.AddressSpace.gmem),
                        (first + distance * size, cute.AddressSpace.smem),
                    )
                )
                exists[0, 0] = Boolean(True)
                if cutlass.const_expr(k + col_step > self.valid_cols):
                    exists[0, 0] = col + k < self.valid_cols
                if cutlass.const_expr(not whole):
                    exists[0, 0] = exists[0, 0] & (row + m < self.seqlen_q - block * tile_m)
                if cutlass.const_expr(whole and k + col_step <= self.valid_cols):
                    cute.copy(atom, g, s)
                else:
                    cute.copy(atom, g, s, pred=exists)

    @cute.jit
    def row_statistics(self, block: Int32, stage: Int32) -> None:
        """Start loading LSE or D of ``block``, 16 bytes per thread; the workspace is padded to whole blocks."""
        tile_m = cute.size(self.s_row, mode=[0])
        thread = below_1024(rematerialize(self.thread))
        if thread < tile_m // 4:
            # With a 32-bit offset in bytes, the base address stays in a uniform register.
            source = self.g_row.iterator.toint() + Int64((block * tile_m + thread * 4) * 4)
            target = (self.s_row.iterator + (stage * tile_m + thread * 4)).toint()
            spaces = cute.AddressSpace.gmem, cute.AddressSpace.smem
            pointers = (
                cute.make_ptr(Float32, address, space, assumed_align=16)
                for address, space in zip((source, target), spaces, strict=True)
            )
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
            )
            g, s = (cute.make_tensor(pointer, cute.make_layout(4)) for pointer in pointers)
            cute.copy(atom, g, s)


def first_term(m: cute.Tensor) -> cute.Tensor:
    """The first term, hi, of an operand (..., heads, terms, padded head dim)."""
    return m[(*(None for _ in range(cute.rank(m) - 2)), 0, None)]


def term_of(g: cute.Tensor, term: int, cols: int) -> cute.Tensor:
    """Term ``term`` of rows that store their terms one after the other; ``g`` is the first term."""
    return g if term == 0 else cute.make_tensor(g.iterator + term * cols, g.layout)
