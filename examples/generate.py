"""Generate with a small Llama-shaped model through a paged cache, and compare every token with plain torch.

    python examples/generate.py                  64 tokens for each of 4 prompts on the GPU, decoding in a CUDA graph
    python examples/generate.py --latent         the same with latent attention
    python examples/generate.py --steps 8 --layers 2    without a GPU in seconds

Random weights from a seed; grouped heads, rotary embedding, RMSNorm and SwiGLU. Each layer's attention is one call of
``attention_with_kvcache``: it appends the new keys and values to the cache's pages, rotates keys and queries, attends.
The prompts, of different lengths, are one packed call a layer. A decoding step is captured as a CUDA graph once:
lengths, tables of pages and tokens are tensors that it reads at each replay. The host only hands out pages.

With ``--latent``, as DeepSeek's models decode, all query heads read one key head of 512 latent columns and 64 rotated
ones. The latent columns are also the values, so the cache has keys only: values are a view of them. The projections of
the latent columns to each head are included in the projections of q and of the output.

Plain torch then computes the logits of the whole text without a cache, in float32. Each token has to be its most
likely one, or as likely as that up to rounding.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_attn import attention_with_kvcache

VOCABULARY = 256
HEAD_DIM = 64
"""Latent attention's keys end with as many rotated columns."""
LATENT = 512
"""Columns of latent attention's values, the first ones of its keys."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A layer's index, q, k and v (..., heads, head_dim) before rotary embedding -> the output, with v's columns."""


# ---- the model ----


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm and with a residual."""

    def __init__(self, width: int, heads: int, heads_kv: int, latent: bool) -> None:
        super().__init__()
        self.split, self.dims = (heads, heads_kv, heads_kv), (HEAD_DIM, HEAD_DIM)
        if latent:
            self.split, self.dims = (heads, 1), (LATENT + HEAD_DIM, LATENT)
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for _ in range(2)])
        self.qkv = nn.Linear(width, sum(self.split) * self.dims[0], bias=False)
        self.project = nn.Linear(heads * self.dims[1], width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """x: (..., width)."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dims[0]))
        q, k, *values = qkv.split(self.split, -2)
        v = values[0] if values else k[..., :LATENT]
        x = x + self.project(attend(layer, q, k, v).flatten(-2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Logits of the next token."""

    def __init__(self, layers: int, width: int, heads_kv: int, seed: int, latent: bool = False) -> None:
        super().__init__()
        heads, self.latent = width // HEAD_DIM, latent
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, heads, heads_kv, latent) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:  # large enough that queries tell keys apart
                nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens: (...) of int64."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.head(self.norm(x))


def rotary_tables(positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, head_dim / 2), float32."""
    frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.outer(torch.arange(positions, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., heads, columns), its last columns turned by the angles (..., 1, head_dim / 2) in float32."""
    rest, first, second = x.split((x.shape[-1] - HEAD_DIM, HEAD_DIM // 2, HEAD_DIM // 2), -1)
    first, second = first.float(), second.float()
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat((rest, *(part.to(x.dtype) for part in turned)), -1)


# ---- with a cache ----


@dataclass
class PagedCache:
    """Pages of keys and values of every layer, and which of them a sequence has.

    Attributes:
        keys, values: of each layer (pages, page_size, heads_kv, head_dim).
        table: int32 (batch, pages of a sequence): its pages, in order.
        lengths: int32 (batch,), rows in use.
        free: pages of no sequence.
        reserved: rows of each sequence's pages, on the host.
    """

    keys: list[Tensor]
    values: list[Tensor]
    table: Tensor
    lengths: Tensor
    free: list[int]
    reserved: list[int]

    @staticmethod
    def make(model: Llama, batch: int, rows: int, page: int, device: str, dtype: torch.dtype) -> "PagedCache":
        """A cache for sequences of up to ``rows`` rows. Pages are handed out in a random order."""
        per_sequence = -(-rows // page)
        pages = batch * per_sequence
        block = model.blocks[0]
        shape = (pages, page, block.split[1], block.dims[0])
        # A row that is read before it is written would make a token of it.
        keys, values = (
            [torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in model.blocks] for _ in range(2)
        )
        if model.latent:
            values = [x[..., :LATENT] for x in keys]
        table = torch.zeros(batch, per_sequence, dtype=torch.int32, device=device)
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
        return PagedCache(keys, values, table, lengths, free, [0] * batch)

    @property
    def page(self) -> int:
        """Rows of a page."""
        return self.keys[0].shape[1]

    def reserve(self, rows: list[int]) -> None:
        """Hand out pages until each sequence has room for so many rows."""
        for b, wanted in enumerate(rows):
            while self.reserved[b] < wanted:
                self.table[b, self.reserved[b] // self.page] = self.free.pop()
                self.reserved[b] += self.page


@dataclass
class Generator:
    """Greedy decoding of some prompts, all at once."""

    model: Llama
    cache: PagedCache
    rotary: tuple[Tensor, Tensor]
    tokens: Tensor  # (batch,): the last of each sequence, which a step replaces
    graph: "torch.cuda.CUDAGraph | None" = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **packed: object
    ) -> Tensor:
        """Append to the layer's cache, rotate, attend: one call.

        The call can rotate a row's first columns. Latent attention's last ones are rotated before it.

        positions: positions of the new rows, shaped like q without heads and columns.
        """
        cache, (cos, sin) = self.cache, self.rotary
        if self.model.latent:
            q, k = (rotated(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)) for x in (q, k))
            v = k[..., :LATENT]
        else:
            packed |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
        out = attention_with_kvcache(
            q,
            cache.keys[layer],
            cache.values[layer],
            k=k,
            v=v,
            cache_seqlens=cache.lengths,
            page_table=cache.table,
            causal=True,
            **packed,  # type: ignore[arg-type]
        )
        assert isinstance(out, Tensor)
        return out

    def prefill(self, prompts: list[Tensor]) -> None:
        """Process all prompts as one packed sequence of queries and new keys."""
        counts = [len(prompt) for prompt in prompts]
        self.cache.reserve(counts)
        ends = torch.tensor([0, *counts], device=self.tokens.device).cumsum(0).to(torch.int32)
        packed = {"cu_seqlens_q": ends, "cu_seqlens_k_new": ends, "max_seqlen_q": max(counts)}
        positions = torch.cat([torch.arange(n, device=self.tokens.device) for n in counts])
        logits = self.model(torch.cat(prompts), lambda *given: self.attend(*given, positions, **packed))
        self.tokens.copy_(logits[ends[1:].long() - 1].argmax(-1))
        self.cache.lengths += ends.diff()

    def step(self) -> None:
        """Decode one more token of each sequence. Reads and writes only tensors on the device."""
        positions = self.cache.lengths.unsqueeze(1)
        logits = self.model(self.tokens.unsqueeze(1), lambda *given: self.attend(*given, positions))
        self.tokens.copy_(logits[:, 0].argmax(-1))
        self.cache.lengths += 1

    def capture(self) -> None:
        """Record a step as a CUDA graph. What the steps before that change is restored."""
        before = self.tokens.clone(), self.cache.lengths.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.tokens.copy_(before[0])
        self.cache.lengths.copy_(before[1])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def generate(self, prompts: list[Tensor], steps: int) -> list[Tensor]:
        """``steps`` tokens after each prompt."""
        self.prefill(prompts)
        found = [self.tokens.clone()]
        for done in range(1, steps):
            self.cache.reserve([len(prompt) + done for prompt in prompts])
            if self.tokens.is_cuda and self.graph is None:
                self.capture()
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step()
            found.append(self.tokens.clone())
        return list(torch.stack(found, 1))


# ---- plain torch ----


def plain_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole sequence (rows, heads, head_dim), in float32."""
    cos, sin = (x.unsqueeze(1) for x in rotary_tables(q.shape[0], q.device))
    group = q.shape[1] // k.shape[1]
    k, v = rotated(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated(q, cos, sin), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def compare(model: Llama, prompts: list[Tensor], found: list[Tensor], allowed: float) -> tuple[int, float]:
    """How many tokens are plain torch's most likely ones, and by how much the others are less likely at most.

    model: in float32. The difference is one of logits, in standard deviations of a row of them.

    Raises:
        SystemExit: it is beyond ``allowed``.
    """
    equal, worst = 0, 0.0
    for sequence, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        text = torch.cat((prompt, tokens))
        for i, token in enumerate(tokens.tolist()):
            logits = model(text[: len(prompt) + i], plain_attend)[-1]
            behind = float((logits.max() - logits[token]) / logits.std())
            equal, worst = equal + (behind == 0), max(worst, behind)
            if not behind <= allowed:
                raise SystemExit(
                    f"token {i} of sequence {sequence} is {token}, {behind:.3f} deviations behind plain torch's "
                    f"{int(logits.argmax())}; allowed: {allowed}"
                )
    return equal, worst


@torch.no_grad()
def main() -> None:
    """Generate and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    for name, value in (
        ("steps", 64),
        ("batch", 4),
        ("layers", 4),
        ("width", 512),
        ("heads_kv", 2),
        ("page", 16),
        ("longest", 200),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--latent", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is 'cuda', and there is no GPU; accepted here: --device cpu")
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    exact, model = (
        Llama(options.layers, options.width, options.heads_kv, options.seed, options.latent) for _ in range(2)
    )
    exact, model = exact.to(device), model.to(device, dtype)
    exact.load_state_dict(model.state_dict())  # the same weights, rounded to 16 bits
    draw = torch.Generator().manual_seed(options.seed)
    lengths = torch.randint(1, options.longest + 1, (options.batch,), generator=draw).tolist()
    prompts = [torch.randint(VOCABULARY, (n,), generator=draw).to(device) for n in lengths]
    rows = options.longest + options.steps
    cache = PagedCache.make(model, options.batch, rows, options.page, device, dtype)
    cos, sin = (table.to(dtype) for table in rotary_tables(cache.table.shape[1] * options.page, device))
    start = torch.zeros(options.batch, dtype=torch.int64, device=device)
    generator = Generator(model, cache, (cos, sin), start)
    found = generator.generate(prompts, options.steps)
    equal, worst = compare(exact, prompts, found, allowed=0.15 if dtype == torch.bfloat16 else 0.001)
    total = options.batch * options.steps
    pages = f"pages of {options.page}" + (", decoded in a CUDA graph" if generator.graph is not None else "")
    print(
        f"prompts of {lengths} tokens, {pages}: {equal} of {total} tokens are plain torch's most likely ones,"
    )
    print(f"others at most {worst:.4f} standard deviations of the logits behind them")


if __name__ == "__main__":
    main()
