"""Attention of few queries with many keys: which calls the kernels for a cache serve, and how."""

import pytest
import torch

from cute_attn import attention
from cute_attn.api import operators
from cute_attn.api.attention import _call_of, _Options
from cute_attn.compiler import registry
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host import forward, split_kv
from cute_attn.host.choose import choose_kernel
from tests import emulated_kvcache, machine
from tests.cpu.test_examples import load

PROCESSORS = 132


def call(seqlen_q, seqlen_k, heads=(4, 4), dim=64, batch=1, packed=False, dtype=torch.bfloat16, **changes):
    """A call's parameters, of tensors that are not filled: only their metadata is looked at."""
    q = torch.empty(batch, seqlen_q, heads[0], dim, dtype=dtype)
    k = torch.empty(batch, seqlen_k, heads[1], dim, dtype=dtype)
    lengths = [None] * 4
    if packed:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        lengths[:2] = [torch.arange(batch + 1, dtype=torch.int32) * length for length in (seqlen_q, seqlen_k)]
    tensors = dict.fromkeys(("alibi_slopes", "bias", "sinks", "rng_state"))
    lengths[3] = changes.pop("seqused_k", None)
    tensors["bias"] = changes.pop("bias", None)
    options = dict.fromkeys(_Options._fields) | dict.fromkeys(("softcap", "dropout_p"), 0.0)
    flags = ("causal", "return_lse", "return_softmax", "return_max_scores", "deterministic", "same_bits")
    options |= dict.fromkeys(flags, False)
    options |= {"precision": "", "varlen": packed, "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    options |= {"window": (None, None), "dropout_mask": "flash", "epilogues": ()}
    return _call_of((q, k, k, *lengths, *tensors.values()), _Options(**options | changes))


def wanted(params):
    kernel = choose_kernel(params, "sm90")
    return split_kv.divided(params, kernel, "sm90", PROCESSORS)


def distance(score, b, h, q_idx, kv_idx):
    return score - 0.5 * (kv_idx - q_idx).abs()


FUNCTION, _ = epilogue_of(distance, None, torch.device("cpu"), torch.float32)
KEPT = user_epilogue(FUNCTION)  # for other tests, which trace many functions

WANTED = {
    "few-queries": (call(1024, 12928), "", "fixed"),
    "packed": (call(9, 54285, (8, 1), 256, batch=2, packed=True), "varlen-varlen_k", "fixed"),
    "causal": (call(4992, 27583, (1, 1), causal=True), "causal", "fixed"),
    "one-query": (call(1, 32768, (32, 8), 128), "", "fixed"),
    "few-rows-on-a-quarter": (call(1, 32768, (32, 8), 128, batch=4), "", "fixed"),
    "many-rows-on-half": (call(64, 30000, (32, 8), 128, batch=4), "", "fixed"),
    "window": (call(64, 32768, (8, 2), 128, batch=3, window=(20000, 0)), "window", "fixed"),
    "seqused": (call(2, 8192, batch=2, seqused_k=torch.ones(2, dtype=torch.int32)), "seqused_k", "fixed"),
    "function": (call(1, 32768, (32, 8), 128, epilogues={FUNCTION: ()}), FUNCTION, "fixed"),
    "bias": (call(1, 8192, (32, 8), 128, bias=torch.empty(1, 1, 1, 8192).bfloat16()), "bias_bf16", "fixed"),
}


@pytest.mark.parametrize("name", WANTED)
def test_few_work_tiles_are_divided(name):
    params, features, split = WANTED[name]
    assert wanted(params)
    cached = split_kv.as_cache(params)
    kernel, found = split_kv.choose_kernel(cached, "sm90", PROCESSORS)
    assert found.how == split
    words = ("kvcache-sm90-bf16", f"d{params.q.shape[-1]}", features, f"split_{split}")
    assert kernel.traits.name == "-".join(filter(None, words))
    assert kernel.tile.reject(kernel.traits, "sm90") is None
    assert split_kv._partial_shapes(cached, kernel, found, PROCESSORS)[0][-1] == params.v.shape[-1]
    assert cached.output_shapes() == params.output_shapes()


UNWANTED = {
    "many-queries": call(8192, 8192),
    "few-keys": call(1, 2000),
    "few-keys-of-a-window": call(64, 8192, (8, 2), 128, batch=3, window=(1000, 0)),
    "a-full-last-wave": call(16384, 40832, (1, 1), 256),
    "a-fuller-last-wave": call(11520, 40832, (2, 1), 256),
    "top-left": call(1, 8192, causal="top_left"),
    "a-named-kernel": call(1, 8192, kernel="sm90"),
    "a-tile": call(1, 8192, tile="tile_n=64"),
    "softmax": call(1, 8192, return_softmax=True),
    "large-batch": call(1, 8192, (32, 8), batch=64),
    "few-rows-on-half-of-the-card": call(4, 16384, (32, 8), 128, batch=8, causal=True),
    "an-idle-last-wave": call(9216, 40832, (2, 1), 256),
    "a-bias-of-many-rows": call(256, 8192, (2, 2), bias=torch.empty(1, 1, 256, 8192).bfloat16()),
    "few-rows-on-two-thirds": call(2, 29249, (86, 86), 128, causal=True),
}


@pytest.mark.parametrize("name", UNWANTED)
def test_others_are_not(name):
    assert not wanted(UNWANTED[name])


def test_a_class_is_not():
    """An epilogue class would take cache rows for keys."""
    load("custom_epilogue")
    assert not wanted(call(1, 8192, epilogues={"relative_position": (torch.zeros(4, 9),)}))


LAUNCHED = {
    "batched": call(3, 4200, (4, 2), batch=2, causal=True),
    "fixed": call(2, 5000, (2, 1)),
    "function": call(2, 5000, (2, 1), epilogues={FUNCTION: ()}),
    "bias": call(3, 4200, (4, 2), batch=2, bias=torch.linspace(-3, 3, 6 * 4200).half().view(2, 1, 3, 4200)),
    "packed": call(3, 4100, (4, 2), batch=2, packed=True, window=(900, 0)),
    "seqused": call(
        3, 4100, (4, 2), batch=2, packed=True, seqused_k=torch.tensor([77, 0], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_launches_equal_the_definition(name, monkeypatch):
    """Launches get the arguments that the kernels are compiled for, and write outputs with other strides."""
    emulated_kvcache.patch(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    params = LAUNCHED[name]
    params = params._replace(
        **{x: torch.randn(getattr(params, x).shape, generator=generator).half() for x in ("q", "k", "v")}
    )
    plan = split_kv.make_plan(split_kv.as_cache(params))
    out_shape, lse_shape = params.output_shapes()
    out, lse = torch.full(out_shape, torch.nan).half(), torch.full((*lse_shape[:-1], 8), torch.nan)
    lse = lse[..., : lse_shape[-1]]
    split_kv.launch(plan, split_kv.as_cache(params), out, lse)
    for one, whole in zip((out, lse), operators.forward_cpu(params), strict=False):
        torch.testing.assert_close(one, whole, rtol=1e-3, atol=1e-3)


def test_rows_that_no_sequence_owns_stay(monkeypatch):
    """The outputs are given tensors; the combine kernel writes every row of a sequence."""
    emulated_kvcache.patch(monkeypatch)
    params = call(5, 5000, (2, 1), packed=True)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    params = params._replace(
        **{x: torch.randn(getattr(params, x).shape, generator=generator).half() for x in ("q", "k", "v")},
        cu_seqlens_q=cu,
    )
    shape, lse_shape = params.output_shapes()
    plan = split_kv.make_plan(split_kv.as_cache(params))
    out, lse = torch.full(shape, 7.0).half(), torch.empty(lse_shape)
    forward._divided(plan, params, out, lse, keeps_rows=True)
    assert out[3:].eq(7.0).all() and not out[:3].eq(7.0).any()


def test_the_same_bits_of_latent_values_have_a_plan_of_their_own(monkeypatch):
    """Metadata does not show whether V is columns of K, which that plan's kernel does not load again."""
    latent = []

    def launched(kernel, target):
        return lambda given: latent.append(kernel.traits.latent) if kernel.traits.op == "kvcache" else None

    machine.gpu(monkeypatch, launched)
    q, k, other = (torch.zeros(1, n, heads, 576).bfloat16() for n, heads in ((64, 16), (256, 1), (256, 1)))
    for x in (k, other, other, other):
        attention(q, k, x[..., :512], same_bits=True)
    assert latent == [True, False, False, False]


def test_ampere_keeps_its_forward():
    params = call(1, 8192)
    assert not split_kv.divided(params, choose_kernel(params, "sm80"), "sm80", PROCESSORS)
    traits = split_kv.traits_of(split_kv.as_cache(call(1, 8192, packed=True)), "sm80", "fixed")
    with pytest.raises(registry.Unsupported, match="varlen_k is True"):
        registry.lookup(traits)
