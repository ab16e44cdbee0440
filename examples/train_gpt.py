"""Train a small GPT twice from one seed: with this package's attention, and with PyTorch's.

    python examples/train_gpt.py              200 steps on the GPU; writes docs/train_gpt.png and .json
    python examples/train_gpt.py --steps 5    without a GPU in seconds: a smaller model, no dropout, no picture

Two layers, head dim 64, causal, dropout in attention and around it, on the bytes of this package's own sources. Both
runs have the same dropout masks: from the seed and the offset of torch's generator this package computes the mask of
PyTorch's flash attention, bit for bit. So the losses may differ by 16-bit rounding only, which is checked at the end.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_attn import attention

ROOT = Path(__file__).parents[1]
SIZES = {"width": (512, 128), "seqlen": (512, 128), "batch": (16, 2)}
"""Sizes on a GPU and on the CPU, where the definition in plain torch computes attention."""
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention: q, k, v (batch, seqlen, heads, dim) and a dropout probability -> the output."""


def ours(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """This package's attention, with the dropout mask that PyTorch's flash attention would use."""
    state = torch_rng_state(q) if dropout_p else None
    return attention(q, k, v, causal=True, dropout_p=dropout_p, rng_state=state)


def torch_rng_state(q: Tensor) -> Tensor:
    """Seed and offset that PyTorch's flash attention would use; advances the generator as it does."""
    generator = torch.cuda.default_generators[q.get_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 32 * q.shape[0] * q.shape[2])
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63, offset], device=q.device)


def pytorchs(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """scaled_dot_product_attention: FlashAttention-2 on a GPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self, width: int, heads: int, dropout: float, attend: Attend) -> None:
        super().__init__()
        self.heads, self.dropout, self.attend = heads, dropout, attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seqlen, width)."""
        # Strided slices of one tensor, without a copy.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = self.attend(q, k, v, self.dropout if self.training else 0.0)
        x = x + F.dropout(self.project(out.flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norms[1](x)), self.dropout, self.training)


class GPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self, layers: int, width: int, seqlen: int, dropout: float, attend: Attend) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, dropout, attend) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """text: (batch, seqlen) of bytes."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def train(name: str, attend: Attend, options: argparse.Namespace) -> list[float]:
    """The loss of each step; says which step it is at."""
    text = b"\n".join(path.read_bytes() for path in sorted((ROOT / "cute_attn").rglob("*.py")))
    data = torch.tensor(list(text), device=options.device)
    torch.manual_seed(options.seed)
    batches = torch.Generator().manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.seqlen, options.dropout, attend).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(data) - options.seqlen - 1, (options.batch, 1), generator=batches)
        rows = data[(starts + torch.arange(options.seqlen + 1)).to(options.device)].long()
        for group in optimizer.param_groups:  # a warm-up
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        with torch.autocast(options.device, torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if options.device == "cpu" or step % 20 == 0:  # a loss that is read waits for the GPU
            print(f"{name}: step {step + 1} of {options.steps}, loss {loss:.4f}", flush=True)
    return torch.stack(losses).tolist()


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draw both losses, and their difference below."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(3, 1))
    for name, style in zip(losses, ("-", ":"), strict=True):
        above.plot(losses[name], style, label=name)
    a, b = losses.values()
    below.plot([x - y for x, y in zip(a, b, strict=True)], color="gray")
    above.set_ylabel("loss (nats a byte)")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train twice, compare, plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    for name, value in (("steps", 200), ("layers", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, (on_gpu, on_cpu) in SIZES.items():
        text = f"by default {on_gpu}, on the CPU {on_cpu}"
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--dropout", type=float, help="by default 0.1, on the CPU 0")
    parser.add_argument("--plot", help="the picture; by default docs/train_gpt.png, on the CPU none")
    options = parser.parse_args()
    for name, sizes in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[options.device == "cpu"])
    if options.dropout is None:
        options.dropout = 0.1 if options.device == "cuda" else 0.0
    if options.plot is None and options.device == "cuda":
        options.plot = str(ROOT / "docs" / "train_gpt.png")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and there is no GPU; accepted here: cpu")
    if options.device == "cpu" and options.dropout:
        parser.error("--dropout is not 0; accepted with --device cpu: 0, PyTorch has another mask there")
    losses = {
        name: train(name, attend, options) for name, attend in (("cute_attn", ours), ("PyTorch", pytorchs))
    }
    a, b = (torch.tensor(x) for x in losses.values())
    apart = (a - b).abs()
    print(f"first loss {a[0]:.4f} and {b[0]:.4f}, last {a[-1]:.4f} and {b[-1]:.4f}")
    print(f"apart by {apart.max():.4f} at most, {apart.mean():.4f} on average")
    if options.plot:
        plot(losses, Path(options.plot))
        Path(options.plot).with_suffix(".json").write_text(json.dumps(losses))
    # 16-bit rounding differences grow with steps; another mask or a wrong gradient exceeds this within a few.
    allowed = 0.002 + 0.02 * torch.arange(len(a)) / 100
    worst = int((apart - allowed).argmax())
    if apart[worst] > allowed[worst]:
        raise SystemExit(
            f"the losses of step {worst} differ by {apart[worst]:.4f}; allowed: {allowed[worst]:.4f}"
        )


if __name__ == "__main__":
    main()
