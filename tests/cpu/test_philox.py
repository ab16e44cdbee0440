"""Philox in the kernels' own code, run on the CPU, against Random123's known answers and against the reference."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, Uint32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn import reference
from cute_attn.device.math import byte_permute
from cute_attn.epilogues.dropout import flash_threshold, mem_efficient_threshold, philox, rescale

# Random123, tests/kat_vectors: rounds, counter, key, answer.
KNOWN_ANSWERS = """
    7  00000000 00000000 00000000 00000000  00000000 00000000  5f6fb709 0d893f64 4f121f81 4f730a48
    7  ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  5207ddc2 45165e59 4d8ee751 8c52f662
    7  243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  4dfccaba 190a87f0 c47362ba b6b5242a
    10 00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
    10 ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
    10 243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""


@cute.jit
def draw(inputs: cute.Tensor, out: cute.Tensor, rounds: Constexpr):
    """out[i] = the four words of inputs[i]: a counter of four words and a key of two."""
    for i in cutlass.range(inputs.shape[0]):
        words = [Uint32(inputs[i, j]) for j in range(6)]
        answer = philox(tuple(words[:4]), tuple(words[4:]), rounds)
        for j in cutlass.range_constexpr(4):
            out[i, j] = Int32(answer[j])


def philox_words(inputs, rounds):
    """The device's words for an int64 tensor (n, 6)."""
    out = torch.empty(len(inputs), 4, dtype=torch.int32)
    draw(from_dlpack(inputs.to(torch.int32)), from_dlpack(out), rounds)
    return out.long() & 0xFFFFFFFF


@pytest.mark.parametrize("rounds", [7, 10])
def test_known_answers(rounds):
    rows = [line.split() for line in KNOWN_ANSWERS.strip().splitlines()]
    table = torch.tensor([[int(word, 16) for word in row[1:]] for row in rows if int(row[0]) == rounds])
    assert len(table) == 3
    assert torch.equal(philox_words(table[:, :6], rounds), table[:, 6:])
    assert torch.equal(
        torch.stack(reference.philox4x32(table[:, :4].T, table[:, 4:6].T, rounds), 1), table[:, 6:]
    )


@pytest.mark.parametrize("rounds", [7, 10])
def test_the_reference_draws_the_same(rounds):
    inputs = torch.randint(0, 2**32, (1000, 6), generator=torch.Generator().manual_seed(0))
    expected = reference.philox4x32(inputs[:, :4].T, inputs[:, 4:].T, rounds)
    assert torch.equal(philox_words(inputs, rounds), torch.stack(expected, 1))


def test_thresholds_are_pytorchs():
    for p in [0.0, 1e-9, 2**-32, 0.1, 0.2, 1 / 3, 0.5, 0.9, 0.999, 1 - 2**-24, 127 / 255, 128 / 255]:
        assert flash_threshold(p) == reference.flash_keep_threshold(p)
        assert mem_efficient_threshold(p) == reference.mem_efficient_keep_threshold(p)
        one_minus_p = torch.tensor(1.0) - torch.tensor(p)
        assert rescale(p) == float(torch.tensor(1.0) / one_minus_p)


@cute.jit
def permute(words: cute.Tensor, out: cute.Tensor, selectors: Constexpr):
    for i in cutlass.range_constexpr(len(selectors)):
        out[i] = byte_permute(words[0], words[1], selectors[i])


def test_byte_permute_is_prmt():
    """The instruction's definition: byte 0 to 3 of the low operand, 4 to 7 of the high one, 8 spreads the sign."""
    words = torch.tensor([0x11F280C4, 0x7F8005A6], dtype=torch.int64).to(torch.int32)
    selectors = (0x3210, 0x7654, 0x0527, 0xBBAA, 0x9988, 0xCC88, 0xFF99, 0xD0E1)
    out = torch.empty(len(selectors), dtype=torch.int32)
    permute(from_dlpack(words), from_dlpack(out), selectors)
    source = [0xC4, 0x80, 0xF2, 0x11, 0xA6, 0x05, 0x80, 0x7F]
    for selector, word in zip(selectors, out.tolist(), strict=True):
        for i in range(4):
            nibble = selector >> 4 * i & 0xF
            byte = source[nibble & 7]
            expected = (0xFF if byte & 0x80 else 0) if nibble & 8 else byte
            assert word >> 8 * i & 0xFF == expected, hex(selector)
