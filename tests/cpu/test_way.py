"""Length of a repeated call's code path at each door: the package's functions that it calls, stays, and files.

A stay is a run of functions of one file. Numbers may fall: then write them here. A longer way fails.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
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
from cute_attn.flash_attn import flash_attn_3
from cute_attn.host.activation import Options
from tests import machine

PACKAGE = str(Path(cute_attn.__file__).parent)
WARM = 4


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


Q, K, V = (randn(2, 128, 4, 64) for _ in range(3))
LEARNT = [randn(2, 128, 4, 64).requires_grad_() for _ in range(3)]
GRAD, BIAS, TABLE = randn(2, 128, 4, 64), randn(2, 4, 128, 128), torch.randn(4, 17, requires_grad=True)
CACHE = (randn(2, 1, 8, 128), randn(2, 256, 2, 128), randn(2, 256, 2, 128))
NEW, LENGTHS = (randn(2, 1, 2, 128), randn(2, 1, 2, 128)), torch.tensor([100, 200], dtype=torch.int32)
STARTS = torch.tensor([0, 100, 256], dtype=torch.int32)
PACKED = (*(randn(256, 4, 64) for _ in range(3)), STARTS, STARTS, 156, 156)
VIEWS, FIRST, LAYER = (
    [x.transpose(1, 2) for x in (Q, K, V)],
    [x.transpose(1, 2) for x in LEARNT],
    torch.nn.Module(),
)
HEADS_FIRST = [x.contiguous() for x in VIEWS]
MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

LONG_BIAS = randn(2, 8, 1, 256)
LONG_MASK = create_block_mask(lambda b, h, i, j: j % 3 > 0, None, None, 1, 256, device="cpu")


def halved(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 0.5


def distances(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + TABLE[h, (j - i).clamp(-8, 8) + 8]


def flash(*tensors: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0]


def cached(function: Any, *new: Tensor, **options: Any) -> Tensor:
    return function(*CACHE, *new, cache_seqlens=LENGTHS, causal=True, **options)


def appending(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, **options)


WAYS = {
    "attention": (6, 3, 3, lambda: attention(Q, K, V, causal=True)),
    "attention with a bias": (6, 3, 3, lambda: attention(Q, K, V, causal=True, bias=BIAS)),
    "attention, recorded by autograd": (9, 4, 4, lambda: attention(*LEARNT, causal=True)),
    "attention and its gradients": (16, 7, 4, lambda: grad(attention(*LEARNT, causal=True), LEARNT, GRAD)),
    "attention_varlen": (10, 3, 3, lambda: attention_varlen(*PACKED, causal=True)),
    "attention with a score_mod": (8, 3, 3, lambda: attention(Q, K, V, score_mod=halved)),
    "attention with a score_mod and its gradients": (
        *(29, 7, 4), lambda: grad(attention(*LEARNT, score_mod=distances), [*LEARNT, TABLE], GRAD)
    ),
    "attention with a BlockMask": (10, 4, 4, lambda: attention(Q, K, V, block_mask=MASK)),
    "attention_with_kvcache": (6, 3, 3, lambda: cached(attention_with_kvcache)),
    "attention_with_kvcache with a bias": (9, 4, 4, lambda: cached(attention_with_kvcache, bias=LONG_BIAS)),
    "attention_with_kvcache with a BlockMask": (10, 4, 4, lambda: cached(attention_with_kvcache, block_mask=LONG_MASK)),
    "attention_with_kvcache, appending": (9, 3, 3, lambda: cached(appending, *NEW)),
    "PyTorch's flash operator": (7, 3, 3, lambda: flash(*VIEWS)),
    "PyTorch's flash operator and its gradients": (14, 6, 3, lambda: grad(flash(*FIRST), FIRST, GRAD.transpose(1, 2))),
    "flash_attn_func": (7, 3, 3, lambda: flash_attn.flash_attn_func(Q, K, V, causal=True)),
    "flash_attn_with_kvcache, appending": (10, 3, 3, lambda: cached(flash_attn.flash_attn_with_kvcache, *NEW)),
    "flash_attn_3's flash_attn_func": (7, 3, 3, lambda: flash_attn_3.flash_attn_func(Q, K, V, return_attn_probs=True)),
    "flash_attn_3's flash_attn_with_kvcache": (9, 3, 3, lambda: cached(flash_attn_3.flash_attn_with_kvcache)),
    "transformers' attention": (9, 3, 3, lambda: transformers.attention_forward(LAYER, *VIEWS, None)),
    "flex_attention with a score_mod": (8, 3, 3, lambda: flex.flex_attention(*VIEWS, score_mod=halved)),
    "flex_attention with a BlockMask": (10, 4, 4, lambda: flex.flex_attention(*VIEWS, block_mask=MASK)),
    "flex_attention of heads before rows in memory": (
        *(13, 3, 3), lambda: flex.flex_attention(*HEADS_FIRST, score_mod=halved)
    ),
}  # fmt: skip
"""Functions, stays and files; a call. Wanted without gradients: at most 5 stays in 4 files."""


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
    *before, made = WAYS[door]
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: None)
    activation = sdpa.Activation(Options(), "CPU")
    try:
        entered = way(made)
    finally:
        activation.remove()
    stays = [file for file, last in zip(entered, [None, *entered], strict=False) if file != last]
    found = len(entered), len(stays), len(set(entered))
    assert all(x <= y for x, y in zip(found, before, strict=True)), f"{found} where it was {before}"
