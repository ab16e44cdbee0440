"""The Ampere backward without a GPU: its tiles, and where its threads read and write shared memory."""

import itertools
import re
from dataclasses import replace

import cutlass
import numpy as np
import pytest
from cutlass import Constexpr, Int32, cute

import layouts
from cute_attn.compiler import compile, registry
from cute_attn.kernels.backward_sm80.kernel import BackwardSm80
from cute_attn.kernels.backward_sm80.products import columns_of
from cute_attn.kernels.backward_sm80.storage import BackwardSm80Storage
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits
from layouts.host import run_on_host
from tests.gpu import test_fp32_backward, test_head_dims_backward

# The loops over one thread's subtiles are unrolled on purpose: fragments take static indices.

UNTRANSPOSED = BackwardSm80Tile(64, 128, 8, 2, 4, 2)
IN_REGS = BackwardSm80Tile(64, 128, 4, 1, 4, 2, p_in_regs=True, queries_at_once=32)
KERNELS = {
    "d64-128x128": (64, 64, BackwardSm80Tile(128, 128, 8, 4, 4, 4)),
    "d128-64x128": (128, 128, UNTRANSPOSED),
    "d96x160-64x64": (96, 160, BackwardSm80Tile(64, 64, 8, 4, 4, 4)),
    "d256-64x32": (256, 256, BackwardSm80Tile(64, 32, 4, 2, 2, 2, stages_q=1, stages_do=1)),
    "d64-in-regs": (64, 64, IN_REGS),
    "d32x64-in-regs": (32, 64, IN_REGS),
    "d64-terms": (64, 64, BackwardSm80Tile(64, 64, 4, 2, 2, 2, operands="terms")),
    "d96x160-terms": (96, 160, BackwardSm80Tile(32, 64, 4, 2, 2, 2, dq_passes=3, operands="terms")),
    "d64-one-term": (64, 64, BackwardSm80Tile(64, 64, 4, 2, 2, 2, operands="terms")),
    "d64-one-term-in-regs": (64, 64, replace(IN_REGS, tile_m=64, queries_at_once=32, operands="terms")),
}
OPERANDS = ("q", "k", "do", "v", "p_t", "do_t", "ds_t", "q_t", "ds", "k_t")


def kernel_of(name):
    d, dv, tile = KERNELS[name]
    dtype, precision = "fp32" if tile.in_terms else "fp16", "tf32" if "one-term" in name else ""
    return BackwardSm80(Traits("backward", "sm80", dtype, d, dv, precision=precision), tile)


def storage_at_zero(kernel):
    """Shared memory with every area at address 0."""
    tile, d, dv = kernel.tile, padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)

    def at_zero(layout, dtype=kernel.operand_dtype):
        pointer = cute.make_ptr(dtype, Int32(0), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(pointer, layout)

    ds = (tile.tile_n, tile.tile_m) if tile.p_in_regs else (tile.tile_m, tile.tile_n)
    terms = kernel.products.stored_terms
    return BackwardSm80Storage(
        k=at_zero(kernel.smem_layout(tile.tile_n, d, terms)),
        v=at_zero(kernel.smem_layout(tile.tile_n, dv, terms)),
        q=at_zero(kernel.smem_layout(tile.queries, d, tile.subtiles * tile.stages_q * terms)),
        do=at_zero(kernel.smem_layout(tile.queries, dv, tile.subtiles * tile.stages_do * terms)),
        p=None if tile.p_in_regs else at_zero(kernel.smem_layout(*ds, terms)),
        ds=at_zero(kernel.smem_layout(*ds, terms)),
        lse=None,
        minus_d=None,
        dk=at_zero(kernel.gradient_layout(d), kernel.dtype),
        dv=at_zero(kernel.gradient_layout(dv), kernel.dtype),
        spilled=None,
    )


@cute.jit
def write_reads(kernel: Constexpr, name: Constexpr, out: cute.Tensor):
    """out[thread, k, subtile, term] = addresses: the kernel's, unrolled and in a loop, and the layout's."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        operand = getattr(kernel.operands(storage_at_zero(kernel), thread), name)
        terms = getattr(operand, "each", (operand,))
        tile, passes = terms[0].tile, 1 if name != "k_t" else kernel.tile.dq_passes
        whole = cute.size(tile, mode=[0]) * cute.size(tile, mode=[1]) * passes
        identity = cute.make_identity_tensor(tile.layout.shape)
        reference = terms[0].tiled_copy.get_slice(thread).partition_S(identity)
        start = operand.start(Int32(0))
        for k in cutlass.range_constexpr(operand.steps):
            here = operand.at_step(start, Int32(k))
            for subtile in cutlass.range_constexpr(operand.subtiles):
                row, col, _ = reference[0, subtile, k, 0]
                for t, term in enumerate(terms):
                    unrolled, looped = (x[t] if len(terms) > 1 else x for x in (start, here))
                    out[thread, k, subtile, t, 0] = term.address(unrolled, subtile, k).toint()
                    out[thread, k, subtile, t, 1] = term.address(looped, subtile, 0).toint()
                    out[thread, k, subtile, t, 2] = 2 * (cute.crd2idx((row, col, 0), tile.layout) + t * whole)


def sizes_of(kernel, name):
    """(rows of a fragment over all warps, extent along K) of an operand."""
    tile, d, dv = kernel.tile, padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)
    sdp_m = tile.num_warps if tile.p_in_regs else tile.sdp_warps_m
    sdp_n, dkv_n, dq_n = (tile.num_warps // w for w in (sdp_m, tile.dkv_warps_m, tile.dq_warps_m))
    queries, keys = (sdp_n, sdp_m) if tile.p_in_regs else (sdp_m, sdp_n)
    return {
        "q": (tile.queries // queries, d),
        "k": (tile.tile_n // keys, d),
        "do": (tile.queries // queries, dv),
        "v": (tile.tile_n // keys, dv),
        "p_t": (tile.tile_n // tile.dkv_warps_m, tile.tile_m),
        "ds_t": (tile.tile_n // tile.dkv_warps_m, tile.tile_m),
        "do_t": (dv // dkv_n, tile.queries),
        "q_t": (d // dkv_n, tile.queries),
        "ds": (tile.tile_m // tile.dq_warps_m, tile.tile_n),
        "k_t": (d // tile.dq_passes // dq_n, tile.tile_n),
    }[name]


@pytest.mark.parametrize(
    "name", ["d128-64x128", "d256-64x32", "d64-in-regs", "d96x160-terms", "d64-terms", "d64-one-term-in-regs"]
)
def test_operands_are_read_at_the_layouts_addresses(name):
    kernel = kernel_of(name)
    for operand in OPERANDS:
        if kernel.tile.p_in_regs and operand in ("p_t", "ds_t"):
            continue
        rows, extent = sizes_of(kernel, operand)
        found = run_on_host(
            lambda out, operand=operand: write_reads(kernel, operand, out),
            *(kernel.tile.num_threads, extent // 16, rows // 16, kernel.products.stored_terms, 3),
        )
        unrolled, looped, wanted = np.moveaxis(found, -1, 0)
        np.testing.assert_array_equal(unrolled, wanted, err_msg=operand)
        np.testing.assert_array_equal(looped, wanted, err_msg=operand)


@cute.jit
def write_stores(kernel: Constexpr, name: Constexpr, col0: Constexpr, out: cute.Tensor):
    """out[thread, r, c] = addresses of a pair: the kernel's and the layout's."""
    for thread in cutlass.range(cute.size(out.shape[0])):
        storage = storage_at_zero(kernel)
        operands = kernel.operands(storage, thread)
        if cutlass.const_expr(name in ("dk", "dv")):
            result = kernel.products.result(operands.mma_dkv, getattr(storage, name), thread)
        else:
            result = getattr(operands, name)
        modes = layouts.row_col_modes(result.tiled_mma, *result.shape)
        row0, column0 = layouts.thread_row_col(result.tiled_mma, *result.shape, thread)
        start = result.start()
        for r in cutlass.range_constexpr(len(modes.rows)):
            for c in cutlass.range_constexpr(0, len(modes.cols), 2):
                row, column = modes.rows[r], modes.cols[c] + col0
                out[thread, r, c // 2, 0] = result.address(start, row, column).toint()
                wanted = cute.crd2idx((row0 + row, column0 + column), result.tile.layout)
                out[thread, r, c // 2, 1] = result.tile.element_type.width // 8 * wanted


@pytest.mark.parametrize("name", KERNELS)
def test_results_are_stored_at_the_layouts_addresses(name):
    kernel = kernel_of(name)
    tile, d, dv = kernel.tile, padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)
    scores = tile.tile_n * tile.queries if tile.p_in_regs else tile.tile_m * tile.tile_n
    sdp_m = tile.num_warps if tile.p_in_regs else tile.sdp_warps_m
    sdp_rows = kernel.products.scores_shape[0] // sdp_m // 8
    dkv_rows = tile.tile_n // tile.dkv_warps_m // 8
    cases = [("ds_out", sdp_rows, scores, subtile * tile.queries) for subtile in range(tile.subtiles)]
    cases += [] if tile.p_in_regs else [("p_out", sdp_rows, scores, 0)]
    cases += [("dk", dkv_rows, tile.tile_n * d, 0), ("dv", dkv_rows, tile.tile_n * dv, 0)]
    for result, rows, elements, col0 in cases:
        pairs = elements // tile.num_threads // rows // 2
        found = run_on_host(
            lambda out, result=result, col0=col0: write_stores(kernel, result, col0, out),
            *(tile.num_threads, rows, pairs, 2),
        )
        np.testing.assert_array_equal(found[..., 0], found[..., 1], err_msg=result)
        if (col0 == 0 and tile.subtiles == 1) or result in ("dk", "dv"):
            assert len(np.unique(found[..., 0])) == elements // 2


STREAMED = BackwardSm80Tile(64, 64, 8, 4, 4, 4, dq_passes=8, columns=128)
REJECTED = """
num_warps=0 num_warps; num_warps=6 num_warps; num_warps=1 num_warps; dq_warps_m=3 dq_warps_m
stages_q=3 stages_q; stages_do=0 stages_do
dq_vector=3 dq_vector; dq_unroll=-1 unroll; p_in_regs=true sdp_warps_m; queries_at_once=32 queries_at_once
tile_m=48 tile_m; tile_n=32 tile_n; dkv_warps_m=1 head_dim; tile_m=1024 shared memory; tile_n=1024 shared memory
dq_passes=3 dq_passes; dq_passes=0 dq_passes
"""
"""Changes of a tile, each with a word that the reason for declining it contains."""
STREAMED_REJECTED = """
columns=100 columns; columns=-64 columns; dq_passes=4 dq_passes 4; dq_warps_m=1 head_dim of a pass
p_in_regs=true,sdp_warps_m=1,dkv_warps_m=8 columns; tile_m=512 tile_m
"""


def rows(text):
    return [row.partition(" ")[::2] for row in re.split(r"; |\n", text.strip())]


@pytest.mark.parametrize(
    "tile, head_dim, target, change, named",
    [
        *((UNTRANSPOSED, 64, "sm90", *row) for row in rows(REJECTED)),
        *((STREAMED, 512, "sm86", *row) for row in rows(STREAMED_REJECTED)),
    ],
)
def test_a_rejected_tile_names_the_reason(tile, head_dim, target, change, named):
    traits = Traits("backward", "sm80", "bf16", head_dim)
    assert tile.reject(traits, target) is None
    reason = tile.override(change).reject(traits, target)
    assert reason and named in reason, reason


def test_vector_reductions_are_for_sm90_alone():
    traits = Traits("backward", "sm80", "bf16", 64)
    tile = UNTRANSPOSED.override("dq_vector=4")
    assert tile.reject(traits, "sm90") is None
    assert "dq_vector" in tile.reject(traits, "sm80")


@pytest.mark.parametrize("v_in_regs", [False, True])
def test_areas_overlap_only_where_memory_is_reused(v_in_regs):
    traits = Traits("backward", "sm80", "bf16", 96, 64)
    tile = BackwardSm80Tile(64, 64, 8, 4, 4, 4, v_in_regs=v_in_regs)
    areas = tile.smem_areas(traits)
    assert all(start % 16 == 0 for start, _ in areas.values())
    loaded = [name for name in areas if name not in ("dk", "dv")]
    taken_over = {("v", "p"), ("v", "ds")} if v_in_regs else set()
    for a, b in itertools.combinations(loaded, 2):
        if areas[a][0] < areas[b][1] and areas[b][0] < areas[a][1]:
            assert (a, b) in taken_over, (a, b)
    assert areas["dk"][1] <= areas["dv"][0] and areas["dv"][1] <= tile.smem_bytes(traits)


@pytest.mark.parametrize(
    "dtype, dims, chunk", [("bf16", (512, 320), 64), ("fp16", (512, 96), 32), ("fp32", (352, 96), 32)]
)
def test_streamed_ctas_cover_all_columns(dtype, dims, chunk):
    traits = Traits("backward", "sm80", dtype, *dims)
    tile = BackwardSm80Tile(64, 64, 8, 4, 4, 4, columns=64)
    assert tile.chunk(traits) == chunk
    assert tile.parts(traits) * 64 >= max(dims) > (tile.parts(traits) - 1) * 64
    assert BackwardSm80Tile().parts(traits) == 1


@cute.jit
def write_columns(dtype: Constexpr, shape: Constexpr, parts: Constexpr, out: cute.Tensor):
    """out[row, col] = addresses in the layout of all columns, and in the layout of the column's range."""
    pointer = cute.make_ptr(dtype, Int32(0), cute.AddressSpace.smem, assumed_align=1024)

    def layout(rows, cols, stages=1):
        return layouts.smem_layout(rows, cols, dtype, stages=stages)

    whole = cute.make_tensor(pointer, layout(*shape))
    width = shape[1] // parts
    for row in cutlass.range(shape[0]):
        for part in cutlass.range_constexpr(parts):
            own = columns_of(whole, layout, part, parts)
            for col in cutlass.range(width):
                at = part * width + col
                place = whole.iterator + cute.crd2idx((row, at, 0), whole.layout)
                part_place = own.iterator + cute.crd2idx((row, col, 0), own.layout)
                out[row, at, 0], out[row, at, 1] = place.toint(), part_place.toint()


@pytest.mark.parametrize("width, shape, parts", [(16, (32, 512), 2), (16, (64, 576), 9), (32, (32, 320), 5)])
def test_parts_of_columns_lie_where_the_whole_has_them(width, shape, parts):
    dtype = cutlass.Float16 if width == 16 else cutlass.Float32
    found = run_on_host(lambda out: write_columns(dtype, shape, parts, out), *shape, 2)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])


@pytest.mark.parametrize("dtype, operands", [("fp32", "terms"), ("fp32", "whole"), ("fp16", "whole")])
def test_passes_over_dq_have_ks_swizzle_atoms(dtype, operands):
    width = 32 if (dtype, operands) == ("fp32", "whole") else 16
    base = BackwardSm80Tile(32, 32, 4, 2, 2, 2, stages_q=1, stages_do=1, operands=operands)
    for d, passes in itertools.product(range(32, 257, 32), range(1, 9)):
        of_pass = d // passes if d % (16 * passes) == 0 else 0
        lies = passes == 1 or (of_pass and layouts.atom_cols(of_pass, width) == layouts.atom_cols(d, width))
        reason = replace(base, dq_passes=passes).reject(Traits("backward", "sm80", dtype, d, 32), "sm90")
        assert bool(lies) != ("dq_passes is" in (reason or "")), (d, passes, reason)


GPU_TILES = [
    *((test_fp32_backward, name, tile) for name, tiles in test_fp32_backward.TILES.items() for tile in tiles),
    *((test_head_dims_backward, name, tile) for name, tile in test_head_dims_backward.TILES),
]


@pytest.mark.parametrize("module, name, tile", GPU_TILES)
def test_tiles_of_gpu_tests_are_accepted(module, name, tile):
    """These tiles change fields of the default tile, so a new default tile may make them invalid."""
    traits = module.BY_NAME[name].traits("sm80", "backward")
    assert registry.lookup(traits, tile, "sm90").tile.reject(traits, "sm90") is None


def chains_of(ptx):
    """The MMAs of each sum, as (A, B) of registers, and the sums' first registers."""
    chains, starts, of_result = [], [], {}
    for mma in re.findall(r"mma\.sync\S+\s+{(.*?)},\s+{(.*?)},\s+{(.*?)},\s+{(.*?)};", ptx, re.DOTALL):
        result, a, b, start = (tuple(x.replace(" ", "").split(",")) for x in mma)
        chain = of_result.get(start)
        if chain is None:
            chains.append(chain := [])
            starts += start
        chain.append((a, b))
        of_result[result] = chain
    return chains, starts


@pytest.mark.parametrize("operands, head_dim", [("terms", 256), ("fallback", 64)])
def test_products_of_fp32_are_three_summed_from_zero(operands, head_dim):
    """Long sums by tensor cores, which round toward zero, err by multiples of fp32's rounding.

    In terms, a sum is of lo and hi, hi and lo, and hi and hi, in this order.
    """
    ptx = compile(f"backward-sm80-fp32-d{head_dim}-causal", f"operands={operands}", "sm80").ptx
    chains, starts = chains_of(ptx)
    assert chains and {len(chain) for chain in chains} == {3}
    assert set(re.findall(r"mov\.b32\s+(%r\d+), 0f00000000;", ptx)).issuperset(starts)
    for (a_lo, b_hi), (a_hi, b_lo), last in chains if operands == "terms" else ():
        assert last == (a_hi, b_hi) and not set(a_lo) & set(a_hi) and not set(b_lo) & set(b_hi)


def test_one_term_takes_one_product_in_fp16_and_leaves_small_shared_memory_to_whole_operands():
    kernel = kernel_of("d64-one-term")
    for dims, target, operands in (
        *(((64, 64), "sm86", "terms"), ((128, 128), "sm80", "terms"), ((256, 256), "sm80", "terms")),
        *(((256, 256), "sm86", "whole"), ((512, 512), "sm90", "terms"), ((320, 96), "sm86", "terms")),
    ):
        traits = Traits("backward", "sm80", "fp32", *dims, precision="tf32")
        tile = registry.lookup(traits, None, target).tile
        assert tile.operands == operands
        for own in (tile, tile.fallback(traits)) if tile.in_terms else (tile,):
            assert own.reject(traits, target) is None
    fp32 = BackwardSm80(Traits("backward", "sm80", "fp32", 64), kernel.tile)
    assert fp32.step_content().mma == 3 * kernel.step_content().mma
    half = BackwardSm80(Traits("backward", "sm80", "fp16", 64), replace(kernel.tile, operands="whole"))
    assert half.step_content().mma == kernel.step_content().mma


@cute.jit
def write_rows(kernel: Constexpr, out: cute.Tensor):
    """out[thread, element, M mode] = rows of the dQ accumulator."""
    mma, tile = kernel.mma_dq(), kernel.tile
    for thread in cutlass.range(cute.size(out.shape[0])):
        shape = (tile.tile_m, padded(kernel.traits.head_dim))
        coords = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        for i in cutlass.range_constexpr(cute.size(coords, mode=[0])):
            for m in cutlass.range_constexpr(cute.size(coords, mode=[1])):
                out[thread, i, m] = coords[i, m, 0][0]


def test_sub_tiles_of_one_term_are_whole_modes_of_dq():
    """Each sub-tile then has one scale factor."""
    kernel = kernel_of("d64-one-term-in-regs")
    tile = kernel.tile
    found = run_on_host(lambda out: write_rows(kernel, out), tile.num_threads, 4, tile.tile_m // 32)
    subtiles = np.arange(tile.tile_m // 32) * tile.subtiles // (tile.tile_m // 32)
    assert tile.subtiles == 2 and (found // tile.queries == subtiles).all()
    for queries_at_once, text in ((16, "multiples of 32"), (32, None)):
        reason = replace(tile, queries_at_once=queries_at_once).reject(kernel.traits, "sm90")
        assert reason is None if text is None else text in reason


def test_steps_at_once_stay_in_swizzle_atoms():
    """The number of steps at once divides all steps, and divides a swizzle atom's steps or is a multiple of them."""
    for extent, unroll in itertools.product(range(32, 577, 32), range(5)):
        steps, atom = extent // 16, layouts.atom_cols(extent, 16) // 16
        once = BackwardSm80Tile.steps_at_once(extent, unroll)
        assert steps % once == 0 and once <= (unroll or steps) and (atom % once == 0 or once % atom == 0)
