"""A Hugging Face model in bf16 with attn_implementation="cute_attn" generates on the GPU, also with a static cache.

That models equal eager ones is tested on the CPU, and on the GPU by Hugging Face's own tests (tests/outside).
"""

import pytest
import torch

from cute_attn import transformers as hf

transformers = pytest.importorskip("transformers")


@pytest.mark.unguarded
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_finite_and_repeats(cache):
    hf.register()
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    make = transformers.LlamaForCausalLM._from_config
    model = make(config, attn_implementation=hf.NAME, dtype=torch.float32).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    tokens = [model.generate(ids, attention_mask=mask, **options) for _ in range(2)]
    assert torch.equal(*tokens) and tokens[0].shape == (2, 60)
