"""Instruction counts of one main loop step, derived from the tile. They identify the step in the machine code."""

from dataclasses import dataclass

Loops = tuple[tuple[int, int], ...]
PRODUCTS_OF = {1: 1, 2: 3}
"""Numbers of an operand, which are a value and perhaps its tangent -> matrix products for each of a forward's."""


@dataclass(frozen=True)
class StepContent:
    """Instructions of one warp in a steady step: one query block times one key block that needs no mask.

    Attributes:
        mma: matrix instructions: mma.sync of 16 x 8 x 16 (16 x 8 x 8 for tf32), or wgmma of 64 x n x 16, issued by four
            warps together.
        exp2: exponentials (MUFU.EX2) of the softmax and of softcap, without those of users' epilogues.
        elements: scores that a thread holds.
        warps: warps of a CTA that run such steps.
        loops: products that are loops within the step, in order: (matrix instructions per iteration, iterations). A
            product with one iteration is not a loop.
        async_bytes: bytes that TMA and bulk reductions write to or read from shared memory in a step.
        added_bytes: bytes that bulk reductions add to global memory in a step.
        other_wgmma: (count, n) of wgmma of 64 x n x 16, with both operands in shared memory, that the CTA's other
            warpgroups issue in a step.
        ctas: CTAs of a cluster that compute the same scores.
    """

    mma: int
    exp2: int
    elements: int
    warps: int
    loops: Loops = ()
    async_bytes: int = 0
    added_bytes: int = 0
    other_wgmma: tuple[int, int] = (0, 0)
    ctas: int = 1


def mma_sync_count(m: int, n: int, k: int, warps: int, depth: int = 16) -> int:
    """Number of mma.sync, 16 x 8 x depth, that each of ``warps`` warps issues for an (m, k) by (k, n) product."""
    return m * n * k // (16 * 8 * depth * warps)


def wgmma_count(m: int, n: int, k: int, warpgroups: int, warpgroups_n: int = 1) -> int:
    """Number of wgmma that each warpgroup issues for an (m, k) by (k, n) product; ``warpgroups_n`` of them divide n."""
    widest = 256
    rows = 64 * (warpgroups // warpgroups_n)
    return m // rows * (k // 16) * -(-n // (warpgroups_n * widest))


def product_loop(mma: int, steps: int, at_once: int) -> Loops:
    """The ``loops`` entry of a product: ``mma`` instructions over ``steps`` along K, ``at_once`` per iteration."""
    iterations = steps // at_once
    return ((mma // iterations, iterations),) if iterations > 1 else ()
