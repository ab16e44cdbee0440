"""Small problems for compute-sanitizer, of each generation: python -m tests.gpu.sanitized.

Forward and backward, and attention with a cache.
"""

from dataclasses import replace

import torch

from tests.cases import BY_NAME
from tests.gpu.archs import runnable_archs
from tests.gpu.test_split_keys import Call

NAMES = ("causal-203x113", "varlen-causal", "causal-d128", "causal-d256", "everything-window-dropout")
CACHED = {
    "one-query": (1, 0, {}),
    "pages-of-3": (9, 3, {"causal": True}),
    "parts": (9, 0, {"num_splits": 3}),
}
"""Queries of each sequence, rows of a page, options."""


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
    for name, (queries, page, options) in CACHED.items():
        call = Call((70, 0, 400), (queries,) * 3, leftpad=(0, 0, 130))
        for arch in runnable_archs("kvcache"):
            if page:
                call.run_paged(page, kernel=arch, **options)
            else:
                call.run(kernel=arch, **options)
            torch.cuda.synchronize()
            print(f"ran {name} {arch}", flush=True)


if __name__ == "__main__":
    main()
