"""P and dS of a backward, computed in registers between the matrix products."""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32

from cute_attn.device.math import LARGE, LN_2, LOG2_E, clamped, exp2, fabs, fmax, log, optimization_barrier
from cute_attn.device.score_tile import ScoreMap, ScoreTile


@cute.jit
def row_values(score_map: ScoreMap, s_rows: cute.Tensor) -> cute.Tensor:
    """Read a value for each of the thread's rows from ``s_rows``: fp32 (tile_m,) in shared memory, contiguous."""
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
def probabilities(
    tile: ScoreTile, lse_log2: cute.Tensor, scale_log2: Float32, visible_keys: Constexpr = None
) -> None:
    """Replace the scores in ``tile.acc`` by P = exp2(scale_log2 * score - lse_log2), normalised.

    Args:
        lse_log2: fp32, LSE * log2(e) of each of the thread's rows, infinities :func:`clamped`; +inf in fully masked and
            out-of-bounds rows, to make P 0 there.
        scale_log2: log2(e) times the factor from the accumulator to scores.
        visible_keys: if scores may be large, a function from a query's index to the number of keys that it sees;
            otherwise None. See :func:`_from_largest`.
    """
    if cutlass.const_expr(visible_keys is not None):
        lse_log2 = _shifts_of_large_rows(tile, lse_log2, scale_log2, visible_keys)
    for r in cutlass.range_constexpr(len(tile.rows)):
        shift = lse_log2[r]
        for c in cutlass.range_constexpr(len(tile.cols)):
            tile.acc[r, c] = exp2(tile.acc[r, c] * scale_log2 - shift)


@cute.jit
def _shifts_of_large_rows(
    tile: ScoreTile, lse_log2: cute.Tensor, scale_log2: Float32, visible_keys: Constexpr
) -> cute.Tensor:
    """Numbers to subtract from each row: ``lse_log2``, or in large rows the result of :func:`_from_largest`.

    One branch for all rows: in a transposed tile, a thread has many rows.
    """
    shifts = cute.make_rmem_tensor_like(lse_log2)
    largest = [Float32(0.0)] * 4  # independent chains hide the latency
    for r in cutlass.range_constexpr(len(tile.rows)):
        shifts[r] = lse_log2[r]
        largest[r % 4] = fmax(largest[r % 4], fabs(lse_log2[r]))
    if fmax(fmax(largest[0], largest[1]), fmax(largest[2], largest[3])) > Float32(LARGE):
        for r in cutlass.range_constexpr(len(tile.rows)):
            if (fabs(shifts[r]) > Float32(LARGE)) & (shifts[r] < Float32.inf):
                shifts[r] = _from_largest(tile, r, shifts[r], scale_log2, visible_keys)
    return shifts


@cute.jit
def _from_largest(
    tile: ScoreTile, r: Constexpr, shift: Float32, scale_log2: Float32, visible_keys: Constexpr
) -> Float32:
    """Subtract row r's LSE from its large scores; returns what is still to be subtracted, in log2.

    A score is rounded as the LSE was, so that equal numbers cancel. If the LSE is too large for the logarithm of a sum
    to change it, it is the largest score. All keys of the row then count as equal, as if a bias were the lowest number.
    If only some have that score, their P is too small: how many have it is known to no thread.
    """
    to_score = 1.0 / scale_log2
    for c in cutlass.range_constexpr(len(tile.cols)):
        score = tile.acc[r, c]
        difference = (clamped(score * scale_log2) - shift) * to_score
        tile.acc[r, c] = score if score == -Float32.inf else difference
    lse, log_of_keys = shift * LN_2, log(Float32(visible_keys(tile.row0 + tile.rows[r])))
    return log_of_keys * LOG2_E if lse + log_of_keys == lse else Float32(0.0)


@cute.jit
def start_from(acc: cute.Tensor, values: cute.Tensor) -> None:
    """Fill each row of acc (rows, cols) with the row's value, before a product is added to acc.

    The optimization barrier gives each element a separate register here: otherwise the compiler would
    copy the values where the product starts, while other products are in flight.
    """
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            acc[r, c] = optimization_barrier(values[r])


@cute.jit
def score_gradient(p: cute.Tensor, dp: cute.Tensor, minus_d: cute.Tensor | None) -> None:
    """Replace dp by p * (dp - D): the gradient of the scores after all epilogues, without the gradient's scale.

    Args:
        p: (rows, cols) fp32, probabilities before dropout.
        dp: (rows, cols) fp32, gradients of the probabilities, 0 where dropped.
        minus_d: fp32, -D of each of the thread's rows, D = sum(p * dp) - dLSE without the gradient's scale; 0 in fully
            masked and out-of-bounds rows. None if dp includes it already (:func:`start_from`).
    """
    for r in cutlass.range_constexpr(cute.size(dp, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(dp, mode=[1])):
            centred = dp[r, c] if minus_d is None else dp[r, c] + minus_d[r]
            dp[r, c] = p[r, c] * centred
