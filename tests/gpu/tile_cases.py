"""(tile, case) pairs of GPU tests: all but those listed as declined."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from cute_attn import Unsupported, compiler
from cute_attn.compiler import registry
from tests.cases import FOR_EVERY_TILE
from tests.problem import Case

Declined = Mapping[str, Sequence[str]]
"""Tiles, as text, with the names of the cases that each is known to decline."""


def target() -> str:
    """The GPU that is present, or the one that the lists are for."""
    return compiler.default_target("sm80") if torch.cuda.is_available() else "sm90"


def reason_to_decline(op: str, arch: str, tile: str, case: Case, target: str) -> str | None:
    """The reason for which a tile declines a case, or None."""
    try:
        registry.lookup(case.traits(arch, op), tile, target)
    except Unsupported as error:
        return str(error)
    return None


def tile_cases(op: str, tiles: Mapping[str, Declined]) -> list[Any]:
    """(arch, tile, case) for each tile and case of ``tiles``; fails if a case is declined but not listed.

    Cases that only a smaller GPU's shared memory declines are skipped.
    """
    params, on = [], target()
    for arch in tiles:
        for tile, declined in tiles[arch].items():
            for case in FOR_EVERY_TILE:
                if case.name in declined:
                    continue
                reason = reason_to_decline(op, arch, tile, case, on) if on != "sm90" else None
                small = bool(reason) and "bytes of shared memory" in str(reason)
                marks = [pytest.mark.skip(reason=str(reason))] if small else []
                params.append(pytest.param(arch, tile, case, id=f"{arch}-{tile}-{case.name}", marks=marks))
    return params


def wrongly_listed(op: str, tiles: Mapping[str, Declined]) -> list[str]:
    """Differences between the lists and the tiles' refusals on the largest target; needs no GPU."""
    return [
        f"{op} {arch} {tile} {'declines' if reason else 'takes'} {case.name}: {reason}"
        for arch in tiles
        for tile, declined in tiles[arch].items()
        for case in FOR_EVERY_TILE
        if bool(reason := reason_to_decline(op, arch, tile, case, "sm90")) != (case.name in declined)
    ]
