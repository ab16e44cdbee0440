"""Calls of DTensors in several processes, compared with the same calls of whole tensors."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import cute_attn

STARTS = torch.tensor([0, 3, 3, 8, 12], dtype=torch.int32)
LENGTHS = torch.tensor([7, 0, 3, 5], dtype=torch.int32)
GROUPED: Mapping[str, Any] = {"q": (4, 8, 4, 16), "k": (4, 8, 2, 16), "v": (4, 8, 2, 16)}
PACKED = {
    "q": (12, 4, 16),
    "k": (12, 2, 16),
    "v": (12, 2, 16),
    "cu_seqlens_q": STARTS,
    "cu_seqlens_k": STARTS,
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}
_CACHES = {"q": (4, 1, 4, 16), "k_cache": (4, 8, 2, 16), "v_cache": (4, 8, 2, 16), "cache_seqlens": LENGTHS}
CASES: dict[str, Mapping[str, Any]] = {
    "grouped": {**GROUPED, "causal": True},
    "one key head": {**GROUPED, "k": (4, 8, 1, 16), "v": (4, 8, 1, 16), "window": (3, 0)},
    "bias": {**GROUPED, "bias": (4, 4, 8, 8)},
    "broadcast bias": {**GROUPED, "bias": (1, 1, 8, 8), "softcap": 3.0},
    "bias of heads": {**GROUPED, "bias": (1, 4, 8, 8)},
    "sinks": {**GROUPED, "sinks": (4,)},
    "slopes": {**GROUPED, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "lengths": {**GROUPED, "seqused_k": LENGTHS + 1},
    "function": {**GROUPED, "score_mod": lambda score, b, h, q, k: score * (1 + 0.1 * (q - k))},
    "function of heads": {**GROUPED, "score_mod": lambda score, b, h, q, k: score * (1 + h)},
    "function of sequences": {**GROUPED, "mask_mod": lambda b, h, q, k: q + b >= k},
    "captured": {**GROUPED, "table": (16,)},
    "dropout": {**GROUPED, "dropout_p": 0.5, "rng_state": torch.tensor([7, 0])},
    "packed": {**PACKED, "causal": True},
    "compiled": {**GROUPED, "causal": True},
    "greatest scores": {**GROUPED, "return_max_scores": True},
    "cache": {**_CACHES, "causal": True},
    "cache with a bias": {**_CACHES, "bias": (1, 4, 1, 8), "return_max_scores": True},
    "append": {**_CACHES, "k": (4, 1, 2, 16), "v": (4, 1, 2, 16)},
}
"""Arguments of calls. A tuple of more than two numbers, or of sinks, is the shape of a tensor."""
PLACEMENTS = {"heads": -2, "sequences": 0, "queries": 1, "whole": None, "sum": ...}
"""The dimension by which q, k and v are given divided."""


def _attend(name: str) -> Callable[..., tuple[Tensor, ...]]:
    if "k_cache" in CASES[name]:
        return functools.partial(cute_attn.attention_with_kvcache, return_lse=True)
    door = cute_attn.attention_varlen if "cu_seqlens_q" in CASES[name] else cute_attn.attention
    call: Any = functools.partial(door, return_lse=True)
    if "table" in CASES[name]:
        return lambda table, **given: call(
            **given, score_mod=lambda score, b, h, q, k: score * table[q - k + 8]
        )
    return torch.compile(call, backend="aot_eager", fullgraph=True) if name == "compiled" else call


def _made(name: str, device: str) -> dict[str, Any]:
    """The arguments of a case, equal in all processes."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    made: dict[str, Any] = {}
    for key, x in CASES[name].items():
        if isinstance(x, tuple) and key != "window":
            made[key] = torch.randn(x, generator=generator).to(device, dtype)
        else:
            made[key] = x.to(device) if isinstance(x, Tensor) else x
    return made


def _divided(x: Tensor, mesh: Any, dim: Any) -> DTensor:
    if dim is ...:  # the first device has it all
        local = x.clone() if mesh.get_rank() == 0 else torch.zeros_like(x)
        return DTensor.from_local(local, mesh, [Partial()])
    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim % x.dim())])


def _results(name: str, given: dict[str, Any], spread: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """out, lse, greatest scores if asked for, gradients, or the caches after an append."""
    cached = "k_cache" in given
    leaves = {key: spread(key, x) for key, x in given.items() if isinstance(x, Tensor)}
    learned = [key for key in ("q", "k", "v", "bias", "sinks", "table") if key in leaves and not cached]
    leaves |= {key: leaves[key].detach().requires_grad_() for key in learned}
    out, lse, *others = _attend(name)(**given | leaves)
    found = {"out": out, "lse": lse, **({"max_scores": others[0]} if others else {})}
    if cached:
        return found | {key: leaves[key] for key in ("k_cache", "v_cache")}
    seeds = [
        spread("grad", (torch.arange(x.numel(), device=x.device) % 7 - 3.0).view(x.shape)) for x in (out, lse)
    ]
    seeds = [seed.to(x.dtype) for seed, x in zip(seeds, (out, lse), strict=True)]
    grads = torch.autograd.grad((out, lse), [leaves[key] for key in learned], seeds)
    return found | {f"d{key}": x for key, x in zip(learned, grads, strict=True)}


def check(name: str, placement: str, mesh: Any) -> dict[str, str]:
    """Compare a case. Returns the results' placements."""
    given, dim = _made(name, mesh.device_type), PLACEMENTS[placement]
    right = _results(name, given, lambda key, x: x.clone())
    rows = ("q", "k", "v", "k_cache", "v_cache")
    found = _results(name, given, lambda key, x: _divided(x, mesh, dim if key in rows else None))
    close = {"rtol": 1e-4, "atol": 1e-5} if mesh.device_type == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    for key, x in found.items():
        assert isinstance(x, DTensor), key
        torch.testing.assert_close(
            x.full_tensor(), right[key], **close, msg=lambda text, key=key: f"{key}: {text}"
        )
    return {key: str(x.placements[0]) for key, x in found.items()}


def _work(rank: int, world: int, device: str, file: Path, pairs: list[tuple[str, str]]) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{file}.store", rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    found: dict[tuple[str, str], Any] = {}
    for pair in pairs:
        try:
            found[pair] = check(*pair, mesh)
        except Exception as error:
            found[pair] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


def compare(device: str, folder: Path, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """For each case and placement, the results' placements in two processes, or what was wrong."""
    file = folder / "found"
    torch.multiprocessing.spawn(_work, (2, device, file, pairs), 2)
    return torch.load(file)
