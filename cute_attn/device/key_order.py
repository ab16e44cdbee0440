"""Which key blocks a block of threads of a backward works on."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.math import opaque
from cute_attn.device.seqlen import SeqlenInfo, Seqlens


@dataclass(frozen=True)
class KeyBlocks:
    """One kv head's key blocks ``first``, ``first + num_splits``, ... of one batch."""

    first: Int32
    head_kv: Int32
    batch: Int32
    info: SeqlenInfo


@dataclass(frozen=True)
class KeyOrder:
    """All (first key block, kv head, batch) in the order in which they start; a block of threads has one of them.

    A plane is a (batch, kv head), heads fastest. Without ``longest_first`` the key blocks of a plane follow each other:
    those that run together read the same queries and add to the same dQ.

    With it, planes are taken a section at a time, as many as keep their dQ in L2, and a section starts with the first
    key blocks of its planes, which under a causal band are seen by the most queries.
    """

    num_splits: cute.FastDivmodDivisorV2  # first key blocks of a plane
    nheads_kv: cute.FastDivmodDivisorV2
    section_blocks: cute.FastDivmodDivisorV2
    planes: cute.FastDivmodDivisorV2  # of a section
    last_planes: cute.FastDivmodDivisorV2  # of the last section
    last_section: Int32
    blocks: Int32
    longest_first: Constexpr

    @staticmethod
    def make(
        num_splits: Int32, nheads_kv: Int32, batch: Int32, section_planes: Int32, longest_first: bool
    ) -> "KeyOrder":
        """On the host; ``section_planes``: how many planes share L2."""
        all_planes = cutlass.max(nheads_kv * batch, 1)
        planes = cutlass.max(cutlass.min(section_planes, all_planes), 1)
        sections = cute.ceil_div(all_planes, planes)
        divisor = cute.FastDivmodDivisorV2
        return KeyOrder(
            num_splits=divisor(cutlass.max(num_splits, 1)),
            nheads_kv=divisor(cutlass.max(nheads_kv, 1)),
            section_blocks=divisor(cutlass.max(num_splits * planes, 1)),
            planes=divisor(planes),
            last_planes=divisor(all_planes - (sections - 1) * planes),
            last_section=sections - 1,
            blocks=num_splits * nheads_kv * batch,
            longest_first=longest_first,
        )

    @cute.jit
    def place(self, seqlens: Seqlens) -> KeyBlocks:
        """What the running block has."""
        plane, first = self.plane_of(opaque(cute.arch.block_idx()[0]))
        batch, head_kv = (cute.arch.make_warp_uniform(x) for x in divmod(plane, self.nheads_kv))
        return KeyBlocks(first, head_kv, batch, SeqlenInfo.read(seqlens, batch))

    @cute.jit
    def plane_of(self, block: Int32):
        """(plane, first key block) of a block of threads."""
        if cutlass.const_expr(self.longest_first):
            section, position = divmod(block, self.section_blocks)
            first, plane = divmod(position, self.planes)
            if section == self.last_section:
                first, plane = divmod(position, self.last_planes)
            plane = plane + section * self.planes.divisor
        else:
            plane, first = divmod(block, self.num_splits)
        return plane, first


@cute.jit
def rows_of_keys(seqlens: Seqlens, tensor: cute.Tensor, batch: Int32) -> Int32:
    """How many keys of ``batch`` exist in ``tensor``, used or not: (batch, rows, ...), or packed."""
    starts = seqlens.cu_seqlens_k
    rows = Int32(0)
    if cutlass.const_expr(starts is not None):
        rows = starts[batch + 1] - starts[batch]  # type: ignore[index]
    else:
        rows = Int32(tensor.shape[1])
    return rows


def section_planes(l2_bytes: int, plane_bytes: Int64) -> Int32:
    """How many planes of ``plane_bytes`` share ``l2_bytes``: one at least."""
    return Int32(cutlass.max(l2_bytes // cutlass.max(plane_bytes, 1), 1))
