"""The Ampere fp32 forward with fp16 terms, and its fallback kernel."""
