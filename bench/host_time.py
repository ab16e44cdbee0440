"""How much host time does a warm call take?

    python -m bench.host_time                     every row
    python -m bench.host_time '*dropout*'         the rows whose name matches

Needs a GPU. The problems are so small that host time dominates. Prints microseconds per call, the median and the least
of many short runs: of the forward alone, and of the forward and ``torch.autograd.grad``. PyTorch's
scaled_dot_product_attention comes first, as long as no operator is overridden. Then each of its rows comes twice: with
cute_attn.sdpa active, and after ``restore()``. Their runs alternate, since a busy host slows all; where it is busy the
least is the figure to read.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bench.run import choose, need_gpu, parser

CALLS, WARM_UP, REPETITIONS = 40, 5, 100


@dataclass(frozen=True)
class Row:
    """A call whose host time is measured.

    Attributes:
        name: of the row.
        call: makes a call; with True, on ``leaves``.
        leaves: q, k and v that require gradients; () if the call needs none.
        around: makes the context of the calls, which is entered before each run.
    """

    name: str
    call: Callable[[bool], Any]
    leaves: Sequence[Any] = ()
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext


def microseconds(steps: Sequence[tuple[Callable[[], Any], Row]]) -> list[tuple[float, float]]:
    """Median and least host time of steps, each in its row's surroundings, in turns; the GPU is idle before a run."""
    import torch

    times: list[list[float]] = [[] for _ in steps]
    for _ in range(REPETITIONS):
        for (step, row), own in zip(steps, times, strict=True):
            with row.around():
                for _ in range(WARM_UP):
                    step()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    step()
                own.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return [(statistics.median(own), min(own)) for own in times]


def rows() -> list[Row]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from cute_attn import append_kv, attention, attention_varlen, attention_with_kvcache
    from cute_attn.flash_attn import flash_attn_func
    from cute_attn.flex import flex_attention

    def tensors(shape: tuple[int, ...], nheads_kv: int, gradients: bool) -> list[Any]:
        q_shape, k_shape = shape, (*shape[:-2], nheads_kv, shape[-1])
        return [
            torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=gradients)
            for s in (q_shape, k_shape, k_shape)
        ]

    batch = {flag: tensors((2, 128, 4, 64), 2, flag) for flag in (False, True)}
    packed = {flag: tensors((256, 4, 64), 2, flag) for flag in (False, True)}
    bias = torch.zeros(2, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    state = torch.tensor([1, 2], device="cuda")

    def row(name: str, **options: Any) -> Row:
        return Row(name, lambda leaves: attention(*batch[leaves], causal=True, **options), batch[True])

    def varlen(leaves: bool) -> Any:
        q, k, v = packed[leaves]
        return attention_varlen(q, k, v, starts, starts, 156, 156, causal=True)

    totals = itertools.cycle(
        range(150, 250)
    )  # as in training on packed sequences: other lengths in each call
    table = torch.randn(4, 17, device="cuda")
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")

    def distances(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + table[h, (j - i).clamp(-8, 8) + 8]

    def of_other_lengths(_: bool) -> Any:
        total = next(totals)
        q, k, v = (x[:total] for x in packed[False])
        return attention_varlen(q, k, v, starts[:2], starts[:2], 100, 100, causal=True)

    def flash(leaves: bool) -> Any:
        q, k, v = batch[leaves]
        return flash_attn_func(q, k, v, causal=True)

    def flex(leaves: bool, **options: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in batch[leaves])
        found: Any = flex_attention(q, k, v, enable_gqa=True, **options)
        return found.transpose(1, 2)

    q, caches = tensors((2, 1, 8, 128), 2, False)[0], tensors((2, 512, 2, 128), 2, False)[1:]
    new, lengths = (
        tensors((2, 1, 2, 128), 2, False)[1:],
        torch.tensor([100, 200], dtype=torch.int32, device="cuda"),
    )
    pages = torch.arange(2, dtype=torch.int32, device="cuda")[:, None]
    cache: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    appended = {**cache, "k": new[0], "v": new[1]}
    return [
        row("plain"),
        row("dropout", dropout_p=0.1, rng_state=state),
        row("dropout, drawn", dropout_p=0.1),
        row("bias", bias=bias),
        row("bias, broadcast", bias=bias[:, :, :1]),
        row("score_mod", score_mod=distances),
        row("BlockMask", block_mask=mask),
        Row("packed", varlen, packed[True]),
        Row("packed, other lengths each time", of_other_lengths),
        Row("flash_attn_func", flash, batch[True]),
        Row("flex, score_mod", functools.partial(flex, score_mod=distances), batch[True]),
        Row("flex, BlockMask", functools.partial(flex, block_mask=mask), batch[True]),
        Row("cache", lambda _: attention_with_kvcache(q, *caches, **cache)),
        Row("cache, pages", lambda _: attention_with_kvcache(q, *caches, page_table=pages, **cache)),
        Row("cache, append", lambda _: attention_with_kvcache(q, *caches, **appended)),
        Row("append alone", lambda _: append_kv(caches[0], caches[1], new[0], new[1], lengths)),
    ]


def sdpa_rows() -> list[list[Row]]:
    """scaled_dot_product_attention: each backend of PyTorch, then each with the kernels, and PyTorch's once more."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cute_attn import sdpa

    inputs = {
        flag: [
            torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=flag)
            for _ in range(3)
        ]
        for flag in (False, True)
    }
    bias = torch.zeros(2, 4, 128, 128, dtype=torch.bfloat16, device="cuda")

    @contextlib.contextmanager
    def ours(backend: SDPBackend) -> Any:
        with sdpa.active(unsupported="error"), sdpa_kernel(backend):
            yield

    stock: list[Row] = []

    def group(name: str, backend: SDPBackend, **options: Any) -> list[Row]:
        def call(gradients: bool) -> Any:
            return F.scaled_dot_product_attention(*inputs[gradients], **options)  # type: ignore[arg-type]

        leaves = inputs[True]
        stock.append(Row(f"{name}, PyTorch", call, leaves, functools.partial(sdpa_kernel, backend)))
        return [
            Row(f"{name}, cute_attn.sdpa", call, leaves, functools.partial(ours, backend)),
            Row(f"{name}, restored", call, leaves, functools.partial(sdpa_kernel, backend)),
        ]

    groups = [
        group("SDPA flash", SDPBackend.FLASH_ATTENTION, is_causal=True),
        group("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION, is_causal=True),
        group("SDPA efficient, bias", SDPBackend.EFFICIENT_ATTENTION, attn_mask=bias),
        group("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION, is_causal=True),
    ]
    return [stock, *groups]


def _step(row: Row) -> None:
    import torch

    out = row.call(True)
    torch.autograd.grad(out, row.leaves, out.detach())


def main() -> None:
    options = parser(__doc__).parse_args()
    need_gpu()
    groups = [[row] for row in rows()] + sdpa_rows()
    wanted = choose(options, {row.name: row for group in groups for row in group})
    print(f"{'us of host time, median (least)':34} {'forward':>16} {'forward+backward':>20}")
    for group in groups:
        chosen = [row for row in group if row in wanted]
        forward = microseconds([(functools.partial(row.call, False), row) for row in chosen])
        both = microseconds([(functools.partial(_step, row), row) for row in chosen if row.leaves])
        for row, alone, pair in itertools.zip_longest(chosen, forward, both):
            gradients = f"{pair[0]:11.1f} ({pair[1]:5.1f})" if pair else ""
            print(f"{row.name:34} {alone[0]:7.1f} ({alone[1]:5.1f}) {gradients}", flush=True)


if __name__ == "__main__":
    main()
