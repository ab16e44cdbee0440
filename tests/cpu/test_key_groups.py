"""Groups of warps that divide the keys of a step: the merge of their results, through memory, on the CPU."""

import math

import cutlass
import pytest
import torch
from cutlass import Float16, Float32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.compiler import registry
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm80.storage import GroupResults
from cute_attn.tiles import ForwardSm80Tile
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import Traits

ROWS, DIM, THREADS = 16, 32, 32


def results_of(tiled_mma, modes, place, out, stats, group, scale_log2):
    """A thread's O and statistics of a group; place: its first row and column."""
    acc = cute.make_rmem_tensor(tiled_mma.get_slice(0).partition_shape_C((ROWS, DIM)), Float32)
    view, softmax = layouts.row_col_view(acc, modes), OnlineSoftmax.make(len(modes.rows), scale_log2, False)
    for r, row in enumerate(modes.rows):
        softmax.row_max[r], softmax.row_sum[r] = (stats[group, place[0] + row, i] for i in range(2))
        for c, col in enumerate(modes.cols):
            view[r, c] = out[group, place[0] + row, place[1] + col]
    return acc, softmax


def write(modes, place, out, stats, acc, softmax):
    view = layouts.row_col_view(acc, modes)
    for r, row in enumerate(modes.rows):
        stats[2, place[0] + row, 0], stats[2, place[0] + row, 1] = softmax.row_max[r], softmax.row_sum[r]
        for c, col in enumerate(modes.cols):
            out[2, place[0] + row, place[1] + col] = view[r, c]


@cute.jit
def merge(out: cute.Tensor, stats: cute.Tensor, memory: cute.Tensor, scale_log2: Float32):
    """For every thread of a warp: store group 1's results to memory, and merge them into group 0's.

    out: (3, ROWS, DIM), stats: (3, ROWS, 2): two groups' and the results.
    """
    tiled_mma = layouts.tiled_mma_sm80(Float16, 1)
    modes = layouts.row_col_modes(tiled_mma, ROWS, DIM)
    for thread in cutlass.range(THREADS):
        place = layouts.thread_row_col(tiled_mma, ROWS, DIM, thread)
        acc, softmax = results_of(tiled_mma, modes, place, out, stats, 1, scale_log2)
        kept = GroupResults.make(memory.iterator, cute.size(acc), len(modes.rows), thread, THREADS)
        kept.store(softmax, acc)
    for thread in cutlass.range(THREADS):
        place = layouts.thread_row_col(tiled_mma, ROWS, DIM, thread)
        acc, softmax = results_of(tiled_mma, modes, place, out, stats, 0, scale_log2)
        kept = GroupResults.make(memory.iterator, cute.size(acc), len(modes.rows), thread, THREADS)
        kept.merge_into(softmax, acc, layouts.row_col_view(acc, modes))
        write(modes, place, out, stats, acc, softmax)


def test_groups_have_the_results_of_all_keys():
    """Rows whose keys are all in one group, or in none, too: maxima of -inf."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(3, ROWS, DIM, generator=generator)
    stats = torch.stack(
        (torch.randn(3, ROWS, generator=generator), torch.rand(3, ROWS, generator=generator)), -1
    )
    for groups, rows in (((0,), 3), ((1,), 5), ((0, 1), 8)):
        for group in groups:
            out[group, rows], stats[group, rows, 0], stats[group, rows, 1] = 0.0, -math.inf, 0.0
    memory = torch.full((THREADS * (ROWS * DIM // THREADS + 4),), math.nan)
    scale = 1.7
    shift = stats[:2, :, 0].amax(0)
    weights = torch.exp2((stats[:2, :, 0] - shift.clamp(min=-1e30)) * scale)
    expected = (out[:2] * weights.unsqueeze(-1)).sum(0), shift, (stats[:2, :, 1] * weights).sum(0)
    merge(*(from_dlpack(x, assumed_align=16) for x in (out, stats, memory)), scale)
    found = out[2], stats[2, :, 0], stats[2, :, 1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups, warps, rows", [(4, 1, 16), (2, 2, 32), (2, 4, 64)])
@pytest.mark.parametrize("name", ["d128", "d64x256", "d40", "d256"])
def test_results_have_memory_beside_the_queries(groups, warps, rows, name):
    traits = Traits.parse(f"forward-sm80-bf16-{name}")
    tile = ForwardSm80Tile(rows, 64, warps, key_groups=groups)
    areas = tile.smem_areas(traits)
    threads = 32 * warps
    values = rows * -(-traits.head_dim_v // 32) * 32 // threads + 2 * rows // warps // 8
    begin, end = areas["merge"]
    assert begin == areas["q"][1] and end - begin == 4 * values * threads * (groups - 1)
    assert end <= areas["stats"][0] and tile.smem_bytes(traits) >= end


# ---- tiles by calls ----


@pytest.mark.parametrize(
    "seqlen_q, group, rows, heads, groups",
    [
        *((1, 1, 16, 1, 4), (1, 8, 16, 8, 4), (4, 4, 16, 4, 4)),
        *((1, 5, 16, 8, 4), (8, 4, 32, 4, 2), (16, 4, 64, 4, 1)),
    ],
)
def test_few_rows_have_warps_along_the_keys(seqlen_q, group, rows, heads, groups):
    kernel = registry.lookup(Traits.parse("kvcache-sm80-bf16-d128-seqused_k-split_fixed"), None, "sm90")
    tile = kernel.for_cache(CacheCall(seqlen_q, 4096, group), "sm90").tile
    assert (tile.tile_m, tile.pack_heads, tile.key_groups, tile.blocks_per_sm) == (rows, heads, groups, 2)
    in_flight = (tile.num_stages - 1) * tile.tile_n * 512 * tile.blocks_per_sm
    assert in_flight >= 96 << 10, "too few bytes in flight a multiprocessor"
