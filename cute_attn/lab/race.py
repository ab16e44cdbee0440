"""Which is faster: two contenders in an A/B with a verdict, the fastest of many by successive halving.

    from cute_attn.lab.race import ab

    print(ab(("forward-sm90-bf16-d128", "tile_n=112"), "fa4").sentence)

Kernels are compared with the reference before they are timed, a peer with the kernel. Both run in turn, so a drifting
clock affects both. Power that one draws slows the other too, so kernels that differ only in power look closer.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from cute_attn.lab.benchmark.peers import Declined
from cute_attn.lab.benchmark.results import commit
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.card import Contender, Gpu, Run
from cute_attn.lab.sensors import State, summary
from cute_attn.lab.statistics import RESOLUTION, Outcome, abba, interval, until_decided
from cute_attn.lab.tables import Printed, Table
from cute_attn.lab.workloads import default_workloads, parse
from cute_attn.traits import Traits

SAMPLE_MS = 3.0
"""Milliseconds of a sample in an A/B: four samples are far shorter than the swings of a power-limited clock."""
WARM_MS = 25.0
"""Milliseconds of a sample while the GPU warms up."""
MOST_ROUNDS = 1000
HEAT_MS = 10.0
"""Milliseconds of a sample in a race of many contenders."""

_LAST_HEAT, _FIRST_ROUNDS = 3, 4
_WARM_WINDOW_S, _WARM_WINDOWS, _STEADY = 0.5, 10, 0.003

What = Contender | str | tuple[str, Any]


@dataclass(frozen=True)
class Measured:
    """a against b on one workload: an :class:`Interval` of a's speed over b's, median milliseconds of a call, and the
    GPU under load. ``void``: rounds that did not count because the GPU was ``slowed``, see :class:`State`.
    """

    workload: str
    outcome: Outcome
    ratio: float
    low: float
    high: float
    rounds: int
    void: int
    ms_a: float
    ms_b: float
    state: State


@dataclass(frozen=True)
class Comparison:
    """The outcome of an A/B; a and b: the contenders' texts. Differences below ``resolution`` count as none."""

    a: str
    b: str
    measured: tuple[Measured, ...]
    resolution: float
    gpu: str
    driver: str
    commit: str
    started: str

    @property
    def outcome(self) -> Outcome:
        """The outcome of the workloads that are not "same", or "undecided" if they differ; else "same"."""
        outcomes = {one.outcome for one in self.measured}
        decided = outcomes - {"same"}
        return decided.pop() if len(decided) == 1 else "undecided" if decided else "same"

    @property
    def sentence(self) -> str:
        if len(self.measured) == 1:
            (one,) = self.measured
            default = self.b == str(Contender(self.a.partition(" ")[0])) != self.a
            other = "its default tile" if default else self.b
            void = f", {one.void} void" if one.void else ""
            return (
                f"{self.a} is {_says(one)} {other} on {one.workload} ({_range(one)}; {one.rounds} rounds{void}"
                f"{_conditions(one.state)})"
            )
        parts = []
        for outcome in dict.fromkeys(one.outcome for one in self.measured):
            members = [one for one in self.measured if one.outcome == outcome]
            gains, names = [one.ratio - 1 for one in members], ", ".join(one.workload for one in members)
            parts.append(f"{outcome} on {names} ({_percent(min(gains))} to {_percent(max(gains))})")
        state = summary(one.state for one in self.measured)
        return f"{self.a} against {self.b}: {'; '.join(parts)}{_conditions(state)}"

    def table(self) -> Table:
        title = f"a: {self.a}\nb: {self.b}\n{self.gpu}, driver {self.driver}"
        table = Table(
            "workload", "outcome", "speed, 95% interval", "rounds", "ms", "ms of b", "GPU", title=title
        )
        for one in self.measured:
            state, void = one.state, f" ({one.void} void)" if one.void else ""
            numbers = ((state.clock_mhz, "MHz"), (state.watts, "W"), (state.celsius, "°C"))
            held = (f"held down by {' and '.join(state.reasons)}",) if state.reasons else ()
            table.add_row(
                *(one.workload, one.outcome, f"{_percent(one.ratio - 1)}\n{_range(one)}"),
                *(f"{one.rounds}{void}", f"{one.ms_a:.4g}", f"{one.ms_b:.4g}"),
                ", ".join((*(f"{n} {unit}" for n, unit in numbers if n is not None), *held)) or "-",
            )
        return table

    def _repr_html_(self) -> str:
        return Printed(self.table())._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values, with ``"kind": "comparison"``."""
        return {"kind": "comparison"} | json.loads(json.dumps(asdict(self) | {"sentence": self.sentence}))


def _says(one: Measured) -> str:
    if one.outcome == "same":
        return "as fast as"
    if one.outcome == "undecided":
        return f"neither faster nor slower for sure ({_percent(one.ratio - 1)}) than"
    share = abs(one.ratio - 1)
    return f"{100 * share:.1f}% {one.outcome} than"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _range(one: Measured) -> str:
    if one.low <= 0 or math.isinf(one.high):
        return "too few rounds for an interval"
    return f"{_percent(one.low - 1)} to {_percent(one.high - 1)}"


def _conditions(state: State) -> str:
    clock = "" if state.clock_mhz is None else f"; {state.clock_mhz} MHz"
    return clock + (f", held down by {' and '.join(state.reasons)}" if state.reasons else "")


def ab(
    a: What,
    b: What,
    workloads: Sequence[Workload | str] = (),
    *,
    resolution: float = RESOLUTION,
    budget_s: float = 30.0,
    card: Gpu | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure whether a is faster than b. Each is a kernel's name, (name, tile), or a peer's name.

    A round takes samples in the order a, b, b, a; every other round in the order b, a, a, b. Rounds end when the
    interval of the ratio is narrower than the resolution or lies beyond it, or when the budget is spent.

    Args:
        workloads: workloads or their texts; by default 16k tokens in sequences of 2048 and of 8192.
        resolution: differences below it count as none.
        budget_s: seconds for all workloads together; each gets at least ``ROUNDS`` rounds regardless.
        card: by default torch's GPU.
        progress: called with a text at each step.

    Raises:
        Wrong: an output differs from the reference.
        ValueError: both are peers, a peer declines, there is no GPU, all rounds are void, or a text is wrong.
    """
    first, second = Contender.of(a), Contender.of(b)
    shapes = workloads_of((first, second), workloads)
    card = card or Gpu()
    started = datetime.now(UTC).isoformat()
    measured = []
    progress("building")
    card.build((first, second), shapes)
    for left, workload in zip(range(len(shapes), 0, -1), shapes, strict=True):
        progress(f"checking on {workload.name}")
        runs = [_ready(card, contender, workload) for contender in (first, second)]
        progress(f"warming up on {workload.name}")
        warm(card, runs)
        deadline = card.now() + budget_s / left
        start = card.now()
        measured.append(_measure(card, workload, runs, resolution, deadline, progress))
        budget_s -= card.now() - start
        del runs
    return Comparison(
        str(first), str(second), tuple(measured), resolution, card.gpu, card.driver, commit(), started
    )


def workloads_of(
    contenders: Iterable[Contender], workloads: Sequence[Workload | str]
) -> tuple[Workload, ...]:
    """The workloads, parsed if given as text, or the default ones. Raises ValueError if no contender is a kernel."""
    kernels = [contender.kernel for contender in contenders if contender.kernel]
    if not kernels:
        raise ValueError("a and b are peers; accepted: at least one kernel of this package")
    traits = Traits.parse(kernels[0])
    if not workloads:
        return default_workloads(traits)
    return tuple(w if isinstance(w, Workload) else parse(w, traits) for w in workloads)


def _ready(card: Gpu, contender: Contender, workload: Workload) -> Run:
    try:
        return card.prepare(contender, workload)
    except Declined as reason:
        raise ValueError(f"{contender} does not run {workload.name}: {reason}") from None


def warm(card: Gpu, runs: Sequence[Run]) -> None:
    """Run until times over half a second are within 0.3% of the half second before; at most five seconds."""
    before = None
    for _ in range(_WARM_WINDOWS if runs else 0):
        start = card.now()
        times: list[list[float]] = []
        while not times or card.now() - start < _WARM_WINDOW_S:
            times.append([card.sample(run, WARM_MS) for run in runs])
        total = statistics.median(sum(sample) for sample in times)
        if before is not None and abs(total / before - 1) < _STEADY:
            return
        before = total


def _measure(
    card: Gpu,
    workload: Workload,
    runs: Sequence[Run],
    resolution: float,
    deadline: float,
    progress: Callable[[str], None],
) -> Measured:
    times: tuple[list[float], list[float]] = ([], [])
    states: list[State] = []

    def sample(which: int) -> float:
        found = card.sample(runs[which], SAMPLE_MS)
        times[which].append(found)
        return found

    def one_round() -> float | None:
        # What precedes a round may favour its first sample, so that is a's and b's in turn.
        first = len(states) % 2
        ratio = abba(lambda: sample(0), lambda: sample(1), b_first=first == 1)
        states.append(card.state(runs[first]))
        progress(f"round {len(states)} on {workload.name}")
        return None if states[-1].slowed else ratio

    ends: dict[str, Any] = {"most": MOST_ROUNDS, "in_time": lambda: card.now() < deadline}
    ratios, void = until_decided(one_round, resolution=resolution, **ends)
    if not ratios:
        slowed = ", ".join(summary(states).reasons)
        raise ValueError(f"all {void} rounds on {workload.name} are void: the GPU is slowed by {slowed}")
    found = interval(ratios)
    ms_a, ms_b = map(statistics.median, times)
    outcome = found.outcome(resolution)
    interval_ = (found.ratio, found.low, found.high, found.rounds)
    return Measured(workload.name, outcome, *interval_, void, ms_a, ms_b, summary(states))


def fastest(
    contenders: Sequence[Contender], workloads: Sequence[Workload], card: Gpu, budget_s: float
) -> Contender:
    """Find the fastest contender by successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943).

    Rounds alternate: all in turn, then in the opposite order. After each heat the fastest third goes on, at least
    ``_LAST_HEAT``, with twice as many rounds. The result is no verdict: :func:`ab` gives one. After ``budget_s``
    seconds no round begins, except the first.
    """
    deadline = card.now() + budget_s
    card.build(contenders, workloads)
    runs = {one: [_ready(card, one, workload) for workload in workloads] for one in contenders}
    logs = {one: [list[float]() for _ in workloads] for one in contenders}

    def score(one: Contender) -> float:
        return statistics.fmean(map(statistics.median, logs[one]))

    warm(card, [run for own in runs.values() for run in own])
    alive, rounds = list(contenders), _FIRST_ROUNDS
    while True:
        for round_ in range(rounds):
            if logs[alive[-1]][0] and card.now() > deadline:
                break
            for one in alive[:: -1 if round_ % 2 else 1]:
                for found, run in zip(logs[one], runs[one], strict=True):
                    found.append(math.log(card.sample(run, HEAT_MS)))
        alive.sort(key=score)
        if len(alive) <= _LAST_HEAT or card.now() > deadline:
            return alive[0]
        alive, rounds = alive[: max(_LAST_HEAT, -(-len(alive) // 3))], 2 * rounds
