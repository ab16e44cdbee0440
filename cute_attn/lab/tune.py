"""Search for the best tile of a kernel for some workloads, within a budget of seconds.

    from cute_attn.lab.tune import tune

    study = tune("forward-sm90-bf16-d128-causal", workloads=["b1-s8192-h32x8"], budget_s=60)
    print(study.sentence)

Tiles that do not fit are never built. Worker processes build the others, while the GPU times those that are ready: the
most promising by their code first, and those that spill in the steady step last. Each tile is compared with the
reference, then timed in a few rounds against the default; then the changes that helped are combined. The best tiles
race against each other, and an A/B of the winner against the default decides. Timings are kept on disk, so that a
study that was stopped can continue.
"""

import importlib
import math
import os
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cute_attn.compiler import SpillWarning, default_target, key_of, registry
from cute_attn.compiler.registry import kernel_class
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.builds import Built, WorkerBuilds
from cute_attn.lab.card import Contender, Gpu, Lost, Run, Wrong, needed_kernels, tile_at
from cute_attn.lab.race import HEAT_MS, SAMPLE_MS, Comparison, ab, fastest, warm, workloads_of
from cute_attn.lab.rank import relative
from cute_attn.lab.space import Space, accepted
from cute_attn.lab.statistics import RESOLUTION, ROUNDS, abba
from cute_attn.lab.study import Candidate, Study, as_python
from cute_attn.lab.tables import counted
from cute_attn.lab.timings import Timing, TimingKey, Timings
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

HEAT_ROUNDS = 3
_NEVER_BACK = "an earlier study ran it and never came back; with another file of timings it is tried again"
_HOPELESS = math.log(0.8)  # relative speed in the first round below which more rounds cannot help
_CLOSE = math.log(1.02)  # how much slower than the best one still races it
_MOST_RACED, _MOST_PAIRS = 8, 24
_RACE = 1.5  # the time of that race and the A/B over the A/B's alone
# To predict what fits a budget: seconds of a build, of loading workers, of a check, and of an A/B without its samples.
_BUILD_S, _START_S, _CHECK_S, _AB_S = 8.0, 5.0, 0.3, 1.5


@dataclass(frozen=True)
class Progress:
    """How far a study is: the current step, and numbers of candidates. ``best``: the fastest tile so far, as a change
    of the default tile, or "" for the default itself. ``gain``: its speed over the default's.
    """

    text: str
    total: int
    built: int
    timed: int
    best: str
    gain: float


def tune(
    name: str,
    space: Space | str | None = None,
    *,
    target: str | None = None,
    workloads: Sequence[Workload | str] = (),
    budget_s: float = 60.0,
    static_only: bool = False,
    resume: Path | None = None,
    seed: int = 0,
    card: Gpu | None = None,
    builds: WorkerBuilds | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Study:
    """Search for a tile of a kernel that is faster than its default one.

    Args:
        space: tiles to try, see :class:`Space`; by default one field at a time around the default tile, and pairs of
            what helped.
        target: by default the GPU that is present; another target only with ``static_only``.
        workloads: workloads or their texts; by default 16k tokens in sequences of 2048 and of 8192.
        budget_s: seconds, the last few of which are reserved for the race of the best and the A/B.
        static_only: only rank by the code; needs no GPU.
        resume: the file that keeps timings, by default the user's; see :mod:`cute_attn.lab.timings`.
        seed: seed of the order in which a given space is tried.
        card, builds: by default torch's GPU, and processes of this machine.

    Raises:
        ValueError: the name, the space or a workload is wrong, all tiles were declined, or there is no GPU.
        Lost: a candidate ended the GPU's context; it is left out when the study is called again.
    """
    began = time.monotonic()
    traits = Traits.of(name, "name")
    shapes = workloads_of([Contender(traits.name)], workloads)
    search = Search.of(traits, space, target, shapes, seed)
    if card is None and not static_only:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU; --static (static_only=True) ranks without one")
        card = Gpu()
    if builds is None:
        all_needed = needed_kernels(Contender(traits.name), shapes, search.target) if card else ()
        beside = dict.fromkeys(request for request in all_needed if request[1] != search.space.tile)
        # If nothing is timed, no core is left free.
        workers = None if card else len(os.sched_getaffinity(0))
        builds = WorkerBuilds(traits, search.target, shapes, beside, workers)
        budget_s -= time.monotonic() - began  # starting the GPU takes seconds too
    study = _Study(search, card, builds, Timings(resume), budget_s, watch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpillWarning)  # the study says which tiles spill
            return study.run()
    finally:
        builds.close()


def table_row(study: Study, workloads: Sequence[Workload], commit: str) -> str:
    """The line of the kernel's ``tiles.csv`` with the study's winner as the default tile.

    The line's evidence is the speed on the workload with the most operations.

    Raises:
        ValueError: no tile was faster than the default, or the kernel's default tile is not from a table.
    """
    if not study.best:
        raise ValueError(
            f"{study.name} keeps its default tile, whose row stays; accepted: a study with a winner"
        )
    traits = Traits.parse(study.name)
    folder = kernel_class(traits).__module__.rpartition(".")[0]
    heuristics = importlib.import_module(f"{folder}.heuristics")
    winner = next(one for one in study.candidates if one.change == study.best)
    workload = max(workloads, key=lambda one: one.flops)
    speed = workload.flops / winner.ms[workload.name] / 1e9
    measured = f"{speed:.4g} TFLOP/s on {workload.name}; {study.gpu.removeprefix('NVIDIA ')}; {commit}"
    keys = heuristics.keys(traits, study.target)
    return str(heuristics.TABLE.line(traits, study.target, keys, study.best, measured))


@dataclass(frozen=True)
class Search:
    """The tiles that a study tries: first ``tiles``, in the order of their builds, then, if it ``grows``, pairs of
    changes that helped. ``space`` is around the default tile; ``declined``: number of declined tiles by reason.
    """

    traits: Traits
    target: str
    workloads: tuple[Workload, ...]
    space: Space
    tiles: tuple[Tile, ...]
    declined: Counter[str]
    grows: bool

    def contender(self, tile: Tile) -> Contender:
        return Contender(self.traits.name, self.change(tile))

    def change(self, tile: Tile) -> str:
        """A tile as text such as ``"tile_n=112"`` for ``--tile``, which changes the default for long sequences."""
        default = registry.lookup(self.traits, None, self.target).tile.text.split(",")
        return ",".join(item for item in tile.text.split(",") if item not in default)

    @staticmethod
    def of(
        traits: Traits,
        space: Space | str | None,
        target: str | None,
        workloads: tuple[Workload, ...],
        seed: int = 0,
    ) -> "Search":
        """Choose the candidates of a space. Raises ValueError if its text is wrong or no tile is left."""
        target = target or default_target(traits.arch)
        start = tile_at(Contender(traits.name), workloads[0], target)
        grows = space is None
        if isinstance(space, str):
            space = Space.parse(space, start)
        if space is None:
            space = Space.around(start)
            found, declined = accepted([*space.neighbours(), *space.repaired(traits, target)], traits, target)
        else:
            found, declined = space.tiles(traits, target)
            random.Random(seed).shuffle(found)
            found.sort(key=lambda tile: len(tile.changes(start)))
        group = max(w.nheads // w.nheads_kv for w in workloads)
        packed = [tile for tile in found if getattr(tile, "pack_heads", 1) >= max(2, 2 * group)]
        if packed:
            declined["pack more heads than a key head has"] += len(packed)
        tiles = [tile for tile in found if tile not in packed and tile != start]
        if not tiles:
            if declined:
                reasons = ", ".join(f"{count} {reason}" for reason, count in declined.most_common(4))
                raise ValueError(f"all {declined.total()} tiles were declined: {reasons}")
            raise ValueError("space has the default tile alone; accepted: one with others")
        return Search(traits, target, workloads, space, tuple(tiles), declined, grows)


@dataclass
class _Entry:
    """A candidate while the study runs."""

    tile: Tile
    candidate: Candidate
    built: Built | None = None

    @property
    def score(self) -> float:
        """The logarithm of the candidate's gain; minus infinity if it was not timed."""
        return -math.inf if self.candidate.gain is None else math.log(self.candidate.gain)


class _Study:
    def __init__(
        self,
        search: Search,
        card: Gpu | None,
        builds: WorkerBuilds,
        timings: Timings,
        budget_s: float,
        watch: Callable[[Progress], None],
    ) -> None:
        self.search, self.card, self.builds, self.timings, self.watch = search, card, builds, timings, watch
        self.default = Contender(search.traits.name)  # whose tile depends on a workload's lengths
        self.now = time.monotonic if self.card is None else self.card.now
        self.entries: dict[Tile, _Entry] = {}
        self.ready: list[_Entry] = []
        self.default_built: Built | None = None
        self.runs: dict[Workload, Run] = {}
        self.combined: set[Tile] = set()
        self.notes: list[str] = []
        self.started = datetime.now(UTC).isoformat()
        self.start = self.now()
        self.end = self.start + budget_s
        # Kept for the race of the best and the A/B.
        one_ab = 4 * ROUNDS * SAMPLE_MS / 1000 * 1.2 + _AB_S
        self.reserve = 0.0 if self.card is None else min(budget_s / 2, _RACE * one_ab * len(search.workloads))

    def run(self) -> Study:
        self.add(self.search.tiles)
        self.notes.append(self.promise())
        self.say(self.notes[0])
        self.builds.submit([self.search.space.tile])
        self.submit(self.entries.values())
        while self.now() < self.end - self.reserve:
            busy = self.ready and self.default_built is not None
            self.collect(0.0 if busy else self.end - self.reserve - self.now())
            if self.ready and self.can_time():
                self.ready.sort(key=lambda entry: entry.candidate.order)
                self.heat(self.ready.pop(0))
            elif not self.builds.pending and not self.ready and not self.combine():
                break
        return self.finish()

    # ---- candidates ----

    def add(self, tiles: Iterable[Tile]) -> list[_Entry]:
        """Add the tiles that are no candidates yet; returns their entries."""
        new = []
        for tile in tiles:
            if tile not in self.entries and tile != self.search.space.tile:
                candidate = Candidate(tile.text, self.search.change(tile))
                self.entries[tile] = _Entry(tile, candidate)
                new.append(self.entries[tile])
        return new

    def submit(self, entries: Iterable[_Entry]) -> None:
        """Queue builds of the candidates whose times are not known."""
        self.builds.submit([entry.tile for entry in entries if not self.recalled(entry)])

    def promise(self) -> str:
        """A sentence on how many candidates fit the budget."""
        seconds = self.end - self.start - self.reserve
        of_builds = self.builds.workers * max(0.0, seconds - _START_S) / _BUILD_S
        rounds = 4 * HEAT_ROUNDS * HEAT_MS / 1000 + _CHECK_S
        of_times = math.inf if self.card is None else seconds / (rounds * len(self.search.workloads))
        fit = min(len(self.entries), int(min(of_builds, of_times)))
        declined = self.search.declined.total()
        return (
            f"{counted(len(self.entries), 'candidate')}, {counted(declined, 'tile')} declined; "
            f"{max(self.end - self.start, 0):.0f} s are enough for about {fit}, "
            f"with {counted(self.builds.workers, 'build')} at a time"
            + (f", the last {self.reserve:.0f} s for the best ones' race and A/B" if self.reserve else "")
        )

    def combine(self) -> bool:
        """Submit pairs of the changes that helped; returns whether any pair is new."""
        if not self.search.grows:
            return False
        if self.card is None:
            helped = [e for e in self.entries.values() if (e.candidate.estimate or 1.0) < 1 - RESOLUTION]
            helped.sort(key=lambda entry: entry.candidate.estimate or 1.0)
        else:
            helped = [e for e in self.entries.values() if e.score > RESOLUTION]
            helped.sort(key=lambda entry: -entry.score)
        pairs, _ = accepted(
            self.search.space.pairs([entry.tile for entry in helped]), self.search.traits, self.search.target
        )
        new = self.add([tile for tile in pairs if tile not in self.combined][:_MOST_PAIRS])
        self.combined |= set(pairs)
        self.submit(new)
        return bool(new)

    def collect(self, wait_s: float) -> None:
        self.say("building")
        for built in self.builds.take(wait_s):
            if built.tile == self.search.space.tile and self.default_built is None:
                if built.error:
                    raise ValueError(f"the default tile does not build: {built.error}")
                self.default_built = built
                for entry in self.entries.values():
                    self.rank(entry)
                continue
            entry = self.entries[built.tile]
            entry.built = built
            if built.error:
                self.mark(entry, status="failed", reason=built.error)
                continue
            costs = {"spills_in_step": built.spills_in_step, "seconds": built.seconds}
            self.mark(entry, status="built", reason=built.no_rank, **costs)
            self.rank(entry)
            if self.card is not None and not self.recalled(entry):
                self.ready.append(entry)

    def mark(self, entry: _Entry, **changes: Any) -> None:
        entry.candidate = replace(entry.candidate, **changes)

    def rank(self, entry: _Entry) -> None:
        """Set a candidate's estimate relative to the default's, once both are known."""
        base, own = self.default_built, entry.built
        if base is None or own is None or not own.estimates or not base.estimates:
            return
        changes = {} if entry.candidate.status == "timed" else {"status": "ranked"}
        self.mark(entry, estimate=relative(own.estimates, base.estimates), **changes)

    # ---- times ----

    def key(self, tile: Tile, workload: Workload) -> TimingKey:
        assert self.card is not None
        default = tile_at(self.default, workload, self.search.target)
        kernel, beside = (self.cache_key(one) for one in (tile, default))
        return kernel, beside, workload.name, self.card.gpu, self.card.driver

    def cache_key(self, tile: Tile) -> str:
        return key_of(registry.lookup(self.search.traits, tile, self.search.target), self.search.target)

    def recalled(self, entry: _Entry) -> bool:
        """True if a candidate needs no timing: it is timed or failed, or an earlier study timed it or hung on it."""
        if self.card is None or entry.candidate.status in ("timed", "failed"):
            return self.card is not None
        if self.timings.hung(self.cache_key(entry.tile)):
            self.mark(entry, status="failed", reason=_NEVER_BACK)
            return True
        found = {w: self.timings.get(self.key(entry.tile, w)) for w in self.search.workloads}
        if None in found.values():
            return False
        for workload, timing in found.items():
            assert timing is not None
            self.note(entry, workload, timing)
        self.mark(entry, kept=True)
        return True

    def note(self, entry: _Entry, workload: Workload, timing: Timing) -> None:
        gains = entry.candidate.gains | {workload.name: math.exp(statistics.median(timing.log_ratios))}
        times = entry.candidate.ms | {workload.name: timing.ms}
        self.mark(entry, status="timed", reason="", gains=gains, ms=times)

    def can_time(self) -> bool:
        """True if the default is ready to be timed against; the first such call checks it and warms it up."""
        if self.card is None or self.default_built is None:
            return False
        if not self.runs:
            self.say("checking and warming up the default tile")
            for workload in self.search.workloads:
                self.runs[workload] = self.card.prepare(self.default, workload)
            warm(self.card, list(self.runs.values()))
        return True

    def heat(self, entry: _Entry) -> None:
        """Check a candidate on every workload, then time it against the default in a few rounds."""
        assert self.card is not None
        contender, kernel = self.search.contender(entry.tile), self.cache_key(entry.tile)
        self.say(f"checking {entry.candidate.change}")
        self.timings.began(kernel)
        try:
            runs = {w: self.card.prepare(contender, w) for w in self.search.workloads}
        except Lost as error:  # still noted as begun: the next study leaves it out
            raise Lost(f"{error}; call it again, and the study goes on without this tile") from error
        except KeyboardInterrupt:
            self.timings.ended(kernel)
            raise
        except Exception as error:
            self.timings.ended(kernel)
            wrong = isinstance(error, Wrong)
            text = str(error).strip() or type(error).__name__
            self.mark(entry, status="wrong" if wrong else "failed", reason=text.splitlines()[0])
            return
        self.timings.ended(kernel)
        self.say(f"timing {entry.candidate.change}")
        for workload, run in runs.items():
            ratios, times = self.rounds(run, self.runs[workload])
            key = self.key(entry.tile, workload)
            self.note(entry, workload, self.timings.put(key, ratios, statistics.median(times)))

    def rounds(self, run: Run, default: Run) -> tuple[list[float], list[float]]:
        """Log-ratios of a few rounds, only one for a hopeless candidate; and the candidate's times."""
        assert self.card is not None
        card, times = self.card, list[float]()

        def sample() -> float:
            times.append(card.sample(run, HEAT_MS))
            return times[-1]

        card.sample(default, HEAT_MS)  # earlier work may have let the clock rise
        ratios: list[float] = []
        while len(ratios) < HEAT_ROUNDS and not (ratios and ratios[0] < _HOPELESS):
            ratios.append(abba(sample, lambda: card.sample(default, HEAT_MS), b_first=len(ratios) % 2 == 1))
        return ratios, times

    # ---- the end ----

    def finish(self) -> Study:
        """Race the best candidates, run the A/B of the winner, and return the study."""
        winner, verdict = self.decide()
        tile = winner if verdict is not None and verdict.outcome == "faster" else None
        waiting = ("not reached",) if self.card is None else ("not reached", "built", "ranked")
        late = sum(entry.candidate.status in waiting for entry in self.entries.values())
        if late:
            were = "was" if late == 1 else "were"
            self.notes.append(f"{counted(late, 'candidate')} {were} not reached within the budget")
        known = [self.default_built, *(entry.built for entry in self.entries.values())]
        unranked = sorted({built.no_rank for built in known if built and built.no_rank})
        if unranked:
            self.notes.append(f"some have no rank: {'; '.join(unranked[:3])}")
        gpu, driver = ("", "") if self.card is None else (self.card.gpu, self.card.driver)
        candidates = sorted((e.candidate for e in self.entries.values()), key=lambda one: one.order)
        return Study(
            *(self.search.traits.name, self.search.target, gpu, driver),
            workloads=tuple(workload.name for workload in self.search.workloads),
            default=self.search.space.tile.text,
            candidates=tuple(candidates),
            declined=dict(self.search.declined),
            best="" if tile is None else self.search.change(tile),
            best_text="" if tile is None else as_python(tile),
            verdict=verdict,
            seconds=self.now() - self.start,
            notes=tuple(self.notes),
            started=self.started,
        )

    def decide(self) -> tuple[Tile | None, Comparison | None]:
        """The fastest candidate and its A/B, or None if none was faster than the default so far."""
        best = max((entry.score for entry in self.entries.values()), default=0.0)
        if self.card is None or best <= 0:
            return None, None
        close = [entry for entry in self.entries.values() if entry.score > max(0.0, best - _CLOSE)]
        close = sorted(close, key=lambda entry: -entry.score)[:_MOST_RACED]
        winner = close[0].tile
        left = self.end - self.now() - self.reserve / _RACE
        if len(close) > 1 and left > 0:
            self.say(f"racing the best {len(close)}")
            contenders = {self.search.contender(entry.tile): entry.tile for entry in close}
            winner = contenders[fastest(list(contenders), self.search.workloads, self.card, left)]
        left, text = max(0.0, self.end - self.now()), self.search.change(winner)

        def say(what: str) -> None:
            self.say(f"A/B of {text}: {what}")

        ours, shapes = self.search.contender(winner), self.search.workloads
        return winner, ab(ours, self.default, shapes, budget_s=left, card=self.card, progress=say)

    def say(self, text: str) -> None:
        candidates = [entry.candidate for entry in self.entries.values()]
        gains = {one.change: one.gain for one in candidates if one.gain is not None}
        best = max([("", 1.0), *gains.items()], key=lambda item: item[1])
        built = sum(one.status != "not reached" for one in candidates)
        self.watch(Progress(text, len(candidates), built, len(gains), *best))
