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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr
from cutlass.torch import dtype as to_torch_dtype
from torch import Tensor

from cute_attn import reference
from cute_attn.device.fakes import plain
from cute_attn.device.seqlen import Seqlens
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.reference.emulated import (
    Buffers,
    DualBuffers,
    GradientBuffers,
    every_sequence,
    packed_heads,
)
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
