"""Traits and tiles: texts that parse back, refusals in one sentence, and resources of built kernels."""

import itertools
from dataclasses import replace

import pytest
import torch
from cutlass import Float16, cute
from hypothesis import assume, example, given
from hypothesis import strategies as st

import layouts
from cute_attn.compiler import compile, registry
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.host.call import Call
from cute_attn.host.choose import choose_kernel
from cute_attn.kernels.backward_sm90.kernel import BackwardSm90
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.kernels.forward_sm90 import lengths as forward_lengths
from cute_attn.tiles import (
    SHARED_MEMORY_BYTES,
    TARGETS,
    ForwardSm80Tile,
    ForwardSm90Tile,
    padded,
)
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import BIAS_DTYPES, DROPOUTS, MASKS, Traits
from layouts import model
from tests import refusals
from tests.cpu.test_examples import load
from tests.cpu.test_traits import forwards

D64 = Traits("forward", "sm80", "bf16", 64)

flags = st.booleans()
tiles = st.builds(
    ForwardSm80Tile,
    tile_m=st.sampled_from((16, 32, 64, 128)),
    tile_n=st.sampled_from((16, 32, 48, 64, 96, 128)),
    num_warps=st.sampled_from((1, 2, 4, 8)),
    num_stages=st.integers(1, 4),
    q_in_regs=flags,
    swizzle_bits=st.integers(-1, 3),
    qk_unroll=st.integers(0, 4),
)


@given(tiles)
def test_a_tiles_text_parses_back(tile):
    assert ForwardSm80Tile(16, 16, q_in_regs=True).override(tile.text) == tile
    assert str(ForwardSm80Tile(64, 96, num_stages=2)) == "tile_m=64,tile_n=96,num_stages=2"
    assert tile.override("") == tile


@refusals.each("""
kvcache-sm90-bf16-d64 share_qo_smem=true -> tile has 'share_qo_smem=true'; accepted: FIELD=VALUE with a
kvcache-sm90-bf16-d64 bias_stages=1 -> tile has 'bias_stages=1'; accepted: FIELD=VALUE with a field of
forward-sm90-bf16-d512 rescale_threshold=0 -> tile has 'rescale_threshold=0'; accepted: FIELD=VALUE with
forward-sm80-bf16-d64 tile_k=3 -> tile has 'tile_k=3' (did you mean 'tile_n'?); accepted: FIELD=VALUE
forward-sm80-bf16-d64 tile_n -> tile has 'tile_n'; accepted
forward-sm80-bf16-d64 tile_n=wide -> tile field tile_n is 'wide'; accepted: a whole number
forward-sm80-bf16-d64 tile_n=64,tile_n=96 -> tile has tile_n twice; accepted: each field once
forward-sm80-bf16-d64 q_in_regs=1 -> tile field q_in_regs is '1'; accepted: true or false
""")
def test_a_wrong_text_is_refused(call, sentence):
    """A field that the kernel does not vary is refused too, since its tile lacks it."""
    name, text = call.split()
    refusals.check(
        "tile.override(text)", f"ValueError: {sentence}", {"tile": registry.lookup(name).tile, "text": text}
    )


def test_a_partial_text_overrides():
    tile = ForwardSm80Tile(64, 32).override(" tile_n = 96, q_in_regs=true,swizzle_bits= -1 ")
    assert tile == ForwardSm80Tile(64, 96, q_in_regs=True)


REFUSED = """
forward-sm80-bf16-d64 num_warps=0 -> num_warps is 0; accepted: 1, 2, 4, 8, 16
forward-sm80-bf16-d64 num_warps=32 -> num_warps is 32; accepted: 1, 2, 4, 8, 16
forward-sm80-bf16-d64 num_warps=3,tile_m=48 -> num_warps is 3; accepted: 1, 2, 4, 8, 16
forward-sm80-bf16-d64 tile_m=96,num_warps=4 -> tile_m is 96; accepted: multiples of 16 rows for each of 4
forward-sm80-bf16-d64 tile_m=0 -> tile_m is 0; accepted
forward-sm80-bf16-d64 tile_n=40 -> tile_n is 40; accepted: multiples of 16
forward-sm80-bf16-d64 tile_n=-16 -> tile_n is -16; accepted
forward-sm80-bf16-d96 tile_m=128,tile_n=16,num_warps=4 -> tile_n is 16; accepted: multi
forward-sm80-bf16-d64 num_stages=0 -> num_stages is 0; accepted: 1 or more
forward-sm80-bf16-d64 qk_unroll=-1 -> qk_unroll is -1; accepted: 0 for all steps
forward-sm80-bf16-d64 swizzle_bits=4 -> swizzle_bits is 4; accepted: 0 to 3, or -1
forward-sm80-bf16-d96x64 swizzle_bits=3 -> swizzle_bits is 3; accepted: at most 2
forward-sm80-bf16-d128 tile_m=128,tile_n=64,num_stages=3 sm89 -> needs 135168 bytes of shared memory ... sm89 has 101376
forward-sm80-bf16-d128 tile_m=128,tile_n=128,num_warps=4 sm90 -> needs about 304 registers per thread ... there are 255
forward-sm80-bf16-d128 tile_m=128,tile_n=64,num_warps=4,q_in_regs=true sm90 -> registers per thread
forward-sm80-bf16-d96 tile_m=96,tile_n=32,num_warps=2,pack_heads=64 -> pack_heads is 64; accepted: 1, 2, 4, 8, 16 or 32
forward-sm90-bf16-d128 pack_heads=0 -> pack_heads is 0; accepted: 1, 2, 4, 8, 16, 32 or 64
forward-sm90-bf16-d128 pack_heads=3 -> pack_heads is 3; accepted: 1, 2, 4
forward-sm90-bf16-d128-bias_bf16 tile_m=64,tile_n=64,pack_heads=8
    -> pack_heads is 8; accepted: 1 with a bias, dropout or users'
forward-sm90-bf16-d128-dropout tile_m=64,tile_n=64,pack_heads=8
    -> pack_heads is 8; accepted: 1 with a bias, dropout or users'
forward-sm90-bf16-d128-relative_position tile_m=64,tile_n=64,pack_heads=8
    -> pack_heads is 8; accepted: 1 with a bias, dropout or users'
forward-sm90-bf16-d128 tile_m=96 -> tile_m is 96; accepted: 64, 128, 192 or 256
forward-sm90-bf16-d128 blocks_per_sm=2 -> blocks_per_sm is 2; accepted: 1, and up to 3
forward-sm90-bf16-d32 tile_m=64,tile_n=16,num_stages=15
    -> num_stages is 15; accepted: stages whose barriers fit 480 bytes
forward-sm90-bf16-d512 tile_n=40 -> tile_n is 40; accepted: multiples of 16 up to 256
forward-sm90-bf16-d512 num_stages=9 -> num_stages is 9; accepted: 1 to 8
forward-sm90-bf16-d512 pack_heads=128 -> pack_heads is 128; accepted: 1, 2, 4
forward-sm90-bf16-d512 num_stages=2 -> needs 345600 bytes of shared memory
forward-sm90-bf16-d64-bias_bf16 bias_stages=-1 -> bias_stages is -1; accepted: 0, or more with a bias of 16 bits
forward-sm90-bf16-d64-bias_fp32 bias_stages=2 -> bias_stages is 2; accepted: 0, or more with a bias of 16 bits
forward-sm90-bf16-d64 tile_n=96,bias_stages=2 -> bias_stages is 2; accepted
forward-sm90-bf16-d64-bias_bf16 tile_m=192,tile_n=96,bias_stages=5 -> need ... bytes of shared memory
forward-sm90-bf16-d32-bias_bf16 tile_m=64,tile_n=16,num_stages=16
    -> num_stages is 16; accepted: stages whose barriers fit
backward-sm90-bf16-d64-bias_bf16 bias_stages=1 -> bias_stages is 1; accepted: 0, or num_stages_q, which is 2
backward-sm90-bf16-d64-bias_fp32 bias_stages=2 -> bias_stages is 2; accepted: 0, or with a bias of 16 bits
backward-sm90-bf16-d64-bias_bf16 tile_m=64,tile_n=64,p_in_smem=true,bias_stages=2
    -> bias_stages is 2; accepted: 0, or with ... p_in_smem=false
backward-sm90-bf16-d64 tile_n=192 -> tile_n is 192
backward-sm90-bf16-d64 tile_m=96 -> tile_m is 96
backward-sm90-bf16-d64 dq_transposed=true -> dq_transposed is true
backward-sm90-bf16-d64 num_stages_ds=3 -> num_stages_ds is 3; accepted: 1 or 2
backward-sm90-bf16-d64 num_stages_ds=1 -> num_stages_ds is 1
backward-sm90-bf16-d320 dq_bulk=true -> dq_bulk is true; accepted: without scores_ahead
backward-sm90-bf16-d64 mask_warps=1 -> mask_warps is 1
backward-sm90-bf16-d64-dropout mask_warps=4 -> mask_warps is 4
backward-sm90-bf16-d64-dropout dq_bulk=true
    -> mask_warps is 3; accepted: 0, or with flash's dropout and p_in_smem=false up to 1
backward-sm90-bf16-d64-dropout_mem_efficient mask_warps=1 -> mask_warps is 1
backward-sm90-bf16-d256-dropout mask_warps=1 -> mask_warps is 1
backward-sm90-bf16-d128 tile_m=128 -> registers
backward-sm90-bf16-d256 num_stages_q=3 -> shared memory
backward-sm90-bf16-d224 cluster=2 -> cluster is 2; accepted: 1, or with padded head dims in multiples of 64
backward-sm90-bf16-d256 cluster=2 -> cluster is 2; accepted: with scores_ahead
backward-sm90-bf16-d256 scores_ahead=true,num_stages_q=1 -> scores_ahead is true
backward-sm90-bf16-d64 scores_ahead=true -> scores_ahead is true
backward-sm90-bf16-d256 p_in_smem=false,tile_n=128 -> registers
backward_preprocess-sm80-bf16-d64 tile_m=128,rows=64,num_threads=48
    -> num_threads is 48; accepted: multiples of 32 up to 1024
backward_preprocess-sm80-bf16-d64 tile_m=40,rows=8,num_threads=64 -> tile_m is 40; accepted: multiples of 16
backward_preprocess-sm80-bf16-d64 tile_m=128,rows=48,num_threads=64 -> rows is 48; accepted: divisors of tile_m, 128
backward_preprocess-sm80-bf16-d64 tile_m=128,rows=2,num_threads=64 -> rows is 2; accepted: divisors of tile_m
backward_preprocess-sm80-bf16-d64 tile_m=128,rows=128,num_threads=64 -> rows is 128; accepted: ... at most 64
append-sm80-bf16-d64-causal -> it uses no score features; accepted: append-sm80-bf16-d64
append-sm80-bf16-d64-varlen -> varlen is of the queries; accepted: with rotate_q
append-sm80-bf16-d64 num_threads=48 -> num_threads is 48; accepted: multiples of 32 up to 1024
backward_preprocess-sm80-bf16-d64-causal -> uses no score features; accepted: backward_preprocess-sm80-bf16-d64
backward_convert-sm80-bf16-d64-causal -> uses no score features; accepted: backward_convert-sm80-bf16-d64
forward_pad-sm80-bf16-d123x57-causal -> no score features
forward_unpad-sm80-bf16-d123x57-varlen-bias_bf16 -> no score features
backward_pad-sm80-bf16-d123x57-varlen-seqused_k -> no score features
backward_unpad-sm80-bf16-d123x57-causal -> no score features
block_kinds-sm80-bf16-d64 -> accepted: block_kinds-sm80-bf16-d128
block_kinds-sm80-bf16-d128 tile_m=48 -> multiples of 32 up to 512
block_kinds-sm80-bf16-d128 rows=3 -> divisors of tile_m, 128
block_lists-sm80-bf16-d128-causal -> accepted: block_lists-sm80-bf16-d128
forward-sm80:fallback-bf16-d64 sm90 -> it computes fp32, not bf16
forward-sm80:terms-fp32-d64 key_groups=2 sm90 -> accepted for fp32 in terms
forward-sm80:terms-fp32-d64 qk_unroll=4 sm90 -> accepted: 1 or 2 steps
forward-sm90-bf16-d512x520 -> head_dim_v is 520; accepted: up to 512
jvp-sm80-fp32-d64 -> dtype is fp32; accepted: fp16, bf16
jvp-sm80-bf16-d256 -> head_dim_v is 256; accepted: up to 128
jvp-sm80-bf16-d64 pack_heads=2 -> accepted with tangents: tile_m=64
jvp-sm90-fp32-d64 -> dtype is fp32; accepted: fp16, bf16
jvp-sm90-bf16-d192x128 -> head_dim is 192; accepted: multiples of 8 up to 128
kvcache-sm90-bf16-d576x64-latent -> head_dim_v is 64 with latent
kvcache-sm90-bf16-d576x136-latent -> head_dim_v is 136 with latent
"""
"""A kernel, changes of its default tile or the target if any, and the reason why it is declined."""
load("custom_epilogue")


@refusals.each(REFUSED)
def test_a_kernel_or_tile_that_cannot_work_is_refused_in_one_sentence(call, sentence):
    name, *more = call.split()
    given = {"traits": Traits.parse(name), "tile": next((x for x in more if "=" in x), None)}
    given["target"] = next((x for x in more if "=" not in x), given["traits"].arch)
    names = {"lookup": registry.lookup} | given
    refusals.check("lookup(traits, tile, target)", f"Unsupported: {sentence}", names)


@pytest.mark.parametrize("target", TARGETS)
@given(value=forwards)
@example(value=Traits("forward", "sm80", "fp32", 8, 104, mask="window", alibi=True))
def test_a_default_tile_fits(target, value):
    value = replace(value, arch="sm80", variant="", epilogues=())
    assume(ForwardSm80.supports(value) is None)
    tile = ForwardSm80.default_tile(value, target)
    assert tile.reject(value, target) is None
    assert tile.smem_bytes(value) <= SHARED_MEMORY_BYTES[target]


@given(tiles, forwards)
def test_shared_memory_does_not_overlap(tile, value):
    areas = tile.smem_areas(value)
    assert all(start % 1024 == 0 for start, _ in areas.values())
    inputs = [areas[name] for name in ("q", "k", "v")]
    for first, second in itertools.combinations([*inputs, areas["stats"]], 2):
        assert first[1] <= second[0] or second[1] <= first[0]
    assert areas["o"][1] <= areas["stats"][0]  # the statistics are read after O has been written
    assert areas["q"][1] <= areas["v"][0]  # V's first loads may start before Q has been read
    assert tile.smem_bytes(value) == max(end for _, end in areas.values())


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("rows, stages", [(64, 1), (48, 3)])
def test_areas_are_the_layouts_sizes(head_dim, rows, stages):
    size = model.trace(lambda: cute.cosize(layouts.smem_layout(rows, head_dim, Float16, stages=stages)))
    tile = ForwardSm80Tile(16, rows, 1, stages)
    start, end = tile.smem_areas(replace(D64, head_dim=head_dim, head_dim_v=head_dim))["k"]
    assert end - start == 2 * size


SMALL = Traits("forward", "sm80", "fp16", 64)
# Every field, in kernels that compile quickly.
BUILT = {
    "q-in-regs": (SMALL, "q_in_regs=true,num_stages=4,swizzle_bits=0"),
    "stats": (replace(SMALL, mask="causal"), "qk_unroll=2,tile_n=16,swizzle_bits=1"),
    "output-larger": (replace(SMALL, head_dim=24, head_dim_v=80), "tile_m=64,tile_n=32,num_warps=4"),
    "value-smaller": (replace(SMALL, head_dim=160, head_dim_v=40), "tile_m=64,tile_n=32,num_warps=4"),
}


@pytest.mark.parametrize("case", BUILT)
def test_a_built_kernel_has_its_tiles_resources(case):
    value, text = BUILT[case]
    tile = ForwardSm80Tile(tile_m=32, tile_n=32, num_warps=2).override(text)
    compiled = compile(value, tile, target="sm86")
    assert compiled.tile == tile
    assert compiled.resources.shared_memory_bytes == tile.smem_bytes(value)


def test_warps_of_an_fp32_cache_divide_rows_alone():
    tile = ForwardSm80Tile(32, 64, 4, num_stages=1, qk_unroll=1, warps_n=2)
    assert tile.reject(Traits("forward", "sm80", "fp32", 128), "sm90") is None
    reason = tile.reject(Traits("kvcache", "sm80", "fp32", 128, seqused_k=True), "sm90")
    assert reason.startswith("warps_n is 2; accepted: 1 for kvcache-sm80-fp32-d128")


def test_padding_of_head_dims():
    assert [padded(d) for d in (8, 32, 40, 96, 104, 256)] == [32, 32, 64, 96, 128, 256]


# ---- tiles by lengths and by work ----

CHOSEN = """
# Rows of a work tile follow the work.
forward d64 512 50176 pairs=32 -> tile_m=64,tile_n=128
forward d64-causal 2048 2048 pairs=8 -> tile_m=64
forward d64-causal-varlen 2440 2440 pairs=26 -> tile_m=64
forward d64-causal-varlen 8192 8192 pairs=26 -> tile_m=192
forward d128-causal 1024 1024 pairs=64 -> tile_m=128
forward d256 1024 1024 pairs=8 -> tile_m=64
forward d72 1024 1024 pairs=256 -> tile_m=256
forward d64 749 749 pairs=256 -> tile_m=256
forward d64-causal 4096 4096 pairs=128 -> tile_m=256
forward d64-causal 4096 4096 group=4,8 pairs=64 -> tile_m=256
forward d32-bias_bf16 32 128 pairs=16384 -> tile_m=64
forward d128-bias_bf16 65 4096 pairs=8 -> tile_m=64
forward d128-bias_bf16 65 4096 pairs=80 -> tile_m=128
forward d64-bias_bf16 64 4096 pairs=800 -> tile_m=64
# A backward has 64 rows where 128 would be empty.
backward d64 1,64,129,257,400 4096 -> tile_m=64
backward d64 65,128,577 4096 -> tile_m=128
# A backward of few keys or a short window.
backward d64 4096 77 -> tile_m=128,tile_n=80
backward d64 4096 154 -> tile_m=64,tile_n=160
backward d48 1024 129 -> tile_m=64,tile_n=160
backward d64 1023 77 -> tile_m=128,tile_n=128
backward d64 4096 100,161 -> tile_m=128,tile_n=128
backward d64-causal,d64-dropout 4096 77 -> tile_m=128,tile_n=128
# No rows of 64 numbers.
backward d32 4096 77,4096 -> tile_m=128,tile_n=128
backward d64-window 8192 8192 window=450 -> tile_m=64,tile_n=128
backward d64-window 8192 8192 window=451 -> tile_m=128,tile_n=128
# No tile for few keys, but one for few queries.
backward d64-causal 3 131 -> tile_m=64,tile_n=128
# Keys of a step waste few.
forward d192 4096 64,65 -> tile_n=64
forward d80 4096 257 -> tile_n=96
forward d80-causal 4096 257 -> tile_n=128
forward d80-dropout 4096 270 -> tile_n=96
# Windows begin anywhere.
forward d128-window 68 5507 window=65 -> tile_n=64
forward d128-window 68 5507 window=3000 -> tile_n=128
# Small tiles where a query sees few keys, on average or of a window.
forward d64 16384 512 -> tile_m=64,tile_n=64,pack_heads=1
forward d64 16384 16384 -> tile_m=192,tile_n=128,pack_heads=1
forward d64-causal 2048 2048 -> tile_m=64,tile_n=64,pack_heads=1
forward d64-causal 8192 8192 -> tile_m=192,tile_n=128,pack_heads=1
forward d64-window 16384 16384 window=2048 -> tile_m=64,tile_n=64,pack_heads=1
forward d64-window 512 512 window=4096 -> tile_m=64,tile_n=64,pack_heads=1
forward d256-window 8192 8192 window=128 -> tile_m=128,tile_n=64,pack_heads=1
# A tile holds the heads of a key head under a mask.
forward d64-causal 8192 8192 group=1,5 -> pack_heads=1
forward d64-causal 8192 8192 group=2,6 -> pack_heads=2
forward d64-causal 8192 8192 group=16 -> pack_heads=16
forward d256-causal 8192 8192 group=2,6 -> pack_heads=2
forward d256-causal,d256-varlen,d128-varlen 8192 8192 group=8 -> pack_heads=8
forward d256,d128-causal 8192 8192 group=8 -> pack_heads=1
# An odd group is packed where its work tiles then see fewer keys.
forward d256-window 123 13754 group=15 window=66 -> pack_heads=16
forward d256-window 123 13754 group=15 window=4096 -> pack_heads=1
# Few queries are packed.
forward d128 8 4096 group=8 -> tile_m=64,pack_heads=8
forward d128 9 4096 group=8 -> tile_m=128,pack_heads=8
forward d128 1 4096 group=128 -> tile_m=64,pack_heads=64
forward d128 1 4096 group=6 -> tile_m=64,pack_heads=8
forward d128 29 4096 group=9 -> tile_m=128,pack_heads=4
forward d128 384 4096 group=8 -> tile_m=128,pack_heads=1
forward d128 3 4096 group=1 -> tile_m=64,pack_heads=1
forward d128-bias_bf16,d128-dropout,d128-dropout_mem_efficient 1 4096 group=8 -> pack_heads=1
"""
"""Hopper kernels of bf16 with one or more features, queries, keys and other sizes, and fields of the tile."""


@pytest.mark.parametrize("row", [row for row in CHOSEN.strip().splitlines() if row[0] != "#"])
def test_a_tile_is_chosen_by_lengths_and_work(row):
    call, _, fields = row.partition(" -> ")
    op, features, seqlen_q, seqlen_k, *more = call.split()
    options = dict(option.split("=") for option in more)
    given = (
        seqlen_q,
        seqlen_k,
        options.get("group", "1"),
        options.get("pairs", "0"),
        options.get("window", "0"),
    )
    for own, *sizes in itertools.product(*(text.split(",") for text in (features, *given))):
        kernel = registry.lookup(Traits.parse(f"{op}-sm90-bf16-{own}"))
        queries, keys, group, pairs, window = map(int, sizes)
        tile = kernel.for_lengths(queries, keys, group, "sm90", pairs or None, window).tile
        assert tile.override(fields) == tile, f"{own} {sizes}: {tile}"


def test_functions_of_scores_speculate():
    """Bounded functions have equally large scores for far and near keys. Others may grow with the distance."""

    def tile(dim, score_mod, lengths=8192):
        name = epilogue_of(score_mod, None)[0]
        kernel = registry.lookup(Traits("forward", "sm90", "bf16", dim, epilogues=(name,)))
        found = kernel.for_lengths(lengths, lengths, 1).tile
        return found.tile_m, found.tile_n, found.speculative

    def capped(score, b, h, q, k):
        return 20 * torch.tanh(score / 20)

    def distant(score, b, h, q, k):
        return score - (q - k).abs() / 64

    assert tile(64, capped) == (64, 64, True)
    assert not tile(64, distant)[2] and tile(128, distant) == (128, 128, False)


def test_bounds_and_a_list_of_blocks_leave_64_keys(monkeypatch):
    """With more keys, registers do not suffice."""
    monkeypatch.setattr(forward_lengths, "lists_blocks", lambda epilogues: True)
    monkeypatch.setattr(forward_lengths, "_candidates", forward_lengths._candidates.__wrapped__)

    def keys(features, dim, lengths):
        kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-d{dim}{features}"))
        return kernel.for_lengths(lengths, lengths, 1).tile.tile_n

    for dim, lengths in itertools.product((64, 128), (512, 4096)):
        assert keys("-causal", dim, lengths) == keys("-window", dim, lengths) == 64
        assert keys("", dim, 4096) == 128


@pytest.mark.parametrize(
    "parent, op, change",
    [(ForwardSm90, "forward", "num_stages=4"), (BackwardSm90, "backward", "num_stages_q=1")],
)
def test_a_variant_keeps_its_own_default_tile(parent, op, change):
    traits = Traits(op, "sm90", "bf16", 64)
    own = registry.lookup(traits).tile.override(change)
    kernel = type("Own", (parent,), {"default_tile": classmethod(lambda cls, traits, target: own)})
    made = kernel(traits, own)
    assert made.for_lengths(32, 32, 1, "sm90", 1).tile == own


def test_a_tile_counts_its_queries():
    sizes = ("tile_m=64,pack_heads=8", "tile_m=192,pack_heads=4")
    assert [ForwardSm90Tile().override(text).queries for text in sizes] == [8, 48]


@pytest.mark.parametrize(
    ("nheads", "nheads_kv", "tile", "heads"),
    [(16, 2, "", 8), (12, 2, "", 8), (6, 6, "", 1), (12, 2, "pack_heads=2", 2)],
)
def test_a_call_is_packed_by_its_heads(nheads, nheads_kv, tile, heads):
    q, k = (torch.empty(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((3, nheads), (300, nheads_kv)))
    call = Call(q, k, k, max_seqlen_q=3, max_seqlen_k=300, kernel="sm90", tile=tile)
    assert choose_kernel(call, "sm90").tile.pack_heads == heads


NARROW, WIDE = range(32, 257, 32), (*range(32, 577, 96), 512, 576)
HOPPERS = (8, 32, 40, 64, 72, 96, 104, 128, 136, 160, 192, 224, 256)
EVERY_PAIR = {
    "backward-sm80-bf16": (
        [*itertools.product(NARROW, NARROW)],
        ("", "-dropout", "-softcap-bias_fp32-dropout"),
    ),
    "backward-sm80-fp16": ([*itertools.product(WIDE, WIDE)], ("",)),
    "backward-sm80-fp32": ([*itertools.product(WIDE, WIDE)], ("",)),
    "backward-sm90-bf16": (
        [
            *itertools.product(HOPPERS, HOPPERS),
            *((d, dv) for d in (264, 320, 512, 576) for dv in (64, 256, 320, 384, 512)),
            *((d, dv) for d in (64, 256) for dv in (320, 384, 512)),
        ],
        (
            *("", "-causal", "-window", "-softcap"),
            *("-bias_fp32", "-causal-dropout", "-dropout_mem_efficient", "-varlen"),
        ),
    ),
    "forward-sm90-bf16": (
        [(d, dv) for d in range(8, 257, 8) for dv in (8, d, 256)],
        ("", "-causal-softcap-alibi-varlen-seqused_k"),
    ),
    "forward-sm80-bf16": (
        [(d, dv) for d in (8, 40, 64, 96, 128, 136, 192, 224, 256) for dv in (d, 64, 256)],
        ("", "-causal-softcap-alibi"),
    ),
    "kvcache-sm80-bf16": (
        [(d, dv) for d in (8, 40, 64, 96, 128, 136, 192, 224, 256) for dv in (d, 64, 256)],
        ("-seqused_k-paged", "-causal-softcap-alibi-seqused_k-paged", "-seqused_k-paged-tree"),
    ),
}
"""Kernels -> pairs of head dims, and features."""


def tiles_of_calls(kernel, target):
    """Tiles for few queries of one or several heads; a split of a cache's keys consists of whole key blocks."""
    for seqlen_q, group in ((1, 1), (1, 8), (7, 5), (64, 4), (64, 8), (500, 2)):
        if kernel.traits.op == "kvcache":
            tile = kernel.for_cache(CacheCall(seqlen_q, 4096, group, 16), target).tile
            assert 128 % tile.tile_n == 0
            yield tile
        elif kernel.traits.op == "forward":
            for seqlen_k in (300, 9000):
                tile = kernel.for_lengths(seqlen_q, seqlen_k, group, target).tile
                assert kernel.traits.arch == "sm80" or (seqlen_q, group) != (1, 8) or tile.pack_heads == 8
                yield tile


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in EVERY_PAIR for target in (TARGETS if "sm80" in name else ("sm90",))],
)
def test_tiles_fit_every_head_dim(name, target):
    pairs, features = EVERY_PAIR[name]
    for (d, dv), more in itertools.product(pairs, features):
        kernel = registry.lookup(Traits.parse(f"{name}-d{d}x{dv}{more}"), None, target)
        for tile in (kernel.tile, *tiles_of_calls(kernel, target)):
            assert tile.reject(kernel.traits, target) is None, (str(kernel.traits), tile)


@given(st.data())
def test_every_tile_by_lengths_and_work_fits(data):
    draw = data.draw
    op, dim = draw(st.sampled_from(["forward", "backward"])), draw(st.integers(1, 32)) * 8
    features = {name: draw(st.booleans()) for name in ("softcap", "alibi", "varlen", "seqused_k")}
    choices = {"mask": MASKS, "bias": BIAS_DTYPES, "dropout": DROPOUTS}
    features |= {name: draw(st.sampled_from(["", *accepted])) for name, accepted in choices.items()}
    traits = Traits(op, "sm90", draw(st.sampled_from(["fp16", "bf16"])), dim, **features)
    kernel = registry.lookup(traits)
    lengths = [draw(st.sampled_from([1, 7, 49, 64, 77, 96, 196, 512, 1024, 2048, 50176])) for _ in range(2)]
    pairs = draw(st.sampled_from([None, 1, 8, 32, 132, 1000]))
    chosen = kernel.for_lengths(*lengths, draw(st.sampled_from([1, 4, 7])), "sm90", pairs)
    others = [chosen.without_tma_bias()] if traits.bias else []
    assert [one.tile.reject(traits, "sm90") for one in (chosen, *others)] == [None] * (1 + len(others))
