"""Fixtures of the tests without a GPU, which run in parallel and share built kernels.

Kernels lie in ``build/kernels``, or where CUTE_ATTN_CACHE_DIR says. Each is built by the first test that asks for it,
and loaded by all others, by scripts that they start and by later runs, as long as its sources do not change. Building
all of them first would gain nothing: there are as many test processes as cores.
"""

import gc
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest

# Read when torch is loaded. Problems are too small for its threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
KERNELS = Path(__file__).parents[2] / "build" / "kernels"
os.environ.setdefault("CUTE_ATTN_CACHE_DIR", str(KERNELS))

# No test looks at a clock: others may keep the machine busy.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

gc.disable()  # until all tests are collected: a quarter of that time would go into looking for garbage

A_WEEK = 7 * 24 * 3600  # in seconds; every version of the sources leaves 60 MB there


def pytest_addoption(parser):
    parser.addoption(
        "--every-default", action="store_true", help="build every default kernel, not only a cover of them"
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        help="of the slow tests only every N-th, beginning with the K-th: 1/4 is a quarter",
    )


def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part", default=None)
    if part:
        first, parts = map(int, part.split("/"))
        slow = [item for item in items if item.get_closest_marker("slow")]
        others = {item for i, item in enumerate(slow) if i % parts != first - 1}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # once, and not in each of the processes that run tests
        from cute_attn.compiler.cache import DiskCache

        DiskCache(KERNELS).prune(older_than=A_WEEK)


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    for mark in item.iter_markers("doors"):
        (module,) = mark.args
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:  # a folder of that name is no library
            pytest.skip(f"no {module}, which `make test-doors` installs")


@pytest.fixture(autouse=True)
def search_path():
    """Restore sys.path after a test: `cute-attn run` in the test's process adds its program's folder."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session", autouse=True)
def quick_builds():
    """See ``tests/quick_builds.py``."""
    from tests import quick_builds

    with pytest.MonkeyPatch.context() as patch:
        quick_builds.apply(patch.setattr)
        yield
