"""Hugging Face models in bf16 with attn_implementation="cute_attn", against eager attention in float32."""

import pytest
import torch

from cute_attn import transformers as hf
from tests.checks import GRADIENT, check

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
MODELS = {"Llama": {}, "Mistral": {"sliding_window": 50}, "Gemma2": {"sliding_window": 50}, "Qwen3": {}}


def model_of(name, implementation, dtype):
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    make = getattr(transformers, f"{name}ForCausalLM")._from_config
    torch.manual_seed(0)
    return make(config, attn_implementation=implementation, dtype=torch.float32).to("cuda", dtype).eval()


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, side):
    hf.register()
    ids = torch.randint(3, 500, (2, 300), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    if side:
        mask[0, slice(0, 70) if side == "left" else slice(230, None)] = 0
    found = []
    for implementation, dtype in (
        (hf.NAME, torch.bfloat16),
        ("eager", torch.float64),
        ("eager", torch.bfloat16),
    ):
        model = model_of(name, implementation, dtype)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        (grad,) = torch.autograd.grad(logits.float().square().mean(), model.model.embed_tokens.weight)
        found.append((logits.detach(), grad))
    for which, actual, exact, plain in zip(("logits", "gradient"), *found, strict=True):
        check(which, actual, exact, plain, factor=GRADIENT)


@pytest.mark.unguarded
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_finite_and_repeats(cache):
    hf.register()
    model = model_of("Llama", hf.NAME, torch.bfloat16)
    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    tokens = [model.generate(ids, attention_mask=mask, **options) for _ in range(2)]
    assert torch.equal(*tokens) and tokens[0].shape == (2, 60)
