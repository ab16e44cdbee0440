"""The launches of attention_with_kvcache on the CPU: append by its own code, attention and merging by the definition.

Attention is computed from the very arguments that the kernel would get, and these are checked against its fakes.
"""

import math

import torch

from cute_attn import reference
from cute_attn.compiler.arguments import fakes
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.reference import emulate
from cute_attn.reference import kvcache as ref
from tests import emulated_append, machine

PROCESSORS = 4


def check_arguments(fake, given, where="arguments"):
    """As a compiled kernel checks what it gets: nothing where it was compiled with nothing, and only there."""
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


def attend(kernel, arguments):
    """What the kvcache kernel of some traits writes; of parts, the first has all keys."""
    check_arguments(fakes(kernel), arguments)
    q, k, v, out, lse, seqlens, tables, scale, schedule, score_args, partials = arguments
    traits = kernel.traits
    assert schedule[1] == PROCESSORS and k.shape[1] > 0
    table, batch_idx = tables or (None, None)
    assert (table is not None, batch_idx is not None) == (traits.paged, traits.batch_idx)
    if traits.varlen_k:  # as a cache with an entry for each sequence
        k, v = (entries(x, seqlens.cu_seqlens_k, seqlens.max_seqlen_k) for x in (k, v))
        used = seqlens.cu_seqlens_k.diff()
        used = used if seqlens.seqused_k is None else used.minimum(seqlens.seqused_k)
        seqlens = seqlens._replace(seqused_k=used)
    cache = ref.Cache(k, v, table, batch_idx)
    assert seqlens.max_seqlen_k == cache.capacity
    window = score_args[1] if traits.windowed else (UNBOUNDED, UNBOUNDED)
    inputs = ScoreInputs(
        *window,
        alibi_slopes=score_args[2][0] if traits.alibi else None,
        sinks=score_args[-1][0] if traits.sinks else None,
        tree_mask=score_args[2 + traits.softcap + traits.alibi][0] if traits.tree else None,
        softcap=score_args[0] if traits.softcap else 0.0,
    )
    used = None if seqlens.seqused_k is None else seqlens.seqused_k + seqlens.added_k
    lengths = ref.Lengths(used, seqlens.leftpad, seqlens.cu_seqlens_q)
    found, found_lse = ref.attention(q, cache, scale, lengths, reference.Features(traits.mask), inputs)
    if traits.split == "parts":
        assert partials.parts == partials.out.shape[0] > 1 and partials.part_keys % kernel.tile.tile_n == 0
        partials.lse.fill_(-math.inf)
        partials.out[0], partials.lse[0] = found, found_lse
        return
    if traits.split == "shares":
        assert partials.out.shape[0] == 2 * kernel.tile.blocks_per_sm * PROCESSORS
    out.copy_(found)
    lse.copy_(found_lse)


def merge(kernel, arguments):
    """What the combine kernel writes."""
    check_arguments(fakes(kernel), arguments)
    outs, lses, out, lse, sinks = arguments
    found, found_lse = ref.merge(outs, lses, sinks)
    out.copy_(found)
    lse.copy_(found_lse)


def combine_shares(kernel, arguments):
    """All results are whole here."""
    check_arguments(fakes(kernel), arguments)
    partials, out, lse, sinks, seqlens, _, heads_kv, slots = arguments
    assert (sinks is not None) == bool(kernel.traits.sinks)
    assert 2 * slots == partials.out.shape[0] and out.shape[-2] % heads_kv == 0
    assert (seqlens.cu_seqlens_q is not None) == kernel.traits.varlen and lse.dtype == torch.float32


def patch(monkeypatch) -> list:
    """Launches on CUDA take CPU tensors; returns the kvcache kernels that were chosen."""
    chosen = []

    def launched(kernel, target):
        if kernel.traits.op == "append":
            return emulated_append.launched(kernel, target)
        if kernel.traits.op == "combine":
            return lambda *arguments: merge(kernel, arguments)
        if kernel.traits.op == "combine_shares":
            return lambda *arguments: combine_shares(kernel, arguments)
        chosen.append(kernel)
        return lambda *arguments: attend(kernel, arguments)

    machine.device(monkeypatch, PROCESSORS, target="sm90")
    machine.kernels(monkeypatch, launched)
    return chosen
