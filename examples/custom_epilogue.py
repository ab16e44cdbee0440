"""A user-defined epilogue: a learned bias for each relative position, as in T5 (https://arxiv.org/abs/1910.10683).

    score[query, key] += table[head, clamp(key - query, -reach, reach) + reach]

The kernel reads it from a table (nheads, 2 * reach + 1), so no (seqlen_q, seqlen_k) bias is in memory. The class below
is the whole epilogue. Its registered name is accepted in kernel names and by ``attention``, on sm80 and on sm90.

    python examples/custom_epilogue.py
    cute-attn --load examples/custom_epilogue.py check forward-sm80-bf16-d64-causal-relative_position
"""

import argparse
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn import Epilogue, Traits, attention, check_epilogue, compile, lookup, register_epilogue
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference import emulate

NAME = "forward-sm80-bf16-d64-causal-relative_position"
NARROW = "tile_m=128,tile_n=64,num_warps=4,num_stages=1"  # leaves registers for an epilogue


@dataclass(frozen=True)
class HeadTable:
    """One head's row of the table, and the constants of distances and of the scores' scale."""

    row: cute.Tensor
    reach: Int32
    shift: Int32  # query i is aligned with key i + shift
    inv_score_scale: Float32


@register_epilogue("relative_position")
class RelativePosition(Epilogue):
    """One argument: the table, float32 (nheads, 2 * reach + 1), on q's device."""

    def fake_args(self) -> tuple:
        return (make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1)),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        (table,) = inputs.extra["relative_position"]
        return (table,)

    def begin(self, args: tuple, context: ScoreContext) -> HeadTable:
        (table,) = args
        reach = Int32(table.shape[1]) // 2
        return HeadTable(table[context.head, None], reach, context.shift, context.inv_score_scale)

    @cute.jit
    def forward(self, state: HeadTable, tile: ScoreTile, loaded: tuple = ()) -> None:
        for r in cutlass.range_constexpr(len(tile.rows)):
            first = tile.col0 - (tile.row0 + tile.rows[r] + state.shift)
            for c in cutlass.range_constexpr(len(tile.cols)):
                # The clamp also keeps the index in the table for queries and keys beyond the sequences.
                distance = cutlass.min(cutlass.max(first + tile.cols[c], -state.reach), state.reach)
                tile.acc[r, c] = tile.acc[r, c] + state.row[distance + state.reach] * state.inv_score_scale

    def backward(self, state: HeadTable, tile: ScoreTile, saved: Any) -> None:
        """The score after grows as the score before: its gradient stays. The table has none."""

    @classmethod
    def example_args(cls, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> tuple:
        return (torch.randn(nheads, 257),)

    @staticmethod
    def reference(scores: torch.Tensor, coords: Any, inputs: ScoreInputs) -> torch.Tensor:
        (table,) = inputs.extra["relative_position"]
        reach = table.shape[1] // 2
        distance = (coords.key - coords.diagonal).clamp(-reach, reach)
        return scores + table[coords.head, distance + reach].to(scores.dtype)


def compare_costs() -> None:
    """Instructions, registers and spills of the Ampere kernel for two targets and the Hopper kernel. Needs no GPU."""
    hopper = NAME.replace("sm80", "sm90")
    for name, tile, target in ((NAME, NARROW, "sm80"), (NAME, NARROW, "sm90"), (hopper, None, "sm90")):
        compiled = compile(name, tile, target)
        used, count = compiled.resources, sum(compiled.instructions.values())
        print(f"{name} for {target}, {compiled.tile}")
        print(f"  {count} instructions, {used.registers} registers, {used.spill_store_bytes} bytes spilled")


def largest_difference_on_cpu() -> float:
    """The device code above, compiled for the CPU and run for all threads, against ``reference``."""
    kernel = lookup(Traits.parse(NAME))
    seqlen_q, seqlen_k, scale = 150, 200, 0.1
    products, table = torch.randn(2, 4, seqlen_q, seqlen_k), torch.randn(4, 65)
    inputs = ScoreInputs(extra={"relative_position": (table,)})
    scores = emulate.scores_on_host(kernel, products, scale, inputs)
    expected = emulate.scores_by_definition(kernel.traits, products, scale, inputs)
    assert torch.equal(scores.isinf(), expected.isinf())
    return float((scores - expected)[expected.isfinite()].abs().max())


def largest_difference_on_gpu() -> float:
    """The kernel on this GPU against the reference, which serves CPU tensors."""
    q, k, v = (torch.randn(2, 777, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    table = torch.randn(8, 257)
    on_cpu = attention(q, k, v, causal=True, epilogues={"relative_position": table})
    on_gpu = attention(
        q.cuda(), k.cuda(), v.cuda(), causal=True, epilogues={"relative_position": table.cuda()}
    )
    return float((on_gpu.cpu().float() - on_cpu.float()).abs().max())


def main() -> None:
    torch.manual_seed(0)
    compare_costs()
    print(f"Its code on this CPU against torch: largest difference {largest_difference_on_cpu():.1e}")
    print(check_epilogue("relative_position"))
    if torch.cuda.is_available():
        print(f"The kernel on this GPU against torch: largest difference {largest_difference_on_gpu():.1e}")
    else:
        print("No GPU here: with one, the kernel would now be compared with torch.")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
