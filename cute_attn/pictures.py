"""Pictures of a kernel's layouts, copies and MMAs, drawn from its methods: a variant's show its changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_attn.tiles import padded

Things = dict[str, Callable[[], Any]]
"""What to draw: by name the function that builds the layout, copy or MMA in a trace. TMA copies have no threads."""


def pictures(kernel: Any, folder: Path, suffix: str = ".png") -> Iterator[Path]:
    """Draw the shared-memory layouts, copies and MMAs of a kernel; yields each file when written.

    Args:
        kernel: a kernel object, from ``registry.lookup``.
        folder: where the files go; it is made.
        suffix: ".png" or ".svg".

    Raises:
        ValueError: the kernel has none.
    """
    from layouts.show import show

    traits = kernel.traits
    things = _THINGS.get((traits.op, traits.arch))
    if things is None:
        drawn = ", ".join(f"{op}-{arch}" for op, arch in _THINGS)
        raise ValueError(f"{traits} has no shared-memory layout and no MMA to draw; accepted: {drawn}")
    folder.mkdir(parents=True, exist_ok=True)
    base = traits.name.replace(":", "_")
    for what, thing in things(kernel).items():
        path = folder / f"{base}-{what}{suffix}"
        yield show(thing, path, dtype=kernel.dtype, title=f"{traits.name}: {what}")


def _forward_sm80(kernel: Any) -> Things:
    traits = kernel.traits
    return _forward_operands(kernel) | {
        "copy-gmem-to-smem": lambda: kernel.gmem_load(traits.head_dim),
        "copy-smem-to-gmem": lambda: kernel.gmem_store(traits.head_dim_v),
        "mma": kernel.tiled_mma,
    }


def _forward_sm90(kernel: Any) -> Things:
    bias = (
        {"smem-bias": lambda: kernel.bias_layout(kernel.tile.bias_stages)} if kernel.loads_bias_by_tma else {}
    )
    others = {"copy-smem-to-gmem": kernel.gmem_store, "mma-qk": kernel.mma_qk, "mma-pv": kernel.mma_pv}
    if kernel.divides_columns:
        others["smem-v"] = lambda: kernel.values_layout(kernel.tile.num_stages)
        others["smem-p"] = lambda: kernel.probabilities_layout(kernel.tile.p_stages)
    return _forward_operands(kernel) | bias | others


def _softmax(kernel: Any) -> Things:
    return {
        "smem-q": lambda: kernel.smem_layout(kernel.tile.tile_m),
        "smem-k": lambda: kernel.smem_layout(kernel.tile.tile_n),
        "copy-gmem-to-smem": kernel.gmem_load,
        "mma": kernel.tiled_mma,
    }


def _forward_operands(kernel: Any) -> Things:
    traits, tile = kernel.traits, kernel.tile
    return {
        "smem-q": lambda: kernel.smem_layout(tile.tile_m, traits.head_dim),
        "smem-k": lambda: kernel.smem_layout(tile.tile_n, traits.head_dim, tile.num_stages),
        "smem-v": lambda: kernel.smem_layout(tile.tile_n, traits.head_dim_v, tile.num_stages),
    }


def _backward_sm80(kernel: Any) -> Things:
    tile = kernel.tile
    d, dv = padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)
    ds_shape = (tile.tile_n, tile.tile_m) if tile.p_in_regs else (tile.tile_m, tile.tile_n)
    return {
        "smem-k": lambda: kernel.smem_layout(tile.tile_n, d),
        "smem-v": lambda: kernel.smem_layout(tile.tile_n, dv),
        "smem-q": lambda: kernel.smem_layout(tile.queries, d, tile.pieces * tile.stages_q),
        "smem-do": lambda: kernel.smem_layout(tile.queries, dv, tile.pieces * tile.stages_do),
        "smem-ds": lambda: kernel.smem_layout(*ds_shape),
        "copy-gmem-to-smem": lambda: kernel.gmem_copy(d, True),
        "mma-sdp": kernel.mma_sdp,
        "mma-dkv": kernel.mma_dkv,
        "mma-dq": kernel.mma_dq,
    }


def _backward_sm90(kernel: Any) -> Things:
    d, dv = kernel.dims
    return {
        "smem-k": kernel.layout_k,
        "smem-v": kernel.layout_v,
        "smem-q": kernel.layout_q,
        "smem-do": kernel.layout_do,
        "smem-ds": kernel.layout_ds,
        "mma-scores": kernel.mma_scores,
        "mma-dk": lambda: kernel.mma_dkv(d),
        "mma-dv": lambda: kernel.mma_dkv(dv),
        "mma-dq": kernel.mma_dq,
    }


def _convert(kernel: Any) -> Things:
    return {
        "smem-dq": kernel.smem_layout,
        "copy-registers-to-smem": lambda: kernel.store_copy(kernel.tiled_mma()),
        "mma-dq": kernel.tiled_mma,
    }


_THINGS: dict[tuple[str, str], Callable[[Any], Things]] = {
    ("forward", "sm80"): _forward_sm80,
    ("forward", "sm90"): _forward_sm90,
    ("softmax", "sm80"): _softmax,
    ("backward", "sm80"): _backward_sm80,
    ("backward", "sm90"): _backward_sm90,
    ("backward_convert", "sm80"): _convert,
    ("backward_convert", "sm90"): _convert,
}
