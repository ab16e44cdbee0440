"""Do programs gain by ``cute_attn.sdpa.activate()``, and are the calls that it leaves to PyTorch still slower here?

    python -m bench.drop_ins                          every row, under three minutes
    python -m bench.drop_ins '*cache*' 'DiT*'         the rows whose name matches
    python -m bench.drop_ins -o rows.json

Needs a GPU. A row is a program's attention call, or a step of a whole training with dropout. It is timed by PyTorch, by
the drop-in as it is, and with every call served that kernels support. What PyTorch computes faster is declined by
``cute_attn/sdpa/slower.py``: where "all served" beats PyTorch a row of that table is to go, where "drop-in" loses to
PyTorch one is missing. Medians of milliseconds, in turns, on a cold L2; compiling comes before.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.run import choose, need_gpu, parser

Run = Callable[[], Any]


@dataclass(frozen=True)
class Attention:
    """A call of scaled_dot_product_attention in bf16.

    Attributes:
        batch, heads, heads_kv, queries, keys, head_dim: sizes.
        masked: whether a bool mask (1, 1, queries, keys) hides the last quarter of the keys, as a static cache's does.
        train: whether gradients of query, key and value are computed as well.
        dropout_p: of the call.
        causal: is_causal.
    """

    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    head_dim: int
    masked: bool = False
    train: bool = False
    dropout_p: float = 0.0
    causal: bool = False

    def tensors(self, device: str) -> tuple[list[Tensor], Tensor | None]:
        """query, key and value with heads in the third dimension of memory, and the mask."""
        sizes = ((self.queries, self.heads), *[(self.keys, self.heads_kv)] * 2)
        inputs = []
        for rows, heads in sizes:
            shape = (self.batch, rows, heads, self.head_dim)
            x = torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2)
            inputs.append(x.requires_grad_(self.train))
        mask = None
        if self.masked:
            seen = torch.arange(self.keys, device=device) < self.keys * 3 // 4
            mask = seen.expand(1, 1, self.queries, self.keys).contiguous()
        return inputs, mask

    def ready(self) -> Run:
        (query, key, value), mask = self.tensors("cuda")

        def run() -> None:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.dropout_p,
                is_causal=self.causal,
                enable_gqa=self.heads != self.heads_kv,
            )
            if self.train:
                torch.autograd.grad(out, (query, key, value), out.detach())

        return run


class Block(nn.Module):
    """A block of GPT-2: causal attention and an MLP, with dropout in and behind both."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, width)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.project(found.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.mlp(self.norms[1](x))


@dataclass(frozen=True)
class Training:
    """A training step of GPT-2's 124M parameters, as in nanoGPT: bf16 autocast, AdamW.

    Attributes:
        batch: sequences of 1024 tokens.
        dropout: everywhere.
    """

    batch: int
    dropout: float

    def ready(self) -> Run:
        width, layers, vocabulary, tokens = 768, 12, 50304, 1024
        embed = nn.Embedding(vocabulary, width)
        blocks = [Block(width, 12, self.dropout) for _ in range(layers)]
        model = nn.Sequential(embed, *blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        model.cuda()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        given = torch.randint(vocabulary, (self.batch, tokens + 1), device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(given[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        return step


ROWS: dict[str, Attention | Training] = {
    **{
        f"static cache, {who}, {queries} queries": Attention(batch, 32, 32, queries, keys, 128, masked=True)
        for who, batch, keys in (("gpt-fast", 1, 2048), ("transformers", 8, 1024))
        for queries in (1, 4, 16)
    },
    "static cache, grouped heads, 1 query": Attention(8, 32, 8, 1, 4096, 128, masked=True),
    "DiT, 256 x 256": Attention(64, 16, 16, 256, 256, 72),
    "DiT, 512 x 512": Attention(16, 16, 16, 1024, 1024, 72),
    "DiT, 1024 x 1024": Attention(2, 16, 16, 4096, 4096, 72),
    "DiT, 512 x 512, training": Attention(16, 16, 16, 1024, 1024, 72, train=True),
    "GPT-2's attention with dropout": Attention(
        12, 12, 12, 1024, 1024, 64, train=True, dropout_p=0.1, causal=True
    ),
    "nanoGPT, dropout 0.1": Training(12, 0.1),
    "nanoGPT, no dropout": Training(12, 0.0),
}


@contextlib.contextmanager
def all_served() -> Iterator[None]:
    """Nothing is declined for being slower."""
    from cute_attn.host import plans
    from cute_attn.sdpa import slower

    def decline(rows: tuple[slower.Row, ...]) -> None:
        slower.ROWS = rows
        plans.forget()

    rows = slower.ROWS
    decline(())
    try:
        yield
    finally:
        decline(rows)


def measure(row: Attention | Training, clock: Any) -> dict[str, Any]:
    """Times of a row in PyTorch, with the drop-in, and with all calls served; and which calls the drop-in declined."""
    from cute_attn import sdpa

    torch.manual_seed(0)
    run = row.ready()

    def active() -> None:
        with sdpa.active(strict=True):
            run()

    before = sdpa.served.copy()
    active()
    calls = sdpa.served - before
    times = clock.medians({"PyTorch": run, "drop-in": active}, 200.0, most=200)
    with all_served():
        times["all served"] = clock.medians({"PyTorch": run, "all served": active}, 200.0, most=200)[
            "all served"
        ]
    return {
        "ms": times,
        "speed-up": times["PyTorch"] / times["drop-in"],
        "served": sum(count for (_, reason), count in calls.items() if not reason),
        "declined": {reason: count for (_, reason), count in calls.items() if reason},
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("-o", "--output", type=Path, help="the file to write")
    options = made.parse_args()
    names = choose(options, {name: name for name in ROWS})
    need_gpu()
    from cute_attn.lab.benchmark.results import machine
    from cute_attn.lab.benchmark.timing import Clock

    clock, rows = Clock(), {}
    print(f"{'ms, medians':42} {'PyTorch':>9} {'drop-in':>9} {'all served':>11}  times as fast, served")
    for name in names:
        found = rows[name] = measure(ROWS[name], clock)
        pytorch, ours, everything = found["ms"].values()
        print(
            f"{name:42} {pytorch:9.4f} {ours:9.4f} {everything:11.4f}  {pytorch / ours:.2f} "
            f"({pytorch / everything:.2f} all served), {found['served']} calls",
            flush=True,
        )
        for reason, count in found["declined"].items():
            print(f"    {count} left to PyTorch: {reason}", flush=True)
        torch.cuda.empty_cache()
    if options.output is not None:
        options.output.write_text(json.dumps(machine() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
