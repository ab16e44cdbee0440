"""Which query heads the backward kernels visit for each head of dK and dV, by their own loops on the CPU.

Loads, products and stores are left out of the kernels; what a step computes, torch computes. dK and dV of all work
tiles, added up as the host adds them, and dQ are then autograd's.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.compiler import registry
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.host.backward import _sum_splits
from cute_attn.kernels.backward_sm80.kernel import BackwardSm80
from cute_attn.kernels.backward_sm80.params import BackwardParams as ParamsSm80
from cute_attn.kernels.backward_sm80.params import Gradients, MainloopContext
from cute_attn.kernels.backward_sm80.streamed import Streamed, StreamedContext
from cute_attn.kernels.backward_sm90.kernel import BackwardSm90
from cute_attn.kernels.backward_sm90.params import BackwardParams as ParamsSm90
from cute_attn.kernels.backward_sm90.producer import Producer
from cute_attn.kernels.backward_sm90.roles import BackwardRole
from cute_attn.tiles import BackwardSm80Tile, BackwardSm90Tile
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import KeyTile
from cute_attn.work.key_tiles import HeadSplits, KeyTiles

TILE = 64  # queries and keys


def traits(arch):
    return Traits("backward", arch, "bf16", 64, mask="causal")


@cute.jit
def note(out: cute.Tensor, values: Constexpr):
    """Another row of ``out``, a step as of :func:`visits`; out[0, 0] is how many there are."""
    n = out[0, 0] + 1
    for i in cutlass.range_constexpr(len(values)):
        out[n, i] = values[i]
    out[0, 0] = n


# ---- Hopper ----

SM90 = BackwardSm90(traits("sm90"), BackwardSm90Tile(TILE, TILE))


class Idle:
    """A pipeline that nobody waits for, and a broadcast that nobody reads."""

    def producer_wait(self, n: Int32) -> None: ...

    def producer_commit(self, n: Int32) -> None: ...

    def write(self, *item: Int32) -> None: ...


IDLE = Idle()


@dataclass(frozen=True)
class Items:
    """Work tiles in place of their broadcast: (key block, head of dK and dV, batch) of each."""

    tiles: cute.Tensor

    def holds(self, i: Int32) -> Boolean:
        return i < self.tiles.shape[0]

    def take(self, i: Int32, seqlens: Seqlens) -> KeyTile:
        block, head_dkv, batch = (self.tiles[i, j] for j in range(3))
        return KeyTile(block, Int32(0), head_dkv, batch, SeqlenInfo.read(seqlens, batch))


@dataclass(frozen=True)
class Shared:
    """Shared memory."""

    work: Any
    pipeline_k: Any = IDLE
    pipeline_v: Any = IDLE


class HeadOfKeys:
    """Rows of K and V as the head that is loaded."""

    def sequence(self, offset: Int32, head_kv: Int32, batch: Int32, part: int) -> Int32:
        return head_kv


@dataclass(frozen=True)
class NotedRole(BackwardRole):
    """Notes all steps; a role does not know of kv heads."""

    out: cute.Tensor

    def begin_head(self, key_tile: KeyTile, head: Int32) -> Int32:
        return head

    @cute.jit
    def step(self, head: Int32, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        note(self.out, (key_tile.batch, key_tile.block, key_tile.head_dkv, Int32(-1), head, block, n))


@dataclass(frozen=True)
class NotedProducer(Producer):
    """Notes all steps whose queries it loads, and the kv head of their keys."""

    out: cute.Tensor

    def load_keys(self, key_tile: KeyTile, n: Int32) -> None: ...

    @cute.jit
    def load_queries(
        self, key_tile: KeyTile, head: Int32, blocks: BlockRange, steps: Int32, n_v: Int32, first: Int32
    ) -> None:
        head_kv = self.of_keys(HeadOfKeys(), key_tile)
        for block in cutlass.range(blocks.begin, blocks.end, unroll=1):
            n = steps + (block - blocks.begin)
            note(self.out, (key_tile.batch, key_tile.block, key_tile.head_dkv, head_kv, head, block, n))


def params_sm90(mQ, mK, mDK, seqlen):
    seqlens = Seqlens(None, None, None, None, seqlen, seqlen)
    score_args = (Float32(1.0), ())
    splits = HeadSplits.make(mQ, mK, mDK)
    return ParamsSm90(seqlens, Float32(1.0), score_args, None, None, mQ.shape[-2], splits)


@cute.jit
def _role(mQ: cute.Tensor, mK: cute.Tensor, mDK: cute.Tensor, tiles: cute.Tensor, out: cute.Tensor):
    params = params_sm90(mQ, mK, mDK, mQ.shape[1])
    NotedRole(SM90, params, Shared(Items(tiles)), out).run()


@cute.jit
def _producer(mQ: cute.Tensor, mK: cute.Tensor, mDK: cute.Tensor, tiles: cute.Tensor, out: cute.Tensor):
    params, items, steps = params_sm90(mQ, mK, mDK, mQ.shape[1]), Items(tiles), Int32(0)
    producer = NotedProducer(SM90, params, None, None, Shared(IDLE), out)
    for i in cutlass.range(tiles.shape[0], unroll=1):
        steps = producer.load_block(items.take(i, params.seqlens), i, steps)


# ---- Ampere ----


@dataclass(frozen=True)
class Notes:
    """In place of shared memory: the CTA's key tile, and the heads of K and V that were loaded."""

    out: cute.Tensor
    batch: Int32
    block: Int32
    head_dkv: Int32
    k: cute.Tensor
    v: cute.Tensor
    scales: Any = None

    @cute.jit
    def step(self, head_k: Int32, head_v: Int32, head: Int32, block: Int32) -> None:
        head_kv = head_k if head_k == head_v else Int32(-2)
        step = self.out[0, 0]
        note(self.out, (self.batch, self.block, self.head_dkv, head_kv, head, block, step))


@dataclass(frozen=True)
class Nothing:
    """Operands of products that are left out."""

    mma_dkv: Any = None


@dataclass(frozen=True)
class NotedSm80(BackwardSm80):
    """Notes what its main loop is called for."""

    def operands(self, smem, thread):
        return Nothing()

    def load_keys(self, m, s, head_dim, key_tile, head_kv, key0, thread):
        s[0] = head_kv

    def zero_gradients(self, mma_dkv, thread):
        return Gradients(None, None)

    def query_loads(self, params, smem, key_tile, head, row0, thread):
        return head, head

    @cute.jit
    def main_loop(self, ctx: MainloopContext) -> None:
        for block in cutlass.range(ctx.blocks.begin, ctx.blocks.end, unroll=1):
            ctx.smem.step(ctx.smem.k[0], ctx.smem.v[0], ctx.load_q, block)


@dataclass(frozen=True)
class NotedStreamed(Streamed):
    """Notes what it visits; elements of Q, K and V are the numbers of their heads."""

    notes: Any

    def shared_memory(self):
        return self.notes

    def operands(self, smem, thread):
        return Nothing()

    def gradients(self, mma_dkv):
        return None

    @cute.jit
    def query_block(self, ctx: StreamedContext, block: Int32, dk: Constexpr, dv: Constexpr) -> None:
        self.notes.step(ctx.k[0], ctx.v[0], ctx.q[0], block)

    def store(self, *args): ...


SM80 = NotedSm80(traits("sm80"), BackwardSm80Tile(TILE, TILE, 4, 2, 2, 2))
STREAMED = BackwardSm80(
    Traits("backward", "sm80", "bf16", 512, mask="causal"),
    registry.lookup(Traits("backward", "sm80", "bf16", 512, mask="causal"), None, "sm80").tile,
)


@cute.jit
def _ampere(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mDK: cute.Tensor,
    tiles: cute.Tensor,
    out: cute.Tensor,
    cells: cute.Tensor,
    floats: cute.Tensor,
    streamed: Constexpr,
):
    kernel = STREAMED if streamed else SM80
    seqlens = Seqlens(None, None, None, None, mQ.shape[1], mQ.shape[1])
    work = floats[0, None, None, None]
    tensors = (mQ, mK, mK, mQ, work, work, floats, mDK, mDK)
    scalars = (Float32(1.0), Float32(1.0), Int64(0), mQ.shape[-2], HeadSplits.make(mQ, mK, mDK))
    params = ParamsSm80(*tensors, seqlens, *scalars, (Float32(1.0), ()), None, Int32(0), None)
    for i in cutlass.range(tiles.shape[0], unroll=1):
        block, head_dkv, batch = tiles[i, 0], tiles[i, 1], tiles[i, 2]
        key_tile = KeyTiles(Int32(0), head_dkv, batch, SeqlenInfo.read(seqlens, batch))
        notes = Notes(out, batch, block, head_dkv, cells[0, None], cells[1, None])
        if cutlass.const_expr(streamed):
            NotedStreamed(kernel, notes).run(params, key_tile, block * TILE)
        else:
            kernel.key_block(params, key_tile, block * TILE, notes)


# ---- all of them ----


def dynamic(x):
    return from_dlpack(x).mark_layout_dynamic(leading_dim=x.ndim - 1)


@functools.cache
def compiled(loop):
    """For any sizes; on the host there is one thread, and nothing to wait for."""
    heads, numbers = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    args = [heads] * 3 + [numbers] * 2
    options = []
    if loop in ("sm80", "streamed"):
        args += [numbers, torch.zeros(1, 1, 1, 1)]
        options = [loop == "streamed"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("thread_idx", "block_idx"):
            patch.setattr(cute.arch, name, lambda: (Int32(0), Int32(0), Int32(0)))
        patch.setattr(cute.arch, "make_warp_uniform", lambda x: x)
        for name in ("barrier", "cp_async_wait_group", "cp_async_commit_group"):
            patch.setattr(cute.arch, name, lambda *_: None)
        function = {"role": _role, "producer": _producer}.get(loop, _ampere)
        return cute.compile(function, *map(dynamic, args), *options)


def visits(loop, batch, seqlen, group, nheads_kv, splits):
    """[(batch, key block, head of dK and dV, kv head, query head, query block, step)] in their order."""
    blocks, heads_dkv = -(-seqlen // TILE), nheads_kv * splits
    numbers = [torch.arange(n, dtype=torch.int32) for n in (group * nheads_kv, nheads_kv, heads_dkv)]
    tensors = [x[None, None, :, None].expand(batch, seqlen, -1, 1).contiguous() for x in numbers]
    tiles = torch.tensor(
        list(itertools.product(range(blocks), range(heads_dkv), range(batch))), dtype=torch.int32
    )
    out = torch.full((1 + batch * blocks**2 * group * nheads_kv, 7), -1, dtype=torch.int32)
    out[0, 0] = 0
    args = [*tensors, tiles, out]
    if loop in ("sm80", "streamed"):
        args += [torch.full((2, 1), -1, dtype=torch.int32), torch.zeros(1, batch, group * nheads_kv, 1)]
    compiled(loop)(*map(dynamic, args))
    return [tuple(row) for row in out[1 : 1 + int(out[0, 0])].tolist()]


def gradients(found, q, k, v, grad_out, heads_dkv):
    """dQ, dK and dV of (seqlen, heads, head_dim) each, from what ``found`` visits."""
    scale, seqlen = q.shape[-1] ** -0.5, q.shape[1]
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    repeated = [x.repeat_interleave(group, 2) for x in (k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, repeated[0]) * scale
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    d = torch.einsum("bqhd,bhqk,bkhd->bhq", grad_out, p, repeated[1])
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(*x.shape[:2], heads_dkv, x.shape[3], dtype=x.dtype) for x in (k, v))
    for b, key, head_dkv, head_kv, head, query, _ in found:
        rows, keys = slice(query * TILE, (query + 1) * TILE), slice(key * TILE, (key + 1) * TILE)
        own_p = p[b, head, rows, keys]
        dp = grad_out[b, rows, head] @ v[b, keys, head_kv].T
        ds = own_p * (dp - d[b, head, rows, None]) * scale
        dq[b, rows, head] += ds @ k[b, keys, head_kv]
        dk[b, keys, head_dkv] += ds.T @ q[b, rows, head]
        dv[b, keys, head_dkv] += own_p.T @ grad_out[b, rows, head]
    return dq, *(_sum_splits(x, k.shape[2], None) for x in (dk, dv))


SHAPES = [(7, 1, 3), (7, 1, 2), (3, 2, 2), (5, 3, 4), (4, 2, 2), (5, 1, 5), (3, 2, 1)]
"""Query heads of a kv head, kv heads, splits."""


@pytest.mark.parametrize("group, nheads_kv, splits", SHAPES)
@pytest.mark.parametrize("loop", ["producer", "sm80", "streamed"])
def test_gradients_of_what_is_visited_are_autograds(loop, group, nheads_kv, splits):
    batch, seqlen = 2, 100
    torch.manual_seed(0)
    q, grad_out = (torch.randn(batch, seqlen, group * nheads_kv, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, seqlen, nheads_kv, 16, dtype=torch.float64) for _ in range(2))
    found = visits(loop, batch, seqlen, group, nheads_kv, splits)
    actual = gradients(found, q, k, v, grad_out, nheads_kv * splits)
    for x in (q, k, v):
        x.requires_grad_()
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(out.transpose(1, 2), (q, k, v), grad_out)
    for name, a, b in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=f"{name} of {loop}")
    assert [step for *_, step in found] == [*range(len(found))]


@pytest.mark.parametrize("group, nheads_kv, splits", SHAPES)
def test_all_roles_of_a_cta_take_the_same_steps(group, nheads_kv, splits):
    """Or they would wait for each other."""
    loaded, taken = (visits(loop, 2, 200, group, nheads_kv, splits) for loop in ("producer", "role"))
    assert [(*rest, head, query, step) for *rest, _, head, query, step in loaded] == [
        (*rest, head, query, step) for *rest, _, head, query, step in taken
    ]
