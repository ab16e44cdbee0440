"""How long the way of a repeated call is, at each door: functions of the package that it calls, stays, files.

A stay is a run of functions of one file. Numbers may fall: then write them here. A longer way fails.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import cute_attn
from cute_attn import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    flash_attn,
    flex,
    sdpa,
    transformers,
)
from cute_attn.host.activation import Options
from tests import machine

PACKAGE = str(Path(cute_attn.__file__).parent)
WARM = 4

WAYS = {
    "attention": (10, 3, 3),
    "attention with a bias": (10, 3, 3),
    "attention, recorded by autograd": (14, 5, 4),
    "attention and its gradients": (28, 7, 4),
    "attention_varlen": (14, 3, 3),
    "attention with a score_mod": (13, 3, 3),
    "attention with a score_mod and its gradients": (44, 7, 4),
    "attention with a BlockMask": (14, 4, 4),
    "attention_with_kvcache": (10, 3, 3),
    "attention_with_kvcache, appending": (13, 3, 3),
    "PyTorch's flash operator": (14, 3, 3),
    "PyTorch's flash operator and its gradients": (27, 6, 3),
    "flash_attn_func": (12, 3, 3),
    "flash_attn_with_kvcache, appending": (14, 3, 3),
    "transformers' attention": (13, 3, 3),
    "flex_attention with a score_mod": (12, 3, 3),
    "flex_attention with a BlockMask": (13, 4, 4),
    "flex_attention of heads before rows in memory": (18, 3, 3),
}
"""Functions, stays and files. Wanted without gradients: at most 5 stays in 4 files."""


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_(grad)


def calls() -> dict:
    q, k, v = (randn(2, 128, 4, 64) for _ in range(3))
    learnt = [randn(2, 128, 4, 64, grad=True) for _ in range(3)]
    grad, bias = randn(2, 128, 4, 64), randn(2, 4, 128, 128)
    one, k_cache, v_cache = randn(2, 1, 8, 128), randn(2, 256, 2, 128), randn(2, 256, 2, 128)
    new, lengths = [randn(2, 1, 2, 128) for _ in range(2)], torch.tensor([100, 200], dtype=torch.int32)
    packed, starts = [randn(256, 4, 64) for _ in range(3)], torch.tensor([0, 100, 256], dtype=torch.int32)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def halved(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * 0.5

    table = torch.randn(4, 17, requires_grad=True)

    def distances(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, (j - i).clamp(-8, 8) + 8]

    def flash(*tensors: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0]

    first, layer = [x.transpose(1, 2) for x in learnt], torch.nn.Module()
    cache = {"cache_seqlens": lengths, "causal": True}
    return {
        "attention": lambda: attention(q, k, v, causal=True),
        "attention with a bias": lambda: attention(q, k, v, causal=True, bias=bias),
        "attention, recorded by autograd": lambda: attention(*learnt, causal=True),
        "attention and its gradients": lambda: torch.autograd.grad(
            attention(*learnt, causal=True), learnt, grad
        ),
        "attention_varlen": lambda: attention_varlen(*packed, starts, starts, 156, 156, causal=True),
        "attention with a score_mod": lambda: attention(q, k, v, score_mod=halved),
        "attention with a score_mod and its gradients": lambda: torch.autograd.grad(
            attention(*learnt, score_mod=distances), [*learnt, table], grad
        ),
        "PyTorch's flash operator": lambda: flash(*heads_first),
        "PyTorch's flash operator and its gradients": lambda: torch.autograd.grad(
            flash(*first), first, grad.transpose(1, 2)
        ),
        "attention with a BlockMask": lambda: attention(q, k, v, block_mask=mask),
        "attention_with_kvcache": lambda: attention_with_kvcache(one, k_cache, v_cache, **cache),
        "attention_with_kvcache, appending": lambda: attention_with_kvcache(
            one, k_cache, v_cache, k=new[0], v=new[1], **cache
        ),
        "flash_attn_func": lambda: flash_attn.flash_attn_func(q, k, v, causal=True),
        "flash_attn_with_kvcache, appending": lambda: flash_attn.flash_attn_with_kvcache(
            one, k_cache, v_cache, k=new[0], v=new[1], **cache
        ),
        "transformers' attention": lambda: transformers.attention_forward(layer, *heads_first, None),
        "flex_attention with a score_mod": lambda: flex.flex_attention(*heads_first, score_mod=halved),
        "flex_attention of heads before rows in memory": lambda: flex.flex_attention(
            *(x.contiguous() for x in heads_first), score_mod=halved
        ),
        "flex_attention with a BlockMask": lambda: flex.flex_attention(*heads_first, block_mask=mask),
    }


def way(call) -> list[str]:
    """The files of the package whose functions a call enters, in order."""
    entered = []

    def enter(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_filename)

    for _ in range(WARM):
        call()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("door", WAYS)
def test_the_way_of_a_repeated_call_is_no_longer(door, monkeypatch):
    made = calls()[door]
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: None)
    activation = sdpa.Activation(Options(), "CPU")
    try:
        entered = way(made)
    finally:
        activation.remove()
    stays = [file for file, before in zip(entered, [None, *entered], strict=False) if file != before]
    found = len(entered), len(stays), len(set(entered))
    assert all(x <= y for x, y in zip(found, WAYS[door], strict=True)), f"{found} where it was {WAYS[door]}"


def test_each_door_has_a_way():
    assert WAYS.keys() == calls().keys()
