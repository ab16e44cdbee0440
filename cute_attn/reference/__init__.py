"""The definition of attention in plain torch, and device code run on the host (:mod:`cute_attn.reference.emulate`)."""

from cute_attn.reference.definition import (
    DROPOUT_KEEP,
    FULL_LENGTHS,
    NO_INPUTS,
    PLAIN,
    Epilogue,
    Features,
    Lengths,
    ScoreCoords,
    ScoreInputs,
    alibi_scores,
    attention,
    bias_scores,
    flash_keep,
    flash_keep_threshold,
    mem_efficient_keep,
    mem_efficient_keep_threshold,
    modify_scores,
    philox4x32,
    softcap_scores,
    softmax,
    visible,
)

__all__ = [
    "DROPOUT_KEEP", "FULL_LENGTHS", "NO_INPUTS", "PLAIN", "Epilogue", "Features", "Lengths", "ScoreCoords",
    "ScoreInputs", "alibi_scores", "attention", "bias_scores", "flash_keep", "flash_keep_threshold",
    "mem_efficient_keep", "mem_efficient_keep_threshold", "modify_scores", "philox4x32", "softcap_scores",
    "softmax", "visible",
]  # fmt: skip
