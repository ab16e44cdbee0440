"""An additive bias, read from a tensor (batch, nheads, seqlen_q, seqlen_k) that may be broadcast over any of them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

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

    A thread holds pairs of neighbouring columns, so it reads pairs where rows are aligned to a pair, and single elements
    with clamped indices where they are not or where the block crosses the tensor's edge.
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
        pair_bytes = bias.element_type.width // 4
        paired = (pointer.toint() % pair_bytes == 0) & (stride_row % 2 == 0)
        return BiasRows(
            pointer, Int64(stride_row), context.seqlen_q, context.seqlen_k, Boolean(paired), context.inv_unit
        )

    @cute.jit
    def load(self, state: BiasRows, tile: ScoreTile) -> cute.Tensor:
        rows: Constexpr = len(tile.rows)
        cols: Constexpr = len(tile.cols)
        loaded = cute.make_rmem_tensor(cute.make_layout((cols, rows)), CUTE_DTYPES[self.dtype])
        end = tile.col0 + (tile.cols[cols - 1] + 1)
        if state.paired and end <= state.seqlen_k:
            for r in cutlass.range_constexpr(rows):
                source = self._row(state, tile, r)
                for c in cutlass.range_constexpr(0, cols, 2):
                    pair = cute.make_tensor(
                        (source + tile.cols[c]).align(CUTE_DTYPES[self.dtype].width // 4), cute.make_layout(2)
                    )
                    target = cute.make_tensor(loaded.iterator + (r * cols + c), cute.make_layout(2))
                    cute.autovec_copy(pair, target)
        else:
            for r in cutlass.range_constexpr(rows):
                source = self._row(state, tile, r)
                for c in cutlass.range_constexpr(cols):
                    column = cutlass.min(tile.col0 + tile.cols[c], state.seqlen_k - 1) - tile.col0
                    element = cute.make_tensor(source + column, cute.make_layout(1))
                    loaded[c, r] = element[0]
        return loaded

    def _row(self, state: BiasRows, tile: ScoreTile, r: int) -> cute.Pointer:
        """The bias of row r at the thread's first column; rows past the end read the last one, and are not stored."""
        row = cutlass.min(tile.row0 + tile.rows[r], state.seqlen_q - 1)
        return state.pointer + (Int64(row) * state.row_stride + Int64(tile.col0))

    @cute.jit
    def forward(self, state: BiasRows, tile: ScoreTile, loaded: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] + Float32(loaded[c, r]) * state.inv_unit
