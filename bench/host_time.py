"""How much host time does a warm call take?

    python -m bench.host_time                     every row
    python -m bench.host_time '*dropout*'         the rows whose name matches

Needs a GPU. The problems are so small that host time dominates. Prints microseconds a call, the median and
the least of some repetitions: of the forward alone, and of a forward and a backward of q, k and v. Rows of PyTorch's
scaled_dot_product_attention come twice, by PyTorch's kernels and with cute_attn.sdpa active.
"""

import argparse
import contextlib
import fnmatch
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, REPETITIONS = 100, 20


def microseconds(step: Callable[[], Any]) -> tuple[float, float]:
    """Median and least host time of a step that is repeated, with the GPU idle at first."""
    import torch

    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            step()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times), min(times)


def rows() -> dict[str, Callable[[bool], Any]]:
    """A call for each row; with True, of tensors that require gradients."""
    import torch

    from cute_attn import attention, attention_varlen

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

    def call(**options: Any) -> Callable[[bool], Any]:
        return lambda gradients: attention(*batch[gradients], causal=True, **options)

    return {
        "plain": call(),
        "dropout": call(dropout_p=0.1, rng_state=state),
        "dropout, drawn": call(dropout_p=0.1),
        "bias": call(bias=bias),
        "bias, broadcast": call(bias=bias[:, :, :1]),
        "packed": lambda gradients: attention_varlen(
            *packed[gradients], starts, starts, 156, 156, causal=True
        ),
    }


def sdpa_rows() -> dict[str, Callable[[bool], Any]]:
    """Calls of scaled_dot_product_attention, by backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    inputs = {
        flag: [
            torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=flag)
            for _ in range(3)
        ]
        for flag in (False, True)
    }
    bias = torch.zeros(2, 4, 128, 128, dtype=torch.bfloat16, device="cuda")

    def call(backend: SDPBackend, **options: Any) -> Callable[[bool], Any]:
        def run(gradients: bool) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs[gradients], **options)  # type: ignore[arg-type]

        return run

    return {
        "SDPA flash": call(SDPBackend.FLASH_ATTENTION, is_causal=True),
        "SDPA efficient": call(SDPBackend.EFFICIENT_ATTENTION, is_causal=True),
        "SDPA efficient, bias": call(SDPBackend.EFFICIENT_ATTENTION, attn_mask=bias),
        "SDPA cuDNN": call(SDPBackend.CUDNN_ATTENTION, is_causal=True),
    }


def _step(call: Callable[[bool], Any]) -> None:
    call(True).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="which rows, by shell patterns")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU: a benchmark needs one")
    print(f"{'us of host time, median (least)':34} {'forward':>16} {'forward+backward':>20}")
    from cute_attn import sdpa

    chosen = [(name, call, False) for name, call in rows().items()]
    for name, call in sdpa_rows().items():
        chosen += [(f"{name}, PyTorch", call, False), (f"{name}, cute_attn.sdpa", call, True)]
    for name, call, active in chosen:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns):
            continue
        with sdpa.active(unsupported="error") if active else contextlib.nullcontext():
            forward = microseconds(functools.partial(call, False))
            both = microseconds(functools.partial(_step, call))
        print(
            f"{name:34} {forward[0]:7.1f} ({forward[1]:5.1f}) {both[0]:11.1f} ({both[1]:5.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
