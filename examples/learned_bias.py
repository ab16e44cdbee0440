"""Train a learned bias by relative position, as T5 has it, with PyTorch's FlexAttention and with this package's.

    python examples/learned_bias.py        on a GPU: bf16, kernels; on a CPU: fp32, the definition

On a CPU FlexAttention has no backward: there PyTorch's attention with a dense bias takes its place.

The task is to repeat the token LAG positions back. Queries and keys carry no position, so only the table can find that
token: learning it takes the table's gradient. Both runs start from the same weights and see the same tokens.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_attn.flex

NHEADS, HEAD_DIM, TOKENS, LAG, BUCKETS = 2, 64, 16, 3, 16


def bucket(distance: Tensor) -> Tensor:
    """T5's: one for each of the nearest keys, then ever more keys to a bucket; the last one has no end."""
    exact = BUCKETS // 2
    far = exact + (torch.log(distance.clamp(min=1).float() / exact) / math.log(16) * exact).int()
    return torch.where(distance < exact, distance, far.clamp(max=BUCKETS - 1))


class Attention(nn.Module):
    """A layer with a table of biases, (heads, buckets)."""

    def __init__(self, flex: Callable[..., Any]) -> None:
        super().__init__()
        dim = NHEADS * HEAD_DIM
        self.flex = flex
        self.embed, self.qkv = nn.Embedding(TOKENS, dim), nn.Linear(dim, 3 * dim, bias=False)
        self.out, self.table = nn.Linear(dim, TOKENS), nn.Parameter(torch.zeros(NHEADS, BUCKETS))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seqlen) to (batch, seqlen, TOKENS)."""
        x = self.embed(tokens).to(torch.bfloat16 if tokens.is_cuda else torch.float32)
        split = nn.functional.linear(x, self.qkv.weight.to(x.dtype)).unflatten(-1, (3, NHEADS, HEAD_DIM))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        table, length = self.table, tokens.shape[1]

        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[h, bucket((q_idx - kv_idx).clamp(min=0))]

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx

        mask = create_block_mask(causal, None, None, length, length, device=str(tokens.device))
        attended = self.flex(q, k, v, bias, mask)
        return self.out(attended.transpose(1, 2).flatten(2).float())


def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor], mask: Any) -> Tensor:
    """The same attention with a bias (heads, queries, keys) in memory."""
    heads, queries, keys = (torch.arange(n) for n in (*q.shape[1:3], k.shape[2]))
    at = (heads[:, None, None], queries[:, None], keys)
    seen = mask.mask_mod(0, *at)
    bias = score_mod(torch.zeros(()), 0, *at).masked_fill(~seen, -math.inf)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def train(flex: Callable[..., Any], device: str, steps: int, length: int) -> tuple[list[float], Tensor]:
    """Losses of each step, and the table."""
    torch.manual_seed(0)
    model = Attention(flex).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (8, length), device="cpu").to(device)
        loss = nn.functional.cross_entropy(model(tokens)[:, LAG:].flatten(0, 1), tokens[:, :-LAG].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.table.detach()


def main() -> None:
    """Train both, and print every few losses."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        print("No GPU here: the definition, in plain torch, for half a minute", flush=True)
    device, steps, length = ("cuda", 200, 512) if on_gpu else ("cpu", 32, 48)
    theirs, _ = train(torch.compile(flex_attention) if on_gpu else dense, device, steps, length)
    ours, table = train(cute_attn.flex.flex_attention, device, steps, length)
    print(f"step   {'FlexAttention' if on_gpu else '  dense torch'}   cute_attn")
    for step in range(0, steps, steps // 8):
        print(f"{step:4}   {theirs[step]:13.4f}   {ours[step]:9.4f}")
    difference = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    found = table[:, 1:].argmax(-1).add(1).tolist()
    print(f"largest difference of the losses: {difference:.0e}; the buckets with the most weight: {found}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
