"""Bank conflicts of the copies between shared memory and registers or global memory, from a kernel's own methods.

A subclass that overrides a layout or a copy shows its changes. TMA and wgmma are not listed: their swizzles have no
conflicts by construction. Nor are accesses whose addresses a kernel computes by itself: row statistics, a bias.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import layouts
from cute_attn.tiles import padded


@dataclass(frozen=True)
class SmemCopy:
    """A copy with a side in shared memory.

    Attributes:
        name: what is copied, and by which instruction.
        opcode: of its machine instructions.
        copy, layout: functions that build the tiled copy and the shared-memory layout within a trace.
        side: the side in shared memory, "src" or "dst"; None where the instruction has but one.
    """

    name: str
    opcode: str
    copy: Callable[[], Any]
    layout: Callable[[], Any]
    side: str | None = None


@dataclass(frozen=True)
class Conflicts:
    """A copy of one whole tile: shared-memory wavefronts, those it would take without conflicts, conflict ways.

    ``reason`` says why they could not be counted, or is "".
    """

    name: str
    opcode: str
    wavefronts: int
    minimum: int
    ways: int
    reason: str = ""


def conflicts(kernel: Any) -> tuple[Conflicts, ...]:
    """Every copy of a kernel with its bank conflicts; none for a kernel whose copies are not known here."""
    from layouts.banks import bank_conflicts

    found = []
    for one in copies(kernel):
        dtype = kernel.operand_dtype if hasattr(kernel, "operand_dtype") else kernel.dtype
        try:
            counted = bank_conflicts(one.copy, one.layout, dtype, side=one.side)
        except ValueError as error:  # a user's layout and copy may not divide
            found.append(Conflicts(one.name, one.opcode, 0, 0, 0, str(error)))
            continue
        found.append(Conflicts(one.name, one.opcode, counted.wavefronts, counted.minimum, counted.ways))
    return tuple(found)


def copies(kernel: Any) -> Iterator[SmemCopy]:
    """The copies to and from shared memory of one of the package's kernels, or of a subclass; else nothing."""
    from cute_attn.compiler.registry import KERNELS

    op, arch = kernel.traits.op, kernel.traits.arch
    of = _COPIES.get((op, arch))
    return of(kernel) if of is not None and isinstance(kernel, KERNELS[op, arch, ""]) else iter(())


def _ldmatrix(
    name: str, operand: str, mma: Callable[[], Any], layout: Callable[[], Any], dtype: Any, transpose: bool
) -> SmemCopy:
    """ldmatrix of operand A or B; ``transpose``: of the transposed tile."""
    make = layouts.ldmatrix_copy_a if operand == "A" else layouts.ldmatrix_copy_b
    tile = (lambda: layouts.transposed(layout())) if transpose else layout
    what = f"{name} by ldmatrix" + (".trans" if transpose else "")
    return SmemCopy(what, "LDSM", lambda: make(mma(), dtype, transpose), tile)


def _forward_sm80(kernel: Any) -> Iterator[SmemCopy]:
    tile, d, dv = kernel.tile, kernel.traits.head_dim, kernel.traits.head_dim_v
    mma, dtype = kernel.tiled_mma, kernel.dtype
    smem_q, smem_k, smem_v, smem_o = (
        partial(kernel.smem_layout, rows, dim)
        for rows, dim in ((tile.tile_m, d), (tile.tile_n, d), (tile.tile_n, dv), (tile.tile_m, dv))
    )
    yield SmemCopy("K by cp.async", "LDGSTS", lambda: kernel.gmem_load(d), smem_k)
    yield SmemCopy("V by cp.async", "LDGSTS", lambda: kernel.gmem_load(dv), smem_v)
    yield _ldmatrix("Q", "A", mma, smem_q, dtype, False)
    yield _ldmatrix("K", "B", mma, smem_k, dtype, False)
    yield _ldmatrix("V", "B", mma, smem_v, dtype, True)
    yield SmemCopy("O to shared memory", "STS", lambda: _store(mma(), dtype, "sm80"), smem_o, "dst")
    yield SmemCopy("O from shared memory", "LDS", lambda: kernel.gmem_store(dv), smem_o, "src")


def _forward_sm90(kernel: Any) -> Iterator[SmemCopy]:
    tile, d, columns, dtype = kernel.tile, kernel.traits.head_dim, kernel.output_columns, kernel.dtype
    if tile.q_in_regs:
        yield _ldmatrix("Q", "A", kernel.mma_qk, lambda: kernel.smem_layout(tile.tile_m, d), dtype, False)
    if kernel.divides_columns:
        yield SmemCopy(
            "P to shared memory",
            "STSM",
            lambda: _store(kernel.mma_qk(), dtype, "sm90"),
            lambda: kernel.probabilities_layout(1),
        )

    def one_warpgroup() -> Any:
        return layouts.tiled_mma_sm90(dtype, 64, columns, warpgroups=1, a_source="rmem", b_major="mn")

    yield SmemCopy(
        "O to shared memory",
        "STSM",
        lambda: _store(one_warpgroup(), dtype, "sm90"),
        lambda: kernel.smem_layout(64, columns),
    )


def _backward_sm80(kernel: Any) -> Iterator[SmemCopy]:
    tile, dtype = kernel.tile, kernel.operand_dtype
    d, dv = padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)
    ds_shape = (tile.tile_n, tile.tile_m) if tile.p_in_regs else (tile.tile_m, tile.tile_n)
    smem_k, smem_v, smem_q, smem_do, smem_ds = (
        partial(kernel.smem_layout, *shape)
        for shape in ((tile.tile_n, d), (tile.tile_n, dv), (tile.queries, d), (tile.queries, dv), ds_shape)
    )
    queries, keys = ("B", "A") if tile.p_in_regs else ("A", "B")
    for name, dim, layout in (("Q", d, smem_q), ("dO", dv, smem_do)):
        yield SmemCopy(f"{name} by cp.async", "LDGSTS", partial(kernel.gmem_copy, dim, True), layout)
        yield _ldmatrix(name, queries, kernel.mma_sdp, layout, dtype, False)
        yield _ldmatrix(name, "B", kernel.mma_dkv, layout, dtype, True)
    yield _ldmatrix("K", keys, kernel.mma_sdp, smem_k, dtype, False)
    yield _ldmatrix("V", keys, kernel.mma_sdp, smem_v, dtype, False)
    yield _ldmatrix("K", "B", kernel.mma_dq, smem_k, dtype, True)
    yield _ldmatrix("dS", "A", kernel.mma_dq, smem_ds, dtype, tile.p_in_regs)
    if not tile.p_in_regs:
        yield _ldmatrix("dS", "A", kernel.mma_dkv, smem_ds, dtype, True)
    store = SmemCopy(
        "dS to shared memory", "STS", lambda: _store(kernel.mma_sdp(), dtype, "sm80"), smem_ds, "dst"
    )
    yield store


def _backward_sm90(kernel: Any) -> Iterator[SmemCopy]:
    tile = kernel.tile

    def seen(layout: Callable[[], Any], transpose: bool) -> Callable[[], Any]:
        return (lambda: layouts.transposed(layout())) if transpose else layout

    yield SmemCopy(
        "dS to shared memory", "STSM", kernel.scores_store, seen(kernel.layout_ds, not tile.p_in_smem)
    )
    for name, dim, layout in zip(("dK", "dV"), kernel.dims, (kernel.layout_k, kernel.layout_v), strict=True):
        yield SmemCopy(
            f"{name} to shared memory",
            "STSM",
            partial(kernel.gradient_store, dim),
            seen(layout, tile.dkv_transposed),
        )


def _convert(kernel: Any) -> Iterator[SmemCopy]:
    side = None if kernel.traits.arch == "sm90" else "dst"
    opcode = "STS" if side else "STSM"
    yield SmemCopy(
        "dQ to shared memory", opcode, lambda: kernel.store_copy(kernel.tiled_mma()), kernel.smem_layout, side
    )


def _store(mma: Any, dtype: Any, arch: str) -> Any:
    return layouts.store_copy_c(mma, dtype, arch)


_COPIES: dict[tuple[str, str], Callable[[Any], Iterator[SmemCopy]]] = {
    ("forward", "sm80"): _forward_sm80,
    ("forward", "sm90"): _forward_sm90,
    ("backward", "sm80"): _backward_sm80,
    ("backward", "sm90"): _backward_sm90,
    ("backward_convert", "sm80"): _convert,
    ("backward_convert", "sm90"): _convert,
}
