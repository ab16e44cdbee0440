"""GPU tests in two passes: build all kernels of the selected tests in parallel processes, then run."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.api import operators
from cute_attn.compiler import registry
from cute_attn.host import plans, record
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.gpu.archs import runnable_archs
from tests.problem import Case

GUARD = 4096


@pytest.fixture(scope="session", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """Build the kernels of all selected tests with parameters case, arch and perhaps tile and op.

    A module's ``needed_kernels`` adds (traits, tile, target) for a test's parameters and a target.
    With ``-n``, each worker builds the kernels that its tests launch.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    target = compiler.default_target("sm80")
    wanted = set()
    for item in request.session.items:
        chosen = getattr(item, "callspec", None)
        if chosen is not None and hasattr(item.module, "needed_kernels"):
            wanted |= set(item.module.needed_kernels(chosen.params, target))
        if chosen is None or "case" not in chosen.params or not chosen.params["case"].launches:
            continue
        tile = chosen.params.get("tile")
        for arch in [chosen.params["arch"]] if "arch" in chosen.params else runnable_archs():
            if chosen.params.get("op", getattr(item.module, "OP", "forward")) == "backward":
                wanted |= set(backward_requests(chosen.params["case"], arch, tile, target))
            else:
                wanted |= set(forward_requests(chosen.params["case"], arch, tile, target))
    for built in compiler.prebuild(wanted):
        if built.error:  # the tests that need it will fail
            print(f"{built.traits} {built.tile or ''} does not build: {built.error}")


def forward_requests(
    case: Case, arch: str, tile: str | None, target: str
) -> Iterator[tuple[Traits, Any, str]]:
    """The forward, with the default tiles for its lengths and for a bias that TMA cannot read."""
    traits = case.traits(arch)
    try:
        kernel = registry.lookup(traits, tile, target)
    except registry.Unsupported:  # another generation's kernel serves it, or the test will find out
        return
    if tile:
        yield traits, tile, target
        return
    chosen = kernel.for_lengths(*case.longest, case.group, target, case.pairs, case.seen_by_window)
    yield traits, chosen.tile, target
    if arch == "sm90" and traits.bias:
        yield traits, chosen.without_tma_bias().tile, target


def backward_requests(
    case: Case, arch: str, tile: str | None, target: str
) -> Iterator[tuple[Traits, Any, str]]:
    """The forward, and the backward's three kernels, also for a bias that TMA cannot read."""
    yield from forward_requests(case, arch, None, target)
    try:
        main = registry.lookup(case.traits(arch, "backward"), tile, target)
    except registry.Unsupported:  # the test will report it
        return
    if not tile:
        main = main.for_lengths(*case.longest, case.group, target, case.pairs)
    if getattr(main.tile, "in_terms", False) and not tile:
        main = main.of_whole_operands(target)  # like small calls
    yield from ((traits, own, target) for traits, own in kernels_of(main))
    if arch == "sm90" and case.bias and not tile:
        others = kernels_of(main.without_tma_bias())
        yield from ((traits, own, target) for traits, own in others)


INTEGER_POISON = 0x7A7A7A7A


@pytest.fixture(autouse=True)
def guarded_outputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Outputs start as NaN and are surrounded by NaN that no kernel may overwrite; of integers, another value.

    Not with the mark ``unguarded``: Inductor's CUDA graphs own the memory of outputs and allow no other references.
    """
    if request.node.get_closest_marker("unguarded"):
        yield
        return
    outputs: list[tuple[Tensor, int]] = []

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype):
        size = math.prod(shape)
        signed = torch.int64 if dtype == torch.uint64 else dtype
        poison = math.nan if dtype.is_floating_point else INTEGER_POISON
        storage = torch.full((size + 2 * GUARD,), poison, dtype=signed, device="cuda")
        outputs.append((storage, size))
        return storage[GUARD : GUARD + size].view(dtype).as_strided(shape, strides)

    monkeypatch.setattr(record, "allocate", allocate)
    yield
    for storage, size in outputs:
        for part, where in ((storage[:GUARD], "before"), (storage[GUARD + size :], "behind")):
            intact = part.isnan() if part.dtype.is_floating_point else part == INTEGER_POISON
            assert intact.all(), f"a kernel wrote {where} its output"


@pytest.fixture(autouse=True)
def repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Make each call twice, the second time from the record of the first, and return the second call's results.

    Not with the marks ``once``, of tests that count what calls do, and ``unguarded``.
    """
    if request.node.get_closest_marker("once") or request.node.get_closest_marker("unguarded"):
        return
    recorded = plans.recorded

    def recorded_and_repeated(key: Any, tensors: Any, call: Any, *functions: Any) -> Any:
        found = recorded(key, tensors, call, *functions)
        known = None if isinstance(found, str) else plans.find(key, tensors, *functions)
        if known is None:
            return found
        record, given = replace(known[0], counts=()), known[1]
        if any(map(callable, record.made)):  # it draws another dropout mask
            return found
        if record.constant or not torch.is_grad_enabled() or record.plan is None:
            again = record.run(given)
        else:
            again = operators.repeat(record, given)
        return found if again is None else again

    plans.forget()
    monkeypatch.setattr(plans, "_records", Seen())
    monkeypatch.setattr(plans, "recorded", recorded_and_repeated)


class Seen(dict):
    """Records that count each call as one that has come before."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, True)


@pytest.fixture
def matmul_precision():
    """Sets the precision of PyTorch's products on CUDA, for one test."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32

    def choose(name: str) -> None:
        flags.allow_tf32 = name == "tf32"

    yield choose
    flags.allow_tf32 = before
