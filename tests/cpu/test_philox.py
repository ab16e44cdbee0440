"""Thresholds and bytes of dropout in the kernels' own code, on the CPU; test_epilogues.py compares whole masks."""

import cutlass
import torch
from cutlass import Constexpr, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn import reference
from cute_attn.device.math import byte_permute
from cute_attn.epilogues.dropout import flash_threshold, mem_efficient_threshold, rescale


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
