"""The rows of the decode benchmark: calls of attention with a cache, and their inputs."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

LLAMA = (32, 8)
"""Query and kv heads of most rows."""
LATENT = (576, 512)
"""Head dims of keys and values of DeepSeek's latent attention."""
COLD_BYTES = 256 * 2**20
"""Keys and values that are read between two uses of one cache: several times the L2 of any target."""
MOST_COPIES = 64
RAGGED = (1024, 32768)
"""Bounds of the lengths of a ragged batch."""
MIXED = ((2048, 4096),) * 2 + ((1, 8192),) * 64
"""(queries, keys) of prefill chunks and decoding sequences in one call."""


@dataclass(frozen=True)
class Row:
    """A call to time.

    Attributes:
        batch, keys: sequences, and the keys of each after the append; the capacity too.
        heads: query and kv heads.
        head_dim: of queries, keys and values.
        latent: instead, keys have head dim 576 and values are their first 512 numbers.
        queries: of each sequence.
        causal: whether queries see no later key.
        window: keys that a query sees before its position, 0 for all.
        page: rows of a page, 0 for a contiguous cache.
        append: new keys and values of each sequence that the call appends, rotated, as it rotates the queries.
        ragged: whether lengths differ, up to ``keys``.
        mixed: the sequences are :data:`MIXED`, with packed queries, instead.
        ampere: whether the Ampere kernel is timed too, on the same GPU.
        dtype: "bf16" or "fp16".
    """

    batch: int
    keys: int
    heads: tuple[int, int] = LLAMA
    head_dim: int = 128
    latent: bool = False
    queries: int = 1
    causal: bool = False
    window: int = 0
    page: int = 0
    append: int = 0
    ragged: bool = False
    mixed: bool = False
    ampere: bool = False
    dtype: str = "bf16"
    dropout: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Short, and distinct among rows."""
        if self.mixed:
            return "mixed-2xq2048k4096-64xk8192"
        parts = (
            f"b{self.batch}",
            f"k{self.keys}",
            "ragged" if self.ragged else "",
            "" if self.heads == LLAMA else "h{}x{}".format(*self.heads),
            "latent" if self.latent else "" if self.head_dim == 128 else f"d{self.head_dim}",
            f"q{self.queries}" if self.queries > 1 else "",
            "causal" if self.causal and self.queries > 1 else "",
            f"window{self.window}" if self.window else "",
            f"page{self.page}" if self.page else "",
            f"append{self.append}" if self.append else "",
            "" if self.dtype == "bf16" else self.dtype,
        )
        return "-".join(filter(None, parts))

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each."""
        if self.mixed:
            return MIXED
        if not self.ragged:
            return ((self.queries, self.keys),) * self.batch
        rng = random.Random(0)
        low, _ = RAGGED
        lengths = (rng.randint(min(low, self.keys), self.keys) for _ in range(self.batch))
        return tuple((self.queries, length) for length in lengths)

    @property
    def capacity(self) -> int:
        """Rows of each sequence's entry of the cache."""
        longest = max(keys for _, keys in self.sequences)
        return -(-longest // self.page) * self.page if self.page else longest

    @property
    def read_bytes(self) -> int:
        """Keys and values that some query sees."""
        seen = sum(
            min(keys, self.window + queries) if self.window else keys for queries, keys in self.sequences
        )
        return 2 * (self.dims[0] if self.latent else sum(self.dims)) * self.heads[1] * seen

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        return LATENT if self.latent else (self.head_dim, self.head_dim)

    @property
    def flops(self) -> int:
        """Useful floating-point operations."""
        pairs = 0
        for queries, keys in self.sequences:
            hidden = queries * (queries - 1) // 2 if self.causal else 0
            pairs += queries * min(keys, self.window + 1) if self.window else queries * keys - hidden
        return 2 * sum(self.dims) * self.heads[0] * pairs

    @property
    def copies(self) -> int:
        """Caches that calls use in turn, so that no call finds its keys in L2."""
        return max(2, min(MOST_COPIES, math.ceil(COLD_BYTES / self.read_bytes)))


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, by the names of ``attention_with_kvcache``; None for a tensor that the row lacks."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None


def make_inputs(row: Row, device: torch.device | str = "cuda", copies: int = 0) -> list[Inputs]:
    """Random inputs of several calls, by default ``row.copies``, which differ only in their caches."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[row.dtype]

    def randn(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def int32(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    (nheads, nheads_kv), (dim, dim_v) = row.heads, row.dims
    queries, lengths = zip(*row.sequences, strict=True)
    batch = len(lengths)
    shared: dict[str, Any] = {}
    if row.mixed:
        q = randn(sum(queries), nheads, dim)
        ends = [sum(queries[:i]) for i in range(batch + 1)]
        shared |= {"cu_seqlens_q": int32(ends), "max_seqlen_q": max(queries)}
    else:
        q = randn(batch, row.queries, nheads, dim)
    if row.append:
        shared |= {name: randn(batch, row.append, nheads_kv, dim) for name in ("k", "v")}
        angles = torch.outer(torch.arange(row.capacity), 1e-4 ** (torch.arange(dim // 2) / (dim // 2)))
        shared |= {f"rotary_{name}": getattr(angles, name)().to(device, dtype) for name in ("cos", "sin")}
    shared |= {"cache_seqlens": int32([length - row.append for length in lengths])}
    shape: tuple[int, ...] = (batch, row.capacity)
    if row.page:
        pages = batch * row.capacity // row.page
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        shared |= {"page_table": order.to(torch.int32).view(batch, -1).to(device)}
        shape = (pages, row.page)
    caches = (randn(*shape, nheads_kv, dim) for _ in range(copies or row.copies))
    return [
        Inputs(q, k, k[..., :dim_v] if row.latent else randn(*shape, nheads_kv, dim_v), **shared)
        for k in caches
    ]


def rows() -> Iterator[Row]:
    """Rows: one sequence of several lengths; batches; pages; heads; queries; more features; prefill."""
    for keys in (1024, 4096, 8192, 16384, 32768, 65536, 131072):
        yield Row(1, keys, ampere=keys == 32768)
    yield Row(1, 131072, heads=(32, 1))
    yield Row(4, 8192)
    yield Row(8, 8192)
    yield Row(16, 8192, ampere=True)
    yield Row(64, 4096, ampere=True)
    yield Row(128, 2048, ampere=True)
    yield Row(64, RAGGED[1], ragged=True)
    for page in (64, 16, 1):
        yield Row(16, 8192, page=page, ampere=True)
    yield Row(16, 4096, heads=(32, 32))
    yield Row(64, 8192, heads=(32, 1))
    yield Row(32, 4096, heads=(28, 4))
    for head_dim in (64, 256):
        yield Row(32, 4096, head_dim=head_dim)
    yield Row(32, 8192, queries=4, causal=True)
    yield Row(8, 8192, queries=16, causal=True, ampere=True)
    for batch, keys in ((1, 32768), (64, 4096)):
        yield Row(batch, keys, append=1, causal=True)
    yield Row(16, 32768, window=4096, causal=True)
    yield Row(66, 8192, mixed=True, causal=True)
    yield Row(2, 4096, queries=2048, causal=True)
    yield Row(64, 8192)
    for keys in (16384, 65536):
        yield Row(1, keys, queries=512, causal=True)
    yield Row(1, 32768, heads=(8, 1), queries=2048, causal=True)
    for nheads in (8, 16, 32, 64, 128):
        yield Row(64, 4096, heads=(nheads, 1), latent=True, page=64)
    yield Row(64, 4096, heads=(128, 1), latent=True, queries=2, causal=True, page=64)
    yield Row(1, 65536, heads=(16, 1), latent=True)
