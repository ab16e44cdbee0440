"""The launch of the combine kernel for a caller's partial results."""

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import record
from cute_attn.host.call import DTYPE_NAMES
from cute_attn.host.memory import row_alignment
from cute_attn.tiles.inference import CombineTile
from cute_attn.traits import Traits, aligned_head_dim


def launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Launch the kernel: out of dtype fp16, bf16 or fp32; packed rows are a batch of one."""
    outs, alignment = _whole_rows(outs.to(torch.float32)), row_alignment(out)
    if outs.dim() == 4:
        outs, lses, out, lse = outs.unsqueeze(1), lses.unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0)
    target = compiler.default_target("sm80")
    arch, sink_dtype = registry.generations(target)[0], "" if sinks is None else DTYPE_NAMES[sinks.dtype]
    dtype = DTYPE_NAMES[out.dtype]
    traits = Traits("combine", arch, dtype, out.shape[-1], sinks=sink_dtype, alignment=alignment)
    compiled = compiler.compile(traits, CombineTile.of(outs.shape[0]).for_head_dim(traits.head_dim_v), target)
    record.launch(*compiled.bind(mOpartial=outs, mLSEpartial=lses, mO=out, mLSE=lse, mSinks=sinks))


def _whole_rows(outs: Tensor) -> Tensor:
    """Partial results as the kernel reads them: fp32, rows of whole 16 bytes."""
    dim = outs.shape[-1]
    columns = aligned_head_dim("fp32", dim)
    if columns == dim:
        return record.readable(outs)
    padded = record.contiguous(outs, (*outs.shape[:-1], columns))
    record.step(_copy_columns, padded, outs)
    return padded


def _copy_columns(target: Tensor, source: Tensor) -> None:
    """``source`` to the first columns of ``target``."""
    target[..., : source.shape[-1]].copy_(source)
