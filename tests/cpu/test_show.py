"""Pictures show the models, and counts of bank conflicts equal those worked out by hand."""

import pytest
from cutlass import Float16

import layouts
from layouts.show import BankConflicts, bank_conflicts


def mma():
    return layouts.tiled_mma_sm80(Float16, 4)


def smem_64():
    return layouts.smem_layout(64, 64, Float16)


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
