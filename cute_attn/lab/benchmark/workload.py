"""Workloads: a shape and its features, under one name."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cute_attn.epilogues.names import example_args
from cute_attn.traits import Traits

if TYPE_CHECKING:  # only tensors need it, and loading it takes longer than a verdict
    import torch
    from torch import Tensor

HIDDEN = 2048
TOKENS = 16384
WINDOW = 1024
DROPOUT_P = 0.1
SOFTCAP = 30.0


@dataclass(frozen=True)
class Workload:
    """One forward or backward to time.

    Attributes:
        seqlen, seqlen_k: of queries and keys; 0 keys: as many as queries.
        causal: whether no query sees a key after its own, where the last query's own is the last key.
        window, window_right: how many keys before and after its own a query sees; of ``window`` 0 is all of them.
        bias, sinks: their dtype, or "". A bias is full, (batch, nheads, seqlen, seqlen_k).
        epilogues: names of users' epilogues, called with their ``example_args``.
        dropout: which of PyTorch's masks, or "".
        lengths, lengths_k: varlen sequences' queries and keys, in place of batch and seqlen.
        bias_grad: whether a backward computes the bias's gradient too.

    Raises:
        ValueError: fields that contradict each other; the message names the field, its value and the accepted ones.
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
    seqlen_k: int = 0
    lengths_k: tuple[int, ...] = ()
    window_right: int = 0
    sinks: str = ""
    epilogues: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nheads_kv", self.nheads_kv or self.nheads)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        if self.seqlen_k == self.seqlen:
            object.__setattr__(self, "seqlen_k", 0)
        if self.lengths_k == self.lengths:
            object.__setattr__(self, "lengths_k", ())
        if self.lengths_k and len(self.lengths_k) != len(self.lengths):
            raise ValueError(
                f"lengths_k is {self.lengths_k}; accepted: as many as there are lengths, {len(self.lengths)}"
            )
        if self.causal and self.window_right:
            raise ValueError(f"window_right is {self.window_right} with causal; accepted: 0")

    @property
    def longest(self) -> int:
        """The most queries of a sequence."""
        return max(self.lengths, default=self.seqlen)

    @property
    def longest_k(self) -> int:
        """The most keys of a sequence."""
        return max(self.lengths_k or self.lengths, default=self.seqlen_k or self.seqlen)

    @property
    def tile_lengths(self) -> tuple[int, int, int]:
        """The longest lengths and the query heads per key head, by which a kernel chooses its default tile."""
        return self.longest, self.longest_k, self.nheads // self.nheads_kv

    @property
    def pairs(self) -> int | None:
        """Sequences times query heads, which may change the default tile too; None for packed sequences."""
        return None if self.lengths else self.batch * self.nheads

    @property
    def seen_by_window(self) -> int:
        """The most keys that a query sees where a window bounds them, 0 where none does."""
        left, right = self.band
        return left + right + 1 if self.windowed and left is not None and right is not None else 0

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        if self.lengths:
            return tuple(zip(self.lengths, self.lengths_k or self.lengths, strict=True))
        return ((self.seqlen, self.longest_k),) * self.batch

    @property
    def equal_lengths(self) -> bool:
        """True if every sequence has as many keys as queries."""
        return not (self.lengths_k if self.lengths else self.seqlen_k)

    @property
    def windowed(self) -> bool:
        """True if a query's keys have window bounds."""
        return bool(self.window or self.window_right)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own a query sees, None for all of them."""
        right = self.window_right if self.windowed else None
        return self.window or None, 0 if self.causal else right

    @property
    def name(self) -> str:
        """Such as ``fwd-bf16-d128-b2-s8192-h16-causal``, or ``b2-s512x8192-h16x2`` of 8192 keys and 2 key heads."""
        dims = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        heads = f"h{self.nheads}" + (f"x{self.nheads_kv}" if self.nheads_kv != self.nheads else "")
        keys = "" if self.equal_lengths else f"x{self.longest_k}"
        sizes = (
            [f"varlen{len(self.lengths)}x{self.longest}{keys}"]
            if self.lengths
            else [f"b{self.batch}", f"s{self.seqlen}{keys}"]
        )
        right = f"_{self.window_right}" if self.window_right else ""
        features = [
            "causal" if self.causal else "",
            f"window{self.window or ''}{right}" if self.windowed else "",
            "softcap" if self.softcap else "",
            "alibi" if self.alibi else "",
            f"bias_{self.bias}" if self.bias else "",
            *self.epilogues,
            f"sinks_{self.sinks}" if self.sinks else "",
            {"": "", "flash": "dropout", "mem_efficient": "dropout_mem_efficient"}[self.dropout],
            "bias_grad" if self.bias_grad else "",
        ]
        op = {"forward": "fwd", "backward": "bwd"}[self.op]
        return "-".join([op, self.dtype, dims, *sizes, heads, *filter(None, features)])

    def traits(self, arch: str, op: str = "") -> Traits:
        """Traits of a kernel of ``arch`` for it, or with ``op`` for the forward before it."""
        op = op or self.op
        return Traits(
            op,
            arch,
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            mask="window" if self.windowed else "causal" if self.causal else "",
            varlen=bool(self.lengths),
            sinks=self.sinks if op == "forward" else "",
            bias_grad=self.bias_grad and op == "backward",
            **_same_features(self),
        )

    @property
    def flops(self) -> int:
        """Useful floating-point operations: two per multiply-add, of the (query, key) pairs that see each other.

        A forward has two products, a backward five: the scores and dQ and dK along head_dim, dP and dV along
        head_dim_v.
        """
        left, right = self.band
        pairs = sum(
            visible_pairs(*lengths, left, right) * count for lengths, count in Counter(self.sequences).items()
        )
        dims = {
            "forward": self.head_dim + self.head_dim_v,
            "backward": 3 * self.head_dim + 2 * self.head_dim_v,
        }
        return 2 * self.nheads * pairs * dims[self.op]

    def inputs(self, device: str = "cuda") -> "Inputs":
        """New random tensors of these sizes."""
        import torch  # takes seconds, and workers read workloads without it

        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        dtype = dtypes[self.dtype]
        rows = (sum(self.lengths),) if self.lengths else (self.batch, self.seqlen)
        keys = (sum(self.lengths_k or self.lengths),) if self.lengths else (self.batch, self.longest_k)

        def normal(*shape: int, dtype: "torch.dtype" = dtype) -> "Tensor":
            return torch.randn(shape, device=device, dtype=dtype)

        q = normal(*rows, self.nheads, self.head_dim)
        k = normal(*keys, self.nheads_kv, self.head_dim)
        v = normal(*keys, self.nheads_kv, self.head_dim_v)
        bias = slopes = sinks = cu_seqlens = cu_seqlens_k = None
        if self.bias:
            bias = normal(self.batch, self.nheads, self.seqlen, self.longest_k, dtype=dtypes[self.bias])
        if self.alibi:
            slopes = torch.rand(self.nheads, device=device)
        if self.sinks:
            sinks = normal(self.nheads, dtype=dtypes[self.sinks])
        if self.lengths:
            cu_seqlens, cu_seqlens_k = (
                torch.tensor((0, *lengths)).cumsum(0).to(device=device, dtype=torch.int32)
                for lengths in (self.lengths, self.lengths_k or self.lengths)
            )
        sizes = (len(self.lengths) or self.batch, self.nheads, self.longest, self.longest_k)
        epilogues = {
            name: tuple(x.to(device) if hasattr(x, "to") else x for x in example_args(name, *sizes))
            for name in self.epilogues
        }
        return Inputs(q, k, v, bias, slopes, cu_seqlens, cu_seqlens_k, sinks, epilogues)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one workload: q, k and v as (batch, seqlen, nheads, dim) or packed (tokens, nheads, dim).

    ``cu_seqlens`` is where varlen sequences' queries start, ``cu_seqlens_k`` where their keys do; ``epilogues`` has the
    arguments of users' epilogues by name.
    """

    q: "Tensor"
    k: "Tensor"
    v: "Tensor"
    bias: "Tensor | None"
    alibi_slopes: "Tensor | None"
    cu_seqlens: "Tensor | None"
    cu_seqlens_k: "Tensor | None" = None
    sinks: "Tensor | None" = None
    epilogues: dict[str, tuple] = field(default_factory=dict)

    def leaves(self, workload: Workload) -> "tuple[Tensor, ...]":
        """The tensors that a backward computes gradients of; marks them as requiring gradients."""
        tensors = (self.q, self.k, self.v, *((self.bias,) if workload.bias_grad else ()))
        for x in tensors:
            x.requires_grad_()
        return tensors


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> int:
    """Number of (query, key) pairs that a mask leaves in one head of a sequence.

    The last query is aligned with the last key; a query sees ``left`` keys before its position and ``right`` after it.
    """

    def up_to(after: int) -> int:
        """Pairs whose key is at most so many after the query's own: the sum of clamp(own + after + 1, 0, seqlen_k)."""
        first = seqlen_k - seqlen_q + after + 1
        return _clamped_sum(first + seqlen_q, seqlen_k) - _clamped_sum(first, seqlen_k)

    below = 0 if left is None else up_to(-left - 1)
    return (seqlen_q * seqlen_k if right is None else up_to(right)) - below


def _clamped_sum(end: int, most: int) -> int:
    """The sum of min(i, most) for i from 0 to end - 1; 0 for a negative end."""
    small = min(max(end, 0), most)
    return small * (small - 1) // 2 + max(0, end - most) * most


def standard(head_dim: int, seqlen: int, **features: Any) -> Workload:
    """16k tokens of hidden size 2048, or of one head if that is more."""
    heads = max(1, HIDDEN // head_dim)
    return Workload(max(1, TOKENS // seqlen), seqlen, heads, head_dim, **features)


def of_traits(traits: Traits, seqlen: int) -> Workload:
    """A workload for a kernel of those traits."""
    if traits.op not in ("forward", "backward"):
        raise ValueError(
            f"{traits} is neither a forward nor a backward; accepted: forward or backward kernels"
        )
    if traits.seqused_q or traits.seqused_k or traits.top_left:
        raise ValueError(f"{traits} cannot be timed by name; accepted: no seqused or top-left masks")
    workload = standard(
        traits.head_dim, seqlen, head_dim_v=traits.head_dim_v, dtype=traits.dtype,
        causal=traits.causal or traits.windowed, window=WINDOW if traits.windowed else 0, op=traits.op,
        sinks=traits.sinks, bias_grad=traits.bias_grad, **_same_features(traits),
    )  # fmt: skip
    if traits.varlen:
        return replace(workload, lengths=mixed_lengths(workload.batch * workload.seqlen, seqlen))
    return workload


def _same_features(one: Workload | Traits) -> dict[str, Any]:
    """Features that workloads and traits have under the same names, with the same values."""
    return {name: getattr(one, name) for name in ("softcap", "alibi", "bias", "epilogues", "dropout")}


def mixed_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths that halve from the longest down to 128, repeated until they sum to the tokens."""
    lengths: list[int] = []
    length = longest
    while tokens > 0:
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
        length = length // 2 if length > 128 else longest
    return tuple(lengths)
