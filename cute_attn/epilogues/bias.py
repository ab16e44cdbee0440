"""An additive bias: a tensor (batch, nheads, seqlen_q, seqlen_k), broadcast over any dimension by stride 0.

The gradient has the same extents. It is stored, or added atomically if several scores have the same element.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

from cute_attn.device.fakes import plain
from cute_attn.device.lanes import COLUMN_LANES, QUAD_LANES, add_to, adds_for, exchange_pairs, lanes_sum
from cute_attn.device.math import CUTE_DTYPES, convert_to_16_bits, on_device, rematerialize, uniform
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs

PAIRED, SINGLE, ADDED = "paired", "single", "added"  # how a gradient is stored


@dataclass(frozen=True)
class GradientRows:
    """One batch and head of the bias gradient; offsets count elements of the bias's dtype, not of the gradient's."""

    pointer: cute.Pointer
    row_stride: Int64
    summed: Int32  # not 0: it is fp32, and added to atomically
    paired: Boolean
    scale: Float32


@dataclass(frozen=True)
class BiasRows:
    """One batch and head of the bias: its first element, its row stride and its bounds."""

    pointer: cute.Pointer
    row_stride: Int64
    seqlen_q: Int32
    seqlen_k: Int32
    paired: Boolean  # rows are aligned to pairs: an element of an even column and the next one are one load
    score_scale: Float32
    gradient: Any = None  # GradientRows, where one is wanted
    tangent: Any = None  # BiasRows of the bias's tangent, if it has one
    first_key: Int32 | None = None  # the first column, if that is not column 0
    heads: Any = None  # with a cache: (stride of a head, the last head relative to this one)


@dataclass(frozen=True)
class Bias(Epilogue):
    """score + bias, with a bias of any dtype (fp16, bf16 or fp32).

    The accumulator becomes the score itself: divided by the scale, a dtype's minimum, as in masks, would be -inf.

    A thread holds pairs of neighbouring columns. It loads a pair at once if rows are aligned to pairs. Otherwise, or if
    the tile crosses the tensor's edge, it loads single elements with clamped indices. Scores out of bounds are masked
    or not stored.

    In a transposed tile, pairs are neighbours in a column. 16-bit elements are loaded, and their gradients stored, in
    the order of an untransposed tile, and lanes exchange them; fp32 elements are accessed one by one.

    With ``tile.tma_bias`` the kernel loads 16-bit tiles to shared memory by TMA. The bias is read from there only when
    it is added, and occupies no registers before.

    With ``cached`` keys, rows of a tile may have different heads, and column 0 of the tensor is the sequence's first
    key. Keys beyond the last column read that column, so one column serves all keys.

    A ``tangent`` is loaded ``ahead``, after the bias has been added, into the same registers, or row by row when it is
    added.
    """

    dtype: str
    gradient: bool = False
    cached: bool = False
    tangent: bool = False
    ahead: bool = False
    name = "bias"

    def fake_args(self) -> tuple:
        tensors = tuple(plain(self._dtype, 4) for _ in range(1 + (self.gradient or self.tangent)))
        return (*tensors, Int32(0)) if self.gradient else tensors

    def host_args(self, inputs: ScoreInputs) -> tuple:
        if self.tangent:
            return (inputs.bias, inputs.bias_tangent)
        if not self.gradient:
            return (inputs.bias,)
        bias, grad = inputs.bias, inputs.grad_bias
        if grad is None:
            raise ValueError("grad_bias is None; accepted: zeros with the bias's extents")
        shared = any(step == 0 and size > 1 for size, step in zip(grad.shape, grad.stride(), strict=True))
        if grad.dtype == bias.dtype and not (shared and self.dtype != "fp32"):
            return (bias, grad, int(shared))
        if str(grad.dtype) != "torch.float32":
            raise ValueError(
                f"grad_bias is {grad.dtype}{' and broadcast' if shared else ''}; accepted: torch.float32"
                + (f", or {bias.dtype} if not broadcast" if bias.dtype != grad.dtype else "")
            )
        # The kernel was compiled for the bias's dtype; ``summed`` tells it that the gradient is fp32.
        return (bias, grad.view(bias.dtype), 1)

    @cute.jit
    def begin(self, args: tuple, context: ScoreContext) -> BiasRows:
        pointer, row_stride, paired = self._plane(args[0], context)
        gradient = None
        if cutlass.const_expr(self.gradient):
            grad, grad_stride, grad_paired = self._plane(args[1], context)
            gradient = GradientRows(grad, grad_stride, args[2], grad_paired, context.gradient_scale)
        rows = BiasRows(
            pointer, row_stride, context.seqlen_q, context.seqlen_k, paired, context.score_scale, gradient
        )
        if cutlass.const_expr(self.cached):
            head_stride, end = args[0].stride[1], Int32(args[0].shape[3])
            end = end if context.first_key is None else context.first_key + end
            rows = replace(
                rows,
                seqlen_k=cutlass.min(rows.seqlen_k, end),
                paired=rows.paired & (head_stride % 2 == 0),
                first_key=context.first_key,
                heads=(Int64(head_stride), context.nheads - 1 - context.head),
            )
        if cutlass.const_expr(self.tangent):
            names = ("pointer", "row_stride", "paired", "score_scale")
            own = (*self._plane(args[1], context), context.tangent_scale)
            rows = replace(rows, tangent=replace(rows, **dict(zip(names, own, strict=True))))
        return rows

    def _plane(self, tensor: cute.Tensor, context: ScoreContext) -> tuple[cute.Pointer, Int64, Boolean]:
        """(pointer to the first element, row stride, True if rows are aligned to pairs) for one batch and head."""
        stride_batch, stride_head, stride_row, _ = tensor.stride
        start = Int64(context.batch) * stride_batch + Int64(context.head) * stride_head
        if context.first_key is not None:
            start -= context.first_key
        pointer = tensor.iterator + start
        paired = (pointer.toint() % self._pair_bytes == 0) & (stride_row % 2 == 0)
        return pointer, Int64(stride_row), Boolean(paired)

    @property
    def _dtype(self) -> Any:
        return CUTE_DTYPES[self.dtype]

    @property
    def _pair_bytes(self) -> int:
        return self._dtype.width // 4

    @property
    def _pair_words(self) -> int:
        return self._pair_bytes // 4

    def _exchanged(self, tile: ScoreTile) -> bool:
        """True if lanes exchange elements: in transposed 16-bit tiles, on the device."""
        return tile.transposed and self._pair_words == 1 and on_device()

    def load(self, state: BiasRows, tile: ScoreTile) -> Any:
        """The tile's bias in registers, in :func:`untransposed` order if lanes exchange elements; None with TMA."""
        if tile.tma_bias is not None:
            return None
        return self._load(state, untransposed(tile) if self._exchanged(tile) else tile)

    @cute.jit
    def _load(self, state: BiasRows, tile: ScoreTile) -> cute.Tensor:
        """32-bit words of one or two elements: (words per row, rows), or (words per column, columns) if transposed."""
        rows: Constexpr = len(tile.rows)
        cols: Constexpr = len(tile.cols)
        along: Constexpr = rows if tile.transposed else cols
        lines: Constexpr = cols if tile.transposed else rows
        loaded = cute.make_rmem_tensor(cute.make_layout((along // 2 * self._pair_words, lines)), Int32)
        if cutlass.const_expr(tile.transposed):
            self._load_transposed(state, tile, self._elements(loaded, along, lines))
        # A warp-uniform branch: predicated off, the single loads would still be issued.
        elif uniform(Uint32(state.paired & _columns_exist(state, tile))) != Uint32(0):
            for r in cutlass.range_constexpr(rows):
                row = self._row(state, tile, tile.row0, r).align(self._pair_bytes)
                for c in cutlass.range_constexpr(0, cols, 2):
                    source = cute.recast_ptr(row + tile.cols[c], dtype=Int32)
                    target = loaded.iterator + (r * cols + c) // 2 * self._pair_words
                    layout = cute.make_layout(self._pair_words)
                    cute.autovec_copy(cute.make_tensor(source, layout), cute.make_tensor(target, layout))
        else:
            self._load_singly(state, tile, rematerialize(tile.row0), self._elements(loaded, along, lines))
        return loaded

    @cute.jit
    def _load_transposed(self, state: BiasRows, tile: ScoreTile, elements: cute.Tensor) -> None:
        row0 = rematerialize(tile.row0)
        if _inside(state, tile, row0):
            rows = _row_pointers(state.pointer, state.row_stride, tile, row0)
            for r in cutlass.range_constexpr(len(tile.rows)):
                for c in cutlass.range_constexpr(len(tile.cols)):
                    elements[r, c] = cute.make_tensor(rows[r] + tile.cols[c], cute.make_layout(1))[0]
        else:
            self._load_singly(state, tile, row0, elements)

    @cute.jit
    def _load_singly(self, state: BiasRows, tile: ScoreTile, row0: Int32, elements: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(len(tile.rows)):
            row = self._row(state, tile, row0, r)
            for c in cutlass.range_constexpr(len(tile.cols)):
                column = cutlass.min(tile.col0 + tile.cols[c], state.seqlen_k - 1)
                if cutlass.const_expr(state.first_key is not None):
                    column = cutlass.max(column, state.first_key)
                column = column - tile.col0
                index = (r, c) if cutlass.const_expr(tile.transposed) else (c, r)
                elements[index] = cute.make_tensor(row + column, cute.make_layout(1))[0]

    def _elements(self, loaded: cute.Tensor, along: int, lines: int) -> cute.Tensor:
        """``loaded`` as (along, lines) elements."""
        pointer = cute.recast_ptr(loaded.iterator, dtype=self._dtype)
        return cute.make_tensor(pointer, cute.make_layout((along, lines)))

    def _row(self, state: BiasRows, tile: ScoreTile, row0: Int32, r: int) -> cute.Pointer:
        """Pointer to the bias of row r at the thread's first column; rows past the end are clamped to the last row."""
        row = cutlass.min(row0 + tile.rows[r], state.seqlen_q - 1)
        start = Int64(row) * state.row_stride + Int64(tile.col0)
        if tile.heads is not None:
            head_stride, last = state.heads
            start += Int64(cutlass.min(tile.heads[r], last)) * head_stride
        return state.pointer + start

    def forward(self, state: BiasRows, tile: ScoreTile, loaded: Any) -> Any:
        if tile.tma_bias is not None:
            self._add_tma_bias(state, tile)
            return None
        self._add_to_scores(state, tile, self._exchange(tile, loaded) if self._exchanged(tile) else loaded)
        return self._load(state.tangent, tile) if self.ahead else None

    def _exchange(self, tile: ScoreTile, loaded: cute.Tensor) -> cute.Tensor:
        """The thread's words, each a pair of rows, after an exchange of the words that lanes loaded."""
        pairs, cols = len(tile.rows) // 2, len(tile.cols)
        words = cute.make_rmem_tensor(cute.make_layout((pairs, cols)), Int32)
        for r in range(pairs):
            for c in range(cols):
                words[r, c] = exchange_pairs(loaded[c, r])
        return words

    @cute.jit
    def _add_tma_bias(self, state: BiasRows, tile: ScoreTile) -> None:
        """Add the bias from shared memory, sub-tile by sub-tile; the next sub-tile is read while one is added."""
        tma_bias, size = tile.tma_bias, tile.tma_bias.SUBTILE
        along: Constexpr = len(tile.rows) if tile.transposed else len(tile.cols)
        lines: Constexpr = len(tile.cols) if tile.transposed else len(tile.rows)
        words = cute.make_rmem_tensor(cute.make_layout((along // 2, lines)), Int32)
        tma_bias.wait()
        tma_bias.read(0, words)
        for subtile in cutlass.range_constexpr(tma_bias.subtiles):
            if cutlass.const_expr(subtile % 2 == 1):
                cute.arch.sync_warp()  # otherwise all are read at once, and registers spill
            if cutlass.const_expr(subtile + 1 < tma_bias.subtiles):
                tma_bias.read(subtile + 1, words)
            else:
                tma_bias.release()
            self._add_to_scores(state, tile, words, subtile * size, (subtile + 1) * size)

    @cute.jit
    def _add_to_scores(
        self,
        state: BiasRows,
        tile: ScoreTile,
        loaded: cute.Tensor,
        begin: Constexpr = 0,
        end: Constexpr = None,
    ) -> None:
        """Add elements [begin, end) of each row (each column if transposed); by default all elements."""
        along: Constexpr = len(tile.rows) if tile.transposed else len(tile.cols)
        lines: Constexpr = len(tile.cols) if tile.transposed else len(tile.rows)
        last: Constexpr = along if cutlass.const_expr(end is None) else end
        elements = self._elements(loaded, along, lines)
        pair = cute.make_rmem_tensor(2, Int32)
        wide = cute.recast_tensor(pair, Float32)
        for line in cutlass.range_constexpr(lines):
            for a in cutlass.range_constexpr(begin, last, 2):
                if cutlass.const_expr(
                    self.dtype == "bf16"
                ):  # one instruction per element; a conversion needs two
                    word = loaded[a // 2, line]
                    pair[0] = word << Int32(16)
                    pair[1] = word & Int32(-(1 << 16))
                else:
                    wide[0], wide[1] = Float32(elements[a, line]), Float32(elements[a + 1, line])
                for i in cutlass.range_constexpr(2):
                    index = (a + i, line) if cutlass.const_expr(tile.transposed) else (line, a + i)
                    tile.acc[index] = tile.acc[index] * state.score_scale + wide[i]

    @property
    def has_gradients(self) -> bool:
        return self.gradient

    def backward(self, state: BiasRows, tile: ScoreTile, saved: Any) -> None:
        """Do nothing: the derivative of a sum is 1."""

    @property
    def adds_tangents(self) -> bool:
        return self.tangent

    def tangents(self, state: BiasRows, tile: ScoreTile, saved: Any) -> None:
        if self.ahead:
            self._add_to_scores(state.tangent, tile, saved)
        elif self.tangent:
            for r in range(len(tile.rows)):
                acc = cute.domain_offset((r, 0), tile.acc)
                row = replace(tile, acc=acc, rows=tile.rows[r : r + 1])
                self._add_to_scores(state.tangent, row, self._load(state.tangent, row))

    @cute.jit
    def add_gradients(self, state: BiasRows, tile: ScoreTile, saved: Any) -> None:
        """Store or add the score gradient as the bias gradient, unless the kernel does so (``takes_gradient``)."""
        if cutlass.const_expr(
            self.gradient and not (tile.tma_bias is not None and tile.tma_bias.takes_gradient)
        ):
            gradient, row0 = state.gradient, rematerialize(tile.row0)
            if uniform(Uint32(gradient.summed)) == Uint32(0):
                if cutlass.const_expr(self._exchanged(tile)):
                    self._write_exchanged(state, tile, untransposed(tile))
                elif cutlass.const_expr(tile.transposed):
                    self._store(state, tile, row0, SINGLE)
                elif uniform(Uint32(gradient.paired)) != Uint32(0):
                    self._store(state, tile, row0, PAIRED)
                else:
                    self._store(state, tile, row0, SINGLE)
            elif gradient.row_stride == 0:
                self._add_columns(state, tile, row0)
            else:
                self._store(state, tile, row0, ADDED)

    @cute.jit
    def _write_exchanged(self, state: BiasRows, tile: ScoreTile, other: ScoreTile) -> None:
        """Store 16-bit gradients in the pairs of ``other``, the result of :func:`untransposed` for the tile."""
        row0 = rematerialize(other.row0)
        if uniform(Uint32(state.gradient.paired & (_end(other) <= state.seqlen_k))) != Uint32(0):
            rows = _row_pointers(state.gradient.pointer, state.gradient.row_stride, other, row0)
            for r in cutlass.range_constexpr(len(other.rows)):
                for c in cutlass.range_constexpr(len(tile.cols)):
                    own = self._gradients(state.gradient, tile, ((2 * r, c), (2 * r + 1, c)))
                    word = cute.make_rmem_tensor(1, Int32)
                    word[0] = exchange_pairs(cute.recast_tensor(own, Int32)[0])
                    if row0 + other.rows[r] < state.seqlen_q:
                        self._write_words(rows[r] + tile.cols[c], word)
        else:
            self._store(state, tile, rematerialize(tile.row0), SINGLE)

    @cute.jit
    def _store(self, state: BiasRows, tile: ScoreTile, row0: Int32, how: Constexpr) -> None:
        """Store the rows and columns that are in bounds; without predicates if all of the thread's elements are."""
        if _inside(state, tile, row0):
            self._store_rows(state, tile, row0, how, False)
        else:
            self._store_rows(state, tile, row0, SINGLE if how == PAIRED else how, True)

    @cute.jit
    def _store_rows(
        self, state: BiasRows, tile: ScoreTile, row0: Int32, how: Constexpr, guarded: Constexpr
    ) -> None:
        pointer, stride = state.gradient.pointer, state.gradient.row_stride
        if cutlass.const_expr(how == ADDED):
            pointer, stride = self._as_floats(pointer), stride // (32 // self._dtype.width)
        rows = _row_pointers(pointer, stride, tile, row0)
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(0, len(tile.cols), 2):
                if cutlass.const_expr(how == PAIRED):
                    self._store_elements(state.gradient, tile, rows[r], r, (c, c + 1))
                else:
                    for i in cutlass.range_constexpr(2):
                        exists = (row0 + tile.rows[r] < state.seqlen_q) & (
                            tile.col0 + tile.cols[c + i] < state.seqlen_k
                        )
                        if cutlass.const_expr(guarded):
                            if exists:
                                self._put(state.gradient, tile, rows[r], r, c + i, how)
                        else:
                            self._put(state.gradient, tile, rows[r], r, c + i, how)

    def _put(
        self, gradient: GradientRows, tile: ScoreTile, row: cute.Pointer, r: int, c: int, how: str
    ) -> None:
        if how == ADDED:
            add_to(row + tile.cols[c], tile.acc[r, c] * gradient.scale)
        else:
            self._store_elements(gradient, tile, row, r, (c,))

    def _store_elements(
        self, gradient: GradientRows, tile: ScoreTile, row: cute.Pointer, r: int, cols: tuple[int, ...]
    ) -> None:
        """Store one gradient, or two neighbouring gradients as a vector."""
        gradients = self._gradients(gradient, tile, tuple((r, c) for c in cols))
        target = row + tile.cols[cols[0]]
        if len(cols) == 2:
            self._write_words(target, cute.recast_tensor(gradients, Int32))
        else:
            cute.autovec_copy(gradients, cute.make_tensor(target, gradients.layout))

    def _write_words(self, target: cute.Pointer, words: cute.Tensor) -> None:
        target = cute.recast_ptr(target.align(self._pair_bytes), dtype=Int32)
        cute.autovec_copy(words, cute.make_tensor(target, words.layout))

    def _gradients(
        self, gradient: GradientRows, tile: ScoreTile, indices: tuple[tuple[int, int], ...]
    ) -> cute.Tensor:
        """The gradients of the elements (r, c) in ``indices``, in the bias's dtype."""
        wide = cute.make_rmem_tensor(len(indices), Float32)
        for i, index in enumerate(indices):
            wide[i] = tile.acc[index] * gradient.scale
        target = cute.make_rmem_tensor(wide.layout, self._dtype)
        convert_to_16_bits(wide, target)
        return target

    def _as_floats(self, pointer: cute.Pointer) -> cute.Pointer:
        return cute.recast_ptr(pointer.align(4), dtype=Float32)

    @cute.jit
    def _add_columns(self, state: BiasRows, tile: ScoreTile, row0: Int32) -> None:
        """Add to a gradient with a single row: one lane adds each column's sum over the warp's rows."""
        gradient, lanes = state.gradient, QUAD_LANES if tile.transposed else COLUMN_LANES
        first = self._as_floats(gradient.pointer) + tile.col0
        for c in cutlass.range_constexpr(len(tile.cols)):
            total = Float32(0.0)
            for r in cutlass.range_constexpr(len(tile.rows)):
                exists = row0 + tile.rows[r] < state.seqlen_q
                total = total + (tile.acc[r, c] if exists else Float32(0.0))
            total = lanes_sum(total, lanes) * gradient.scale
            if adds_for(tile.row0 & 7) & (tile.col0 + tile.cols[c] < state.seqlen_k):
                add_to(first + tile.cols[c], total)


def untransposed(tile: ScoreTile) -> ScoreTile:
    """The elements of a transposed tile that a lane accesses in global memory, before or after an exchange.

    In each 8 x 8 matrix they are the elements that the lane would hold in an untransposed tile.
    """
    query, key = tile.row0 & 7, tile.col0 & 7
    cols = tuple(column + i for column in tile.cols for i in range(2))
    row0, col0 = tile.row0 - query + key, tile.col0 - key + query
    return replace(tile, rows=tile.rows[::2], cols=cols, row0=row0, col0=col0, transposed=False)


def _inside(state: BiasRows, tile: ScoreTile, row0: Int32) -> Boolean:
    """True if all of the thread's rows and columns are in bounds."""
    return (row0 + tile.rows[-1] < state.seqlen_q) & (tile.col0 + tile.cols[-1] < state.seqlen_k)


def _row_pointers(pointer: cute.Pointer, stride: Int64, tile: ScoreTile, row0: Int32) -> list[cute.Pointer]:
    """Pointers to the thread's first column in each row; each is computed from the previous pointer by an addition."""
    at = pointer + (Int64(row0) * stride + Int64(tile.col0))
    steps: dict[int, Int64] = {}
    pointers = [at]
    for last, row in zip(tile.rows, tile.rows[1:], strict=False):
        if row - last not in steps:
            steps[row - last] = stride * Int64(row - last)
        at = at + steps[row - last]
        pointers.append(at)
    return pointers


def _columns_exist(state: BiasRows, tile: ScoreTile) -> Boolean:
    """True if all columns of the whole tile are in bounds."""
    exist = _end(tile) <= state.seqlen_k
    if state.first_key is not None:
        exist = exist & (tile.col0 // tile.tile_n * tile.tile_n >= state.first_key)
    return exist


def _end(tile: ScoreTile) -> Int32:
    """One past the tile's last column."""
    return (tile.col0 // tile.tile_n + 1) * tile.tile_n
