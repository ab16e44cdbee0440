"""Small problems for compute-sanitizer, of each generation: python -m tests.gpu.sanitized [ends].

Forward and backward, the forward of a large head dim, and attention with a cache; ``ends``: unaligned rows that start
and end with their allocations.
"""

import sys
from dataclasses import replace

import torch

from tests.cases import BY_NAME
from tests.gpu.archs import runnable_archs
from tests.gpu.test_split_keys import Call
from tests.problem import Case

NAMES = ("causal-203x113", "varlen-causal", "causal-d128", "causal-d256", "everything-window-dropout")
CACHED = {"one-query": (1, 0, {}), "pages-of-8": (9, 8, {"causal": True}), "fixed": (9, 0, {"num_splits": 3})}
"""Queries of each sequence, rows of a page, options."""


LARGE = Case(
    "causal-d320", batch=1, seqlen_q=130, seqlen_k=200, nheads=2, nheads_kv=1, head_dim=320, causal=True
)
ENDS = {
    "d59": (59, 1, 59, 0),
    "d59-two-heads": (59, 2, 59, 0),
    "d62": (62, 1, 62, 0),
    "d59-every-8-bytes": (59, 1, 60, 0),
    "d57-every-8-bytes": (57, 1, 60, 1),
    "d121-every-8-bytes": (121, 1, 124, 3),
}
"""Head dim, heads, elements from a head to the next one, and before the first one: rows start and end between words,
and between multiples of 8 bytes."""


def run_ends() -> None:
    """Run problems whose tensors are separate allocations, provided that the allocator does not round sizes."""
    for name, (head_dim, heads, distance, first) in ENDS.items():
        sizes = {"batch": 1, "nheads": heads, "nheads_kv": heads, "seqlen_q": 67, "seqlen_k": 131}
        problem = Case(name, head_dim=head_dim, **sizes).build("cuda")
        problem = replace(problem, tensors=tuple(moved(x, distance, first) for x in problem.tensors))
        start = problem.start()
        assert start.out is not None
        problem.gradients(replace(start, out=moved(start.out, distance, first)))
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


def moved(x: torch.Tensor, distance: int, first: int) -> torch.Tensor:
    """A copy of x at the end of a separate allocation, from an element on, its heads ``distance`` elements apart."""
    batch, length, heads, head_dim = x.shape
    last = (batch * length * heads - 1) * distance
    strides = (length * heads * distance, heads * distance, distance, 1)
    return x.new_empty(first + last + head_dim).as_strided(x.shape, strides, first).copy_(x)


def main() -> None:
    """Run all problems, each with a few blocks."""
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
    for arch in runnable_archs():
        LARGE.build("cuda").run(kernel=arch)
        torch.cuda.synchronize()
        print(f"ran {LARGE.name} {arch}", flush=True)
    for name, (queries, page, options) in CACHED.items():
        call = Call((70, 0, 400), (queries,) * 3, leftpad=(0, 0, 130))
        for arch in runnable_archs("kvcache"):
            call.run_paged(page, kernel=arch, **options)
            torch.cuda.synchronize()
            print(f"ran {name} {arch}", flush=True)


if __name__ == "__main__":
    run_ends() if "ends" in sys.argv else main()
