"""The parameters of one attention call and their checks: one sentence an error.

``AttentionParams`` is what the operator receives, with every default filled in. ``check`` holds for every device,
``check_for_kernels`` adds what the CUDA kernels need. Both read metadata only, so one result holds for every call of
the same metadata; lengths are read, and checked, only on the CPU.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.host.memory import overlap, overlaps_itself
from cute_attn.traits import (
    DROPOUTS,
    MASKS,
    MAX_HEAD_DIM,
    PRECISIONS,
    Traits,
    head_dim_multiple,
    head_dims_text,
)

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNEL_DTYPES = tuple(DTYPE_NAMES)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALIGNMENT_BYTES = 16
_MAX_INT32 = 2**31 - 1
# Kernels index with 32 bits. What they add to an index is less than a tile (none has 2**12 queries or keys) and under a
# window its bound, of up to UNBOUNDED.
_TILE = 2**12
MAX_SEQLEN = 2**31 - UNBOUNDED - 2 * _TILE
"""The longest sequence that the kernels compute."""
MAX_ROWS = 2**31 - 2 * _TILE
"""The most rows of packed sequences that the kernels compute, each sequence padded to whole blocks."""
MAX_STEPS = 2**29
"""The most steps of one CTA, a query block with a key block each; it counts them and may replay some."""


PYTORCHS = "pytorch"
"""A precision in a call that a compiler has traced: that of PyTorch's products when it runs."""


def pytorchs_precision() -> str:
    """The traits' precision that PyTorch multiplies fp32 matrices with on CUDA."""
    flags = torch.backends.cuda.matmul
    if hasattr(flags, "fp32_precision"):  # the other name raises where this one has been set
        return "tf32" if flags.fp32_precision == "tf32" else ""
    return "tf32" if flags.allow_tf32 else ""


class AttentionParams(NamedTuple):
    """Parameters of the operator, in the order of its schema.

    Attributes:
        q, k, v: (batch, seqlen, heads, dim), or packed (total, heads, dim) with cu_seqlens_q and cu_seqlens_k.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: int32 lengths, or None.
        alibi_slopes, bias, sinks: or None.
        rng_state: int64 (2,), seed and offset, where there is dropout.
        epilogue_tensors, epilogue_numbers: arguments of users' epilogues, laid out by ``epilogues``.
        max_seqlen_q, max_seqlen_k: the longest sequences.
        mask: of ``traits.MASKS``, or empty.
        window_left, window_right: ``UNBOUNDED`` for no bound; they count with a window mask only.
        softcap: 0 for none.
        dropout: of ``traits.DROPOUTS``, or empty.
        epilogues: users' epilogues, see :func:`pack_epilogues`.
        kernel: ``"ARCH"`` or ``"ARCH:VARIANT"`` of the kernel, empty for the newest that supports the call.
        tile: text of the tile's fields to change, empty for the default tile.
        deterministic: whether gradients repeat bit for bit.
        backward_tile: as ``tile``, for the backward's main kernel.
        precision: of ``traits.PRECISIONS``, or empty for that of q's dtype; or ``PYTORCHS``, see :meth:`resolved`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    rng_state: Tensor | None
    epilogue_tensors: Sequence[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    mask: str
    window_left: int
    window_right: int
    softcap: float
    dropout: str
    dropout_p: float
    epilogues: Sequence[str]
    epilogue_numbers: Sequence[float]
    return_softmax: bool
    kernel: str
    tile: str
    deterministic: bool = False
    backward_tile: str = ""
    precision: str = ""

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed one after the other rather than batched by a stride."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k as kernels take them: no packed sequence has more than all rows.

        As they are stated where results depend on that: the mem-efficient mask numbers scores by them, and users'
        epilogues may read them.
        """
        stated = self.max_seqlen_q, self.max_seqlen_k
        if not self.varlen or self.dropout == "mem_efficient" or self.epilogues:
            return stated
        return min(stated[0], self.q.shape[0]), min(stated[1], self.k.shape[0])

    def stated(self, side: str) -> str:
        """How an error about too many blocks of ``side``, "q" or "k", begins."""
        if self.varlen:
            return f"max_seqlen_{side} is {self.longest['qk'.index(side)]}, which makes "
        return f"{side} has "

    @property
    def nheads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.nheads // self.k.shape[-2]

    @property
    def epilogue_names(self) -> tuple[str, ...]:
        """Names of the users' epilogues."""
        return tuple(item.partition(":")[0] for item in self.epilogues)

    def output_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of out, lse and softmax; the last is (0,) where it was not asked for."""
        lse = (self.nheads, self.q.shape[0]) if self.varlen else (self.batch, self.nheads, self.q.shape[1])
        softmax = (self.batch, self.nheads, self.max_seqlen_q, self.max_seqlen_k)
        return (*self.q.shape[:-1], self.v.shape[-1]), lse, softmax if self.return_softmax else (0,)

    def score_inputs(self, grad_bias: Tensor | None = None) -> ScoreInputs:
        """The epilogues' inputs, tensors as the caller gave them; a backward writes ``grad_bias``."""
        return ScoreInputs(
            window_left=self.window_left,
            window_right=self.window_right,
            alibi_slopes=self.alibi_slopes,
            bias=self.bias,
            grad_bias=grad_bias,
            sinks=self.sinks,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            rng_state=self.rng_state,
            extra=unpack_epilogues(self.epilogues, self.epilogue_tensors, self.epilogue_numbers)
            if self.epilogues
            else {},
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its argument's name."""
        values: tuple[Any, ...] = self[:NUM_TENSORS]
        for name, value in zip(self._fields[:NUM_TENSORS], values, strict=True):
            if value is not None:
                yield name, value
        for i, value in enumerate(self.epilogue_tensors):
            yield f"epilogues' tensor {i}", value

    def resolved(self) -> "AttentionParams":
        """These, with the precision of PyTorch's products now where they follow it."""
        if self.precision != PYTORCHS:
            return self
        return self._replace(precision=pytorchs_precision())

    @property
    def scale_sign(self) -> int:
        """softmax_scale's sign: -1, 0 or 1."""
        return (self.softmax_scale > 0) - (self.softmax_scale < 0)

    def with_positive_scale(self) -> "AttentionParams":
        """The call as kernels compute it: q times the scale's sign, which is a copy where that is not 1.

        Online softmax takes maxima of q k^T, so the factor must be above 0.
        """
        sign = self.scale_sign
        if sign == 1:
            return self
        scale = abs(self.softmax_scale) if sign else 1.0
        return self._replace(q=(self.q * sign).contiguous(), softmax_scale=scale)

    @property
    def aligned(self) -> bool:
        """Whether rows of q, k and v are contiguous and whole 16 bytes that start at multiples of 16 bytes."""
        return all(rows_are_aligned(x) for x in (self.q, self.k, self.v))

    def traits(
        self,
        arch: str,
        variant: str = "",
        *,
        op: str = "forward",
        bias_grad: bool = False,
        aligned: bool = True,
    ) -> Traits:
        """Traits of a kernel of ``arch``; bias_grad: the backward computes the bias's gradient."""
        return Traits(
            op=op,
            arch=arch,
            dtype=DTYPE_NAMES[self.q.dtype],
            head_dim=int(self.q.shape[-1]),
            head_dim_v=int(self.v.shape[-1]),
            precision=self.precision,
            aligned=aligned,
            mask=self.mask,
            softcap=self.softcap > 0,
            alibi=self.alibi_slopes is not None,
            bias="" if self.bias is None else DTYPE_NAMES[self.bias.dtype],
            epilogues=self.epilogue_names,
            sinks=DTYPE_NAMES[self.sinks.dtype] if self.sinks is not None and op == "forward" else "",
            dropout=self.dropout,
            varlen=self.varlen,
            seqused_q=self.seqused_q is not None,
            seqused_k=self.seqused_k is not None,
            bias_grad=bias_grad,
            variant=variant,
        )


NUM_TENSORS = AttentionParams._fields.index("epilogue_tensors")
"""How many of the first parameters are single tensors, or None."""


# ---- users' epilogues through a schema of plain lists ----


def pack_epilogues(
    epilogues: Sequence[str] | Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[Tensor, ...], tuple[float, ...]]:
    """Epilogues and their arguments as lists that an operator's schema can carry.

    Each name is followed by a letter for each of its arguments: ``"my_bias:tf"`` takes a tensor and a number.
    """
    if isinstance(epilogues, str):
        raise TypeError(
            f"epilogues is {epilogues!r}; accepted: a tuple of names, or a dict of names to arguments"
        )
    if not isinstance(epilogues, Iterable):
        raise TypeError(f"epilogues is {epilogues!r}; accepted: names, or a dict of names to arguments")
    given = epilogues if isinstance(epilogues, Mapping) else dict.fromkeys(epilogues, ())
    names: list[str] = []
    tensors: list[Tensor] = []
    numbers: list[float] = []
    for name, arguments in given.items():
        letters = ""
        for value in arguments if isinstance(arguments, tuple | list) else (arguments,):
            if isinstance(value, Tensor):
                letters += "t"
                tensors.append(value)
            elif isinstance(value, int) and abs(value) > 2**53:
                raise ValueError(f"epilogues[{name!r}] has {value}; accepted: ints up to 2**53")
            elif isinstance(value, int | float):
                letters += "f" if isinstance(value, float) else "i"
                numbers.append(float(value))
            else:
                raise TypeError(f"epilogues[{name!r}] has {value!r}; accepted: tensors, floats and ints")
        names.append(f"{name}:{letters}" if letters else name)
    return tuple(names), tuple(tensors), tuple(numbers)


def unpack_epilogues(
    epilogues: Sequence[str], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> dict[str, tuple]:
    """The inverse of :func:`pack_epilogues`: for each name a tuple of its arguments."""
    next_tensor, next_number = iter(tensors), iter(numbers)
    take = {
        "t": lambda: next(next_tensor),
        "f": lambda: next(next_number),
        "i": lambda: int(next(next_number)),
    }
    pairs = (item.partition(":")[::2] for item in epilogues)
    return {name: tuple(take[letter]() for letter in letters) for name, letters in pairs}


# ---- checks on any device ----


def check(params: AttentionParams) -> None:
    """Raise TypeError or ValueError for the first wrong parameter, on any device."""
    _check_tensors(params)
    _check_shapes(params)
    _check_numbers(params)
    _check_lengths(params)
    _check_score_tensors(params)


def check_dense(name: str, tensor: Any) -> None:
    """Raise TypeError for what is no tensor, or a sparse or a nested one."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; accepted: a torch.Tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(f"{name} is {kind}; accepted: a dense torch.Tensor, of layout torch.strided")


def check_flags(**values: Any) -> None:
    """Raise TypeError for an argument that is neither True nor False."""
    for name, value in values.items():
        if not is_one_of(value, (False, True)):
            raise TypeError(f"{name} is {value!r}; accepted: False or True")


def is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether ``value`` is interchangeable with one of those: a tensor equals them, but may change."""
    return isinstance(value, Hashable) and value in frozenset(accepted)


def _check_tensors(params: AttentionParams) -> None:
    for name, tensor in params.tensors():
        check_dense(name, tensor)
        if tensor.device != params.q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {params.q.device}, where q is")
    if params.q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"q has dtype {params.q.dtype}; accepted: {_list(FLOAT_DTYPES)}")
    for name, tensor in (("k", params.k), ("v", params.v)):
        if tensor.dtype != params.q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {params.q.dtype}, q's")


def _check_shapes(params: AttentionParams) -> None:
    q, k, v = params.q, params.k, params.v
    dims = "(total, heads, head_dim)" if params.varlen else "(batch, seqlen, heads, head_dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != (3 if params.varlen else 4):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {dims}")
    if not params.varlen and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]}; accepted: {q.shape[0]}, q's")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; accepted: {tuple(k.shape[:-1])} and a head_dim_v, as k"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}; accepted: {q.shape[-1]}, q's")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"q, k and v have head dims {q.shape[-1]} and {v.shape[-1]}; accepted: 1 or more")
    nheads, nheads_kv = params.nheads, k.shape[-2]
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k's {nheads_kv}")


# From here on float32 rounds to 1.
_ONE_IN_FLOAT32 = 1 - 2**-25


def _check_numbers(params: AttentionParams) -> None:
    if not math.isfinite(params.softmax_scale):
        raise ValueError(f"softmax_scale is {params.softmax_scale}; accepted: a finite number")
    if not (math.isfinite(params.softcap) and params.softcap >= 0):
        raise ValueError(f"softcap is {params.softcap}; accepted: a finite number above 0, or 0 for none")
    if not 0 <= params.dropout_p < _ONE_IN_FLOAT32:
        raise ValueError(f"dropout_p is {params.dropout_p}; accepted: 0 <= dropout_p < 1, in float32 as well")
    if params.dropout_p and not params.dropout:
        raise ValueError(
            f"dropout_p is {params.dropout_p} and dropout empty; accepted: a name of a mask, or 0"
        )
    for name, value, accepted in (
        ("mask", params.mask, MASKS),
        ("dropout", params.dropout, DROPOUTS),
        ("precision", params.precision, (*PRECISIONS, PYTORCHS) if params.q.dtype == torch.float32 else ()),
    ):
        if value and value not in accepted:
            names = "".join(f"{item!r}, " for item in accepted)
            raise ValueError(f"{name} is {value!r}; accepted: {names}or empty")
    for name in ("window_left", "window_right"):
        value = getattr(params, name)
        if not 0 <= value <= UNBOUNDED:
            raise ValueError(f"{name} is {value}; accepted: 0 to {UNBOUNDED}, which stands for no bound")


def _check_lengths(params: AttentionParams) -> None:
    for name, x in (("max_seqlen_q", params.q), ("max_seqlen_k", params.k)):
        value = getattr(params, name)
        if params.varlen and not 0 <= value <= _MAX_INT32:
            raise ValueError(f"{name} is {value}; accepted: 0 to {_MAX_INT32}")
        if not params.varlen and value != x.shape[1]:
            raise ValueError(f"{name} is {value}; accepted: {x.shape[1]}, {name[-1]}'s seqlen")
    if (params.cu_seqlens_q is None) != (params.cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q or cu_seqlens_k is missing; accepted: both, or neither")
    rows = {"q": params.q.shape[0], "k": params.k.shape[0]}
    for side in ("q", "k"):
        cu_seqlens, seqused = getattr(params, f"cu_seqlens_{side}"), getattr(params, f"seqused_{side}")
        if cu_seqlens is not None:
            name = f"cu_seqlens_{side}"
            check_starts(name, cu_seqlens)
            _check_int32(name, cu_seqlens, params.batch + 1)
            if cu_seqlens.device.type == "cpu":
                _check_cumulative(name, cu_seqlens, rows[side], getattr(params, f"max_seqlen_{side}"))
        if seqused is not None:
            _check_int32(f"seqused_{side}", seqused, params.batch)


def check_starts(name: str, cu_seqlens: Any) -> None:
    """Raise TypeError or ValueError for cumulative lengths that do not say how many sequences there are."""
    check_dense(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {tuple(cu_seqlens.shape)}; accepted: (batch + 1,), cumulative lengths, the first 0"
        )


def _check_int32(name: str, tensor: Tensor, length: int) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: torch.int32")
    if tuple(tensor.shape) != (length,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: ({length},)")
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}; accepted: 1, contiguous")


def _check_cumulative(name: str, cu_seqlens: Tensor, rows: int, max_seqlen: int) -> None:
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] < 0 or bounds[-1] > rows or any(length < 0 for length in lengths):
        raise ValueError(f"{name} is {bounds}; accepted: rising numbers from 0 up to {rows}, the packed rows")
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{name[-1]} is {max_seqlen}; accepted: {max(lengths)} or more, {name}'s longest"
        )


def _check_score_tensors(params: AttentionParams) -> None:
    batch, nheads = params.batch, params.nheads
    slopes, bias, rng_state = params.alibi_slopes, params.bias, params.rng_state
    if params.sinks is not None:
        check_sinks(params.sinks, nheads, params.q.dtype)
    if slopes is not None and tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; accepted: ({nheads},) or ({batch}, {nheads})"
        )
    if bias is not None:
        full = (batch, nheads, params.max_seqlen_q, params.max_seqlen_k)
        if (
            bias.dim() != 4
            or bias.shape[3] != full[3]
            or any(size not in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
        ):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; accepted: {full}, where each may be 1 and the first be missing"
            )
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(f"bias has dtype {bias.dtype}; accepted: {_list((*FLOAT_DTYPES, torch.bool))}")
    if params.dropout:
        if rng_state is None:
            raise ValueError(
                "rng_state is None; accepted: int64 (2,), seed and offset, where there is dropout"
            )
        if rng_state.dtype != torch.int64:
            raise TypeError(f"rng_state has dtype {rng_state.dtype}; accepted: torch.int64")
        if tuple(rng_state.shape) != (2,) or rng_state.stride(0) != 1:
            shape, stride = tuple(rng_state.shape), tuple(rng_state.stride())
            raise ValueError(f"rng_state has shape {shape}, stride {stride}; accepted: (2,), (1,)")


def check_sinks(sinks: Tensor, nheads: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError for attention sinks but one number a head, of ``dtype`` or up to 32 bits."""
    accepted = tuple(dict.fromkeys((*DTYPE_NAMES, dtype)))
    if sinks.dtype not in accepted:
        raise TypeError(f"sinks has dtype {sinks.dtype}; accepted: {_list(accepted)}")
    if tuple(sinks.shape) != (nheads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; accepted: ({nheads},), a number a head")


def _list(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


# ---- checks of what the kernels need ----


def check_for_kernels(params: AttentionParams, *, unaligned: bool = False) -> None:
    """Raise for what the kernels do not support: dtypes, head dims, strides, sizes. Assumes :func:`check`.

    unaligned: some kernel takes rows of any head dim and strides.
    """
    if params.q.dtype not in KERNEL_DTYPES:
        raise TypeError(
            f"q has dtype {params.q.dtype}; accepted on CUDA: {_list(KERNEL_DTYPES)} "
            f"(on the CPU: {_list(FLOAT_DTYPES)})"
        )
    multiple = 1 if unaligned else head_dim_multiple(DTYPE_NAMES[params.q.dtype])
    for name, tensor in (("q", params.q), ("k", params.k), ("v", params.v)):
        dim = tensor.shape[-1]
        if dim % multiple or dim > MAX_HEAD_DIM:
            which = "head_dim_v" if name == "v" else "head_dim"
            accepted = head_dims_text(multiple, MAX_HEAD_DIM)
            raise ValueError(f"{name} has {which} {dim}; accepted: {accepted}")
        if not unaligned:
            _check_strides(name, tensor)
    _check_sizes(params)
    if params.alibi_slopes is not None:
        if params.alibi_slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes has dtype {params.alibi_slopes.dtype}; accepted: torch.float32")
        _check_last_stride("alibi_slopes", params.alibi_slopes)
    if params.bias is not None:
        if params.bias.dtype not in DTYPE_NAMES:
            raise TypeError(f"bias has dtype {params.bias.dtype}; accepted: {_list(tuple(DTYPE_NAMES))}")
        _check_last_stride("bias", params.bias)


def _check_sizes(params: AttentionParams) -> None:
    for side, tensor, longest in zip("qk", (params.q, params.k), params.longest, strict=True):
        if params.varlen and tensor.shape[0] > MAX_ROWS:
            raise ValueError(f"{side} has {tensor.shape[0]} packed rows; accepted on CUDA: up to {MAX_ROWS}")
        if longest > MAX_SEQLEN:
            which = f"max_seqlen_{side} is" if params.varlen else f"{side} has seqlen"
            raise ValueError(f"{which} {longest}; accepted on CUDA: up to {MAX_SEQLEN}")
    check_count(f"q has {params.batch} sequences of {params.nheads} heads", params.batch * params.nheads)


def check_count(what: str, count: int, most: int = _MAX_INT32) -> None:
    """Raise where ``count``, which ``what`` describes, is beyond the kernels' integers."""
    if count > most:
        raise ValueError(f"{what}, {count} in all; accepted on CUDA: up to {most}")


def check_steps(params: AttentionParams, query_blocks: int, tile: Any, multiprocessors: int) -> None:
    """Raise where a CTA of a persistent kernel would count its steps beyond 32 bits.

    Args:
        query_blocks: of all heads and sequences.
        tile: the kernel's.
    """
    seen = params.longest[1]
    if params.mask.startswith("window"):
        seen = min(seen, params.window_left + params.window_right + tile.tile_m)
    key_blocks = -(-seen // tile.tile_n) + 1
    what = f"{params.stated('k')}up to {key_blocks} key blocks for each of {query_blocks} blocks of queries"
    steps = query_blocks * key_blocks // multiprocessors
    check_count(f"{what}: steps of each of {multiprocessors} multiprocessors", steps, MAX_STEPS)


def _check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}; accepted: a last stride of 1")


def _check_strides(name: str, tensor: Tensor) -> None:
    _check_last_stride(name, tensor)
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and stride % (ALIGNMENT_BYTES // tensor.element_size()):
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())}; accepted: a last stride of 1 and multiples of "
                f"{ALIGNMENT_BYTES // tensor.element_size()} elements ({ALIGNMENT_BYTES} bytes) before it"
            )


def check_gradients(
    params: AttentionParams, grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Raise where a backward's inputs do not fit the call. Assumes :func:`check`."""
    out_shape, lse_shape, _ = params.output_shapes()
    lse_dtype = torch.float64 if params.q.dtype == torch.float64 else torch.float32
    for name, tensor, shape, dtype in (
        ("grad_out", grad_out, out_shape, params.q.dtype),
        ("grad_lse", grad_lse, lse_shape, lse_dtype),
        ("out", out, out_shape, params.q.dtype),
        ("lse", lse, lse_shape, lse_dtype),
    ):
        if tensor is None and name.startswith("grad"):
            continue
        check_dense(name, tensor)
        assert tensor is not None
        if tensor.device != params.q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {params.q.device}, where q is")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: {shape}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {dtype}")


def check_out(params: AttentionParams, out: Tensor) -> None:
    """Raise where ``out`` cannot be written in place of a new output. Assumes :func:`check`."""
    check_dense("out", out)
    wanted = {"device": params.q.device, "dtype": params.q.dtype, "shape": params.output_shapes()[0]}
    for what, value in wanted.items():
        own = getattr(out, what)
        if (tuple(own) if what == "shape" else own) != value:
            raise ValueError(f"out has {what} {own}; accepted: {value}")
    broadcast = is_broadcast(out)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for _, x in params.tensors())
    if out.requires_grad or differentiable:
        raise ValueError("out is given where autograd records; accepted: without gradients")
    regular = not out.is_cuda or not params.aligned or (rows_are_regular(out) and is_aligned(out))
    if broadcast or not regular:
        start = f"starts {out.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of {ALIGNMENT_BYTES}"
        raise ValueError(
            f"out has strides {tuple(out.stride())} and {start}; accepted: rows of contiguous elements that start at "
            f"multiples of {ALIGNMENT_BYTES} bytes"
        )


def is_broadcast(x: Tensor) -> bool:
    """Whether a dimension has but one element in memory."""
    return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


def check_has_memory(name: str, written: Tensor) -> None:
    """Raise ValueError for one of ``torch._efficientzerotensor``, which cannot be written."""
    if not torch.compiler.is_compiling() and written._is_zerotensor():
        raise ValueError(f"{name} is a tensor of zeros without memory; accepted: a tensor to write")


def check_writable(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor that an operator cannot write, as its memory does not have its values."""
    check_has_memory(name, written)
    if not torch.compiler.is_compiling() and written.is_neg():
        raise ValueError(f"{name} is a view that torch negates where it is read; accepted: a tensor to write")


def check_apart(name: str, written: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError where elements of a tensor that a kernel writes share memory, or are also another argument's.

    Of tensors with memory alone, unlike those of compilers and function transforms.
    """
    check_has_memory(name, written)
    if overlaps_itself(written):
        raise ValueError(
            f"{name} has shape {tuple(written.shape)} and strides {tuple(written.stride())}, so that elements share "
            "memory; accepted: elements of which each has its own"
        )
    for other, x in others:
        if overlap(written, x):
            raise ValueError(f"{name} shares memory with {other}; accepted: memory of its own")


def is_aligned(x: Tensor) -> bool:
    """Whether ``x`` starts at a multiple of 16 bytes."""
    return x.data_ptr() % ALIGNMENT_BYTES == 0


def rows_are_aligned(x: Tensor) -> bool:
    """Whether rows of the last dimension are contiguous and whole 16 bytes that start at multiples of 16 bytes."""
    return is_aligned(x) and rows_are_whole(x)


def rows_are_whole(x: Tensor) -> bool:
    """Whether, as metadata shows, rows are contiguous and whole 16 bytes, that many apart."""
    whole = ALIGNMENT_BYTES // x.element_size()
    if x.shape[-1] % whole or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return False
    return all(n == 1 or step % whole == 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))


def check_alignment(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise where q, k or v does not start at a multiple of 16 bytes, which metadata does not show."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not is_aligned(tensor):
            raise ValueError(
                f"{name} starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of {ALIGNMENT_BYTES}; "
                f"accepted: data aligned to {ALIGNMENT_BYTES} bytes"
            )


# TMA has 40 bits for a stride in bytes.
_MAX_STRIDE = 2**38


def rows_are_regular(x: Tensor) -> bool:
    """Whether every stride has the divisibility that kernels assume, also of dimensions of size 1."""
    whole = ALIGNMENT_BYTES // x.element_size()
    return x.stride(-1) == 1 and all(s % whole == 0 and s <= _MAX_STRIDE for s in x.stride()[:-1])


def regular_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides that broadcast ``tensor`` to ``shape``, with the divisibility that kernels assume.

    The stride of a dimension of size 1 is arbitrary in torch. It becomes 0, and 1 in the last dimension.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.shape[-1] == 1 == shape[-1]:
        strides[-1] = 1
    return (0,) * (len(shape) - len(strides)) + tuple(strides)
