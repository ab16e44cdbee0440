"""Philox states of dropout masks: taken from torch's generators in groups."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cute_attn.host import random_states
from cute_attn.host.random_states import DRAWN, STEP
from tests import machine

CUDA = torch.device("cuda", 0)


class Generator(machine.Generator):
    """A generator that notes its launches, each of which draws a group; ``stream`` stands for the current stream."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__(0, 0)
        self.stream, self.launches = 0, []

    def draw_group(self, device, seed, group):
        self.launches.append((seed, group))
        generator = torch.Generator().manual_seed(hash((seed, group)))
        return torch.randint(0, 2**63 - 1, (DRAWN, 2), generator=generator)


@pytest.fixture
def generator(monkeypatch):
    """Replaces CUDA's default generator and its stream."""
    generator, draw_one = Generator(), random_states._draw_one
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(random_states, "_is_capturing", lambda: False)
    monkeypatch.setattr(random_states, "_current_stream", lambda index: generator.stream)
    monkeypatch.setattr(random_states, "_draw_one", lambda device: draw_one(torch.device("cpu")))
    monkeypatch.setattr(random_states, "_draw_group", generator.draw_group)
    monkeypatch.setattr(random_states, "_states", {})
    return generator


def draws(n):
    return [tuple(random_states.draw(CUDA).tolist()) for _ in range(n)]


def test_many_states_are_one_launch(generator):
    seen = draws(2 * DRAWN)
    assert len(generator.launches) == 2 and len(set(seen)) == 2 * DRAWN
    assert generator.offset == 2 * DRAWN * STEP
    assert all(0 <= x < 2**63 for state in seen for x in state)


def test_a_state_belongs_to_its_generators(generator):
    """Restoring a seed and an offset, as checkpoints do, gives the same states again."""
    first = draws(3)
    generator.offset = STEP
    assert draws(2) == first[1:]
    generator.seed, generator.offset = 2**64 - 1, 0
    other = draws(3)
    assert not set(other) & set(first)
    generator.seed, generator.offset = 0, 0
    assert draws(3) == first
    generator.offset = 10**9 * STEP
    far = draws(1)
    generator.stream = 7
    generator.offset = 10**9 * STEP
    assert draws(1) == far


def test_threads_draw_different_states(generator, monkeypatch):
    """Each thread yields to the other between reading the offset and advancing it."""
    read = generator.get_offset

    def get_offset():
        offset = read()
        time.sleep(0.001)
        return offset

    monkeypatch.setattr(generator, "get_offset", get_offset)
    with ThreadPoolExecutor(2) as pool:
        seen = [state for found in pool.map(draws, (20, 20)) for state in found]
    assert len(set(seen)) == 40 and generator.offset == 40 * STEP


def test_each_stream_draws_its_own(generator):
    draws(2)
    generator.stream = 7
    draws(2)
    assert len(generator.launches) == 2
    generator.stream = 0
    draws(1)
    assert len(generator.launches) == 2


def test_captures_and_the_cpu_draw_two_numbers(generator, monkeypatch):
    monkeypatch.setattr(random_states, "_is_capturing", lambda: True)
    assert len(set(draws(2))) == 2 and not generator.launches and generator.offset == 0
    assert random_states.draw(torch.device("cpu")).shape == (2,)


def test_tracers_see_new_states_and_dispatch_modes_do_not(generator):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    traced = make_fx(lambda x: x + random_states.draw(CUDA))(torch.zeros(2, dtype=torch.int64))
    assert "randint" in traced.code and generator.offset == 0
    (expected,) = draws(1)
    generator.offset = 0
    with FlopCounterMode(display=False):
        assert draws(1) == [expected]
