"""Orders of work tiles, by the kernels' code on the CPU: every work tile once, sections, and how even the end is.

A simulation of list scheduling measures how even an order is. A tile costs 1 for each block that it visits, plus 1.
The simulated time is compared with that of the longest tiles first.
"""

import functools
import heapq
import itertools
from dataclasses import dataclass

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, Int64, cute
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.device.seqlen import Seqlens
from cute_attn.kernels.forward_sm80.kernel import TILES_OF_A_SECTION
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD
from cute_attn.work.key_tiles import L2_SECTION_BYTES as KEY_SECTION_BYTES
from cute_attn.work.key_tiles import BackwardSchedule, HeadSplits, KeyTileOrder
from cute_attn.work.query_tiles import L2_SECTION_BYTES, QueryGrid, QueryTileOrder
from tests.tensors import dynamic, int32
from tests.tensors import run as run_once

# ---- a problem, and its orders ----


@dataclass(frozen=True)
class Problem:
    """Sequences and heads: lengths of the queries and keys of each, with rows before and behind if they are packed.

    ``stated``: by how much the stated longest sequences are too long, if packed.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    nheads: int
    nheads_kv: int
    packed: bool = False
    before: int = 0
    behind: int = 0
    stated: int = 0
    used_q: tuple[int, ...] = ()

    @property
    def longest(self) -> tuple[int, int]:
        more = self.stated if self.packed else 0
        return max(self.lengths_q) + more, max(self.lengths_k) + more

    @property
    def existing(self) -> tuple[int, ...]:
        """How many queries of each sequence there are."""
        used = self.used_q or self.lengths_q
        return tuple(min(pair) for pair in zip(used, self.lengths_q, strict=True))

    def tensor(self, side: str):
        """A tensor with the shape of q or k, as far as orders look at it."""
        lengths, heads = (self.lengths_q, self.nheads) if side == "q" else (self.lengths_k, self.nheads_kv)
        if self.packed:
            return torch.empty(max(self.before + sum(lengths) + self.behind, 1), heads, 1)
        return torch.empty(len(lengths), 1, heads, 1)

    def cu_seqlens(self, side: str):
        lengths = self.lengths_q if side == "q" else self.lengths_k
        return int32(*[*itertools.accumulate(lengths, initial=self.before)]) if self.packed else None


def write_tile(tile, out):
    out[0], out[1], out[2] = tile.batch, tile.head, tile.row0
    out[3], out[4] = tile.head_kv, Int32(tile.exists)


@cute.jit
def _query_tiles(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    seqused: cute.Tensor | None,
    sizes: cute.Tensor,
    out: cute.Tensor,
    longest_first: Constexpr,
    heads: Constexpr,
):
    """out[0] = (tiles, planes of a section, of the last one, the last section); then the fields of each tile."""
    seqlens = Seqlens(cu_seqlens, cu_seqlens, seqused, None, sizes[0], sizes[1])
    order = QueryTileOrder.make(seqlens, mQ, mK, sizes[2], sizes[3], heads, longest_first)
    out[0, 0], out[0, 1] = order.total, order.planes.divisor
    out[0, 2], out[0, 3] = order.last_planes.divisor, order.last_section
    for i in cutlass.range(cutlass.min(order.total, out.shape[0] - 1), unroll=1):
        write_tile(order.tile(i, seqlens), out[i + 1, None])


@cute.jit
def _query_grid(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    sizes: cute.Tensor,
    out: cute.Tensor,
    longest_first: Constexpr,
    heads: Constexpr,
):
    """out[0] = (CTAs, planes of a section, of the last one, the last section); then the work of each CTA."""
    seqlens = Seqlens(cu_seqlens, cu_seqlens, None, None, sizes[0], sizes[1])
    m_blocks, batch = cute.ceil_div(sizes[0], sizes[3]), seqlens.batch(mQ)
    grid = QueryGrid.make(m_blocks, mQ.shape[-2], mK.shape[-2], heads)
    if cutlass.const_expr(longest_first):
        grid = grid.longest_first(seqlens, batch, sizes[2], sizes[4])
        sections = grid.sections
        out[0, 1], out[0, 2] = sections.columns.divisor, sections.last_columns.divisor
        out[0, 3] = sections.last
    out[0, 0] = grid.tiles(batch)
    for i in cutlass.range(out[0, 0], unroll=1):
        write_tile(_tile_of_cta(grid, i, seqlens, sizes[3]), out[i + 1, None])


def _tile_of_cta(grid, index, seqlens, tile_m):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "block_idx", lambda: (index, Int32(0), Int32(0)))
        return grid.tile(seqlens, tile_m)


@cute.jit
def _key_blocks(
    mK: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    sizes: cute.Tensor,
    out: cute.Tensor,
    longest_first: Constexpr,
    in_order: Constexpr,
):
    """out[0] = (CTAs, columns of a section, of the last one, the last section); then the work of each CTA."""
    seqlens = Seqlens(cu_seqlens, cu_seqlens, None, None, sizes[0], sizes[1])
    schedule = BackwardSchedule(sizes[2], Int64(0), sizes, sizes[3])
    head_bytes = Int64(sizes[0]) * sizes[4]
    order = KeyTileOrder.make(seqlens, mK, schedule, head_bytes, sizes[5], longest_first, in_order)
    out[0, 0] = order.blocks
    if cutlass.const_expr(longest_first):
        sections = order.sections
        out[0, 1], out[0, 2] = sections.columns.divisor, sections.last_columns.divisor
        out[0, 3] = sections.last
    for i in cutlass.range(cutlass.min(order.blocks, out.shape[0] - 1), unroll=1):
        first, head_kv, batch = order.find(i, cu_seqlens)
        out[i + 1, 0], out[i + 1, 1], out[i + 1, 2] = batch, head_kv, first


@cute.jit
def _head_splits(mQ: cute.Tensor, mK: cute.Tensor, mDK: cute.Tensor, out: cute.Tensor):
    splits = HeadSplits.make(mQ, mK, mDK)
    for i in cutlass.range(out.shape[0], unroll=1):
        heads = splits.of(i)
        out[i, 0], out[i, 1], out[i, 2] = heads.head_kv, heads.first, heads.end


@functools.cache
def compiled(function, packed, used, *options):
    """``function`` compiled for any sizes. On the host, every lane is the first one."""
    x, lengths, out = torch.empty((1,) * (3 if packed else 4)), int32(*[0]), int32(*[[0]])
    given = [x] if function is _key_blocks else [x, x]
    given += [lengths if packed else None]
    given += [lengths if used else None] if function is _query_tiles else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "make_warp_uniform", lambda x: x)
        return cute.compile(function, *map(dynamic, (*given, lengths, out)), *options)


def run(function, tensors, sizes, *options, used=False, most=6000):
    """(the first row, the rows of the work tiles) that one of the functions above writes."""
    out = torch.full((most + 1, 5), -1, dtype=torch.int32)
    packed = tensors[0].ndim == 3
    compiled(function, packed, used, *options)(*map(dynamic, (*tensors, int32(*sizes), out)))
    first, *rows = out.tolist()
    return first[:4], rows[: first[0]]


def query_tiles(problem, queries, heads=1, longest_first=False, key_bytes=512):
    """(tiles and sections, [(batch, head, row0, head_kv, exists)])."""
    used = int32(*problem.used_q) if problem.used_q else None
    tensors = (problem.tensor("q"), problem.tensor("k"), problem.cu_seqlens("q"), used)
    sizes = (*problem.longest, key_bytes, queries)
    return run(_query_tiles, tensors, sizes, longest_first, heads, used=used is not None)


def query_grid(problem, tile_m, longest_first=False, key_bytes=512, heads=1, fewest=0):
    """(CTAs and sections, [(batch, head, row0, head_kv, exists)] of a grid with a CTA for each)."""
    tensors = (problem.tensor("q"), problem.tensor("k"), problem.cu_seqlens("q"))
    return run(_query_grid, tensors, (*problem.longest, key_bytes, tile_m, fewest), longest_first, heads)


def key_blocks(problem, tile_n, splits, longest_first, multiprocessors, query_bytes=512, in_order=False):
    """[(batch, kv head, first key block)] of each block of threads. query_bytes: of a query's dQ."""
    tensors = (problem.tensor("k"), problem.cu_seqlens("k"))
    sizes = (*problem.longest, splits, multiprocessors, query_bytes, tile_n)
    return [tuple(row[:3]) for row in run(_key_blocks, tensors, sizes, longest_first, in_order)[1]]


# ---- every work tile once ----


@st.composite
def problems(draw, longest=900):
    """Batches, or packed sequences of any lengths with any rows around them."""
    packed = draw(st.booleans())
    group, nheads_kv = draw(st.sampled_from((1, 2, 3, 4, 7, 8))), draw(st.integers(1, 5))
    count = draw(st.integers(1, 8))
    some = st.lists(st.integers(0, longest), min_size=count, max_size=count).map(tuple)
    lengths = [draw(some) for _ in "qk"]
    if not packed:
        lengths = [(max(own),) * count for own in lengths]
    used = draw(some) if draw(st.booleans()) else ()
    around = [draw(st.integers(0, 300)) for _ in range(3)] if packed else [0] * 3
    return Problem(*lengths, group * nheads_kv, nheads_kv, packed, *around, used)


def query_blocks(problem, lengths, queries, heads):
    """Sorted [(batch, head, row0, head_kv)] of blocks of so many queries of packs of heads, of sequences' lengths."""
    group = problem.nheads // problem.nheads_kv
    return [
        (batch, head, row0, head // group)
        for batch, length in enumerate(lengths)
        for first in range(0, problem.nheads, group)
        for head in range(first, first + group, heads)
        for row0 in range(0, length, queries)
    ]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_query_block_once(data):
    problem = data.draw(problems(), "problem")
    heads = data.draw(st.sampled_from((1, 2, 4, 8)))
    queries = data.draw(st.sampled_from((64, 128, 192))) // heads
    longest_first = data.draw(st.booleans(), "longest_first")
    key_bytes = data.draw(st.sampled_from((128, 2**15, 2**24)), "key_bytes")
    (total, *_), found = query_tiles(problem, queries, heads, longest_first, key_bytes)
    assert len(found) == total
    group = problem.nheads // problem.nheads_kv
    real = [tuple(tile[:4]) for tile in found if tile[4]]
    assert sorted(real) == query_blocks(problem, problem.existing, queries, heads)
    if problem.packed or not longest_first:  # a head's blocks follow each other, the last one first
        keys = (1, 0) if problem.packed else (0, 1)
        assert real == sorted(real, key=lambda x: (*(x[i] for i in keys), -x[2]))
    if problem.packed:  # at most one block per sequence does not exist, plus the blocks that are not used
        rows = len(problem.tensor("q"))
        packs = problem.nheads_kv * -(-group // heads)
        assert total <= packs * (rows // queries + len(problem.lengths_q))


OF_A_GRID = ((64, 128), (False, True), (128, 2**15, 2**24), (1, 2), (0, 8, 100))


@settings(deadline=None, max_examples=100)
@given(problems(), st.tuples(*map(st.sampled_from, OF_A_GRID)))
def test_every_cta_of_a_grid_has_a_query_block_of_its_own(problem, chosen):
    tile_m, longest_first, key_bytes, heads, fewest = chosen
    problem = Problem(*(getattr(problem, name) for name in problem.__dataclass_fields__ if name != "used_q"))
    (total, together, _, _), found = query_grid(problem, tile_m, longest_first, key_bytes, heads, fewest)
    real = [tuple(tile[:4]) for tile in found if tile[4]]
    group = problem.nheads // problem.nheads_kv
    assert sorted(real) == query_blocks(problem, problem.lengths_q, tile_m, heads)
    if not longest_first:
        assert real == sorted(real, key=lambda x: (x[0], x[1], -x[2]))
        return
    packs, m_blocks = -(-group // heads), max(-(-problem.longest[0] // tile_m), 1)
    kv_heads = max(L2_SECTION_BYTES // max(key_bytes * problem.longest[1], 1), 1)  # whose K and V stay in L2
    most = max(kv_heads * packs, -(-fewest // m_blocks))
    assert together % packs == 0 and together <= -(-most // packs) * packs
    size = together * m_blocks
    owners = []
    for start in range(0, total, size):
        section = found[start : start + size]
        owners.append({(batch, head_kv) for batch, _, _, head_kv, _ in section})
        rows = [row0 for _, _, row0, _, _ in section]
        assert rows == sorted(rows, reverse=True)
    assert sum(map(len, owners)) == len(set().union(*owners))


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from((1, 2, 3, 4)),
    st.integers(1, 1500),
    st.integers(1, 100_000),
    st.sampled_from((1, 2, 4)),
)
def test_a_section_keeps_groups_together_and_goes_from_the_last_query_block_down(
    batch, nheads_kv, group, seqlen_q, seqlen_k, heads
):
    problem = Problem((seqlen_q,) * batch, (seqlen_k,) * batch, group * nheads_kv, nheads_kv)
    (total, *_), found = query_tiles(problem, 64, heads, True)
    kv_heads = max(L2_SECTION_BYTES // (512 * seqlen_k), 1)  # whose K and V stay in L2
    together = min(kv_heads, nheads_kv * batch)
    sections = -(-nheads_kv * batch // together)  # of equal size
    size = -(-nheads_kv * batch // sections) * -(-group // heads) * -(-seqlen_q // 64)
    sections = [found[start : start + size] for start in range(0, total, size)]
    owners = [{(b, head_kv) for b, _, _, head_kv, _ in section} for section in sections]
    assert sum(map(len, owners)) == len(set().union(*owners)) == batch * nheads_kv
    for section in sections:
        rows = [row0 for _, _, row0, _, _ in section]
        assert rows == sorted(rows, reverse=True)


def of_keys(lengths, heads, splits, together, longest_first, multiprocessors=10_000, **how):
    """Key blocks of 64 of sequences of one query each, with the dQ of ``together`` heads in L2."""
    problem = Problem((1,) * len(lengths), tuple(lengths), heads, heads, **how.pop("packed", {}))
    query_bytes = KEY_SECTION_BYTES // together
    return key_blocks(problem, 64, splits, longest_first, multiprocessors, query_bytes, **how)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    ("splits", "heads", "batch", "together"),
    [(5, 3, 2, 4), (1, 1, 1, 1), (7, 2, 3, 100), (3, 4, 2, 2), (2, 5, 1, 1), (64, 2, 2, 8), (4, 16, 32, 128)],
)
def test_every_key_block_once_and_the_longest_first(splits, heads, batch, together, longest_first):
    given = ((splits * 64,) * batch, heads, splits, together, longest_first)
    found, ordered = of_keys(*given), of_keys(*given, in_order=True)
    assert sorted(found) == list(itertools.product(range(batch), range(heads), range(splits)))
    assert sorted(ordered) == sorted(found)
    for plane in itertools.product(range(batch), range(heads)):
        assert [first for *own, first in ordered if tuple(own) == plane] == [*range(splits)][::-1]
    if longest_first:
        sections = -(-batch * heads // together)
        size = -(-batch * heads // sections) * splits  # sections are of equal size, except the last
        for start in range(0, len(found), size):
            firsts = [first for *_, first in found[start : start + size]]
            assert firsts == sorted(firsts)
    else:
        assert found == sorted(found)


def test_a_few_concurrent_ctas_read_the_same_queries():
    """20 heads in sections of equal size, of at most a quarter of 24 multiprocessors, however small dQ is."""
    found = of_keys((4 * 64,) * 2, 10, 4, 1000, True, multiprocessors=24)
    sections = [found[start : start + 5 * 4] for start in range(0, len(found), 5 * 4)]
    assert [len({x[:2] for x in section}) for section in sections] == [5, 5, 5, 5]
    assert all([x[2] for x in section] == sorted(x[2] for x in section) for section in sections)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=9),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from((1, 2, 8)),
)
def test_every_varlen_key_block_once(lengths, before, behind, heads, together, longest_first, splits):
    """With 8 ``splits`` and one CTA per key block, the grid does not grow with the longest sequence."""
    packed = {"packed": True, "before": before, "behind": behind}
    found = of_keys(lengths, heads, splits, together, longest_first, packed=packed)
    expected = {
        (b, head, first)
        for b, length in enumerate(lengths)
        for head in range(heads)
        for first in range(min(splits, -(-length // 64)))
    }
    real = [x for x in found if x in expected]
    assert len(real) == len(expected) and set(real) == expected
    assert all(x[2] * 64 >= lengths[x[0]] for x in found if x not in expected)
    assert len(found) <= heads * len(lengths) * splits
    if splits == 8:
        assert len(found) <= heads * ((before + sum(lengths) + behind) // 64 + len(lengths))


def query_heads(group, nheads_kv, splits):
    """[(kv head, first query head, end)] of each head of dK and dV."""
    out = torch.full((nheads_kv * splits, 3), -1, dtype=torch.int32)
    sizes = (group * nheads_kv, nheads_kv, nheads_kv * splits)
    run_once(_head_splits, *(torch.empty(1, n, 1) for n in sizes), out)
    return out.tolist()


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 130), st.integers(1, 130), st.integers(1, 9))
def test_every_query_head_once_by_its_kv_head(group, splits, nheads_kv):
    splits = min(splits, group)
    found = query_heads(group, nheads_kv, splits)
    for head_kv in range(nheads_kv):
        own = found[head_kv * splits : (head_kv + 1) * splits]
        assert all(kv == head_kv for kv, _, _ in own)
        heads = [head for _, first, end in own for head in range(first, end)]
        assert heads == [*range(head_kv * group, (head_kv + 1) * group)]
        assert max(sizes := [end - first for _, first, end in own]) - min(sizes) <= 1


# ---- maximum lengths far above the tensors' ----


HUGE = (2**23, 2**30, 2**31 - 1)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seqlen_k", HUGE)
def test_huge_stated_lengths_leave_a_section_one_key_head(seqlen_k, packed, longest_first):
    x, starts = (torch.empty(40, 8, 1), int32(*[0, 7, 7, 40])) if packed else (torch.empty(3, 1, 8, 1), None)
    keys = x[..., :2, :].contiguous()
    given = (x, keys, starts, None), (40, seqlen_k, 512, 64)
    (total, planes, last, sections), found = run(_query_tiles, *given, longest_first, 1)
    assert total == (8 * 3 if packed else 24) and len(found) == total
    if longest_first and not packed:
        assert (planes, last, sections) == (4, 4, 5)
    else:
        assert last == planes == (8 if packed else 24) and sections == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("longest", HUGE)
def test_huge_stated_lengths_leave_a_section_one_column(longest, packed):
    """A column of key blocks has a split for each block of the stated length, as without the deterministic mode."""
    keys, starts = (torch.empty(40, 2, 1), int32(0, 7, 7, 40)) if packed else (torch.empty(3, 1, 2, 1), None)
    sizes = (longest, longest, -(-longest // 128), 132, 512, 128)
    (blocks, columns, last, sections), _ = run(_key_blocks, (keys, starts), sizes, True, False, most=100)
    assert (columns, last, sections) == (1, 1, 1 if packed else 5)
    # A packed grid follows the rows that there are, up to lengths that no call may state.
    assert blocks == (2 * 3 if packed else 6 * sizes[2]) or longest > 2**30


# ---- how even the end is ----

STAGES = 2
"""Blocks that are loaded ahead."""


def makespan(costs, machines, ahead):
    """When the last CTA is done, if each claims its next tile ``ahead`` of the end of the one it works on."""
    waiting = [(0.0, machine, 0.0) for machine in range(machines)]  # when it claims, and when it is done
    for cost in costs:
        _, machine, end = heapq.heappop(waiting)
        heapq.heappush(waiting, (max(end, end + cost - ahead), machine, end + cost))
    return max(end for _, _, end in waiting)


def forward_costs(tiles, seqlen, queries, tile_n):
    """Of query blocks that see the keys up to their own last one."""
    return [1 + -(-min(row0 + queries, seqlen) // tile_n) for _, _, row0, _, _ in tiles]


@pytest.mark.parametrize(
    ("nheads", "seqlen"),
    [
        *((5, 16384), (8, 16384), (10, 8192), (32, 4096), (20, 4096)),
        *((24, 1024), (40, 1024), (128, 512), (132, 512)),
    ],
)
def test_sections_cost_little_under_a_causal_mask(nheads, seqlen):
    """Compared with a single list of all work tiles, longest first, without regard to L2."""
    problem = Problem((seqlen,), (seqlen,), nheads, nheads)
    tiles = query_tiles(problem, 128, longest_first=True)[1]
    splits = seqlen // 128  # a work tile for each key block
    blocks = key_blocks(problem, 128, splits, True, 132)
    of_keys = [1 + (seqlen - first * 128) // 64 for *_, first in blocks]
    for costs, ahead in (
        (forward_costs(tiles, seqlen, 128, 128), CLAIM_AHEAD + STAGES),
        (of_keys, STAGES),
    ):
        time, least = (makespan(x, 132, ahead) for x in (costs, sorted(costs, reverse=True)))
        assert time <= 1.1 * least, f"{time} where {least} were possible"


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(
    ("batch", "nheads", "seqlen"),
    [
        *((4, 16, 2048), (1, 16, 8192), (2, 16, 4096), (3, 40, 1024), (1, 24, 3000), (2, 8, 16384)),
        *((1, 40, 2048), (2, 16, 6000), (1, 16, 4096)),
    ],
)
def test_a_grid_of_sections_costs_little_under_a_causal_mask(batch, nheads, seqlen, group):
    """Two CTAs per multiprocessor of an H200, rows of K and V in two fp16 terms of 128; compared with the best list."""
    problem = Problem((seqlen,) * batch, (seqlen,) * batch, nheads, nheads // group)
    fewest = 132 * TILES_OF_A_SECTION
    grids = query_grid(problem, 128), query_grid(problem, 128, True, 1024, fewest=fewest)
    plain, sections = (forward_costs(tiles, seqlen, 128, 32) for _, tiles in grids)
    time, before, least = (makespan(x, 264, 0) for x in (sections, plain, sorted(plain, reverse=True)))
    assert time <= 1.05 * least and time <= before, f"{time} where {least} were possible"
    assert before > 1.1 * least, "the plain order would do"
