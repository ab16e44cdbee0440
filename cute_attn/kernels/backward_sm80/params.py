"""What the main loop of the Ampere backward works on."""

from dataclasses import dataclass

from cutlass import Float32, Int32, cute

from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels.backward_sm80.gradients import Gradients
from cute_attn.kernels.backward_sm80.loads import BlockLoad
from cute_attn.kernels.backward_sm80.products import Operands
from cute_attn.kernels.backward_sm80.storage import BackwardSm80Storage
from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class MainloopContext:
    """One query head of a CTA's key block: what a step of the mainloop reads and writes."""

    smem: BackwardSm80Storage
    operands: Operands
    gradients: Gradients
    load_q: BlockLoad
    load_do: BlockLoad
    blocks: BlockRange
    state: ScoreState
    dq_blocks: cute.Pointer  # fp32 accumulator of dQ, one query block after the other
    key0: Int32
    scale_log2: Float32
    thread: Int32
