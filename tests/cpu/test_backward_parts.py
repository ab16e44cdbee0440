"""The backward's workspace, preprocess and convert: the kernels' own steps, every thread, compiled for the CPU."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import cutlass
import pytest
import torch
from cutlass import Constexpr, Float16, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

import layouts
from cute_attn.compiler import registry
from cute_attn.device.seqlen import (
    SeqlenInfo,
    Seqlens,
    existing_rows,
    first_block,
    padded_row0,
    sequence,
    sequence_of_block,
    workspace_rows,
)
from cute_attn.host.backward import kernels_of
from cute_attn.kernels import dq_order as dq
from cute_attn.kernels.backward_convert import BackwardConvert
from cute_attn.kernels.backward_preprocess import BackwardPreprocess, Rows
from cute_attn.outputs.accumulate import add_fragment, load_fragment, stage_fragment
from cute_attn.tiles import BackwardPreprocessTile, BackwardSm80Tile, BackwardSm90Tile, padded
from cute_attn.traits import Traits
from cute_attn.work.query_tiles import QueryTile
from tests import backward_workspace
from tests.tensors import int32, run

ARCH = {"sm80": "sm_80", "sm90": "sm_90a"}


# ---- rows of the workspace ----


@cute.jit
def first_rows(cu_seqlens: cute.Tensor, out: cute.Tensor, tile_m: Constexpr):
    seqlens = Seqlens(cu_seqlens, cu_seqlens, None, None, Int32(0), Int32(0))
    for batch in cutlass.range(out.shape[0]):
        out[batch] = padded_row0(seqlens, SeqlenInfo.read(seqlens, batch), batch, tile_m)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from((16, 64, 80, 128)), st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_padded_sequences_share_no_block_and_fit(tile_m, lengths):
    starts = torch.full((len(lengths),), -1, dtype=torch.int32)
    run(first_rows, int32(0, *itertools.accumulate(lengths)), starts, constants=(tile_m,))
    end = 0
    for start, length in zip(starts.tolist(), lengths, strict=True):
        assert start % tile_m == 0 and start >= end
        end = start + -(-length // tile_m) * tile_m
    assert end <= (sum(lengths) // tile_m + len(lengths)) * tile_m


@cute.jit
def sequences_of_blocks(cu_seqlens: cute.Tensor, blocks: cute.Tensor, starts: cute.Tensor, tile: Constexpr):
    for block in cutlass.range(blocks.shape[0]):
        blocks[block] = sequence_of_block(cu_seqlens, block, tile)
    for batch in cutlass.range(starts.shape[0]):
        starts[batch] = first_block(cu_seqlens, batch, tile)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from((64, 80)), st.integers(0, 300), st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_blocks_find_their_sequences(tile, first, lengths):
    """Blocks beyond a sequence's last one belong to that sequence."""
    ends = int32(*itertools.accumulate(lengths, initial=first))
    found = torch.full((int(ends[-1]) // tile + len(lengths),), -1, dtype=torch.int32)
    starts = torch.full((len(lengths),), -1, dtype=torch.int32)
    run(sequences_of_blocks, ends, found, starts, constants=(tile,))
    bounds = [*starts.tolist(), len(found)]
    for b, length in enumerate(lengths):
        assert bounds[b + 1] - bounds[b] >= -(-length // tile)
    assert found.tolist() == [max(0, sum(s <= x for s in bounds[:-1]) - 1) for x in range(len(found))]


# ---- the accumulator ----

# The main kernels' MMAs of dQ: arch, head dim and the fields of a tile that shape its accumulator.
ORDERS = {
    "sm80-warps-4x2": ("sm80", 128, BackwardSm80Tile(64, 128, 8, 2, 4, 4)),
    "sm80-warps-2x2": ("sm80", 40, BackwardSm80Tile(32, 32, 4, 2, 2, 2, dq_vector=4)),
    "sm80-warps-1x4": ("sm80", 64, BackwardSm80Tile(16, 64, 4, 1, 4, 1, dq_vector=2)),
    "sm90": ("sm90", 96, BackwardSm90Tile(64, 128)),
    "sm90-along-m": ("sm90", 64, BackwardSm90Tile(128, 128)),
    "sm90-along-n": ("sm90", 192, BackwardSm90Tile(64, 64, p_in_smem=True)),
    "sm90-cluster": ("sm90", 384, BackwardSm90Tile(64, 64, p_in_smem=True, scores_ahead=True, cluster=2)),
    "sm90-transposed": ("sm90", 128, BackwardSm90Tile(80, 128, dq_transposed=True)),
}


@cute.jit
def add_and_load(
    memory: cute.Tensor, values: cute.Tensor, matrix: cute.Tensor, traits: Constexpr, tile: Constexpr
):
    """Each thread adds its elements' linear indices to memory twice, then loads its fragment to ``out``."""
    mma = dq.mma_dq(traits, tile)
    shape = dq.accumulator_shape(traits, tile)
    acc = dq.make_accumulator(mma, traits, tile)
    flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    coords = cute.make_identity_tensor(shape)
    for _ in cutlass.range(2, unroll=1):
        for thread in cutlass.range(tile.mma_threads, unroll=1):
            position = mma.get_slice(thread).partition_C(coords)
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = Float32(position[i][0] * shape[1] + position[i][1])
            add_fragment(acc, memory.iterator, thread, tile.dq_vector)
            for i in cutlass.range_constexpr(cute.size(acc)):
                values[thread, i] = 2 * flat[i]
    for thread in cutlass.range(tile.mma_threads, unroll=1):
        load_fragment(acc, memory.iterator, thread, tile.dq_vector)
        load_fragment(acc, memory.iterator, thread, tile.dq_vector, more=True)
        mine = mma.get_slice(thread).partition_C(matrix)
        for i in cutlass.range_constexpr(cute.size(acc)):
            mine[i] = acc[i]


@pytest.mark.parametrize("name", ORDERS)
def test_fragments_are_stored_as_documented_and_load_back(name):
    arch, head_dim, tile = ORDERS[name]
    traits = Traits("backward", arch, "fp16", head_dim)
    m, n = dq.accumulator_shape(traits, tile)
    size = m * n // tile.mma_threads
    assert dq.block_floats(traits, tile) == m * n * tile.dq_passes == tile.tile_m * padded(head_dim)
    memory, values, matrix = torch.zeros(m * n), torch.zeros(tile.mma_threads, size), torch.zeros(m, n)
    run(add_and_load, memory, values, matrix, constants=(traits, tile), arch=ARCH[arch])

    elements = torch.arange(m * n, dtype=torch.float32)
    assert torch.equal(memory.sort().values, 2 * elements)  # every element once
    thread, i = torch.arange(tile.mma_threads).unsqueeze(1), torch.arange(size).unsqueeze(0)
    vector = tile.dq_vector
    position = thread // 32 * 32 * size + (i // vector * 32 + thread % 32) * vector + i % vector
    assert torch.equal(memory[position], values)
    assert torch.equal(matrix.view(-1), 4 * elements)


@cute.jit
def add_and_stage(added: cute.Tensor, staged: cute.Tensor, traits: Constexpr, tile: Constexpr):
    """Each thread adds its elements' linear indices to ``added`` and stages them in ``staged``."""
    mma, shape = dq.mma_dq(traits, tile), dq.accumulator_shape(traits, tile)
    acc = dq.make_accumulator(mma, traits, tile)
    for thread in cutlass.range(tile.mma_threads, unroll=1):
        position = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = Float32(position[i][0] * shape[1] + position[i][1])
        add_fragment(acc, added.iterator, thread, tile.dq_vector)
        stage_fragment(acc, staged.iterator, thread, tile.dq_vector)


@pytest.mark.parametrize("name", [name for name in ORDERS if name.startswith("sm90")])
def test_staged_and_added_fragments_have_the_same_layout(name):
    arch, head_dim, tile = ORDERS[name]
    traits = Traits("backward", arch, "fp16", head_dim)
    added, staged = (torch.zeros(math.prod(dq.accumulator_shape(traits, tile))) for _ in range(2))
    run(add_and_stage, added, staged, constants=(traits, tile), arch=ARCH[arch])
    assert torch.equal(added, staged)
    assert torch.equal(added.sort().values, torch.arange(added.numel(), dtype=torch.float32))


def test_a_fragment_of_a_fractional_number_of_vectors_is_refused():
    @cute.jit
    def broken(memory: cute.Tensor):
        add_fragment(cute.make_rmem_tensor(cute.make_layout(6), Float32), memory.iterator, Int32(0), 4)

    with pytest.raises(ValueError, match="vector is 4: whole vectors"):
        cute.compile(broken, from_dlpack(torch.zeros(256)))


# ---- preprocess ----


@cute.jit
def preprocess(
    mDO: cute.Tensor,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    mDLSE: cute.Tensor | None,
    mLSElog2: cute.Tensor,
    mMinusD: cute.Tensor,
    mDQaccum: cute.Tensor,
    sums: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    seqused: cute.Tensor | None,
    sizes: cute.Tensor,
    keep_prob: cute.Tensor,
    kernel: Constexpr,
):
    """Run every CTA and thread of the kernel in turn; shared memory replaces the shuffles."""
    tile, traits = kernel.tile, kernel.traits
    seqlens = Seqlens(cu_seqlens, cu_seqlens, seqused, None, sizes[2], sizes[2])
    for i in cutlass.range(sizes[0] * sizes[1], unroll=1):
        batch, head = i // sizes[1], i % sizes[1]
        for row0 in cutlass.range(0, cute.round_up(seqlens.max_seqlen_q, tile.tile_m), tile.rows, unroll=1):
            query_rows = Rows.at(seqlens, batch, head, row0, tile.tile_m)
            if row0 < cute.round_up(query_rows.info.seqlen_q, tile.tile_m):
                for row in cutlass.range(tile.rows):
                    sums[row] = Float32(0.0)
                for thread in cutlass.range(tile.num_threads, unroll=1):
                    do, o = (
                        kernel.load_rows(mDO, query_rows, thread),
                        kernel.load_rows(mO, query_rows, thread),
                    )
                    for j in cutlass.range_constexpr(tile.passes(traits)):
                        part = kernel.part_of_row(do, o, j, thread)
                        row = thread // tile.threads_per_row(traits) + j * tile.rows_at_once(traits)
                        if row < tile.rows:
                            sums[row] = sums[row] + part
                    kernel.zero_accumulators(mDQaccum, query_rows, thread)
                for thread in cutlass.range(tile.rows, unroll=1):
                    lse, dlse = kernel.load_number(mLSE, query_rows, thread), Float32(0.0)
                    if cutlass.const_expr(mDLSE is not None):
                        dlse = kernel.load_number(mDLSE, query_rows, thread)
                    exists = row0 + thread < query_rows.info.seqlen_q
                    out = kernel.statistics(exists, sums[thread], lse, dlse, keep_prob[0])
                    for workspace, number in zip((mLSElog2, mMinusD), out, strict=True):
                        rows = workspace_rows(workspace, batch, head, query_rows.padded0, 1, traits.varlen)
                        rows[thread] = number


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: its lengths, how it is stored, and a tile."""

    head_dim: int
    head_dim_v: int
    tile: BackwardPreprocessTile
    lengths: tuple[int, ...]
    varlen: bool = False
    used: tuple[int, ...] | None = None
    lse_grad: bool = False
    accumulators: int = 1


T = BackwardPreprocessTile
CASES = {
    "odd": Case(40, 72, T(16, 16, 64), (33, 33)),
    "wide-values": Case(8, 256, T(32, 8, 32), (40,), accumulators=2),
    "lse-grad": Case(64, 64, T(48, 24, 128), (49,), lse_grad=True),
    "used": Case(32, 96, T(16, 16, 64), (40, 40, 40), used=(40, 0, 17), lse_grad=True),
    "varlen": Case(64, 32, T(32, 16, 64), (32, 0, 31, 33, 1), varlen=True),
    "varlen-used": Case(96, 24, T(16, 4, 32), (16, 5, 40), varlen=True, used=(16, 0, 18), accumulators=3),
}


@pytest.mark.parametrize("name", CASES)
def test_preprocess_on_every_thread(name):
    torch.manual_seed(0)
    case, heads, keep = CASES[name], 2, 0.75
    dv, m, batch = case.head_dim_v, case.tile.tile_m, len(case.lengths)
    longest, total = max(case.lengths), sum(case.lengths)
    features = {"varlen": case.varlen, "seqused_q": case.used is not None, "lse_grad": case.lse_grad}
    traits = Traits("backward_preprocess", "sm80", "fp16", case.head_dim, dv, **features)
    assert case.tile.reject(traits, "sm80") is None
    plane = (heads,) if case.varlen else (batch, heads)
    tokens = (total,) if case.varlen else (batch, longest)
    do, o = (torch.randn(*tokens, heads, dv).half() for _ in range(2))
    lse = torch.randn(*plane, tokens[-1])
    lse[..., 3::7], lse[..., 5::11] = -math.inf, math.inf
    dlse = torch.randn(*plane, tokens[-1]) if case.lse_grad else None
    rows = (total // m + batch if case.varlen else -(-longest // m)) * m
    shapes = {"mLSElog2": (*plane, rows), "mMinusD": (*plane, rows)}
    shapes["mDQaccum"] = (case.accumulators, *plane, rows * padded(case.head_dim))
    found, expected = ({x: torch.full(shape, math.nan) for x, shape in shapes.items()} for _ in range(2))
    starts = int32(0, *itertools.accumulate(case.lengths)) if case.varlen else None
    used = int32(*case.used) if case.used else None

    kernel = BackwardPreprocess(traits, case.tile)
    tensors = (do, o, lse, dlse, *found.values(), torch.zeros(case.tile.rows), starts, used)
    run(preprocess, *tensors, int32(batch, heads, longest), torch.tensor([keep]), constants=(kernel,))
    seqlens = Seqlens(starts, starts, used, None, longest, longest)
    inputs = {"mDO": do, "mO": o, "mLSE": lse, "mDLSE": dlse, "seqlens": seqlens, "keep_prob": keep}
    backward_workspace.preprocess(traits, case.tile, SimpleNamespace(**inputs, **expected))
    for x in shapes:
        rtol = 0 if x == "mDQaccum" else 1e-5
        torch.testing.assert_close(found[x], expected[x], rtol=rtol, atol=rtol, equal_nan=True)


@cute.jit
def zero_out_of_bounds_rows(gradient: cute.Tensor, ends: cute.Tensor, blocks: Constexpr, kernel: Constexpr):
    for block in cutlass.range(blocks, unroll=1):
        for thread in cutlass.range(kernel.tile.num_threads, unroll=1):
            kernel.zero_out_of_bounds_rows(gradient, ends, block, blocks, thread)


@pytest.mark.parametrize("ends", [(0, 9), (3, 3, 5, 7), (9, 9), (0, 0), (0, 4, 8), (2, 9)])
def test_only_out_of_bounds_rows_become_zero(ends):
    gradient = torch.full((9, 3, 24), math.nan).half()
    kernel = BackwardPreprocess(Traits("backward_preprocess", "sm80", "fp16", 24, varlen=True), T(16, 4, 32))
    run(zero_out_of_bounds_rows, gradient, int32(*ends), constants=(4, kernel))
    owned = gradient[ends[0] : ends[-1]]
    assert owned.isnan().all() and (gradient == 0).sum() + owned.numel() == gradient.numel()


@given(st.integers(1, 32), st.integers(1, 32), st.sampled_from((16, 32, 48, 64, 80, 96, 112, 128, 192, 256)))
def test_a_preprocess_tile_for_every_main_kernel(head_dim, head_dim_v, tile_m):
    traits = Traits("backward_preprocess", "sm80", "bf16", 8 * head_dim, 8 * head_dim_v)
    tile = BackwardPreprocessTile.of(traits, tile_m)
    assert tile.tile_m == tile_m and tile.reject(traits, "sm86") is None
    assert tile.threads_per_row(traits) * tile.vectors(traits) * 8 >= traits.head_dim_v
    assert tile.passes(traits) * tile.rows_at_once(traits) >= tile.rows


# ---- convert ----


class HostConvert(BackwardConvert):
    """Stores single elements to shared memory, since the CPU has no stmatrix."""

    @cute.jit
    def to_shared(self, acc: cute.Tensor, s_dq: cute.Tensor, scale: Float32, thread: Int32) -> None:
        target = layouts.transposed(s_dq) if cutlass.const_expr(self.tile.dq_transposed) else s_dq
        mine = self.tiled_mma().get_slice(thread).partition_C(cute.make_identity_tensor(target.shape))
        for i in cutlass.range_constexpr(cute.size(acc)):
            target[mine[i]] = Float16(acc[i] * scale)


@cute.jit
def convert(
    mDQaccum: cute.Tensor,
    mDQ: cute.Tensor,
    shared: cute.Tensor,
    cu_seqlens: cute.Tensor | None,
    seqused: cute.Tensor | None,
    sizes: cute.Tensor,
    scale: cute.Tensor,
    kernel: Constexpr,
):
    """Run every CTA and thread of the kernel, one step at a time."""
    tile, varlen = kernel.tile, kernel.traits.varlen
    seqlens = Seqlens(cu_seqlens, cu_seqlens, seqused, None, sizes[2], sizes[2])
    s_dq = cute.make_tensor(shared.iterator, kernel.smem_layout())
    for i in cutlass.range(sizes[0] * sizes[1], unroll=1):
        batch, head = i // sizes[1], i % sizes[1]
        info = SeqlenInfo.read(seqlens, batch)
        exist = existing_rows(cu_seqlens, mDQ, batch)
        for row0 in cutlass.range(0, exist, tile.tile_m, unroll=1):
            query_tile = QueryTile(row0, head, head, batch, info)
            padded0 = padded_row0(seqlens, info, batch, tile.tile_m) + row0
            if row0 < info.seqlen_q:
                for thread in cutlass.range(tile.mma_threads, unroll=1):
                    kernel.to_shared(
                        kernel.load(mDQaccum, query_tile, padded0, 0, thread), s_dq, scale[0], thread
                    )
            rows = sequence(mDQ, batch, head, info.offset_q, varlen)
            for thread in cutlass.range(tile.mma_threads, unroll=1):
                used = info.seqlen_q - row0
                kernel.store_rows(s_dq, rows, 0, row0, used, exist - row0, thread)


@cute.jit
def register_order(out: cute.Tensor, traits: Constexpr, tile: Constexpr):
    """out[thread, i] = row * columns + column of register i of the thread's accumulator."""
    mma, shape = dq.mma_dq(traits, tile), dq.accumulator_shape(traits, tile)
    for thread in cutlass.range(tile.mma_threads, unroll=1):
        position = mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        for i in cutlass.range_constexpr(cute.size(position)):
            out[thread, i] = position[i][0] * shape[1] + position[i][1]


def elements_in_memory(traits: Traits, tile) -> tuple[torch.Tensor, torch.Tensor]:
    """(query, column) of every float of a query block's accumulator."""
    size, vector = dq.block_floats(traits, tile) // tile.mma_threads, tile.dq_vector
    order = torch.zeros(tile.mma_threads, size, dtype=torch.int32)
    run(register_order, order, constants=(traits, tile), arch=ARCH[traits.arch])
    thread, i = torch.arange(tile.mma_threads).unsqueeze(1), torch.arange(size).unsqueeze(0)
    elements = torch.empty(order.numel(), dtype=torch.int32)
    position = thread // 32 * 32 * size + (i // vector * 32 + thread % 32) * vector + i % vector
    elements[position] = order
    columns = dq.accumulator_shape(traits, tile)[1]
    rows, cols = (elements // columns).long(), (elements % columns).long()
    return (cols, rows) if tile.dq_transposed else (rows, cols)


CONVERTS = {
    "batched": ("sm80-warps-2x2", (33, 33), None, False),
    "varlen": ("sm80-warps-1x4", (16, 0, 15, 17), None, True),
    "used": ("sm90", (150, 150, 150), (70, 3, 0), False),
    "along-m": ("sm90-along-m", (130,), None, False),
    "along-n": ("sm90-along-n", (65, 63), None, True),
    "transposed": ("sm90-transposed", (81, 20), (81, 19), True),
}


@pytest.mark.parametrize("name", CONVERTS)
def test_convert_on_every_thread(name):
    torch.manual_seed(0)
    order, lengths, used, varlen = CONVERTS[name]
    arch, head_dim, tile = ORDERS[order]
    traits = Traits("backward_convert", arch, "fp16", head_dim, varlen=varlen, seqused_q=used is not None)
    batch, longest, total, heads, scale, m = len(lengths), max(lengths), sum(lengths), 2, 0.375, tile.tile_m
    plane = (heads,) if varlen else (batch, heads)
    blocks = total // m + batch if varlen else -(-longest // m)
    accumulators = torch.randn(3, *plane, blocks, m, padded(head_dim))
    rows, cols = elements_in_memory(traits, tile)
    memory = accumulators[..., rows, cols].reshape(3, *plane, -1).contiguous()
    tokens = (total,) if varlen else (batch, longest)
    out, expected = (torch.full((*tokens, heads, head_dim), math.nan).half() for _ in range(2))
    starts = int32(0, *itertools.accumulate(lengths)) if varlen else None
    used = int32(*used) if used else None

    given = (memory, out, torch.zeros(m * padded(head_dim)).half(), starts, used)
    sizes, kernel = int32(batch, heads, longest), HostConvert(traits, tile)
    run(convert, *given, sizes, torch.tensor([scale]), constants=(kernel,), arch=ARCH[arch])
    arguments = {"mDQ": expected, "mDQaccum": accumulators.reshape(3, *plane, -1), "scale": scale}
    seqlens = Seqlens(starts, starts, used, None, longest, longest)
    backward_workspace.convert(traits, tile, SimpleNamespace(**arguments, seqlens=seqlens))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@cute.jit
def stores(values: cute.Tensor, coordinates: cute.Tensor, kernel: Constexpr):
    """For each thread: the elements in its copy's source registers, and the elements at its copy's target addresses."""
    tile, shape = kernel.tile, dq.accumulator_shape(kernel.traits, kernel.tile)
    mma = kernel.tiled_mma()
    store, coords = kernel.store_copy(mma), cute.make_identity_tensor(shape)
    for thread in cutlass.range(tile.mma_threads, unroll=1):
        own = mma.get_slice(thread).partition_C(coords)
        acc = dq.make_accumulator(mma, kernel.traits, tile)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = Float32(own[i][0] * shape[1] + own[i][1])
        sources, target = store.get_slice(thread).retile(acc), store.get_slice(thread).partition_D(coords)
        for i in cutlass.range_constexpr(cute.size(acc)):
            values[thread, i] = sources[i]
            coordinates[thread, i] = Float32(target[i][0] * shape[1] + target[i][1])


@pytest.mark.parametrize("name", [name for name in ORDERS if name.startswith("sm90")])
def test_stmatrix_stores_every_element_at_its_coordinates(name):
    """stmatrix.x4 by its definition: lane l's address is of row l % 8 of matrix l // 8, 8 elements long.

    Register r of lane l has elements 2 (l % 4) and the next one of row l // 4 of matrix r; transposed, of that column.
    """
    arch, head_dim, tile = ORDERS[name]
    kernel = BackwardConvert(Traits("backward_convert", arch, "fp16", head_dim), tile)
    size = dq.block_floats(kernel.traits, tile) // tile.mma_threads
    values, coordinates = (torch.full((tile.mma_threads, size), -1.0) for _ in range(2))
    run(stores, values, coordinates, constants=(kernel,), arch=ARCH[arch])

    lane, value = torch.arange(32).unsqueeze(1), torch.arange(8).unsqueeze(0)
    matrix, pair = value // 2, 2 * (lane % 4) + value % 2
    row, column = (pair, lane // 4) if tile.dq_transposed else (lane // 4, pair)
    written = coordinates.view(-1, 32, size // 8, 8).transpose(1, 2)[:, :, 8 * matrix + row, column]
    assert torch.equal(written, values.view(-1, 32, size // 8, 8).transpose(1, 2))


@pytest.mark.parametrize(
    "rest", ["d64", "d64-bias_bf16", "d128-bias_bf16-bias_grad", "d128-causal-dropout", "d256-varlen"]
)
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_every_default_has_a_preprocess_and_a_convert(arch, rest):
    main = registry.lookup(Traits.parse(f"backward-{arch}-bf16-{rest}"), target="sm90")
    for traits, tile in kernels_of(main):
        assert registry.lookup(traits, tile, "sm90").tile == tile
