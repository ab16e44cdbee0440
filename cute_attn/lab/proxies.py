"""Check that a Hopper kernel's machine code orders the two proxies of shared memory.

TMA accesses shared memory through the async proxy; ldmatrix and ordinary loads and stores use the generic proxy. An
mbarrier orders accesses of one proxy only. A proxy fence (``FENCE.VIEW.ASYNC``) is therefore needed in two cases:

- a warp whose threads accessed a stage must fence before it releases the stage, which TMA fills next;
- a warp that wrote data for TMA to store or reduce to global memory must fence before it starts the store, or before
  it signals the warp that does.

Neither a comparison with a reference nor compute-sanitizer finds a missing fence reliably; the machine code shows it.

mbarriers are told apart by the constant offset of their address, which ptxas keeps in the instruction. A pipeline that
TMA fills is recognised by its producer: a warp waits for one barrier (empty), then announces bytes at another (full).
A warp holds a stage from its wait for a full barrier to its arrival at the empty barrier. Every access to shared memory
meanwhile counts as one to the stage: the check may ask for an unneeded fence, but does not miss a needed one.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cute_attn.lab.sass import Code, Instruction

_ACCESSES = ("LDS", "LDSM", "STS", "STSM", "ATOMS")
_WRITES = ("STS", "STSM", "ATOMS")
_TMA_READS = ("UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
_STORE_TO_PEER = "STAS"
_FILLS = ("UTMALDG", _STORE_TO_PEER)
_OFFSET = re.compile(r"\[(?:[^\]]*?\+)?(0x[0-9a-f]+)\]")


@dataclass(frozen=True)
class TmaPipeline:
    """A pipeline whose stages TMA fills, by the offsets of its first full and its first empty mbarrier."""

    full: int
    empty: int

    def is_full(self, offset: int) -> bool:
        return self.full <= offset < self.empty

    def is_empty(self, offset: int) -> bool:
        return self.empty <= offset < 2 * self.empty - self.full


@dataclass(frozen=True)
class Unordered:
    """An instruction that, on some path, no proxy fence separates from its warp's earlier ``accesses``: the release of
    a stage, the start of a TMA store, or the arrival at the barrier that a warp waits for before such a start.
    """

    instruction: Instruction
    accesses: tuple[Instruction, ...]

    def __str__(self) -> str:
        first = self.accesses[0]
        return (
            f"at {_place(self.instruction)}, since {first.name} at {_place(first)}"
            f"{f' and {len(self.accesses) - 1} more' if len(self.accesses) > 1 else ''}"
        )


@dataclass(frozen=True)
class ProxyOrder:
    """Pipelines that TMA fills. ``releases``: how many instructions release their stages; ``by_threads``: how many of
    these follow accesses by threads. ``unordered``: releases and TMA stores without a fence that they need.
    """

    pipelines: tuple[TmaPipeline, ...]
    releases: int
    by_threads: int
    unordered: tuple[Unordered, ...]

    def __str__(self) -> str:
        if not self.unordered:
            if not self.by_threads:
                return "none needed: no thread accesses what TMA fills"
            which = "the release" if self.by_threads == 1 else f"each of the {self.by_threads} releases"
            return f"at {which} after accesses by threads"
        return f"{len(self.unordered)} missing: {'; '.join(map(str, self.unordered[:3]))}"


def proxy_order(code: Code) -> ProxyOrder:
    """Check the proxy fences of a kernel's machine code.

    Raises:
        ValueError: its barriers cannot be told apart, or no release of a pipeline's stages is found.
    """
    pipelines = _pipelines(code)
    needed_by_stores = _barriers_before_stores(code, pipelines)
    walk = _Walk(pipelines, needed_by_stores)
    graph, before = code.graph, {0: _State()}
    pending = [0]
    while pending:
        block = pending.pop()
        after = before[block]
        for i in code.blocks[block]:
            after = walk.after(i, after)
        for following in graph.successors(block):
            joined = before[following].joined(after) if following in before else after
            if joined != before.get(following):
                before[following] = joined
                pending.append(following)
    instruction_at = {i.address: i for i in code.instructions}
    released = [_offset(instruction_at[address]) for address in walk.releases]
    lost = [f"{p.full:#x}" for p in pipelines if not any(map(p.is_empty, released))]
    if lost:
        raise ValueError(f"no release of the stages of the mbarrier at {', '.join(lost)} was found")
    unordered = (
        Unordered(instruction_at[address], tuple(instruction_at[a] for a in sorted(accesses)))
        for address, accesses in sorted(walk.unordered.items())
    )
    return ProxyOrder(pipelines, len(walk.releases), len(walk.by_threads), tuple(unordered))


class _State(NamedTuple):
    """What may hold for a warp at a place in the code, over all paths to it.

    Attributes:
        held: pipelines with a stage that the warp holds.
        accessed: (pipeline, address of an access while its stage is held).
        unfenced: the same since the last fence.
        written: addresses of writes since the last fence: all STSM, other writes only while a stage is held. This
            leaves out the work items and replay lists that warps exchange.
    """

    held: frozenset[TmaPipeline] = frozenset()
    accessed: frozenset[tuple[TmaPipeline, int]] = frozenset()
    unfenced: frozenset[tuple[TmaPipeline, int]] = frozenset()
    written: frozenset[int] = frozenset()

    def joined(self, other: "_State") -> "_State":
        both: Any = zip(self, other, strict=True)
        return _State(*(one | another for one, another in both))


@dataclass
class _Walk:
    """Follows a warp through blocks of code, and collects releases and missing fences."""

    pipelines: tuple[TmaPipeline, ...]
    needed_by_stores: frozenset[int]
    releases: set[int] = field(default_factory=set)
    by_threads: set[int] = field(default_factory=set)
    unordered: dict[int, set[int]] = field(default_factory=dict)

    def after(self, i: Instruction, state: _State) -> _State:
        held, accessed, unfenced, written = state
        if i.opcode in _ACCESSES:
            new = {(pipeline, i.address) for pipeline in held}
            if i.opcode == "STSM" or (held and i.opcode in _WRITES):
                written |= {i.address}
            return _State(held, accessed | new, unfenced | new, written)
        if i.name.startswith("FENCE.VIEW.ASYNC") and i.predicate in ("", "@PT"):
            return _State(held, accessed, frozenset(), frozenset())
        if i.opcode in _TMA_READS:
            self._report(i, written)
        elif _is_wait(i):
            held |= {p for p in self.pipelines if p.is_full(_offset(i))}
        elif i.name.startswith("SYNCS.ARRIVE") and not _announces_bytes(i):
            if _offset(i) in self.needed_by_stores:
                self._report(i, written)
            for pipeline in (p for p in self.pipelines if p.is_empty(_offset(i))):
                self.releases.add(i.address)
                if any(p == pipeline for p, _ in accessed):
                    self.by_threads.add(i.address)
                self._report(i, (a for p, a in unfenced if p == pipeline))
                held -= {pipeline}
                accessed = frozenset(pair for pair in accessed if pair[0] != pipeline)
                unfenced = frozenset(pair for pair in unfenced if pair[0] != pipeline)
        return _State(held, accessed, unfenced, written)

    def _report(self, i: Instruction, accesses: Iterable[int]) -> None:
        found = set(accesses)
        if found:
            self.unordered.setdefault(i.address, set()).update(found)


def _pipelines(code: Code) -> tuple[TmaPipeline, ...]:
    """Find the pipelines that TMA fills, by their producers: a wait for an empty barrier, then bytes at a full one."""
    barriers = sorted({_offset(i) for i in code.instructions if i.name.startswith("SYNCS.EXCH")})
    from_peer = _announced_of_peer(code)
    found, empty = set(), None
    for i in code.instructions:
        if _is_wait(i):
            empty = _offset(i)
        elif _announces_bytes(i) and i.address not in from_peer:
            full = _offset(i)
            if empty is None or full not in barriers or empty not in barriers or empty <= full:
                raise ValueError(f"which mbarriers the producer uses at {i.address:#x} is not clear")
            found.add(TmaPipeline(full, empty))
    pipelines = tuple(sorted(found, key=lambda p: p.full))
    if not pipelines and any(i.opcode == "UTMALDG" for i in code.instructions):
        raise ValueError("TMA loads, and no producer that announces its bytes was found")
    if any(a.empty > b.full for a, b in itertools.pairwise(pipelines)):
        raise ValueError(f"the mbarriers of pipelines overlap: {pipelines}")
    return pipelines


def _announced_of_peer(code: Code) -> set[int]:
    """Addresses of arrivals that announce bytes which threads of another CTA of the cluster store, not TMA.

    In such an exchange the warp next stores to the other CTA, or waits for the same barrier.
    """
    found = set()
    for at, i in enumerate(code.instructions):
        if _announces_bytes(i):
            following = (x for x in code.instructions[at + 1 :] if x.opcode in _FILLS or _is_wait(x))
            after = next(following, i)
            if after.opcode == _STORE_TO_PEER or (_is_wait(after) and _offset(after) == _offset(i)):
                found.add(i.address)
    return found


def _barriers_before_stores(code: Code, pipelines: tuple[TmaPipeline, ...]) -> frozenset[int]:
    """Offsets of the barriers that a warp waits for before it starts a TMA store of data from other warps."""
    waits = [i for i in code.instructions if _is_wait(i)]
    addresses = [i.address for i in waits]
    offsets = set()
    for i in code.instructions:
        if i.opcode in _TMA_READS and (before := bisect_left(addresses, i.address)):
            offset = _offset(waits[before - 1])
            if not any(p.is_full(offset) or p.is_empty(offset) for p in pipelines):
                offsets.add(offset)
    return frozenset(offsets)


def _is_wait(i: Instruction) -> bool:
    return i.name.startswith("SYNCS.PHASECHK")


def _announces_bytes(i: Instruction) -> bool:
    """True for an arrival that also states, in a register, how many bytes will be written."""
    return i.name.startswith("SYNCS.ARRIVE") and i.operands[-1] != "RZ"


def _offset(i: Instruction) -> int:
    """The constant term of an mbarrier's address."""
    for operand in i.operands:
        if "[" in operand:
            found = _OFFSET.search(operand)
            return int(found[1], 16) if found else 0
    raise ValueError(f"{i} has no address")


def _place(i: Instruction) -> str:
    return f"{i.file.rpartition('/')[2]}:{i.line}" if i.file else f"{i.address:#x}"
