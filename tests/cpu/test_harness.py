"""The tests' own tools: the cover of all default kernels, quick builds, forked processes."""

from dataclasses import asdict
from itertools import product

import pytest
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl
from cutlass.cutlass_dsl import tvm_ffi_provider

from cute_attn import compiler
from cute_attn.compiler import compiled
from tests import quick_builds, toy
from tests.defaults import STORAGE, cover, demands, representative

# ---- defaults ----


def test_the_cover_meets_the_demands_of_all_defaults():
    defaults, chosen = representative(), cover()
    assert set().union(*map(demands, chosen)) == set().union(*map(demands, defaults))
    assert len(chosen) == len(set(chosen)) < len(defaults)
    tiles, covered = (
        {(d.traits.op, d.traits.arch, without_storage(d.kernel.tile)) for d in some if is_tight(d)}
        for some in (defaults, chosen)
    )
    assert tiles == covered and len(tiles) > 40
    common = {f"{op}-{arch}-bf16-d{d}-causal-{arch}" for op, arch, d in product(OPS, ARCHS, (64, 128))}
    assert common <= set(map(str, chosen))
    for default in chosen:
        others = set().union(*(demands(other) for other in chosen if other != default))
        assert demands(default) - others or str(default) in common


OPS, ARCHS = ("forward", "backward"), ("sm80", "sm90")


def is_tight(default) -> bool:
    """Whether a kernel with products of 16 bits takes most of a thread's registers, as its tile estimates."""
    tile, traits = default.kernel.tile, default.traits
    of_hopper = {1: 255, 2: 240, 3: 160}.get(getattr(tile, "warpgroups", 0), 255)
    return traits.op in OPS and traits.dtype != "fp32" and tile.registers(traits) > 0.7 * of_hopper


def without_storage(tile):
    """A tile without what says where its data lies."""
    return tuple((name, value) for name, value in asdict(tile).items() if name not in STORAGE)


# ---- builds ----


@pytest.mark.parametrize(
    "name, tile", [(toy.NAME, "values=256"), ("backward_convert-sm80-bf16-d64", None)], ids=["spills", "real"]
)
@pytest.mark.filterwarnings("ignore::cute_attn.SpillWarning")
def test_quick_builds_yield_the_same_kernels(name, tile, fresh_cache, tmp_path, monkeypatch):
    quick = compiler.compile(name, tile, "sm90")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr(compiled, "_requests", {})
    monkeypatch.setattr(compiled, "_kernels", {})
    tracking = []

    def track(enable):
        tracking.append(enable)
        op._set_enable_frame_filtering(enable)

    monkeypatch.setattr(dsl, "_set_enable_frame_filtering", track)
    monkeypatch.setattr(tvm_ffi_provider, "_aot_support", quick_builds.EXPORTER)
    looked_at = []
    monkeypatch.setattr(op, "log", quick_builds.LOG)
    monkeypatch.setattr(op, "_pyir_auto_load_arg", lambda x: looked_at.append(x) or quick_builds.LOOK(x))
    slow = compiler.compile(name, tile, "sm90")
    op._set_enable_frame_filtering(False)
    assert tracking == [True] and looked_at and not quick.from_cache and not slow.from_cache
    assert (quick.cubin, quick.ptx) == (slow.cubin, slow.ptx)
    assert (quick.resources, quick.warnings) == (slow.resources, slow.warnings)
