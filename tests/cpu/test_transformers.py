"""Hugging Face's attention and mask functions: the meaning of each mask, and whole models if transformers is installed.

The functions take the arguments of transformers 5.22 and 5.23.
"""

import functools
import inspect
import math
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cute_attn import transformers as hf
from tests import calls, refusals, tensors

randn = functools.partial(tensors.randn, dtype=torch.float64)


def layer(**attributes):
    return SimpleNamespace(**{"is_causal": True, "config": None, "layer_idx": 0} | attributes)


def heads(rows=6, keys=6, batch=2, dim=16, dim_v=16):
    shapes = ((batch, 4, rows, dim), (batch, 2, keys, dim), (batch, 2, keys, dim_v))
    return [randn(*shape, seed=i) for i, shape in enumerate(shapes)]


def plain(q, k, v, mask=None, **options):
    """(batch, rows, heads, dim), 0 where a query sees no key."""
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options).transpose(1, 2)
    return out.nan_to_num()


def band(rows, keys, window=math.inf):
    """Causal, with the last query at the last key."""
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    return (distance >= 0) & (distance < window)


# ---- the attention function ----

T = Q, K, V = heads(3, 6)
O = [x.transpose(1, 2) for x in T]
PACKED = [x.transpose(1, 2)[0] for x in heads(9, 9, batch=1)]
STARTS = torch.tensor([0, 2, 6, 9], dtype=torch.int32)
LENGTHS = {
    "cu_seq_lens_q": STARTS,
    "cu_seq_lens_k": STARTS,
    "max_length_q": 4,
    "max_length_k": torch.tensor(4),
}
SEEN = torch.rand(2, 1, 3, 8, generator=torch.Generator().manual_seed(3)) > 0.3
ADDED, SINKS = randn(2, 4, 3, 6, seed=8), randn(4, seed=7)
MEANINGS = """
forward(layer(), *T, None) == attention(*O, causal=True)
forward(layer(is_causal=False), *T, None) == attention(*O)
forward(layer(), *T, None, is_causal=False) == attention(*O)
forward(layer(), *T, None, sliding_window=2) == attention(*O, causal=True, window=(1, 0))
forward(layer(), *T, None, sliding_window=9) == attention(*O, causal=True)
forward(layer(), *T, None, scaling=0.3, softcap=0.8) == attention(*O, causal=True, softmax_scale=0.3, softcap=0.8)
forward(layer(), *T, None, dropout=0.5) == attention(*O, causal=True, dropout_p=0.5)
forward(layer(), *T, None, s_aux=SINKS) == attention(*O, causal=True, sinks=SINKS)
forward(layer(), *T, None, position_bias=ADDED) == attention(*O, causal=True, bias=ADDED)
forward(layer(), *T, SEEN, sliding_window=2) == attention(*O, bias=SEEN[..., :6])
forward(layer(), *T, ADDED, sliding_window=2) == attention(*O, bias=ADDED)
forward(layer(), *T, SEEN, position_bias=ADDED) == attention(*O, bias=ADDED.masked_fill(~SEEN[..., :6], -np.inf))
forward(layer(), *heads(9, 9, batch=1), None, sliding_window=2, **LENGTHS)
    == attention_varlen(*PACKED, STARTS, STARTS, 4, 4, causal=True, window=(1, 0))
forward(layer(), *heads(9, 9, batch=1), None, s_aux=SINKS, **LENGTHS)
    == attention_varlen(*PACKED, STARTS, STARTS, 4, 4, causal=True, sinks=SINKS)
"""


@calls.each(MEANINGS)
def test_meanings(theirs, ours):
    """A mask of four dimensions is all that hides; without one the last query is the last key's."""
    calls.check(theirs, ours, globals() | {"forward": hf.attention_forward})


@pytest.mark.parametrize("window", [None, 3])
def test_padding(window):
    q, k, v = heads()
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]]).bool()
    out, _ = hf.attention_forward(layer(), q, k, v, padding, sliding_window=window)
    seen = band(6, 6, window or math.inf) & padding[:, None, None, :]
    torch.testing.assert_close(out, plain(q, k, v, seen))
    assert not out[0, :2].any()
    out, _ = hf.attention_forward(layer(is_causal=False), q, k, v, padding)
    torch.testing.assert_close(out, plain(q, k, v, padding[:, None, None, :].expand(2, 1, 6, 6)))


ONE = randn(1, 2, 4, 8)
SLIDING = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=7)
WRONG = """
register("my_flash") -> ValueError: accepted: one without 'flash'
register("a/b") -> ValueError: accepted: one without 'flash'
register(3) -> TypeError: name is 3; accepted: text
forward(cache=1) -> NotImplementedError: cache is an int; accepted: None, since
forward(output_attentions=True) -> NotImplementedError: output_attentions is True; accepted: False
forward(attention_mask=torch.ones(1, 3).bool())
    -> ValueError: attention_mask has shape (1, 3); accepted: (batch, 4) or
forward(attention_mask=torch.ones(1, 1, 3, 4)) -> ValueError: attention_mask has shape (1, 1, 3, 4)
forward(module=layer(config=SLIDING, layer_idx=1))
    -> ValueError: sliding_window is None in a layer with one of 7; accepted: the layer's own
forward(is_causal=False, sliding_window=3) -> ValueError: sliding_window is 3 without causality and without a mask
"""


@refusals.each(WRONG)
def test_what_is_not_understood_raises(call, sentence):
    given = {"module": layer(), "query": ONE, "key": ONE, "value": ONE, "attention_mask": None}
    names = {"forward": lambda **changes: hf.attention_forward(**given | changes), "register": hf.register}
    refusals.check(call, sentence, globals() | names)


# ---- the mask function ----


@pytest.fixture
def sdpa_mask(monkeypatch):
    """transformers' function, replaced: its arguments."""
    calls = []
    package, module = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    module.sdpa_mask = lambda **arguments: calls.append(arguments) or "four dimensions"
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    return calls


WINDOW = SimpleNamespace(sliding_window=4)
BIDIRECTIONAL = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
NONE = {
    "plain": {},
    "continued": {"q_length": 3, "q_offset": 5},
    "decoding": {"q_length": 1, "q_offset": 7},
    "window": {"local_size": 4, "config": WINDOW},
    "window_cache": {"local_size": 4, "config": WINDOW, "q_length": 2, "q_offset": 30, "kv_offset": 24},
    "bidirectional": BIDIRECTIONAL,
    "cross": BIDIRECTIONAL | {"q_length": 3},
}
FOUR = {
    "added": {"use_vmap": True},
    "packed": {"allow_is_causal_skip": False},
    "chunks": {"local_size": 4, "config": SimpleNamespace(attention_chunk_size=4)},
    "chunks_of_the_window": {"local_size": 4, "config": SimpleNamespace(attention_chunk_size=4, sliding_window=4)},
    "static_cache": {"q_offset": torch.tensor(0)},
    "unused_keys": {"q_length": 3, "q_offset": 0},
    "bidirectional_window": BIDIRECTIONAL | {"local_size": 4, "config": WINDOW},
}  # fmt: skip


def mask_of(**changes):
    return hf.attention_mask(**{"batch_size": 2, "q_length": 8, "kv_length": 8, "device": "cpu"} | changes)


@pytest.mark.parametrize("name", NONE)
def test_no_mask_where_the_band_says_it_all(name, sdpa_mask):
    assert mask_of(**NONE[name]) is None
    assert mask_of(**NONE[name], attention_mask=torch.ones(2, 11).bool()) is None
    padding = torch.ones(2, 11).bool()
    padding[0, 4] = False  # the first of the last eight is number 3
    mask = mask_of(**NONE[name], attention_mask=padding)
    assert mask.shape == (2, 8) and mask.dtype == torch.bool
    assert (~mask).nonzero().tolist() == [[0, 1]]
    assert not sdpa_mask


@pytest.mark.parametrize("name", FOUR)
def test_anything_else_is_transformers_mask(name, sdpa_mask):
    padding = torch.ones(2, 8).bool()
    assert mask_of(**FOUR[name], attention_mask=padding, mask_function="its own") == "four dimensions"
    (call,) = sdpa_mask
    assert call["mask_function"] == "its own" and call["attention_mask"] is padding
    assert not call["allow_is_causal_skip"] and not call["allow_is_bidirectional_skip"]
    assert call["use_vmap"] == FOUR[name].get("use_vmap", False) and call["device"] == "cpu"


def test_padding_of_fewer_keys_than_there_are(sdpa_mask):
    assert mask_of(attention_mask=torch.ones(2, 7).bool()) == "four dimensions"


# ---- registration ----


class Interface:
    """Replaces a registry of transformers."""

    def __init__(self):
        self.functions = {}

    def register(self, name, function):
        self.functions[name] = function


def test_register_adds_both_functions(sdpa_mask, monkeypatch):
    masks, functions = Interface(), Interface()
    modeling = ModuleType("transformers.modeling_utils")
    modeling.AttentionInterface = functions
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    sys.modules["transformers.masking_utils"].AttentionMaskInterface = masks
    hf.register()
    hf.register()
    assert functions.functions == {"cute_attn": hf.attention_forward}
    assert masks.functions == {"cute_attn": hf.attention_mask}


def test_register_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "transformers.masking_utils", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match="register needs transformers and its masking_utils, which are"
    ):
        hf.register()


# ---- whole models ----

needs_transformers = pytest.mark.doors("transformers")
SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 12}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 12},
    "Qwen3": {},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}
IDS = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))


def both(model, sizes):
    """The same random model with eager attention and with the package's."""
    import transformers

    hf.register()
    made = []
    for implementation in ("eager", hf.NAME):
        config = getattr(transformers, re.sub("Model$|ForCausalLM$", "Config", model))(**sizes)
        torch.manual_seed(0)
        made.append(
            getattr(transformers, model)._from_config(config, attn_implementation=implementation).eval()
        )
    made[1].load_state_dict(made[0].state_dict())
    assert [x.config._attn_implementation for x in made] == ["eager", hf.NAME]
    return made


def models(name):
    return both(f"{name}ForCausalLM", SMALL | MODELS[name])


def hidden(*rows):
    """An attention mask of ``IDS`` that hides some of the first sequence."""
    mask = torch.ones_like(IDS)
    mask[0, slice(*rows)] = 0
    return mask


@needs_transformers
@pytest.mark.parametrize("rows", [(0,), (0, 4), (7, None)], ids=["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_eager(name, rows):
    mask, found = hidden(*rows), []
    for model in models(name):
        logits = model(IDS, attention_mask=mask).logits[mask.bool()]
        found.append((logits, torch.autograd.grad(logits.square().sum(), model.parameters())))
    (eager, ours) = found
    torch.testing.assert_close(ours[0], eager[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], eager[1], rtol=1e-3, atol=1e-3)


WIDTHS = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
WIDTHS |= {"num_attention_heads": 4}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BART = {"vocab_size": 97, "d_model": 48, "max_position_embeddings": 64}
BART |= {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()}
PADDED = {"input_ids": IDS, "attention_mask": hidden(7, None)}
# Padding in both directions, images, cross-attention: sizes, inputs.
ENCODERS = {
    "BertModel": (WIDTHS | {"vocab_size": 97}, PADDED),
    "ViTModel": (WIDTHS | {"image_size": 32, "patch_size": 8}, {"pixel_values": torch.ones(1, 3, 32, 32)}),
    "BartModel": (BART, PADDED | {"decoder_input_ids": IDS[:, :6]}),
}


@needs_transformers
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_equals_eager(name):
    sizes, given = ENCODERS[name]
    shown = PADDED["attention_mask"].bool() if name == "BertModel" else slice(None)
    found = [model(**given).last_hidden_state[shown] for model in both(name, sizes)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@needs_transformers
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_equals_eager(name, cache):
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    options |= {"attention_mask": hidden(0, 3)[:, :7], "disable_compile": True}
    assert torch.equal(*(model.generate(IDS[:, :7], **options) for model in models(name)))


@needs_transformers
def test_packed_position_ids_equal_eager():
    eager, ours = models("Llama")
    ids = IDS[:1, :9]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    logits = [model(ids, position_ids=positions, use_cache=False).logits for model in (eager, ours)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    packed = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(packed, logits[0], rtol=1e-4, atol=1e-5)


@needs_transformers
def test_the_functions_take_what_transformers_passes():
    from transformers.masking_utils import sdpa_mask

    own = inspect.signature(hf.attention_mask).parameters
    assert set(inspect.signature(sdpa_mask).parameters) - {"device", "kwargs"} <= set(own)
