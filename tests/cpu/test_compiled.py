"""Calls of the doors in torch's compiler: one graph each, with the results and gradients of eager calls."""

import pytest
import torch

from cute_attn import (
    attention,
    attention_sums,
    attention_varlen,
    attention_with_kvcache,
    flash_attn,
    flex,
    merge_attention,
    sdpa,
    transformers,
)
from cute_attn.flash_attn import flash_attn_interface, rotary
from cute_attn.host.activation import Options
from tests.compared import same
from tests.tensors import int32, randn

aten = torch.ops.aten
CU_Q, CU_K, STATE = int32(0, 4, 4, 9), int32(0, 5, 8, 11), torch.tensor([5, 6])
BIAS, TURNS = (1, 4, 1, 11), randn(6, 4, seed=9)
QKV = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8))
ODD = ((2, 9, 4, 12), (2, 11, 2, 12), (2, 11, 2, 12))
ROWS, HEADS_FIRST = ((2, 9, 4, 16),) * 3, ((2, 4, 9, 16),) * 3


def dense(q, k, v, bias):
    options = {"causal": True, "window": (6, None), "dropout_p": 0.2, "rng_state": STATE}
    return attention(q, k, v, bias=bias, **options, return_lse=True)


def packed(q, k, v, bias):
    rows = (q[0], k[0], v[0], CU_Q, CU_K, 5, 5)
    return attention_varlen(*rows, bias=bias[..., :5], softcap=2.0, return_lse=True)


def maxima(q, k, v):
    first = attention(q, k, v, causal=True, return_max_scores=True)
    return *first, *attention_with_kvcache(q, k, v, return_lse=True, return_max_scores=True)


def sums(q, k, slopes):
    return attention_sums(q, k, causal=True, alibi_slopes=slopes)


def flash(q, k, v):
    options = {"causal": True, "window_size": (3, 3), "return_attn_probs": True}
    return flash_attn.flash_attn_func(q, k, v, **options)[:2]


def steps(q, k, v):
    """A forward that a library calls, and its backward."""
    masks = (0.2, 0.25, True, -1, -1, 0.0, None, False)
    out, lse, _, state = flash_attn_interface._wrapped_flash_attn_forward(q, k, v, *masks)
    into = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_interface._wrapped_flash_attn_backward(out, q, k, v, out, lse, *into, *masks, state)
    return out, lse, *into


LAYER = torch.nn.Module()
LAYER.is_causal, LAYER.layer_idx = True, 0


def of_transformers(q, k, v, mask=None):
    return transformers.attention_forward(LAYER, q, k, v, mask, sliding_window=3)[0]


def of_pytorch(q, k, v):
    out = aten._scaled_dot_product_flash_attention(q * 2, k, v, 0.0, True)[0]
    return aten._scaled_dot_product_efficient_attention(out, k, v, None, True)[0]


BAND = torch.ones(9, 9).tril().bool().expand(2, 1, 9, 9)
CALLS = {
    "attention": (dense, (*QKV, BIAS)),
    "attention_varlen": (packed, (*QKV, BIAS)),
    "flash_attn": (flash, ODD),
    "flash_attn's steps": (steps, ROWS),
    "rotary": (lambda x: rotary.apply_rotary_emb_qkv_(1 * x, TURNS, TURNS), ((2, 6, 3, 4, 8),)),
    "transformers": (of_transformers, HEADS_FIRST),
    "transformers, padded": (lambda *x: of_transformers(*x, torch.ones(2, 9).bool()), HEADS_FIRST),
    "transformers, masked": (lambda *x: of_transformers(*x, BAND), HEADS_FIRST),
    "flex": (lambda q, k, v: flex.flex_attention(q, k, v, scale=0.5), HEADS_FIRST),
    "PyTorch's operators": (of_pytorch, HEADS_FIRST),
    "maxima": (maxima, QKV),
    "sums": (sums, (*QKV[:2], (4,))),
    "merge": (merge_attention, ((3, 2, 5, 3, 16), (3, 2, 3, 5))),
}
WITHOUT_GRADIENTS = ("flash_attn's steps", "maxima", "sums", "merge")
WITH_SYMBOLS = ("attention", "attention_varlen", "maxima", "sums", "merge")


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CALLS), *((name, True) for name in WITH_SYMBOLS)]
)
def test_one_graph_equals_eager_calls(name, dynamic):
    torch.compiler.reset()
    function, shapes = CALLS[name]
    learns = name not in WITHOUT_GRADIENTS
    tensors = [randn(*shape, seed=i).requires_grad_(learns) for i, shape in enumerate(shapes)]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    activation = sdpa.Activation(Options(unsupported="error"), "CPU")
    results = []
    try:
        for run in (compiled, function):
            torch.manual_seed(2)
            results.append(run(*tensors))
        same(*results, tensors if learns else ())
    finally:
        activation.remove()
