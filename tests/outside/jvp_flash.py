"""jvp-flash-attention's comparison of tangents and gradients with PyTorch's, on ``attention``.

Its ``tests/test_jvp_attention.py`` is a script, of which the tests here call the functions and compare what it prints.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.api.attention import attention

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""The script's, of the greatest error; it also has fp32, whose tangents no kernel here follows."""


class JVPAttn:
    """``JVPAttn``, an autograd function there; its hints of Triton's schedule change no result."""

    @staticmethod
    def fwd_dual(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Tensors are (batch, nheads, seqlen, head_dim)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, bias=attn_mask, causal=causal).transpose(1, 2)


def module() -> ModuleType:
    """``jvp_flash_attention.jvp_attention``. Its masks add MASK_CONST, as PyTorch's attention does."""
    made = ModuleType("jvp_flash_attention.jvp_attention")
    vars(made).update(JVPAttn=JVPAttn, MASK_CONST=-1.0e2)
    return made


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "mask,causal", [("none", False), ("none", True), ("boolean", False), ("additive", False)]
)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("seqlen", [32, 64, 128, 256, 512, 1024, 2048])
def test_tangents_and_gradients(seqlen, head_dim, mask, causal, dtype):
    """``torch.func.jvp`` and dual numbers, each with a loss and its gradients."""
    import test_jvp_attention as suite  # type: ignore[import-not-found]

    args: Any = suite.Args(bsz=2, model_dim=256, head_dim=head_dim)
    device = torch.device("cuda")
    q, q_t, k, k_t, v, v_t, target = suite.create_test_tensors(args, seqlen, device, dtype)
    attn_mask = suite.create_attention_mask(args, seqlen, device, dtype, mask)
    found = suite.validate_accuracy_and_gradients(
        q, k, v, q_t, k_t, v_t, target, causal, attn_mask, tolerance=TOLERANCES[dtype]
    )
    found.tolerance = TOLERANCES[dtype]
    assert found.is_accurate(), found
