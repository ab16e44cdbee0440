"""PyTorch's context parallelism over the kernels: one sequence, divided among GPUs, in a ring.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 2 examples/context_parallel.py --documents 24      packed documents, by FlexAttention

On GPUs forward and backward are timed. On CPUs the reference computes a short sequence.

torch.distributed.tensor.experimental.context_parallel calls PyTorch's attention operators on segments of a sequence,
merges their outputs by their LSE, and passes keys on, gathered or from neighbour to neighbour. With cute_attn.sdpa
active these operators are this package's; nothing else changes. For packed documents PyTorch gives each process its
rows of a BlockMask and gathers keys, and flex_attention is PyTorch's or this package's. Output and gradients are
compared with attention on the whole sequence in float32.
"""

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as engine
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cute_attn import flex, sdpa

ROTATIONS = ("allgather", "alltoall")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
NAMES = ("out", "dq", "dk", "dv")
HEADS = 2  # the dimension of the sequence in (batch, heads, seqlen, head_dim)


def inputs(options: argparse.Namespace, device: str) -> list[Tensor]:
    """query, key, value and the output's gradient, the same in every process."""
    torch.manual_seed(0)
    shape = (options.batch, options.heads, options.seqlen, options.head_dim)
    return [torch.randn(shape, device=device).bfloat16() for _ in range(4)]


def results(attend: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output and gradients of attention, causal unless options say more."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v, **(options or {"is_causal": True}))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


@contextlib.contextmanager
def on_the_kernels() -> Iterator[None]:
    """PyTorch's operators are ours; on CPUs, for which PyTorch has none of the name, by the reference."""
    if torch.cuda.is_available():
        with sdpa.active(unsupported="error"):
            yield
        return
    activation, original = sdpa.Activation(sdpa.Options(), "CPU"), F.scaled_dot_product_attention

    # context_parallel replaces the function of this name.
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False
    ) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
        activation.remove()


def in_parallel(mesh: DeviceMesh, tensors: list[Tensor], repeats: int) -> tuple[list[Tensor], list[float]]:
    """Output and gradients on the whole sequence, and milliseconds of forward and backward."""
    parts = [x.clone() for x in tensors]
    times = []
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[HEADS] * len(parts)):
        found = results(F.scaled_dot_product_attention, parts)
        for _ in range(repeats):
            times.append(milliseconds(lambda: results(F.scaled_dot_product_attention, parts)))
        whole = context_parallel_unshard(mesh, found, [HEADS] * len(found))
    return list(whole), times


def ends_of_documents(options: argparse.Namespace) -> list[int]:
    """Where documents of random lengths end, in ascending order."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(options.seqlen - 1, generator=generator)[: options.documents - 1] + 1
    return [*sorted(cuts.tolist()), options.seqlen]


class DocumentAttention(torch.nn.Module):
    """Attention whose keys PyTorch gathers from all processes before each call."""

    def __init__(self, attend: Callable[..., Tensor], mesh: DeviceMesh) -> None:
        super().__init__()
        self.attend = attend
        parallel = engine._ContextParallel(HEADS, engine._ContextParallel.AttentionType.FLEX)
        parallel._apply(self, mesh)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self.attend(query, key, value, **options)


def of_documents(
    mesh: DeviceMesh, tensors: list[Tensor], ends: list[int], attend: Callable[..., Tensor], repeats: int
) -> tuple[list[Tensor], list[float]]:
    """Like :func:`in_parallel`, where a query sees the earlier keys of its document."""
    seqlen, device = ends[-1], tensors[0].device
    document = torch.bucketize(
        torch.arange(seqlen, device=device), torch.tensor(ends, device=device), right=True
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    whole = create_block_mask(mask_mod, 1, 1, seqlen, seqlen, device)
    *parts, block_mask = engine._context_parallel_shard(mesh, [*tensors, whole], [HEADS] * len(NAMES) + [0])
    module, own = DocumentAttention(attend, mesh), [x.contiguous() for x in parts]
    found = results(module, own, block_mask=block_mask)
    times = [milliseconds(lambda: results(module, own, block_mask=block_mask)) for _ in range(repeats)]
    return list(context_parallel_unshard(mesh, found, [HEADS] * len(found))), times


def run_documents(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each implementation of flex_attention."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tensors, ends = inputs(options, device), ends_of_documents(options)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if gpu else SDPBackend.MATH):
        each = [
            results(F.scaled_dot_product_attention, [x[:, :, begin:end].float() for x in tensors])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
    exact = [torch.cat(x, HEADS) for x in zip(*each, strict=True)]
    implementations = {"cute_attn": flex.flex_attention}
    if gpu:
        implementations = {"pytorch": torch.compile(flex_attention), **implementations}
    rows = []
    for by, attend in implementations.items():
        found, times = of_documents(mesh, tensors, ends, attend, options.repeats if gpu else 0)
        row = {"rotation": "allgather", "backend": "flex", "by": by, "errors": errors(found, exact)}
        rows.append(row | {"ms": statistics.median(times) if times else None})
    return rows


def milliseconds(step: Callable[[], Any]) -> float:
    """Milliseconds of one step on all GPUs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Root mean square of the difference, relative to the exact values."""
    pairs = zip(NAMES, found, exact, strict=True)
    return {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rotation, backend and implementation."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tensors = inputs(options, device)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if gpu else SDPBackend.MATH):
        exact = results(F.scaled_dot_product_attention, [x.float() for x in tensors])
    rows = []
    for rotation in ROTATIONS:
        set_rotate_method(rotation)
        for backend in BACKENDS if gpu else ("flash",):
            for by in ("pytorch", "cute_attn") if gpu else ("cute_attn",):
                row: dict[str, Any] = {"rotation": rotation, "backend": backend, "by": by}
                rows.append(row)
                served = sdpa.served.copy()
                try:
                    with (
                        on_the_kernels() if by == "cute_attn" else contextlib.nullcontext(),
                        sdpa_kernel(BACKENDS[backend]) if gpu else contextlib.nullcontext(),
                    ):
                        found, times = in_parallel(mesh, tensors, options.repeats if gpu else 0)
                except RuntimeError as error:  # PyTorch's backend may not support it; if so, no process does
                    row["failed"] = str(error).splitlines()[0]
                    continue
                row |= {"errors": errors(found, exact), "ms": statistics.median(times) if times else None}
                calls = sdpa.served - served
                row["served"] = sum(n for (_, reason), n in calls.items() if not reason)
    return rows


def outcome(row: dict[str, Any]) -> str:
    """A row's errors and time as text."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    time = "" if row["ms"] is None else f"{row['ms']:8.3f} ms"
    return f"error {max(row['errors'].values()):.1e} {time}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    seqlen = 32768 if torch.cuda.is_available() else 256
    parser.add_argument("--seqlen", type=int, default=seqlen, help="of the whole sequence")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--documents", type=int, default=0, help="packed in the sequence; 0: one causal sequence"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed forwards and backwards")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("RANK is not set; accepted: processes that torchrun starts; --help has the command")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        rows = (run_documents if options.documents else run)(options)
        if dist.get_rank() == 0:
            for row in rows:
                print(f"{row['rotation']:10} {row['backend']:6} {row['by']:10} {outcome(row)}")
            if options.json is not None:
                gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
                about = {"gpu": gpu, "torch": torch.__version__, "processes": dist.get_world_size()}
                names = ("batch", "heads", "seqlen", "head_dim", "documents")
                about |= {name: getattr(options, name) for name in names}
                options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
