"""The shapes that choices are judged on: seeded, and drawn by nobody who tunes for them.

Shapes of an op share a few configurations, for each of which kernels are built. A backward has the forward's, and the
deterministic mode's the backward's. Functions and block masks are timed both ways.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench import shapes
from bench.decode_rows import Row
from bench.shapes import log_uniform
from cute_attn.lab.benchmark.workload import Workload

OPS = ("forward", "backward", "deterministic", "decode", "append", "functions", "masks")
CONFIGURATIONS = 8
"""Number of configurations from the sweep of :mod:`bench.shapes` for forwards and backwards."""
MAX_BIAS = 2**28
"""Elements of a bias."""
MAY_DIVIDE = 1024
"""Minimum keys of a forward for which dividing them is a choice; the package's bound is higher."""
MAX_CACHE = 2**27
"""Elements of the keys of a cache."""


@dataclass(frozen=True)
class Shape:
    """One call to choose for.

    Attributes:
        op: one of ``OPS``.
        of: the call: for decode and append, a row of :mod:`bench.decode_rows`.
        function: a name in ``FUNCTIONS`` or ``MASKS``, or "".
    """

    op: str
    of: Workload | Row
    function: str = ""

    @property
    def name(self) -> str:
        """Distinct among the shapes of an op."""
        return "-".join(filter(None, (self.of.name, self.function)))

    @property
    def kernel_op(self) -> str:
        """The main kernel's ``op`` in traits."""
        return "kvcache" if isinstance(self.of, Row) else self.of.op

    @property
    def group(self) -> int:
        return self.of.heads[0] // self.of.heads[1] if isinstance(self.of, Row) else self.of.tile_lengths[2]

    @property
    def seqlen_k(self) -> int:
        """The most keys of a sequence."""
        return self.of.capacity if isinstance(self.of, Row) else self.of.longest_k

    @property
    def may_divide_keys(self) -> bool:
        """True if kernels for a cache could compute a forward: see :func:`cute_attn.host.split_kv.divided`."""
        plain = isinstance(self.of, Workload) and not (self.of.bias or self.of.dropout or self.function)
        return plain and self.kernel_op == "forward" and self.seqlen_k >= MAY_DIVIDE

    def prepared(self, device: str) -> Callable[..., Callable[[], Any]]:
        """A function from a tile's text, and a cache's number of splits, to the timed function. All share inputs."""
        if isinstance(self.of, Row):
            from bench import decode_impls, decode_rows

            row, (x,) = self.of, decode_rows.make_inputs(self.of, device, copies=1)
            return lambda tile="", splits=0: (
                lambda: decode_impls.ours(None, tile or None, splits)(row, x)[""](x)
            )
        from cute_attn.lab.benchmark import peers

        workload, inputs = self.of, self.of.inputs(device)
        more: dict[str, Any] = {"deterministic": True} if self.op == "deterministic" else {}
        if self.op == "functions":
            more["score_mod"] = FUNCTIONS[self.function]
        elif self.op == "masks":
            from cute_attn import block_mask

            sizes = (workload.longest, workload.longest_k)
            more["block_mask"] = block_mask(MASKS[self.function], None, None, *sizes, device=device)
        return lambda tile="", splits=0: peers.ours(None, tile or None, **more)(workload, inputs)


def shapes_of(op: str, seed: int, count: int) -> list[Shape]:
    """``count`` shapes of an op, always the same for a seed."""
    if op in ("forward", "backward", "deterministic"):
        swept = enumerate(shapes.sweep(count, seed, CONFIGURATIONS))
        timed = "forward" if op == "forward" else "backward"
        return [Shape(op, replace(_featured(w, i % CONFIGURATIONS), op=timed)) for i, w in swept]
    rng = random.Random(f"{op} {seed}")
    found: dict[str, Shape] = {}
    while len(found) < count:
        shape = _cached(rng, op, len(found)) if op in ("decode", "append") else _modified(rng, op, len(found))
        found.setdefault(shape.name, shape)
    return list(found.values())


def _featured(workload: Workload, configuration: int) -> Workload:
    """Half in fp16; the dense ones without a mask with a bias where it is small, the causal ones of any head dim with
    dropout."""
    own: dict[str, Any] = {"dtype": "fp16" if configuration % 2 else "bf16"}
    scores = workload.batch * workload.nheads * workload.seqlen * workload.longest_k
    if configuration == 1 and scores <= MAX_BIAS:
        own["bias"] = own["dtype"]
    if configuration == 4:
        own["dropout"] = "flash"
    return replace(workload, **own)


_CACHED: tuple[dict[str, Any], ...] = (
    {"heads": (32, 8)},
    {"heads": (64, 8), "head_dim": 64, "dtype": "fp16"},
    {"heads": (28, 4), "page": 64},
    {"heads": (8, 1), "head_dim": 256, "causal": True, "dtype": "fp16"},
    {"heads": (16, 16), "ragged": True},
    {"heads": (40, 8), "causal": True, "page": 16},
)


def _cached(rng: random.Random, op: str, number: int) -> Shape:
    own = _CACHED[number % len(_CACHED)]
    causal = own.get("causal", False) or op == "append"
    queries = rng.choice((1, 2, 8, 64, 256)) if causal else 1
    row = Row(
        1, 1, **own | {"causal": causal, "queries": queries, "append": queries if op == "append" else 0}
    )
    while True:
        keys = max(log_uniform(rng, 300, 100_000), queries)
        keys = -(-keys // max(row.page, 1)) * max(row.page, 1)
        batch = log_uniform(rng, 1, 256)
        if batch * keys * row.heads[1] * row.head_dim <= MAX_CACHE:
            return Shape(op, replace(row, batch=batch, keys=keys))


def _modified(rng: random.Random, op: str, number: int) -> Shape:
    """A call with a function of scores, or with a block mask."""
    functions = FUNCTIONS if op == "functions" else MASKS
    kinds = [*itertools.product(functions, (128, 64), ("forward", "backward"))]
    function, head_dim, timed = kinds[number % len(kinds)]
    seqlen, nheads_kv = log_uniform(rng, 256, 8192), log_uniform(rng, 1, 16)
    workload = Workload(
        batch=log_uniform(rng, 1, max(1, 16384 // seqlen)),
        seqlen=seqlen,
        nheads=nheads_kv * rng.choice((1, 4)),
        nheads_kv=nheads_kv,
        head_dim=head_dim,
        dtype="bf16" if head_dim == 128 else "fp16",
        op=timed,
    )
    return Shape(op, workload, function)


# ---- functions ----


def _distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.03125 * (q_idx - kv_idx).abs()


def _capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 30.0 * (score / 30.0).tanh()


def _sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 512)


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) | (kv_idx < 256)


FUNCTIONS: dict[str, Callable[..., Any]] = {"distance": _distance, "capped": _capped}
MASKS: dict[str, Callable[..., Any]] = {"causal": _causal, "sliding": _sliding, "prefix": _prefix}
