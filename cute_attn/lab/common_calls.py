"""The kernels that common calls launch, for bundles. They are chosen as the calls' plans would, but without a GPU.

These are common: bf16 and fp16; head dims 64, 96, 128 and 256; full, causal and window masks; sequences batched with
one length or packed; any lengths; 1, 4 or 8 query heads per key head; forward, backward, attention with a cache whose
lengths are given, contiguous or in pages of 16, 64 or 256 rows, and new rows with any rotary embedding; and, on Hopper,
latent attention with such a cache, full or causal, by 8 to 128 query heads. Tiles depend on lengths, heads and numbers
of sequences, which are tried on grids. Finer grids find no other tiles.
"""

import importlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cute_attn import kernels as folder
from cute_attn.compiler import registry
from cute_attn.compiler.compiled import Request
from cute_attn.host.backward import kernels_of
from cute_attn.kernels.backward_sm80.heuristics import in_passes
from cute_attn.tiles import MEASURED, BackwardSm80Tile, first_that_fits
from cute_attn.tiles.inference import MAX_PARTIALS, CacheCall, CombineTile
from cute_attn.traits import ROTARY, Traits

DTYPES = ("bf16", "fp16")
HEAD_DIMS = (64, 96, 128, 256)
MASKS = ("", "causal", "window")
GROUPS = (1, 4, 8)
PAGE_SIZES = (16, 64, 256)
LATENT = (576, 512)
"""Head dims of latent attention's keys and values."""
LATENT_GROUPS = (8, 16, 32, 64, 128)
PROCESSORS = {"sm80": 108, "sm90": 132}
"""Multiprocessors of an A100, and of an H100 SXM or an H200."""

Features = dict[str, Any]
_CACHES: tuple[Features, ...] = ({"seqused_k": True}, {"seqused_k": True, "paged": True})
_QUERIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 8192)
_KEYS = (64, 80, 96, 128, 257, 288, 384, 512, 1024, 2048, 16384)
_PAIRS = (1, 16, 64, 128, 264, 512, 1024)
"""Numbers of sequences times query heads."""
_WINDOWS = (128, 512, 1024, 4096)
_PLANES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
"""Numbers of sequences times key heads of caches with few keys; 0 stands for many keys."""


def kernels(target: str) -> list[Request]:
    """The kernels that common calls launch on one of ``PROCESSORS``, each once."""
    found: dict[tuple[Traits, Any], None] = {}
    for head_dim, mask, varlen in itertools.product(HEAD_DIMS, MASKS, (False, True)):
        found |= dict.fromkeys(_forward_and_backward(head_dim, mask, varlen, target))
        found |= dict.fromkeys(_cached(head_dim, mask, varlen, target))
    arch = registry.generations(target)[0]
    latent = arch == "sm90"  # the Ampere kernel loads keys and values, wherever these are
    for mask, varlen in itertools.product(("", "causal"), (False, True) if latent else ()):
        plain = Traits("kvcache", arch, "bf16", *LATENT, mask=mask, varlen=varlen, latent=True)
        found |= dict.fromkeys(_of_cache(plain, _CACHES, LATENT_GROUPS, target))
    for head_dim in HEAD_DIMS:
        found |= dict.fromkeys(_appending(head_dim, target))
    for head_dim in (*HEAD_DIMS, *LATENT[1:]) if latent else HEAD_DIMS:
        merging = Traits("combine", arch, "bf16", head_dim)
        tiles = (CombineTile.of(splits, eager=True) for splits in range(2, MAX_PARTIALS + 1))
        found |= dict.fromkeys((merging, tile.for_head_dim(head_dim)) for tile in tiles)
    return [(replace(traits, dtype=dtype), tile, target) for dtype in DTYPES for traits, tile in found]


def everything(targets: Iterable[str]) -> list[Request]:
    """The kernels of a full bundle for these targets: :func:`kernels`, :func:`rows`, and each feature of the defaults.

    Targets outside ``PROCESSORS`` have no common calls. A backward kernel comes with the others that its calls launch.
    """
    groups = []
    for target in targets:
        groups.append(kernels(target) if target in PROCESSORS else [])
        groups += [with_its_parts(traits, None, on) for traits, on in registry.defaults_on(target)]
        groups += [with_its_parts(*row) for row in rows(target)]
    return distinct(groups)


def with_its_parts(traits: Traits, tile: Any, target: str) -> list[Request]:
    """The kernel of these traits; for a backward, all kernels that its calls launch. tile: a tile, its text or None."""
    kernel = registry.lookup(traits, tile, target)
    if traits.op != "backward":
        return [(traits, kernel.tile, target)]
    beside = [one for lse_grad in (False, True) for one in kernels_of(kernel, lse_grad=lse_grad)]
    return [(part, own or registry.lookup(part, None, target).tile, target) for part, own in beside]


def distinct(groups: Iterable[list[Request]]) -> list[Request]:
    """The kernels of all groups, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def rows(target: str) -> Iterator[tuple[Traits, Any, str]]:
    """Yield, for each table row built or measured on ``target``, its kernel, unless that has users' functions."""
    for path in sorted(Path(folder.__file__).parent.glob("*/tiles.csv")):
        table = importlib.import_module(f"cute_attn.kernels.{path.parent.name}.heuristics").TABLE
        for row in table.rows:
            name, on = _evidence(row, path.parent.name)
            traits = Traits.parse(name) if on == target else None
            if traits is not None and not traits.epilogues:
                tiles = in_passes(row.tile, traits) if isinstance(row.tile, BackwardSm80Tile) else [row.tile]
                tile = first_that_fits(tiles, traits, target)
                if tile.reject(traits, target) is None:  # not every head dim of a row's range fits
                    yield traits, tile, target


def _evidence(row: Any, folder: str) -> tuple[str, str]:
    """The kernel's name and the target with which a row was built, or measured; empty for calls with a cache."""
    if row.built:
        name, _, on = row.built.partition(": ")[0].partition(" on ")
        return name, on
    op, *words = row.measured.partition(" on ")[2].partition(";")[0].split("-")
    if op not in ("fwd", "bwd"):
        return "", ""
    kernel = {"fp32_sm80": "forward-sm80:terms", "head_dim_512_sm90": "forward-sm90"}.get(folder)
    features = [word for word in words[2:] if not re.fullmatch(r"[bsh]\d.*|varlen\d.*", word)]
    return "-".join([kernel or folder.replace("_", "-"), *words[:2], *features]), MEASURED


def _forward_and_backward(
    head_dim: int, mask: str, varlen: bool, target: str
) -> Iterator[tuple[Traits, Any]]:
    windows = _WINDOWS if mask == "window" else (0,)
    pairs = (None,) if varlen else _PAIRS
    arch = registry.generations(target)[0]
    plain = (Traits(op, arch, "bf16", head_dim, mask=mask, varlen=varlen) for op in ("forward", "backward"))
    forward, backward = map(registry.lookup, plain)
    for call in itertools.product(_QUERIES, _KEYS, GROUPS, (target,), pairs, windows):
        yield forward.traits, forward.for_lengths(*call).tile
    for call in itertools.product(_QUERIES, _KEYS, (1,), (target,), (None,), windows):
        kernel = backward.for_lengths(*call)
        found = [kernel]
        if arch == "sm90":
            found += [kernel.storing_dq(*call[:2], 1, n, PROCESSORS[target]) for n in (1, PROCESSORS[target])]
        for one in found:
            yield from kernels_of(one)
            yield from kernels_of(one, lse_grad=True)


def _cached(head_dim: int, mask: str, varlen: bool, target: str) -> Iterator[tuple[Traits, Any]]:
    """Yield kernels for a cache; on Hopper also for calls without one whose few queries leave multiprocessors idle."""
    arch = registry.generations(target)[0]
    without: Features = {"varlen_k": True} if varlen else {}
    plain = Traits("kvcache", arch, "bf16", head_dim, mask=mask, varlen=varlen)
    yield from _of_cache(plain, (*_CACHES, without) if arch == "sm90" else _CACHES, GROUPS, target)


def _of_cache(
    plain: Traits, features: Iterable[Features], groups: Iterable[int], target: str
) -> Iterator[tuple[Traits, Any]]:
    """Yield the kernels of ``plain`` with each of the ``features``, for each way to split keys."""
    for extra in features:
        sizes = PAGE_SIZES if "paged" in extra else (0,)
        calls = [
            CacheCall(n, 1 << 16, group, size, planes=planes)
            for n, group, size, planes in itertools.product(_QUERIES, groups, sizes, _PLANES)
        ]
        for split in ("", "fixed"):
            traits = replace(plain, split=split, **extra)
            kernel = registry.lookup(traits, None, target)
            yield from (
                (traits, tile)
                for tile in dict.fromkeys(kernel.for_cache(call, target).tile for call in calls)
            )


def _appending(head_dim: int, target: str) -> Iterator[tuple[Traits, Any]]:
    """Yield kernels that append new rows, with and without queries to rotate."""
    for rotary, packed, paged in itertools.product(("", *ROTARY), (False, True), (False, True)):
        every: list[dict[str, Any]] = [{}, {"rotate_q": True}, {"rotate_q": True, "varlen": True}]
        for queries in every if rotary else every[:1]:
            own = {"rotary": rotary, "varlen_new": packed, "paged": paged, **queries}
            traits = Traits("append", registry.generations(target)[0], "bf16", head_dim, **own)
            yield traits, registry.lookup(traits, None, target).tile
