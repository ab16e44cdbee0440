"""A pytest plugin: runs a suite's seeded sample and writes what happened, a line each.

The environment's OUTSIDE has its :class:`Order` as JSON.
"""

import importlib
import itertools
import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from . import adapters
from .suites import Suite


@dataclass(frozen=True)
class Order:
    """What to run.

    Attributes:
        suite: fields of :class:`outside.suites.Suite`.
        adapter: of ``adapters.ADAPTERS``.
        folder: the suite's.
        seed: of the sample.
        scale: factor of the suite's counts.
        results: the file to write.
        ids: tests to run instead of a sample.
    """

    suite: dict[str, Any]
    adapter: str
    folder: str
    seed: int
    scale: float
    results: str
    ids: tuple[str, ...] = ()


ORDER = Order(**json.loads(os.environ["OUTSIDE"]))
SUITE = Suite(**ORDER.suite)


def prefix_of(name: str) -> str | None:
    """The longest of the suite's beginnings of names, or None; PyTorch appends parameters to a function's name."""
    fitting = [begin for begin in SUITE.tests if name.startswith(begin)]
    return max(fitting, key=len) if fitting else None


def reason_of(name: str) -> str | None:
    """Why a test is left out."""
    return next((why for begin, why in SUITE.deselected.items() if name.startswith(begin)), None)


def write(**line: Any) -> None:
    """Add a line of results, at once: several processes do."""
    with open(ORDER.results, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def pytest_configure(config: pytest.Config) -> None:
    for name in SUITE.lacking:
        _lend(*name.rsplit(".", 1))
    adapters.ADAPTERS[ORDER.adapter](Path(ORDER.folder))
    if not _worker(config):
        config.pluginmanager.register(Reports())


def _lend(module: str, name: str) -> None:
    """Add a function that skips to a module that lacks it."""

    def skip(*args: Any, **kwargs: Any) -> None:
        pytest.skip(f"{module} has no {name}")

    loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        setattr(loaded, name, skip)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate only the parameters of a sample, or of ORDER.ids, if there are too many; tests are unchanged."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    axes = [
        (mark.args[0], list(mark.args[1]))
        for mark in reversed(marks)
        if not mark.kwargs and len(mark.args) == 2
    ]
    count = _count(metafunc.definition.name)
    total = math.prod(len(values) for _, values in axes)
    if len(axes) < len(marks) or total <= 4 * count or not axes:
        return
    draw = random.Random(f"{ORDER.seed} {metafunc.definition.name}")
    names = [[n.strip() for n in a.split(",")] if isinstance(a, str) else list(a) for a, _ in axes]
    lists = [
        [(x,) if len(own) == 1 else tuple(x) for x in xs] for (_, xs), own in zip(axes, names, strict=True)
    ]
    if ORDER.ids:
        wanted = {given for name, given in map(_parts, ORDER.ids) if name == metafunc.definition.name}
        chosen = [
            x for x in map(partial(_combination, lists), range(total if wanted else 0)) if _id(x) in wanted
        ]
        if wanted and not chosen:  # they have the names that pytest gives
            return
    else:
        chosen = [_combination(lists, index) for index in sorted(draw.sample(range(total), count))]
    metafunc.definition.own_markers = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
    metafunc.parametrize(list(itertools.chain(*names)), chosen, ids=list(map(_id, chosen)))


def _combination(lists: list[list[tuple[Any, ...]]], index: int) -> tuple[Any, ...]:
    """The index-th of all combinations of one entry of each list, the first list fastest."""
    values: tuple[Any, ...] = ()
    for entries in lists:
        index, at = divmod(index, len(entries))
        values += entries[at]
    return values


def _id(values: Iterable[Any]) -> str:
    """How a test's parameters are named, where the plugin chose them; functions without addresses."""
    return re.sub(r"<function (\S+) at 0x\w+>", r"\1", "-".join(map(str, values)))


def _parts(test: str) -> tuple[str, str]:
    """A test's function and its parameters."""
    name, _, parameters = test.rpartition("::")[2].partition("[")
    return name, parameters.removesuffix("]")


def _count(name: str) -> int:
    prefix = prefix_of(name)
    return 0 if prefix is None else math.ceil(SUITE.tests[prefix] * ORDER.scale)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the sample."""
    for module in {item.module for item in items if hasattr(item, "module")}:
        adapters.mend(module)
    collected = len(items)
    kept, left_out = _listed(items) if ORDER.ids else _sample(items)
    items[:] = kept
    if _worker(config) == "gw0":
        write(collected=collected, left_out=left_out, sample=[item.nodeid for item in kept])


def _worker(config: pytest.Config) -> str:
    """The name of the process among those of pytest-xdist, or "" for the one that has the reports of all."""
    return getattr(config, "workerinput", {}).get("workerid", "")


def _listed(items: list[pytest.Item]) -> tuple[list[pytest.Item], Counter[str]]:
    """The tests of ORDER.ids, and those that do not exist."""
    found = {item.nodeid: item for item in items}
    absent = [test for test in ORDER.ids if test not in found]
    return [found[test] for test in ORDER.ids if test in found], Counter(f"{x}: no such test" for x in absent)


def _sample(items: list[pytest.Item]) -> tuple[list[pytest.Item], Counter[str]]:
    """A seeded sample, and how many tests of which names are left out, with reasons."""
    groups: dict[str, list[pytest.Item]] = {}
    left_out: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        prefix, reason = prefix_of(name), reason_of(name)
        if reason is not None:
            left_out[f"{name.partition('_cuda')[0]}: {reason}"] += 1
        elif prefix is not None:
            groups.setdefault(prefix, []).append(item)
    kept: list[pytest.Item] = []
    for prefix, group in groups.items():
        group.sort(key=lambda item: item.nodeid)
        count = min(len(group), math.ceil(SUITE.tests[prefix] * ORDER.scale))
        kept += random.Random(f"{ORDER.seed} {prefix}").sample(group, count)
    random.Random(ORDER.seed).shuffle(kept)
    return kept, left_out


# ---- what happened ----


def _served() -> Counter:
    doors = sys.modules.get("cute_attn.host.doors")
    return Counter() if doors is None else Counter(doors.served)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    """State which operators were served since the start of the test; leave the GPU's memory to other processes."""
    before = item.stash[_BEFORE]
    outcome = yield
    torch.cuda.empty_cache()
    calls = _served() - before
    fell = {reason: n for (_, reason), n in calls.items() if reason}
    served = sum(n for (_, reason), n in calls.items() if not reason)
    item.user_properties.append(("calls", {"served": served, "fell_through": fell}))
    return outcome


_BEFORE = pytest.StashKey[Counter]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = _served()


class Reports:
    """Writes one line a test, one for its calls, and one for each phase that fails, or in which a process dies."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if calls := dict(report.user_properties).get("calls"):
            write(calls=report.nodeid, **calls)
        if report.when == "call" or report.outcome != "passed":
            reason = ""
            if report.skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            elif report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                reason = crash.message if crash is not None else str(report.longrepr)
            write(
                test=report.nodeid,
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                reason=reason[:600],
            )
