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
):  # other imports of the file
    for name in (f"tests.{parent}", f"tests.{parent}.{child}"):
        sys.modules.setdefault(name, ModuleType(name))
    vars(sys.modules[f"tests.{parent}.{child}"])[mixin] = type(mixin, (), {})

import unittest  # noqa: E402

from transformers.testing_utils import torch_device  # noqa: E402

from tests import test_modeling_common as common  # type: ignore[attr-defined]  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 20},
    "Gemma2": {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32},
    "Qwen3": {"head_dim": 32},
}
"""Text decoders, with the fields of their configurations other than sizes."""


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
        """Tokens without padding, and a mask."""
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class ViTTester(Tester):
    """A tester of an image encoder."""

    seq_length, num_masks, mask_length = 65, 7, 64

    def get_config(self) -> Any:
        """Two layers, four heads; 64 patches and one token."""
        return transformers.ViTConfig(
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=4,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Images."""
        return self.get_config(), {
            "pixel_values": torch.rand(self.batch_size, 3, 32, 32, device=torch_device)
        }


class WhisperTester(Tester):
    """A tester of an audio encoder with a text decoder that attends to it."""

    encoder_seq_length, is_training = 30, False  # the mixin gives it no labels

    def get_config(self) -> Any:
        """Two layers each, four heads."""
        return transformers.WhisperConfig(
            vocab_size=99,
            d_model=128,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=self.encoder_seq_length,
            max_target_positions=self.seq_length,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Features of sound, two a position, and tokens."""
        shape = (self.batch_size, 16, 2 * self.encoder_seq_length)
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length), device=torch_device)
        return self.get_config(), {
            "input_features": torch.rand(shape, device=torch_device),
            "decoder_input_ids": ids,
            "decoder_attention_mask": torch.ones_like(ids),
        }


def _equivalence(side: str) -> Any:
    def test(self: Any) -> None:
        from cute_attn import transformers as ours

        ours.register()
        self.flash_attn_inference_equivalence(attn_implementation=ours.NAME, padding_side=side)

    return test


def _case(name: str, tester: Tester, head: str, **attributes: Any) -> type:
    """A test case of a model and of the same with a head."""
    case = type(
        f"{name}ModelTest",
        (common.ModelTesterMixin, unittest.TestCase),
        {
            "all_model_classes": (
                getattr(transformers, f"{name}Model"),
                getattr(transformers, f"{name}{head}"),
            ),
            "setUp": lambda self: setattr(self, "model_tester", tester),
            "test_cute_attn_inference_equivalence": _equivalence("left"),
            "test_cute_attn_inference_equivalence_right_padding": _equivalence("right"),
            **attributes,
        },
    )
    case.__module__ = __name__
    return case


for _name, _options in MODELS.items():
    # A window shorter than the text is a mask, which no flash kernel takes.
    _attributes: dict[str, Any] = (
        {"test_sdpa_can_dispatch_on_flash": None} if "sliding_window" in _options else {}
    )
    _attributes["_torch_compile_train_cls"] = getattr(transformers, f"{_name}ForCausalLM")
    globals()[f"{_name}ModelTest"] = _case(_name, Tester(_name), "ForCausalLM", **_attributes)
# The test of configurations is for models that generate, and would pass without doing anything.
ViTModelTest = _case("ViT", ViTTester("ViT"), "ForImageClassification", test_flash_attn_2_from_config=None)
WhisperModelTest = _case(
    "Whisper", WhisperTester("Whisper"), "ForConditionalGeneration", is_encoder_decoder=True
)
