"""What a tile costs, from its machine code: no GPU is needed.

    print(verdict("forward-sm90-bf16-d128", "tile_n=160"))

The clocks of a step are lower bounds, one for each pipe: what the multiprocessor's pipe needs for the instructions of
one step of one block, if nothing else made it wait. The pipe with the most clocks bounds the loop. If a step takes far
longer than that on a GPU, latency bounds it; the sum of a warp's stalls is a lower bound of the latency.
"""

import functools
import linecache
import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from cute_attn import compiler
from cute_attn.compiler import CompiledKernel, SpillWarning, registry
from cute_attn.kernels.base import StepContent
from cute_attn.lab.copies import Conflicts, conflicts
from cute_attn.lab.findings import findings
from cute_attn.lab.gpu import ADDED_BYTES, MULTIPROCESSORS, SCHEDULERS, SHARED_BYTES, SPECIAL, resident_blocks
from cute_attn.lab.proxies import ProxyOrder, proxy_order
from cute_attn.lab.rank import check_verdict, estimate
from cute_attn.lab.sass import MMA, PACKAGES, Code, Instruction, Step, StepNotFound
from cute_attn.lab.tables import Printed, Table, brief_tile, counted
from cute_attn.tiles import text_of
from cute_attn.traits import Traits

_SPECIAL = ("MUFU", "F2F", "I2F", "F2I")  # conversions of one number go through the same pipe
SPILLS = ("LDL", "STL")
_SHARED = ("LDS", "LDSM", "STS", "STSM", "LDGSTS")
_MEMORY = ("LDS", "STS", "LDGSTS", "STG", "RED", "REDG", "ATOMG", *SPILLS)
ROWS_OF_FRAGMENT = 8
"""Rows of an accumulator that one register of a warp's threads covers."""
MOST_LINES = 20


@dataclass(frozen=True)
class Clocks:
    """Clocks that the pipes of a multiprocessor need for one step of one block, and that a single warp needs.

    Attributes:
        shared: clocks of shared memory and the L1 cache, which are the same memory: accesses of threads, wgmma,
            cp.async and TMA, with bank conflicts.
        warp: the sum of a warp's stalls. The other warps of its scheduler issue meanwhile.
        global_loads: the clocks of ``shared`` that threads' loads from global memory take, such as a bias or a table.
        additions: clocks of fp32 additions to global memory, such as a backward's to dQ, from registers or in bulk.
    """

    tensor: float
    special: float
    issue: float
    shared: float
    warp: float
    global_loads: float = 0.0
    additions: float = 0.0

    @property
    def pipes(self) -> dict[str, float]:
        """The pipes' clocks, by name; additions if there are any."""
        names = ("tensor cores", "special functions", "issue", "shared memory")
        found = dict(zip(names, (self.tensor, self.special, self.issue, self.shared), strict=True))
        return found | ({"additions": self.additions} if self.additions else {})

    @property
    def estimate(self) -> float:
        """What a step probably takes: the root of the sum of the pipes' squares, since they overlap incompletely."""
        return math.hypot(*self.pipes.values())

    @property
    def bound(self) -> str:
        """The pipe with the most clocks."""
        return max(self.pipes, key=lambda name: self.pipes[name])


@dataclass(frozen=True)
class StepCost:
    """The steady step: address of its loop, instructions of one warp, scores of a thread (``elements``) and of a block
    (``scores``). CTAs of a cluster that hold the same scores count a fraction each.
    """

    address: int
    instructions: int
    mma: int
    exp2: int
    elements: int
    scores: int
    clocks: Clocks


@dataclass(frozen=True)
class LineCost:
    """Instructions of a steady step, and their stalls in clocks, that come from one line of the source."""

    file: str
    line: int
    instructions: int
    stalls: int
    source: str

    @property
    def place(self) -> str:
        """File in its package and line, such as ``epilogues/softmax.py:100``."""
        path = Path(self.file)
        package = next((folder for folder in path.parents if folder.name in PACKAGES), path.parent)
        within = package.parent if package.name == "layouts" else package
        return f"{path.relative_to(within).as_posix()}:{self.line}"


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a kernel with a tile costs; ``words.ini`` explains most of the terms.

    Attributes:
        reason: why the tile does not fit, or None if it does; the fields below are empty if it does not.
        spills_in_step, spills_outside: instructions that spill or reload registers, in a steady step and elsewhere.
        step: the steady step, or None; then ``no_step`` says why.
        lines: the step's costliest source lines; empty without line info.
        proxies: the check of proxy fences between TMA and threads, or why the code could not be followed; None for a
            kernel without TMA.
        revision: the git revision of the sources, or "" for the running sources.
        steady, code: the machine code.
    """

    name: str
    target: str
    tile: str
    reason: str | None = None
    blocks: int = 0
    limited_by: str = ""
    registers: int = 0
    shared_memory_bytes: int = 0
    spills_in_step: int = 0
    spills_outside: int = 0
    warnings: tuple[str, ...] = ()
    instructions: int = 0
    step: StepCost | None = None
    no_step: str = ""
    copies: tuple[Conflicts, ...] = ()
    lines: tuple[LineCost, ...] = ()
    proxies: ProxyOrder | str | None = None
    revision: str = ""
    steady: Step | None = field(default=None, repr=False, compare=False)
    code: Code | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def conflicting(self) -> list[str]:
        """The names of copies that have bank conflicts, each with ``"8-way"`` or the like."""
        return [f"{copy.name} {copy.ways}-way" for copy in self.copies if copy.ways > 1]

    @property
    def uncounted(self) -> list[str]:
        """Opcodes of the step that access shared memory, if bank conflicts of no copy of the kernel were counted."""
        if self.steady is None or any(copy.minimum for copy in self.copies):
            return []
        return [opcode for opcode in _SHARED if self.steady.count(opcode)]

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, except the machine code."""
        hidden = ("steady", "code", "step", "copies", "lines", "proxies")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        step = asdict(self.step) | {"bound": self.step.clocks.bound} if self.step else None
        return plain | {
            "step": step,
            "copies": [asdict(one) for one in self.copies],
            "proxies": None if self.proxies is None else str(self.proxies),
            "lines": [asdict(line) | {"place": line.place} for line in self.lines],
        }

    def brief(self) -> str:
        """The tile without fields at their class's default; the whole tile if the class is not known."""
        return brief_tile(self.name, self.target, self.tile)

    def __rich__(self) -> Printed:
        return shown(self)

    def __str__(self) -> str:
        return str(Printed(shown(self), *(line_table(self) for _ in self.lines[:1])))

    def __repr__(self) -> str:
        return f"Verdict({self.name} on {self.target}, {self.brief()}: {_in_short(self)})"

    def _repr_html_(self) -> str:
        return shown(self)._repr_html_()


def verdict(
    kernel: CompiledKernel | Traits | str,
    tile: Any = None,
    target: str | None = None,
    *,
    lines: bool = False,
    refuse: bool = True,
) -> Verdict:
    """Build a kernel if need be, and read what it costs.

    Args:
        kernel: traits or their name, or a compiled kernel, which has its tile and target.
        tile, target: see :func:`cute_attn.compile`.
        lines: also find the costliest source lines; builds with line info, which does not change the machine code.
        refuse: raise for a tile that the kernel cannot have; if False, the verdict's ``reason`` says why, and a table
            of several verdicts has a column for it.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: a ValueError; no kernel has those traits, or the tile does not fit.
    """
    if isinstance(kernel, CompiledKernel):
        if tile is not None or target is not None:
            raise ValueError(f"tile is {tile!r} and target {target!r}; accepted with a compiled kernel: None")
        if lines:
            kernel = compiler.compile(kernel.traits, kernel.tile, kernel.target, lines=True)
        return _of_compiled(kernel)
    traits = Traits.of(kernel)
    target = target or compiler.default_target(traits.arch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpillWarning)  # the verdict counts spills
            return _of_compiled(compiler.compile(traits, tile, target, lines=lines))
    except registry.Unsupported as error:
        if refuse:
            raise
        return Verdict(traits.name, target, text_of(tile) or "the default", str(error))


def without_functions(one: Verdict) -> Verdict | None:
    """The verdict on the same kernel and tile without users' epilogues, built if need be. None for a kernel without
    users' epilogues or without a steady step.
    """
    traits = Traits.parse(one.name)
    if not traits.epilogues or one.step is None:
        return None
    return verdict(replace(traits, epilogues=()), one.tile, one.target, refuse=False)


def _of_compiled(compiled: CompiledKernel) -> Verdict:
    """The verdict on a kernel of the running sources."""
    kernel = registry.lookup(compiled.traits, compiled.tile, compiled.target)
    with ThreadPoolExecutor(1) as beside:  # nvdisasm is a process, which takes as long as what follows
        code = beside.submit(Code.of, compiled.cubin, compiled.name)
        copies = conflicts(kernel)
        return judge(compiled, code.result(), content_of(kernel), copies)


def content_of(kernel: Any) -> StepContent | str:
    """The content that a kernel states for a step, or why it is not known."""
    if not hasattr(kernel, "step_content"):
        return f"not known: {type(kernel).__name__} has no method step_content"
    return kernel.step_content()


def judge(built: Any, code: Code, content: StepContent | str, copies: tuple[Conflicts, ...]) -> Verdict:
    """The verdict on machine code. built: a :class:`CompiledKernel`, or an object with most of its attributes.
    content: of the steady step, or why it is not known.
    """
    steady, step, no_step = None, None, content if isinstance(content, str) else ""
    if isinstance(content, StepContent):
        try:
            steady = code.step(content)
            counts = (steady.count(), steady.count(*MMA), steady.count("MUFU.EX2"), content.elements)
            scores = 32 * content.warps * content.elements // content.ctas
            needed = clocks(steady, content, built.target, copies)
            step = StepCost(steady.loop.header, *counts, scores, needed)
        except StepNotFound as error:
            no_step = str(error)
    proxies: ProxyOrder | str | None = None
    if any(i.opcode.startswith("UTMA") for i in code.instructions):
        try:
            proxies = proxy_order(code)
        except ValueError as error:
            proxies = f"not followed: {error}"
    used = (built.resources.registers, built.resources.shared_memory_bytes)
    blocks, limited_by = resident_blocks(built.target, _threads(built), *used)
    spills = sum(i.opcode in SPILLS for i in code.instructions)
    in_step = steady.count(*SPILLS) if steady else 0
    return Verdict(
        *(built.name, built.target, text_of(built.tile), None, blocks, limited_by, *used),
        *(in_step, max(spills - in_step, 0), tuple(built.warnings), len(code.instructions)),
        step=step,
        no_step=no_step,
        copies=copies,
        lines=tuple(lines_of(steady)[:MOST_LINES]) if steady else (),
        proxies=proxies,
        steady=steady,
        code=code,
    )


def _threads(built: Any) -> int:
    stated = re.search(r"\.reqntid (\d+), (\d+), (\d+)", built.ptx)
    if stated is None:
        raise ValueError(f"the PTX of {built.name} states no threads of a block (.reqntid)")
    return math.prod(map(int, stated.groups()))


def clocks(step: Step, content: StepContent, target: str, copies: Sequence[Conflicts] = ()) -> Clocks:
    """Lower bounds of a step's clocks on one multiprocessor, for one block."""
    machine = MULTIPROCESSORS[target]
    tensor = wavefronts = loads = added = 0.0
    factor = _conflict_factors(copies)
    for i, times in step.instructions:
        if i.opcode in MMA:
            tensor += times * _flops(i) / (machine.wgmma if i.opcode == "HGMMA" else machine.mma_sync)
        own = times * _wavefronts(i) * factor.get(i.opcode, 1.0)
        wavefronts += own
        if i.opcode == "LDG":
            loads += own
        if i.opcode in ("RED", "REDG"):
            added += times * 32 * 4 * int(next((m[4:] for m in i.modifiers if m.startswith("F32x")), "1"))
    warps, steps = content.warps, step.steps
    tensor, wavefronts, loads, added = (x * warps / steps for x in (tensor, wavefronts, loads, added))
    others, n = content.other_wgmma
    if others:
        other = Instruction(0, "HGMMA", (f"64x{n}x16",), ("", "gdesc"), "", 0)
        tensor += 4 * others * _flops(other) / machine.wgmma
        wavefronts += 4 * others * _wavefronts(other)
    shared = wavefronts + content.async_bytes / SHARED_BYTES
    special, issue = step.count(*_SPECIAL) * warps * 32 / SPECIAL, step.count() * warps / SCHEDULERS
    additions = (added + content.added_bytes) / ADDED_BYTES
    return Clocks(tensor, special, issue, shared, step.stalls, loads / shared if shared else 0.0, additions)


def _conflict_factors(copies: Sequence[Conflicts]) -> dict[str, float]:
    """Opcode -> wavefronts over the minimum without conflicts, summed over the kernel's copies with that opcode."""
    taken, least = Counter[str](), Counter[str]()
    for copy in copies:
        taken[copy.opcode] += copy.wavefronts
        least[copy.opcode] += copy.minimum
    return {opcode: taken[opcode] / least[opcode] for opcode in taken if least[opcode]}


@functools.cache
def _shape(modifiers: tuple[str, ...]) -> tuple[int, int, int]:
    """(m, n, k) of HGMMA.64x128x16 or HMMA.16816."""
    text = modifiers[0]
    if "x" in text:
        m, n, k = (int(extent) for extent in text.split("x"))
        return m, n, k
    return {"16816": (16, 8, 16), "1688": (16, 8, 8)}[text]


def _flops(i: Instruction) -> float:
    """Floating-point operations of one warp's matrix instruction; four warps issue one wgmma."""
    m, n, k = _shape(i.modifiers)
    return 2 * m * n * k / (4 if i.opcode == "HGMMA" else 1)


def _wavefronts(i: Instruction) -> float:
    """Shared-memory wavefronts of one warp's instruction without bank conflicts."""
    if i.predicate == "@!PT":  # never executed; ptxas puts such loads before a wait for cp.async
        return 0
    if i.opcode == "HGMMA":
        m, n, k = _shape(i.modifiers)
        a_in_smem = i.operands[1].startswith("gdesc")
        return 2 * k * (n + (m if a_in_smem else 0)) / SHARED_BYTES / 4
    if i.opcode in ("LDSM", "STSM"):
        return float(i.modifiers[-1]) if i.modifiers[-1].isdigit() else 1
    vectors = 4 if "128" in i.modifiers else 2 if "64" in i.modifiers else 1
    if i.opcode == "LDG":  # loads of scores' fragments: at least one for each of eight rows
        return max(vectors, ROWS_OF_FRAGMENT)
    return vectors if i.opcode in _MEMORY else 0


def lines_of(step: Step) -> list[LineCost]:
    """The source lines of a step, the costliest first; none if the kernel was built without line info."""
    instructions, stalls = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for i, times in step.instructions:
        if i.line:
            instructions[i.file, i.line] += times
            stalls[i.file, i.line] += times * i.stall
    ordered = sorted(instructions, key=lambda where: (-instructions[where], where))
    counts = {where: (instructions[where] // step.steps, stalls[where] // step.steps) for where in ordered}
    return [LineCost(*where, *both, linecache.getline(*where).strip()) for where, both in counts.items()]


# ---- tables ----


def shown(*verdicts: Verdict, verbose: bool = False) -> Printed:
    """Verdicts side by side, then a few sentences of findings. verbose: with all fields of the tiles."""
    return Printed(table(*verdicts, verbose=verbose), *map(Text, findings(*verdicts)))


def table(*verdicts: Verdict, verbose: bool = False) -> Table:
    """A table with a column per verdict; verbose: with all fields of the tiles. Raises TypeError without a verdict."""
    for one in verdicts or (None,):
        check_verdict("verdicts have", one)
    title, heads = _heads(verdicts, verbose)
    made = Table("", *heads, title=title)
    made.columns[0].no_wrap = len(verdicts) < 3  # then lines have room for it
    found = [_column(one) for one in verdicts]
    for what in dict.fromkeys(key for column in found for key in column):
        made.add_row(what, *(column.get(what, "-") for column in found))
    return made


def _heads(verdicts: Sequence[Verdict], verbose: bool) -> tuple[str | None, list[str]]:
    """A title, or None if kernels differ, and column heads: the first tile, and how the others differ from it."""
    tiles = [one.tile if verbose else one.brief() for one in verdicts]
    at = [f" at {one.revision}" if one.revision else "" for one in verdicts]
    if len({(one.name, one.target) for one in verdicts}) > 1:
        # A long name is two lines: a narrow column would break it anywhere.
        names = [re.sub(r"^(\w+-[\w:]+)-", r"\1\n-", one.name) for one in verdicts]
        title = None
        heads = [
            f"{name}\non {v.target},{tile}" for name, v, tile in zip(names, verdicts, tiles, strict=True)
        ]
    else:
        title, first = f"{verdicts[0].name} on {verdicts[0].target}", verdicts[0].tile.split(",")
        known = {field.partition("=")[0] for field in first}  # another revision may lack fields
        items = ([f for f in one.tile.split(",") if f.partition("=")[0] in known] for one in verdicts[1:])
        heads = [tiles[0], *(",".join(f for f in of if f not in first) or "the same" for of in items)]
    heads = [head + where for head, where in zip(heads, at, strict=True)]
    return title, [head.replace(",", ", ") for head in heads]


def _column(one: Verdict) -> dict[str, str]:
    if not one.fits:
        return {"fits": f"[red]no: {one.reason}"}
    spills = f"{one.spills_in_step} in the step, {one.spills_outside} outside"
    rows = {
        "fits": "yes",
        "blocks per multiprocessor": f"{one.blocks}, limited by {one.limited_by}",
        "registers per thread": str(one.registers),
        "shared memory per block": f"{one.shared_memory_bytes:,} bytes",
        "spills": f"[red]{spills}" if one.spills_in_step + one.spills_outside else "none",
        "bank conflicts": _bank_conflicts(one),
    }
    if one.proxies is not None:
        right = isinstance(one.proxies, ProxyOrder) and not one.proxies.unordered
        rows["proxy fences"] = str(one.proxies) if right else f"[red]{one.proxies}"
    if one.warnings:
        rows["ptxas"] = "[red]" + " ".join(one.warnings)
    if one.step is None:
        return rows | {"steady step": one.no_step}
    step, pipes = one.step, one.step.clocks.pipes
    rows["steady step"] = (
        f"{step.instructions:,} instructions per warp, {step.mma:,} of them matrix products, {step.exp2:,} exponentials"
    )
    rows["instructions per element"] = f"{step.instructions / step.elements:.2f}"
    for pipe, count in pipes.items():
        fraction = count / pipes[step.clocks.bound]
        bound = "  [bold]bound" if pipe == step.clocks.bound else f"  {fraction:.0%}"
        rows[f"clocks per step: {pipe}"] = f"{count:,.0f}{bound}"
    rows["clocks per step: one warp's stalls"] = f"{step.clocks.warp:,.0f}"
    least = 1000 * pipes[step.clocks.bound] / step.scores
    rows["clocks for 1,000 scores"] = f"at least {least:,.0f}, estimated {estimate(one):,.0f}"
    return rows


def _in_short(one: Verdict) -> str:
    if not one.fits:
        return "it does not fit"
    spills = one.spills_in_step + one.spills_outside or "no"
    step = f", bound by {one.step.clocks.bound}" if one.step else ""
    return (
        f"{counted(one.blocks, 'block')} per multiprocessor, {one.registers} registers, {spills} spills{step}"
    )


def _bank_conflicts(one: Verdict) -> str:
    conflicting = one.conflicting + [
        f"{copy.name} not counted: {copy.reason}" for copy in one.copies if copy.reason
    ]
    if conflicting:
        return "[red]" + "; ".join(conflicting)
    count = len(one.copies)
    if not count:
        return f"[red]not counted: {', '.join(one.uncounted)}" if one.uncounted else "no copies to count"
    return f"none in {count} cop{'y' if count == 1 else 'ies'}"


def line_table(one: Verdict) -> Table:
    """The costliest source lines of a verdict that has them."""
    total = one.step.instructions if one.step else 0
    made = Table("instructions", "stalls", "where", "source", title=f"{total} instructions of a steady step")
    for line in one.lines:
        made.add_row(str(line.instructions), str(line.stalls), line.place, Text(line.source))
    return made
