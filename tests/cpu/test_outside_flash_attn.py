"""The modules on which FlashAttention's tests run: their conventions, on the CPU, against the definition."""

import importlib
import sys

import pytest
import torch

from cute_attn import attention
from cute_attn.reference import kvcache as kvcache_reference
from tests.outside import flash_attn_kvcache as adapters


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def installed(tmp_path):
    """The modules that an adapter puts in place, which leave nothing behind."""
    names = ("flash_attn", "flash_attn_interface")
    before = {name: x for name, x in sys.modules.items() if name.partition(".")[0] in names}
    path = list(sys.path)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "testing.py").write_text("HELPERS = 'of the suite'\n")
    (tmp_path / "flash_attn" / "layers").mkdir()
    (tmp_path / "flash_attn" / "layers" / "rotary.py").write_text("ROTARY = 'of the suite'\n")

    def install(adapter):
        adapter(tmp_path)
        return importlib.import_module

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(before)
    sys.path[:] = path


def test_helpers_are_the_suites(installed):
    load = installed(adapters.fa4)
    assert (
        load("flash_attn.cute.testing").HELPERS == load("flash_attn.layers.rotary").ROTARY == "of the suite"
    )
    interface = load("flash_attn.cute.interface")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata", "_flash_attn_fwd"):
        assert callable(getattr(interface, name))
    assert load("flash_attn.cute.cache_utils").JITCache() == {}


def test_fa4_mixes_batches_and_packed_sequences(installed):
    """Queries batched with lengths, keys packed: bottom right on the used lengths."""
    function = installed(adapters.fa4)("flash_attn.cute.interface").flash_attn_varlen_func
    q, k, v = randn(2, 6, 4, 16), randn(14, 2, 16, seed=1), randn(14, 2, 8, seed=2)
    sinks = randn(4, seed=3)
    out, lse = function(
        q,
        k,
        v,
        cu_seqlens_k=int32(0, 5, 14),
        max_seqlen_k=9,
        seqused_q=int32(4, 6),
        causal=True,
        learnable_sink=sinks,
    )
    assert out.shape == (2, 6, 4, 8) and lse.shape == (2, 4, 6)
    for b, (used, start, end) in enumerate(((4, 0, 5), (6, 5, 14))):
        own = attention(
            q[b : b + 1, :used],
            k[None, start:end],
            v[None, start:end],
            causal=True,
            sinks=sinks,
            return_lse=True,
        )
        torch.testing.assert_close(out[b, :used], own[0][0])
        torch.testing.assert_close(lse[b, :, :used], own[1][0])


def test_fa4_reads_pages(installed):
    function = installed(adapters.fa4)("flash_attn.cute.interface").flash_attn_varlen_func
    q, pages, values = randn(5, 4, 16), randn(8, 4, 2, 16, seed=1), randn(8, 4, 2, 16, seed=2)
    table, lengths = int32(3, 1, 6, 0, 7, 2).view(2, 3), int32(9, 4)
    out, _ = function(
        q,
        pages,
        values,
        cu_seqlens_q=int32(0, 2, 5),
        seqused_k=lengths,
        page_table=table,
        causal=True,
        num_splits=3,
    )
    for b, (begin, end) in enumerate(((0, 2), (2, 5))):
        k, v = (x[table[b].long()].flatten(0, 1)[None, : lengths[b]] for x in (pages, values))
        torch.testing.assert_close(out[begin:end], attention(q[None, begin:end], k, v, causal=True)[0])


def test_fa4_sinks_have_gradients(installed):
    function = installed(adapters.fa4)("flash_attn.cute.interface").flash_attn_func
    q, sinks = randn(1, 7, 3, 16).requires_grad_(), randn(3, seed=1).requires_grad_()
    out, _ = function(q, q, q, learnable_sink=sinks, return_lse=True, pack_gqa=True)
    wanted = attention(q, q, q, sinks=sinks)
    torch.testing.assert_close(out, wanted)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, sinks)) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("packed", [False, True])
def test_fa4_merges_rows_with_heads_last(installed, packed):
    function = installed(adapters.fa4)("flash_attn.cute.interface").flash_attn_combine
    outs, lses = randn(3, 2, 5, 4, 8), randn(3, 2, 5, 4, seed=1)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = function(outs, lses, out_dtype=torch.float16)
    wanted, wanted_lse = kvcache_reference.merge(outs, lses.transpose(-1, -2))
    assert out.dtype == torch.float16 and lse.shape == lses.shape[1:]
    torch.testing.assert_close(out, wanted.half())
    torch.testing.assert_close(lse, wanted_lse.transpose(-1, -2))
    assert function(outs, lses, return_lse=False)[1] is None


SKIPPED = {
    "qv": {"qv": torch.zeros(1)},
    "negative windows": {"window_size": (None, -3)},
    "score_mod": {"score_mod": lambda x: x},
}


@pytest.mark.parametrize("what", SKIPPED)
def test_what_no_kernel_computes_skips_the_test(installed, what):
    function = installed(adapters.fa4)("flash_attn.cute.interface").flash_attn_func
    q = randn(1, 7, 3, 16)
    with pytest.raises(pytest.skip.Exception, match=f"no kernel here takes {what}"):
        function(q, q, q, **SKIPPED[what])


def test_fa3s_names(installed):
    interface = installed(adapters.fa3)("flash_attn_interface")
    q, cache = randn(2, 1, 2, 16), randn(2, 9, 2, 16)
    assert interface.get_scheduler_metadata(2, 1, 9, 2, 2, 16, int32(9, 9)).numel() == 0
    out, _, *rest = interface.flash_attn_with_kvcache(
        q,
        cache,
        cache,
        cache_seqlens=int32(9, 9),
        return_softmax_lse=True,
        num_splits=3,
        scheduler_metadata=None,
        rotary_seqlens=int32(1, 1),
    )
    assert not any(x.numel() for x in rest)
    torch.testing.assert_close(out, attention(q, cache, cache))
    torch.testing.assert_close(interface.flash_attn_func(q, cache, cache, causal=True), out)
    with pytest.raises(pytest.skip.Exception, match="attention_chunk"):
        interface.flash_attn_with_kvcache(q, cache, cache, attention_chunk=4)
    with pytest.raises(pytest.skip.Exception, match="head dims above 256 are not merged"):
        interface.flash_attn_combine(randn(2, 1, 3, 2, 512), randn(2, 1, 3, 2))
