"""How certain a difference of two times is: paired log-ratios, and an interval of their median by order statistics.

The only assumption is that rounds are independent and equally distributed. With n rounds the median lies between the
k-th smallest and the k-th largest ratio unless fewer than k of n fair coins show one side, a binomial probability
(David and Nagaraja, Order Statistics, section 7.1). A bootstrap of so few rounds would be far too sure of itself.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
ROUNDS = 21
"""Rounds before the first look: with 0.6% noise per sample, a 1% difference is then in doubt once in 20 times."""
RESOLUTION = 0.005
"""Differences below it count as none."""

Outcome = Literal["faster", "slower", "same", "undecided"]


@dataclass(frozen=True)
class Interval:
    """The median ratio of a's speed to b's over some rounds, above 1 if a is faster. ``low`` to ``high`` contains the
    true median with at least ``CONFIDENCE``; it is 0 to infinity if there are too few rounds.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    def outcome(self, resolution: float = RESOLUTION) -> Outcome:
        """The outcome for a.

        "same" if the whole interval is within the resolution of 1, else "faster" or "slower" if it does not contain 1,
        else "undecided".
        """
        if abs(_log(self.low)) <= resolution and abs(_log(self.high)) <= resolution:
            return "same"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "undecided"

    def decided(self, resolution: float = RESOLUTION) -> bool:
        """True if the interval is narrower than the resolution, or farther from 1 than the resolution. Stopping by
        width favours no outcome; stopping as soon as the interval excludes 1 would.
        """
        low, high = _log(self.low), _log(self.high)
        return high - low <= resolution or low > resolution or high < -resolution


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def median_rank(n: int) -> int:
    """The largest k whose k-th smallest and largest of n values enclose the median with ``CONFIDENCE``; 0 if none."""
    # 2**n (1 - CONFIDENCE) / 2 outcomes of n coins may have fewer than k heads.
    fewer = itertools.accumulate(math.comb(n, k) for k in range(n // 2 + 1))
    return next((k for k, count in enumerate(fewer) if count / 2**n > (1 - CONFIDENCE) / 2), n // 2)


def interval(log_ratios: Sequence[float]) -> Interval:
    ordered, k = sorted(log_ratios), median_rank(len(log_ratios))
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)
    return Interval(math.exp(statistics.median(ordered)), math.exp(low), math.exp(high), len(ordered))


def abba(a: Callable[[], float], b: Callable[[], float], *, b_first: bool = False) -> float:
    """The logarithm of a's speed over b's from samples of their times in the order a, b, b, a, or b, a, a, b.

    A drift that is linear over the four cancels.
    """
    if b_first:
        return -abba(b, a)
    first, second, third, fourth = a(), b(), b(), a()
    return (math.log(second) + math.log(third) - math.log(first) - math.log(fourth)) / 2


def until_decided(
    one_round: Callable[[], float | None],
    *,
    resolution: float = RESOLUTION,
    most: int = 10 * ROUNDS,
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[list[float], int]:
    """Run rounds until :meth:`Interval.decided`; returns their log-ratios and how many were void.

    Args:
        one_round: returns a log-ratio, or None if the round is void.
        most: maximum rounds, void ones included.
        in_time: returns whether there is time for another round; not called in the first ``ROUNDS``.
    """
    found: list[float] = []
    void = 0
    while len(found) + void < most:
        if len(found) >= ROUNDS and (interval(found).decided(resolution) or not in_time()):
            break
        if void >= ROUNDS and not in_time():
            break
        ratio = one_round()
        if ratio is None:
            void += 1
        else:
            found.append(ratio)
    return found, void
