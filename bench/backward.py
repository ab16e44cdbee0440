"""How fast is the backward, against everyone else's, in one run?

    python -m bench.backward                      every row; writes bench/results/DATE-GPU-backward.json
    python -m bench.backward '*d128*causal*'      the rows whose name matches
    python -m bench.backward --list               their names

Needs a GPU. What is timed is one call of autograd, which has q's, k's and v's gradients at its end, and the bias's in
the rows that say so. Five products count. Prints a row as it comes, and last a table with this package's speed over
each peer's.
"""

from collections.abc import Iterator
from dataclasses import replace

from bench import forward, run
from cute_attn.benchmark.workload import Workload


def workloads() -> Iterator[Workload]:
    """The forward's, with and without the bias's gradient; softcap, which has a derivative, in place of ALiBi."""
    for workload in forward.workloads():
        if workload.alibi:
            workload = replace(workload, alibi=False, softcap=True)
        yield replace(workload, op="backward")
        if workload.bias:
            yield replace(workload, op="backward", bias_grad=True)


if __name__ == "__main__":
    run.main("backward", __doc__.splitlines()[0], workloads())
