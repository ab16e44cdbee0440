"""Pictures show the models, and counts of bank conflicts equal those worked out by hand."""

import re
from collections import Counter
from html import unescape

import pytest
from cutlass import BFloat16, Float16

import layouts
from layouts import model
from layouts.show import BankConflicts, bank_conflicts, show


def mma():
    return layouts.tiled_mma_sm80(Float16, 4)


def smem_64():
    return layouts.smem_layout(64, 64, Float16)


def texts(path):
    """The strings in an SVG file."""
    found = re.findall(r"<text.*?>(.*?)</text>", path.read_text(), re.S)
    return [unescape(re.sub(r"<.*?>", "", text)) for text in found]


# Bank conflicts


@pytest.mark.parametrize(("bits", "ways"), [(None, 1), (3, 1), (2, 2), (1, 4), (0, 8)])
def test_reads_of_128_byte_rows(bits, ways):
    """Eight rows of 128 bytes start in one bank; each bit of the swizzle halves their number."""

    def smem():
        return layouts.smem_layout(64, 64, Float16, swizzle_bits=bits)

    expected = BankConflicts(instructions=16, wavefronts=64 * ways, minimum=64, ways=ways)
    assert bank_conflicts(lambda: layouts.ldmatrix_copy_a(mma(), Float16), smem, Float16) == expected
    assert expected.extra == 64 * (ways - 1)
    # B is read by each of four warps; 16 x 16 elements an instruction.
    read_b = bank_conflicts(lambda: layouts.ldmatrix_copy_b(mma(), Float16), smem, Float16)
    assert read_b == BankConflicts(4 * 16, 4 * 64 * ways, 4 * 64, ways)
    flipped = bank_conflicts(
        lambda: layouts.ldmatrix_copy_b(mma(), Float16, transpose=True),
        lambda: layouts.transposed(smem()),
        Float16,
    )
    assert flipped == read_b
    # Accumulators: eight rows of four lanes, 4 bytes each.
    store = bank_conflicts(lambda: layouts.store_copy_c(mma(), Float16, "sm80"), smem, Float16, side="dst")
    assert store == BankConflicts(64, 64 * ways, 64, ways)


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 160, 192, 224, 256])
def test_defaults_are_free_of_conflicts(cols):
    def smem():
        return layouts.smem_layout(64, cols, Float16)

    for copy in (layouts.ldmatrix_copy_a, layouts.ldmatrix_copy_b):
        assert bank_conflicts(lambda copy=copy: copy(mma(), Float16), smem, Float16).extra == 0
    store = bank_conflicts(lambda: layouts.store_copy_c(mma(), Float16, "sm80"), smem, Float16, side="dst")
    assert store.extra == 0


@pytest.mark.parametrize(
    ("copy", "layout", "message"),
    [
        (lambda: layouts.store_copy_c(mma(), Float16, "sm80"), smem_64, "side=None"),
        (
            lambda: layouts.ldmatrix_copy_a(mma(), Float16),
            lambda: layouts.smem_layout(48, 64, Float16),
            "48 x 64",
        ),
        (lambda: layouts.ldmatrix_copy_b(mma(), Float16, transpose=True), smem_64, "vectors of 16 bytes"),
        (lambda: layouts.gmem_tiled_copy(Float16, 16, 64, asynchronous=True), smem_64, "16 threads"),
    ],
)
def test_wrong_shapes_are_refused(copy, layout, message):
    with pytest.raises(ValueError, match=message):
        bank_conflicts(copy, layout, Float16)


# Pictures


def test_smem_picture_shows_the_banks(tmp_path):
    def smem():
        return layouts.smem_layout(128, 64, BFloat16)

    path = show(smem, tmp_path / "smem.svg", dtype=BFloat16)
    shown = texts(path)
    banks = model.smem_map(smem, BFloat16).banks[:16, ::2].ravel()
    axis = Counter(map(str, [*range(16), *range(0, 64, 8)]))
    assert Counter(text for text in shown if text.isdigit()) == Counter(map(str, banks)) + axis
    assert any("S<3,3,3>" in text for text in shown)
    assert any("without a bank conflict" in text for text in shown)
    unswizzled = show(
        lambda: layouts.smem_layout(128, 64, BFloat16, swizzle_bits=0), tmp_path / "0.svg", dtype=BFloat16
    )
    assert any("a bank conflict of 8 ways" in text for text in texts(unswizzled))
