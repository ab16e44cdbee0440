"""Splitting fp32 tensors into fp16 parts on the card: the parts, the scales, and which tensors do not fit."""

import math

import pytest
import torch

from cute_attn import compiler
from cute_attn.host.split_fp32 import SplitLauncher
from cute_attn.traits import Traits


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def split(tensors, name):
    op = name.partition("-")[0]
    return SplitLauncher.of(Traits.parse(name), op, compiler.default_target("sm80")).launch(tensors)


def exponent_of(x):
    return 14 - math.floor(math.log2(x.abs().max().item()))


def check_parts(x, parts, scale):
    exponent = exponent_of(x)
    assert scale.item() == 2.0**-exponent
    hi, *lo = (part[..., : x.shape[-1]] for part in parts.unbind(-2))
    scaled = x * 2.0**exponent
    assert torch.equal(hi, scaled.half())
    for part in lo:
        assert torch.equal(part, (scaled - scaled.half().float()).half())
    assert not parts[..., x.shape[-1] :].any()


@pytest.mark.parametrize("precision", ["", "-tf32"])
def test_parts(precision):
    q, k, v = randn(2, 300, 4, 96), 1e-3 * randn(2, 70, 2, 96, seed=1), 1e4 * randn(2, 70, 2, 96, seed=2)
    k[:, 3:9] = 0.0
    parts, scales = split(
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), f"forward_split-sm80-fp32-d96{precision}"
    )
    assert {own.shape[-2] for own in parts} == {1 if precision else 2}
    assert scales[0].item() == 2.0 ** -exponent_of(q), "the forward splits q itself"
    for x, own, scale in zip((k, v), parts, scales[1:], strict=True):
        check_parts(x, own, scale)


@pytest.mark.parametrize("what", ["row", "huge", "inf", "nan", "zero", "least row"])
def test_which_tensors_fit(what):
    q, k, v = (randn(1, 1000, 2, 96, seed=i) for i in range(3))
    if what == "zero":
        k.zero_()
    elif what == "row":
        k[0, 700, 1] *= 1e-8
    elif what == "least row":
        k.clamp_(-1.9, 1.9)[0, 700, 1] = 2.0**-13
    else:
        k[0, 999, 1, 95] = {"huge": 1e30, "inf": -math.inf, "nan": math.nan}[what]
    scales = split((q, k, v), "forward_split-sm80-fp32-d96").scales.tolist()
    assert scales[0] > 0 and scales[2] > 0
    assert scales[1] == {"zero": 1.0, "least row": 2.0**-14}.get(what, 0.0)
