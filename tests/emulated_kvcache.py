"""The launches of attention_with_kvcache on the CPU: append by the kernel's code, attention and merging by definition.

Attention is computed from the very arguments that the kernel would get, and these are checked against its fakes.
"""

import math

import torch

from cute_attn import reference
from cute_attn.compiler.arguments import fakes
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.epilogues.names import user_epilogue
from cute_attn.reference import emulate
from cute_attn.reference import kvcache as ref
from tests import emulated_append, machine

PROCESSORS = 4


def check_arguments(fake, given, where="arguments"):
    """Check arguments like a compiled kernel: an argument is None if, and only if, it was None at compile time."""
    assert (fake is None) == (given is None), f"{where} is {given!r}, compiled with {fake!r}"
    if isinstance(fake, tuple):
        for i, (x, y) in enumerate(zip(fake, given, strict=True)):
            check_arguments(x, y, f"{where}[{i}]")
    elif isinstance(given, torch.Tensor):
        emulate._check(fake, given)


def entries(packed, starts, capacity):
    """Packed rows as a cache (sequences, capacity, heads, dim)."""
    cache = packed.new_zeros(len(starts) - 1, capacity, *packed.shape[1:])
    for b, rows in enumerate(ref.sequences(packed, starts)):
        cache[b, : len(rows)] = rows
    return cache


def attend(kernel, given):
    """Write the results of the kvcache kernel; of fixed splits, the first one has all keys."""
    traits, seqlens, score_args, partials = kernel.traits, given.seqlens, given.score_args, given.partials
    assert given.schedule[1] == PROCESSORS and given.mK.shape[1] > 0
    k, v, (table, batch_idx) = given.mK, given.mV, given.tables or (None, None)
    assert (table is not None, batch_idx is not None) == (traits.paged, traits.batch_idx)
    if traits.varlen_k:  # as a cache with an entry for each sequence
        k, v = (entries(x, seqlens.cu_seqlens_k, seqlens.max_seqlen_k) for x in (k, v))
        used = seqlens.cu_seqlens_k.diff()
        used = used if seqlens.seqused_k is None else used.minimum(seqlens.seqused_k)
        seqlens = seqlens._replace(seqused_k=used)
    cache = ref.Cache(k, v, table, batch_idx)
    assert seqlens.max_seqlen_k == cache.capacity
    window = score_args[1] if traits.windowed else (UNBOUNDED, UNBOUNDED)
    first = 2 + traits.softcap + traits.alibi
    inputs = ScoreInputs(
        *window,
        alibi_slopes=score_args[2 + traits.softcap][0] if traits.alibi else None,
        sinks=score_args[-1][0] if traits.sinks else None,
        bias=score_args[first][0] if traits.bias else None,
        tree_mask=score_args[first + bool(traits.bias)][0] if traits.tree else None,
        softcap=score_args[0] if traits.softcap else 0.0,
        extra=dict(
            zip(traits.epilogues, score_args[first + bool(traits.bias) + traits.tree :], strict=False)
        ),
    )
    used = None if seqlens.seqused_k is None else seqlens.seqused_k + seqlens.added_k
    lengths = ref.Lengths(used, seqlens.leftpad, seqlens.cu_seqlens_q)
    own = tuple(user_epilogue(name).reference for name in traits.epilogues)
    found, found_lse = ref.attention(
        given.mQ, cache, given.softmax_scale, lengths, reference.Features(traits.mask, epilogues=own), inputs
    )
    if traits.split == "fixed":
        assert (
            partials.num_splits == partials.out.shape[0] > 1 and partials.split_keys % kernel.tile.tile_n == 0
        )
        partials.lse.fill_(-math.inf)
        partials.out.fill_(math.nan)
        partials.out[0][..., : found.shape[-1]], partials.lse[0] = found, found_lse
        return
    given.mO.copy_(found)
    given.mLSE.copy_(found_lse)


def merge(kernel, given):
    """Write the results of the combine kernel."""
    found, found_lse = ref.merge(given.mOpartial, given.mLSEpartial, given.mSinks)
    given.mO.copy_(found[..., : given.mO.shape[-1]])
    given.mLSE.copy_(found_lse)


def list_blocks(kernel, given):
    """Write nothing: by definition attention reads the kinds of a mask's blocks, not the lists."""


def patch(monkeypatch, gpu: bool = False) -> list:
    """CUDA launches accept CPU tensors; returns the chosen kvcache kernels. gpu: calls use records too."""
    chosen = []

    def launched(kernel, target):
        if kernel.traits.op == "append":
            return emulated_append.launched(kernel, target)
        run = {"combine": merge, "kvcache": attend, "block_visits": list_blocks}[kernel.traits.op]
        chosen.extend([kernel] if run is attend else ())
        declared = fakes(kernel)

        def launch(given):
            check_arguments(declared, tuple(vars(given).values()))
            run(kernel, given)

        return launch

    if gpu:
        machine.gpu(monkeypatch, launched, PROCESSORS)
    else:
        machine.device(monkeypatch, PROCESSORS, target="sm90")
        machine.kernels(monkeypatch, launched)
    return chosen
