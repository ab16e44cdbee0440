"""The Ampere forward of fp32 in fp16 terms, and the fallback kernel beside it."""

from cute_attn.kernels.fp32_sm80.kernel import ForwardFallback, ForwardTerms

__all__ = ["ForwardFallback", "ForwardTerms"]
