"""BlockMasks of keys from one to another: against brute force, in calls of both doors, and wrong bounds."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cute_attn import attention
from cute_attn.flex import interval_mask
from cute_attn.host.block_masks import FULL, PARTIAL, kinds_of
from tests import refusals


def bounds(batch, nheads, seqlen_q, seqlen_k, kind):
    """First and last key of each query; some lie beyond the sequence, and some intervals are empty."""
    generator = torch.Generator().manual_seed(seqlen_q)
    query = torch.arange(seqlen_q).expand(batch, nheads, -1)
    if kind == "documents":
        return query // 200 * 200, query + 1
    if kind == "window":
        return query - 100, query + 100
    begin = torch.randint(-20, seqlen_k + 20, (batch, nheads, seqlen_q), generator=generator)
    return begin, begin + torch.randint(-40, seqlen_k, (batch, nheads, seqlen_q), generator=generator)


@pytest.mark.parametrize("kind", ["documents", "window", "random"])
@pytest.mark.parametrize("sizes", [(1, 1, 128, 128), (2, 1, 300, 515), (1, 3, 1, 260), (2, 3, 600, 100)])
def test_blocks_and_elements_are_the_intervals(sizes, kind):
    begin, end = bounds(*sizes, kind)
    seqlen_k = sizes[3]
    mask = interval_mask(begin, end.int(), seqlen_k)
    key = torch.arange(seqlen_k)
    shown = (key >= begin[..., None]) & (key < end[..., None])
    kinds = kinds_of(mask)
    for q0 in range(0, sizes[2], 128):
        for k0 in range(0, seqlen_k, 128):
            block = shown[:, :, q0 : q0 + 128, k0 : k0 + 128]
            kind_here = kinds[:, :, q0 // 128, k0 // 128]
            assert torch.equal(kind_here == FULL, block.all(3).all(2))
            assert (kind_here >= PARTIAL)[block.any(3).any(2)].all()
    # Blocks between the bounds of a block's queries are listed though none of these sees them.
    least, most = begin[:, :, :128].amin(-1), end[:, :, :128].amax(-1)
    assert ((kinds[:, :, 0] == 0) | (key[::128] < most[..., None])).all()
    assert ((kinds[:, :, 0] == 0) | (key[::128] + 128 > least[..., None])).all()
    at = torch.meshgrid(*map(torch.arange, shown.shape), indexing="ij")
    assert torch.equal(mask.mask_mod(*at), shown)


def test_both_doors_take_it():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=generator) for _ in range(3))
    begin, end = bounds(1, 1, 300, 300, "documents")
    mask = interval_mask(begin, end, 300)
    key = torch.arange(300)
    shown = (key >= begin[..., None]) & (key < end[..., None])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    ours = attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    torch.testing.assert_close(ours.transpose(1, 2), expected)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)


ONE = torch.zeros(1, 2, 8, dtype=torch.int32)


WRONG = """
interval_mask(0, ONE, 8) -> TypeError: begin is an int; accepted: a tensor (batch, nheads, seqlen_q)
interval_mask(ONE, ONE.float(), 8) -> TypeError: end has dtype torch.float32; accepted: torch.int32, torch.int64
interval_mask(ONE[0], ONE, 8) -> ValueError: begin has shape (2, 8); accepted: (batch, nheads, seqlen_q)
interval_mask(ONE[..., :0], ONE, 8) -> ValueError: begin has shape (1, 2, 0)
interval_mask(ONE, ONE[..., :1], 8) -> ValueError: end has shape (1, 2, 1); accepted: (1, 2, 8), begin's
interval_mask(ONE, ONE.expand(3, 2, 8), 8.0) -> ValueError: seqlen_k is 8.0; accepted: an int of 1 or more
interval_mask(ONE, ONE, 0) -> ValueError: seqlen_k is 0; accepted
interval_mask(ONE, ONE.to("meta"), 8) -> ValueError: end is on meta; accepted: cpu, where begin is
"""


@refusals.each(WRONG)
def test_wrong_bounds_are_refused(call, sentence):
    refusals.check(call, sentence, globals())
