"""Shared-memory swizzles: which one a row needs, and what it does to an offset. Plain Python, no DSL import.

A shared-memory bank is 4 bytes wide and there are 32, so 128 bytes pass in one wavefront. Eight rows that start at the
same bank would send the eight 16-byte pieces of an ldmatrix to the same four banks. A swizzle exchanges the 16-byte
pieces of a row according to the row's index, so that a column of pieces covers all the banks.
"""

from dataclasses import dataclass
from typing import Any

VECTOR_BYTES = 16
BANKS = 32
BANK_BYTES = 4
_ROW_BYTES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Swizzle:
    """CuTe's S<bits,base,shift>: flips ``bits`` bits from ``base`` up with those that are ``shift`` places higher."""

    bits: int
    base: int
    shift: int

    def __call__(self, offset: Any) -> Any:
        """The swizzled offset of an int, or of an integer array element by element."""
        mask = ((1 << self.bits) - 1) << self.base
        return offset ^ ((offset >> self.shift) & mask)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"


def atom_cols(cols: int, width: int) -> int:
    """Columns that are stored together as one row of a swizzle atom: the widest of 128, 64, 32, 16 bytes that divides.

    cols: row length in elements; width: bits of an element. Raises ValueError if no whole 16 bytes divide a row.
    """
    for row_bytes in _ROW_BYTES:
        if cols > 0 and cols * width % (row_bytes * 8) == 0:
            return row_bytes * 8 // width
    raise ValueError(
        f"cols={cols} of {width} bits: a row must be a positive multiple of {VECTOR_BYTES} bytes"
    )


def choose_swizzle(cols: int, width: int, bits: int | None = None) -> Swizzle:
    """The swizzle for rows of ``cols`` elements of ``width`` bits, in units of elements.

    bits: None takes the widest one that stays within an atom of 8 rows, which is free of bank conflicts; a smaller
    number exchanges among fewer pieces, 0 leaves the rows as they are. Raises ValueError if bits is too large.
    """
    widest = (atom_cols(cols, width) * width // (VECTOR_BYTES * 8)).bit_length() - 1
    if bits is None:
        bits = widest
    if not 0 <= bits <= widest:
        raise ValueError(f"swizzle_bits={bits}: rows of {cols} elements of {width} bits accept 0 to {widest}")
    return Swizzle(bits, (VECTOR_BYTES * 8 // width).bit_length() - 1, 3)
