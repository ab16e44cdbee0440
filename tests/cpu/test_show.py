"""Pictures show the models, and counts of bank conflicts equal those worked out by hand."""

import pytest
from cutlass import Float16
from torch.nn.attention.flex_attention import create_block_mask

import layouts
from cute_attn.lab.pictures import pictures
from layouts.show import BankConflicts, bank_conflicts
from tests import refusals


def mma():
    return layouts.tiled_mma_sm80(Float16, 4)


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


WRONG = """
layouts.store_copy_c(mma(), Float16, "sm80"), 64 -> side=None
layouts.ldmatrix_copy_a(mma(), Float16), 48 -> 48 x 64
layouts.ldmatrix_copy_b(mma(), Float16, transpose=True), 64 -> vectors of 16 bytes
layouts.gmem_tiled_copy(Float16, 16, 64, asynchronous=True), 64 -> 16 threads
"""


@refusals.each(WRONG)
def test_wrong_shapes_are_refused(call, sentence):
    copy, _, rows = call.rpartition(", ")
    call = f"bank_conflicts(lambda: {copy}, lambda: layouts.smem_layout({rows}, 64, Float16), Float16)"
    refusals.check(call, f"ValueError: {sentence}", globals())


def test_a_block_mask_is_drawn(tmp_path):
    def window(b, h, query, key):
        return (query >= key) & (query - key < 256)

    mask = create_block_mask(window, None, 2, 10_000, 10_000, device="cpu")
    drawn = pictures(mask)
    (left, right), blocks = drawn["blocks"].grid[0], mask.to_dense()[0, 0, :64, :64]
    assert {(cell.row, cell.col) for cell in left.cells} == {*map(tuple, blocks.nonzero().tolist())}
    assert left.cells == right.cells and "0-63 of 79" in left.title
    whole = {(cell.row, cell.col) for cell in left.cells if cell.color != left.cells[0].color}
    assert whole == {(row, row - 1) for row in range(1, 64)}
    visited = int(mask.to_dense().sum())
    assert f"{visited} of {2 * 79 * 79} are, {2 * 77} of them" in drawn["blocks"].legend.notes[0]
    (path,) = drawn.save(tmp_path)
    assert path.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no tile"):
        pictures(mask, "tile_n=64")
