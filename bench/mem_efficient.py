"""How fast are fp32, tf32 and head dims beyond 256 against PyTorch's memory-efficient kernels, in one run?

    python -m bench.mem_efficient                     every row; writes bench/results/DATE-GPU-mem_efficient.json
    python -m bench.mem_efficient 'bwd-fp32*'         the rows whose name matches
    python -m bench.mem_efficient --list              their names

Needs a GPU. Of a backward, one call of autograd is timed, for the gradients of q, k and v. fp32 rows are timed twice:
at fp32's precision, as PyTorch's kernel computes, and in tf32; bf16 rows of small head dims on the Ampere kernels too.
"""

from collections.abc import Iterator

from bench import run
from cute_attn.lab.benchmark.workload import Workload

PEER = "mem_efficient"
IMPL = (PEER, "*-sm*", "cute_attn/tf32")


def workloads() -> Iterator[Workload]:
    """Causal and not: fp32 at common head dims, bf16 and fp32 at large ones, with aligned and unaligned rows (head dim
    59)."""
    for op in ("forward", "backward"):
        for causal in (True, False):
            for head_dim, seqlen in ((64, 2048), (64, 8192), (128, 2048), (128, 8192), (256, 4096)):
                yield Workload(8192 // seqlen, seqlen, 16, head_dim, dtype="fp32", causal=causal, op=op)
            shape = {"seqlen": 4096, "causal": causal, "op": op}
            for head_dim, head_dim_v in ((320, 320), (512, 512), (576, 512)):
                for dtype in ("bf16", "fp32"):
                    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
                    yield Workload(batch=2, nheads=4, **dims, **shape)  # type: ignore[arg-type]
        for head_dim in (59, 64, 123, 128):
            yield Workload(batch=2, seqlen=4096, nheads=16, head_dim=head_dim, causal=True, op=op)
        yield Workload(batch=2, seqlen=4096, nheads=16, head_dim=64, dtype="fp32", bias="fp32", op=op)
        yield Workload(
            batch=2, seqlen=4096, nheads=16, head_dim=64, dtype="fp32", causal=True, dropout=PEER, op=op
        )


if __name__ == "__main__":
    run.main("mem_efficient", run.timing_parser(__doc__, IMPL, 100).parse_args(), workloads())
