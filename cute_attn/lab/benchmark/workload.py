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
        seqlen, seqlen_k: queries and keys per sequence; ``seqlen_k`` 0 means as many keys as queries.
        causal: whether queries see no key after their own. The last query is aligned with the last key.
        window, window_right: how many keys before and after its own a query sees; 0 in ``window`` means no limit.
        bias, sinks: dtype, or "" for none. A bias has its full shape, (batch, nheads, seqlen, seqlen_k).
        epilogues: names of users' epilogues, called with their ``example_args``.
        dropout: "flash" or "mem_efficient", the PyTorch kernel whose mask is used, or "".
        lengths, lengths_k: queries and keys of each varlen sequence, in place of batch and seqlen.
        bias_grad: whether a backward computes the bias's gradient too.

    Raises:
        ValueError: fields contradict each other; the message names the field, its value and the accepted ones.
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
        """Maximum queries of a sequence."""
        return max(self.lengths, default=self.seqlen)

    @property
    def longest_k(self) -> int:
        """Maximum keys of a sequence."""
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
        """Maximum keys that a query sees if a window bounds both sides, else 0."""
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
        """True if a window bounds the keys of a query."""
        return bool(self.window or self.window_right)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own a query sees; None for no limit."""
        right = self.window_right if self.windowed else None
        return self.window or None, 0 if self.causal else right

    @property
    def name(self) -> str:
        """A name such as ``fwd-bf16-d128-b2-s8192-h16-causal``; ``b2-s512x8192-h16x2`` has 8192 keys, 2 key heads."""
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
        """Traits of a kernel of ``arch`` for this workload, or for its forward if ``op`` is "forward"."""
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
        """Useful floating-point operations: two per multiply-add, over the visible (query, key) pairs.

        A forward has two products, of head_dim and head_dim_v. A backward has five: scores, dQ and dK of head_dim, dP
        and dV of head_dim_v.
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
        """New random tensors of this workload's sizes."""
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

    ``cu_seqlens`` and ``cu_seqlens_k`` hold the first query and the first key of each varlen sequence. ``epilogues``
    maps the name of each user's epilogue to its arguments.
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
        """Set ``requires_grad`` of the tensors whose gradients a backward computes, and return these tensors."""
        tensors = (self.q, self.k, self.v, *((self.bias,) if workload.bias_grad else ()))
        for x in tensors:
            x.requires_grad_()
        return tensors


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> int:
    """Number of (query, key) pairs that a mask leaves in one head of a sequence.

    The last query is aligned with the last key; a query sees ``left`` keys before its position and ``right`` after it.
    """

    def up_to(after: int) -> int:
        """Pairs whose key is at most ``after`` past the query's own: the sum of clamp(own + after + 1, 0, seqlen_k)."""
        first = seqlen_k - seqlen_q + after + 1
        return _clamped_sum(first + seqlen_q, seqlen_k) - _clamped_sum(first, seqlen_k)

    below = 0 if left is None else up_to(-left - 1)
    return (seqlen_q * seqlen_k if right is None else up_to(right)) - below


def _clamped_sum(end: int, most: int) -> int:
    """The sum of min(i, most) for i from 0 to end - 1; 0 for a negative end."""
    small = min(max(end, 0), most)
    return small * (small - 1) // 2 + max(0, end - most) * most


def standard(head_dim: int, seqlen: int, **features: Any) -> Workload:
    """A workload of 16k tokens and hidden size 2048, or of one head if a head is larger."""
    heads = max(1, HIDDEN // head_dim)
    return Workload(max(1, TOKENS // seqlen), seqlen, heads, head_dim, **features)


def of_traits(traits: Traits, seqlen: int) -> Workload:
    """A workload for a kernel with these traits. Raises ValueError if no workload has them."""
    if traits.op not in ("forward", "backward"):
        raise ValueError(
            f"{traits} is neither a forward nor a backward; accepted: forward or backward kernels"
        )
    if traits.seqused_q or traits.seqused_k or traits.top_left or traits.max_scores:
        raise ValueError(
            f"{traits} cannot be timed by name; accepted: no seqused, top-left masks or max_scores"
        )
    workload = standard(
        traits.head_dim, seqlen, head_dim_v=traits.head_dim_v, dtype=traits.dtype,
        causal=traits.causal or traits.windowed, window=WINDOW if traits.windowed else 0, op=traits.op,
        sinks=traits.sinks, bias_grad=traits.bias_grad, **_same_features(traits),
    )  # fmt: skip
    if traits.varlen:
        return replace(workload, lengths=mixed_lengths(workload.batch * workload.seqlen, seqlen))
    return workload


def _same_features(one: Workload | Traits) -> dict[str, Any]:
    """Features that have equal names and values in workloads and traits."""
    return {name: getattr(one, name) for name in ("softcap", "alibi", "bias", "epilogues", "dropout")}


def mixed_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Sequence lengths that halve from ``longest`` down to 128, repeated until they sum to ``tokens``."""
    lengths: list[int] = []
    length = longest
    while tokens > 0:
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
        length = length // 2 if length > 128 else longest
    return tuple(lengths)
