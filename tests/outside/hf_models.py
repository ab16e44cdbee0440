"""Small models for the tests of transformers' ``tests/test_modeling_common.py``, which its source distribution has.

The model tests of its repository, which it lacks, make such models too; here they have head dims that kernels serve.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import transformers

for parent, child, mixin in (
    ("exporters", "test_export", "ExportTesterMixin"),
    ("generation", "test_utils", "GenerationTesterMixin"),
):  # what the file imports beside
    for name in (f"tests.{parent}", f"tests.{parent}.{child}"):
        sys.modules.setdefault(name, ModuleType(name))
    vars(sys.modules[f"tests.{parent}.{child}"])[mixin] = type(mixin, (), {})

import unittest  # noqa: E402

from tests.test_modeling_common import ModelTesterMixin  # type: ignore[import-not-found]  # noqa: E402
from transformers.testing_utils import torch_device  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 20},
    "Gemma2": {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32},
    "Qwen3": {"head_dim": 32},
}


class Tester:
    """Makes a model's configuration and inputs, by the names that the mixin asks for."""

    batch_size, seq_length, is_training = 4, 40, True

    def __init__(self, name: str) -> None:
        """name: of MODELS."""
        self.name = name

    def get_config(self) -> Any:
        """Two layers, four query heads on two key heads."""
        return getattr(transformers, f"{self.name}Config")(
            vocab_size=99,
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            **MODELS[self.name],
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Tokens, of which none is padding, and a mask."""
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _equivalence(side: str) -> Any:
    def test(self: Any) -> None:
        from cute_attn import transformers as ours

        ours.register()
        self.flash_attn_inference_equivalence(attn_implementation=ours.NAME, padding_side=side)

    return test


for _name in MODELS:
    _case = type(
        f"{_name}ModelTest",
        (ModelTesterMixin, unittest.TestCase),
        {
            "all_model_classes": (
                getattr(transformers, f"{_name}Model"),
                getattr(transformers, f"{_name}ForCausalLM"),
            ),
            "setUp": lambda self, name=_name: setattr(self, "model_tester", Tester(name)),
            "test_cute_attn_inference_equivalence": _equivalence("left"),
            "test_cute_attn_inference_equivalence_right_padding": _equivalence("right"),
        },
    )
    _case.__module__ = __name__
    globals()[_case.__name__] = _case
del _case, ModelTesterMixin  # so that pytest collects each once
