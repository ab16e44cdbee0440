"""The statistics of an A/B, by their definitions."""

import math

import pytest

from cute_attn.lab.statistics import Interval, abba, median_rank, until_decided

# 0.6% a sample as of a 25 ms slot, 2% of drift over 21 rounds, and what a clock that wanders adds.


def test_a_linear_drift_cancels():
    times = iter([1.0, 2.0 * math.exp(0.1), 2.0 * math.exp(0.2), math.exp(0.3)])
    ratio = abba(lambda: next(times), lambda: next(times))
    assert math.exp(ratio) == pytest.approx(2.0)


def test_ranks_are_those_of_the_binomial():
    assert [median_rank(n) for n in (1, 5, 6, 11, 15, 21, 31)] == [0, 0, 1, 2, 4, 6, 10]
    for n in range(1, 80):
        k = median_rank(n)
        outside = [2 * sum(math.comb(n, i) for i in range(j)) / 2**n for j in (k, k + 1)]
        assert outside[0] <= 0.05 < outside[1] or k == n // 2


@pytest.mark.parametrize(
    "low, high, outcome, decided",
    [
        *((0.998, 1.002, "same", True), (1.001, 1.004, "same", True), (1.001, 1.008, "faster", False)),
        *((1.006, 1.2, "faster", True), (0.5, 0.9, "slower", True), (0.991, 0.999, "slower", False)),
        *((0.99, 1.002, "undecided", False), (0.0, math.inf, "undecided", False)),
    ],
)
def test_outcomes(low, high, outcome, decided):
    found = Interval((low + high) / 2, low, high, 21)
    assert (found.outcome(), found.decided()) == (outcome, decided)


def test_void_rounds_do_not_count():
    rounds = iter([None, 0.0, 0.0] * 30)
    found, void = until_decided(rounds.__next__)
    assert (len(found), void) == (21, 11)
    assert until_decided(lambda: None, in_time=lambda: False) == ([], 21)
    assert until_decided(lambda: None, most=50) == ([], 50)
