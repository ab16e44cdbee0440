"""Spaces, timings on disk and the tuner, on a simulated card with simulated builds: no real clock."""

import dataclasses

import pytest

from cute_attn.compiler import registry
from cute_attn.lab.builds import Built
from cute_attn.lab.card import Contender
from cute_attn.lab.tune import tune
from cute_attn.tiles import ForwardSm90Tile
from cute_attn.traits import Traits
from tests.simulated_card import SimulatedCard

NAME = "forward-sm90-bf16-d128"
TRAITS = Traits.parse(NAME)
DEFAULT = registry.lookup(TRAITS).tile


def tile_of(contender):
    return registry.lookup(TRAITS, contender.tile or None).tile


class SimulatedBuilds:
    """Builds that take eight seconds of a simulated clock, ``workers`` at a time; tiles in ``failing`` do not build."""

    seconds, workers = 8.0, 15

    def __init__(self, card, failing):
        self.card, self.failing = card, failing
        self.free, self.coming, self.submitted, self.closed = [0.0] * self.workers, [], [], False

    @property
    def pending(self):
        return len(self.coming)

    def submit(self, tiles):
        for tile in tiles:
            self.submitted.append(tile)
            self.free.sort()
            self.free[0] = max(self.free[0], self.card.now()) + self.seconds
            self.coming.append((self.free[0], tile))

    def take(self, wait_s):
        now = self.card.now()
        if wait_s and self.coming and min(self.coming, key=lambda one: one[0])[0] > now:
            self.card.seconds = min(now + wait_s, min(done for done, _ in self.coming))
        there = [tile for done, tile in self.coming if done <= self.card.now()]
        self.coming = [one for one in self.coming if one[1] not in there]
        return [self.built(tile) for tile in there]

    def built(self, tile):
        if tile in self.failing:
            return Built(tile, error="DSLRuntimeError: it does not build")
        return Built(tile, self.seconds, no_rank="no step")

    def close(self):
        self.closed = True


def run(milliseconds, resume, space=None, *, card=None, failing=()):
    """A study on a card whose times are a function of the tile; returns it with the card and the builds."""
    card = card or SimulatedCard(milliseconds_of(milliseconds))
    simulated = SimulatedBuilds(card, failing)
    options = {"workloads": ("s8192",), "budget_s": 60.0, "resume": resume}
    study = tune(NAME, space, **options, card=card, builds=simulated)
    assert simulated.closed
    return study, card, simulated


def milliseconds_of(landscape):
    return lambda contender, workload: landscape(tile_of(contender))


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "timings.jsonl"


# ---- landscapes ----


def slower(tile):
    """The default is the best."""
    return 1.0 + 0.05 * (tile != DEFAULT)


def ridge(tile):
    """Two fields help alone, and more together."""
    return (
        1.0 - 0.02 * (not tile.q_in_regs) - 0.015 * tile.share_qo_smem + 0.004 * abs(tile.tile_n - 128) / 16
    )


def rugged(tile):
    """No order in the values, cliffs, and the best far from the default."""
    hills = {64: 0.93, 80: 1.2, 96: 1.0, 112: 1.3, 128: 1.0, 144: 0.99, 160: 1.1}
    return hills.get(tile.tile_n, 1.5) * (1.0 if (tile.tile_m, tile.num_stages) == (128, 2) else 1.1)


@pytest.mark.parametrize(
    "milliseconds, best", [(ridge, "q_in_regs=false,share_qo_smem=true"), (rugged, "tile_n=64")]
)
def test_the_best_tile_is_found_within_the_budget(milliseconds, best, kept):
    study, card, _ = run(milliseconds, kept)
    assert study.best == best and study.verdict.outcome == "faster"
    assert study.candidates[0].change == best and best in study.sentence
    assert eval(study.best_text, {"ForwardSm90Tile": ForwardSm90Tile}) == tile_of(Contender(NAME, best))
    checked = {contender for what, contender in card.events if what == "checked"}
    assert {contender for what, contender in card.events if what == "sampled"} <= checked
    assert card.now() <= 62 and study.seconds <= 62


def test_the_default_stays_where_nothing_is_faster(kept):
    study, _, _ = run(slower, kept)
    assert (study.best, study.best_text, study.verdict) == ("", "", None)
    assert "the default tile stays" in study.sentence
    assert all(one.gain < 1 for one in study.candidates if one.status == "timed")


# ---- what goes wrong ----


def test_failing_builds_and_wrong_kernels_are_left_out_and_named(kept):
    """The fastest of all is wrong, the next does not build, the next fails when it runs."""
    wrong, broken, crashing = (dataclasses.replace(DEFAULT, tile_n=n) for n in (112, 96, 80))
    speeds = {wrong: 0.5, broken: 0.6, crashing: 0.7, dataclasses.replace(DEFAULT, tile_n=64): 0.9}
    card = SimulatedCard(
        lambda contender, workload: speeds.get(tile_of(contender), 1.0),
        wrong=[Contender(NAME, "tile_n=112")],
        failing={Contender(NAME, "tile_n=80"): RuntimeError("launch failed\nand more")},
    )
    study, _, _ = run(None, kept, card=card, failing=[broken])
    assert study.best == "tile_n=64"
    bad = {
        one.change: (one.status, one.reason) for one in study.candidates if one.status in ("wrong", "failed")
    }
    assert bad.keys() == {"tile_n=112", "tile_n=96", "tile_n=80"}
    assert bad["tile_n=112"][0] == "wrong" and "allowed are" in bad["tile_n=112"][1]
    assert bad["tile_n=96"] == ("failed", "DSLRuntimeError: it does not build")
    assert bad["tile_n=80"] == ("failed", "launch failed")
    assert not {c.tile for c, _ in card.sampled} & bad.keys()


def test_no_survivors_is_one_sentence(kept):
    with pytest.raises(ValueError, match="space has the default tile alone"):
        run(slower, kept, "tile_n=128")
    study, _, _ = run(slower, kept, "tile_n=112|2048")
    assert study.declined == {"have another tile_n; accepted: multiples of 16 up to 256 for " + NAME: 1}


# ---- stopped and resumed ----


class Stopped(SimulatedCard):
    """A user presses Ctrl-C at the n-th sample."""

    def __init__(self, *args, at, **options):
        super().__init__(*args, **options)
        self.left = at

    def sample(self, run, milliseconds):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().sample(run, milliseconds)


def heats(card):
    """Candidates in the order in which they were first sampled against the default."""
    return [c for c in dict.fromkeys(c for what, c in card.events if what == "sampled") if c.tile]


def test_a_stopped_study_goes_on_without_timing_twice(kept):
    stopped = Stopped(milliseconds_of(rugged), at=200)
    with pytest.raises(KeyboardInterrupt):
        run(None, kept, card=stopped)
    done = heats(stopped)[:-1]  # the last one may have been finished or not
    assert len(done) >= 5
    resumed = SimulatedCard(milliseconds_of(rugged))
    study, _, builds = run(None, kept, card=resumed)
    assert study.best == "tile_n=64"
    raced = {c for c in heats(resumed) if any(str(c).endswith(text) for text in ("tile_n=64", "tile_n=144"))}
    assert not set(heats(resumed)) & set(done) - raced
    assert {c.tile for c in done} <= {one.change for one in study.candidates if one.kept}
    assert not {tile_of(c) for c in done} & set(builds.submitted), "what is timed need not be built"
