"""How the backward's work is divided among CTAs: among query heads, and among key blocks where it is deterministic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.host.backward_splits import (
    MAX_SPLITS,
    MOST_TILES,
    NEARLY,
    HeadSplitWork,
    divided_heads,
    fewest,
    head_splits,
    key_splits,
    makespan,
    steps_of_keys,
)
from cute_attn.host.call import Call
from cute_attn.tiles import BackwardSm90Tile

TILE = BackwardSm90Tile(64, 128)


def call(
    seqlen_q,
    seqlen_k,
    nheads=1,
    nheads_kv=1,
    batch=1,
    mask="",
    window=(UNBOUNDED, UNBOUNDED),
    packed=(),
    head_dim=128,
):
    """Parameters without memory; ``packed``: all rows of queries and of keys, of sequences up to those lengths."""
    rows_q, rows_k = ((n,) for n in packed) if packed else ((batch, seqlen_q), (batch, seqlen_k))
    q = torch.empty(*rows_q, nheads, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(*rows_k, nheads_kv, head_dim, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    left, right = window
    return Call(q, k, k, ends, ends, **longest, mask=mask, window_left=left, window_right=right)


def test_key_splits():
    assert key_splits(64, 1000, 132) == 1
    assert key_splits(64, 32, 132) == 4
    assert key_splits(3, 1, 132) == 3 and key_splits(1, 1, 132) == 1
    assert all(1 <= key_splits(1000, n, 132) <= MAX_SPLITS for n in range(1, 300))


@pytest.mark.parametrize(
    ("params", "fewest", "most"),
    [
        (call(8192, 8192, 16, 16), 1, 1),
        (call(8192, 8192, 32, 8, mask="causal"), 1, 1),
        (call(7053, 7053, 16, 1), 4, 16),  # 56 key blocks for 132 multiprocessors
        (call(2048, 2048, 71, 1, 8, "causal"), 6, 32),  # 128, the longest twice the mean
        (call(2048, 2048, 10, 2, 8, "causal"), 1, 1),  # the longest come first
        (call(7088, 291, 64, 4), 8, 16),  # 12
        (call(100, 2**22, 64, 1), 1, 1),
        (call(1, 5, 2**25, 1), 2, MOST_TILES),
        (call(1, 5, 64, 1, 2**28, packed=(2**28, 2**28)), 1, 1),
        (
            call(4448, 4448, 8, 1, 7, "causal", packed=(9000, 9000)),
            2,
            8,
        ),  # one sequence is as long as all others
        (call(3584, 4352, 14, 1, mask="window", window=(1023, 64)), 2, 14),
    ],
    ids=lambda x: f"{x.longest}" if isinstance(x, Call) else str(x),
)
def test_query_heads_are_divided_where_work_tiles_are_few(params, fewest, most):
    assert fewest <= head_splits(params, TILE, 132) <= most


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(1, 200),
    st.sampled_from(("", "causal")),
    st.integers(1, 4),
    st.booleans(),
)
def test_head_splits_are_the_fewest_nearly_as_fast_as_the_fastest(
    seqlen_q, seqlen_k, nheads_kv, group, processors, mask, batch, packs
):
    packed = (seqlen_q * batch, seqlen_k * batch) if packs else ()
    params = call(seqlen_q, seqlen_k, nheads_kv * group, nheads_kv, batch, mask, packed=packed)
    splits, work = head_splits(params, TILE, processors), HeadSplitWork.of(params, TILE, processors)
    if work is None:
        assert splits == 1
        return
    blocks = batch * nheads_kv * -(-seqlen_k // TILE.tile_n)
    assert work.most <= group and blocks * work.most <= MOST_TILES
    times = {n: work.time(n) for n in range(1, work.most + 1)}
    assert splits == next(n for n, time in times.items() if time <= NEARLY * min(times.values()))
    assert all(work.bound(n) <= time * (1 + 1e-9) for n, time in times.items())


@pytest.mark.parametrize(
    ("params", "tile_m", "rates"),
    [
        (
            call(2048, 2048, 71, 1, 8, "causal", head_dim=64),
            128,
            {1: 249, 2: 341, 4: 376, 6: 417, 8: 439, 12: 449, 15: 448, 18: 450, 24: 446, 36: 440, 71: 415},
        ),
        (call(2048, 2048, 71, 1, 8, head_dim=64), 128, {1: 556, 2: 548, 4: 545, 12: 544, 71: 524}),
        (
            call(2048, 2048, 71, 1, 2, "causal", head_dim=64),
            128,
            {2: 143, 4: 265, 8: 398, 12: 413, 15: 417, 18: 419, 24: 419, 36: 411, 71: 388},
        ),
        (call(4096, 4096, 32, 4, 4, "causal", head_dim=64), 128, {1: 513, 2: 504, 4: 502, 8: 490}),
        (call(2048, 2048, 64, 8, 4, "causal", head_dim=64), 128, {1: 434, 2: 425, 4: 419, 8: 398}),
        (
            call(2048, 2048, 12, 1, 8, "causal", head_dim=64),
            128,
            {1: 271, 2: 405, 3: 389, 4: 400, 6: 394, 12: 376},
        ),
        (call(2048, 2048, 10, 2, 8, "causal", head_dim=64), 128, {1: 420, 2: 373, 5: 358}),
        (
            call(2048, 2048, 128, 1, 1, "causal", head_dim=64),
            128,
            {2: 75, 8: 267, 15: 396, 18: 398, 24: 403, 27: 403, 36: 405, 71: 405, 128: 389},
        ),
        (call(598, 598, 99, 11, 4, "causal"), 64, {1: 229, 2: 235, 3: 243, 4: 237, 9: 223}),
        (call(2048, 2048, 32, 8, 4, "causal"), 64, {1: 490, 2: 458, 4: 453}),
        (call(4096, 4096, 64, 8, 1, "causal"), 64, {1: 507, 2: 567, 4: 586, 8: 576}),
        (
            call(2048, 2048, 32, 1, 4, "causal"),
            64,
            {2: 305, 4: 396, 8: 472, 11: 476, 12: 476, 15: 484, 18: 492, 32: 472},
        ),
    ],
    ids=lambda x: f"{x.nheads}-on-{x.k.shape[-2]}-b{x.batch}-{x.mask}" if isinstance(x, Call) else "",
)
def test_head_splits_are_within_7_percent_of_the_fastest_measured(params, tile_m, rates):
    """rates: TFLOP/s on one H200 by splits, of which the nearest counts."""
    splits = head_splits(params, BackwardSm90Tile(tile_m, 128), 132)
    rate = rates[min(rates, key=lambda measured: abs(measured - splits))]
    assert rate * 1.07 >= max(rates.values()), splits


@pytest.mark.parametrize(
    ("params", "gain"),
    [
        (call(2048, 2048, 71, 1, 8, "causal", head_dim=64), 1.5),
        (call(2048, 2048, 71, 1, 4, "causal", head_dim=64), 3),
        (call(2048, 2048, 12, 1, 8, "causal", head_dim=64), 1.5),
        (call(4096, 4096, 10, 2, 2, "causal"), 1.5),
    ],
    ids=lambda x: f"{x.nheads}-on-{x.k.shape[-2]}-b{x.batch}" if isinstance(x, Call) else "",
)
def test_what_head_splits_gain_where_the_longest_work_tile_is_too_long(params, gain):
    """With the work tiles of KeyTileOrder's rows and columns, apart from what the chooser simulates."""
    tile, splits = BackwardSm90Tile(128, 128), head_splits(params, BackwardSm90Tile(128, 128), 132)
    (seqlen_q, seqlen_k), nheads_kv = params.longest, params.k.shape[-2]

    def time(splits):
        costs = [
            steps * heads
            for steps in steps_of_keys(params, tile, seqlen_q, seqlen_k)
            for heads in divided_heads(params.group, splits) * (params.batch * nheads_kv)
        ]
        return makespan(costs, 132)

    assert splits > 1 and time(1) >= gain * time(splits)


@given(st.integers(1, 300), st.integers(1, 300))
def test_divided_heads_are_all_heads_as_evenly_as_can_be(group, splits):
    heads = divided_heads(group, splits)
    assert len(heads) == splits and sum(heads) == group and max(heads) - min(heads) <= 1


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_fewest_are_found_without_every_time(options):
    times = {n: float(time) for n, (time, _) in enumerate(options, 1)}
    bounds = {n: time * part for n, (time, part) in enumerate(options, 1)}
    found = fewest(range(1, len(options) + 1), times.__getitem__, bounds.__getitem__, NEARLY)
    assert found == next(n for n, time in times.items() if time <= NEARLY * min(times.values()))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.sampled_from(["", "causal", "causal_top_left", "window", "window_top_left"]),
    st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_steps_of_keys_are_those_that_a_mask_leaves(seqlen_q, seqlen_k, mask, window):
    params = call(seqlen_q, seqlen_k, mask=mask, window=window)
    shift = 0 if "top_left" in mask or not mask else seqlen_k - seqlen_q
    row, col = torch.arange(seqlen_q)[:, None] + shift, torch.arange(seqlen_k)
    left, right = window if mask.startswith("window") else (math.inf, 0 if mask else math.inf)
    seen = (col <= row + right) & (col >= row - left)
    counts = []
    for block in seen.split(TILE.tile_n, dim=1):
        queries = block.any(1).nonzero()
        counts.append(int(queries[-1]) // 64 - int(queries[0]) // 64 + 1 if len(queries) else 0)
    assert list(steps_of_keys(params, TILE, seqlen_q, seqlen_k)) == counts


def test_makespan_is_that_of_a_list_of_jobs():
    assert makespan([3, 3, 2, 2, 2], 2) == 7  # 3 + 2 + 2 and 3 + 2: not the best, 6, but what a list gives
    assert makespan([1, 1, 1, 3], 2) == 4 and makespan([3, 1, 1, 1], 2) == 3
    assert makespan([5], 132) == 5 and makespan([1] * 133, 132) == 2
