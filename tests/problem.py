"""Test cases: a :class:`Case` says what to compute, a :class:`Problem` has inputs for it.

Inputs are random, with NaN and Inf in memory that a kernel must not read.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import attention, attention_varlen, reference
from cute_attn.api.attention import resolve_mask
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits, aligned_head_dim

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = ("contiguous", "padded", "heads_first", "fused", "expanded", "odd_strides", "far")


@dataclass(frozen=True)
class Case:
    """What to compute.

    Attributes:
        lengths_q, lengths_k: of varlen sequences; empty for batches of seqlen_q and seqlen_k.
        seqused_q, seqused_k: used lengths of each sequence; empty for all of it.
        alibi: "", "heads" (a slope per head) or "batches" (per batch and head).
        bias: its dtype, or "". bias_broadcast: which of "b", "h" and "q" have size 1. bias_hides: some of it is -inf,
            all of it in the first three rows.
        sinks: dtype of the attention sinks, or "".
        logits: the standard deviation of scores, roughly; "negative" for all of them near -120.
        layout: of q, k and v in memory, one of LAYOUTS.
        compare: batches to compare, where the whole would take too long; empty for all.
    """

    name: str
    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    nheads: int = 4
    nheads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = "bf16"
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    seqused_q: tuple[int, ...] = ()
    seqused_k: tuple[int, ...] = ()
    causal: bool | str = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi: str = ""
    bias: str = ""
    bias_broadcast: str = ""
    bias_hides: bool = False
    sinks: str = ""
    dropout_p: float = 0.0
    dropout_mask: str = "flash"
    return_softmax: bool = False
    logits: float | str = 1.0
    layout: str = "contiguous"
    compare: tuple[int, ...] = ()

    @property
    def varlen(self) -> bool:
        """True if sequences are concatenated, with cu_seqlens."""
        return bool(self.lengths_q)

    @property
    def size_v(self) -> int:
        """head_dim_v."""
        return self.head_dim_v or self.head_dim

    def traits(self, arch: str, op: str = "forward") -> Traits:
        """The traits of its kernel for ``arch``; a backward has the bias's gradient. Odd head dims are padded."""
        return Traits(
            op=op,
            arch=arch,
            dtype=self.dtype,
            head_dim=aligned_head_dim(self.dtype, self.head_dim),
            head_dim_v=aligned_head_dim(self.dtype, self.size_v),
            mask=resolve_mask(self.causal, self.window)[0],
            softcap=self.softcap > 0,
            alibi=bool(self.alibi),
            bias=self.bias,
            sinks=self.sinks if op != "backward" else "",
            dropout=self.dropout_mask if self.dropout_p else "",
            varlen=self.varlen,
            seqused_q=bool(self.seqused_q),
            seqused_k=bool(self.seqused_k),
            bias_grad=bool(self.bias) and op == "backward",
        )

    @property
    def longest(self) -> tuple[int, int]:
        """(max_seqlen_q, max_seqlen_k)."""
        return (max(self.lengths_q), max(self.lengths_k)) if self.varlen else (self.seqlen_q, self.seqlen_k)

    @property
    def seen_by_window(self) -> int:
        """Maximum number of keys that a query sees through a window, 0 without a window."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        return 0 if left is None or right is None else left + right + 1

    @property
    def pairs(self) -> int | None:
        """Sequences times query heads; None for packed ones."""
        return None if self.varlen else self.batch * self.nheads

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.nheads // self.nheads_kv

    @property
    def launches(self) -> bool:
        """True if a kernel is launched: nothing is empty."""
        return 0 not in (self.batch, self.nheads, *self.longest)

    def build(self, device: torch.device | str, seed: int = 0) -> "Problem":
        """Random inputs."""
        return _Builder(self, torch.device(device), torch.Generator(device).manual_seed(seed)).problem()


@dataclass(frozen=True)
class Problem:
    """A case's inputs.

    Attributes:
        tensors: q, k and v.
        lengths: the sequences' lengths.
        inputs: arguments of the score functions.
        owned: the rows of varlen q within its sequences; all rows of batches.
    """

    case: Case
    tensors: tuple[Tensor, Tensor, Tensor]
    lengths: reference.Lengths
    inputs: ScoreInputs
    owned: slice

    def run(self, **options: Any) -> dict[str, Tensor]:
        """Results of ``attention`` or ``attention_varlen`` by name: out, lse, and softmax if requested."""
        return self._named(self._run(**options))

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Results by the reference in ``dtype``; outputs have q's dtype unless that is less precise."""
        return self._named(self._widened(dtype)._define(dtype))

    def start(self, *, out: bool = True, lse: bool = False, seed: int = 1) -> "Start":
        """Random gradients of out and of lse, NaN in rows out of bounds."""
        case, q = self.case, self.tensors[0]
        generator = torch.Generator(q.device).manual_seed(seed)
        shapes = ((*q.shape[:-1], case.size_v), q[..., 0].mT.shape)
        grads = [
            torch.randn(shape, generator=generator, device=q.device, dtype=dtype)
            for shape, dtype in zip(shapes, (q.dtype, torch.float32), strict=True)
        ]
        cu_seqlens = self.lengths.cu_seqlens_q
        bounds = [0] if cu_seqlens is None else cu_seqlens.tolist()
        if case.varlen:
            for rows in (slice(0, bounds[0]), slice(bounds[-1], None)):
                grads[0][rows], grads[1][:, rows] = math.nan, math.nan
        for b, used in enumerate(case.seqused_q):
            rows = slice(bounds[b] + used, bounds[b + 1])
            grads[0][rows], grads[1][:, rows] = math.nan, math.nan
        return Start(grads[0] if out else None, grads[1] if lse else None)

    def gradients(self, start: "Start", wanted: str = "", **options: Any) -> dict[str, Tensor]:
        """Gradients by autograd through ``attention`` or ``attention_varlen``: dq, dk, dv, dbias and dsinks if any.

        wanted: names of leaves, separated by blanks; "" for all.
        """
        problem, leaves = self._with_leaves(wanted)
        return start.gradients_of(problem._run(**options)[:2], leaves)

    def expected_gradients(self, start: "Start", dtype: torch.dtype) -> dict[str, Tensor]:
        """Gradients through the reference in ``dtype``."""
        problem, leaves = self._widened(dtype)._with_leaves()
        return start.gradients_of(problem._define(dtype)[:2], leaves)

    def _widened(self, dtype: torch.dtype) -> "Problem":
        if dtype in (torch.float16, torch.bfloat16):
            return self
        return replace(self, tensors=tuple(x.to(dtype) for x in self.tensors))  # type: ignore[arg-type]

    def _with_leaves(self, wanted: str = "") -> tuple["Problem", dict[str, Tensor]]:
        """The problem with tensors that require gradients, and these tensors by name."""
        given = {"dq": self.tensors[0], "dk": self.tensors[1], "dv": self.tensors[2]}
        extra = {"dbias": self.inputs.bias, "dsinks": self.inputs.sinks}
        given |= {name: x for name, x in extra.items() if x is not None}
        chosen = wanted.split() or list(given)
        own = {name: x.detach().requires_grad_(name in chosen) for name, x in given.items()}
        inputs = replace(self.inputs, bias=own.get("dbias"), sinks=own.get("dsinks"))
        problem = replace(self, tensors=(own["dq"], own["dk"], own["dv"]), inputs=inputs)
        return problem, {name: x for name, x in own.items() if name in chosen}

    def _run(self, **options: Any) -> Any:
        case, lengths, inputs = self.case, self.lengths, self.inputs
        options = (
            {"rng_state": inputs.rng_state} | options | {"return_lse": True, "seqused_k": lengths.seqused_k}
        )
        of_case = ("causal", "window", "softcap", "dropout_p", "dropout_mask", "return_softmax")
        options |= {name: getattr(case, name) for name in of_case}
        options |= {name: getattr(inputs, name) for name in ("alibi_slopes", "bias", "sinks")}
        if not case.varlen:
            return attention(*self.tensors, **options)
        assert lengths.cu_seqlens_q is not None and lengths.cu_seqlens_k is not None
        return attention_varlen(
            *self.tensors,
            lengths.cu_seqlens_q,
            lengths.cu_seqlens_k,
            lengths.max_seqlen_q,
            lengths.max_seqlen_k,
            seqused_q=lengths.seqused_q,
            **options,
        )

    def _define(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        case = self.case
        mask, _, _ = resolve_mask(case.causal, case.window)
        return reference.attention(
            *self.tensors,
            case.head_dim**-0.5,
            reference.Features(mask, case.dropout_mask if case.dropout_p else ""),
            self.inputs,
            self.lengths,
            return_softmax=case.return_softmax,
            compute_dtype=dtype,
        )

    def compared(self) -> "Problem":
        """The problem of the case's ``compare`` batches."""
        if not self.case.compare:
            return self
        index = torch.tensor(self.case.compare, device=self.tensors[0].device)
        return replace(self, tensors=tuple(x[index] for x in self.tensors))

    def _named(self, results: Any) -> dict[str, Tensor]:
        named = dict(zip(("out", "lse", "softmax"), results, strict=False))
        named["out"] = named["out"][self.owned]
        if self.case.varlen:
            named["lse"] = named["lse"][:, self.owned]
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Start:
    """Gradients of out and lse, None for one that the loss does not depend on."""

    out: Tensor | None
    lse: Tensor | None

    def gradients_of(self, outputs: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by autograd, named like their leaves."""
        pairs = [(x, g) for x, g in zip(outputs, (self.out, self.lse), strict=True) if g is not None]
        starts, weights = [x for x, _ in pairs], [g.to(x.dtype) for x, g in pairs]
        if not any(x.requires_grad for x in starts):  # nothing was computed
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        grads = torch.autograd.grad(starts, tuple(leaves.values()), weights, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def of(self, batches: tuple[int, ...]) -> "Start":
        """The gradients of some batches."""
        index = list(batches)
        return Start(*(None if x is None else x[index] for x in (self.out, self.lse)))


@dataclass(frozen=True)
class _Builder:
    case: Case
    device: torch.device
    generator: torch.Generator

    def problem(self) -> Problem:
        case = self.case
        lengths, owned = self.lengths()
        q, k, v = self.fused() if case.layout == "fused" else self.separate()
        self.poison(k, v, lengths)
        left_right = resolve_mask(case.causal, case.window)[1:]
        max_seqlens = case.longest
        inputs = ScoreInputs(
            *left_right,
            alibi_slopes=self.slopes(),
            bias=self.bias(*max_seqlens),
            sinks=self.randn(case.nheads, dtype=case.sinks) * 2 if case.sinks else None,
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            rng_state=torch.tensor([0x1234567890ABCDEF, 2**33 + 5], device=self.device)
            if case.dropout_p
            else None,
        )
        return Problem(case, (q, k, v), lengths, inputs, owned)

    def randn(self, *shape: int, dtype: str = "") -> Tensor:
        dtype_ = DTYPES[dtype or self.case.dtype]
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype_)

    def nans(self, *shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=DTYPES[self.case.dtype], device=self.device)

    def int32(self, values: tuple[int, ...]) -> Tensor | None:
        return torch.tensor(values, dtype=torch.int32, device=self.device) if values else None

    # Rows of varlen tensors before the first sequence and after the last.
    FIRST, LAST = 2, 5

    def lengths(self) -> tuple[reference.Lengths, slice]:
        case = self.case
        used = {"seqused_q": self.int32(case.seqused_q), "seqused_k": self.int32(case.seqused_k)}
        if not case.varlen:
            return reference.Lengths(**used), slice(None)
        cu_q, cu_k = (
            self.int32(tuple(self.FIRST + sum(lengths[:i]) for i in range(len(lengths) + 1)))
            for lengths in (case.lengths_q, case.lengths_k)
        )
        owned = slice(self.FIRST, self.FIRST + sum(case.lengths_q))
        longest = {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(case.lengths_k)}
        return reference.Lengths(cu_q, cu_k, **used, **longest), owned

    def fused(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slices of one tensor, as a fused projection leaves them."""
        case = self.case
        heads = (case.nheads, case.nheads_kv, case.nheads_kv)
        return self.randn(case.batch, case.seqlen_q, sum(heads), case.head_dim).split(heads, 2)  # type: ignore[return-value]

    def separate(self) -> tuple[Tensor, Tensor, Tensor]:
        case = self.case
        rows_q, rows_k = (
            (sum(case.lengths_q), sum(case.lengths_k)) if case.varlen else (case.seqlen_q, case.seqlen_k)
        )
        q = self.layout("q", rows_q, case.nheads, case.head_dim)
        k = self.layout("k", rows_k, case.nheads_kv, case.head_dim)
        v = self.layout("v", rows_k, case.nheads_kv, case.size_v)
        if case.logits == "negative":  # scale * q.k is -120 for q = a and k = -a in every dimension
            a = math.sqrt(120 / math.sqrt(case.head_dim))
            q.mul_(0.02).add_(a)
            k.mul_(0.02).sub_(a)
        else:
            q.mul_(float(case.logits))
        return q, k, v

    def layout(self, name: str, rows: int, heads: int, dim: int) -> Tensor:
        case = self.case
        if case.varlen:
            storage = self.nans(rows + self.FIRST + self.LAST, heads, dim)
            storage[self.FIRST : self.FIRST + rows] = self.randn(rows, heads, dim)
            return storage
        shape = (case.batch, rows, heads, dim)
        if case.layout == "expanded" and name != "q":
            return self.randn(case.batch, rows, 1, dim).expand(shape)
        if case.layout == "heads_first":
            return self.randn(case.batch, heads, rows, dim).transpose(1, 2)
        if case.layout == "odd_strides":  # strides of dimensions of size 1 are meaningless
            strides = [
                3 if size == 1 else stride for size, stride in zip(shape, _strides(shape), strict=True)
            ]
            return self.randn(*shape).as_strided(shape, strides)
        if case.layout == "padded":  # gaps between rows, heads and batches
            return self.surrounded(shape, _strides((case.batch, rows + 3, heads + 1, dim + 8)))
        if case.layout == "far":
            return self.surrounded(
                shape, (2**30, 8 * dim, dim, 1) if name == "q" else (8 * dim, 2**30, dim, 1)
            )
        return self.randn(*shape)

    def surrounded(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return self.nans(max(last, 0) + 1 + 4096).as_strided(shape, strides).copy_(self.randn(*shape))

    def poison(self, k: Tensor, v: Tensor, lengths: reference.Lengths) -> None:
        """NaN and Inf in keys and values beyond seqused_k."""
        for b, used in enumerate(self.case.seqused_k):
            start, end = 0, self.case.seqlen_k
            if lengths.cu_seqlens_k is not None:
                start, end = (int(x) for x in lengths.cu_seqlens_k[b : b + 2])
            rows = (slice(start + used, end),) if self.case.varlen else (b, slice(used, end))
            k[rows], v[rows] = math.nan, math.inf

    def slopes(self) -> Tensor | None:
        case = self.case
        if not case.alibi:
            return None
        batch = len(case.lengths_q) or case.batch
        shape = (case.nheads,) if case.alibi == "heads" else (batch, case.nheads)
        return torch.rand(shape, generator=self.generator, device=self.device) * 0.3

    def bias(self, max_seqlen_q: int, max_seqlen_k: int) -> Tensor | None:
        case = self.case
        if not case.bias:
            return None
        whole = {"b": len(case.lengths_q) or case.batch, "h": case.nheads, "q": max_seqlen_q}
        sizes = [1 if dim in case.bias_broadcast else size for dim, size in whole.items()]
        bias = self.randn(*sizes, max_seqlen_k, dtype=case.bias)
        if case.bias_hides:
            bias.masked_fill_(self.randn(*sizes, max_seqlen_k) > 0.5, -math.inf)
            bias[:, :, :3] = -math.inf
        return bias


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
