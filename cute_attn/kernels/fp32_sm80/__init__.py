"""The Ampere fp32 forward with fp16 terms, and its fallback kernel."""

from cute_attn.kernels.fp32_sm80.kernel import ForwardFallback, ForwardTerms

__all__ = ["ForwardFallback", "ForwardTerms"]
