"""The checks of a call: one sentence per error.

``check`` holds for every device, ``check_for_kernels`` for the CUDA kernels. Both read metadata only, so one
result holds for every call of the same metadata; lengths are read, and checked, only on the CPU.
"""

import itertools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.names import are_functions, user_epilogue
from cute_attn.host.call import DTYPE_NAMES, PYTORCHS, Call
from cute_attn.host.memory import (
    ALIGNMENT_BYTES,
    has_memory,
    is_broadcast,
    is_readable,
    may_be_aligned,
    overlap,
    overlaps_itself,
)
from cute_attn.host.values import check_dense, check_dtype, check_present, shown, wrong_shape
from cute_attn.traits import DROPOUTS, MASKS, MAX_HEAD_DIM, PRECISIONS, head_dim_multiple, head_dims_text

KERNEL_DTYPES = tuple(DTYPE_NAMES)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_INT32 = 2**31 - 1
# Kernels index with 32 bits. They add less than a tile to an index (none has 2**12 queries or keys), and under a window
# its bound, of up to UNBOUNDED.
_TILE = 2**12
MAX_SEQLEN = 2**31 - UNBOUNDED - 2 * _TILE
"""Maximum sequence length of the kernels."""
MAX_ROWS = 2**31 - 2 * _TILE
"""Maximum rows of packed sequences in the kernels, with each sequence padded to whole blocks."""
MAX_STEPS = 2**29
"""Maximum steps of a CTA, which counts its steps and may replay some. A step is a query block with a key block."""


# ---- checks on any device ----


def check(call: Call) -> None:
    """Raise TypeError or ValueError for the first wrong parameter, on any device."""
    _check_tensors(call)
    _check_shapes(call)
    _check_numbers(call)
    _check_lengths(call)
    _check_score_tensors(call)
    check_epilogues(call, call.max_seqlen_k)
    check_same_bits(call)


def check_same_bits(call: Call) -> None:
    """Raise for a call with same_bits and a feature that the kernels of that mode lack, on any device."""
    if not call.same_bits:
        return
    dims = call.q.shape[-1], call.keys[1].shape[-1]
    refused = {
        f"{call.q.dtype}": call.q.dtype not in (torch.float16, torch.bfloat16),
        f"head dims {dims[0]} and {dims[1]}, which are no multiples of 8": any(dim % 8 for dim in dims),
        "bias": call.bias is not None,
        "dropout_p": bool(call.dropout),
        "block_mask": call.lists_blocks,
        "seqused_q": call.seqused_q is not None,
        "cache_leftpad": call.cache_leftpad is not None,
        "return_softmax": call.return_softmax,
        "a top left mask": "top_left" in call.mask,
        "tile": bool(call.tile or call.backward_tile),
        "num_splits": call.num_splits != 0,
        f"kernel {call.kernel!r}": call.kernel not in ("", "sm90"),
        "classes of users": not are_functions(call.epilogue_names),
    }
    for what, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"same_bits is True with {what}; accepted: fp16 or bf16, head dims in multiples of 8, with masks "
                "aligned bottom right, window, softcap, ALiBi, sinks, functions, lengths, caches, pages and trees"
            )


def check_epilogues(call: Call, keys: int) -> None:
    """Raise for wrong arguments of users' epilogues. keys: maximum keys of a sequence."""
    if not call.epilogues:
        return
    inputs = call.score_inputs()
    for name in call.epilogue_names:
        epilogue = user_epilogue(name)
        epilogue.check(inputs)
        if call.q.is_cuda:
            sizes = {"batch": call.batch, "head": call.nheads, "query": call.max_seqlen_q, "key": keys}
            if not any(isinstance(x, torch.SymInt) for x in sizes.values()):
                epilogue.warn_of_indices(inputs, sizes)


def _check_tensors(call: Call) -> None:
    check_present(call.tensors(), ("q", "k", "v"))
    check_dtype("q", call.q, *FLOAT_DTYPES)
    for name, tensor in (("k", call.k), ("v", call.v)):
        check_dtype(name, tensor, call.q.dtype, of="q")


def _check_shapes(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    dims = "(total, heads, head_dim)" if call.varlen else "(batch, seqlen, heads, head_dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != (3 if call.varlen else 4):
            raise wrong_shape(name, tensor, dims)
    if not call.varlen and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]}; accepted: {q.shape[0]}, q's")
    if v.shape[:-1] != k.shape[:-1]:
        raise wrong_shape("v", v, f"{tuple(k.shape[:-1])} and a head_dim_v, as k")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}; accepted: {q.shape[-1]}, q's")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"q, k and v have head dims {q.shape[-1]} and {v.shape[-1]}; accepted: 1 or more")
    nheads, nheads_kv = call.nheads, k.shape[-2]
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k's {nheads_kv}")


# From here on float32 rounds to 1.
_ONE_IN_FLOAT32 = 1 - 2**-25


def _check_numbers(call: Call) -> None:
    check_scale(call.softmax_scale)
    check_softcap(call.softcap)
    if not 0 <= call.dropout_p < _ONE_IN_FLOAT32:
        raise ValueError(f"dropout_p is {call.dropout_p}; accepted: 0 <= dropout_p < 1, in float32 as well")
    if call.dropout_p and not call.dropout:
        raise ValueError(f"dropout_p is {call.dropout_p} and dropout empty; accepted: a name of a mask, or 0")
    for name, value, accepted in (
        ("mask", call.mask, MASKS),
        ("dropout", call.dropout, DROPOUTS),
        ("precision", call.precision, (*PRECISIONS, PYTORCHS) if call.q.dtype == torch.float32 else ()),
    ):
        if value and value not in accepted:
            names = "".join(f"{item!r}, " for item in accepted)
            raise ValueError(f"{name} is {value!r}; accepted: {names}or empty")
    for name in ("window_left", "window_right"):
        value = getattr(call, name)
        if not 0 <= value <= UNBOUNDED:
            raise ValueError(f"{name} is {value}; accepted: 0 to {UNBOUNDED}, which stands for no bound")


def _check_lengths(call: Call) -> None:
    for name, x in (("max_seqlen_q", call.q), ("max_seqlen_k", call.k)):
        value = getattr(call, name)
        if call.varlen and not 0 <= value <= _MAX_INT32:
            raise ValueError(f"{name} is {value}; accepted: 0 to {_MAX_INT32}")
        if not call.varlen and value != x.shape[1]:
            raise ValueError(f"{name} is {value}; accepted: {x.shape[1]}, {name[-1]}'s seqlen")
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q or cu_seqlens_k is missing; accepted: both, or neither")
    for side, x in (("q", call.q), ("k", call.k)):
        cu_seqlens, seqused = getattr(call, f"cu_seqlens_{side}"), getattr(call, f"seqused_{side}")
        rows: int | Sequence[int] | None = None if call.varlen else x.shape[1]
        if cu_seqlens is not None:
            name = f"cu_seqlens_{side}"
            check_starts(name, cu_seqlens)
            rows = check_cumulative(
                name, cu_seqlens, call.batch, x.shape[0], getattr(call, f"max_seqlen_{side}")
            )
        if seqused is not None:
            check_int32(f"seqused_{side}", seqused, call.batch)
            check_range(f"seqused_{side}", seqused, rows)


def check_starts(name: str, cu_seqlens: Any) -> None:
    """Raise TypeError or ValueError for cumulative lengths that do not give the number of sequences."""
    check_dense(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise wrong_shape(name, cu_seqlens, "(batch + 1,), cumulative lengths, the first 0")


def check_int32(name: str, tensor: Tensor, length: int) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is ``length`` contiguous int32 numbers."""
    check_dtype(name, tensor, torch.int32)
    if tuple(tensor.shape) != (length,):
        raise wrong_shape(name, tensor, f"({length},)")
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}; accepted: 1, contiguous")


def check_cumulative(
    name: str, cu_seqlens: Tensor, batch: int, rows: int, max_seqlen: int
) -> list[int] | None:
    """Raise unless these are cumulative lengths of ``batch`` sequences within ``rows`` and ``max_seqlen``.

    Returns the lengths, or None if they are not :func:`on_host` and so not read.
    """
    check_int32(name, cu_seqlens, batch + 1)
    if not on_host(cu_seqlens):
        return None
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] < 0 or bounds[-1] > rows or any(one < 0 for one in lengths):
        raise ValueError(
            f"{name} is {shown(bounds)}; accepted: rising numbers from 0 up to {rows}, the packed rows"
        )
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{name[-1]} is {max_seqlen}; accepted: {max(lengths)} or more, {name}'s longest"
        )
    return lengths


def check_range(name: str, values: Tensor, most: int | Sequence[int] | None, *, wait: bool = False) -> None:
    """Raise ValueError for a value below 0 or above ``most``: a bound for all, a bound per value, or None if unknown.

    wait: read the values even if :func:`on_host` is False, and wait for the device.
    """
    if most is None or not (wait or on_host(values)):
        return
    bounds = itertools.repeat(most) if isinstance(most, int | torch.SymInt) else most
    for b, (value, bound) in enumerate(zip(values.tolist(), bounds, strict=False)):
        if not 0 <= value <= bound:
            raise ValueError(f"{name}[{b}] is {value}; accepted: 0 to {bound}")


def on_host(x: Tensor) -> bool:
    """True if lengths in ``x`` can be checked without waiting for a device or tracing: real numbers on the CPU."""
    return x.device.type == "cpu" and has_memory(x)


def _check_score_tensors(call: Call) -> None:
    batch, nheads = call.batch, call.nheads
    slopes, bias, rng_state = call.alibi_slopes, call.bias, call.rng_state
    if call.sinks is not None:
        check_sinks(call.sinks, nheads, call.q.dtype)
    if slopes is not None:
        check_slopes(slopes, batch, nheads)
    if bias is not None:
        full = (batch, nheads, call.max_seqlen_q, call.max_seqlen_k)
        if (
            bias.dim() != 4
            or bias.shape[3] != full[3]
            or any(size not in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
        ):
            raise wrong_shape("bias", bias, f"{full}, where each may be 1, without leading dimensions too")
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(f"bias has dtype {bias.dtype}; accepted: {_list((*FLOAT_DTYPES, torch.bool))}")
    if call.dropout:
        if rng_state is None:
            raise ValueError(
                "rng_state is None; accepted: int64 (2,), seed and offset, where there is dropout"
            )
        check_dtype("rng_state", rng_state, torch.int64)
        if tuple(rng_state.shape) != (2,) or rng_state.stride(0) != 1:
            shape, stride = tuple(rng_state.shape), tuple(rng_state.stride())
            raise ValueError(f"rng_state has shape {shape}, stride {stride}; accepted: (2,), (1,)")


# Kernels divide fp32 numbers by the scale and by the softcap, which keep all quotients far from the bounds of fp32.
_LARGEST_FACTOR = 2.0**60
# Their tanh errs by 2e-7, and so a capped score by 1e-3 at most: no more than P rounds in 16 bits.
_LARGEST_SOFTCAP = 2.0**12


def check_scale(softmax_scale: float) -> None:
    """Raise ValueError unless kernels can compute with the scale in fp32."""
    if softmax_scale and not 1 / _LARGEST_FACTOR <= abs(softmax_scale) <= _LARGEST_FACTOR:
        accepted = "a finite number, 0 or from 2**-60 to 2**60 in magnitude"
        raise ValueError(f"softmax_scale is {softmax_scale}; accepted: {accepted}")


def check_softcap(softcap: float) -> None:
    """Raise ValueError unless kernels can compute with the softcap in fp32."""
    if softcap and not 1 / _LARGEST_FACTOR <= softcap <= _LARGEST_SOFTCAP:
        raise ValueError(f"softcap is {softcap}; accepted: a number from 2**-60 to 2**12, or 0 for none")


def check_slopes(slopes: Tensor, batch: int, nheads: int) -> None:
    """Raise ValueError unless ALiBi slopes are one number per head, or per sequence and head."""
    if tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise wrong_shape("alibi_slopes", slopes, f"({nheads},) or ({batch}, {nheads})")


def check_sinks(sinks: Tensor, nheads: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError unless sinks are one number per head, of ``dtype`` or a dtype of up to 32 bits."""
    accepted = tuple(dict.fromkeys((*DTYPE_NAMES, dtype)))
    check_dtype("sinks", sinks, *accepted)
    if tuple(sinks.shape) != (nheads,):
        raise wrong_shape("sinks", sinks, f"({nheads},), a number per head")


def _list(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


# ---- checks of the kernels' requirements ----


def check_for_kernels(call: Call, *, unaligned: bool = False) -> None:
    """Raise for unsupported dtypes, head dims, strides and sizes. Assumes :func:`check`.

    unaligned: accept rows of any head dim and strides, which are padded later.
    """
    if call.q.dtype not in KERNEL_DTYPES:
        raise TypeError(
            f"q has dtype {call.q.dtype}; accepted on CUDA: {_list(KERNEL_DTYPES)} "
            f"(on the CPU: {_list(FLOAT_DTYPES)})"
        )
    multiple = 1 if unaligned else head_dim_multiple(DTYPE_NAMES[call.q.dtype])
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        dim = tensor.shape[-1]
        if dim % multiple or dim > MAX_HEAD_DIM:
            which = "head_dim_v" if name == "v" else "head_dim"
            accepted = head_dims_text(multiple, MAX_HEAD_DIM)
            raise ValueError(f"{name} has {which} {dim}; accepted: {accepted}")
        if not unaligned:
            check_strides(name, tensor)
    _check_sizes(call)
    if call.alibi_slopes is not None:
        check_dtype("alibi_slopes", call.alibi_slopes, torch.float32)
        check_last_stride("alibi_slopes", call.alibi_slopes)
    if call.bias is not None:
        check_dtype("bias", call.bias, *DTYPE_NAMES)
        check_last_stride("bias", call.bias)


def _check_sizes(call: Call) -> None:
    for side, tensor, longest in zip("qk", (call.q, call.k), call.longest, strict=True):
        if call.varlen and tensor.shape[0] > MAX_ROWS:
            raise ValueError(f"{side} has {tensor.shape[0]} packed rows; accepted on CUDA: up to {MAX_ROWS}")
        if longest > MAX_SEQLEN:
            which = f"max_seqlen_{side} is" if call.varlen else f"{side} has seqlen"
            raise ValueError(f"{which} {longest}; accepted on CUDA: up to {MAX_SEQLEN}")
    check_count(f"q has {call.batch} sequences of {call.nheads} heads", call.batch * call.nheads)


def check_count(what: str, count: int, most: int = _MAX_INT32) -> None:
    """Raise if ``count`` exceeds ``most``. what: describes the count in the error."""
    if count > most:
        raise ValueError(f"{what}, {count} in all; accepted on CUDA: up to {most}")


def check_query_blocks(call: Call, kernel: Any) -> int:
    """The number of query blocks of a forward kernel; raises if it exceeds 32 bits."""
    queries = getattr(kernel.tile, "queries", kernel.tile.tile_m)
    packs = call.k.shape[-2] * -(-call.group // getattr(kernel.tile, "pack_heads", 1))
    if call.varlen and kernel.traits.arch == "sm90":  # its work tiles are the blocks of all sequences
        blocks = call.q.shape[0] // queries + call.batch
        each = f"rows in {call.batch} sequences, each padded to blocks of {queries}"
        check_count(f"q has {call.q.shape[0]} {each}", blocks * queries, MAX_ROWS)
        check_count(f"q has {packs} heads of {call.q.shape[0]} {each}: blocks", blocks * packs, MAX_ROWS)
        return blocks * packs
    blocks = -(-call.longest[0] // queries)
    what = (
        f"{call.stated('q')}{call.batch} sequences of {packs} heads of {blocks} blocks of {queries} queries"
    )
    check_count(what, call.batch * packs * blocks, MAX_ROWS)
    return call.batch * packs * blocks


def check_steps(call: Call, query_blocks: int, tile: Any, multiprocessors: int) -> None:
    """Raise if a CTA of a persistent kernel would count its steps beyond 32 bits.

    Args:
        query_blocks: number of query blocks of all heads and sequences.
        tile: the kernel's tile.
    """
    seen = call.longest[1]
    if call.mask.startswith("window"):
        seen = min(seen, call.window_left + call.window_right + tile.tile_m)
    key_blocks = -(-seen // tile.tile_n) + 1
    what = f"{call.stated('k')}up to {key_blocks} key blocks for each of {query_blocks} blocks of queries"
    steps = query_blocks * key_blocks // multiprocessors
    check_count(f"{what}: steps of each of {multiprocessors} multiprocessors", steps, MAX_STEPS)


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError for rows whose elements are not contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}; accepted: a last stride of 1")


def check_strides(name: str, tensor: Tensor) -> None:
    """Raise ValueError for rows that are not contiguous, or whose strides are not multiples of 16 bytes."""
    check_last_stride(name, tensor)
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and stride % (ALIGNMENT_BYTES // tensor.element_size()):
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())}; accepted: a last stride of 1 and multiples of "
                f"{ALIGNMENT_BYTES // tensor.element_size()} elements ({ALIGNMENT_BYTES} bytes) before it"
            )


def check_gradients(
    call: Call, grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Raise if a backward's inputs do not fit the call. Assumes :func:`check`."""
    out_shape, lse_shape = call.output_shapes()
    lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    for name, tensor, shape, dtype in (
        ("grad_out", grad_out, out_shape, call.q.dtype),
        ("grad_lse", grad_lse, lse_shape, lse_dtype),
        ("out", out, out_shape, call.q.dtype),
        ("lse", lse, lse_shape, lse_dtype),
    ):
        if tensor is None and name.startswith("grad"):
            continue
        check_dense(name, tensor)
        assert tensor is not None
        if tensor.device != call.q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {call.q.device}, where q is")
        if tuple(tensor.shape) != shape:
            raise wrong_shape(name, tensor, shape)
        check_dtype(name, tensor, dtype)


def check_out(call: Call, out: Tensor, *, rows: bool = False) -> None:
    """Raise if ``out`` cannot be written in place of a new output. Assumes that the call is checked.

    rows: True if kernels write it directly whenever they read q, k and v without padded copies.
    """
    wanted = {"device": call.q.device, "dtype": call.q.dtype, "shape": call.output_shapes()[0]}
    check_written("out", out, call.tensors(), rows=rows and call.q.is_cuda and call.aligned, **wanted)


def check_written(
    name: str, written: Any, others: Iterable[tuple[str, Tensor | None]], *, rows: bool = False, **wanted: Any
) -> None:
    """Raise if a result cannot be written to ``written``, a caller's tensor.

    Args:
        others: the call's other tensors, by name.
        rows: whether kernels write the tensor in place.
        wanted: the device, dtype and shape that the tensor must have.
    """
    check_like(name, written, **wanted)
    present = [(other, x) for other, x in others if x is not None]
    if torch.is_grad_enabled() and (written.requires_grad or any(x.requires_grad for _, x in present)):
        raise ValueError(f"{name} is given where autograd records; accepted: without gradients")
    check_apart(name, written, present)
    if rows:
        check_rows(name, written)


def check_like(name: str, tensor: Any, **wanted: Any) -> None:
    """Raise unless ``tensor`` is dense and has the wanted device, dtype and shape."""
    check_dense(name, tensor)
    for what, value in wanted.items():
        own = getattr(tensor, what)
        if own != value:
            own, value = (tuple(x) if isinstance(x, torch.Size) else x for x in (own, value))
            raise ValueError(f"{name} has {what} {own}; accepted: {value}")


def check_rows(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor that kernels cannot write in place, because of its strides or address."""
    if is_readable(written):
        return
    start = ""
    if not may_be_aligned(written):
        past = written.data_ptr() % ALIGNMENT_BYTES
        start = f" and starts {past} bytes past a multiple of {ALIGNMENT_BYTES}"
    raise ValueError(
        f"{name} has strides {tuple(written.stride())}{start}; accepted: rows of contiguous elements that start at "
        f"multiples of {ALIGNMENT_BYTES} bytes"
    )


def check_has_memory(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor of ``torch._efficientzerotensor``, which cannot be written."""
    if not torch.compiler.is_compiling() and written._is_zerotensor():
        raise ValueError(f"{name} is a tensor of zeros without memory; accepted: a tensor to write")


def check_writable(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor that an operator cannot write, because its memory does not contain its values."""
    check_has_memory(name, written)
    if not torch.compiler.is_compiling() and written.is_neg():
        raise ValueError(f"{name} is a view that torch negates where it is read; accepted: a tensor to write")


def check_apart(name: str, written: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if elements of a written tensor overlap each other or another argument.

    Only tensors with addresses are compared; those of compilers and function transforms have none.
    """
    check_has_memory(name, written)
    addressed = has_memory(written)
    if overlaps_itself(written) if addressed else is_broadcast(written):
        raise ValueError(
            f"{name} has shape {tuple(written.shape)} and strides {tuple(written.stride())}, so that elements share "
            "memory; accepted: elements of which each has its own"
        )
    for other, x in others:
        if addressed and has_memory(x) and overlap(written, x):
            raise ValueError(f"{name} shares memory with {other}; accepted: memory of its own")
