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
from cute_attn.kernels.backward_sm90.kernel import BackwardSm90
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.kernels.forward_sm90 import lengths as forward_lengths
from cute_attn.tiles import (
    SHARED_MEMORY_BYTES,
    TARGETS,
    ForwardLargeTile,
    ForwardSm80Tile,
    KvcacheSm90Tile,
    padded,
)
from cute_attn.traits import ARCHS, BIAS_DTYPES, DROPOUTS, DTYPES, MASKS, SINK_DTYPES, Traits
from layouts import model
from tests import refusals

D64 = Traits("forward", "sm80", "bf16", 64)
D128 = Traits("forward", "sm80", "bf16", 128)

dims = st.integers(1, 32).map(lambda n: 8 * n)
flags = st.booleans()
traits = st.builds(
    Traits,
    op=st.just("forward"),
    arch=st.sampled_from(ARCHS),
    dtype=st.sampled_from(DTYPES),
    head_dim=dims,
    head_dim_v=dims,
    mask=st.sampled_from(("", *MASKS)),
    softcap=flags,
    alibi=flags,
    bias=st.sampled_from(("", *BIAS_DTYPES)),
    epilogues=st.sampled_from(((), ("mine",), ("mine", "yours_2"))),
    sinks=st.sampled_from(("", *SINK_DTYPES)),
    dropout=st.sampled_from(("", *DROPOUTS)),
    varlen=flags,
    seqused_q=flags,
    seqused_k=flags,
    variant=st.sampled_from(("", "padded")),
)
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


@given(traits)
def test_a_traits_name_parses_back(value):
    assert Traits.parse(value.name) == value
    assert str(value) == value.name


@given(tiles)
def test_a_tiles_text_parses_back(tile):
    assert ForwardSm80Tile(16, 16, q_in_regs=True).override(tile.text) == tile
    assert str(ForwardSm80Tile(64, 96, num_stages=2)) == "tile_m=64,tile_n=96,num_stages=2"
    assert tile.override("") == tile


@pytest.mark.parametrize(
    "tile, text, message",
    [
        (
            KvcacheSm90Tile(),
            "share_qo_smem=true",
            "tile has 'share_qo_smem=true'; accepted: FIELD=VALUE with a",
        ),
        (
            KvcacheSm90Tile(),
            "bias_stages=1",
            "tile has 'bias_stages=1'; accepted: FIELD=VALUE with a field of",
        ),
        (
            ForwardLargeTile(),
            "rescale_threshold=0",
            "tile has 'rescale_threshold=0'; accepted: FIELD=VALUE with",
        ),
        (
            ForwardSm80Tile(),
            "tile_k=3",
            r"tile has 'tile_k=3' \(did you mean 'tile_n'\?\); accepted: FIELD=VALUE",
        ),
        (ForwardSm80Tile(), "tile_n", "tile has 'tile_n'; accepted"),
        (ForwardSm80Tile(), "tile_n=wide", "tile field tile_n is 'wide'; accepted: a whole number"),
        (ForwardSm80Tile(), "tile_n=64,tile_n=96", "tile has tile_n twice; accepted: each field once"),
        (ForwardSm80Tile(), "q_in_regs=1", "tile field q_in_regs is '1'; accepted: true or false"),
    ],
)
def test_a_wrong_text_is_refused(tile, text, message):
    """Also of a field that a kernel does not vary, which its tile lacks."""
    with pytest.raises(ValueError, match=message):
        tile.override(text)


def test_a_partial_text_overrides():
    tile = ForwardSm80Tile(64, 32).override(" tile_n = 96, q_in_regs=true,swizzle_bits= -1 ")
    assert tile == ForwardSm80Tile(64, 96, q_in_regs=True)


REJECTED = """
ForwardSm80Tile(num_warps=0).reject(D64, "sm80") -> num_warps is 0; accepted: 1, 2, 4, 8, 16
ForwardSm80Tile(num_warps=32).reject(D64, "sm80") -> num_warps is 32; accepted: 1, 2, 4, 8, 16
ForwardSm80Tile(tile_m=96).reject(D64, "sm80") -> tile_m is 96; accepted: multiples of 16 rows for each of 4
ForwardSm80Tile(tile_m=0).reject(D64, "sm80") -> tile_m is 0; accepted
ForwardSm80Tile(tile_n=40).reject(D64, "sm80") -> tile_n is 40; accepted: multiples of 16
ForwardSm80Tile(tile_n=-16).reject(D64, "sm80") -> tile_n is -16; accepted
ForwardSm80Tile(tile_n=16).reject(Traits("forward", "sm80", "bf16", 96), "sm80") -> tile_n is 16; accepted: multi
ForwardSm80Tile(num_stages=0).reject(D64, "sm80") -> num_stages is 0; accepted: 1 or more
ForwardSm80Tile(qk_unroll=-1).reject(D64, "sm80") -> qk_unroll is -1; accepted: 0 for all steps
ForwardSm80Tile(swizzle_bits=4).reject(D64, "sm80") -> swizzle_bits is 4; accepted: 0 to 3, or -1
ForwardSm80Tile(swizzle_bits=3).reject(replace(D64, head_dim=96), "sm80") -> swizzle_bits is 3; accepted: at most 2
ForwardSm80Tile(128, 64, num_stages=3).reject(D128, "sm89") -> needs 131072 bytes of shared memory ... sm89 has 101376
ForwardSm80Tile(128, 128).reject(D128, "sm90") -> needs about 304 registers per thread ... there are 255
ForwardSm80Tile(q_in_regs=True).reject(D128, "sm90") -> registers per thread
"""


@refusals.each(REJECTED)
def test_a_tile_that_cannot_work_is_refused_in_one_sentence(call, sentence):
    refusals.check_reason(call, sentence, globals())


@pytest.mark.parametrize("target", TARGETS)
@given(value=traits)
@example(value=Traits("forward", "sm80", "fp32", 8, 104, mask="window", alibi=True))
def test_a_default_tile_fits(target, value):
    value = replace(value, arch="sm80", variant="", epilogues=())
    assume(ForwardSm80.supports(value) is None)
    tile = ForwardSm80.default_tile(value, target)
    assert tile.reject(value, target) is None
    assert tile.smem_bytes(value) <= SHARED_MEMORY_BYTES[target]


@given(tiles, traits)
def test_shared_memory_does_not_overlap(tile, value):
    areas = tile.smem_areas(value)
    assert all(start % 1024 == 0 for name, (start, _) in areas.items() if name != "tile_range")
    assert areas["stats"][1] <= areas["tile_range"][0] and areas["tile_range"][0] % 4 == 0
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


@pytest.mark.parametrize("warps", [3, 6, 12])
def test_numbers_of_warps_are_powers_of_two(warps):
    reason = ForwardSm80Tile(16 * warps, 48, warps).reject(Traits("forward", "sm80", "bf16", 64), "sm90")
    assert reason == f"num_warps is {warps}; accepted: 1, 2, 4, 8, 16"


def test_warps_of_an_fp32_cache_divide_rows_alone():
    tile = ForwardSm80Tile(32, 64, 4, num_stages=1, qk_unroll=1, warps_n=2)
    assert tile.reject(Traits("forward", "sm80", "fp32", 128), "sm90") is None
    reason = tile.reject(Traits("kvcache", "sm80", "fp32", 128, seqused_k=True), "sm90")
    assert reason.startswith("warps_n is 2; accepted: 1 for kvcache-sm80-fp32-d128")


def test_padding_of_head_dims():
    assert [padded(d) for d in (8, 32, 40, 96, 104, 256)] == [32, 32, 64, 96, 128, 256]


def test_a_lookup_names_the_reason_for_a_declined_tile():
    with pytest.raises(
        registry.Unsupported, match="forward-sm80 declined forward-sm80-bf16-d64: tile_n is 40"
    ):
        registry.lookup(D64, "tile_n=40")


# ---- tiles by lengths and by work ----


@pytest.mark.parametrize(
    "features, seqlen_q, seqlen_k, pairs, rows",
    [
        *(("d64", 512, 50176, 32, 128), ("d64", 512, 50176, None, 192)),
        *(("d64-causal", 2048, 2048, 8, 64), ("d64-varlen", 2048, 2048, 8, 192)),
        *(("d64-causal-varlen", 2440, 2440, 26, 64), ("d64-causal-varlen", 4096, 4096, 26, 192)),
        *(("d128-causal", 1024, 1024, 64, 128), ("d256", 1024, 1024, 8, 64)),
        *(("d72", 1024, 1024, 256, 192), ("d80", 1024, 1024, 256, 128)),
        *(("d32-bias_bf16", 32, 128, 16384, 64), ("d128-bias_bf16", 65, 4096, 8, 64)),
        *(("d128-bias_bf16", 65, 4096, 80, 128), ("d64-bias_bf16", 64, 4096, 800, 64)),
    ],
)
def test_rows_of_a_work_tile_follow_the_work(features, seqlen_q, seqlen_k, pairs, rows):
    kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-{features}"))
    assert kernel.for_lengths(seqlen_q, seqlen_k, 1, "sm90", pairs).tile.tile_m == rows


def test_a_backward_of_64_rows_where_128_would_be_empty():
    kernel = registry.lookup(Traits.parse("backward-sm90-bf16-d64"))
    rows = {n: kernel.for_lengths(n, 4096, 1).tile.tile_m for n in (1, 64, 65, 128, 129, 257, 305, 400, 577)}
    assert rows == {1: 64, 64: 64, 65: 128, 128: 128, 129: 64, 257: 64, 305: 64, 400: 128, 577: 128}


def test_a_backward_of_few_keys_or_a_short_window():
    def tile(features, seqlen_q, seqlen_k, window=0):
        kernel = registry.lookup(Traits.parse(f"backward-sm90-bf16-{features}"))
        found = kernel.for_lengths(seqlen_q, seqlen_k, 1, "sm90", None, window).tile
        return found.tile_m, found.tile_n

    large = (128, 128)
    assert tile("d64", 4096, 77) == (128, 80) and tile("d64", 4096, 154) == tile("d48", 1024, 129) == (
        64,
        160,
    )
    assert tile("d64", 1023, 77) == tile("d64", 4096, 100) == tile("d64", 4096, 161) == large
    assert tile("d64-causal", 4096, 77) == tile("d64-dropout", 4096, 77) == large
    assert tile("d32", 4096, 77) == tile("d32", 4096, 4096) == large  # no rows of 64 numbers
    assert [tile("d64-window", 8192, 8192, window=n) for n in (130, 131)] == [(64, 128), large]
    assert tile("d64-causal", 3, 131) == (64, 128)  # no tile for few keys, but one for few queries


def test_keys_of_a_step_waste_few():
    def keys(features, seqlen_k):
        kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-{features}"))
        return kernel.for_lengths(4096, seqlen_k, 1).tile.tile_n

    assert [keys("d192", n) for n in (64, 65, 80, 81)] == [64, 80, 80, 96]
    assert keys("d80", 1500) == keys("d80-causal", 257) == keys("d80-window", 257) == 128
    assert keys("d80", 257) == 96 and keys("d80-dropout", 270) == 96 and keys("d80", 384) == 128


def test_few_queries_under_a_window_take_the_steps_that_waste_fewest_keys():
    kernel = registry.lookup(Traits.parse("forward-sm90-bf16-d128-window"))

    def keys(seqlen_q, window):
        return kernel.for_lengths(seqlen_q, 5507, 1, "sm90", None, window).tile.tile_n

    # Of keys 5,375 to 5,506: two steps of 80 from 5,360 on, three of 64, two of 96 and of 128.
    assert keys(68, 65) == 80
    assert keys(68, 3000) == 128 and keys(129, 65) == 128  # many steps; work tiles begin anywhere


def test_functions_of_scores_speculate():
    """They are as large for far keys as for near ones; others may grow with the distance."""

    def tile(dim, score_mod, lengths=8192):
        name = epilogue_of(score_mod, None)[0]
        kernel = registry.lookup(Traits("forward", "sm90", "bf16", dim, epilogues=(name,)))
        found = kernel.for_lengths(lengths, lengths, 1).tile
        return found.tile_m, found.tile_n, found.speculative

    def capped(score, b, h, q, k):
        return 20 * torch.tanh(score / 20)

    def distant(score, b, h, q, k):
        return score - (q - k).abs() / 64

    assert tile(64, capped) == tile(128, capped) == (64, 64, True)
    assert not tile(64, distant)[2] and tile(128, distant) == (128, 128, False)


def test_bounds_beside_a_list_of_blocks_leave_64_keys(monkeypatch):
    """With more, registers do not suffice. The list's blocks are multiples of 64 keys, not of 80 or 96."""
    monkeypatch.setattr(forward_lengths, "lists_blocks", lambda epilogues: True)

    def keys(features, dim, lengths):
        kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-d{dim}{features}"))
        return kernel.for_lengths(lengths, lengths, 1).tile.tile_n

    for dim, lengths in itertools.product((64, 128), (512, 4096)):
        assert keys("-causal", dim, lengths) == keys("-window", dim, lengths) == 64
        assert keys("", dim, lengths) == 128


def test_small_tiles_where_a_query_sees_few_keys():
    """Keys on average, keys of a window, or functions, whose cost does not depend on lengths."""

    def tile(features, seqlen_q, seqlen_k, group=1, window=0):
        kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-{features}"))
        found = kernel.for_lengths(seqlen_q, seqlen_k, group, "sm90", None, window).tile
        return found.tile_m, found.tile_n, found.pack_heads

    small, large = (64, 64, 1), (192, 128, 1)
    assert tile("d64", 16384, 1024) == small and tile("d64", 16384, 1025) == large
    assert tile("d64-causal", 2048, 2048) == small and tile("d64-causal", 2050, 2050) == large
    assert tile("d64-window", 16384, 16384, window=2048) == small
    assert tile("d64-window", 16384, 16384, window=2049) == tile("d64-window", 16384, 16384) == large
    assert tile("d64-window", 512, 512, window=4096) == small
    assert tile("d64-causal-softcap", 16384, 16384) == tile("d64-causal-dropout", 512, 512) == small
    assert tile("d256-window", 8192, 8192, window=128) == (128, 64, 1)
    assert [tile("d136-window", 8192, 8192, window=n)[1] for n in (128, 512)] == [128, 64]


def test_a_tile_holds_the_heads_of_a_key_head_under_a_mask():
    def heads(features, group):
        kernel = registry.lookup(Traits.parse(f"forward-sm90-bf16-{features}"))
        return kernel.for_lengths(8192, 8192, group).tile.pack_heads

    assert [heads("d64-causal", n) for n in (1, 2, 4, 5, 6, 8, 16)] == [1, 1, 4, 1, 1, 8, 8]
    assert [heads("d256-causal", n) for n in (2, 5, 6)] == [2, 1, 2]
    assert heads("d256-causal", 8) == heads("d256-varlen", 8) == heads("d128-varlen", 8) == 8
    assert heads("d256", 8) == heads("d128-causal", 8) == 1


def test_an_odd_group_is_packed_where_its_work_tiles_then_see_fewer_keys():
    kernel = registry.lookup(Traits.parse("forward-sm90-bf16-d256-window"))
    heads = {n: kernel.for_lengths(123, 13754, 15, "sm90", None, n).tile.pack_heads for n in (66, 4096)}
    assert heads == {66: 16, 4096: 1}


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
