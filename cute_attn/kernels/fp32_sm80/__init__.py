"""The Ampere forward of fp32 in fp16 parts, and the exact kernel beside it."""

from cute_attn.kernels.fp32_sm80.kernel import ForwardExact, ForwardParts

__all__ = ["ForwardExact", "ForwardParts"]
