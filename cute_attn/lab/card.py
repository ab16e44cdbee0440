"""What is compared, and the GPU that does it: a contender is checked against the reference before it is timed."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cute_attn.compiler import Request, default_target, is_built, prebuild
from cute_attn.lab.benchmark import peers
from cute_attn.lab.benchmark.results import first_line
from cute_attn.lab.benchmark.timing import Clock, query_gpu
from cute_attn.lab.benchmark.workload import Inputs, Workload
from cute_attn.lab.check import Expected, small_workloads
from cute_attn.lab.sensors import State, sensor
from cute_attn.tiles import Tile, check_tile, text_of
from cute_attn.traits import Traits

Run = Callable[[], Any]

# A peer's errors are its own; it only has to compute the same. Relative to the largest element, as in the benchmarks.
_PEERS_TOLERANCE = 0.05
# Scores of the part that is compared with the reference at a timed size: 1 GB in float64, a few times that in all.
_MAX_SCORES = 2**27
_MOST_CALLS = 200  # of a sample; each overwrites the L2 beforehand


class Wrong(ValueError):
    """A kernel's output is not the reference's; it is not timed."""


class Lost(RuntimeError):
    """The GPU's context is lost: nothing runs any more in this process."""


@dataclass(frozen=True)
class Contender:
    """A kernel with a tile, or a peer.

    Attributes:
        kernel: its name, such as ``"forward-sm90-bf16-d128-causal"``; "" for a peer.
        tile: text that changes fields of the default tile; "" for the tile that a call takes by itself.
        peer: one of :data:`cute_attn.lab.benchmark.peers.PEERS`, or "".
    """

    kernel: str = ""
    tile: str = ""
    peer: str = ""

    @staticmethod
    def of(what: "Contender | Traits | str | tuple[Traits | str, Tile | str | None]") -> "Contender":
        """From a peer's or a kernel's name, or (kernel's name, tile).

        Raises:
            TypeError, ValueError: it is none of these.
        """
        if isinstance(what, Contender):
            return what
        name, tile = what if isinstance(what, tuple | list) and len(what) == 2 else (what, None)
        check_tile(tile)
        if name in peers.PEERS and tile is None:
            return Contender(peer=name)
        try:
            return Contender(Traits.of(name).name, text_of(tile))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; or a peer: {', '.join(peers.PEERS)}") from None

    def __str__(self) -> str:
        return self.peer or (f"{self.kernel} {self.tile}" if self.tile else f"{self.kernel} (default tile)")


class Gpu:
    """torch's current GPU; ``gpu`` and ``driver`` say which, since timings of another are others.

    Raises:
        ValueError: there is none.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU; timing a kernel needs one")
        self.gpu = torch.cuda.get_device_name()
        self.driver = query_gpu("driver_version") or "unknown"
        self._clock = Clock()
        self._sensor = sensor(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        self._checks = Checks()
        self._milliseconds: WeakKeyDictionary[Run, float] = WeakKeyDictionary()

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def build(self, contenders: Sequence[Contender], workloads: Sequence[Workload]) -> None:
        """Build what running these needs, in parallel. What does not build fails in :meth:`prepare`."""
        wanted = [r for c in contenders if c.kernel for r in needed_kernels(c, workloads)]
        missing = [r for r in dict.fromkeys(wanted) if not _is_built(r)]
        for _ in prebuild(missing) if len(missing) > 1 else ():
            pass

    def prepare(self, contender: Contender, workload: Workload) -> Run:
        """What to time, after its output was compared with the reference.

        Raises:
            Wrong: the output differs.
            Lost: it ended the GPU's context.
            Exception: it cannot run; a :class:`cute_attn.lab.benchmark.peers.Declined` gives a peer's reason.
        """
        try:
            run = self._checks.checked(contender, workload)
            self._milliseconds[run] = sorted(self._clock.once(run, 3))[1]
        except Exception as error:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # it raises again if the context is lost
                what = f"{contender} ended the GPU's context on {workload.name}: {first_line(error)}"
                raise Lost(what) from error
            raise
        return run

    def sample(self, run: Run, milliseconds: float) -> float:
        """The median time of calls, in milliseconds, each on a cold L2, that take about ``milliseconds`` together."""
        count = round(milliseconds / max(self._milliseconds[run], 1e-3))
        return statistics.median(self._clock.once(run, min(_MOST_CALLS, max(3, count))))

    def state(self, run: Run, round_: int) -> State | None:
        """Clock, power and heat under the load of ``run``, or None in rounds that do not read them."""
        if round_ % self._sensor.every:
            return None
        for _ in range(min(20_000, max(1, round(self._sensor.busy_ms / self._milliseconds[run])))):
            run()
        state = self._sensor.read()
        torch.cuda.synchronize()
        return state


# ---- against the reference ----


class Checks:
    """Inputs of workloads, and what has to come out: computed once, compared with many tiles."""

    def __init__(self) -> None:
        self._inputs: dict[Workload, Inputs] = {}
        self._parts: dict[Workload, Part] = {}
        self._small: dict[Workload, Expected] = {}
        self._passed: set[tuple[str, Tile]] = set()

    def checked(self, contender: Contender, workload: Workload) -> Run:
        """The function to time; see :meth:`Gpu.prepare`.

        A kernel is compared at a few small sizes and, without dropout, in a part of this workload; a peer in that part.

        Raises:
            ValueError: the workload is not one of the kernel's.
        """
        if contender.peer:
            implementation = peers.PEERS[contender.peer]
        else:
            traits = Traits.parse(contender.kernel)
            if replace(workload.traits(traits.arch), variant=traits.variant) != traits:
                raise ValueError(
                    f"workload is {workload.name}; accepted: workloads of {traits}, with its head dims and features"
                )
            tile = tile_at(contender, workload)
            if (contender.kernel, tile) not in self._passed:
                self._check_small_sizes(contender, traits, tile)
                self._passed.add((contender.kernel, tile))
            implementation = peers.ours(kernel_of(traits), contender.tile or None)
        if workload not in self._inputs:
            torch.manual_seed(0)
            self._inputs[workload] = workload.inputs()
        x = self._inputs[workload]
        run = implementation(workload, x)
        results = run()
        if not workload.dropout and not (workload.lengths and workload.bias):
            if workload not in self._parts:
                self._parts[workload] = Part.of(workload, x)
            self._check_part(contender, self._parts[workload], results)
        return run

    def _check_small_sizes(self, contender: Contender, traits: Traits, tile: Tile) -> None:
        for workload in small_sizes(traits, tile):
            if workload not in self._small:
                self._small[workload] = Expected.of(workload)
            expected = self._small[workload]
            accuracy = expected.accuracy(expected.run(kernel_of(traits), tile.text))
            if not accuracy.passed:
                raise Wrong(
                    f"{contender} is wrong on {workload.name}: its error is {accuracy.error:.2g}, "
                    f"allowed are {accuracy.allowed:.2g}"
                )

    def _check_part(self, contender: Contender, part: "Part", results: Any) -> None:
        found = part.cut(results if isinstance(results, tuple) else (results,))
        if contender.kernel:
            accuracy = part.expected.accuracy(found)
            error, allowed, passed = accuracy.error, accuracy.allowed, accuracy.passed
        else:
            error = max(_relative(a, b) for a, b in zip(found, part.expected.exact, strict=True))
            allowed, passed = _PEERS_TOLERANCE, error <= _PEERS_TOLERANCE
        if not passed:
            raise Wrong(
                f"{contender} is wrong on {part.name}: its error is {error:.2g}, allowed are {allowed:.2g}"
            )


def small_sizes(traits: Traits, tile: Any) -> list[Workload]:
    """:func:`cute_attn.lab.check.small_workloads` that the tile accepts.

    Packed heads divide those of a key head; a bias that TMA loads has several rows, of multiples of 16 bytes.
    """
    group, step = max(2, getattr(tile, "pack_heads", 1)), 8 if getattr(tile, "bias_stages", 0) else 1
    sizes = [
        replace(size, nheads=2 * group, seqlen=-(-size.seqlen // step) * step)
        for size in small_workloads(traits)
    ]
    return list(dict.fromkeys(sizes))


def kernel_of(traits: Traits) -> str:
    """``"ARCH"`` or ``"ARCH:VARIANT"``, as the operator takes it."""
    return f"{traits.arch}:{traits.variant}" if traits.variant else traits.arch


def tile_at(contender: Contender, workload: Workload, target: str | None = None) -> Tile:
    """The tile that a kernel takes on a workload: its own, or the default one, which depends on lengths and heads.

    Raises:
        Unsupported: no kernel supports it.
    """
    from cute_attn.compiler import registry

    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    kernel = registry.lookup(traits, contender.tile or None, target)
    if contender.tile or traits.op not in ("forward", "backward"):
        return kernel.tile
    return kernel.for_lengths(*workload.tile_lengths, target, workload.pairs).tile


def needed_kernels(
    contender: Contender, workloads: Sequence[Workload], target: str | None = None
) -> Iterator[Request]:
    """The kernels that checking and timing a kernel launches: its own, of a backward also the forwards before it."""
    from cute_attn.compiler import registry
    from cute_attn.host.backward import kernels_of

    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    for workload in workloads:
        try:
            kernel = registry.lookup(traits, tile_at(contender, workload, target), target)
        except registry.Unsupported:  # as preparing it will say
            continue
        if traits.op == "forward":
            yield traits, kernel.tile, target
            continue
        yield from ((*part, target) for part in kernels_of(kernel))
        variant = traits.variant if ("forward", traits.arch, traits.variant) in registry.KERNELS else ""
        forward = Contender(replace(traits, op="forward", bias_grad=False, variant=variant).name)
        for size in (workload, *small_sizes(traits, kernel.tile)):
            yield Traits.parse(forward.kernel), tile_at(forward, size, target), target


def _is_built(request: Request) -> bool:
    from cute_attn.compiler import registry

    traits, tile, target = request
    return is_built(registry.lookup(traits, tile, target), target or default_target(traits.arch))


def _relative(result: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((result.double() - exact).abs().max() / exact.abs().max())


@dataclass(frozen=True)
class Part:
    """The last queries of one sequence, with the query heads of one key head: few enough for the reference.

    Attributes:
        name: the workload's.
        expected: its inputs and results.
        rows_q, rows_k: rows of the packed sequences, or of each batch.
        heads: how many query heads.
        kept: which of the results are compared: of a backward's, dK and dV only if all queries are there.
        packed: whether tensors have no batch.
    """

    name: str
    expected: Expected
    rows_q: slice
    rows_k: slice
    heads: int
    kept: tuple[int, ...]
    packed: bool

    @staticmethod
    def of(workload: Workload, x: Inputs, most: int = _MAX_SCORES) -> "Part":
        """Of the longest sequence, of a forward with one head; at most so many scores."""
        lengths = workload.sequences
        index = max(range(len(lengths)), key=lambda i: lengths[i][0]) if workload.lengths else 0
        (seqlen_q, seqlen_k), backward = lengths[index], workload.op == "backward"
        first_q, first_k = (sum(n[i] for n in lengths[:index]) if workload.lengths else 0 for i in (0, 1))
        heads = workload.nheads // workload.nheads_kv if backward else 1
        queries = min(seqlen_q, max(1, most // (heads * seqlen_k)))
        rows_q = slice(first_q + seqlen_q - queries, first_q + seqlen_q)
        rows_k = slice(first_k, first_k + seqlen_k)

        def cut(tensor: Tensor, rows: slice, count: int) -> Tensor:
            return (tensor if workload.lengths else tensor[0])[rows, :count][None].detach().clone()

        part = replace(
            workload,
            batch=1,
            seqlen=queries,
            seqlen_k=seqlen_k,
            nheads=heads,
            nheads_kv=1,
            lengths=(),
            lengths_k=(),
        )
        inputs = Inputs(
            cut(x.q, rows_q, heads),
            cut(x.k, rows_k, 1),
            cut(x.v, rows_k, 1),
            None if x.bias is None else x.bias[:1, :heads, rows_q].detach().clone(),
            None if x.alibi_slopes is None else x.alibi_slopes[:heads],
            None,
            sinks=None if x.sinks is None else x.sinks[:heads],
        )
        grad = None
        if backward:
            out = x.q.new_empty((*x.q.shape[:-1], workload.head_dim_v))
            grad = cut(peers.output_gradient(out), rows_q, heads)
        whole = queries == seqlen_q
        kept = (
            (0,) if not backward else (0, *((1, 2) if whole else ()), *((3,) if workload.bias_grad else ()))
        )
        state = torch.zeros(2, dtype=torch.int64, device=x.q.device)
        expected = Expected.from_inputs(part, inputs, state, grad)
        exact, plain = (tuple(results[i] for i in kept) for results in (expected.exact, expected.plain))
        expected = replace(expected, exact=exact, plain=plain)
        return Part(workload.name, expected, rows_q, rows_k, heads, kept, bool(workload.lengths))

    def cut(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The part of a run's output, or gradients, that ``expected`` has."""
        where = [(self.rows_q, self.heads), (self.rows_k, 1), (self.rows_k, 1)]
        found = []
        for i in self.kept:
            if i == 3:
                found.append(results[3][:1, : self.heads, self.rows_q])
                continue
            rows, count = where[i]
            found.append((results[i] if self.packed else results[i][0])[rows, :count][None])
        return found
