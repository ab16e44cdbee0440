"""The dispatch table: which kernel serves which attention, with its tile and cost, or why none does.

:func:`grid` has a row for each of a choice of traits. :func:`mem_efficient` has a row for each kernel of PyTorch's
memory-efficient backward; ``mem_efficient.csv`` states what each of these kernels serves.
"""

import csv
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from typing import Any, NamedTuple

from cute_attn.compiler import registry
from cute_attn.lab.gpu import resident_blocks
from cute_attn.tiles import MEASURED, TARGETS
from cute_attn.traits import ARCHS, DTYPES, MAX_HEAD_DIM, Traits

HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))


@dataclass(frozen=True)
class Row:
    """One attention and the kernel that serves it on a target: its tile, the tile's estimate of registers and shared
    memory, CTAs per multiprocessor; or the reason why there is none. ``name``: of PyTorch's kernel, if any, and traits.
    """

    name: str
    target: str
    tile: Any = None
    registers: int = 0
    shared_memory_bytes: int = 0
    blocks: int = 0
    reason: str | None = None


class Entry(NamedTuple):
    """A kernel of PyTorch's memory-efficient backward, as listed in its dispatch table.

    Attributes:
        aligned: whether rows must be multiples of 16 bytes.
        dropout: whether it supports dropout; it then also serves calls without dropout.
        block_i, block_j: queries and keys of a tile.
        max_head_dim: the largest head dim; 65536 means any.
        whole_blocks: whether lengths must be multiples of its blocks.
        only_on: targets that it is limited to; () means its generation and all later.
    """

    arch: str
    dtype: str
    aligned: bool
    dropout: bool
    block_i: int
    block_j: int
    max_head_dim: int
    whole_blocks: bool
    only_on: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name similar to PyTorch's, without the prefix."""
        words = [self.dtype, "aligned" if self.aligned else "unaligned", f"{self.block_i}x{self.block_j}"]
        words += [f"k{self.max_head_dim}"] + ["dropout"] * self.dropout + ["whole_blocks"] * self.whole_blocks
        return "_".join([*words, self.arch])

    def traits(self) -> Traits:
        """Traits of a kernel that covers this one: its largest head dim, a bias with a gradient, and its dropout.

        Rows that are not multiples of 16 bytes are padded before that kernel is launched.
        """
        head_dim = min(self.max_head_dim, 512 if self.aligned else MAX_HEAD_DIM)
        dropout = "mem_efficient" if self.dropout else ""
        scores: dict[str, Any] = {"mask": "causal", "bias": self.dtype, "bias_grad": True, "dropout": dropout}
        return Traits("backward", "sm80", self.dtype, head_dim, **scores)

    def row(self, target: str) -> Row:
        """The row of the kernel that covers this one on ``target``, or of the reason why none does."""
        if self.arch not in TARGETS:
            reason = (
                f"{self.arch} is older than {TARGETS[0]}, the oldest generation that the DSL compiles for"
            )
            return Row(self.name, self.arch, reason=reason)
        found = row(self.traits(), target)
        return replace(found, name=f"{self.name}: {found.name}")


def entries() -> list[Entry]:
    """All kernels of PyTorch's memory-efficient backward, as listed in its dispatch table ``cutlassB.h``."""
    text = resources.files("cute_attn.lab").joinpath("mem_efficient.csv").read_text()
    found = []
    for arch, dtype, aligned, dropout, i, j, dim, whole, only_on in list(csv.reader(text.splitlines()))[1:]:
        flags = (aligned == "true", dropout == "true")
        targets = tuple(only_on.split())
        found.append(Entry(arch, dtype, *flags, int(i), int(j), int(dim), whole == "true", targets))
    return found


def row(traits: Traits, target: str) -> Row:
    """A row with the registered kernel's default tile, or the reason why there is none."""
    try:
        tile = registry.lookup(traits, None, target).tile
    except registry.Unsupported as error:
        return Row(traits.name, target, reason=str(error))
    size, registers = tile.smem_bytes(traits), tile.registers(traits)
    blocks, _ = resident_blocks(target, tile.num_threads, registers, size)
    return Row(traits.name, target, tile, registers, size, blocks)


def grid(op: str, arch: str | None, target: str | None) -> list[Row]:
    """Rows for dtype x generation x head dims x dropout x bias; ``target``: by default sm90."""
    rows = []
    archs = ARCHS if arch is None else (arch,)
    kinds = product(DTYPES, archs, HEAD_DIMS, ("", "mem_efficient"), (False, True))
    for dtype, of, dims, dropout, bias in kinds:
        grad = bias and op == "backward"
        traits = Traits(op, of, dtype, *dims, dropout=dropout, bias=dtype if bias else "", bias_grad=grad)
        rows.append(row(traits, target or MEASURED))
    return rows


def mem_efficient(target: str | None) -> list[Row]:
    """A row for each kernel of PyTorch's memory-efficient backward that runs on ``target``. By default all kernels have
    a row, on the first target that they are limited to, or on sm90.
    """
    return [
        entry.row(target or (*entry.only_on, "sm90")[0])
        for entry in entries()
        if not entry.only_on or target is None or target in entry.only_on
    ]
