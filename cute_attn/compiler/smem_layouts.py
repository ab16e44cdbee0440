"""The shared-memory layouts of a kernel, from its own methods: what a subclass overrides is drawn and checked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cute_attn.tiles import padded


@dataclass(frozen=True)
class SmemLayout:
    """The layout of an area of shared memory.

    Attributes:
        make: builds it in a trace.
        dtype: of its elements.
        copies: how many of it the area holds.
    """

    make: Callable[[], Any]
    dtype: Any
    copies: int = 1


def smem_layouts(kernel: Any) -> dict[str, SmemLayout]:
    """Name of an area of ``tile.smem_areas`` -> its layout, of those that are not empty and have a layout method."""
    from cute_attn.compiler import registry

    traits = kernel.traits
    of = _LAYOUTS.get((traits.op, traits.arch))
    if of is None or not isinstance(kernel, registry.KERNELS[traits.op, traits.arch, ""]):
        return {}
    areas = kernel.tile.smem_areas(traits)
    return {name: layout for name, layout in of(kernel).items() if areas[name][0] < areas[name][1]}


def smem_reasons(kernel: Any) -> Iterator[str]:
    """Why a kernel's layouts cannot be right.

    Two elements in one place, more memory than its tile has for it, or on sm90 a layout that is not swizzled as TMA and
    wgmma need it: a ``ComposedLayout`` of a swizzle over a plain layout, such as ``layouts.wgmma_smem_layout`` makes.
    """
    from layouts.model import read_smem, trace

    found = smem_layouts(kernel)
    if not found:
        return
    areas = kernel.tile.smem_areas(kernel.traits)
    maps = trace(lambda: {name: read_smem(layout.make(), layout.dtype) for name, layout in found.items()})
    for name, layout in found.items():
        offsets = maps[name].offsets
        if kernel.traits.arch == "sm90" and maps[name].swizzle is None:
            yield (
                f"the layout of {name} in shared memory is {maps[name].text}; accepted on sm90: a swizzle over a plain "
                "layout, as layouts.wgmma_smem_layout makes it, in which TMA writes and wgmma reads"
            )
        clash = _same_place(offsets)
        if clash:
            yield f"the layout of {name} in shared memory has elements {clash[0]} and {clash[1]} in one place"
        begin, end = areas[name]
        taken = layout.copies * (int(offsets.max()) + 1) * layout.dtype.width // 8
        if taken > end - begin or offsets.min() < 0:
            yield (
                f"the layout of {name} takes {taken:,} bytes of shared memory; its tile's smem_areas has "
                f"{end - begin:,} for it"
            )


def _same_place(offsets: Any) -> tuple[tuple[int, ...], ...]:
    """The coordinates of two elements with one offset, or ()."""
    import numpy as np

    flat = offsets.ravel()
    order = np.argsort(flat, kind="stable")
    (again,) = np.nonzero(np.diff(flat[order]) == 0)
    if not again.size:
        return ()
    pair = order[again[0] : again[0] + 2]
    return tuple(tuple(int(i) for i in np.unravel_index(one, offsets.shape)) for one in pair)


def _forward_sm80(kernel: Any) -> dict[str, SmemLayout]:
    tile, dtype, (d, dv) = kernel.tile, kernel.dtype, kernel.row_widths
    rows, stages, groups = tile.group_keys, tile.num_stages, tile.key_groups
    return {
        "q": SmemLayout(lambda: kernel.smem_layout(tile.tile_m, d), dtype),
        "k": SmemLayout(lambda: kernel.smem_layout(rows, d, stages), dtype, groups),
        "v": SmemLayout(lambda: kernel.smem_layout(rows, dv, stages), dtype, groups),
        "o": SmemLayout(lambda: kernel.smem_layout(tile.tile_m, dv), dtype),
    }


def _forward_sm90(kernel: Any) -> dict[str, SmemLayout]:
    traits, tile, dtype = kernel.traits, kernel.tile, kernel.dtype
    d, dv, stages, groups = traits.head_dim, traits.head_dim_v, tile.num_stages, tile.warpgroups
    found = {"k": SmemLayout(lambda: kernel.smem_layout(tile.tile_n, d, stages), dtype)}
    if kernel.divides_columns:
        return found | {
            "q": SmemLayout(lambda: kernel.smem_layout(tile.tile_m, d, 1), dtype),
            "v": SmemLayout(lambda: kernel.values_layout(stages), dtype),
            "p": SmemLayout(lambda: kernel.probabilities_layout(tile.p_stages), dtype),
        }
    found |= {
        "q": SmemLayout(lambda: kernel.smem_layout(64, d, groups), dtype),
        "v": SmemLayout(lambda: kernel.smem_layout(tile.tile_n, dv, stages), dtype),
        "o": SmemLayout(lambda: kernel.smem_layout(64, dv, groups), dtype),
    }
    if kernel.loads_bias_by_tma:
        found["bias"] = SmemLayout(lambda: kernel.bias_layout(tile.bias_stages), dtype, groups)
    return found


def _backward_sm80(kernel: Any) -> dict[str, SmemLayout]:
    tile, terms, dtype = kernel.tile, kernel.stored_terms, kernel.operand_dtype
    d, dv = padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)

    def operand(rows: int, cols: int, stages: int = 1) -> SmemLayout:
        return SmemLayout(lambda: kernel.smem_layout(rows, cols, stages * terms), dtype)

    scores = operand(tile.tile_m, tile.tile_n)
    if tile.columns:
        chunk = tile.chunk(kernel.traits)
        stages = {"queries": operand(tile.tile_m, chunk, 2), "keys": operand(tile.tile_n, chunk, 2)}
        return stages | {"p": scores, "ds": scores}
    return {
        "k": operand(tile.tile_n, d),
        "v": operand(tile.tile_n, dv),
        "q": operand(tile.queries, d, tile.pieces * tile.stages_q),
        "do": operand(tile.queries, dv, tile.pieces * tile.stages_do),
        "p": scores,
        "ds": operand(*kernel.products.scores_plane),
        "dk": SmemLayout(lambda: kernel.gradient_layout(d), kernel.dtype),
        "dv": SmemLayout(lambda: kernel.gradient_layout(dv), kernel.dtype),
    }


def _backward_sm90(kernel: Any) -> dict[str, SmemLayout]:
    of = {"k": "k", "v": "v", "q": "q", "do": "do", "ds": "ds", "p": "ds", "dk": "k"}
    of |= {"bias": "bias"} if kernel.loads_bias_by_tma else {}
    return {name: SmemLayout(getattr(kernel, f"layout_{which}"), kernel.dtype) for name, which in of.items()}


_LAYOUTS: dict[tuple[str, str], Callable[[Any], dict[str, SmemLayout]]] = {
    ("forward", "sm80"): _forward_sm80,
    ("kvcache", "sm80"): _forward_sm80,
    ("forward", "sm90"): _forward_sm90,
    ("kvcache", "sm90"): _forward_sm90,
    ("backward", "sm80"): _backward_sm80,
    ("backward", "sm90"): _backward_sm90,
}
