"""Rows that start anywhere: words shifted into place and masked, as bytes of a row."""

import cutlass
import numpy as np
import pytest
from cutlass import Int32, cute

from cute_attn.device.staged_rows import mask_words, shift_words, vectors_of_row
from layouts.host import run_on_host

# The loops over one thread's pieces are unrolled on purpose: fragments take static indices.
pytestmark = pytest.mark.filterwarnings("ignore:This static loop has")


@cute.jit
def write_shifted(size: cutlass.Constexpr, valid: cutlass.Constexpr, out: cute.Tensor):
    """out[i] = the words from byte i * size on, of which ``valid`` bytes exist, of bytes 1, 2, 3, ..."""
    for i in cutlass.range(cute.size(out.shape[0])):
        words = cute.make_rmem_tensor(8, Int32)
        for w in cutlass.range_constexpr(8):
            words[w] = Int32(0x04030201 + 0x04040404 * w)
        shifted = shift_words(words, i * size, size)
        mask_words(shifted, Int32(valid), size)
        for w in cutlass.range_constexpr(4):
            out[i, w] = shifted[w]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("valid", [-8, 0, 4, 8, 16, 100])
def test_bytes_from_any_element_on(size, valid):
    found = run_on_host(lambda out: write_shifted(size, valid, out), 16 // size, 4)
    for i, words in enumerate(found.astype(np.int32)):
        wanted = np.arange(1 + i * size, 17 + i * size, dtype=np.uint8)
        wanted[max(valid, 0) :] = 0
        np.testing.assert_array_equal(np.frombuffer(words.tobytes(), np.uint8), wanted)


def test_half_a_word_exists():
    (words, *_) = run_on_host(lambda out: write_shifted(2, 6, out), 8, 4).astype(np.int32)
    assert words.tobytes()[:8] == bytes((1, 2, 3, 4, 5, 6, 0, 0)) and words[2] == words[3] == 0


@pytest.mark.parametrize("size, head_dim", [(2, 1), (2, 7), (2, 8), (2, 59), (4, 1), (4, 5), (4, 59)])
def test_vectors_of_a_row(size, head_dim):
    """As many as the worst start needs."""
    length = head_dim * size
    needed = max((start + length + 15) // 16 for start in range(0, 16, size))
    assert vectors_of_row(head_dim, size) == needed
