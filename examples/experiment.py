"""From a changed layout to a verdict, which needs no GPU, and an A/B: rows of shared memory without a swizzle."""

import argparse

import rich
import torch

import layouts
from cute_attn import register
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.lab.race import ab
from cute_attn.lab.verdict import shown, verdict
from cute_attn.tiles import padded


class Plain(ForwardSm80):
    def smem_layout(self, rows, head_dim, stages=1):
        return layouts.smem_layout(rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=0)


register(Plain, variant="unswizzled")

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    names = "forward-sm80:unswizzled-bf16-d64", "forward-sm80-bf16-d64"
    rich.print(shown(*map(verdict, names)))
    print(ab(*names).sentence if torch.cuda.is_available() else "No GPU here: with one, an A/B would follow.")
