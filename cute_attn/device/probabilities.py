"""From scores to their gradients, between the backward's matrix products."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_attn.device.math import exp2, optimization_barrier
from cute_attn.device.score_tile import ScoreMap, ScoreTile


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
            acc[r, c] = optimization_barrier(values[r])


@cute.jit
def score_gradient(p: cute.Tensor, dp: cute.Tensor, minus_d: cute.Tensor | None) -> None:
    """dp becomes p * (dp - D): the gradient of the scores after all epilogues, but for the gradient's scale.

    Args:
        p: (rows, cols) fp32, probabilities before dropout.
        dp: (rows, cols) fp32, gradients of the probabilities, 0 where dropped.
        minus_d: fp32, for each of the thread's rows -D, D = sum(p * dp) - dLSE, the gradient's scale left out; 0 in
            rows that saw nothing or do not exist. None where dp holds it already (:func:`start_from`).
    """
    for r in cutlass.range_constexpr(cute.size(dp, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(dp, mode=[1])):
            centred = dp[r, c] if minus_d is None else dp[r, c] + minus_d[r]
            dp[r, c] = p[r, c] * centred
