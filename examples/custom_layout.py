"""A kernel with a user-defined layout: subclass it, override one method, register the subclass as a variant.

Rows of K are multiples of 128 bytes, all 32 banks, so without a swizzle the eight rows of an ldmatrix start in the same
bank. Two variants here do not swizzle: one has plain rows, one pads each by 16 bytes. Bank conflicts and resources are
counted without a GPU; with one, the kernels are run and timed.

    python examples/custom_layout.py
    cute-attn --load examples/custom_layout.py show forward-sm80:padded-bf16-d64
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cutlass import cute

import layouts
from cute_attn import attention, compile, lookup, register
from cute_attn.kernels.forward_sm80 import ForwardSm80
from cute_attn.tiles import ForwardSm80Tile, padded
from cute_attn.traits import Traits
from layouts.show import BankConflicts, bank_conflicts

PAD = 8  # elements, 16 bytes


@dataclass(frozen=True)
class PlainForward(ForwardSm80):
    """Rows of shared memory without swizzle or padding."""

    def smem_layout(self, rows: int, head_dim: int, stages: int = 1) -> cute.ComposedLayout:
        return layouts.smem_layout(rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=0)


@dataclass(frozen=True)
class PaddedTile(ForwardSm80Tile):
    """A tile whose rows have room for the padding: areas follow each other, and one that does not fit is refused."""

    def row_bytes(self, traits: Traits) -> tuple[int, int]:
        row, row_v = super().row_bytes(traits)
        return row + 2 * PAD, row_v + 2 * PAD


@dataclass(frozen=True)
class PaddedForward(ForwardSm80):
    """Rows of shared memory padded by 16 bytes: each starts four banks after the one before."""

    def smem_layout(self, rows: int, head_dim: int, stages: int = 1) -> cute.Layout:
        stride = padded(head_dim) + PAD
        return cute.make_layout((rows, padded(head_dim), stages), stride=(stride, 1, rows * stride))

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> PaddedTile:
        return PaddedTile(**vars(super().default_tile(traits, target)))


register(PlainForward, variant="plain")
register(PaddedForward, variant="padded")
KERNELS = ("forward-sm80-bf16-d64", "forward-sm80:plain-bf16-d64", "forward-sm80:padded-bf16-d64")


def count_conflicts(kernel: Any) -> Iterator[tuple[str, BankConflicts]]:
    """The wavefronts of a tile in each copy to or from shared memory."""
    head_dim, rows, dtype = kernel.traits.head_dim, kernel.tile.tile_n, kernel.dtype

    def smem() -> Any:
        return kernel.smem_layout(rows, head_dim)

    copies = {
        "cp.async of K": (lambda: kernel.gmem_load(head_dim), smem),
        "ldmatrix of K": (lambda: layouts.ldmatrix_copy_b(kernel.tiled_mma(), dtype), smem),
        "ldmatrix of V": (
            lambda: layouts.ldmatrix_copy_b(kernel.tiled_mma(), dtype, transpose=True),
            lambda: layouts.transposed(smem()),
        ),
    }
    for what, (copy, layout) in copies.items():
        yield what, bank_conflicts(copy, layout, dtype)


def compare_costs() -> None:
    """Bank conflicts, and the compiler's resources of each kernel. Needs no GPU."""
    for name in KERNELS:
        compiled = compile(name)
        used = compiled.resources
        print(f"\n{name} on {compiled.target}, {compiled.tile}")
        print(f"  {used.registers} registers, {used.shared_memory_bytes} bytes of shared memory", end=", ")
        print(f"{compiled.instructions['LDSM']} ldmatrix, {used.spill_store_bytes} bytes spilled")
        for what, found in count_conflicts(lookup(Traits.parse(name), compiled.tile)):
            print(
                f"  {what}: {found.wavefronts} wavefronts, {found.minimum} without conflicts, {found.ways}-way"
            )


def run_on_gpu() -> None:
    """Median times of the three kernels, and whether their outputs are equal."""
    from cute_attn.lab.benchmark.timing import Clock

    q, k, v = (torch.randn(4, 4096, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    runs = {
        kernel: lambda kernel=kernel: attention(q, k, v, kernel=kernel)
        for kernel in ("sm80", "sm80:plain", "sm80:padded")
    }
    outputs = {kernel: run() for kernel, run in runs.items()}
    for kernel, milliseconds in Clock().medians(runs).items():
        same = "the same output" if torch.equal(outputs[kernel], outputs["sm80"]) else "ANOTHER OUTPUT"
        print(f"  {kernel:12} {milliseconds:.3f} ms, {same}")


def main() -> None:
    compare_costs()
    if torch.cuda.is_available():
        print("\n4 x 4096 x 16 heads x 64 on this GPU")
        run_on_gpu()
    else:
        print("\nNo GPU here: with one, the three kernels would now be run and timed.")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
