"""How the backward's work is divided among CTAs: among query heads, and in the deterministic mode among key blocks."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.host.backward_splits import (
    MAX_IN_ORDER,
    MAX_SPLITS,
    Columns,
    accumulators_in_order,
    even_splits,
    head_splits,
    key_splits,
    queries_seen,
)
from cute_attn.host.call import Call
from cute_attn.tiles import BackwardSm90Tile
from cute_attn.traits import Traits

TILE = BackwardSm90Tile(64, 128)


def call(seqlen_q, seqlen_k, nheads=1, nheads_kv=1, batch=1, mask="", window=None, packed=(), head_dim=128):
    """Parameters without memory; ``packed``: all rows of queries and of keys, of sequences up to those lengths."""
    rows_q, rows_k = ((n,) for n in packed) if packed else ((batch, seqlen_q), (batch, seqlen_k))
    q = torch.empty(*rows_q, nheads, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(*rows_k, nheads_kv, head_dim, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(batch + 1, dtype=torch.int32, device="meta") if packed else None
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    left, right = window or (UNBOUNDED, UNBOUNDED)
    return Call(q, k, k, ends, ends, **longest, mask=mask, window_left=left, window_right=right)


def test_accumulators_in_order():
    """One if CTAs have enough work between turns, or L2 is full; several only for few queries and many keys."""

    def accumulators(blocks, count, steps, one, keys=2**30, seen=1.0, rows=0, sequences=1):
        columns = Columns(count, blocks, rows or blocks, sequences, steps, seen)
        return accumulators_in_order(columns, one, keys, 132, 50 * 2**20)

    assert accumulators(64, 32, 64.0, 2**25, seen=0.5) == 1
    assert accumulators(64, 1, 64.0, 2**20, 2**10) in range(2, MAX_IN_ORDER + 1)
    assert accumulators(390, 1, 8.0, 2**18) > MAX_IN_ORDER
    assert accumulators(2, 1, 1.0, 2**10) <= 2
    assert accumulators(194, 4, 16.0, 2**22) == 6, "no more than stay in half the L2"
    assert accumulators(240, 3, 14.0, 7 * 2**20, rows=1014, sequences=12) > MAX_IN_ORDER, (
        "sequences after each other use a part of them at a time"
    )
    assert accumulators(240, 3, 14.0, 7 * 2**20, rows=24 * 240, sequences=1) < MAX_IN_ORDER


def test_key_splits():
    assert key_splits(64, 1000, 132, accumulator_bytes=2**30) == 1
    assert key_splits(64, 32, 132) == 4
    assert key_splits(3, 1, 132) == 3 and key_splits(1, 1, 132) == 1
    assert all(1 <= key_splits(1000, n, 132) <= MAX_SPLITS for n in range(1, 300))


# ---- query heads ----

L2 = {"NVIDIA H100 80GB HBM3": 50 << 20, "NVIDIA H200": 60 << 20}
MEASURED = [
    (result["gpu"], row)
    for path in sorted((Path(__file__).parents[2] / "bench" / "results").glob("*-head-splits.json"))
    for result in [json.loads(path.read_text())]
    for row in result["rows"]
]


def splits_of(params, gpu="NVIDIA H200", *more, tile=TILE):
    return head_splits(params, tile, 132, L2[gpu], *more)


@pytest.mark.parametrize(
    ("gpu", "row"),
    MEASURED,
    ids=lambda x: x[7:11] if isinstance(x, str) else "-".join(str(n) for n in [*x.values()][:-1]),
)
def test_head_splits_are_nearly_the_fastest_measured(gpu, row):
    """Two cards, one with 5/6 of the other's L2; the nearest number that was measured counts."""
    mask = "causal" if row["causal"] else ""
    kernel = registry.lookup(Traits("backward", "sm90", "bf16", row["head_dim"], mask=mask))
    sizes = row["seqlen"], row["seqlen"], row["nheads"], row["nheads_kv"], row["batch"], mask
    splits = splits_of(call(*sizes, head_dim=row["head_dim"]), gpu, tile=kernel.tile)
    rates = {int(n): rate for n, rate in row["tflops_by_splits"].items()}
    rate = rates[min(rates, key=lambda measured: abs(measured - splits))]
    assert rate * 1.065 >= max(rates.values()), splits


def test_both_cards_were_measured():
    assert {gpu for gpu, _ in MEASURED} == set(L2) and len(MEASURED) > 20


@pytest.mark.parametrize(
    ("params", "fewest", "most"),
    [
        (call(8192, 8192, 16, 16), 1, 1),
        (call(8192, 8192, 64, 8), 1, 1),  # without a mask one head of a work tile is in L2 at a time
        (call(7053, 7053, 16, 1), 4, 16),  # 56 key blocks for 132 multiprocessors
        (call(7088, 291, 64, 4), 8, 16),  # 12
        (call(100, 2**22, 64, 1), 1, 1),
        (call(4096, 4096, 64, 8, 16, "causal"), 4, 4),  # bytes in flight count of however many work tiles
        (call(4096, 4096, 64, 8, 1, "causal", head_dim=96), 4, 4),  # 3, 3 and 2 heads would fit as well
        (call(4096, 4096, 56, 8, 1, "causal"), 3, 3),  # 7 are too many more
        (call(1, 5, 2**25, 1), 2, 2**14),
        (call(1, 5, 64, 1, 2**28, packed=(2**28, 2**28)), 1, 1),
        # One sequence is as long as all others.
        (call(4448, 4448, 8, 1, 7, "causal", packed=(9000, 9000)), 4, 8),
        (call(1920, 1920, 80, 10, 2, "causal", packed=(2709, 2709), head_dim=256), 4, 4),
        # A narrow window is no triangle: work tiles are equal. A wide one is as causal.
        (call(3584, 4352, 14, 1, mask="window", window=(1023, 64)), 2, 14),
        (call(8192, 8192, 64, 8, mask="window", window=(1023, 0)), 1, 1),
        (call(8192, 8192, 64, 8, mask="window", window=(9000, 0)), 4, 4),
        (call(8192, 8192, 64, 8, mask="window", window=(9000, 9000)), 1, 1),  # one that hides nothing
        (call(100, 8192, 64, 8, mask="causal"), 1, 2),  # nearly all keys are seen by all queries
        (call(64, 64, 8, 1, mask="causal"), 1, 1),  # no gain that would outweigh the sums
    ],
    ids=lambda x: f"{x.longest}" if isinstance(x, Call) else str(x),
)
def test_query_heads_are_divided_where_work_tiles_are_few_or_bytes_in_flight_many(params, fewest, most):
    tile = TILE if params.q.shape[-1] <= 128 else BackwardSm90Tile(64, 64)
    assert fewest <= splits_of(params, tile=tile) <= most


def test_deterministic_calls_have_fewer_work_tiles_to_fill_the_gpu_with():
    """A sequence's key blocks are at most ``MAX_SPLITS`` work tiles."""
    long = call(8192, 8192, 8, 1)
    assert splits_of(long, "NVIDIA H200", True) == 8 > splits_of(long)
    short = call(2048, 2048, 8, 1, 8)
    assert splits_of(short, "NVIDIA H200", True) == splits_of(short) == 1


def test_heads_in_order_are_all_split_under_a_mask_unless_the_sums_cost_more():
    """Few queries that see a window of many keys have little work other than the sums."""

    def in_order(params):
        return head_splits(params, TILE, 132, 50 << 20, in_order=True)

    assert in_order(call(2868, 2868, 16, 1, mask="causal")) == 16
    assert in_order(call(4, 67277, 28, 7, 3, "window", window=(4736, 2176))) == 1


@pytest.mark.parametrize("triangular", [True, False])
def test_a_larger_l2_never_asks_for_more_splits(triangular):
    params = call(8192, 8192, 71, 1, 2, "causal" if triangular else "")
    found = [head_splits(params, TILE, 132, megabytes << 20) for megabytes in (1, 6, 40, 50, 60, 96, 10_000)]
    assert found == sorted(found, reverse=True) and (len(set(found)) > 3) == triangular
    assert found[0] == 71 or not triangular


@settings(max_examples=100)
@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 3),
    st.integers(1, 80),
    st.integers(1, 200),
    st.sampled_from(("", "causal", "causal_top_left", "window")),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_no_work_tile_is_without_heads_and_none_could_be_left_out(
    seqlen_q, seqlen_k, nheads_kv, group, processors, mask, batch, packs, deterministic
):
    packed = (seqlen_q * batch, seqlen_k * batch) if packs else ()
    window = (100, 7) if mask == "window" else (UNBOUNDED, UNBOUNDED)
    params = call(seqlen_q, seqlen_k, nheads_kv * group, nheads_kv, batch, mask, window, packed)
    splits = head_splits(params, TILE, processors, 50 << 20, deterministic)
    assert 1 <= splits <= group
    largest = -(-group // splits)
    assert splits == 1 or -(-group // (splits - 1)) > largest


@given(st.integers(1, 3000))
def test_even_splits_are_the_fewest_for_each_largest_part(group):
    parts = {-(-group // splits): splits for splits in range(group, 0, -1)}  # the fewest remain
    assert [*even_splits(group)] == sorted(parts.values())


@settings(max_examples=60)
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.sampled_from(["", "causal", "causal_top_left", "window", "window_top_left"]),
    st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_queries_seen_are_those_that_a_mask_leaves(seqlen_q, seqlen_k, mask, window):
    params = call(seqlen_q, seqlen_k, mask=mask, window=window)
    shift = 0 if "top_left" in mask or not mask else seqlen_k - seqlen_q
    row, col = torch.arange(seqlen_q)[:, None] + shift, torch.arange(seqlen_k)
    left, right = window if mask.startswith("window") else (math.inf, 0 if mask else math.inf)
    seen = (col <= row + right) & (col >= row - left)
    counts = [float(block.any(1).sum()) for block in seen.split(TILE.tile_n, dim=1)]
    assert queries_seen(params, seqlen_q, seqlen_k, TILE.tile_n) == (
        max(counts),
        pytest.approx(statistics.fmean(counts)),
    )


def test_of_many_key_blocks_some_are_counted():
    most, mean = queries_seen(call(2**17, 2**17, mask="causal"), 2**17, 2**17, TILE.tile_n)
    assert most == pytest.approx(2**17, rel=0.01) and mean == pytest.approx(2**16, rel=0.01)
