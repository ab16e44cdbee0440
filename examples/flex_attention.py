"""A FlexAttention program on these kernels: images of several sizes in one sequence, patches see their neighbours.

    python examples/flex_attention.py        on a GPU: errors, and milliseconds before and after; on a CPU: errors

A patch sees the patches of its image that are up to REACH rows and columns away; a bias lowers the scores of farther
ones (ALiBi in two dimensions). The program is unedited, except for one line in ``main``, ``cute_attn.flex.activate()``.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import cute_attn.flex

REACH, NHEADS, HEAD_DIM = 7, 8, 64

# ---- the program ----


def packed(sizes: list[tuple[int, int]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """The image, row and column of each patch; images of (rows, columns) patches follow each other."""
    image = [torch.full((rows * columns,), i) for i, (rows, columns) in enumerate(sizes)]
    place = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in sizes]
    return torch.cat(image).to(device), *torch.cat(place).to(device).unbind(1)


def neighbourhood(image: Tensor, row: Tensor, column: Tensor) -> tuple[Callable[..., Any], BlockMask]:
    """The score function and the mask."""
    slopes = torch.exp2(-torch.arange(1, NHEADS + 1, device=image.device) * 8 / NHEADS)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * ((row[q] - row[k]).abs() + (column[q] - column[k]).abs())

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        close = ((row[q] - row[k]).abs() <= REACH) & ((column[q] - column[k]).abs() <= REACH)
        return close & (image[q] == image[k])

    length = len(image)
    return alibi, create_block_mask(near, None, None, length, length, device=str(image.device))


# ---- before and after ----


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds of one run on the GPU, after a run that compiles."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    """Compute the same calls by PyTorch and by the kernels, or the definition on a CPU."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    sizes = [(48, 64), (64, 64), (32, 24), (100, 40)] if on_gpu else [(12, 16), (8, 8), (5, 9)]
    score_mod, mask = neighbourhood(*packed(sizes, device))
    shape = (1, NHEADS, mask.shape[-1], HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=on_gpu) for _ in range(3))
    compiled = torch.compile(flex_attention, disable=not on_gpu)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU it is meant

    def train() -> Tensor:
        out = compiled(q, k, v, score_mod, mask)
        if on_gpu:
            out.backward(torch.ones_like(out))
        return out.detach()

    theirs, before = train(), milliseconds(train) if on_gpu else math.nan
    if on_gpu:
        cute_attn.flex.activate()
        ours, after = train(), milliseconds(train)
    else:  # PyTorch's calls stay PyTorch's
        ours, after = cute_attn.flex.flex_attention(q, k, v, score_mod, mask), math.nan
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"{len(sizes)} images, {shape[2]} patches: largest difference from PyTorch's {difference:.0e}")
    if on_gpu:
        print(f"forward and backward: PyTorch {before:.2f} ms, cute_attn {after:.2f} ms")
    else:
        print("No GPU here: the definition, in plain torch")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
