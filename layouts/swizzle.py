"""Shared-memory swizzles for rows of a tile. Plain Python, no DSL import.

Shared memory has 32 banks of 4 bytes: 128 bytes per wavefront. If eight rows start at the same bank, the eight 16-byte
vectors of an ldmatrix are in the same four banks. A swizzle permutes the 16-byte vectors of a row by the row's index,
so that a column of vectors covers all banks.
"""

from dataclasses import dataclass
from typing import Any

VECTOR_BYTES = 16
BANKS = 32
BANK_BYTES = 4
_ROW_BYTES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Swizzle:
    """CuTe's S<bits,base,shift>: xors the ``bits`` bits from bit ``base`` up with the bits ``shift`` places higher."""

    bits: int
    base: int
    shift: int

    def __call__(self, offset: Any) -> Any:
        """The swizzled offset of an int, or of each element of an integer array."""
        mask = ((1 << self.bits) - 1) << self.base
        return offset ^ ((offset >> self.shift) & mask)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"


def bits_of(dtype: Any) -> int:
    """Bits of an element. Raises TypeError for dtypes that are not CUTLASS's, such as torch's."""
    width = getattr(dtype, "width", None)
    if not isinstance(width, int):
        raise TypeError(f"dtype is {dtype!r}; accepted: one of CUTLASS, such as cutlass.BFloat16")
    return width


def atom_cols(cols: int, width: int) -> int:
    """Columns of a swizzle atom: the widest of 128, 64, 32, 16 bytes that divides a row.

    cols: row length in elements; width: bits of an element. Raises ValueError unless 16 bytes divide a row.
    """
    for row_bytes in _ROW_BYTES:
        if cols > 0 and cols * width % (row_bytes * 8) == 0:
            return row_bytes * 8 // width
    raise ValueError(
        f"cols={cols} of {width} bits: a row must be a positive multiple of {VECTOR_BYTES} bytes"
    )


def choose_swizzle(cols: int, width: int, bits: int | None = None) -> Swizzle:
    """The swizzle of element offsets for rows of ``cols`` elements of ``width`` bits.

    bits: None for the widest swizzle within an atom of 8 rows, free of bank conflicts; 0 for no
    swizzle. Raises ValueError if bits is too large.
    """
    widest = (atom_cols(cols, width) * width // (VECTOR_BYTES * 8)).bit_length() - 1
    if bits is None:
        bits = widest
    if not 0 <= bits <= widest:
        raise ValueError(f"swizzle_bits={bits}: rows of {cols} elements of {width} bits accept 0 to {widest}")
    return Swizzle(bits, (VECTOR_BYTES * 8 // width).bit_length() - 1, 3)
