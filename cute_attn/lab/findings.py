"""Sentences on verdicts: which tile is faster, if the difference means anything, what bounds it, what to try."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cute_attn.lab.rank import NOISE, Verdict, check_verdict, estimate, estimates, relative
from cute_attn.traits import Traits

_TRY = {
    "tensor cores": "the best bound that a kernel can have: what is left to gain is exposed latency",
    "special functions": "which compute the exponentials: no tile has fewer of them, so try to have more warps wait "
    "for them at a time",
    "issue": "the slots in which schedulers issue instructions: try a larger tile_n, which spends fewer of them on an "
    "element",
    "additions": "to dQ: a larger tile_n adds fewer bytes for an element",
    "shared memory": "where operands are read more than once: try more rows per warp (a larger tile_m for the same "
    "warps), or operands in registers",
}
"""Pipe -> advice for a step that it bounds."""
_LESS = ("more", "less")
_NEAR = 0.9
"""Fraction of the bounding pipe's clocks above which another pipe bounds a step as well."""
_MOST = 0.5
"""Fraction of the clocks of shared memory and L1 above which loads from global memory bound them."""


def findings(*verdicts: Verdict) -> list[str]:
    """A few sentences that compare verdicts; none if no tile fits and has a steady step.

    For tiles of one kernel: which is the best, and what bounds it. For several kernels: which is the best, if all
    compute the same, then what bounds each.
    """
    for one in verdicts:
        check_verdict("verdicts have", one)
    known = [one for one in verdicts if one.fits and one.step is not None]
    if not known:
        return []
    compared, best = [], known[0]
    if len(known) > 1 and len({_computes(one) for one in known}) == 1:
        sentence, best = _comparison(known)
        compared.append(sentence)
    if len({one.name for one in known}) > 1:
        return [
            *compared,
            *(said for one in known for said in _on(one, f"The steady step of {_label(one, known)}")),
        ]
    return [*compared, *_on(best, "Its steady step" if compared else "The steady step")]


def cost_of_functions(one: Verdict, plain: Verdict) -> str:
    """A sentence on what a kernel's epilogues cost; plain: the verdict on that kernel and tile without them."""
    epilogues = Traits.parse(one.name).epilogues
    names, costs = " and ".join(epilogues), "costs" if len(epilogues) == 1 else "cost"
    if one.step is None or plain.step is None:
        return f"What {names} {costs} is not known: without, {plain.reason or plain.no_step}."
    each, least = (x.step.instructions / x.step.elements for x in (one, plain))
    less = 1 - estimate(plain) / estimate(one)
    return (
        f"{names} {costs} {each - least:.2f} of the {each:.2f} instructions per element. By its code the same tile "
        f"without takes {'as long' if abs(less) < NOISE else f'{abs(less):.0%} {_LESS[less > 0]} time'}."
    )


def _computes(one: Verdict) -> tuple[Traits, str]:
    """Equal for verdicts whose estimates are comparable: the traits except for the variant, and the target."""
    return replace(Traits.parse(one.name), variant=""), one.target


def best(verdicts: Iterable[Verdict]) -> Verdict:
    """The best verdict by its code: by estimate the fastest without spills in the step, or else the fastest of all.

    Raises:
        TypeError: ``verdicts`` is not a list of verdicts.
        ValueError: no tile fits and has a steady step, or the kernels' computations or targets differ.
    """
    if not isinstance(verdicts, Iterable):
        raise TypeError(f"verdicts is {verdicts!r:.200}; accepted: a list of verdicts")
    given = list(verdicts)
    for one in given:
        check_verdict("verdicts have", one)
    known = [one for one in given if one.fits and one.step is not None]
    if not known or len({_computes(one) for one in given}) > 1:
        raise ValueError(
            f"verdicts are {given!r:.200}; accepted: on kernels that compute the same on one target, of which at least "
            "one fits and has a steady step"
        )
    return _ordered(known)[0][1]


def _ordered(verdicts: Sequence[Verdict]) -> list[tuple[float, Verdict]]:
    """(time relative to the first argument's, verdict), the best first, in the order that `tune` uses."""
    base = estimates(verdicts[0])
    times = [(relative(estimates(one), base), one) for one in verdicts]
    return sorted(times, key=lambda item: (item[1].spills_in_step > 0, item[0]))


def _comparison(verdicts: Sequence[Verdict]) -> tuple[str, Verdict]:
    """A sentence on which verdict is best and how much slower the others are; and the best verdict."""
    (least, first), *others = _ordered(verdicts)
    ties, said = [], []
    for time, one in others:
        gap, name = time / least - 1, _short(one, verdicts)
        if one.spills_in_step and not first.spills_in_step:
            said.append(f"{name} spills in the step" + (f" and {_slower(gap)}" if gap >= NOISE else ""))
        elif abs(gap) < NOISE:
            away = f"is {abs(gap):.1%} away, and less than {NOISE:.0%} means nothing"
            ties.append(f"{name} {away if gap else 'costs the same'}")
        else:
            said.append(f"{name} {_slower(gap)}")
    only_ties = bool(ties) and not said
    dated = any(one.revision for one in verdicts)
    what = "kernels" if len({one.name for one in verdicts}) > 1 else "revisions" if dated else "tiles"
    measured = "" if dated else " `cute-attn ab` measures it on a GPU."
    begin = (
        f"By their code the {what} are equal"
        if only_ties
        else f"By its code {_short(first, verdicts)} is the best"
    )
    return f"{begin}: {'; '.join([*said, *ties])}.{measured}", first


def _slower(gap: float) -> str:
    return f"is {gap:.1%} slower" if gap < 1 else f"takes {1 + gap:.1f} times as long"


def _short(one: Verdict, verdicts: Sequence[Verdict]) -> str:
    """What tells a verdict from the others: its kernel, else its revision, else fields of its tile."""
    if len({other.name for other in verdicts}) > 1:
        return _label(one, verdicts)
    if any(other.revision for other in verdicts):
        return f"the one at {one.revision}" if one.revision else "today's"
    common = set.intersection(*(set(other.tile.split(",")) for other in verdicts))
    own = [item for item in one.tile.split(",") if item not in common]
    return ",".join(own) or one.brief()


def _label(one: Verdict, verdicts: Sequence[Verdict]) -> str:
    """The kernel's name, with its tile if several of the verdicts are on that kernel, and its revision."""
    several = sum(other.name == one.name for other in verdicts) > 1
    return one.name + f" with {one.brief()}" * several + (f" at {one.revision}" if one.revision else "")


def _on(one: Verdict, subject: str) -> list[str]:
    """Sentences on what bounds a tile's step, and on spills, bank conflicts and warnings."""
    said = [_bound(one, subject)]
    if one.spills_in_step:
        said.append(
            f"It spills {one.spills_in_step} times per step: try a smaller tile_n, more warps, or fewer fragments."
        )
    if one.conflicting:
        names = ", ".join(one.conflicting)
        said.append(f"Its copies have bank conflicts ({names}): try another swizzle or padded rows.")
    if one.warnings:
        said.append(f"ptxas warns: {' '.join(one.warnings)}.")
    return said


def _bound(one: Verdict, subject: str) -> str:
    """A sentence on what bounds the step, and what to try."""
    assert one.step is not None
    clocks = one.step.clocks
    # Numbers of all resident blocks together.
    if clocks.warp > max(one.blocks, 1) * clocks.estimate:
        return (
            f"{subject} waits: a warp stalls for {clocks.warp:,.0f} clocks, and the pipes are busy for "
            f"{one.blocks * clocks.estimate:,.0f}; try more blocks per multiprocessor, more warps or more stages."
        )
    if one.uncounted:
        return (
            f"{subject} has no certain bound: bank conflicts of its {' and '.join(one.uncounted)} are not counted, so "
            "the clocks of shared memory may be higher; a kernel's method copies() states what to count."
        )
    near = _NEAR * clocks.pipes[clocks.bound]
    also = [pipe for pipe, count in clocks.pipes.items() if pipe != clocks.bound and count >= near]
    beside = f" ({', '.join(also)} nearly as much)" if also else ""
    if clocks.bound == "shared memory" and clocks.global_loads >= _MOST:
        return (
            f"{subject} is bound by the L1 cache{beside}: {clocks.global_loads:.0%} of its clocks are threads' loads "
            "from global memory, such as a bias or a table; try to load fewer bytes per score."
        )
    if clocks.bound == "shared memory" and one.conflicting:  # the fault that follows says what to try
        return f"{subject} is bound by shared memory{beside}, which bank conflicts make slower."
    return f"{subject} is bound by {clocks.bound}{beside}, {_TRY[clocks.bound]}."
