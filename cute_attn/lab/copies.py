"""Bank conflicts of the copies to and from shared memory that a kernel's method ``copies`` states."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conflicts:
    """A copy of one whole tile: shared-memory wavefronts, their minimum without conflicts, and the n of "n-way".

    ``reason`` says why conflicts could not be counted, or is "".
    """

    name: str
    opcode: str
    wavefronts: int
    minimum: int
    ways: int
    reason: str = ""


def conflicts(kernel: Any) -> tuple[Conflicts, ...]:
    """Every copy of a kernel with its bank conflicts; none for a kernel that states no copies."""
    from layouts.banks import bank_conflicts  # loads the DSL

    found = []
    for one in kernel.copies().moves if hasattr(kernel, "copies") else ():
        dtype = getattr(kernel, "operand_dtype", kernel.dtype)
        try:
            counted = bank_conflicts(one.copy, one.layout, dtype, side=one.side)
        except ValueError as error:  # a user's layout and copy may not divide
            found.append(Conflicts(one.name, one.opcode, 0, 0, 0, str(error)))
            continue
        found.append(Conflicts(one.name, one.opcode, counted.wavefronts, counted.minimum, counted.ways))
    return tuple(found)
