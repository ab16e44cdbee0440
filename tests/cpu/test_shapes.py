"""The sweep of random shapes without a GPU: useful operations, and what we compute."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_attn.lab.benchmark.workload import Workload

# ---- useful operations ----

_SIZES = st.integers(1, 40)


def _count(seqlen_q, seqlen_k, left, right):
    """(query, key) pairs under the band, counted one by one."""
    own = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        seen &= key >= own - left
    if right is not None:
        seen &= key <= own + right
    return int(seen.sum())


@given(
    st.lists(st.tuples(_SIZES, _SIZES), min_size=1, max_size=4),
    st.sampled_from(["", "causal", "window", "causal_window"]),
    st.integers(1, 30),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from([("forward", 8 + 24), ("backward", 3 * 8 + 2 * 24)]),
)
def test_flops_are_of_the_pairs_of_every_sequence(lengths, mask, window, right, packed, op):
    causal, windowed = mask.startswith("causal"), mask.endswith("window")
    options = {
        "causal": causal,
        "window": window if windowed else 0,
        "window_right": right if mask == "window" else 0,
        "op": op[0],
    }
    if packed:
        queries, keys = zip(*lengths, strict=True)
        workload = Workload(1, 1, 6, 8, 2, 24, lengths=queries, lengths_k=keys, **options)
    else:
        lengths = lengths[:1] * 3
        workload = Workload(3, lengths[0][0], 6, 8, 2, 24, seqlen_k=lengths[0][1], **options)
    band = (window if windowed else None, 0 if causal else right if windowed else None)
    pairs = sum(_count(*pair, *band) for pair in lengths)
    assert workload.flops == 2 * 6 * pairs * op[1]
