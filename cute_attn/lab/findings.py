"""What verdicts say in sentences: which tile is faster, whether that means anything, what bounds it, what to try."""

from collections.abc import Sequence
from typing import Any

from cute_attn.lab.rank import NOISE, Verdict, estimates, relative

_TRY = {
    "tensor cores": "which is the best a kernel can have: what is left to gain is the waiting beside them",
    "special functions": "which compute the exponentials: no tile has fewer of them, so try to have more warps wait "
    "for them at a time",
    "issue": "which issue every instruction: try a larger tile_n, which spends fewer instructions on an element",
    "shared memory": "where operands are read more than once: try more rows a warp (a larger tile_m for the same "
    "warps), or operands in registers",
}
"""Unit -> what follows where it bounds a step."""
_NEAR = 0.9
"""Of the bounding unit's clocks: units above it bound a step as well."""


def findings(*verdicts: Verdict) -> list[str]:
    """One to three sentences on verdicts of tiles side by side; none where no tile fits or none has a steady step."""
    known = [one for one in verdicts if one.fits and one.step is not None]
    if not known:
        return []
    best = known[0]
    said = []
    if len(known) > 1 and len({(one.name, one.target) for one in known}) == 1:
        sentence, best = _comparison(known)
        said.append(sentence)
        said.append(_bound(best, "Its steady step"))
    elif len(known) == 2:
        return [_bound(one, f"The steady step of {one.name}{_at(one)}") for one in known]
    else:
        said.append(_bound(best, "The steady step"))
    fault = _fault(best)
    return [*said, fault] if fault else said


def _comparison(verdicts: Sequence[Verdict]) -> tuple[str, Verdict]:
    """Which is best by its code, as `tune` orders them, and how far the others are, if that means anything."""
    base = estimates(verdicts[0])
    times = {id(one): relative(estimates(one), base) for one in verdicts}
    first, *others = sorted(verdicts, key=lambda one: (one.spills_in_step > 0, times[id(one)]))
    ties, said = [], []
    for one in others:
        gap, name = times[id(one)] / times[id(first)] - 1, _short(one, verdicts)
        if one.spills_in_step and not first.spills_in_step:
            said.append(f"{name} spills in the step" + (f" and is {gap:.1%} slower" if gap >= NOISE else ""))
        elif abs(gap) < NOISE:
            ties.append(f"{name} is {abs(gap):.1%} away, and less than {NOISE:.0%} means nothing")
        else:
            said.append(f"{name} is {gap:.1%} slower")
    only_ties = bool(ties) and not said
    begin = (
        "By their code the tiles are equal"
        if only_ties
        else f"By its code {_short(first, verdicts)} is the best"
    )
    return f"{begin}: {'; '.join([*said, *ties])}. `cute-attn ab` measures it on a GPU.", first


def _short(one: Verdict, verdicts: Sequence[Verdict]) -> str:
    """What a tile has that not all have."""
    if one.revision:
        return f"the one at {one.revision}"
    common = set.intersection(*(set(other.tile.split(",")) for other in verdicts))
    own = [item for item in one.tile.split(",") if item not in common]
    return ",".join(own) or one.brief()


def _at(one: Verdict) -> str:
    return f" at {one.revision}" if one.revision else ""


def _bound(one: Verdict, subject: str) -> str:
    """What bounds its step, and what that suggests."""
    assert one.step is not None
    clocks = one.step.clocks
    if _waits(one):
        return (
            f"{subject} waits: one warp's stalls take {clocks.warp:,.0f} clocks, what the units need of all resident "
            f"warps {one.blocks * clocks.estimate:,.0f}; try more blocks a multiprocessor, more warps or more stages."
        )
    also = [unit for unit, count in clocks.units.items() if _near(clocks, unit, count)]
    beside = f" ({', '.join(also)} nearly as much)" if also else ""
    return f"{subject} is bound by {clocks.bound}{beside}, {_TRY[clocks.bound]}."


def _waits(one: Verdict) -> bool:
    """Whether stalls of a warp take longer than what all resident blocks need."""
    assert one.step is not None
    return one.step.clocks.warp > max(one.blocks, 1) * one.step.clocks.estimate


def _near(clocks: Any, unit: str, count: float) -> bool:
    return unit != clocks.bound and count >= _NEAR * clocks.units[clocks.bound]


def _fault(one: Verdict) -> str:
    """What should not be: spills, bank conflicts, warnings of ptxas."""
    conflicts = [f"{copy.name} {copy.ways}-way" for copy in one.copies if copy.ways > 1]
    if one.spills_in_step:
        return f"It spills {one.spills_in_step} times a step: try a smaller tile_n, more warps, or fewer fragments."
    if conflicts:
        return f"Its copies have bank conflicts ({', '.join(conflicts)}): try another swizzle or padded rows."
    if one.warnings:
        return f"ptxas warns: {' '.join(one.warnings)}."
    return ""
