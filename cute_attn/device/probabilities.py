"""From scores to their gradients, between the backward's matrix products."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32

from cute_attn.device.math import exp2, multiply_bf16, opaque
from cute_attn.device.rounding import Widened, rounded
from cute_attn.device.score_tile import ScoreMap, ScoreTile, registers


@cute.jit
def row_values(score_map: ScoreMap, s_rows: cute.Tensor) -> cute.Tensor:
    """A number for each of the thread's rows, of fp32 in shared memory for all rows of a tile, contiguous."""
    rows = score_map.modes.rows
    values = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
    pairs = len(rows) > 1 and all(b == a + 1 for a, b in zip(rows[::2], rows[1::2], strict=True))
    step = 2 if pairs else 1
    first = (s_rows.iterator + score_map.thr_row).toint()
    pointer = cute.make_ptr(Float32, first, cute.AddressSpace.smem, assumed_align=4 * step)
    for r in cutlass.range_constexpr(0, len(rows), step):
        layout = cute.make_layout(step)
        cute.autovec_copy(
            cute.make_tensor(pointer + rows[r], layout), cute.make_tensor(values.iterator + r, layout)
        )
    return values


@cute.jit
def probabilities(tile: ScoreTile, lse_log2: cute.Tensor, scale_log2: Float32) -> None:
    """Scores in ``tile.acc`` become normalised probabilities.

    Args:
        lse_log2: fp32, for each of the thread's rows LSE * log2(e); +inf where the row saw nothing or does not exist,
            whose probabilities are then 0.
        scale_log2: unit * log2(e), for scores in the context's unit.
    """
    for r in cutlass.range_constexpr(len(tile.rows)):
        shift = lse_log2[r]
        for c in cutlass.range_constexpr(len(tile.cols)):
            tile.acc[r, c] = exp2(tile.acc[r, c] * scale_log2 - shift)


@cute.jit
def start_from(acc: cute.Tensor, values: cute.Tensor) -> None:
    """Every element of acc (rows, cols) becomes its row's value, for a product to be added to.

    Each in a register of its own: copies of the same one would be made where the product starts, among others that run.
    """
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            acc[r, c] = opaque(values[r])


@cute.jit
def score_gradient(p: cute.Tensor, dp: cute.Tensor, minus_d: cute.Tensor | None) -> None:
    """dp becomes p * (dp - D): the gradient of the scores after all epilogues, but for the gradient's scale.

    Args:
        p: (rows, cols), probabilities before dropout, fp32 or 16 bits.
        dp: (rows, cols) fp32, gradients of the probabilities, 0 where dropped.
        minus_d: fp32, for each of the thread's rows -D, D = sum(p * dp) - dLSE, the gradient's scale left out; 0 in
            rows that saw nothing or do not exist. None where dp holds it already (:func:`start_from`).
    """
    for r in cutlass.range_constexpr(cute.size(dp, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(dp, mode=[1])):
            centred = dp[r, c] if minus_d is None else dp[r, c] + minus_d[r]
            dp[r, c] = Float32(p[r, c]) * centred


@cute.jit
def dropped_score_gradient(p: cute.Tensor, dp: cute.Tensor, minus_d: cute.Tensor, dropped: Constexpr) -> None:
    """dp becomes p * (keep * dp - D), and p becomes keep * p.

    As :func:`score_gradient` otherwise. p is rounded once: both terms of keep * p * dp - p * D have the same p.

    Args:
        p: (rows, cols) of 16 bits, with nothing dropped yet.
        dp: (rows, cols) fp32, laid out alike, with nothing dropped yet.
        minus_d: as there.
        dropped: dropped(i) has 16 ones for each dropped element of the i-th word of p.
    """
    kept = cute.make_rmem_tensor_like(p)
    pairs, kept_pairs = (cute.recast_tensor(registers(x), Int32) for x in (p, kept))
    places = _pairs_of(dp)
    for i in cutlass.range_constexpr(cute.size(pairs)):  # pair by pair, so that few registers hold both
        kept_pairs[i] = opaque(pairs[i] & ~dropped(i))
        for place in places[i]:
            dp[place] = Widened(kept)[place] * dp[place] + Widened(p)[place] * minus_d[place[0]]
        pairs[i] = kept_pairs[i]


@cute.jit
def centre(dp: cute.Tensor, minus_d: cute.Tensor) -> None:
    """dp becomes dp - D; see :func:`score_gradient`."""
    for r in cutlass.range_constexpr(cute.size(dp, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(dp, mode=[1])):
            dp[r, c] = dp[r, c] + minus_d[r]


@cute.jit
def score_gradient_by_pairs(
    p: cute.Tensor, centred: cute.Tensor, minus_d: cute.Tensor | None, dropped: Constexpr
) -> None:
    """centred becomes p * (keep * dp - D), two elements an instruction, and p becomes keep * p.

    :func:`score_gradient` with one rounding more, of dp - D: bf16 has fp32's range for it.

    Args:
        p: (rows, cols) of bf16, with nothing dropped yet.
        centred: (rows, cols) of bf16, laid out alike: dp - D, with nothing dropped yet.
        minus_d: as there; not looked at without dropout.
        dropped: dropped(i) has 16 ones for each dropped element of the i-th word of p; None without dropout.
    """
    pairs, ds_pairs = (cute.recast_tensor(registers(x), Int32) for x in (p, centred))
    none_kept = _rounded_pairs(minus_d, _pairs_of(p)) if dropped else []
    for i in cutlass.range_constexpr(cute.size(pairs)):
        if cutlass.const_expr(dropped is None):
            ds_pairs[i] = multiply_bf16(pairs[i], ds_pairs[i])
        else:
            mask = dropped(i)
            ds_pairs[i] = multiply_bf16(pairs[i], (ds_pairs[i] & ~mask) | (none_kept[i] & mask))
            pairs[i] = pairs[i] & ~mask


def _pairs_of(view: cute.Tensor) -> list[tuple]:
    """The two places (row, column) of each pair of neighbouring registers of a view (rows, cols)."""
    shape = [cute.size(view, mode=[mode]) for mode in (0, 1)]
    places = {cute.crd2idx((r, c), view.layout): (r, c) for r in range(shape[0]) for c in range(shape[1])}
    return [(places[2 * i], places[2 * i + 1]) for i in range(len(places) // 2)]


def _rounded_pairs(values: cute.Tensor, places: list[tuple]) -> list[Int32]:
    """Of the rows of each pair of places their values in bf16; the same word for pairs of the same rows."""
    words: dict[tuple, Int32] = {}
    for (first, _), (second, _) in places:
        if (first, second) not in words:
            both = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            both[0], both[1] = values[first], values[second]
            words[first, second] = cute.recast_tensor(rounded(both, BFloat16), Int32)[0]
    return [words[first, second] for (first, _), (second, _) in places]
