"""Small problems for compute-sanitizer, forward and backward of each generation: python -m tests.gpu.sanitized."""

from dataclasses import replace

import torch

from tests.cases import BY_NAME
from tests.gpu.archs import runnable_archs

NAMES = ("causal-203x113", "varlen-causal", "causal-d128", "causal-d256", "everything-window-dropout")


def main() -> None:
    """Run all of them, each with a few blocks."""
    for name in NAMES:
        case = BY_NAME[name]
        if not case.varlen:
            case = replace(case, batch=1, nheads=2, nheads_kv=1)
        problem = case.build("cuda")
        for arch in runnable_archs("backward"):
            for deterministic in (False, True):
                problem.gradients(problem.start(), kernel=arch, deterministic=deterministic)
            torch.cuda.synchronize()
            print(f"ran {name} {arch}", flush=True)


if __name__ == "__main__":
    main()
