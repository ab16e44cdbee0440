"""A kernel's machine code: instructions with their stalls and source lines, loops, and the steady step.

nvdisasm gives opcodes, operands and source lines. The stalls are read from the encodings: from sm_70 on bits 105 to 108
of an instruction's 128 say how many clocks the warp waits after issuing it (Jia et al. 2018,
https://arxiv.org/abs/1804.06826). NVIDIA does not document them.

Loops are natural loops: a back edge goes to a block that dominates its source (Aho, Lam, Sethi, Ullman, section 9.6).
Blocks that only retry a wait for an mbarrier are placed after the code and branch back into it; they are left out.
The steady step is an iteration of the main loop that skips masks and rescaling.
"""

import functools
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import networkx as nx
except ImportError:
    raise ImportError("reading machine code needs networkx; pip install networkx") from None

from cute_attn.compiler import cubin as _cubin
from cute_attn.kernels.base import Loops, StepContent

PACKAGES = ("cute_attn", "layouts")
SOURCES = Path(__file__).resolve().parents[2]
"""The folder of the running packages."""
BYTES = 16
"""Size of an instruction."""
MMA = ("HMMA", "HGMMA")
_ENDS = ("BRA", "BRX", "JMP", "RET", "EXIT")
_RETRY = ("BRA", "NANOSLEEP")
MAX_UNROLL = 4
"""Maximum steps per iteration of the main loop."""


class StepNotFound(ValueError):
    """No loop of the machine code has the instruction counts that the kernel states for a step."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: its offset in the code, in bytes.
        operands: as nvdisasm prints them, destinations first.
        stall: clocks until the warp may issue its next instruction.
        file, line: source file and line; "" and 0 without line info.
    """

    address: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str
    stall: int
    file: str = ""
    line: int = 0

    @property
    def name(self) -> str:
        """Opcode and modifiers, such as ``"MUFU.EX2"``."""
        return ".".join((self.opcode, *self.modifiers))

    @property
    def target(self) -> int | None:
        """The address that a branch jumps to, or None if the instruction states none."""
        return int(self.operands[-1], 16) if self.opcode == "BRA" and self.operands else None

    @property
    def may_fall_through(self) -> bool:
        """True if the next instruction may follow it."""
        conditional = self.predicate not in ("", "@PT") or (self.opcode == "BRA" and len(self.operands) > 1)
        return conditional or self.opcode not in _ENDS

    def __str__(self) -> str:
        return f"{self.predicate} {self.name} {', '.join(self.operands)}".strip()


Weighted = tuple[Instruction, int]
"""An instruction and how often an iteration issues it."""


@dataclass(frozen=True)
class Loop:
    """A natural loop: the address of its first block, and the addresses of all its blocks."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Step:
    """One iteration of the main loop along the path that a steady step takes.

    Attributes:
        loop: the loop.
        instructions: of one warp, each with its number of executions, which counts iterations of inner loops.
        steps: number of query blocks times key blocks per iteration; 1 unless ptxas has unrolled the loop.
    """

    loop: Loop
    instructions: tuple[Weighted, ...]
    steps: int

    def count(self, *names: str) -> int:
        """Number of instructions per step with one of ``names``, plus any modifiers; without ``names``, of all."""
        starts = tuple(f"{name}." for name in names) or ("",)
        return sum(n for i, n in self.instructions if f"{i.name}.".startswith(starts)) // self.steps

    @property
    def stalls(self) -> int:
        """Minimum clocks that one warp needs for a step: the sum of its instructions' stalls."""
        return sum(i.stall * n for i, n in self.instructions) // self.steps


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel, in the order of their addresses."""

    instructions: tuple[Instruction, ...]
    name: str = field(default="", compare=False)

    @staticmethod
    def of(cubin: bytes, name: str = "", sources: Path = SOURCES) -> "Code":
        """Read the code of a cubin with one kernel. Source files are looked up in ``sources``: a cached cubin's line
        info may name the files of another checkout with the same sources.
        """
        return Code(tuple(_instructions(cubin, sources)), name)

    @functools.cached_property
    def blocks(self) -> dict[int, tuple[Instruction, ...]]:
        """Basic blocks by the address of their first instruction."""
        leaders = {0}
        for i in self.instructions:
            if i.opcode in _ENDS:
                leaders.add(i.address + BYTES)
            if i.target is not None:
                leaders.add(i.target)
        starts = sorted(a for a in leaders if a < BYTES * len(self.instructions))
        ends = [*starts[1:], BYTES * len(self.instructions)]
        return {a: self.instructions[a // BYTES : b // BYTES] for a, b in zip(starts, ends, strict=True)}

    @functools.cached_property
    def graph(self) -> nx.DiGraph:
        """The control-flow graph of the blocks, without unreachable blocks and blocks that only retry a wait."""
        graph = nx.DiGraph()
        for start, block in self.blocks.items():
            graph.add_node(start)
            last = block[-1]
            if last.target is not None:
                graph.add_edge(start, last.target)
            if last.may_fall_through and last.address + BYTES in self.blocks:
                graph.add_edge(start, last.address + BYTES)
        for start, block in self.blocks.items():
            if _only_retries(block):
                before, after = set(graph.predecessors(start)), set(graph.successors(start))
                graph.remove_node(start)
                graph.add_edges_from((a, b) for a in before - {start} for b in after - {start})
        return graph.subgraph({0} | nx.descendants(graph, 0)).copy()

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in the order of their headers' addresses."""
        graph = self.graph
        bodies: dict[int, set[int]] = {}
        dominators = nx.immediate_dominators(graph, 0)
        for latch, header in graph.edges:
            if header in _chain(dominators, latch):
                bodies.setdefault(header, {header}).update(_body(graph, latch, header))
        return tuple(Loop(header, frozenset(bodies[header])) for header in sorted(bodies))

    def step(self, content: StepContent) -> Step:
        """The steady step: of the innermost loops with ``content``, the one with the fewest instructions.

        A kernel may have several loops: those without a mask and with stale row maxima are shortest. Within a loop, the
        step is the path with the most asynchronous copies, wide copies first, and then the fewest instructions. It
        skips masks and rescaling, and starts the next loads of the best aligned rows.
        """
        found = [step for loop in self.loops if (step := self._step_of(loop, content)) is not None]
        inner = [s for s in found if not any(other.loop.blocks < s.loop.blocks for other in found)]
        if not inner:
            kernel = self.name or "the kernel"
            raise StepNotFound(
                f"the step was not found: no loop of {kernel} has {content.mma} matrix instructions and "
                f"{content.exp2} MUFU.EX2 a step, which its step_content states"
            )
        return min(inner, key=lambda step: step.count())

    def _step_of(self, loop: Loop, content: StepContent) -> Step | None:
        """A loop's steady step, or None if the loop does not have ``content``."""
        instructions = self._path(loop, content.loops)
        if instructions is None:
            return None
        mma = sum(n for i, n in instructions if i.opcode in MMA)
        steps = mma // content.mma
        step = Step(loop, instructions, max(1, steps))
        same = mma == steps * content.mma and 1 <= steps <= MAX_UNROLL
        return step if same and step.count("MUFU.EX2") >= content.exp2 else None

    def _path(self, loop: Loop, products: Loops) -> tuple[Weighted, ...] | None:
        """The instructions of one iteration along its steady path, or None if the loop has several entries."""
        inner = [other for other in self.loops if other.blocks < loop.blocks]
        inner = [a for a in inner if not any(a.blocks < b.blocks for b in inner)]
        node_of = {block: a.header for a in inner for block in a.blocks}
        bodies: dict[int, tuple[Weighted, ...]] = {}
        for a in inner:
            body = self._path(a, ())
            if body is None:
                return None
            times = _iterations(sum(n for i, n in body if i.opcode in MMA), products, len(bodies))
            bodies[a.header] = tuple((i, n * times) for i, n in body)
        for block in loop.blocks - node_of.keys():
            bodies[block] = tuple((i, 1) for i in self.blocks[block])
        edges = [
            (node_of.get(a, a), node_of.get(b, b))
            for a, b in self.graph.subgraph(loop.blocks).edges
            if b != loop.header
        ]
        latches = {node_of.get(a, a) for a in self.graph.predecessors(loop.header) if a in loop.blocks}
        graph = nx.DiGraph((a, b) for a, b in edges if a != b)
        graph.add_node(loop.header)
        if not nx.is_directed_acyclic_graph(graph):
            return None
        path = _best_path(graph, loop.header, latches, lambda node: _cost(bodies[node]))
        return tuple(weighted for node in path for weighted in bodies[node])


def _instructions(cubin: bytes, sources: Path) -> Iterator[Instruction]:
    functions, files = _disassembled(cubin, sources)
    sections = {name: (offset, size) for name, offset, size in _cubin.sections(cubin)}
    if len(functions) != 1:
        raise ValueError(
            f"the machine code has {len(functions)} kernels; accepted: one, and `cute-attn compile` takes several"
        )
    listed = functions[0]["sass-instructions"]
    offset, size = sections[f".text.{functions[0]['function-name']}"]
    if size < BYTES * len(listed):
        raise ValueError(f"nvdisasm lists {len(listed)} instructions in {size} bytes of code")
    file, line = "", 0
    for n, item in enumerate(listed):
        if "source-line" in item:  # holds until the next one
            file, line = files[item["source-file-id"]], item["source-line"]
        _, high = struct.unpack_from("<QQ", cubin, offset + BYTES * n)
        opcode, *modifiers = item["opcode"].split(".")
        yield Instruction(
            BYTES * n,
            opcode,
            tuple(modifiers),
            tuple(filter(None, item.get("operands", "").split(","))),
            item.get("predicate", ""),
            stall=high >> 41 & 15,
            file=file,
            line=line,
        )


def _disassembled(cubin: bytes, sources: Path) -> tuple[list[Any], list[str]]:
    """Functions and source files of nvdisasm's JSON."""
    listing = _cubin.disassemble_json(cubin)
    try:
        _, functions, *tables = listing
        files = [
            str(_source(Path(table["directories"][entry["dir-idx"]]) / entry["file"], sources))
            for table in tables
            for entry in table["files"]
        ]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"nvdisasm's JSON has an unknown form: {error!r}") from error
    return functions, files


def _source(file: Path, sources: Path) -> Path:
    """The path in ``sources`` of a package's file, if it exists there; else ``file``."""
    package = next((folder for folder in file.parents if folder.name in PACKAGES), None)
    here = sources / file.relative_to(package.parent) if package else file
    return here if here.is_file() else file


def _only_retries(block: Iterable[Instruction]) -> bool:
    """True if a block does nothing but try again to pass an mbarrier."""
    waits = [i.name.startswith("SYNCS.PHASECHK") for i in block]
    return any(waits) and all(wait or i.opcode in _RETRY for wait, i in zip(waits, block, strict=True))


def _chain(dominators: dict[int, int], block: int | None) -> Iterator[int]:
    """A block and its dominators, nearest first."""
    while block is not None:
        yield block
        above = dominators.get(block)
        block = None if above == block else above


def _body(graph: nx.DiGraph, latch: int, header: int) -> set[int]:
    """The blocks from which ``latch`` is reached without passing ``header``."""
    if latch == header:
        return {latch}
    return {latch, *nx.ancestors(graph.subgraph(graph.nodes - {header}), latch)}


def _iterations(mma: int, products: Loops, position: int) -> int:
    """Number of iterations of a step's inner loop number ``position``, which has ``mma`` matrix instructions."""
    times = [n for count, n in products if count == mma]
    if len(set(times)) > 1:  # then by their order
        return next((n for count, n in products[position:] if count == mma), times[-1])
    return times[0] if times else 1


def _cost(body: Iterable[Weighted]) -> tuple[int, ...]:
    """(minus asynchronous copies of 16 bytes, minus copies of 8, minus copies of 4, instructions)."""
    pairs = list(body)
    copies = Counter[str]()
    for i, n in pairs:
        if i.opcode == "LDGSTS":
            copies[i.modifiers[-1]] += n
    wide, half = copies["128"], copies["64"]
    return -wide, -half, wide + half - copies.total(), sum(n for _, n in pairs)


def _best_path(
    graph: nx.DiGraph, start: int, ends: set[int], cost: Callable[[int], tuple[int, ...]]
) -> list[int]:
    """The path of an acyclic graph from ``start`` to one of ``ends`` with the least sum of costs."""
    best = {start: (cost(start), [start])}
    for node in nx.topological_sort(graph):
        if node == start:
            continue
        before = [best[a] for a in graph.predecessors(node) if a in best]
        if before:
            sums, path = min(before, key=lambda item: item[0])
            best[node] = (tuple(a + b for a, b in zip(sums, cost(node), strict=True)), [*path, node])
    return min((best[end] for end in ends if end in best), key=lambda item: item[0])[1]
