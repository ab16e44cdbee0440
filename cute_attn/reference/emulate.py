"""Computes a kernel's score tiles on the CPU: its MMA tiling and epilogues, for every thread, compiled for the host.

The code between a kernel's two matrix products also compiles for the host. Here it runs thread by thread, on products
that torch computed, in tiles that may be transposed.

The emulation runs this code of the kernels: lengths (``SeqlenInfo``); the visited blocks, and which of them are masked
(``BlockRange``); the query and key of each element of a thread's accumulator (the tiled MMA's partition, ``ScoreMap``);
all epilogues with their derivatives (mask, softcap, ALiBi, bias and its gradient, users', dropout with Philox); the
online softmax's arithmetic; and in a backward P from the LSE and dS from P.

It replaces the following code, whose errors it cannot show. Loops over batches, heads, blocks and threads replace
schedulers, warp roles, pipelines, speculation and replay. Loads, stores, shared-memory layouts, both matrix products (P
in fp16) and the reduction of row maxima and sums over threads are the emulator's: one thread has a whole row.
Exact functions replace approximate instructions. ``tests/gpu`` compares whole kernels.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr
from cutlass.torch import dtype as to_torch_dtype
from torch import Tensor

from cute_attn import reference
from cute_attn.device.fakes import plain
from cute_attn.device.math import convert_to_16_bits
from cute_attn.device.probabilities import probabilities, score_gradient
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.epilogues.tangents import RowTangents
from cute_attn.traits import Traits
from layouts.model import no_arguments


@dataclass(frozen=True)
class Emulated:
    """A forward's scores and outputs, computed by the emulated threads.

    Attributes:
        scores: float32 (batch, nheads, max_seqlen_q, max_seqlen_k); -inf where a mask hides the key, and NaN where no
            block was visited.
        dropped: bool, of the shape of scores: True for visible elements that dropout drops.
        visits: int32 (batch, nheads, query blocks, key blocks): UNVISITED, UNMASKED or MASKED; with
            packed heads (batch, packs of heads, ...).
        out: float32 (batch, nheads, max_seqlen_q, head_dim_v), NaN where no thread wrote; P was rounded to fp16.
        lse: float32 (batch, nheads, max_seqlen_q), NaN where no thread wrote.
        out_dot, lse_dot: tangents of out and lse, of their shapes, if they were computed; P S_dot was rounded to fp16.
    """

    scores: Tensor
    dropped: Tensor
    visits: Tensor
    out: Tensor
    lse: Tensor
    out_dot: Tensor | None = None
    lse_dot: Tensor | None = None


@dataclass(frozen=True)
class EmulatedGradients:
    """A backward's P and score gradients, computed by the emulated threads.

    Attributes:
        p: float32 (batch, nheads, max_seqlen_q, max_seqlen_k), rounded to fp16; dropped elements are 0.
        scores: float32, of p's shape: gradients of softmax_scale * q k^T, without the factor 1 / (1 - dropout_p).
        visits: int32 (batch, nheads, query blocks, key blocks): UNVISITED, UNMASKED or MASKED. In unvisited blocks p
            and scores are 0.
    """

    p: Tensor
    scores: Tensor
    visits: Tensor


def scores_on_host(kernel: Any, products: Tensor, softmax_scale: float, inputs: ScoreInputs) -> Tensor:
    """The scores that a kernel's epilogues and mask compute from q k^T.

    Args:
        kernel: a forward kernel from ``registry.lookup``, without varlen.
        products: q k^T, float32 (batch, nheads, seqlen_q, seqlen_k), on the CPU.
        softmax_scale: see ``attention``.
        inputs: the epilogues' arguments.

    Returns:
        the scores, of the shape of ``products``; -inf where the mask hides a key.
    """
    values = torch.zeros(*products.shape[:2], products.shape[3], 1)
    scores = attend_on_host(kernel, products, values, softmax_scale, inputs).scores
    return scores.masked_fill(scores.isnan(), -torch.inf)


def scores_by_definition(
    traits: Traits, products: Tensor, softmax_scale: float, inputs: ScoreInputs
) -> Tensor:
    """The expected result of :func:`scores_on_host`, from :mod:`cute_attn.reference`, in the products' dtype."""
    coords = all_coords(traits, products.shape)
    return reference.modify_scores(products * softmax_scale, coords, features_of(traits), inputs)


def features_of(traits: Traits) -> reference.Features:
    """The traits' features in the form that the reference accepts."""
    users = tuple(user_epilogue(name).reference for name in traits.epilogues)
    return reference.Features(traits.mask, traits.dropout, users)


def all_coords(traits: Traits, shape: Sequence[int]) -> reference.ScoreCoords:
    """Coordinates of all scores (batch, nheads, seqlen_q, seqlen_k), for sequences of full length."""
    index = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(shape))
    batch, head, query, key = index
    _, nheads, seqlen_q, seqlen_k = shape
    return reference.ScoreCoords(
        *(batch, head, query, key, nheads, seqlen_q, seqlen_k, seqlen_q, seqlen_k, traits.top_left)
    )


def attend_on_host(
    kernel: Any,
    products: Tensor,
    values: Tensor,
    softmax_scale: float,
    inputs: ScoreInputs,
    lengths: reference.Lengths = reference.FULL_LENGTHS,
    dots: tuple[Tensor, Tensor] | None = None,
) -> Emulated:
    """Run a forward kernel's per-thread code on given products, in the emulator's loop over blocks.

    Args:
        kernel: any object with a forward kernel's ``epilogues``, ``tile`` (tile_m, tile_n and, optionally, pack_heads)
            and ``tiled_mma()`` or ``mma_qk()``.
        products: q k^T, float32 (batch, nheads, max_seqlen_q, max_seqlen_k), on the CPU.
        values: V for each query head, float32 (batch, nheads, max_seqlen_k, head_dim_v); of packed heads only V of the
            first is read.
        softmax_scale: see ``attention``.
        inputs: the epilogues' arguments, with tensors broadcast by stride 0, as operators pass them.
        lengths: lengths of the sequences. cu_seqlens give only lengths: products are not packed.
        dots: for a kernel of op ``jvp``, the tangents of products and values.
    """
    max_seqlen_q, heads = products.shape[2], packed_heads(kernel)
    given = {"products": _pack(products, heads), "values": values[:, ::heads]}
    if dots is not None:
        given |= {"products_dot": _pack(dots[0], heads), "values_dot": dots[1][:, ::heads]}
    shape = given["products"].shape
    buffers = new_buffers(Buffers if dots is None else DualBuffers, kernel, shape, values.shape[3])
    for name, x in given.items():
        getattr(buffers, name)[:, :, : x.shape[2], : x.shape[3]] = x
    run(every_sequence, kernel, buffers, (lengths, max_seqlen_q, shape[3]), inputs, softmax_scale)
    score_scale = 1.0 if kernel.epilogues.has_bias else inputs.softcap or softmax_scale
    rows, seen = (slice(None), slice(None), slice(shape[2])), (..., slice(shape[2]), slice(shape[3]))
    unwritten = buffers.lse[rows].isnan()

    def result(name: str) -> Tensor | None:
        x = getattr(buffers, name, None)
        if x is None:
            return None
        return _unpack(
            x[rows].masked_fill(unwritten if x.dim() == 3 else unwritten.unsqueeze(-1), torch.nan), heads
        )

    return Emulated(
        _unpack(buffers.scores[seen] * score_scale, heads),
        _unpack(buffers.signs[seen] < 0, heads),
        buffers.visits,
        *map(result, ("out", "lse", "out_dot", "lse_dot")),  # type: ignore[arg-type]
    )


def _pack(x: Tensor, heads: int) -> Tensor:
    """(batch, nheads, queries, ...) -> (batch, packs of heads, rows, ...); a query's heads are consecutive rows."""
    return x.unflatten(1, (-1, heads)).transpose(2, 3).flatten(2, 3)


def _unpack(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (-1, heads)).transpose(2, 3).flatten(1, 2)


_FILLS = {**dict.fromkeys(("scores", "lse", "lse_dot"), torch.nan), "lse_log2": torch.inf}
"""Initial values of buffers that do not start at 0."""


def new_buffers(kind: Any, kernel: Any, shape: Sequence[int], columns: int = 0) -> Any:
    """Allocate buffers for scores of this shape and for ``columns`` of V, padded to whole blocks."""
    (batch, heads, rows, keys), tile = shape, kernel.tile
    blocks = (-(-rows // tile.tile_m), -(-keys // tile.tile_n))
    of_rows = (batch, heads, blocks[0] * tile.tile_m)
    padded = (*of_rows, blocks[1] * tile.tile_n)
    shapes = {
        **dict.fromkeys(("values", "values_dot"), (batch, heads, padded[3], columns)),
        **dict.fromkeys(("out", "out_dot"), (*of_rows, columns)),
        **dict.fromkeys(("lse", "lse_log2", "minus_d", "lse_dot"), of_rows),
        "visits": (batch, heads, *blocks),
    }

    def new(name: str) -> Tensor:
        fill = 0.0 if kind is GradientBuffers and name == "scores" else _FILLS.get(name, 0.0)
        dtype = torch.int32 if name == "visits" else torch.float32
        return torch.full(shapes.get(name, padded), fill, dtype=dtype)

    return kind._make(map(new, kind._fields))


def run(
    entry: Callable[..., None],
    kernel: Any,
    buffers: Any,
    rows: tuple[reference.Lengths, int, int],
    inputs: ScoreInputs,
    softmax_scale: float,
) -> None:
    """Compile ``entry`` for a kernel and run it. rows: the sequences' lengths, and the maximum of queries and keys."""
    (lengths, *longest), args = rows, kernel.epilogues.host_args(inputs)
    starts, used = (lengths.cu_seqlens_q, lengths.cu_seqlens_k), (lengths.seqused_q, lengths.seqused_k)
    seqlens = Seqlens(*starts, *used, *longest)
    given = tuple(x is not None for x in seqlens[:4])
    classes = tuple(type(modifier) for modifier in kernel.epilogues.modifiers)
    ranks: Any = type(buffers)(*((x.dtype, x.ndim) for x in buffers))
    host = _compiled(entry, ranks, kernel, classes, given)
    host.function(_values(host.fakes, (buffers, seqlens, args, float(softmax_scale))))


class _Host(NamedTuple):
    """A function compiled for the host, and the fake arguments with which it was compiled."""

    function: Callable[..., None]
    fakes: tuple


@functools.lru_cache(maxsize=64)
def _compiled(
    entry: Callable[..., None], ranks: Any, kernel: Any, classes: tuple[type, ...], given: tuple[bool, ...]
) -> _Host:
    """Compile the emulation of a kernel, for all sizes.

    ranks: dtype and rank of each buffer. classes: the epilogues' classes, since names may be registered again. given:
    which lengths are tensors.

    Tensors are passed as address, sizes and strides, since with TVM-FFI the code would be compiled twice.
    """
    buffers = ranks._make(plain(Int32 if dtype == torch.int32 else Float32, rank) for dtype, rank in ranks)
    lengths = (plain(Int32, 1) if present else None for present in given)
    seqlens = Seqlens(next(lengths), next(lengths), next(lengths), next(lengths), Int32(0), Int32(0))
    fakes = (buffers, seqlens, kernel.epilogues.fake_args(), Float32(0))

    @cute.jit
    def host(values: tuple):
        entry(*_arguments(fakes, values), kernel)

    with no_arguments():
        return _Host(cute.compile(host, _values(fakes), options="--gpu-arch sm_90a"), fakes)


def _values(fake: Any, given: Any = None) -> Any:
    """The values passed for an argument: a number, or a tensor's address and its sizes and strides that are dynamic.

    fake: the declared argument. given: the caller's argument, or None for placeholders to compile with.
    """
    if fake is None:
        return None
    if isinstance(fake, tuple):
        return tuple(_values(x, y) for x, y in zip(fake, given or (None,) * len(fake), strict=True))
    if not isinstance(fake, cute.Tensor):
        return fake if given is None else type(fake)(given)
    if given is not None:
        _check(fake, given)
    address = 0 if given is None else given.data_ptr()
    rank = len(fake.shape)
    sizes, strides = ((1,) * rank, (1,) * rank) if given is None else (given.shape, given.stride())
    numbers = [
        (Int32 if symbol.width == 32 else Int64)(number)
        for symbol, number in zip((*fake.shape, *fake.stride), (*sizes, *strides), strict=True)
        if not isinstance(symbol, int)
    ]
    pointer = make_ptr(fake.element_type, address, cute.AddressSpace.generic, fake._assumed_align)
    return (pointer, *numbers)


def _check(fake: cute.Tensor, given: Tensor) -> None:
    """Raise ValueError if a tensor does not match its declaration."""
    dtype = to_torch_dtype(fake.element_type)
    if given.dtype != dtype or given.data_ptr() % fake._assumed_align or given.ndim != len(fake.shape):
        raise ValueError(
            f"a tensor is {given.dtype} of {given.ndim} dimensions at address {given.data_ptr()}; accepted: {dtype} "
            f"of {len(fake.shape)} dimensions at multiples of {fake._assumed_align}"
        )
    for symbols, numbers in ((fake.shape, given.shape), (fake.stride, given.stride())):
        for symbol, number, size in zip(symbols, numbers, given.shape, strict=True):
            wrong = number != symbol if isinstance(symbol, int) else number % symbol.divisibility
            if wrong and (symbols is fake.shape or size > 1):  # the stride of a single element is arbitrary
                raise ValueError(
                    f"a tensor has shape {tuple(given.shape)} and strides {given.stride()}; accepted: {fake}"
                )


def _arguments(fake: Any, values: Any) -> Any:
    """Invert :func:`_values` in a trace: make tensors from addresses, sizes and strides."""
    if isinstance(fake, tuple):
        found = [_arguments(x, y) for x, y in zip(fake, values, strict=True)]
        return type(fake)._make(found) if hasattr(fake, "_make") else tuple(found)
    if not isinstance(fake, cute.Tensor):
        return values
    pointer, *numbers = values
    left = iter(numbers)
    shape, stride = (
        tuple(x if isinstance(x, int) else _assumed(next(left), x.divisibility) for x in symbols)
        for symbols in (fake.shape, fake.stride)
    )
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def _assumed(number: Any, divisibility: int) -> Any:
    return number if divisibility == 1 else cute.assume(number, divby=divisibility)


# ---- device code in loops over batches, heads, blocks, threads and rows, compiled for the host ----
# Threads compute the scores of a query block one after the other. Then the online softmax runs over each row's scores:
# it is the kernels' code for a thread that holds a whole row.

UNVISITED, UNMASKED, MASKED = 0, 1, 2


def packed_heads(kernel: Any) -> int:
    """Number of heads packed into one tile's rows."""
    return getattr(kernel.tile, "pack_heads", 1)


GradientBuffers = namedtuple("GradientBuffers", "products grad_p lse_log2 minus_d p scores visits")
"""The tensors of an emulated backward, for all batches and heads."""
Buffers = namedtuple("Buffers", "products values scores signs p visits out lse")
"""The tensors of an emulated forward. signs: -1 for visible elements that dropout drops."""
DualBuffers = namedtuple(
    "DualBuffers",
    "products values scores signs p visits out lse products_dot values_dot dots out_dot lse_dot",
)
"""``Buffers`` with tangents. dots: tangents of scores, then P (S_dot - center)."""


@dataclass(frozen=True)
class QueryBlockContext:
    """The state that the threads of a query block, of one head or one pack of heads, have in common."""

    buffers: Any  # Buffers, DualBuffers or GradientBuffers, of this batch and head
    state: ScoreState
    row0: Int32
    seqlen_q: Int32
    scale_log2: Float32
    kernel: Constexpr

    @property
    def transposed(self) -> bool:
        """True if accumulators are (keys, queries)."""
        return getattr(self.kernel, "transposed", False)

    @property
    def mma(self) -> cute.TiledMma:
        """The MMA of Q K^T, or if transposed of K Q^T."""
        return self.kernel.mma_qk() if hasattr(self.kernel, "mma_qk") else self.kernel.tiled_mma()

    @property
    def threads(self) -> int:
        """Number of threads that hold scores."""
        return self.mma.size

    def score_map(self, thread: Int32) -> ScoreMap:
        size = self.kernel.tile
        return ScoreMap.make(self.mma, size.tile_m, size.tile_n, thread, self.transposed, self.heads)

    def score_tile(self, thread: Int32, acc: cute.Tensor, col0: Int32) -> ScoreTile:
        return self.score_map(thread).tile(acc, self.row0 // self.heads, col0)

    @property
    def heads(self) -> int:
        """Number of heads packed into the tile's rows."""
        return packed_heads(self.kernel)

    @property
    def has_tangents(self) -> bool:
        return hasattr(self.buffers, "dots")

    def _ordered(self, query: Any, key: Any) -> tuple[Any, Any]:
        """A value for queries and one for keys in the order of the accumulator's modes."""
        return (key, query) if self.transposed else (query, key)

    def fragment(self, thread: Int32, dtype: Any) -> cute.Tensor:
        """A thread's registers for a score tile."""
        size = self.kernel.tile
        mine = self.mma.get_slice(thread)
        shape = mine.partition_shape_C(self._ordered(size.tile_m, size.tile_n))
        return cute.make_rmem_tensor(shape, dtype)

    def part(self, plane: cute.Tensor, thread: Int32, block: Int32) -> cute.Tensor:
        """The thread's elements of a key block of a (query, key) tensor, by the MMA's partition."""
        size = self.kernel.tile
        plane = cute.make_tensor(plane.iterator, cute.select(plane.layout, list(self._ordered(0, 1))))
        sizes = self._ordered(size.tile_m, size.tile_n)
        tile = cute.local_tile(plane, sizes, self._ordered(self.row0 // size.tile_m, block))
        return self.mma.get_slice(thread).partition_C(tile)

    def online_softmax(self) -> OnlineSoftmax:
        """The online softmax of one row, before its first block."""
        chain, threshold = self.kernel.epilogues, getattr(self.kernel.tile, "rescale_threshold", 0)
        options = (chain.may_mask_rows, None, threshold, chain.may_be_large)
        p_exponent, keeps = getattr(self.kernel, "p_exponent", 0), chain.maxima is not None
        return OnlineSoftmax.make(1, self.scale_log2, *options, p_exponent, Float16, keeps)

    def row_map(self, row: Int32) -> ScoreMap:
        """The map of a thread that holds one row of the buffers."""
        own = self.score_map(Int32(0))
        return replace(own, thr_row=row - self.row0, modes=replace(own.modes, rows=(0,)))


@cute.jit
def every_sequence(buffers: Any, seqlens: Seqlens, args: Any, scale: Float32, kernel: Constexpr):
    """Run all sequences of a forward, with tangents if there are buffers for them."""
    batches, packs, _, _ = buffers.products.shape
    heads: Constexpr = packed_heads(kernel)
    for batch in cutlass.range(batches):
        info = SeqlenInfo.read(seqlens, batch)
        for pack in cutlass.range(packs):
            chain = kernel.epilogues
            sizes = (pack * heads, packs * heads, scale, Int32(heads))
            context = chain.context(args, seqlens, info, batch, *sizes)
            state = chain.begin(args, context)
            plane = _plane(buffers, batch, pack)
            for row0 in cutlass.range(0, info.seqlen_q * heads, kernel.tile.tile_m):
                scale_log2 = chain.scale_log2(context.score_scale)
                ctx = QueryBlockContext(plane, state, row0, info.seqlen_q, scale_log2, kernel)
                _query_block(ctx, args, pack * heads, scale)


@cute.jit
def _plane(buffers: Any, batch: Int32, head: Int32) -> Any:
    return buffers._make(x[(batch, head, *[None] * (cute.rank(x) - 2))] for x in buffers)


@cute.jit
def _query_block(ctx: QueryBlockContext, args: Any, head: Int32, scale: Float32):
    size, chain = ctx.kernel.tile, ctx.kernel.epilogues
    end_row = cutlass.min(ctx.row0 + size.tile_m, ctx.seqlen_q * ctx.heads)
    queries = (ctx.row0 // ctx.heads, end_row // ctx.heads)
    blocks = chain.key_blocks(ctx.state, *queries, size.tile_n)
    for step in cutlass.range(blocks.begin, blocks.end):
        block = blocks.block(step)
        # On Hopper the first step is masked whatever its block is.
        first = chain.visits_lists and step == blocks.end - 1
        if step >= blocks.full_begin and step < blocks.full_end and not first:
            _scores(ctx, block, False)
        else:
            _scores(ctx, block, True, blocks.visit(step)[1])
    for row in cutlass.range(ctx.row0, end_row):
        _row(ctx, blocks, row, args, head, scale)


@cute.jit
def _scores(ctx: QueryBlockContext, block: Int32, masked: Constexpr, partial: Boolean | None = None):
    """Turn the products of a key block into scores, and tangents of products into those of scores."""
    chain, buffers = ctx.kernel.epilogues, ctx.buffers
    buffers.visits[ctx.row0 // ctx.kernel.tile.tile_m, block] = Int32(MASKED if masked else UNMASKED)
    for thread in cutlass.range(ctx.threads):
        acc, score_map = ctx.fragment(thread, Float32), ctx.score_map(thread)
        tile = ctx.score_tile(thread, acc, block * ctx.kernel.tile.tile_n)
        loaded = chain.load(ctx.state, tile)
        _copy(ctx.part(buffers.products, thread, block), acc)
        saved = chain.forward(ctx.state, tile, loaded, masked, partial)
        _copy(acc, ctx.part(buffers.scores, thread, block))
        if cutlass.const_expr(ctx.has_tangents):
            dot = ctx.fragment(thread, Float32)
            _copy(ctx.part(buffers.products_dot, thread, block), dot)
            chain.tangents(ctx.state, tile.of(score_map.view(dot)), saved)
            _copy(dot, ctx.part(buffers.dots, thread, block))
        if cutlass.const_expr(chain.dropout is not None):
            _drop(ctx, thread, block)


@cute.jit
def _drop(ctx: QueryBlockContext, thread: Int32, block: Int32):
    """Set ``signs`` to -1 for visible elements that dropout drops, else to 1."""
    chain, score_map, acc = ctx.kernel.epilogues, ctx.score_map(thread), ctx.fragment(thread, Float32)
    kept = ctx.fragment(thread, Float16)
    tile = score_map.tile(acc, ctx.row0, block * ctx.kernel.tile.tile_n)
    kept.fill(1.0)
    acc.fill(0.0)
    if cutlass.const_expr(ctx.has_tangents):
        chain.zero_dropped(chain.dropout_mask(ctx.state, tile), score_map.view(kept))
    else:
        chain.drop(ctx.state, tile, score_map.view(kept))
    chain.mask.forward(ctx.state.band, tile)
    for i in cutlass.range_constexpr(cute.size(acc)):
        dropped = (kept[i] == 0.0) & (acc[i] == 0.0)
        kept[i] = Float16(-1.0) if dropped else Float16(1.0)
    _copy(kept, ctx.part(ctx.buffers.signs, thread, block))


@cute.jit
def _copy(source: cute.Tensor, target: cute.Tensor):
    for i in cutlass.range(cute.size(source)):
        target[i] = target.element_type(source[i])


@cute.jit
def _row(ctx: QueryBlockContext, blocks: Any, row: Int32, args: Any, head: Int32, scale: Float32):
    """Compute O and LSE of a row, and their tangents, from its scores in all blocks (a ``BlockRange``)."""
    softmax, tangents = ctx.online_softmax(), None
    if cutlass.const_expr(ctx.has_tangents):
        tangents = RowTangents.make(1, ctx.kernel.epilogues.tangent_scale(scale))
    for i in cutlass.range(blocks.end - blocks.begin):
        block = blocks.block(blocks.end - 1 - i)
        if ctx.buffers.visits[ctx.row0 // ctx.kernel.tile.tile_m, block] == UNMASKED:
            _step(ctx, softmax, tangents, row, block, False)
        else:
            _step(ctx, softmax, tangents, row, block, True)
    _finish(ctx, softmax, tangents, row, args, head)


@cute.jit
def _step(
    ctx: QueryBlockContext,
    softmax: OnlineSoftmax,
    tangents: Any,  # RowTangents, or None
    row: Int32,
    block: Int32,
    masked: Constexpr,
):
    """Turn a row's scores in a block into P, and their tangents into P (S_dot - center); add the products with V."""
    chain, buffers, tile_n = ctx.kernel.epilogues, ctx.buffers, ctx.kernel.tile.tile_n
    scores = _of_block(buffers.scores, row, block, tile_n)
    acc = cute.make_rmem_tensor(cute.make_layout((1, tile_n)), Float32)
    _copy(scores, acc)
    unseen = softmax.row_max[0] == -Float32.inf
    factor = softmax.replace_max(0, softmax.max_to_use(0, softmax.block_max(acc, 0)), masked)
    softmax.exponentiate(acc, 0, masked)
    p = _of_block(buffers.p, row, block, tile_n)
    if cutlass.const_expr(tangents is not None):
        dots = _of_block(buffers.dots, row, block, tile_n)
        dot, guarded = cute.make_rmem_tensor(acc.layout, Float32), chain.tangents_may_be_nan(masked)
        _copy(dots, dot)
        tangents.set_center(0, tangents.sums(0, acc, dot, guarded), unseen)
        tangents.weigh(0, acc, dot, factor, guarded)
        _round(ctx, dot, dots, row, block)
    _round(ctx, acc, p, row, block)
    for d in cutlass.range(buffers.out.shape[1]):
        total = buffers.out[row, d] * factor
        for key in cutlass.range(block * tile_n, (block + 1) * tile_n):
            total = total + buffers.p[row, key] * buffers.values[key, d]
        buffers.out[row, d] = total
        if cutlass.const_expr(tangents is not None):
            moved = buffers.out_dot[row, d] * factor
            for key in cutlass.range(block * tile_n, (block + 1) * tile_n):
                moved = moved + buffers.dots[row, key] * buffers.values[key, d]
                moved = moved + buffers.p[row, key] * buffers.values_dot[key, d]
            buffers.out_dot[row, d] = moved


def _of_block(plane: cute.Tensor, row: Int32, block: Int32, tile_n: int) -> cute.Tensor:
    """A row's elements of a key block in a (query, key) tensor."""
    return cute.local_tile(plane[row, None], (tile_n,), (block,))


@cute.jit
def _round(ctx: QueryBlockContext, wide: cute.Tensor, target: cute.Tensor, row: Int32, block: Int32):
    """Store a row's P, or P (S_dot - center), in 16 bits, with dropout."""
    signs = _of_block(ctx.buffers.signs, row, block, ctx.kernel.tile.tile_n)
    for i in cutlass.range(cute.size(wide)):
        target[i] = Float32(Float16(wide[i]))
        if cutlass.const_expr(ctx.kernel.epilogues.dropout is not None):
            if signs[i] < 0.0:
                target[i] = Float32(0.0)


@cute.jit
def _finish(
    ctx: QueryBlockContext,
    softmax: OnlineSoftmax,
    tangents: Any,  # RowTangents, or None
    row: Int32,
    args: Any,
    head: Int32,
):
    """Normalize a row of O, and compute its LSE, their tangents and the greatest score."""
    chain, buffers, score_map = ctx.kernel.epilogues, ctx.buffers, ctx.row_map(row)
    rescale, row_sum = chain.rescale(ctx.state), softmax.row_sum[0]
    sinks = chain.sinks_of_rows(args, head, Int32(ctx.heads), score_map)
    if cutlass.const_expr(sinks is None):
        factor, lse = softmax.finish(0, row_sum, rescale)
    else:
        factor, lse = softmax.finish_with_sink(0, row_sum, rescale, sinks[0])
    buffers.lse[row] = lse
    if cutlass.const_expr(chain.maxima is not None):
        chain.maxima.store_row(ctx.state.maxima, softmax.seen[0], score_map, ctx.row0 // ctx.heads, 0)
    shift = Float32(0.0)
    if cutlass.const_expr(tangents is not None):
        moved = chain.sink_tangents_of_rows(args, head, score_map)
        buffers.lse_dot[row], shift = tangents.finish(
            0, softmax, row_sum, tangents.total[0], lse, sinks, moved
        )
    for d in cutlass.range(buffers.out.shape[1]):
        o = buffers.out[row, d] * factor
        buffers.out[row, d] = o
        if cutlass.const_expr(tangents is not None):
            buffers.out_dot[row, d] = buffers.out_dot[row, d] * factor - shift * o


# ---- the backward ----


@cute.jit
def every_key_block(buffers: GradientBuffers, seqlens: Seqlens, args: Any, scale: Float32, kernel: Constexpr):
    batches, nheads, _, _ = buffers.products.shape
    for batch in cutlass.range(batches):
        info = SeqlenInfo.read(seqlens, batch)
        for head in cutlass.range(nheads):
            chain, size = kernel.epilogues, kernel.tile
            context = chain.context(args, seqlens, info, batch, head, nheads, scale)
            state = chain.begin(args, context)
            plane = _plane(buffers, batch, head)
            for col0 in cutlass.range(0, info.seqlen_k, size.tile_n):
                blocks = chain.query_blocks(state, col0, col0 + size.tile_n, info.seqlen_q, size.tile_m)
                for step in cutlass.range(blocks.begin, blocks.end):
                    block = blocks.block(step)
                    row0, scale_log2 = block * size.tile_m, chain.scale_log2(context.score_scale)
                    ctx = QueryBlockContext(plane, state, row0, info.seqlen_q, scale_log2, kernel)
                    masked = (step < blocks.full_begin) | (step >= blocks.full_end)
                    visit = Int32(MASKED) if masked else Int32(UNMASKED)
                    plane.visits[block, col0 // size.tile_n] = visit
                    column, partial = col0 // size.tile_n, blocks.visit(step)[1]
                    for thread in cutlass.range(ctx.threads):
                        if cutlass.const_expr(not chain.visits_lists):
                            _differentiate(ctx, thread, column, masked)
                        elif masked:
                            _differentiate(ctx, thread, column, masked, partial)
                        else:
                            _differentiate(ctx, thread, column, masked)


@cute.jit
def _differentiate(
    ctx: QueryBlockContext, thread: Int32, block: Int32, masked: Boolean, partial: Boolean | None = None
):
    """Turn a thread's products into P, and dP into dS.

    The mask is a separate branch, so that all other code is compiled once for all blocks. Listed blocks, which have
    ``partial``, are an exception: the epilogues of a masked block differ.
    """
    chain, score_map, buffers = ctx.kernel.epilogues, ctx.score_map(thread), ctx.buffers
    acc, dp = ctx.fragment(thread, Float32), ctx.fragment(thread, Float32)
    p = ctx.fragment(thread, Float16)
    tile = score_map.tile(acc, ctx.row0, block * ctx.kernel.tile.tile_n)
    rows = cute.make_layout(len(tile.rows))
    lse_log2, minus_d = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
    for r in cutlass.range_constexpr(len(tile.rows)):
        row = tile.row0 + tile.rows[r]
        lse_log2[r], minus_d[r] = buffers.lse_log2[row], buffers.minus_d[row]
    loaded, dropout_mask = chain.load(ctx.state, tile), chain.dropout_mask(ctx.state, tile)
    _copy(ctx.part(buffers.products, thread, block), acc)
    listed: Constexpr = partial is not None
    saved = chain.forward(ctx.state, tile, loaded, listed, partial)
    if cutlass.const_expr(not listed):
        if masked:
            chain.mask.forward(ctx.state.band, tile)
    visible_keys = ctx.state.band.visible_keys if chain.may_be_large else None
    probabilities(tile, lse_log2, ctx.scale_log2, visible_keys)
    convert_to_16_bits(acc, p)
    _copy(ctx.part(buffers.grad_p, thread, block), dp)
    chain.zero_dropped(dropout_mask, score_map.view(p))
    chain.zero_dropped(dropout_mask, score_map.view(dp))
    score_gradient(tile.acc, score_map.view(dp), minus_d)
    chain.backward(ctx.state, tile.of(score_map.view(dp)), saved)
    _copy(p, ctx.part(buffers.p, thread, block))
    _copy(dp, ctx.part(buffers.scores, thread, block))
