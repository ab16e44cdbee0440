"""The Ampere backward's shared memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, cute

from cute_attn.device.math import optimization_barrier
from cute_attn.device.terms import P_EXPONENT

BAND = ("left", "right", "seqlen_k")
BLOCKS = ("full_begin", "full_end", "end")
SPILLED = ("rows_q", "rows_do", "dq", "block", *BAND, *BLOCKS)
"""CTA-uniform numbers spilled to shared memory by hand, as 64 bits. Otherwise the compiler keeps values derived from
kernel arguments in registers through the whole loop, and spills them. Shared memory is read again after every barrier.
rows_q, rows_do: row strides of Q and dO."""

FACTORS = ("s", "dp", "dv", "q", "k")
"""Scale factors for operands in terms: of the products S, dP and dV, and of the operands Q and K."""


@dataclass(frozen=True)
class ScaleStorage:
    """Shared memory for the scales of operands in terms."""

    factors: cute.Tensor  # (8,), see FACTORS
    # (warps,) int32: the bits of each warp's largest dS; of one term see ``running_scale``
    largest: cute.Tensor
    applied: cute.Tensor | None  # (warps,): with one term, the scale of each warp's dK

    @staticmethod
    def make(area: Callable[..., cute.Tensor], num_warps: int, subtiles: int) -> "ScaleStorage":
        """area: (name, layout, element type) -> a tensor in shared memory; subtiles: 0 with two terms."""
        of_warps = cute.make_layout(num_warps)
        return ScaleStorage(
            area("factors", cute.make_layout(8), Float32),
            area("largest", cute.make_layout((num_warps, subtiles)) if subtiles else of_warps, Int32),
            area("applied", of_warps, Float32) if subtiles else None,
        )

    def store(self, scales: cute.Tensor) -> None:
        """Store ``FACTORS``, by all threads; scales: (4,), of Q, K, V and dO."""
        if self.applied is not None:
            for i in range(cute.size(self.largest)):
                self.largest[i] = Int32(0)
            for warp in range(cute.size(self.applied)):
                self.applied[warp] = Float32(1.0)
        q, k, v, do = (scales[i] for i in range(4))
        for name, factor in zip(FACTORS, (q * k, do * v, do * 2.0**-P_EXPONENT, q, k), strict=True):
            self.factors[FACTORS.index(name)] = factor


def factor_of(scales: ScaleStorage | None, name: str) -> Float32:
    """The factor ``name`` of ``FACTORS``; 1 for whole operands."""
    return Float32(1.0) if scales is None else scales.factors[FACTORS.index(name)]


def gradient_factors(
    scales: ScaleStorage | None, of_dk: Float32, of_dv: Float32, thread: Int32
) -> tuple[Float32, Float32]:
    """Final factors of the accumulators of dK and dV; with one term, they also undo the terms' scales."""
    if scales is not None and scales.applied is not None:
        of_dk = of_dk * (scales.applied[thread // 32] * factor_of(scales, "q"))
        of_dv = of_dv * factor_of(scales, "dv")
    return of_dk, of_dv


@dataclass(frozen=True)
class BackwardSm80Storage:
    """Shared memory. Q and dO are divided into sub-tiles: queries whose scores are in registers at the same time.

    In :mod:`cute_attn.kernels.backward_sm80.streamed`, q and do are the same memory, and so are k and v, with stages.
    """

    k: cute.Tensor  # (tile_n, head_dim, 1)
    v: cute.Tensor  # (tile_n, head_dim_v, 1)
    q: cute.Tensor  # (queries, head_dim, sub-tile and stage)
    do: cute.Tensor  # (queries, head_dim_v, sub-tile and stage)
    p: cute.Tensor | None  # (tile_m, tile_n, 1)
    ds: cute.Tensor  # (tile_m, tile_n, 1), or transposed
    lse: cute.Tensor  # (tile_m, stage)
    minus_d: cute.Tensor  # (tile_m, stage)
    dk: cute.Tensor  # (tile_n, head_dim)
    dv: cute.Tensor  # (tile_n, head_dim_v)
    spilled: Any  # Int64, see SPILLED; None if streamed
    scales: ScaleStorage | None = None

    def number(self, name: str) -> cute.Tensor:
        """A spilled number as a tensor (1,)."""
        return cute.make_tensor(self.spilled.iterator + SPILLED.index(name), cute.make_layout(1))

    def reload_int(self, name: str) -> Int32:
        """Read a spilled 32-bit number."""
        return Int32(self.number(name)[0])

    def spill(self, **numbers: Int64 | Int32) -> None:
        """Store CTA-uniform numbers, by all threads. The barrier keeps the 64-bit copies out of registers."""
        for name, number in numbers.items():
            self.spilled[SPILLED.index(name)] = Int64(optimization_barrier(number))
