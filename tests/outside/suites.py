"""Test suites that others wrote: the folder of each, which of its tests run, and on which functions."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One file, or folder, of somebody's tests.

    Attributes:
        source: repository, version and files, as --help prints them.
        folder: of the repository's files in the folder of suites; tests run there.
        paths: what pytest collects, in ``folder``.
        adapter: of :mod:`outside.adapters`, what the tests run on.
        tests: how many of each test to sample, by the beginning of its function's name; "" for every other one.
        deselected: reasons by the beginning of names of tests that are left out.
        lacking: functions that an older file imports and that may be gone since; a test that calls one is skipped.
        needs: modules without which the suite is skipped.
        arguments: for pytest.
        environment: variables.
    """

    source: str
    folder: str
    paths: tuple[str, ...]
    adapter: str
    tests: dict[str, int]
    deselected: dict[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


_CUDA = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda"}
_PYTORCH = "pytorch/pytorch, the tag of the torch that is installed"
_WORDING = "expects what PyTorch's own kernel warns or raises"
_BOUNDS = (
    "expects a RuntimeError for lengths beyond the table's pages, which FlashAttention-2 reads on the host, and so "
    "waits for the device; here kernels take such lengths as the capacity, see tests/gpu/test_arguments.py"
)
_PACKED = "masks as packed bits, of 32 keys at a time"
_HELPER = "tests how FlashAttention prepares its kernels' arguments"
_EXTENSION = "calls FlashAttention's extension itself"


def _counts(text: str) -> dict[str, int]:
    """``Suite.tests`` of "NAME COUNT, ...", with names after ``test_``; * for every other one."""
    pairs = (item.split() for item in text.split(","))
    return {"" if name == "*" else f"test_{name}": int(count) for name, count in pairs}


def _flash_2(source: str, adapter: str, *libraries: str) -> Suite:
    """transformers' tests of its implementation flash_attention_2."""
    return Suite(
        source=source,
        folder="transformers",
        paths=(str(Path(__file__).parent / "hf_models.py"),),
        adapter=adapter,
        tests={"test_flash_attn_2": 40},
        deselected={
            "test_flash_attn_2_can_dispatch_composite_models": "none of the models is composite",
            "test_flash_attn_2_fp32_ln": "quantises by bitsandbytes",
        },
        needs=("transformers", *libraries, "parameterized"),
        environment={"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"},
    )


def _diffusers(adapter: str, which: str, *libraries: str) -> Suite:
    """diffusers' tests of its attention backends."""
    return Suite(
        source="huggingface/diffusers, the tag of the diffusers that is installed: tests/, of which *.py, "
        "models/*.py, models/testing_utils/ and models/transformers/ are read",
        folder="diffusers",
        paths=("tests/models/transformers/test_models_transformer_flux.py",),
        adapter=adapter,
        tests={"": 100},
        needs=("diffusers", "transformers", "accelerate", *libraries),
        arguments=("-k", f"Attention and not Parallel and {which}"),
        environment={"HF_HUB_OFFLINE": "1"} if libraries else {},
    )


def _flash_4_functions(files: tuple[str, ...], tests: dict[str, int]) -> Suite:
    """FlashAttention-4's tests of functions of scores."""
    return Suite(
        source="Dao-AILab/flash-attention, 2026-08: flash_attn/cute/{block_sparsity,cute_dsl_utils,utils}.py and "
        "tests/cute/, of which conftest.py, {score,mask}_mod_definitions.py, test_{score,mask}_mod*.py and "
        "test_block_sparsity.py are read",
        folder="flash-attention",
        paths=tuple(f"tests/cute/test_{name}.py" for name in files),
        adapter="flash_attn_4_functions",
        tests=tests,
        deselected={
            "test_cute_mask_mod_vectorized": _PACKED,
            "test_varlen_mask_mod_vectorized": _PACKED,
            "test_dq_write_order": _HELPER,
            "test_block_sparse_bwd_normalize": _HELPER,
            "test_block_sparse_bwd_deterministic_missing": _HELPER,
            "test_sm100_block_sparse_bwd": _HELPER,
            "test_sm100_block_sparse_q_stage1": _HELPER,
            "test_varlen_block_sparse_coarse_kv_requires_offsets": _HELPER,
        },
        needs=("einops",),
    )


SUITES = {
    "pytorch-sdpa": Suite(
        source=f"{_PYTORCH}: test/test_transformers.py (an older tag's will do where names exist)",
        folder="pytorch/test",
        paths=("test_transformers.py",),
        adapter="sdpa",
        tests=_counts(
            "flash_attention_vs_math_ref_grads 150, mem_efficient_attention_vs_math_ref_grads 100, "
            "mem_efficient_attention_attn_mask_vs_math_ref_grads 150, "
            "fused_attention_vs_math_ref_grads_cudagraph 60, scaled_dot_product_attention_fused_kernels 20, "
            "cudnn_attention 20, mem_eff 30, fused_kernels 40, fused_attention_different_dk_dv 2, sdp 20, "
            "causal_variants 40, is_causal 8, singelton_head_dim_stride_ne_1 1"
        ),
        deselected={
            "test_fused_backwards_throws_determinism_warning": _WORDING,
            "test_sdp_choice_with_determinism": "asks which backend PyTorch chooses, not what it computes",
            "test_mem_eff_backwards_determinism": "expects PyTorch's own kernel to vary from run to run",
            "test_cudnn_attention_fail_d128": _WORDING,
            "test_fused_sdp_priority_order": "times PyTorch's choice",
        },
        needs=("expecttest",),
        environment=_CUDA,
    ),
    "pytorch-flash": Suite(
        source=f"{_PYTORCH}: test/nn/attention/{{_fa_test_common,test_open_registry}}.py, of which "
        "outside/pytorch_flash.py calls the former",
        folder="pytorch/test/nn/attention",
        paths=("test_open_registry.py", str(Path(__file__).parent / "pytorch_flash.py")),
        adapter="stock",
        tests={"test_matches_math": 64, "": 30},
        needs=("expecttest",),
        environment=_CUDA,
    ),
    "pytorch-varlen": Suite(
        source=f"{_PYTORCH}: test/test_varlen_attention.py",
        folder="pytorch/test",
        paths=("test_varlen_attention.py",),
        adapter="sdpa",
        tests={"": 200},
        needs=("expecttest",),
        environment=_CUDA,
    ),
    "pytorch-nested": Suite(
        source=f"{_PYTORCH}: test/test_nestedtensor.py (2.6's will do)",
        folder="pytorch/test",
        paths=("test_nestedtensor.py",),
        adapter="sdpa",
        tests={"test_sdpa": 60, "test_scaled_dot_product_attention": 10},
        lacking=("torch.nn.attention.flex_attention.create_nested_block_mask",),
        needs=("expecttest",),
        environment=_CUDA,
    ),
    "flash-attention": Suite(
        source="Dao-AILab/flash-attention, 2.8: tests/test_flash_attn.py, flash_attn/layers/{__init__,rotary}.py, "
        "flash_attn/ops/__init__.py, flash_attn/ops/triton/{__init__,rotary}.py",
        folder="flash-attention",
        paths=("tests/test_flash_attn.py",),
        adapter="flash_attn",
        tests=_counts(
            "flash_attn_qkvpacked 40, flash_attn_varlen_qkvpacked 40, flash_attn_output 100, "
            "flash_attn_varlen_output 100, flash_attn_causal 40, flash_attn_varlen_causal 40, "
            "flash_attn_splitkv 30, flash_attn_race_condition 4, flash_attn_bwd_overflow 10, "
            "flash_attn_bwd_transpose 10, flash_attn_bwd_varlen_overflow 6, flash_attn_deterministic 10, "
            "flash_attn_varlen_deterministic 10"
        ),
        deselected={
            "test_flash_attn_generator_arg_must_be_none": _WORDING,
            "test_flash_attn_varlen_paged_kv_num_splits": "expects that keys in pages are not divided",
        },
        needs=("einops",),
    ),
    "flash-attention-kvcache": Suite(
        source="as flash-attention",
        folder="flash-attention",
        paths=("tests/test_flash_attn.py",),
        adapter="flash_attn",
        tests={"test_flash_attn_kvcache": 200},
        deselected={"test_flash_attn_kvcache_paged_block_table_bounds": _BOUNDS},
        needs=("einops",),
    ),
    "flash-attention-rotary": Suite(
        source="Dao-AILab/flash-attention, 2.8: tests/test_rotary.py",
        folder="flash-attention",
        paths=("tests/test_rotary.py",),
        adapter="installed",
        tests={"test_rotary_emb": 60},
        deselected={"test_compilation_count": "counts what Triton compiles"},
        needs=("einops", "triton"),
    ),
    "flash-attention-3": Suite(
        source="Dao-AILab/flash-attention, 2026-08: hopper/{test_flash_attn,test_util,padding}.py, flash_attn "
        "as above; without windows and chunks, which it tests together",
        folder="flash-attention",
        paths=("hopper/test_flash_attn.py",),
        adapter="flash_attn_3",
        tests=_counts(
            "flash_attn_kvcache 60, flash_attn_combine 40, flash_attn_output 40, flash_attn_varlen_output 40"
        ),
        needs=("einops",),
        environment={"FLASH_ATTENTION_DISABLE_LOCAL": "TRUE", "FLASH_ATTENTION_DISABLE_FP8": "TRUE"},
    ),
    "flash-attention-4": Suite(
        source="Dao-AILab/flash-attention, 2026-08: tests/cute/{conftest,test_flash_attn,test_flash_attn_combine}.py, "
        "flash_attn/cute/testing.py and flash_attn as above",
        folder="flash-attention",
        paths=("tests/cute/test_flash_attn.py", "tests/cute/test_flash_attn_combine.py"),
        adapter="flash_attn_4",
        tests=_counts(
            "flash_attn_kvcache 120, flash_attn_combine 60, flash_attn_output 80, "
            "flash_attn_varlen_output 80, flash_attn_learnable_sink 3, flash_attn_varlen_learnable_sink 3, "
            "flash_attn_paged 20, flash_attn_lse_grad 8, flash_attn_seqlen_k_zero 8, flash_attn_empty_q 8, "
            "flash_attn_small_head_dim 8"
        ),
        deselected={"test_flash_attn_combine_dynamic": _EXTENSION},
        needs=("einops",),
    ),
    "flash-attention-4-scores": _flash_4_functions(
        ("score_mod", "score_mod_varlen"),
        _counts(
            "cute_vs_flex_attention 40, cute_vs_flex_attention_with_aux_tensors 12, "
            "cute_vs_flex_attention_backward 24, cute_vs_flex_attention_backward_with_aux 8, "
            "cute_vs_flex_attention_backward_pack_gqa 8, cute_score_mod 24, score_mod_with_paged_kvcache 24, "
            "varlen_with_score_mod 30, varlen_with_score_mod_vectorized 12, "
            "varlen_with_global_idx_score_mod 40, varlen_score_mod_kvcache 20, "
            "varlen_score_mod_with_paged_kvcache_global 30, varlen_score_mod_backward 40"
        ),
    ),
    "flash-attention-4-masks": _flash_4_functions(
        ("mask_mod", "mask_mod_varlen"),
        _counts(
            "static_masks 40, parameterized_masks 60, q_boundary 14, block_sparse 30, "
            "varlen_static_masks 20, varlen_parameterized_masks 20, varlen_global_masks 30, "
            "varlen_block_sparse 60, * 30"
        ),
    ),
    "flash-attention-4-blocks": _flash_4_functions(
        ("block_sparsity",), {"test_fixed_length_masks": 80, "test_fast_sampling": 40, "": 120}
    ),
    "attention-gym": Suite(
        source="meta-pytorch/attention-gym, 2026-08: attn_gym/{masks,mods}/, attn_gym/utils.py and those "
        "test/test_*.py that call flex_attention",
        folder="attention-gym",
        paths=("test",),
        adapter="flex",
        tests=_counts(
            "block_diffusion_flex 1, causal_block_mask_with_flex_attention 2, flex_attention_aux_lse 1, "
            "global_sliding_window_flex 1, graphormer_ 5, jetspec_tree_causal_mask_flex 1, natten_masks 1, "
            "sandwich_flex_matches 1, split_prefix 1, tanh_approx 1, vsa_flex_attention_backward_cuda 1"
        ),
    ),
    "jvp-flash-attention": Suite(
        source="amorehead/jvp_flash_attention, 2026-02: tests/test_jvp_attention.py, of which outside/jvp_flash.py "
        "calls functions",
        folder="jvp_flash_attention",
        paths=(str(Path(__file__).parent / "jvp_flash.py"),),
        adapter="jvp",
        tests={"": 120},
    ),
    "flash-mla": Suite(
        source="deepseek-ai/FlashMLA, 2026-04: tests/test_flash_mla_dense_decoding.py and tests/kernelkit/, of which "
        "outside/flash_mla_dense.py calls the former",
        folder="FlashMLA",
        paths=(str(Path(__file__).parent / "flash_mla_dense.py"),),
        adapter="flash_mla",
        tests={"": 150},
        needs=("triton",),
    ),
    "transformers": Suite(
        source="huggingface/transformers, as installed: tests/test_modeling_common.py, which its source "
        "distribution has; outside/hf_models.py makes the models",
        folder="transformers",
        paths=(str(Path(__file__).parent / "hf_models.py"),),
        adapter="sdpa",
        tests=_counts(
            "cute_attn_inference_equivalence 12, eager_matches_sdpa 150, sdpa_can_dispatch_on_flash 4, "
            "sdpa_can_compile_dynamic 4, eager_matches_batched 8, training 8"
        ),
        needs=("transformers", "parameterized"),
        environment={"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"},
    ),
    "transformers-flash": _flash_2("as transformers", "installed"),
    "transformers-hub": _flash_2(
        "as transformers; with the kernels library in the version that it asks for", "hub", "kernels"
    ),
    "diffusers": _diffusers("sdpa", "not hub"),  # a hub's kernels would be fetched
    "diffusers-hub": _diffusers("hub", "hub", "kernels"),
}
