"""Checks of a caller's partial results, and the launch of the combine kernel that merges them."""

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import record
from cute_attn.host.call import DTYPE_NAMES
from cute_attn.host.checks import FLOAT_DTYPES, check_count, check_sinks
from cute_attn.host.memory import row_alignment
from cute_attn.host.values import check_dtype, check_present, shown, wrong_shape
from cute_attn.tiles.inference import MAX_PARTIALS, CombineTile
from cute_attn.traits import MAX_HEAD_DIM_V, Traits, aligned_head_dim, head_dims_text


def check(outs: Tensor, lses: Tensor, sinks: Tensor | None, dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError for the first wrong argument, on any device. dtype: None for that of ``outs``."""
    check_present((("outs", outs), ("lses", lses), ("sinks", sinks)), ("outs", "lses"), "outs")
    for name, x in (("outs", outs), ("lses", lses)):
        check_dtype(name, x, *FLOAT_DTYPES)
    if lses.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lses has dtype {lses.dtype}; accepted: torch.float32")
    if dtype not in (None, *FLOAT_DTYPES):
        raise TypeError(f"dtype is {shown(dtype)}; accepted: {', '.join(map(str, FLOAT_DTYPES))}")
    if outs.dim() not in (4, 5):
        packed = "(partials, total_q, nheads, head_dim_v)"
        raise wrong_shape("outs", outs, f"(partials, batch, seqlen_q, nheads, head_dim_v) or {packed}")
    if outs.shape[0] == 0:
        raise ValueError("outs has 0 partial results; accepted: 1 or more")
    expected = (*outs.shape[:-3], outs.shape[-2], outs.shape[-3])
    if tuple(lses.shape) != expected:
        raise wrong_shape("lses", lses, f"{expected}, for outs of shape {tuple(outs.shape)}")
    if sinks is not None:
        check_sinks(sinks, outs.shape[-2])


def check_for_kernels(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> None:
    """Raise for arguments that the kernel does not support. Assumes :func:`check`."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"dtype is {dtype}; accepted on CUDA: {', '.join(map(str, DTYPE_NAMES))}")
    check_dtype("lses", lses, torch.float32, on=" on CUDA")
    if outs.shape[0] > MAX_PARTIALS:
        raise ValueError(f"outs has {outs.shape[0]} partial results; accepted on CUDA: up to {MAX_PARTIALS}")
    dim = outs.shape[-1]
    if not 0 < dim <= MAX_HEAD_DIM_V:
        raise ValueError(f"outs has head_dim_v {dim}; accepted on CUDA: {head_dims_text(1, MAX_HEAD_DIM_V)}")
    check_count("outs has rows", outs[0].numel() // dim)


def launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Launch the combine kernel. ``out`` is fp16, bf16 or fp32; packed rows are passed as a batch of one."""
    outs, alignment, dim = outs.to(torch.float32), row_alignment(out), outs.shape[-1]
    columns = aligned_head_dim("fp32", dim)
    if columns == dim:
        outs = record.readable(outs)
    else:  # rows padded to multiples of 16 bytes
        padded = record.contiguous(outs, (*outs.shape[:-1], columns))
        record.step(Tensor.copy_, padded[..., :dim], outs)
        outs = padded
    if outs.dim() == 4:
        outs, lses, out, lse = outs.unsqueeze(1), lses.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0)
    target = compiler.default_target("sm80")
    arch, sink_dtype = registry.generations(target)[0], "" if sinks is None else DTYPE_NAMES[sinks.dtype]
    dtype = DTYPE_NAMES[out.dtype]
    traits = Traits("combine", arch, dtype, out.shape[-1], sinks=sink_dtype, alignment=alignment)
    compiled = compiler.compile(traits, CombineTile.of(outs.shape[0]).for_head_dim(traits.head_dim_v), target)
    record.launch(*compiled.bind(mOpartial=outs, mLSEpartial=lses, mO=out, mLSE=lse, mSinks=sinks))
