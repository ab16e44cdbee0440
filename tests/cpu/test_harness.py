"""Quick builds yield the kernels that other builds yield."""

import pytest
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl
from cutlass.cutlass_dsl import tvm_ffi_provider

from cute_attn import compiler
from tests import quick_builds, toy
from tests.conftest import forget


@pytest.mark.parametrize(
    "name, tile", [(toy.NAME, "values=256"), ("backward_convert-sm80-bf16-d64", None)], ids=["spills", "real"]
)
@pytest.mark.filterwarnings("ignore::cute_attn.SpillWarning")
def test_quick_builds_yield_the_same_kernels(name, tile, fresh_cache, tmp_path, monkeypatch):
    quick = compiler.compile(name, tile, "sm90")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "another"))
    forget(monkeypatch)
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
