"""A static rank: which of several tiles is likely to be faster, judging by their verdicts only.

The model is short, and none of its constants is specific to a kernel:

* A block's step takes the root of the sum of the squares of its clocks on each pipe (tensor cores, special
  functions, issue, shared memory): pipes overlap, though not entirely. With n blocks on a multiprocessor, each of their
  steps takes n times as long. A step takes no less than a warp's stalls.
* A work tile takes the time of its steps, of half a step more, whose products overlap nothing, and ``LATENCY``.
* Work tiles are scheduled on the resident blocks of all multiprocessors, longest first, as the kernels do.
* A launch takes no less than the time to transfer its operands and results to and from memory.

Not modelled, and causes of wrong ranks in bench/notes.md: in which order products, reductions and reads
of shared memory queue up (additions to dQ in bulk or from registers); how ptxas schedules (144 keys per step);
latencies of loads beyond what stalls say (one stage or two at head dim 256); power, which bounds head dim 256; values
that reach shared memory conflict-free but late. Differences below ``NOISE`` mean nothing: an A/B on the GPU decides.
"""

import heapq
import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from cute_attn.lab.gpu import MULTIPROCESSORS
from cute_attn.lab.workloads import default_workloads
from cute_attn.traits import Traits

if TYPE_CHECKING:
    from cute_attn.lab.benchmark.workload import Workload

Verdict = Any
"""A :class:`cute_attn.lab.verdict.Verdict`, whose table ends with these estimates."""
NOISE = 0.02
"""Differences of estimates below this fraction mean nothing."""
LATENCY = 1500
"""Exposed clocks of a work tile: its first loads and last stores. From times at s512 in bench/notes.md."""
MOST_SIMULATED = 50_000
"""Maximum work tiles whose schedule is simulated; with more, the mean duration suffices."""


def check_verdict(what: str, one: Any) -> None:
    """Raise TypeError unless ``one`` is a verdict; ``what`` begins the message."""
    if not hasattr(one, "spills_in_step"):
        raise TypeError(f"{what} {one!r:.200}; accepted: what cute_attn.lab.verdict.verdict returns")


def estimate(verdict: Verdict, workload: "Workload | None" = None) -> float:
    """Estimated clocks of one launch for a workload; without a workload, clocks of a multiprocessor for 1,000 scores.

    Estimates are comparable only for the same traits, target and workload; smaller is faster.

    Raises:
        ValueError: the tile does not fit or has no steady step, or the workload is of another op.
    """
    check_verdict("verdict is", verdict)
    if not verdict.fits or verdict.step is None:
        raise ValueError(f"there is nothing to estimate: {verdict.reason or verdict.no_step}")
    step, blocks = verdict.step, max(verdict.blocks, 1)
    alone = step.clocks.estimate
    # For all blocks on a multiprocessor, as each of them sees it.
    clocks_of_step = max(blocks * alone, step.clocks.warp)
    if workload is None:
        return 1000 * clocks_of_step / blocks / step.scores
    traits = Traits.parse(verdict.name)
    if workload.op != traits.op:
        raise ValueError(
            f"workload is {workload.name}; accepted: one of {traits.op}, which {traits} computes"
        )
    machine = MULTIPROCESSORS[verdict.target]
    tiles = {
        steps * clocks_of_step + alone / 2 + LATENCY: count
        for steps, count in work_tiles(workload, _fields(verdict)).items()
    }
    machines = blocks * machine.count // _fields(verdict).get("cluster", 1)
    return max(makespan(tiles, machines), operand_bytes(workload) / machine.bytes)


def estimates(verdict: Verdict) -> dict[str, float]:
    """Workload's name -> :func:`estimate`, for a kernel's default workloads; if there are none, ``""`` is the name."""
    try:
        workloads = default_workloads(Traits.parse(verdict.name))
    except ValueError:
        return {"": estimate(verdict)}
    return {workload.name: estimate(verdict, workload) for workload in workloads}


def relative(one: dict[str, float], base: dict[str, float]) -> float:
    """The geometric mean over workloads of ``one``'s estimate divided by ``base``'s."""
    return math.exp(statistics.fmean(math.log(one[name] / base[name]) for name in base))


def work_tiles(workload: "Workload", tile: dict[str, int]) -> Counter[int]:
    """Number of steps -> how many work tiles of a launch have that many; work tiles without steps are left out."""
    m, n, packed = tile["tile_m"], tile["tile_n"], tile.get("pack_heads", 1)
    left, right = workload.band
    found = Counter[int]()
    for (queries, keys), sequences in Counter(workload.sequences).items():
        offset = keys - queries  # the last query is at the last key's position
        if workload.op == "forward":
            group = workload.nheads // workload.nheads_kv
            heads = workload.nheads_kv * -(-group // packed)
            steps = _steps(queries, keys, max(m // packed, 1), n, offset, left, right)
        else:
            heads = workload.nheads
            steps = _steps(keys, queries, n, m, -offset, right, left)
        for count, tiles in steps.items():
            found[count] += tiles * heads * sequences
    del found[0]
    return found


def _steps(
    rows: int, cols: int, block: int, step: int, offset: int, before: int | None, after: int | None
) -> Counter[int]:
    """Steps -> number of row blocks with that many; row r sees columns r + offset - before to r + offset + after."""
    found = Counter[int]()
    for first in range(0, rows, block):
        last = min(first + block, rows) - 1
        begin = 0 if before is None else max(first + offset - before, 0)
        end = cols if after is None else min(last + offset + after + 1, cols)
        found[-(-end // step) - begin // step if begin < end else 0] += 1
    return found


def makespan(tiles: dict[float, int], places: int) -> float:
    """The time until the last work tile ends on ``places`` blocks, longest first; tiles: duration -> how many."""
    total = sum(duration * count for duration, count in tiles.items())
    count = sum(tiles.values())
    if count > MOST_SIMULATED:
        return total / places + total / count / 2
    ends = [0.0] * places
    for duration in sorted(tiles, reverse=True):
        for _ in range(tiles[duration]):
            heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def operand_bytes(workload: "Workload") -> int:
    """Total bytes of the operands and results in memory."""
    queries, keys = (sum(lengths) for lengths in zip(*workload.sequences, strict=True))
    per_query = workload.nheads * (workload.head_dim + workload.head_dim_v)
    per_key = workload.nheads_kv * (workload.head_dim + workload.head_dim_v)
    times = 2 if workload.op == "forward" else 4  # gradients as well, and dO and O
    return times * (queries * per_query + keys * per_key)


def _fields(verdict: Verdict) -> dict[str, int]:
    """The integer fields of a verdict's tile."""
    fields: dict[str, Any] = dict(field.split("=") for field in verdict.tile.split(","))
    numbers = {name: int(value) for name, value in fields.items() if value.lstrip("-").isdigit()}
    if not {"tile_m", "tile_n"} <= numbers.keys():
        raise ValueError(f"tile is {verdict.tile!r}; accepted for an estimate: with tile_m and tile_n")
    return numbers
