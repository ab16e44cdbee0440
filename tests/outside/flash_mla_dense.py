"""FlashMLA's test of dense decoding, on ``attention_with_kvcache`` and a latent cache.

FlashMLA's ``tests/test_flash_mla_dense_decoding.py`` has the test, and a script that calls it; this file names cases.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.api.kvcache import attention_with_kvcache


def module() -> ModuleType:
    """``flash_mla``, with the functions that the test calls."""
    made = ModuleType("flash_mla")
    vars(made).update(get_mla_metadata=lambda: (None, None), flash_mla_with_kvcache=decode)
    return made


def decode(
    q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
    *schedule: Any, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``flash_mla_with_kvcache``, whose LSE is inf where a query sees no key. schedule: changes no result."""
    out, lse = attention_with_kvcache(
        q, k_cache, k_cache[..., :head_dim_v], cache_seqlens=cache_seqlens, page_table=block_table,
        causal=causal, return_lse=True,
    )  # fmt: skip
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """The dtype and the device of the tensors that the test makes."""
    torch.set_default_dtype(request.param)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


CASES = [
    (batch, nheads, nheads_kv)
    for batch in (1, 2, 6, 64)
    for nheads in (1, 3, 9, 63, 64, 126, 128)
    for nheads_kv in (1, 2, 3, 8)
    if nheads % nheads_kv == 0 and batch * nheads_kv <= 128
]
"""Larger caches would not fit a GPU in several processes."""


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", ["equal", "different", "some zero"])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
@pytest.mark.parametrize("seqlen_k", [20, 140, 4096])
@pytest.mark.parametrize("batch,nheads,nheads_kv", CASES)
def test_dense_decoding(batch, nheads, nheads_kv, seqlen_k, seqlen_q, lengths, causal):
    """FlashMLA's test without its measurement of time."""
    import test_flash_mla_dense_decoding as suite  # type: ignore[import-not-found]

    suite.test_flash_mla(
        suite.TestParam(
            batch, seqlen_q, seqlen_k, is_varlen=lengths != "equal", is_causal=causal, test_performance=False,
            have_zero_seqlen_k=lengths == "some zero", h_q=nheads, h_kv=nheads_kv,
        )
    )  # fmt: skip
