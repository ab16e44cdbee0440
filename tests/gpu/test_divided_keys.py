"""Stream-K ranges of all key blocks, by a warp on the GPU: as on the CPU."""

import random

import pytest

from tests.divided_keys import Line


@pytest.mark.parametrize("kind", ["none", "causal", "window"])
@pytest.mark.parametrize("batch", [1, 31, 32, 33, 100])
def test_a_warp_finds_what_a_thread_finds(batch, kind):
    pick = random.Random(batch)
    for overhead, ctas in ((0, 132), (3, 7), (2, 264)):
        lengths = [(pick.choice((0, 1, 1, 17)), pick.randint(0, 900)) for _ in range(batch)]
        line = Line(kind, overhead, lengths, 2, ctas, device="cuda")
        line.check()
        host = Line(kind, overhead, lengths, 2, ctas)
        assert line.ranges == host.ranges and line.found == host.found
