"""How fast is the forward against its peers, in one run?

    python -m bench.forward                       every row; writes bench/results/DATE-GPU-forward.json
    python -m bench.forward '*d128*causal*'       the rows whose name matches
    python -m bench.forward --list                their names

Needs a GPU. Prints each row, and last a table with this package's speed over the fastest peer's: see :mod:`bench.run`.
"""

from collections.abc import Iterator

from bench import run
from cute_attn.lab.benchmark import PEERS
from cute_attn.lab.benchmark.workload import Workload, mixed_lengths, standard

IMPL = (*PEERS, "*-sm*")


def workloads() -> Iterator[Workload]:
    """Head dims and lengths, full and causal; then one feature at a time."""
    for head_dim in (64, 128, 256):
        for seqlen in (512, 2048, 8192, 16384):
            for causal in (False, True):
                yield standard(head_dim, seqlen, causal=causal)
    for head_dim in (64, 128):
        yield standard(head_dim, 2048, causal=True, dropout="flash")
        yield standard(head_dim, 2048, causal=True, dropout="mem_efficient")
        yield standard(head_dim, 2048, bias="bf16")
    yield Workload(16, 512, 16, 32, bias="bf16")
    yield Workload(2, 8192, 16, 128, nheads_kv=2, causal=True)
    yield Workload(1, 8192, 32, 128, nheads_kv=8, causal=True)  # Llama-3-8B
    yield standard(128, 8192, causal=True, window=1024)
    yield standard(128, 8192, causal=True, alibi=True)
    yield Workload(1, 1, 16, 128, causal=True, lengths=mixed_lengths(16384, 8192))
    yield standard(64, 2048, causal=True, dtype="fp16")
    yield standard(128, 8192, causal=True, dtype="fp16")


if __name__ == "__main__":
    run.main("forward", run.timing_parser(__doc__, IMPL, 100).parse_args(), workloads())
