"""Train a small MeanFlow model twice from one seed: with this package's attention, and with the dense definition.

    python examples/meanflow.py                   200 steps on the GPU; without one, 5 steps of a smaller model

A MeanFlow (Geng et al. 2025, https://arxiv.org/abs/2505.13447) learns the mean velocity u(z, r, t) of a flow between
the times r and t, which then samples in one step. Its target is v - (t - r) du/dt, with du/dt the derivative of u along
(v, 0, 1): one forward-mode derivative through the network in each step, and gradients of u alone. Data are waves of
random phase. Both runs see the same noise, so their losses differ by rounding only, which is checked at the end.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jvp

from cute_attn import attention

CHANNELS, HEAD_DIM = 4, 64
SIZES = {"cuda": {"width": 512, "tokens": 1024, "batch": 8}, "cpu": {"width": 64, "tokens": 32, "batch": 4}}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (batch, tokens, heads, HEAD_DIM) -> the output."""


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This package's attention: one launch computes the output and its tangent."""
    return attention(q, k, v)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, with a matrix of all scores."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / math.sqrt(HEAD_DIM)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)


class Block(nn.Module):
    """Attention, in bf16 on a GPU, and an MLP, with residuals."""

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.attend, self.heads = attend, width // HEAD_DIM
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        q, k, v = self.qkv(self.norms[0](x)).to(dtype).unflatten(-1, (3, self.heads, HEAD_DIM)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class MeanVelocity(nn.Module):
    """u(z, r, t): the mean velocity between the times r and t, (batch,) each, at z (batch, tokens, CHANNELS)."""

    def __init__(self, width: int, tokens: int, attend: Attend) -> None:
        super().__init__()
        self.embed, self.times = nn.Linear(CHANNELS, width), nn.Linear(4, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(Block(width, attend), Block(width, attend))
        self.head = nn.Linear(width, CHANNELS)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = torch.stack((t.sin(), t.cos(), (t - r).sin(), (t - r).cos()), -1)
        x = self.embed(z) + self.positions + self.times(times)[:, None]
        return self.head(self.blocks(x))


def waves(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Waves of random phase and frequency: (batch, tokens, CHANNELS)."""
    phase, frequency = torch.rand(2, batch, 1, CHANNELS, device=device)
    place = torch.linspace(0, 2 * math.pi, tokens, device=device)[:, None]
    return ((1 + frequency) * place + 2 * math.pi * phase).sin()


def loss_of(model: MeanVelocity, data: Tensor) -> Tensor:
    """The MeanFlow loss of a batch at random times."""
    noise, times = torch.randn_like(data), torch.rand(2, len(data), device=data.device)
    (r, t), velocity = times.sort(0).values, noise - data
    z = data + t[:, None, None] * velocity
    u, du_dt = jvp(model, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
    target = velocity - (t - r)[:, None, None] * du_dt
    return (u - target.detach()).square().mean()


def train(attend: Attend, steps: int, device: torch.device) -> list[float]:
    """The losses of a run from seed 0."""
    torch.manual_seed(0)
    sizes = SIZES[device.type]
    model = MeanVelocity(sizes["width"], sizes["tokens"], attend).to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-4), []
    for _ in range(steps):
        loss = loss_of(model, waves(sizes["batch"], sizes["tokens"], device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="by default 200, on the CPU 5")
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 200 if options.device == "cuda" else 5
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; accepted: 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is 'cuda', and there is no GPU; accepted here: --device cpu")
    device = torch.device(options.device)
    runs = {attend.__name__: train(attend, options.steps, device) for attend in (ours, dense)}
    for name, losses in runs.items():
        print(f"{name:6} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    worst = max(abs(a / b - 1) for a, b in zip(*runs.values(), strict=True))
    print(f"largest difference of the two runs' losses: {worst:.1e}")
    if worst > (5e-2 if device.type == "cuda" else 1e-4):
        raise SystemExit("the losses differ by more than rounding")


if __name__ == "__main__":
    main()
