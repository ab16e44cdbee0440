"""The kernels that can be tested on this machine."""

import torch

from cute_attn import compiler
from cute_attn.compiler import registry


def runnable_archs(op: str = "forward") -> list[str]:
    """Archs whose kernels of ``op`` run on this GPU; without a GPU all of them, and the tests are skipped."""
    archs = [arch for op_, arch, variant in registry.KERNELS if op_ == op and not variant]
    if not torch.cuda.is_available():
        return archs
    target = compiler.default_target("sm80")
    return [arch for arch in archs if target in registry.RUNS_ON[arch]]
