"""A card without a GPU: its times are a function of the contender, its seconds pass only where something runs."""

import math
import random
from collections import Counter

from cute_attn.lab.card import Wrong
from cute_attn.lab.sensors import State


class SimulatedCard:
    """A stand-in for :class:`cute_attn.lab.card.Gpu`.

    Args:
        milliseconds: of a call, a function of the contender and the workload.
        drift: of the logarithm a second.
        wrong: contenders whose output is not the reference's.
        failing: errors by contender.
        check_s: seconds that a check takes.
    """

    gpu, driver = "simulated", "1.0"

    def __init__(self, milliseconds, *, seed=0, drift=0.0, wrong=(), failing=None, check_s=0.1):
        self.milliseconds, self.drift, self.check_s = milliseconds, drift, check_s
        self.wrong, self.failing = set(wrong), failing or {}
        self.random, self.seconds = random.Random(seed), 0.0
        self.sampled, self.events = Counter(), []

    def now(self):
        return self.seconds

    def build(self, contenders, workloads):
        self.events += [("built", contender) for contender in contenders]

    def prepare(self, contender, workload):
        self.seconds += self.check_s
        self.events.append(("checked", contender))
        if contender in self.failing:
            raise self.failing[contender]
        if contender in self.wrong:
            raise Wrong(f"{contender} is wrong on {workload.name}: its error is 1, allowed are 0.01")
        return contender, workload

    def sample(self, run, milliseconds):
        contender, workload = run
        self.sampled[contender, workload.name] += 1
        self.events.append(("sampled", contender))
        self.seconds += milliseconds / 1000
        noise = self.drift * self.seconds + self.random.gauss(0, 0.003)
        return self.milliseconds(contender, workload) * math.exp(noise)

    def state(self, run):
        return State(1755, 690, 61, ("power",))
