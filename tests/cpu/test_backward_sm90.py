"""The Hopper backward without a GPU: its tiles, the order of its key blocks, and its builds."""

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Int32, cute

import layouts
from cute_attn.compiler import compile
from cute_attn.device.gemm import operand_layout
from cute_attn.kernels.backward_sm90.kernel import BackwardSm90
from cute_attn.kernels.dq_order import accumulator_shape, mma_dq
from cute_attn.tiles import SHARED_MEMORY_BYTES, padded
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from layouts.host import coordinate_table, offset_table
from tests.tensors import dynamic


def traits_of(rest):
    return Traits.parse(f"backward-sm90-bf16-{rest}")


# ---- tiles ----


@pytest.mark.parametrize(
    "rest", ["d64", "d64-dropout", "d80", "d128-causal", "d256", "d40x136", "d192x128", "d512"]
)
def test_shared_memory_areas_follow_each_other_aligned(rest):
    traits = traits_of(rest)
    tile = BackwardSm90.default_tile(traits, "sm90")
    areas = tile.smem_areas(traits)
    (dk, dk_end), (dv, dv_end), end = areas.pop("dk"), areas.pop("dv"), 0
    assert dk_end - dk == areas["k"][1] - areas["k"][0] and dv_end - dv == areas["v"][1] - areas["v"][0]
    assert (
        tile.dv_leaves_v(traits)
        == (dv != areas["v"][0])
        == (max(padded(traits.head_dim), padded(traits.head_dim_v)) <= 96)
    )
    if tile.dv_leaves_v(traits) and dv < areas["p"][1]:
        assert dv == dk_end and dv_end <= areas["ds"][1]
    elif tile.dv_leaves_v(traits):
        areas["dv"] = dv, dv_end
    if tile.dk_leaves_k(traits):
        assert dk == areas["ds"][0] and dk_end <= areas["p"][1]
    else:
        assert dk == areas["k"][0]
    for name, (start, stop) in areas.items():
        assert start == end and stop >= start
        assert start % (1024 if name not in ("lse", "minus_d", "mask") else 128) == 0
        end = stop
    assert end == tile.smem_bytes(traits) <= SHARED_MEMORY_BYTES["sm90"]
    columns = padded(traits.head_dim) // tile.cluster
    assert areas["q"][1] - areas["q"][0] == tile.num_stages_q * tile.tile_m * columns * 2


def test_head_dims_that_a_cluster_cannot_divide_are_declined():
    reason = BackwardSm90.supports(traits_of("d96x512"))
    assert reason is not None and "head_dim, head_dim_v are (96, 512)" in reason
    assert BackwardSm90.supports(traits_of("d120x264")) is None


# ---- layouts ----


@pytest.mark.parametrize(
    ("rows", "cols", "parts"), [(128, 128, 1), (128, 128, 2), (64, 192, 2), (128, 96, 2), (64, 160, 2)]
)
def test_warpgroups_read_whole_atoms_of_an_operand(rows, cols, parts):
    """Every element has a different address, and warpgroups read disjoint swizzle atoms."""
    table = offset_table(lambda: operand_layout(rows, cols, cutlass.BFloat16, parts=parts).outer, rows, cols)
    assert sorted(table.flatten()) == list(range(rows * cols))
    atom = layouts.atom_cols(cols // parts, 16) * 8
    share = cols // parts
    atoms = [set((table[:, i * share : (i + 1) * share] // atom).flatten()) for i in range(parts)]
    assert not set.intersection(*atoms) or parts == 1


@pytest.mark.parametrize(
    ("rest", "text"),
    [("d64", ""), ("d128", ""), ("d128", "tile_m=80,dq_transposed=true"), ("d96", ""), ("d256", "")],
)
def test_dq_accumulator_is_the_wgmma_one(rest, text):
    """The (query, column) of a thread's i-th value, as in PTX's figure of wgmma's D fragment."""
    traits = traits_of(rest)
    tile = BackwardSm90.default_tile(traits, "sm90").override(text)
    m, n = accumulator_shape(traits, tile)
    along_n = tile.dq_warps_n
    along_m, width = tile.warpgroups // along_n, n // along_n
    found = coordinate_table(
        lambda thread: mma_dq(traits, tile).get_slice(thread).partition_C(cute.make_identity_tensor((m, n))),
        tile.mma_threads,
    )
    thread = np.arange(tile.mma_threads)[:, None]
    value = np.arange(found.shape[1])[None, :]
    group, warp, lane = thread // 128, thread // 32 % 4, thread % 32
    instruction, own = value // (width // 2), value % (width // 2)
    rows = (instruction * along_m + group % along_m) * 64 + warp * 16 + lane // 4 + own // 2 % 2 * 8
    columns = group // along_m * width + lane % 4 * 2 + own % 2 + own // 4 * 8
    assert (found[..., 0] == rows).all() and (found[..., 1] == columns).all()


# ---- the order of query blocks ----


@cute.jit
def _staggered(out: cute.Tensor, first: Int32):
    blocks = BlockRange(Int32(0), Int32(0), Int32(0), Int32(out.shape[0]), first)
    for step in cutlass.range(out.shape[0]):
        out[step] = blocks.block(step)


@pytest.mark.parametrize(("count", "first"), [(1, 0), (5, 0), (5, 1), (5, 4), (64, 37)])
def test_staggered_ctas_visit_every_query_block_once(count, first):
    out = torch.full((count,), -1, dtype=torch.int32)
    cute.compile(_staggered, dynamic(out), Int32(0))(dynamic(out), first)
    assert out.tolist() == [(first + step) % count for step in range(count)]


# ---- builds ----


OTHER_TILES = [
    ("d64-causal-dropout", "mask_warps=1,dq_bulk=true,tile_m=64"),
    ("d256-window", "num_stages_ds=1"),
    # With --every-default.
    ("d128", "staggered=false,dq_bulk=true"),
    ("d128-window-dropout-varlen", "mask_warps=2"),
    ("d64x192-causal-varlen-seqused_q-seqused_k", ""),
]


def pytest_generate_tests(metafunc):
    if "other_tile" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--every-default", default=False)
        metafunc.parametrize("other_tile", OTHER_TILES if whole else OTHER_TILES[:1], ids="-".join)


def test_other_tiles_build_without_spills(other_tile):
    rest, text = other_tile
    compiled = compile(traits_of(rest), text or None, "sm90")
    assert compiled.resources.spill_store_bytes == compiled.resources.local_bytes == 0
    assert compiled.warnings == ()
    assert compiled.instructions["HGMMA"] > 0 and compiled.instructions["UTMALDG"] > 0
