"""An additive bias, read from a tensor (batch, nheads, seqlen_q, seqlen_k) that may be broadcast over any of them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.math import anew, uniform
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}


@dataclass(frozen=True)
class BiasRows:
    """One batch and head of the bias: its first element, its row stride, and how far it may be read."""

    pointer: cute.Pointer
    row_stride: Int64
    seqlen_q: Int32
    seqlen_k: Int32
    paired: Boolean  # two neighbouring elements can be read at once, wherever the first has an even column
    inv_unit: Float32


@dataclass(frozen=True)
class Bias(Epilogue):
    """score + bias, in the bias's own dtype (fp16, bf16 or fp32).

    A thread holds pairs of neighbouring columns, so it reads pairs where rows are aligned to a pair, and single
    elements with clamped indices where they are not or where the block crosses the tensor's edge. What it reads for
    rows and columns that do not exist is some other element, and is masked or not stored.
    """

    dtype: str
    name = "bias"

    def fake_args(self) -> tuple:
        shape = tuple(cute.sym_int() for _ in range(4))
        stride = (*(cute.sym_int64() for _ in range(3)), 1)
        dtype = CUTE_DTYPES[self.dtype]
        return (make_fake_tensor(dtype, shape, stride=stride, assumed_align=dtype.width // 8),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.bias,)

    @cute.jit
    def begin(self, args: tuple, context: ScoreContext) -> BiasRows:
        bias = args[0]
        stride_batch, stride_head, stride_row, _ = bias.stride
        start = Int64(context.batch) * stride_batch + Int64(context.head) * stride_head
        pointer = bias.iterator + start
        paired = (pointer.toint() % self._pair_bytes == 0) & (stride_row % 2 == 0)
        return BiasRows(
            pointer, Int64(stride_row), context.seqlen_q, context.seqlen_k, Boolean(paired), context.inv_unit
        )

    @property
    def _pair_bytes(self) -> int:
        return CUTE_DTYPES[self.dtype].width // 4

    @property
    def _pair_words(self) -> int:
        return self._pair_bytes // 4

    @cute.jit
    def load(self, state: BiasRows, tile: ScoreTile) -> cute.Tensor:
        """(words of a row, rows) of 32 bits, each holding one element or two."""
        rows: Constexpr = len(tile.rows)
        cols: Constexpr = len(tile.cols)
        loaded = cute.make_rmem_tensor(cute.make_layout((cols // 2 * self._pair_words, rows)), Int32)
        end = (tile.col0 // tile.tile_n + 1) * tile.tile_n
        # A branch that whole warps take together: predicated off, the single loads would still cost their issue slots.
        if uniform(Uint32(state.paired & (end <= state.seqlen_k))) != Uint32(0):
            for r in cutlass.range_constexpr(rows):
                row = self._row(state, tile, tile.row0, r).align(self._pair_bytes)
                for c in cutlass.range_constexpr(0, cols, 2):
                    source = cute.recast_ptr(row + tile.cols[c], dtype=Int32)
                    target = loaded.iterator + (r * cols + c) // 2 * self._pair_words
                    layout = cute.make_layout(self._pair_words)
                    cute.autovec_copy(cute.make_tensor(source, layout), cute.make_tensor(target, layout))
        else:
            elements = self._elements(loaded, rows, cols)
            row0 = anew(tile.row0)
            for r in cutlass.range_constexpr(rows):
                row = self._row(state, tile, row0, r)
                for c in cutlass.range_constexpr(cols):
                    column = cutlass.min(tile.col0 + tile.cols[c], state.seqlen_k - 1) - tile.col0
                    elements[c, r] = cute.make_tensor(row + column, cute.make_layout(1))[0]
        return loaded

    def _elements(self, loaded: cute.Tensor, rows: int, cols: int) -> cute.Tensor:
        """What was loaded as (cols, rows) elements."""
        pointer = cute.recast_ptr(loaded.iterator, dtype=CUTE_DTYPES[self.dtype])
        return cute.make_tensor(pointer, cute.make_layout((cols, rows)))

    def _row(self, state: BiasRows, tile: ScoreTile, row0: Int32, r: int) -> cute.Pointer:
        """The bias of row r at the thread's first column; rows past the end read the last one, and are not stored."""
        row = cutlass.min(row0 + tile.rows[r], state.seqlen_q - 1)
        return state.pointer + (Int64(row) * state.row_stride + Int64(tile.col0))

    @cute.jit
    def forward(self, state: BiasRows, tile: ScoreTile, loaded: cute.Tensor) -> None:
        rows: Constexpr = len(tile.rows)
        cols: Constexpr = len(tile.cols)
        elements = self._elements(loaded, rows, cols)
        pair = cute.make_rmem_tensor(2, Int32)
        wide = cute.recast_tensor(pair, Float32)
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(0, cols, 2):
                if cutlass.const_expr(self.dtype == "bf16"):  # one instruction each; a conversion takes two
                    word = loaded[c // 2, r]
                    pair[0] = word << Int32(16)
                    pair[1] = word & Int32(-(1 << 16))
                else:
                    wide[0], wide[1] = Float32(elements[c, r]), Float32(elements[c + 1, r])
                for i in cutlass.range_constexpr(2):
                    tile.acc[r, c + i] = tile.acc[r, c + i] + wide[i] * state.inv_unit
