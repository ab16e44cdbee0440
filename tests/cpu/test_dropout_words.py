"""Masks that one warp draws for others, run on the CPU for every lane and every thread, against the reference's."""

import cutlass
import pytest
import torch
from cutlass import BFloat16, Constexpr, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn import reference
from cute_attn.device.score_tile import ScoreContext, ScoreMap
from cute_attn.epilogues.dropout import Dropout
from cute_attn.epilogues.dropout_words import UNIT_KEYS, generate_words
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference.emulate import all_coords
from cute_attn.traits import Traits

NHEADS, PLACE = 3, (1, 2)  # batch and head


@cute.jit
def draw(
    args: tuple,
    lengths: Constexpr,
    corner: Constexpr,
    shape: Constexpr,
    halves: cute.Tensor,
    mask: cute.Tensor,
):
    """mask (tile_m, tile_n): 0 where a thread finds its element dropped, and 1 elsewhere."""
    (tile_m, tile_n), dropout = shape, Dropout("flash")
    zero, one = Int32(0), Float32(1.0)
    sizes = [Int32(n) for n in lengths]
    context = ScoreContext(
        Int32(PLACE[0]), Int32(PLACE[1]), Int32(NHEADS), *sizes, *sizes, zero, one, one, one
    )
    state = dropout.begin(args, context)
    for lane in cutlass.range(32):
        for unit in cutlass.range(tile_n // UNIT_KEYS):
            generate_words(state, halves, Int32(corner[0]), Int32(corner[1]), unit, tile_m, lane)
    words = cute.recast_tensor(halves, Int32)
    tiled_mma = layouts.tiled_mma_sm90(BFloat16, tile_n, tile_m, warpgroups=tile_n // 64)
    fragment = tiled_mma.get_slice(0).partition_shape_C((tile_n, tile_m))
    for thread in cutlass.range(tile_n * 2):
        score_map = ScoreMap.make(tiled_mma, tile_m, tile_n, thread, transposed=True)
        acc = cute.make_rmem_tensor(fragment, Float32)
        acc.fill(1.0)
        tile = score_map.tile(acc, Int32(0), Int32(0))
        dropout.zero_dropped(tuple(words[0, thread, w] for w in range(cute.size(words, mode=[2]))), tile.acc)
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                mask[tile.row0 + tile.rows[r], tile.col0 + tile.cols[c]] = tile.acc[r, c]


@pytest.mark.parametrize(
    "offset, dropout_p, tile_m, tile_n",
    [
        *((8, 0.3, *tile) for tile in ((48, 128), (80, 64), (16, 192))),
        *((*draw, 64, 128) for draw in ((2**33 - 4, 0.7), (0, 1 - 127.5 / 255))),
    ],
)
def test_words_are_the_masks_pytorch_draws(offset, dropout_p, tile_m, tile_n):
    seqlen_q, seqlen_k, corner = 640, 999, (3 * tile_m, tile_n)
    state = torch.tensor([2**40 + 7, offset])
    halves = torch.full((2, tile_n * 2, -(-tile_m // 64)), -1, dtype=torch.int16)
    # Colexicographic, as the kernel has it: both halves of a word side by side.
    halves = halves.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    mask = torch.full((tile_m, tile_n), torch.nan)
    given = ScoreInputs(dropout_p=dropout_p, rng_state=state)
    _, threshold, scale = Dropout("flash").host_args(given)
    args = (from_dlpack(state, assumed_align=8), Int32(threshold), Float32(scale))
    tensors = (from_dlpack(halves), from_dlpack(mask))
    build = cute.compile[cute.GPUArch("sm_90a")]
    build(draw, args, (seqlen_q, seqlen_k), corner, (tile_m, tile_n), *tensors)(args, *tensors)
    coords = all_coords(Traits.parse("backward-sm90-bf16-d64-dropout"), (2, NHEADS, seqlen_q, seqlen_k))
    keep = reference.DROPOUT_KEEP["flash"](coords, dropout_p, state)[PLACE]
    expected = keep[corner[0] : corner[0] + tile_m, corner[1] : corner[1] + tile_n]
    assert torch.equal(mask == 1, expected) and ((mask == 0) | (mask == 1)).all()
