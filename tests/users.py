"""Calls of a user, for type checkers: `make types` fails if a call lacks its type, or if a wrong one is accepted."""

from typing import assert_type

import torch

import cute_attn
from cute_attn import attention, attention_varlen, attention_with_kvcache

q = torch.randn(1, 8, 2, 64)
assert_type(attention(q, q, q, causal=True), torch.Tensor)
assert_type(attention(q, q, q, return_lse=True), tuple[torch.Tensor, torch.Tensor])
out, lse, softmax = attention(q, q, q, return_lse=True, return_softmax=True)
assert_type(attention_with_kvcache(q, q, q), torch.Tensor)
out, lse = attention_with_kvcache(q, q, q, return_lse=True)
lengths = torch.tensor([0, 8], dtype=torch.int32)
attention_varlen(q[0], q[0], q[0], lengths, lengths, 8, 8).float()
attention(q, q, q, casual=True)  # type: ignore[call-overload]
attention(q, q, q, causal=3.0)  # type: ignore[call-overload]
attention(q, q, q, causal="topleft")  # type: ignore[call-overload]
print(attention(q, q, q).lse)  # type: ignore[attr-defined]
print(cute_attn.compile("forward-sm80-bf16-d64").resources.registers + 1)
print(cute_attn.compile("forward-sm80-bf16-d64").resources.register)  # type: ignore[attr-defined]
