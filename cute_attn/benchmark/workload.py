"""What is timed: a shape and its features, under one name."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn.traits import PARTS, Traits

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HIDDEN = 2048
TOKENS = 16384
WINDOW = 1024
DROPOUT_P = 0.1
SOFTCAP = 30.0


@dataclass(frozen=True)
class Workload:
    """One forward or backward to time.

    Attributes:
        batch, seqlen, nheads, nheads_kv, head_dim, head_dim_v: sizes; queries and keys are equally many.
        dtype: of q, k and v.
        causal: whether no query sees a key after its own.
        window: how many keys before its own a query sees, 0 for all of them.
        bias: dtype of a full (batch, nheads, seqlen, seqlen) bias, or "".
        alibi, softcap: whether scores pass through them.
        dropout: which of PyTorch's masks is drawn, or "".
        lengths: of packed sequences, in place of batch and seqlen.
        op: "forward", or "backward" for the gradients of q, k and v alone.
        bias_grad: whether a backward gives the bias's gradient too.
    """

    batch: int
    seqlen: int
    nheads: int
    head_dim: int
    nheads_kv: int = 0
    head_dim_v: int = 0
    dtype: str = "bf16"
    causal: bool = False
    window: int = 0
    bias: str = ""
    alibi: bool = False
    softcap: bool = False
    dropout: str = ""
    lengths: tuple[int, ...] = ()
    op: str = "forward"
    bias_grad: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "nheads_kv", self.nheads_kv or self.nheads)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return max(self.lengths, default=self.seqlen)

    @property
    def name(self) -> str:
        """Such as ``fwd-bf16-d128-b2-s8192-h16-causal``."""
        dims = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        heads = f"h{self.nheads}" + (f"x{self.nheads_kv}" if self.nheads_kv != self.nheads else "")
        sizes = (
            [f"varlen{len(self.lengths)}x{max(self.lengths)}"]
            if self.lengths
            else [f"b{self.batch}", f"s{self.seqlen}"]
        )
        features = [
            "causal" if self.causal else "",
            f"window{self.window}" if self.window else "",
            "softcap" if self.softcap else "",
            "alibi" if self.alibi else "",
            f"bias_{self.bias}" if self.bias else "",
            {"": "", "flash": "dropout", "mem_efficient": "dropout_mem_efficient"}[self.dropout],
            "bias_grad" if self.bias_grad else "",
        ]
        op = {"forward": "fwd", "backward": "bwd"}[self.op]
        return "-".join([op, self.dtype, dims, *sizes, heads, *filter(None, features)])

    def traits(self, arch: str, op: str = "") -> Traits:
        """What a kernel of ``arch`` has to compute for it, or for the forward before it if that is the ``op``."""
        op = op or self.op
        return Traits(
            op,
            arch,
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            mask="window" if self.window else "causal" if self.causal else "",
            softcap=self.softcap,
            alibi=self.alibi,
            bias=self.bias,
            dropout=self.dropout,
            varlen=bool(self.lengths),
            bias_grad=self.bias_grad and op == "backward",
        )

    @property
    def flops(self) -> int:
        """Useful floating-point operations: two a multiply-add, of the (query, key) pairs that see each other.

        A forward has two products, a backward five: the scores and dQ and dK along head_dim, dP and dV along
        head_dim_v.
        """
        lengths = self.lengths or (self.seqlen,) * self.batch
        pairs = sum(self._pairs(length) for length in lengths)
        dims = {
            "forward": self.head_dim + self.head_dim_v,
            "backward": 3 * self.head_dim + 2 * self.head_dim_v,
        }
        return 2 * self.nheads * pairs * dims[self.op]

    def _pairs(self, length: int) -> int:
        """Pairs of one sequence and head, where a causal half counts as half."""
        if self.window:
            seen = min(self.window + 1, length)
            return seen * (seen + 1) // 2 + (length - seen) * seen
        return length * length // 2 if self.causal else length * length

    def inputs(self, device: str = "cuda") -> "Inputs":
        """Random tensors of these sizes, anew for each call."""
        dtype = TORCH_DTYPES[self.dtype]
        rows = (sum(self.lengths),) if self.lengths else (self.batch, self.seqlen)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        q = normal(*rows, self.nheads, self.head_dim)
        k = normal(*rows, self.nheads_kv, self.head_dim)
        v = normal(*rows, self.nheads_kv, self.head_dim_v)
        bias = slopes = cu_seqlens = None
        if self.bias:
            bias = normal(self.batch, self.nheads, self.seqlen, self.seqlen, dtype=TORCH_DTYPES[self.bias])
        if self.alibi:
            slopes = torch.rand(self.nheads, device=device)
        if self.lengths:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            cu_seqlens = ends.to(device=device, dtype=torch.int32)
        return Inputs(q, k, v, bias, slopes, cu_seqlens)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one workload: q, k and v as (batch, seqlen, nheads, dim) or packed (tokens, nheads, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens: Tensor | None

    def leaves(self, workload: Workload) -> tuple[Tensor, ...]:
        """What a backward gives gradients of; from now on autograd records what is done with it."""
        tensors = (self.q, self.k, self.v, *((self.bias,) if workload.bias_grad else ()))
        for x in tensors:
            x.requires_grad_()
        return tensors


def standard(head_dim: int, seqlen: int, **features: Any) -> Workload:
    """16k tokens of hidden size 2048, or of one head if that is more."""
    heads = max(1, HIDDEN // head_dim)
    return Workload(max(1, TOKENS // seqlen), seqlen, heads, head_dim, **features)


def of_traits(traits: Traits, seqlen: int) -> Workload:
    """A workload that a kernel of those traits computes.

    Raises:
        ValueError: the traits have something that no workload has.
    """
    if traits.op in PARTS:
        raise ValueError(f"{traits} is a part of a backward; accepted: forward or backward kernels")
    if traits.epilogues or traits.return_softmax or traits.seqused_q or traits.seqused_k or traits.top_left:
        raise ValueError(
            f"{traits} cannot be timed by name; accepted: no epilogues of your own, return_softmax, seqused or "
            "top-left masks"
        )
    workload = standard(
        traits.head_dim,
        seqlen,
        head_dim_v=traits.head_dim_v,
        dtype=traits.dtype,
        causal=traits.causal or traits.windowed,
        window=WINDOW if traits.windowed else 0,
        bias=traits.bias,
        alibi=traits.alibi,
        softcap=traits.softcap,
        dropout=traits.dropout,
        op=traits.op,
        bias_grad=traits.bias_grad,
    )
    if traits.varlen:
        return replace(workload, lengths=mixed_lengths(workload.batch * workload.seqlen, seqlen))
    return workload


def mixed_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths that halve from the longest one down to 128, over and over, until the tokens are used up."""
    lengths: list[int] = []
    length = longest
    while tokens > 0:
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
        length = length // 2 if length > 128 else longest
    return tuple(lengths)
