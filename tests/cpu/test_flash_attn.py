"""FlashAttention-2's functions: each argument's meaning as a call of ours, conventions, results and gradients."""

import functools
import math

import pytest
import torch
from torch.autograd import forward_ad

import cute_attn.flash_attn as package
from cute_attn import attention, attention_varlen
from cute_attn.flash_attn import bert_padding, rotary
from cute_attn.flash_attn import flash_attn_interface as fa
from tests import calls, refusals, tensors
from tests.compared import same
from tests.tensors import int32

F64 = torch.float64
randn = functools.partial(tensors.randn, dtype=F64)


# ---- what the arguments mean ----

CU_Q, CU_K = int32(0, 4, 9, 16), int32(0, 7, 13, 20)  # queries of length 4, 5, 7; keys of 7, 6, 7
BATCH = 3
PACKED = (CU_Q, CU_K, 7, 7)
Q, KV = randn(2, 5, 4, 16), randn(2, 9, 2, 2, 16, seed=1)
K, V = KV.unbind(2)
QKV, COS = randn(2, 5, 3, 4, 16), randn(9, 8)
ROWS, ROWS_KV, ROWS_QKV = randn(16, 4, 16), randn(20, 2, 2, 16, seed=1), randn(16, 3, 4, 16)
CACHE, NEW = randn(2, 6, 8, 2, 16).unbind(), randn(2, 2, 5, 2, 16).unbind()
PAGES, PAGED = int32(5, 0, 2, 1).view(2, 2), (int32(0, 7, 16), int32(0, 9, 20), 9, 11)
HEADS, EACH = randn(4).abs().float(), randn(2, 4).abs().float()
MEANINGS = """
flash_attn_func(Q, K, V) == attention(Q, K, V)
flash_attn_func(Q, K, V, 0.0, 0.5) == attention(Q, K, V, softmax_scale=0.5)
flash_attn_func(Q, K, V, causal=True) == attention(Q, K, V, causal=True)
flash_attn_func(Q, K, V, causal=1, deterministic=2) == attention(Q, K, V, causal=True, deterministic=True)
flash_attn_func(Q, K, V, causal=None, deterministic=None) == attention(Q, K, V)
flash_attn_func(Q, K, V, causal=np.True_, return_attn_probs=np.True_) == attention(Q, K, V, causal=True)
flash_attn_func(Q, K, V, causal=torch.tensor(True), return_attn_probs=2.0) == attention(Q, K, V, causal=True)
flash_attn_func(Q, K, V, window_size=(2, 1)) == attention(Q, K, V, window=(2, 1))
flash_attn_func(Q, K, V, window_size=[2, -1]) == attention(Q, K, V, window=(2, None))
flash_attn_func(Q, K, V, window_size=(-5, 0)) == attention(Q, K, V, window=(None, 0))
flash_attn_func(Q, K, V, window_size=torch.tensor([2, 1])) == attention(Q, K, V, window=(2, 1))
flash_attn_func(Q, K, V, window_size=np.array([2, 1])) == attention(Q, K, V, window=(2, 1))
flash_attn_func(Q, K, V, window_size=[np.int64(2), 1]) == attention(Q, K, V, window=(2, 1))
flash_attn_func(Q, K, V, causal=True, window_size=(2, 3)) == attention(Q, K, V, causal=True, window=(2, 0))
flash_attn_func(Q, K, V, softcap=0.7) == attention(Q, K, V, softcap=0.7)
flash_attn_func(Q, K, V, softcap=-1.0) == attention(Q, K, V)
flash_attn_func(Q, K, V, alibi_slopes=HEADS) == attention(Q, K, V, alibi_slopes=HEADS)
flash_attn_func(Q, K, V, alibi_slopes=EACH, causal=True) == attention(Q, K, V, alibi_slopes=EACH, causal=True)
flash_attn_func(Q, K, V, 0.4, return_attn_probs=2) == attention(Q, K, V, dropout_p=0.4, return_softmax=True)
flash_attn_func(Q, K, V, 0.4) == attention(Q, K, V, dropout_p=0.4)
flash_attn_func(Q, K, V, 1e-30, return_attn_probs=True) == attention(Q, K, V)
flash_attn_kvpacked_func(Q, KV, 0.0, 0.5, True) == attention(Q, K, V, softmax_scale=0.5, causal=True)
flash_attn_kvpacked_func(Q, KV, softcap=0.7) == attention(Q, K, V, softcap=0.7)
flash_attn_qkvpacked_func(QKV, 0.0, 0.5, True) == attention(*QKV.unbind(2), softmax_scale=0.5, causal=True)
flash_attn_qkvpacked_func(QKV, deterministic=True) == attention(*QKV.unbind(2), deterministic=True)
flash_attn_varlen_func(ROWS, *ROWS_KV.unbind(1), *PACKED, 0.0, 0.5, True, (2, 3))
    == attention_varlen(ROWS, *ROWS_KV.unbind(1), *PACKED, softmax_scale=0.5, causal=True, window=(2, 0))
flash_attn_varlen_func(ROWS, *ROWS_KV.unbind(1), CU_Q, CU_K, np.int64(7), torch.tensor(7))
    == attention_varlen(ROWS, *ROWS_KV.unbind(1), *PACKED)
flash_attn_varlen_kvpacked_func(ROWS, ROWS_KV, *PACKED, softcap=0.7)
    == attention_varlen(ROWS, *ROWS_KV.unbind(1), *PACKED, softcap=0.7)
flash_attn_varlen_qkvpacked_func(ROWS_QKV, CU_Q, 7, alibi_slopes=HEADS)
    == attention_varlen(*ROWS_QKV.unbind(1), CU_Q, CU_Q, 7, 7, alibi_slopes=HEADS)
flash_attn_varlen_func(ROWS, *CACHE, *PAGED, causal=True, block_table=PAGES)
    == attention_with_kvcache(ROWS, *CACHE, cache_seqlens=int32(9, 11), page_table=PAGES, cu_seqlens_q=PAGED[0], \
max_seqlen_q=9, causal=True, window=(None, 0))
flash_attn_with_kvcache(Q, K, V) == attention_with_kvcache(Q, K, V)
flash_attn_with_kvcache(Q[..., :11], K[..., :11], V) == attention_with_kvcache(Q[..., :11], K[..., :11], V)
flash_attn_with_kvcache(Q, K, V, cache_seqlens=7, softmax_scale=0.5, causal=True)
    == attention_with_kvcache(Q, K, V, cache_seqlens=7, softmax_scale=0.5, causal=True)
flash_attn_with_kvcache(Q, *CACHE, *NEW, cache_seqlens=int32(1, 2), cache_batch_idx=int32(3, 1), num_splits=3)
    == attention_with_kvcache(Q, *CACHE, k=NEW[0], v=NEW[1], cache_seqlens=int32(1, 2), cache_batch_idx=int32(3, 1), \
num_splits=3)
flash_attn_with_kvcache(Q, K, V, cache_leftpad=int32(1, 2), window_size=(5, 2), softcap=2.0, alibi_slopes=EACH)
    == attention_with_kvcache(Q, K, V, cache_leftpad=int32(1, 2), window=(5, 2), softcap=2.0, alibi_slopes=EACH)
flash_attn_with_kvcache(Q, *CACHE, block_table=PAGES, cache_seqlens=int32(3, 9), window_size=(5, 7), causal=True)
    == attention_with_kvcache(Q, *CACHE, page_table=PAGES, cache_seqlens=int32(3, 9), window=(5, 0), causal=True)
flash_attn_with_kvcache(Q, K, V, *NEW, COS, COS, 1, rotary_interleaved=False)
    == attention_with_kvcache(Q, K, V, k=NEW[0], v=NEW[1], rotary_cos=COS, rotary_sin=COS, cache_seqlens=1, \
rotary_interleaved=False)
"""


@calls.each(MEANINGS)
def test_meanings(theirs, ours):
    calls.check(theirs, ours, globals() | vars(fa))


# ---- results ----

FUNCTIONS = [(varlen, packed) for varlen in (False, True) for packed in ("", "kv", "qkv")]


def leaves(varlen, packed, dim=16):
    """Inputs that require gradients, in the function's layout."""
    rows, rows_kv = ((16,), (20,)) if varlen else ((BATCH, 7), (BATCH, 9))
    q = randn(*rows, 4, dim, seed=1).requires_grad_()
    if packed == "qkv":
        return (randn(*rows, 3, 4, dim, seed=2).requires_grad_(),)
    if packed == "kv":
        return q, randn(*rows_kv, 2, 2, dim, seed=3).requires_grad_()
    return q, *(randn(*rows_kv, 2, dim, seed=s).requires_grad_() for s in (4, 5))


def both(varlen, packed):
    """FlashAttention's function for these kinds of inputs, and the package's."""
    theirs = getattr(package, f"flash_attn_{'varlen_' * varlen}{f'{packed}packed_' if packed else ''}func")
    lengths = (CU_Q, CU_Q if packed == "qkv" else CU_K, 7, 7) if varlen else ()

    def ours(*tensors, **options):
        q, k, v = (*tensors[:-1], *tensors[-1].unbind(-3)) if packed else tensors
        return (attention_varlen if varlen else attention)(q, k, v, *lengths, **options)

    own = lengths[::2] if packed == "qkv" else lengths
    return lambda *tensors, **options: theirs(*tensors, *own, **options), ours


@pytest.mark.parametrize(("dim", "dropout_p"), [(16, 0.4), (59, 0.0)])
@pytest.mark.parametrize(("varlen", "packed"), FUNCTIONS)
def test_results_and_gradients(varlen, packed, dim, dropout_p):
    given, (theirs, ours) = leaves(varlen, packed, dim), both(varlen, packed)
    options = {"softmax_scale": 0.5, "dropout_p": dropout_p}
    torch.manual_seed(3)
    *found, s_dmask = theirs(*given, **options, window_size=(-5, 1), return_attn_probs=True)
    torch.manual_seed(3)
    *wanted, softmax = ours(*given, **options, window=(None, 1), return_lse=True, return_softmax=True)
    same(found, wanted, given)
    if dropout_p:
        assert torch.equal(s_dmask, softmax) and s_dmask.signbit().any()
    else:
        assert s_dmask.shape == (0,) and s_dmask.dtype == F64
        alone = theirs(*given, **options, window_size=(-5, 1))
        assert isinstance(alone, torch.Tensor) and torch.equal(alone, found[0])


@pytest.mark.parametrize("packed", ["kv", "qkv"])
def test_tangents_of_packed_tensors_that_learn(packed):
    """Tensors require gradients, like a model's in training."""
    given = leaves(False, packed)
    dots = [randn(*x.shape, seed=5) for x in given]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(given, dots, strict=True)]
        same(*(forward_ad.unpack_dual(function(*duals)).tangent for function in both(False, packed)))


@pytest.mark.parametrize("inplace", [False, True])
def test_rows_without_a_sequence_or_a_position_are_not_rotated(inplace):
    cos, sin = torch.rand(4, 4).double().cos(), torch.rand(4, 4).double().sin()
    x = torch.randn(
        9, 1, 8
    ).double()  # rows 0, 7 and 8 belong to no sequence, 5 and 6 are at positions 4 and 5 of 4
    starts, offsets = int32(1, 3, 7), int32(1, 2)
    wanted = x.clone()
    for row, position in ((1, 1), (2, 2), (3, 2), (4, 3)):
        wanted[row] = rotary.apply_rotary_emb_torch(
            x[None, row : row + 1], cos[position : position + 1], sin[position : position + 1]
        )[0, 0]
    found = rotary.apply_rotary(x, cos, sin, offsets, starts, 4, inplace=inplace)
    torch.testing.assert_close(found, wanted)
    assert (found.data_ptr() == x.data_ptr()) == inplace


def test_a_query_without_keys_has_zeros_and_an_lse_of_plus_infinity():
    q, k, v = randn(1, 5, 2, 8), randn(1, 2, 2, 8), randn(1, 2, 2, 8)
    out, lse, _ = package.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :3] == math.inf).all() and lse[:, :, 3:].isfinite().all()
    assert not out[:, :3].any()
    out, lse = package.flash_attn_with_kvcache(q, k, v, cache_seqlens=0, return_softmax_lse=True)
    assert not out.any() and (lse == math.inf).all()


def test_no_gradient_flows_to_slopes():
    slopes = HEADS.clone().requires_grad_()
    tensors = leaves(False, "")
    package.flash_attn_func(*tensors, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None and tensors[0].grad is not None


# ---- a cache of keys and values ----


def test_varlen_with_pages():
    """Calls that autograd records have no backward."""
    q, options = ROWS.clone().requires_grad_(), {"causal": True, "block_table": PAGES}
    out, lse, s_dmask = package.flash_attn_varlen_func(q, *CACHE, *PAGED, **options, return_attn_probs=True)
    assert lse.shape == (4, 16) and s_dmask.shape == (0,)
    assert torch.equal(out, package.flash_attn_varlen_func(ROWS, *CACHE, *PAGED, **options))
    with pytest.raises(NotImplementedError, match="a gradient of attention with a block_table is asked for"):
        out.sum().backward()


# ---- wrong calls ----

WRONG = """
flash_attn_func([1.0], Q, Q) -> TypeError: q is a list; accepted: a torch.Tensor
flash_attn_qkvpacked_func(Q) -> ValueError: qkv has shape ...; accepted: (batch, seqlen, 3,
flash_attn_kvpacked_func(Q, QKV) -> ValueError: kv has shape ...; accepted: (batch, seqlen, 2,
flash_attn_varlen_qkvpacked_func(QKV, CU_Q, 7) -> ValueError: accepted: (total, 3, nheads,
flash_attn_kvpacked_func(Q, None) -> TypeError: kv is a NoneType
flash_attn_func(Q, Q, Q, window_size=3) -> ValueError: window_size is 3; accepted: (left
flash_attn_func(Q, Q, Q, window_size=(0.5, 1)) -> ValueError: window_size is (0.5, 1)
flash_attn_varlen_func(Q[0], Q, Q, CU_Q, CU_Q, 5, 5, dropout_p=0.5, block_table=int32(0)[None])
    -> ValueError: dropout_p is 0.5 with a block_table; accepted: 0
flash_attn_varlen_func(Q[0], Q, Q, CU_Q, CU_Q, 5, 99, block_table=int32(0)[None])
    -> ValueError: max_seqlen_k is 99; accepted: 0 to
unpad_input(Q, torch.ones(2, 6)) -> ValueError: attention_mask has shape (2, 6); accepted: (2, 5)
unpad_input(Q, [1, 1]) -> TypeError: attention_mask is a list; accepted: a torch.Tensor
pad_input(Q[0], torch.arange(5), 1, "a") -> TypeError: seqlen is 'a'; accepted: a Python int, or what is equal to one
apply_rotary(Q, COS, COS, "a")
    -> TypeError: seqlen_offsets is 'a'; accepted: int32 or int64 (2,), or an int of 0 or more
apply_rotary(Q, COS, COS, -1) -> ValueError: seqlen_offsets is -1; accepted: int32 or int64
apply_rotary(Q, COS, COS, int32(1)) -> ValueError: seqlen_offsets has shape (1,); accepted: int32 or int64 (2,)
apply_rotary(Q[0], COS, COS, cu_seqlens=[0, 5]) -> TypeError: cu_seqlens is a list; accepted: a torch.Tensor
apply_rotary(Q, COS, COS, interleaved="no") -> TypeError: interleaved is 'no'; accepted: False or True
apply_rotary_emb_torch(Q, COS[:, :9], COS)
    -> ValueError: x has shape (2, 5, 4, 16), cos (9, 8) ...; accepted: (batch, seqlen, nheads
unpad_input_for_concatenated_sequences(Q, torch.ones(2, 6)) -> ValueError: attention_mask_in_length has shape
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_one_sentence(call, sentence):
    refusals.check(call, sentence, globals() | vars(fa) | vars(bert_padding) | vars(rotary))


# ---- bert_padding ----


def test_unpadding_and_padding():
    states = randn(3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    for given in (mask, mask.bool()):
        rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(states, given)
        assert torch.equal(rows, states[mask.bool()]) and indices.tolist() == [0, 1, 2, 11, 12, 14]
        assert cu_seqlens.tolist() == [0, 3, 3, 6] and cu_seqlens.dtype == torch.int32
        assert longest == 3 and isinstance(longest, int)
        assert used.tolist() == [3, 0, 3] and used.dtype == torch.int32
    padded = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, states * mask[:, :, None, None])
    weight = randn(3, 5, 2, 4, seed=1)
    (grad,) = torch.autograd.grad((padded * weight).sum(), states)
    assert torch.equal(grad, weight * mask[:, :, None, None])


def test_no_sequence_is_packed_to_none():
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(randn(0, 5, 2), torch.ones(0, 5))
    assert rows.shape == (0, 2) and not indices.numel() and cu_seqlens.tolist() == [0]
    assert longest == 0 and not used.numel()


def test_unused_rows_are_packed_and_not_counted():
    states = randn(2, 4, 3)
    mask, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]])
    rows, _, cu_seqlens, longest, used = bert_padding.unpad_input(states, mask, unused)
    assert torch.equal(rows, states[(mask + unused).bool()])
    assert cu_seqlens.tolist() == [0, 3, 7] and longest == 4 and used.tolist() == [2, 1]


def test_unpadding_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    states = randn(3, 6, 4)
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(states, lengths)
    assert torch.equal(rows, torch.cat([states[0, :5], states[1, :5], states[2]]))
    assert torch.equal(rows, states.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6


def test_rows_and_their_residual():
    states = randn(6, 2, 3).requires_grad_()
    indices = torch.tensor([4, 0])
    rows, residual = bert_padding.index_first_axis_residual(states, indices)
    assert torch.equal(rows, states[indices]) and torch.equal(residual, states)
    (grad,) = torch.autograd.grad((2 * rows).sum() + residual.sum(), states)
    assert grad[:, 0, 0].tolist() == [3, 1, 1, 1, 3, 1]
