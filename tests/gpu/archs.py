"""Which kernels can be tested on this machine."""

import torch

from cute_attn import compiler, registry

FORWARD_ARCHS = [arch for op, arch, variant in registry.KERNELS if op == "forward" and not variant]


def runnable_archs() -> list[str]:
    """The kernel generations of the forward that run on this GPU; without one, all of them, to be skipped."""
    if not torch.cuda.is_available():
        return FORWARD_ARCHS
    target = compiler.default_target("sm80")
    return [arch for arch in FORWARD_ARCHS if target in registry.RUNS_ON[arch]]
