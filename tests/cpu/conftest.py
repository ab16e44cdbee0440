"""How the tests without a GPU run: side by side with others, and with kernels that are built once.

Kernels lie in ``build/kernels``, or where CUTE_ATTN_CACHE_DIR says: a second run builds what has changed, and scripts
that a test starts find what another has built.
"""

import os
from pathlib import Path

import pytest

# Torch reads this when it is loaded. Problems are so small that its threads would spend their time waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUTE_ATTN_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "kernels"))


def pytest_addoption(parser):
    parser.addoption(
        "--every-default", action="store_true", help="build every default kernel, not only a cover of them"
    )


@pytest.fixture(scope="session", autouse=True)
def no_source_locations():
    """Builds without the source line of each operation: to find them takes a fifth of a build, and no kernel has them.

    With ``remarks{ptx}`` the DSL looks for them as if for debugging. ``test_harness.py`` compares the kernels.
    """
    from cutlass.base_dsl import dsl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None)
        yield
