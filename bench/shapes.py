"""Where are the cliffs? A seeded sweep of random shapes against the peers, in one run.

    python -m bench.shapes                    80 shapes, both ways; writes bench/results/DATE-GPU-shapes.json
    python -m bench.shapes '*-varlen*'        the shapes whose name matches
    python -m bench.shapes --seed 3 --count 200 --op backward --impl '*sm90' fa4
    python -m bench.shapes --list             their names
    python -m bench.shapes --result FILE      table and picture of an existing result; needs no GPU

Needs a GPU. Prints each row, then the speed ratios to the fastest peer, worst first; draws them into a picture next to
the result. Forward and backward are timed on the same shapes. Outputs are compared with outputs of the first peer that
computes the shape. A peer that hangs or ends the process costs its row: see :mod:`bench.isolated`.

FlashAttention-4 compiles a kernel for each configuration of head dims, query heads per key head, mask and features,
some seconds each, so the shapes of a run share a few configurations; another seed has others.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench import run
from cute_attn.lab.benchmark.workload import Workload

IMPL = (run.NEWEST, "fa2", "fa3", "fa4", "cudnn")
"""The default of ``--impl``."""

MILLISECONDS = (0.02, 5.0)
"""Bounds of a call's :func:`estimate`, forward or backward."""
MAX_BYTES = 4 * 2**30
"""Maximum bytes of q, k, v and out."""
MAX_SEQLEN_Q, MAX_SEQLEN_K = 2**15, 2**17
MIN_SEQLEN_K = 16
"""Minimum keys of the longest sequence. A query that sees one key has gradients of zero, up to rounding."""
MAX_BATCH, MAX_NHEADS, MAX_SEQUENCES = 512, 128, 64
HEAD_DIMS = range(32, 257, 8)

_FLOPS_PER_MS, _BYTES_PER_MS = 500e9, 4e9


@dataclass(frozen=True)
class Configuration:
    """Properties for which a peer compiles a kernel.

    Attributes:
        head_dim, head_dim_v: sizes.
        group: query heads of a key head.
        mask: "", "causal", "window" with bounds on both sides, or "causal_window".
        softcap, varlen: as in a workload.
    """

    head_dim: int
    head_dim_v: int
    group: int
    mask: str = ""
    softcap: bool = False
    varlen: bool = False


# mask, softcap, varlen, and head dims: common ones, any, or unequal.
_KINDS = (
    ("causal", False, False, "common"),
    ("", False, False, "common"),
    ("causal", False, True, "common"),
    ("window", False, False, "any"),
    ("causal", False, False, "any"),
    ("causal_window", False, False, "common"),
    ("", False, True, "any"),
    ("causal", True, False, "any"),
    ("causal", False, False, "unequal"),
    ("window", True, True, "any"),
)
MASKS = ("", "causal", "window", "causal_window")
RELATIONS = ("equal", "independent", "shifted", "round")
"""How seqlen_k relates to seqlen_q. "shifted": more keys, by 63 or 127 modulo 128; "round": both multiples of 128."""


def configurations(rng: random.Random, count: int) -> list[Configuration]:
    """``count`` configurations: one of each kind first, then any."""
    common = _cycle(rng, (64, 128, 256))
    groups = _cycle(rng, (1, 1, 1, 1, 2, 4, 8, 16, rng.randint(3, 15), rng.randint(2, 16)))
    found = []
    for i in range(count):
        if i < len(_KINDS):
            mask, softcap, varlen, dims = _KINDS[i]
        else:
            dims = rng.choice(("common", "common", "any", "unequal"))
            mask, softcap, varlen = rng.choice(MASKS), rng.random() < 0.25, rng.random() < 0.3
        head_dim = next(common) if dims == "common" else rng.choice(HEAD_DIMS)
        head_dim_v = head_dim
        if dims == "unequal":
            others = [(first, second) for first, second in (rng.sample(HEAD_DIMS, 2) for _ in range(2))]
            head_dim, head_dim_v = rng.choice([(192, 128), (192, 128), *others])
        found.append(Configuration(head_dim, head_dim_v, next(groups), mask, softcap, varlen))
    return found


def _cycle(rng: random.Random, values: Sequence[int]) -> Iterator[int]:
    """All items, repeated in one random order."""
    order = rng.sample(values, len(values))
    while True:
        yield from order


def sweep(count: int, seed: int, num_configurations: int = len(_KINDS)) -> list[Workload]:
    """Forwards of ``count`` different shapes, the same for a seed; configurations meet all length relations."""
    rng = random.Random(seed)
    palette = configurations(rng, num_configurations)
    found: dict[str, Workload] = {}
    while len(found) < count:
        index = len(found)
        relation = RELATIONS[index // len(palette) % len(RELATIONS)]
        workload = _shape(rng, palette[index % len(palette)], relation)
        if _bounded(workload):
            found.setdefault(workload.name, workload)
    return list(found.values())


def _bounded(workload: Workload) -> bool:
    if workload.longest_k < MIN_SEQLEN_K or nbytes(workload) > MAX_BYTES:
        return False
    times = [estimate(replace(workload, op=op)) for op in ("forward", "backward")]
    return MILLISECONDS[0] <= min(times) and max(times) <= MILLISECONDS[1]


def estimate(workload: Workload) -> float:
    """Roughly the least milliseconds of a call on a Hopper GPU: the longer of 500 TFLOP/s and 4 TB/s."""
    return max(workload.flops / _FLOPS_PER_MS, nbytes(workload) / _BYTES_PER_MS)


def nbytes(workload: Workload) -> int:
    """Bytes of q, k, v and out, in 16 bits."""
    queries, keys = (sum(lengths) for lengths in zip(*workload.sequences, strict=True))
    dims = workload.head_dim + workload.head_dim_v
    return 2 * dims * (queries * workload.nheads + keys * workload.nheads_kv)


def _shape(rng: random.Random, configuration: Configuration, relation: str) -> Workload:
    """A shape of that configuration, with batch and heads for a random time; it may miss the bounds."""
    unit = _unit(rng, configuration, relation)
    wanted = math.exp(rng.uniform(*map(math.log, MILLISECONDS)))
    units = max(1, round(wanted / estimate(unit)))
    nheads_kv = min(units, log_uniform(rng, 1, MAX_NHEADS // configuration.group))
    return replace(
        unit,
        batch=1 if unit.lengths else min(max(1, units // nheads_kv), MAX_BATCH),
        nheads=nheads_kv * configuration.group,
        nheads_kv=nheads_kv,
    )


def _unit(rng: random.Random, configuration: Configuration, relation: str) -> Workload:
    """A shape with one batch and one key head; a varlen shape keeps its sequences."""
    seqlen_q, seqlen_k = _seqlens(rng, relation)
    if configuration.mask and seqlen_k < seqlen_q and rng.random() < 0.8:
        seqlen_q, seqlen_k = seqlen_k, seqlen_q  # queries that see no key are rare in use
    windowed = configuration.mask.endswith("window")
    unit = Workload(
        1,
        seqlen_q,
        configuration.group,
        configuration.head_dim,
        nheads_kv=1,
        head_dim_v=configuration.head_dim_v,
        causal=configuration.mask.startswith("causal"),
        window=_window_side(rng) if windowed else 0,
        window_right=_window_side(rng) if configuration.mask == "window" else 0,
        softcap=configuration.softcap,
        seqlen_k=seqlen_k,
    )
    if not configuration.varlen:
        return unit
    lengths = _ragged(rng, log_uniform(rng, 2, MAX_SEQUENCES), seqlen_q)
    lengths_k = (
        tuple(length + seqlen_k - seqlen_q for length in lengths)
        if relation in ("equal", "shifted")
        else _ragged(rng, len(lengths), seqlen_k)
    )
    return replace(unit, seqlen=1, seqlen_k=0, lengths=lengths, lengths_k=lengths_k)


def _seqlens(rng: random.Random, relation: str) -> tuple[int, int]:
    """Queries and keys."""
    if relation == "round":
        return 128 * log_uniform(rng, 1, MAX_SEQLEN_Q // 128), 128 * log_uniform(rng, 1, MAX_SEQLEN_K // 128)
    seqlen_q = log_uniform(rng, 1, MAX_SEQLEN_Q)
    if relation == "equal":
        return seqlen_q, seqlen_q
    if relation == "independent":
        return seqlen_q, log_uniform(rng, 1, MAX_SEQLEN_K)
    blocks = log_uniform(rng, 1, (MAX_SEQLEN_K - MAX_SEQLEN_Q) // 128) - 1
    return seqlen_q, seqlen_q + 128 * blocks + rng.choice((63, 127))


def _window_side(rng: random.Random) -> int:
    """Keys on one side: any number, or one at or just below a multiple of 64."""
    side = log_uniform(rng, 16, 8192)
    return rng.choice((side, side // 128 * 128 + rng.choice((63, 64, 127, 128))))


def _ragged(rng: random.Random, count: int, longest: int) -> tuple[int, ...]:
    """``count`` lengths down to a sixteenth of the longest."""
    lengths = [longest, *(log_uniform(rng, max(1, longest // 16), longest) for _ in range(count - 1))]
    rng.shuffle(lengths)
    return tuple(lengths)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A random integer, uniform in the logarithm, both ends included."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def main() -> None:
    parser = run.timing_parser(__doc__, IMPL)
    parser.add_argument("--op", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--count", type=int, default=80, help="how many shapes")
    parser.add_argument("--seed", type=int, default=0, help="which shapes")
    few = "how many configurations they share; FA4 compiles some seconds for each"
    parser.add_argument("--configurations", type=int, default=len(_KINDS), help=few)
    options = parser.parse_args()
    swept = {"seed": options.seed, "count": options.count, "configurations": options.configurations}
    ops = ("forward", "backward") if options.op == "both" else (options.op,)
    shapes = sweep(options.count, options.seed, options.configurations)
    workloads = [replace(shape, op=op) for shape in shapes for op in ops]
    run.main("shapes", options, workloads, about={"sweep": swept})


if __name__ == "__main__":
    main()
