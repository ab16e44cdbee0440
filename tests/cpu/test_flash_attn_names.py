"""The names that other libraries import from FlashAttention-2 and -3: where they are, signatures, meanings, results."""

import functools
import importlib
import inspect
import itertools
import math
import re
import sys
from importlib import metadata

import pytest
import torch

import cute_attn.flash_attn as package
from cute_attn import attention, attention_varlen, merge_attention
from cute_attn.flash_attn import bert_padding, extension, flash_attn_3, rotary
from cute_attn.flash_attn import flash_attn_interface as interface
from cute_attn.reference import kvcache as kvcache_reference
from tests import calls, refusals, tensors
from tests.tensors import int32

F64 = torch.float64
randn = functools.partial(tensors.randn, dtype=F64)

# module, names, and who imports them, in 2026-08
IMPORTED = """
flash_attn: __version__ (Megatron-LM, DeepSpeed, yunchang, xformers)
flash_attn: flash_attn_func flash_attn_varlen_func (transformers, diffusers, x-transformers, vLLM)
flash_attn: flash_attn_with_kvcache (transformers, Megatron-LM)
flash_attn: flash_attn_qkvpacked_func flash_attn_kvpacked_func (ring-flash-attention, yunchang)
flash_attn: flash_attn_varlen_qkvpacked_func flash_attn_varlen_kvpacked_func (ring-flash-attention, yunchang)
flash_attn.flash_attn_interface: flash_attn_func flash_attn_varlen_func (Transformer Engine, DeepSpeed)
flash_attn.flash_attn_interface: flash_attn_varlen_qkvpacked_func (models of Hugging Face's hub)
flash_attn.flash_attn_interface: _flash_attn_forward _flash_attn_backward (ring-flash-attention, yunchang, DeepSpeed)
flash_attn.flash_attn_interface: _flash_attn_varlen_forward _flash_attn_varlen_backward (Transformer Engine, yunchang)
flash_attn.flash_attn_interface: _wrapped_flash_attn_forward _wrapped_flash_attn_varlen_forward (diffusers)
flash_attn.flash_attn_interface: _wrapped_flash_attn_backward _wrapped_flash_attn_varlen_backward (diffusers)
flash_attn.flash_attn_interface: flash_attn_gpu (FlashAttention's own tests)
flash_attn.bert_padding: pad_input unpad_input index_first_axis (transformers, models of the hub)
flash_attn.bert_padding: index_put_first_axis (models of the hub)
flash_attn.layers.rotary: apply_rotary_emb (Megatron-LM, transformers)
flash_attn.layers.rotary: apply_rotary_emb_func RotaryEmbedding (models of the hub)
flash_attn.layers.rotary: apply_rotary_emb_torch apply_rotary_emb_qkv_ apply_rotary_emb_kv_ (FlashAttention's own tests)
flash_attn.ops.triton.rotary: apply_rotary (vLLM, models of the hub)
flash_attn_2_cuda: fwd bwd varlen_fwd varlen_bwd (Transformer Engine: varlen_bwd)
flash_attn_interface: flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache (transformers, diffusers, yunchang)
flash_attn_interface: _flash_attn_forward _flash_attn_backward (Transformer Engine, yunchang, diffusers)
flash_attn_interface: flash_attn_qkvpacked_func flash_attn_combine get_scheduler_metadata (FlashAttention's own tests)
flash_attn_3.flash_attn_interface: _flash_attn_forward flash_attn_with_kvcache (Megatron-LM)
flash_attn_3: __version__ (Megatron-LM, diffusers: whether it exists)
"""
ABSENT = (
    "flash_attn.modules.mha",
    "flash_attn.losses.cross_entropy",
    "flash_attn.ops.rms_norm",
    "flash_attn.cute",
)
OURS = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface")


@pytest.fixture
def installed(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    if any(importlib.util.find_spec(name) is not None for name in OURS):
        pytest.skip("FlashAttention is installed")
    yield package.install
    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        del sys.modules[name]


def test_what_libraries_import_is_there(installed):
    installed()
    installed()
    for module, names, who in re.findall(r"(\S+): (.*) \((.*)\)", IMPORTED):
        for name in names.split():
            assert hasattr(importlib.import_module(module), name), f"{who} import {name} from {module}"
    for name in ABSENT:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    import flash_attn

    assert flash_attn.flash_attn_func is package.flash_attn_func and flash_attn.__version__.startswith("2.")
    assert flash_attn.bert_padding.unpad_input is bert_padding.unpad_input
    assert importlib.util.find_spec("flash_attn.bert_padding").name == "flash_attn.bert_padding"


def test_importlib_metadata_is_told(installed):
    before, torchs = {x.metadata["Name"] for x in metadata.distributions()}, metadata.version("torch")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash_attn")
    installed()
    installed()
    assert metadata.version("flash_attn") == metadata.version("flash-attn") == package.__version__
    found = metadata.packages_distributions()  # transformers asks so
    assert found["flash_attn"] == ["flash-attn"] and found["flash_attn_interface"] == ["flash-attn-3"]
    assert {x.metadata["Name"] for x in metadata.distributions()} == before | {"flash-attn", "flash-attn-3"}
    assert metadata.version("torch") == torchs


def test_each_flash_attention_can_be_had_alone(installed):
    installed([2])
    import flash_attn

    assert importlib.util.find_spec("flash_attn_interface") is None
    installed()
    assert sys.modules["flash_attn"] is flash_attn
    import flash_attn_3.flash_attn_interface
    import flash_attn_interface

    assert flash_attn_interface.flash_attn_func is flash_attn_3.flash_attn_interface.flash_attn_func
    assert flash_attn_interface.flash_attn_func is not flash_attn.flash_attn_func
    assert metadata.version("flash_attn_3") == flash_attn_3.__version__ == package.VERSIONS[3]


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
def test_install_leaves_an_installed_flash_attention(installed, monkeypatch, name):
    other = type(sys)(name)
    monkeypatch.setitem(sys.modules, name, other)
    with pytest.raises(ValueError, match=f"{name} of unknown version is installed; accepted: install"):
        installed()
    assert sys.modules[name] is other and {"flash_attn", "flash_attn_interface"} & {*sys.modules} == {name}
    if name == "flash_attn_interface":
        installed([2])
        assert "flash_attn" in sys.modules


# ---- signatures: names, order, defaults, as in FlashAttention 2.8 and hopper/ of 2026-08 ----

SCORES = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None"
)
SHARED = f"{SCORES}, deterministic=False, return_attn_probs=False"
MASKS = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
NO_LENGTHS = "cu_seqlens_q=None, cu_seqlens_k=None"
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
OF_3 = f"{DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
SIGNATURES = {
    interface: f"""
flash_attn_func(q, k, v, {SHARED})
flash_attn_kvpacked_func(q, kv, {SHARED})
flash_attn_qkvpacked_func(qkv, {SHARED})
flash_attn_varlen_func(q, k, v, {LENGTHS}, {SHARED}, block_table=None)
flash_attn_varlen_kvpacked_func(q, kv, {LENGTHS}, {SHARED})
flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, {SHARED})
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, \
cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), \
softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)
_flash_attn_forward(q, k, v, {MASKS}, return_softmax)
_flash_attn_varlen_forward(q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, \
window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, \
seqused_k=None, zero_tensors=False, num_splits=0)
_flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, {MASKS}, deterministic, rng_state=None)
_flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, {LENGTHS}, {MASKS}, deterministic, \
rng_state=None, zero_tensors=False)
""",
    flash_attn_3: f"""
flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, {OF_3}, num_splits=1, pack_gqa=None, \
deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, \
{OF_3}, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, {OF_3}, deterministic=False, num_heads_q=None, \
sm_margin=0, return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, \
cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, \
cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALE}, softmax_scale=None, causal=False, \
window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, \
pack_gqa=None, sm_margin=0, return_softmax_lse=False)
flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, \
qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, \
page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, \
num_splits=0, pack_gqa=None, sm_margin=0)
_flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, {NO_LENGTHS}, cu_seqlens_k_new=None, \
seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, \
leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, {DESCALE}, softmax_scale=None, causal=False, \
window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, \
scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0)
_flash_attn_backward(dout, q, k, v, out, softmax_lse, {NO_LENGTHS}, sequed_q=None, sequed_k=None, max_seqlen_q=None, \
max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, \
window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0)
""",
    rotary: """
apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, \
conjugate=False)
apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
apply_rotary_emb_torch(x, cos, sin, interleaved=False)
apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)
apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)
RotaryEmbedding(dim, base=10000.0, interleaved=False, scale_base=None, device=None)
""",
    bert_padding: """
unpad_input(hidden_states, attention_mask, unused_mask=None)
pad_input(hidden_states, indices, batch, seqlen)
index_first_axis(input, indices)
index_put_first_axis(values, indices, first_axis_dim)
""",
}


@pytest.mark.parametrize(
    ("module", "signature"), [(m, s) for m, text in SIGNATURES.items() for s in text.strip().splitlines()]
)
def test_signature(module, signature):
    name, _, parameters = signature.partition("(")
    function = getattr(module, name)
    plain = [x.replace(annotation=x.empty) for x in inspect.signature(function).parameters.values()]
    assert ", ".join(map(str, plain)) == parameters.removesuffix(")")
    assert {x.kind for x in plain} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert inspect.isfunction(function) or inspect.isclass(function)  # libraries ask inspect for defaults


def test_signatures_of_the_extension():
    counts = {name: len(inspect.signature(getattr(extension, name)).parameters) for name in extension.__all__}
    assert counts == {"fwd": 13, "varlen_fwd": 22, "bwd": 19, "varlen_bwd": 24}


# ---- what the arguments mean ----


CU_Q, CU_K = int32(0, 4, 9, 16), int32(0, 7, 13, 20)
PACKED = (CU_Q, CU_K, 7, 7)
T = Q, K, V = randn(2, 5, 4, 16), randn(2, 9, 2, 16, seed=1), randn(2, 9, 2, 16, seed=2)
R = randn(16, 4, 16), randn(20, 2, 16, seed=1), randn(20, 2, 16, seed=2)
LSE, R_LSE = randn(2, 4, 5), randn(4, 16)
GRADS, R_GRADS = [x + 1 for x in T], [x + 1 for x in R]
PAGES, TABLE = randn(2, 6, 8, 2, 16).unbind(), torch.arange(6, dtype=torch.int32).view(3, 2)
NEW, CU_NEW = randn(2, 4, 2, 16).unbind(), int32(0, 3, 4, 4)
COS, SIN = randn(20, 4, seed=5), randn(20, 4, seed=6)
QKV, HEADS = randn(2, 7, 3, 4, 16), randn(2, 7, 8, 16)
SLOPES, STATE = randn(4).abs().float(), torch.tensor([3, 4])
USED = {"seqused_q": int32(2, 5, 6), "seqused_k": int32(7, 3, 0)}
ABOUT = {"softmax_scale": 0.25, "causal": True, "window": (3, 0), "softcap": 0.5, "alibi_slopes": SLOPES}
FA2, FA3 = interface, flash_attn_3
MASK = (0.25, True, 3, 5, 0.5)  # softmax_scale, causal, window_size_left, window_size_right, softcap
MEANINGS = """
FA2._flash_attn_forward(*T, 0.4, *MASK, SLOPES, True) == attention(*T, **ABOUT, dropout_p=0.4, return_softmax=True)
FA2._flash_attn_varlen_forward(*R, *PACKED, 0.4, *MASK, SLOPES, seqused_k=USED["seqused_k"])
    == attention_varlen(*R, *PACKED, **ABOUT, dropout_p=0.4, seqused_k=USED["seqused_k"])
FA2._flash_attn_varlen_forward(R[0], *PAGES, *PACKED, 0.0, *MASK, SLOPES, block_table=TABLE, num_splits=2)
    == attention_with_kvcache(R[0], *PAGES, cache_seqlens=CU_K.diff(), page_table=TABLE, cu_seqlens_q=CU_Q, \
max_seqlen_q=7, num_splits=2, **ABOUT)
FA2._flash_attn_backward(Q, *T, Q, LSE, *GRADS, 0.4, *MASK, SLOPES, True, STATE)
    == attention_backward(Q, *T, Q, LSE, into=GRADS, **ABOUT, dropout_p=0.4, deterministic=True, rng_state=STATE)
FA2._flash_attn_backward(Q, *T, Q, LSE, None, GRADS[1], None, 0.0, *MASK, SLOPES, False)
    == attention_backward(Q, *T, Q, LSE, wanted=("k",), into=[GRADS[1]], **ABOUT)
FA2._flash_attn_varlen_backward(R[0], *R, R[0], R_LSE, *R_GRADS, *PACKED, 0.4, *MASK, SLOPES, False, STATE)
    == attention_varlen_backward(R[0], *R, R[0], R_LSE, *PACKED, into=R_GRADS, **ABOUT, dropout_p=0.4, rng_state=STATE)
extension.fwd(*T, None, SLOPES, 0.4, *MASK, True, None) == attention(*T, **ABOUT, dropout_p=0.4, return_softmax=True)
extension.varlen_fwd(*R, None, CU_Q, CU_K, None, None, None, SLOPES, 7, 7, 0.4, 0.25, False, *MASK[1:], False, None)
    == attention_varlen(*R, *PACKED, **ABOUT, dropout_p=0.4)
extension.bwd(Q, *T, Q, LSE, *GRADS, SLOPES, 0.4, *MASK, True, None, STATE)
    == attention_backward(Q, *T, Q, LSE, into=GRADS, **ABOUT, dropout_p=0.4, deterministic=True, rng_state=STATE)
extension.varlen_bwd(R[0], *R, R[0], R_LSE, *R_GRADS, CU_Q, CU_K, SLOPES, 7, 7, 0.4, 0.25, False, *MASK[1:], False, \
None, STATE)
    == attention_varlen_backward(R[0], *R, R[0], R_LSE, *PACKED, into=R_GRADS, **ABOUT, dropout_p=0.4, rng_state=STATE)
FA3.flash_attn_func(*T) == attention(*T)
FA3.flash_attn_func(*T, 0.3, True, window_size=(3, 5), softcap=0.5, num_splits=4, deterministic=True)
    == attention(*T, softmax_scale=0.3, causal=True, window=(3, 0), softcap=0.5, deterministic=True)
FA3.flash_attn_func(*T, window_size=(2, -1), pack_gqa=True, sm_margin=8) == attention(*T, window=(2, None))
FA3.flash_attn_varlen_func(*R, *PACKED, causal=True, window_size=(3, 5), softcap=0.5, **USED)
    == attention_varlen(*R, *PACKED, causal=True, window=(3, 0), softcap=0.5, **USED)
FA3.flash_attn_qkvpacked_func(QKV, causal=True, softcap=0.5) == attention(*QKV.unbind(2), causal=True, softcap=0.5)
FA3.flash_attn_qkvpacked_func(HEADS, num_heads_q=4) == attention(HEADS[:, :, :4], HEADS[:, :, 4:6], HEADS[:, :, 6:])
FA3._flash_attn_forward(*T, max_seqlen_q=7, max_seqlen_k=9) == attention(*T)
FA3._flash_attn_forward(*T, softmax_scale=0.3, causal=True, window_size_left=3, softcap=0.5, seqused_k=int32(3, 9))
    == attention(*T, softmax_scale=0.3, causal=True, window=(3, 0), softcap=0.5, seqused_k=int32(3, 9))
FA3._flash_attn_forward(*R, None, None, None, None, CU_Q, CU_K, max_seqlen_q=7, max_seqlen_k=7, **USED)
    == attention_varlen(*R, *PACKED, **USED)
FA3._flash_attn_backward(Q, *T, Q, LSE, None, None, None, int32(3, 9), 7, 9, *GRADS, 0.3, True, 3, -1, 0.5, True)
    == attention_backward(Q, *T, Q, LSE, into=GRADS, softmax_scale=0.3, causal=True, window=(3, 0), softcap=0.5, \
deterministic=True, seqused_k=int32(3, 9))
FA3._flash_attn_backward(R[0], *R, R[0], R_LSE, CU_Q, CU_K, *USED.values(), 7, 7, *R_GRADS)
    == attention_varlen_backward(R[0], *R, R[0], R_LSE, *PACKED, into=R_GRADS, **USED)
FA3.flash_attn_with_kvcache(Q, K, V, rotary_seqlens=int32(1, 1)) == attention_with_kvcache(Q, K, V)
FA3.flash_attn_with_kvcache(R[0], *PAGES, *NEW, None, COS, SIN, int32(6, 3, 1), page_table=TABLE, cu_seqlens_q=CU_Q, \
cu_seqlens_k_new=CU_NEW, max_seqlen_q=7, rotary_seqlens=int32(2, 1, 4), causal=True, window_size=(4, -1), num_splits=2)
    == CACHED
FA3._flash_attn_forward(R[0], *PAGES, *NEW, cu_seqlens_q=CU_Q, cu_seqlens_k_new=CU_NEW, max_seqlen_q=7, \
seqused_k=int32(6, 3, 1), page_table=TABLE, rotary_cos=COS, rotary_sin=SIN, seqlens_rotary=int32(2, 1, 4), \
causal=True, window_size_left=4, num_splits=2) == CACHED
FA3._flash_attn_forward(Q, *PAGES, kv_batch_idx=int32(3, 1), leftpad_k=int32(1, 2), seqused_k=int32(6, 3))
    == attention_with_kvcache(Q, *PAGES, cache_batch_idx=int32(3, 1), cache_leftpad=int32(1, 2), \
cache_seqlens=int32(6, 3), num_splits=1)
""".replace(
    "CACHED",
    "attention_with_kvcache(R[0], *PAGES, k=NEW[0], v=NEW[1], cache_seqlens=int32(6, 3, 1), page_table=TABLE, "
    "cu_seqlens_q=CU_Q, max_seqlen_q=7, cu_seqlens_k_new=CU_NEW, rotary_cos=COS, rotary_sin=SIN, "
    "rotary_seqlens=int32(2, 1, 4), causal=True, window=(4, None), num_splits=2)",
)


@calls.each(MEANINGS)
def test_meanings(theirs, ours):
    calls.check(theirs, ours, globals())


# ---- results ----

CAUSAL = (True, -1, -1, 0.0, None)  # causal, window_size_left, window_size_right, softcap, alibi_slopes


def inputs(varlen, dim=12):
    rows = (16, 20) if varlen else ((2, 11), (2, 9))
    shapes = [(rows[0], 4), (rows[1], 2), (rows[1], 2)]
    shapes = [((r,) if varlen else r) + (heads, dim) for r, heads in shapes]
    return [randn(*shape, seed=i) for i, shape in enumerate(shapes)]


def defined(tensors, varlen, grad, **options):
    """out, lse, and gradients of out * grad, by attention."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    function, lengths = (attention_varlen, PACKED) if varlen else (attention, ())
    out, lse = function(*leaves, *lengths, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize(("dim", "dropout_p"), [(16, 0.4), (12, 0.0)])
@pytest.mark.parametrize("varlen", [False, True])
def test_a_forward_and_its_backward(varlen, dim, dropout_p):
    """lse is +inf in rows without keys; the wrapped forward is differentiable by itself."""
    tensors, lengths, which = inputs(varlen, dim), PACKED if varlen else (), "varlen_" * varlen
    forward = getattr(interface, f"_wrapped_flash_attn_{which}forward")
    backward = getattr(interface, f"_wrapped_flash_attn_{which}backward")
    before, after = (*lengths, dropout_p, dim**-0.5, *CAUSAL), randn(*tensors[0].shape, seed=5)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse, s_dmask, state = forward(*leaves, *before, True)
    assert state.shape == (2,) and state.dtype == torch.int64 and bool(state.any()) == bool(dropout_p)
    assert s_dmask.signbit().any() if dropout_p else s_dmask.shape == (0,)
    wanted = defined(tensors, varlen, after, causal=True, dropout_p=dropout_p, rng_state=state)
    given, into = (
        (after, *tensors, out.detach(), lse.detach()),
        [torch.full_like(x, math.nan) for x in tensors],
    )
    backward(*given, *into, *before, True, state)
    found_lse = lse.masked_fill(lse == math.inf, -math.inf)
    torch.testing.assert_close((out, found_lse, *into), wanted)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, after), wanted[2:])
    assert (lse == math.inf).any() != varlen
    only_v = torch.full_like(tensors[2], math.nan)
    backward(*given, None, None, only_v, *before, False, state)
    assert torch.equal(only_v, into[2])
    if dropout_p:
        with pytest.raises(ValueError, match="rng_state is None; accepted: int64"):
            backward(*given, *into, *before, False)


def test_parts_of_the_keys_are_merged_as_ring_attention_does():
    """A backward for some of the keys, with out and lse of all keys, returns what these keys add to the gradients."""
    q, k, v = inputs(False, 16)
    masks = (False, -1, -1, 0.0, None)
    grad = randn(*q.shape, seed=5)
    wanted = defined((q, k, v), False, grad)
    parts = [(k[:, a:b].contiguous(), v[:, a:b].contiguous()) for a, b in ((0, 4), (4, 9))]
    found = [interface._flash_attn_forward(q, *part, 0.0, 0.25, *masks, False)[:2] for part in parts]
    out, lse = merge_attention(*map(list, zip(*found, strict=True)))
    grads = []
    for part in parts:
        grads.append([torch.empty_like(x) for x in (q, *part)])
        interface._flash_attn_backward(grad, q, *part, out, lse, *grads[-1], 0.0, 0.25, *masks, False)
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(grads[0][0] + grads[1][0], wanted[2])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in grads], 1), wanted[2 + i])


# ---- FlashAttention-3 ----


@pytest.mark.parametrize(("varlen", "dim"), [(False, 12), (True, 16)])
def test_flash_attention_3(varlen, dim):
    """Its lse is -inf in rows without keys."""
    leaves = [x.requires_grad_() for x in inputs(varlen, dim)]
    lengths = dict(zip(LENGTHS.split(", "), PACKED, strict=True)) if varlen else {}
    public = flash_attn_3.flash_attn_varlen_func if varlen else flash_attn_3.flash_attn_func
    found = public(*leaves, **lengths, causal=True, return_attn_probs=True)
    assert torch.equal(public(*leaves, **lengths, causal=True), found[0])
    tensors, grad = [x.detach() for x in leaves], randn(*found[0].shape, seed=5)
    wanted = defined(tensors, varlen, grad, causal=True)
    torch.testing.assert_close((*found, *torch.autograd.grad(found[0], leaves, grad)), wanted)
    own = torch.empty_like(tensors[0])
    out, lse, *rest = flash_attn_3._flash_attn_forward(*tensors, out_=own, causal=True, **lengths)
    assert out is own and [x.numel() for x in rest] == [0, 0]
    into = {f"d{n}": torch.empty_like(x) for n, x in zip("qkv", tensors, strict=True)}
    flash_attn_3._flash_attn_backward(grad, *tensors, out, lse, is_causal=True, **lengths, **into)
    torch.testing.assert_close((out, lse, *into.values()), wanted)


@pytest.mark.parametrize("dim", [8, 6])
def test_flash_attention_3_combines_with_heads_last(dim):
    outs, lses = randn(3, 2, 5, 4, dim), randn(3, 2, 5, 4, seed=1)
    wanted, wanted_lse = kvcache_reference.merge(outs, lses.transpose(-1, -2))
    own = torch.empty(2, 5, 4, dim, dtype=torch.float16)
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, own, torch.float16)
    assert out is own and lse.shape == (2, 5, 4)
    torch.testing.assert_close(out, wanted.half())
    torch.testing.assert_close(lse, wanted_lse.transpose(-1, -2))


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_a_given_out_that_no_sequence_owns_stay(cached):
    q, k, v = inputs(True, 11)
    out = torch.full((18, 4, 11), 7.0, dtype=F64)
    lengths = dict(zip(LENGTHS.split(", "), PACKED, strict=True))
    if cached:
        k, v, lengths = randn(3, 9, 2, 11), randn(3, 9, 2, 11), {"cu_seqlens_q": CU_Q, "max_seqlen_q": 7}
    found = flash_attn_3._flash_attn_forward(torch.cat((q, q[:2])), k, v, **lengths, out_=out)[0]
    assert found is out and (out[16:] == 7.0).all() and not (out[:16] == 7.0).any()


# ---- rotary embedding ----


def turned(x, cos, sin, interleaved):
    """x (rows, heads, dim) as complex numbers."""
    pairs = cos.shape[-1]
    own = x[..., : 2 * pairs]
    real, imaginary = (own[..., ::2], own[..., 1::2]) if interleaved else own.chunk(2, -1)
    product = torch.complex(real, imaginary) * torch.complex(cos, sin)[:, None]
    halves = (product.real, product.imag)
    own = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((own, x[..., 2 * pairs :]), -1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, int32(2, 5)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_rotary_embedding(varlen, interleaved, offsets, inplace):
    cos, sin = randn(20, 3, seed=1), randn(20, 3, seed=2)
    x = randn(*((9,) if varlen else (2, 6)), 4, 8).requires_grad_()
    starts = (0, 4, 9) if varlen else (0, 6, 12)
    first = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
    flat = x.detach().clone().flatten(0, -3).requires_grad_()
    wanted = torch.cat(
        [
            turned(flat[a:b], cos[n : n + b - a], sin[n : n + b - a], interleaved)
            for n, (a, b) in zip(first, itertools.pairwise(starts), strict=True)
        ]
    ).view(x.shape)
    lengths = {"cu_seqlens": int32(*starts), "max_seqlen": 5} if varlen else {}
    options = {"interleaved": interleaved, "seqlen_offsets": offsets, **lengths}
    found = rotary.apply_rotary_emb(x, cos, sin, inplace=inplace, **options)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(x, found) == inplace
    grad = randn(*x.shape, seed=3)
    actual = torch.autograd.grad(found, x, grad)[0]
    torch.testing.assert_close(actual, torch.autograd.grad(wanted, flat, grad)[0].view(x.shape))
    back = rotary.apply_rotary(grad, cos, sin, conjugate=True, **options)
    torch.testing.assert_close(actual, back)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_embedding_of_packed_tensors(grouped, recorded):
    cos, sin, cos_k, sin_k = (randn(6, 4, seed=i) for i in range(4))
    qkv = randn(2, 6, 8, 8) if grouped else randn(2, 6, 3, 4, 8)
    parts = [x.clone() for x in (qkv.split([4, 2, 2], 2) if grouped else qkv.unbind(2))]
    wanted = [
        rotary.apply_rotary_emb_torch(parts[0], cos, sin),
        rotary.apply_rotary_emb_torch(parts[1], cos_k, sin_k),
        parts[2],
    ]
    leaf = qkv.requires_grad_(recorded)
    found = rotary.apply_rotary_emb_qkv_(leaf, cos, sin, cos_k, sin_k, num_heads_q=4 if grouped else None)
    assert found.data_ptr() == qkv.data_ptr()
    torch.testing.assert_close(found.detach(), torch.cat(wanted, 2) if grouped else torch.stack(wanted, 2))
    kv = torch.stack((parts[1], parts[2]), 2).requires_grad_(recorded)
    found = rotary.apply_rotary_emb_kv_(kv, cos_k, sin_k)
    torch.testing.assert_close(found.detach(), torch.stack(wanted[1:], 2))
    assert found.data_ptr() == kv.data_ptr() and found.requires_grad == recorded
    if recorded:
        (grad,) = torch.autograd.grad(found.sum(), kv)
        assert (grad[:, :, 1] == 1).all() and not (grad[:, :, 0] == 1).any()


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_module(scale_base):
    """Products depend only on distances; tables grow."""
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    same = randn(1, 1, 3, 1, 8, dtype=torch.float32).expand(1, 12, 3, 1, 8).clone()
    first = module(same[:, :7].clone())
    q, k, v = module(same.clone())[0, :, :, 0].unbind(1)
    scores = q @ k.T
    for distance in (0, 1, 5):
        torch.testing.assert_close(
            scores.diagonal(-distance), scores.diagonal(-distance)[:1].expand(12 - distance)
        )
    assert torch.equal(v, same[0, :, 2, 0])
    if scale_base is None:
        torch.testing.assert_close(first, module(same[:, :7].clone()))
        angle = 100.0 ** (-torch.arange(0, 8, 2) / 8) * 3
        torch.testing.assert_close(module._cos_cached[3], angle.cos())
    later, kv = module(same[:, :2, 0].clone(), same[:, :2, :2].clone(), seqlen_offset=4)
    torch.testing.assert_close(later[0, :, 0], q[4:6])
    assert kv.shape == (1, 2, 2, 1, 8)


# ---- wrong calls ----

ODD, ODD_CACHE = randn(2, 5, 4, 11), randn(2, 7, 4, 11)
ONE_ROW = randn(11).expand(2, 5, 4, 11)
NO_MASK = (0.0, 0.25, False, -1, -1, 0.0, None)
ONE = (int32(0, 5), int32(0, 5), 5, 5)
WRONG = """
package.install([4]) -> ValueError: versions is [4]; accepted: some of 2, 3
package.install(2) -> ValueError: versions is 2; accepted: some of 2, 3
FA2._flash_attn_backward(Q, Q, Q, Q, None, LSE, Q, Q, Q, *NO_MASK, False)
    -> TypeError: out is a NoneType; accepted: a torch.Tensor
FA2._flash_attn_backward(Q, Q, Q, Q, Q, LSE, Q[:, :3], Q, Q, *NO_MASK, False)
    -> ValueError: dq has shape ...2, 3, 4, 16...; accepted: ...2, 5, 4, 16
FA2._flash_attn_backward(*[ODD] * 5, LSE, None, *[ODD.clone()] * 2, *NO_MASK, False)
    -> ValueError: dv shares memory with dk; accepted: memory of its own
FA3._flash_attn_forward(ODD, ODD, ODD, out_=ODD[0].clone())
    -> ValueError: out has shape (5, 4, 11); accepted: (2, 5, 4, 11)
FA3._flash_attn_forward(ODD, ODD, ODD, out_=ONE_ROW, leftpad_k=int32(0, 0))
    -> ValueError: out has shape ... so that elements share memory; accepted:
FA3._flash_attn_forward(ODD.clone().requires_grad_(), ODD, ODD, out_=torch.empty_like(ODD))
    -> ValueError: out is given where autograd records; accepted: without gradients
FA2.flash_attn_with_kvcache(ODD, *[ODD_CACHE] * 2, ODD, ODD.clone(), cache_seqlens=1)
    -> ValueError: v_cache shares memory with k_cache; accepted: memory of its own, or without rotary embedding the
FA2.flash_attn_with_kvcache(Q, Q.clone(), Q.clone(), Q.to_sparse(), Q, cache_seqlens=0)
    -> TypeError: k is of layout torch.sparse_coo; accepted: a dense torch.Tensor
FA2._flash_attn_varlen_forward(Q[0], Q[0], Q[0], *ONE, 0.0, 1.0, False, leftpad_k=int32(1))
    -> NotImplementedError: leftpad_k is given; accepted: its default
FA2._flash_attn_varlen_forward(Q[0], Q[0], Q[0], *ONE, 0.0, 1.0, False, zero_tensors=True)
    -> NotImplementedError: zero_tensors is True; accepted: its default
FA2.flash_attn_func(Q, Q, Q, softcap=None) -> TypeError: softcap is None; accepted: a Python number
FA2.flash_attn_varlen_func(Q[0], Q, Q, CU_Q, CU_Q, 5, 5, block_table=torch.tensor(1))
    -> ValueError: block_table has shape (); accepted: (batch, pages of a sequence)
extension.fwd(Q, Q, Q, None, None, *NO_MASK[:6], False, Q) -> NotImplementedError: gen is given; accepted: its default
FA3.flash_attn_func(Q, Q, Q, qv=Q) -> NotImplementedError: qv is given; accepted: its
FA3.flash_attn_with_kvcache(Q, Q, Q, k_descale=Q) -> NotImplementedError: k_descale is given; accepted: its default
FA3.flash_attn_varlen_func(Q, Q, Q, CU_Q, CU_K, 7, 7, attention_chunk=4)
    -> NotImplementedError: attention_chunk is 4; accepted: its default
FA3.flash_attn_qkvpacked_func(Q, num_heads_q=3)
    -> ValueError: num_heads_q is 3 with a qkv of 4 heads; accepted: an int
FA3._flash_attn_forward(Q, Q[0], Q[0], cu_seqlens_k=CU_K)
    -> ValueError: cu_seqlens_k is given without cu_seqlens_q; accepted: None
FA3._flash_attn_forward(Q, Q, Q, seqused_q=int32(2, 3))
    -> ValueError: seqused_q is given without cu_seqlens_q; accepted: None
FA3.flash_attn_combine(Q[None], LSE[None]) -> ValueError: lse_partial has shape (1, 2, 4, 5); accepted: (1, 2, 5, 4)
FA3.flash_attn_combine(Q[None], LSE.transpose(1, 2)[None], Q[:1])
    -> ValueError: out has shape (1, 5, 4, 16); accepted: (2, 5, 4, 16)
FA3.get_scheduler_metadata(2, 1, 9, 4, 2, 64, 9) -> TypeError: cache_seqlens is an int; accepted: a torch.Tensor
rotary.apply_rotary_emb(Q[0], randn(5, 8), randn(5, 8))
    -> ValueError: x has shape (5, 4, 16); accepted: (batch, seqlen
rotary.apply_rotary_emb(Q, randn(5, 9), randn(5, 9))
    -> ValueError: cos has shape (5, 9), sin (5, 9); accepted: (positions, up to 8)
rotary.apply_rotary_emb(Q, randn(5, 8), randn(5, 8), seqlen_offsets=1)
    -> ValueError: cos has 5 positions; accepted: 6 or more
rotary.apply_rotary_emb_qkv_(Q, randn(5, 8), randn(5, 8)) -> ValueError: num_heads_q is None with a qkv of 4
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_one_sentence(call, sentence):
    refusals.check(call, sentence, globals())


def test_each_call_is_counted_once():
    q, k, v = inputs(False, 11)
    packed, pages = inputs(True, 16), [randn(6, 5, 2, 16, seed=i) for i in (7, 8)]
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    package.served.clear()
    out, lse, *_ = interface._flash_attn_forward(q, k, v, *NO_MASK, False)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(q, q, k, v, out, lse, *gradients, *NO_MASK, False)
    extension.fwd(q, k, v, None, None, *NO_MASK[:6], False, None)
    package.flash_attn_varlen_func(packed[0], *pages, *PACKED, block_table=table)
    flash_attn_3.flash_attn_qkvpacked_func(randn(2, 5, 6, 16), num_heads_q=2)
    flash_attn_3.flash_attn_with_kvcache(q, k, v)
    calls = {
        "flash_attn._flash_attn_forward": 2,
        "flash_attn._flash_attn_backward": 1,
        "flash_attn.flash_attn_varlen_func": 1,
        "flash_attn_3.flash_attn_func": 1,
        "flash_attn_3.flash_attn_with_kvcache": 1,
    }
    why = "query is on cpu, where the reference computes it"
    assert package.served == {(door, why): count for door, count in calls.items()}
