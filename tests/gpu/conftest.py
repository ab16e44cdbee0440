"""GPU tests in two passes: first build every kernel that the chosen tests need, in parallel processes, then run."""

import math

import pytest
import torch
from torch import Tensor

from cute_attn import compiler, launch

GUARD = 4096


@pytest.fixture(scope="session", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """Kernels of all chosen tests that are parametrised by a case, an arch and perhaps a tile."""
    target = compiler.default_target("sm80")
    wanted = set()
    for item in request.session.items:
        chosen = getattr(item, "callspec", None)
        if chosen is not None and "case" in chosen.params and chosen.params["case"].launches:
            case, arch = chosen.params["case"], chosen.params["arch"]
            wanted.add((case.traits(arch), chosen.params.get("tile"), target))
    failed = [
        f"{built.traits} {built.tile or ''}: {built.error}"
        for built in compiler.prebuild(wanted)
        if built.error
    ]
    if failed:
        pytest.exit("kernels that do not build:\n" + "\n".join(failed), returncode=1)


@pytest.fixture(autouse=True)
def guarded_outputs(monkeypatch: pytest.MonkeyPatch):
    """Outputs are NaN until a kernel writes them, and lie between NaN that no kernel may write."""
    outputs: list[tuple[Tensor, int]] = []

    def allocate(
        like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype | None = None
    ):
        size = math.prod(shape)
        storage = torch.full((size + 2 * GUARD,), math.nan, dtype=dtype or like.dtype, device=like.device)
        outputs.append((storage, size))
        return storage[GUARD : GUARD + size].as_strided(shape, strides)

    monkeypatch.setattr(launch, "new_empty_strided", allocate)
    yield
    for storage, size in outputs:
        assert storage[:GUARD].isnan().all(), "a kernel wrote before its output"
        assert storage[GUARD + size :].isnan().all(), "a kernel wrote behind its output"
