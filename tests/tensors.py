"""Tensors of tests: random ones that a seed determines, lengths, and arguments of device code that runs on the host."""

import functools
import math
import mmap

import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_attn import reference


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def partial_results(partials, batch, queries, heads, dim, empty=0.3, seed=0):
    """Random ones to merge; where an LSE is -inf or +inf, out is NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(partials, batch, queries, heads, dim, generator=generator)
    lses = 4 * torch.randn(partials, batch, heads, queries, generator=generator)
    absent = torch.rand(lses.shape, generator=generator)
    lses[absent < empty] = -math.inf
    lses[absent < empty / 4] = math.inf
    outs[lses.isinf().transpose(-1, -2)] = math.nan
    return outs, lses


LAZY = {
    "negated": lambda x: torch._neg_view(x),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}
"""Views that torch computes where they are read, of a tensor."""


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tensors_in(x):
    """All tensors of nested tuples, lists and dicts, such as a launch's arguments."""
    if isinstance(x, torch.Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else ()
    return [one for y in values for one in tensors_in(y)]


def dynamic(x):
    """A DSL argument of any size whose last dimension is contiguous; None stays."""
    return None if x is None else from_dlpack(x).mark_layout_dynamic(leading_dim=x.ndim - 1)


def aligned(x):
    """Like :func:`dynamic`, with rows of numbers aligned to 16 bytes, as kernels require."""
    if x is None:
        return None
    given = from_dlpack(x, assumed_align=4 if x.dtype == torch.int32 else 16)
    return given.mark_layout_dynamic(leading_dim=x.ndim - 1)


def run(function, *tensors, constants=(), arch="sm_90a"):
    """Device code on the host, compiled once for tensors of any size; ``constants`` follow the tensors."""
    kinds = tuple(None if x is None else (x.ndim, x.dtype) for x in tensors)
    _compiled(function, kinds, constants, arch)(*map(aligned, tensors))


@functools.cache
def _compiled(function, kinds, constants, arch):
    fakes = (None if kind is None else torch.zeros((1,) * kind[0], dtype=kind[1]) for kind in kinds)
    return cute.compile[cute.GPUArch(arch)](function, *map(aligned, fakes), *constants)


def score_coords(at, nheads, lengths, longest=None, **more):
    """Coordinates of scores. at: batches, heads, queries and keys; lengths and longest: of queries and keys."""
    places = (
        torch.as_tensor(x).view(*(-1 if i == axis else 1 for i in range(4))) for axis, x in enumerate(at)
    )
    names = {"top_left": False} | more
    return reference.ScoreCoords(*places, nheads, *lengths, *(longest or lengths), **names)


def far_apart(folder):
    """An fp16 tensor (2, 1, 8, 64) whose batches lie 2^32 elements apart, in a sparse file."""
    with open(folder / "sparse", "wb+") as file:
        file.truncate(2 * (2**32 + 8 * 64))
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=torch.float16).as_strided((2, 1, 8, 64), (2**32, 0, 64, 1))


def inputs_of(features, batch, nheads, seqlen_q, seqlen_k):
    """Inputs of an emulated problem with these features, and a window."""
    shape, given = (batch, nheads, seqlen_q, seqlen_k), {"window_left": 20, "window_right": 3}
    if "softcap" in features:
        given["softcap"] = 2.5
    if "alibi" in features:
        given["alibi_slopes"] = torch.rand(batch, nheads)
    if "bias" in features:
        given["bias"] = torch.randn(shape).half()
    if "dropout" in features:
        given |= {"dropout_p": 0.3, "rng_state": torch.tensor([2**40 + 7, 2**33 - 4])}
    return given
