"""How fast is the backward against its peers, in one run?

    python -m bench.backward                      every row; writes bench/results/DATE-GPU-backward.json
    python -m bench.backward '*d128*causal*'      the rows whose name matches
    python -m bench.backward --list               their names

Needs a GPU. One call of autograd is timed, for the gradients of q, k and v, and of the bias in the rows named so. Five
products count. Prints each row, and last a table with this package's speed over the fastest peer's.
"""

from collections.abc import Iterator
from dataclasses import replace

from bench import forward, run
from cute_attn.lab.benchmark.workload import Workload


def workloads() -> Iterator[Workload]:
    """The forward's, with and without the bias's gradient; softcap, which has a derivative, in place of ALiBi."""
    for workload in forward.workloads():
        if workload.alibi:
            workload = replace(workload, alibi=False, softcap=True)
        yield replace(workload, op="backward")
        if workload.bias:
            yield replace(workload, op="backward", bias_grad=True)


if __name__ == "__main__":
    run.main("backward", run.timing_parser(__doc__, forward.IMPL, 100).parse_args(), workloads())
