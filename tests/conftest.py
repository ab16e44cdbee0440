"""Fixtures for all tests; tests below ``gpu`` are skipped where there is no GPU."""

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def forget(monkeypatch):
    """Empty the compiler's memory, as in a new process."""
    from cute_attn.compiler import compiled

    monkeypatch.setattr(compiled, "_requests", {})
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(compiled, "_spilling", set())


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """The folder of an empty disk cache, with a compiler that has nothing in memory."""
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTE_ATTN_CACHE", raising=False)
    forget(monkeypatch)
    return tmp_path / "cache"
