"""A program that trains and decodes, for ``test_bundle.py``: with a compiler, and without one.

    python -m tests.gpu.bundled RESULTS [--without-compiler]

RESULTS: a file for its outputs. Without a compiler nvidia-cutlass-dsl cannot be imported; then every kernel has to come
from the bundle that CUTE_ATTN_BUNDLE names, and a call whose kernel it lacks has to say so.
"""

import argparse
import sys

if "--without-compiler" in sys.argv:
    sys.path[:] = [path for path in sys.path if "nvidia_cutlass_dsl" not in path]

import torch
import torch.nn.functional as F
from torch import Tensor

import cute_attn

STEPS = 3
LENGTHS = (70, 133)


def randn(*shape: int, seed: int) -> Tensor:
    """Random numbers from float64 on the CPU, rounded to bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double()


def trained(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A forward and a backward of grouped heads."""
    q, k, v = (randn(2, 300, heads, 64, seed=i).to(device, dtype) for i, heads in enumerate((4, 2, 2)))
    for x in (q, k, v):
        x.requires_grad_()
    out = cute_attn.attention(q, k, v, causal=True, deterministic=True)
    out.backward(randn(2, 300, 4, 64, seed=3).to(device, dtype))
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x for name, x in found.items() if x is not None}


def decoded(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Decode through a paged cache; each step appends a token's keys and values."""
    k_cache, v_cache = (randn(10, 64, 2, 128, seed=i).to(device, dtype) for i in (4, 5))
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    found = {}
    for step in range(STEPS):
        q, k, v = (
            randn(2, 1, heads, 128, seed=10 * step + i).to(device, dtype) for i, heads in enumerate((8, 2, 2))
        )
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device) + step
        found[f"step {step}"] = cute_attn.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, page_table=table, causal=True
        )
    return found | {"cache": k_cache}


def latent(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A step of latent attention: values are the first columns of the keys."""
    q, cache = (
        randn(*shape, seed=i).to(device, dtype) for i, shape in ((9, (2, 1, 16, 576)), (10, (8, 64, 1, 576)))
    )
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    out = cute_attn.attention_with_kvcache(
        q, cache, cache[..., :512], cache_seqlens=lengths, page_table=table, causal=True
    )
    return {"latent": out}


def dropped_in(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """PyTorch's function, served by this package on a GPU."""
    q, k, v = (randn(1, 4, 256, 128, seed=i).to(device, dtype) for i in (6, 7, 8))
    if device == "cuda":
        cute_attn.sdpa.activate(strict=True)
    return {"sdpa": F.scaled_dot_product_attention(q, k, v, is_causal=True)}


def results(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All outputs, on the CPU."""
    found = (
        trained(device, dtype) | decoded(device, dtype) | latent(device, dtype) | dropped_in(device, dtype)
    )
    return {name: x.cpu() for name, x in found.items()}


def check_no_compiler() -> None:
    """Check that every kernel came from the bundle and that a missing one is named. Prints a line for each kernel."""
    from cute_attn.compiler.bundle import BundleUnusable
    from cute_attn.compiler.compiled import loaded_kernels

    assert not any(name.partition(".")[0] == "cutlass" for name in sys.modules)
    built = {kernel.how_built for kernel in loaded_kernels()}
    assert built == {"from a bundle"}, built
    print(
        *sorted(f"{kernel.name} {kernel.tile.text} {kernel.target}" for kernel in loaded_kernels()), sep="\n"
    )
    q = torch.randn(1, 64, 2, 96, device="cuda", dtype=torch.bfloat16)
    try:
        cute_attn.attention(q, q, q, softcap=20.0)
    except BundleUnusable as error:
        assert "d96-softcap" in str(error) and "does not hold it" in str(error), error
    else:
        raise AssertionError("a kernel was built without a compiler")


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--without-compiler", action="store_true")
    options = parser.parse_args()
    torch.save(results("cuda", torch.bfloat16), options.results)
    if options.without_compiler:
        check_no_compiler()


if __name__ == "__main__":
    main()
