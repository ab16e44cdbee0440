"""What PyTorch asks of a flash attention that is registered with it, asked of cute_attn's.

PyTorch's ``test/nn/attention/_fa_test_common.py`` has the tests, as a mixin whose methods a file of each implementation
calls: ``test_fa3.py``, ``test_fa4.py``, and this one.
"""

from typing import ClassVar

import torch
from _fa_test_common import FlashAttentionTestMixin, SdpaShape  # type: ignore[import-not-found]
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, parametrize

import cute_attn.sdpa

DTYPES = parametrize("dtype", [torch.float16, torch.bfloat16])
CAUSAL = parametrize("is_causal", [False, True])


class TestFlashAttention(FlashAttentionTestMixin, TestCase):
    """The mixin's tests, with ``torch.nn.attention``'s hook and kernels seen by PyTorch's profiler."""

    impl_name = cute_attn.sdpa.NAME
    fwd_kernel_patterns: ClassVar = ["kernel_cutlass_kernel_Forward"]
    bwd_kernel_patterns: ClassVar = ["kernel_cutlass_kernel_Backward"]

    def setUp(self) -> None:
        super().setUp()
        activate_flash_attention_impl(self.impl_name)

    def tearDown(self) -> None:
        restore_flash_attention_impl()
        super().tearDown()

    @DTYPES
    @CAUSAL
    @parametrize("head_dim", [64, 128])
    @parametrize("heads", [4, 8])
    @parametrize("seq_len", [512, 1024])
    @parametrize("batch", [1, 2])
    def test_matches_math(self, device, dtype, is_causal, head_dim, heads, seq_len, batch):
        self._assert_flash_matches_math(device, SdpaShape(batch, heads, seq_len, head_dim), dtype, is_causal)

    @DTYPES
    def test_kernel_called(self, device, dtype):
        self._test_kernel_called(device, dtype)

    def test_multiple_activate(self, device):
        self._test_multiple_activate_impl()

    @DTYPES
    @CAUSAL
    def test_compiled_metadata(self, device, dtype, is_causal):
        self._test_compiled_sdpa_metadata(device, dtype, is_causal)

    @DTYPES
    @CAUSAL
    def test_compiled_matches_math(self, device, dtype, is_causal):
        self._test_compiled_sdpa_matches_math(device, dtype, is_causal)

    @DTYPES
    @CAUSAL
    def test_compiled_backward_matches_math(self, device, dtype, is_causal):
        self._test_compiled_sdpa_backward_matches_math(device, dtype, is_causal)

    def test_preserves_query_layout(self, device):
        self._test_attention_preserves_query_layout(device)


instantiate_device_type_tests(TestFlashAttention, globals(), only_for=("cuda",))
