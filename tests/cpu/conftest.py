"""How the tests without a GPU run: side by side with others, and with kernels that are built once.

Kernels lie in ``build/kernels``, or where CUTE_ATTN_CACHE_DIR says. Each is built by the first test that asks for it,
and found by all others, by the scripts that they start and by the next run, as long as no source of it changes. A step
of its own that builds first would gain nothing: the tests' processes are as many as the cores.
"""

import os
from pathlib import Path

import pytest

# Torch reads this when it is loaded. Problems are so small that its threads would spend their time waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
KERNELS = Path(__file__).parents[2] / "build" / "kernels"
os.environ.setdefault("CUTE_ATTN_CACHE_DIR", str(KERNELS))

A_WEEK = 7 * 24 * 3600  # in seconds; every version of the sources leaves 60 MB there


def pytest_addoption(parser):
    parser.addoption(
        "--every-default", action="store_true", help="build every default kernel, not only a cover of them"
    )


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # once, and not in each of the processes that run tests
        from cute_attn.cache import DiskCache

        DiskCache(KERNELS).prune(older_than=A_WEEK)


@pytest.fixture(scope="session", autouse=True)
def no_source_locations():
    """Builds without the source line of each operation: to find them takes a fifth of a build, and no kernel has them.

    With ``remarks{ptx}`` the DSL looks for them as if for debugging. ``test_harness.py`` compares the kernels.
    """
    from cutlass.base_dsl import dsl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None)
        yield
