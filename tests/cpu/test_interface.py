"""Calling attention: the meaning of each argument, and one sentence for each wrong one."""

import functools
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from cute_attn.api import operators
from cute_attn.api.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    draw_rng_state,
    resolve_mask,
    resolve_precision,
)
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.host.call import Call
from cute_attn.host.checks import check, check_for_kernels
from tests import refusals
from tests.tensors import int32, randn

BF16 = torch.bfloat16


def dense(**changes):
    """Arguments of a valid call on batches, with changes."""
    call = {"q": randn(2, 16, 4, 64, dtype=BF16), "k": randn(2, 24, 2, 64, dtype=BF16)}
    return call | {"v": randn(2, 24, 2, 64, dtype=BF16)} | changes


def varlen(**changes):
    """Arguments of a valid varlen call, with changes."""
    call = {"q": randn(16, 4, 64, dtype=BF16)} | {name: randn(24, 2, 64, dtype=BF16) for name in "kv"}
    call |= {"cu_seqlens_q": int32(0, 6, 16), "cu_seqlens_k": int32(0, 24, 24)}
    return call | {"max_seqlen_q": 10, "max_seqlen_k": 24} | changes


META_Q = torch.empty(2, 16, 4, 64, dtype=BF16, device="meta")
GOOD = dense()
Q, LSE, CU = randn(1, 16, 2, 32), randn(1, 2, 16), int32(0, 7, 16)
WRONG = """
dense(q=[1.0]) -> TypeError: q is a list; accepted: a torch.Tensor
dense(v=None) -> TypeError: v is a NoneType
dense(q=torch.ones(2, 16, 4, 64, dtype=torch.int32)) -> TypeError: q has dtype torch.int32; accepted: ...bfloat16
dense(k=randn(2, 24, 2, 64)) -> TypeError: k has dtype torch.float32; accepted: torch.bfloat16, q's
dense(k=META_Q) -> ValueError: k is on meta; accepted: cpu, where q is
dense(q=randn(2, 16, 64, dtype=BF16)) -> ValueError: q has shape (2, 16, 64); accepted: (batch,
dense(q=torch.ones((), dtype=BF16)) -> ValueError: q has shape (); accepted: (batch,
dense(q=randn(3, 16, 4, 64, dtype=BF16)) -> ValueError: k has batch 2; accepted: 3, q's
dense(v=randn(2, 23, 2, 64, dtype=BF16)) -> ValueError: v has shape (2, 23, 2, 64); accepted: (2, 24, 2)
dense(q=randn(2, 16, 4, 32, dtype=BF16)) -> ValueError: k has head_dim 64; accepted: 32, q's
dense(q=randn(2, 16, 4, 0), k=randn(2, 24, 2, 0), v=randn(2, 24, 2, 8)) -> ValueError: head dims 0 and 8
dense(q=randn(2, 16, 3, 64, dtype=BF16)) -> ValueError: q has 3 heads; accepted: a multiple of k's 2
dense(k=randn(2, 24, 0, 64, dtype=BF16), v=randn(2, 24, 0, 64, dtype=BF16))
    -> ValueError: q has 4 heads; accepted: a multiple of k's 0
dense(softmax_scale=math.nan) -> ValueError: softmax_scale is nan; accepted: a finite number
dense(softmax_scale=torch.tensor(1.0)) -> TypeError: softmax_scale is tensor(1.); accepted: a Python number
dense(causal="left") -> ValueError: causal is 'left'; accepted: False, True, 'bottom_right', 'top_left'
dense(window=(-2, 0)) -> ValueError: window is (-2, 0); accepted: numbers of keys from 0
dense(window=(1.5, 0)) -> ValueError: window is (1.5, 0)
dense(window=4) -> ValueError: window is 4; accepted: (left, right)
dense(window=(4, 1), causal=True) -> ValueError: window is (4, 1); accepted with causal: a right of None or 0
dense(softmax_scale=-1e39) -> ValueError: softmax_scale is -1e+39; accepted: a finite number, 0 or from 2**-60
dense(softcap=-1.0) -> ValueError: softcap is -1.0; accepted: a number from 2**-60 to 2**12, or 0
dense(softcap=1e-46) -> ValueError: softcap is 1e-46
dense(softcap=1e5) -> ValueError: softcap is 100000.0; accepted: a number from 2**-60 to 2**12, or 0
dense(dropout_p=1.0) -> ValueError: dropout_p is 1.0; accepted: 0 <= dropout_p < 1
dense(dropout_p=1 - 2 ** (-25)) -> ValueError: dropout_p is 0.9999999...; accepted: 0 <=
dense(dropout_mask="cudnn") -> ValueError: dropout_mask is 'cudnn'; accepted: 'flash', 'mem_efficient'
dense(dropout_p=0.1, rng_state=int32(1, 2)) -> TypeError: rng_state has dtype torch.int32; accepted: torch.int64
dense(dropout_p=0.1, rng_state=torch.tensor([1])) -> ValueError: rng_state has shape (1,)
dense(alibi_slopes=randn(3)) -> ValueError: alibi_slopes has shape (3,); accepted: (4,) or (2, 4)
dense(sinks=randn(2, 4)) -> ValueError: sinks has shape (2, 4); accepted: (4,), a number per head
dense(sinks=randn(4).double())
    -> TypeError: sinks has dtype torch.float64; accepted: torch.float16, torch.bfloat16, torch.float32
dense(bias=randn(24)) -> ValueError: bias has shape (24,); accepted: (2, 4, 16, 24), where each may be 1
varlen(max_seqlen_k="a", bias=randn(1, 1, 16, 1)) -> TypeError: max_seqlen_k is 'a'
dense(bias=randn(1, 1, 15, 24)) -> ValueError: bias has shape (1, 1, 15, 24)
dense(bias=torch.ones(1, 1, 16, 24, dtype=torch.int32)) -> TypeError: bias has dtype torch.int32
dense(seqused_k=torch.tensor([3, 4])) -> TypeError: seqused_k has dtype torch.int64; accepted: torch.int32
dense(seqused_k=int32(3)) -> ValueError: seqused_k has shape (1,); accepted: (2,)
dense(seqused_k=int32(3, 0, 4)[::2]) -> ValueError: seqused_k has stride 2; accepted: 1
dense(epilogues="relu") -> TypeError: epilogues is 'relu'; accepted: a tuple of names
dense(epilogues={"relu": "x"}) -> TypeError: epilogues['relu'] has 'x'; accepted: tensors
dense(epilogues={"relu": 2 ** 53 + 1}) -> ValueError: epilogues['relu'] has 9007199254740993; accepted: ints up to
varlen(cu_seqlens_q=None) -> TypeError: cu_seqlens_q is a NoneType; accepted: a torch.Tensor
varlen(cu_seqlens_q=torch.tensor([0, 6, 16])) -> TypeError: cu_seqlens_q has dtype torch.int64
varlen(cu_seqlens_k=int32(0, 24)) -> ValueError: cu_seqlens_k has shape (2,); accepted: (3,)
varlen(cu_seqlens_q=int32()) -> ValueError: cu_seqlens_q has shape (0,); accepted: (batch + 1,)
varlen(cu_seqlens_q=int32(0, 0, 6, 0, 16)[::2]) -> ValueError: cu_seqlens_q has stride 2
varlen(cu_seqlens_q=int32(0, 16, 6)) -> ValueError: cu_seqlens_q is [0, 16, 6]; accepted: rising
varlen(cu_seqlens_k=int32(0, 24, 25)) -> ValueError: cu_seqlens_k is [0, 24, 25]; ... up to 24
varlen(max_seqlen_q=9) -> ValueError: max_seqlen_q is 9; accepted: 10 or more
varlen(max_seqlen_k=-1) -> ValueError: max_seqlen_k is -1; accepted: 0 to
varlen(max_seqlen_q=torch.tensor(10)) -> TypeError: max_seqlen_q is tensor(10); accepted: a Python int
varlen(q=randn(2, 8, 4, 64, dtype=BF16)) -> ValueError: q has shape ...; accepted: (total, heads, head_dim)
varlen(seqused_q=int32(1, 2, 3)) -> ValueError: seqused_q has shape (3,); accepted: (2,)
attention(Q, Q, Q, out=torch.empty(1, 16, 2, 31)) -> ValueError: out has shape (1, 16, 2, 31); accepted: (1, 16, 2, 32)
attention(Q, Q, Q, out=torch.empty(1, 16, 2, 32).half())
    -> ValueError: out has dtype torch.float16; accepted: torch.float32
attention(Q, Q, Q, out=torch.empty(1, 16, 2, 32, requires_grad=True))
    -> ValueError: out is given where autograd records; accepted
attention(Q, Q, Q, out=torch.empty(1, 16, 2, 32, device="meta")) -> ValueError: out has device meta; accepted: cpu
attention(Q, Q, Q, kernel="sm95") -> ValueError: kernel is 'sm95' (did you mean 'sm90'?); accepted: 'sm80', 'sm90'
attention(Q, Q, Q, tile="tilen=32") -> ValueError: tile has 'tilen=32' (did you mean 'tile_n'?)
attention(Q, Q, Q, kernel="sm80", tile="speculative=true") -> ValueError: tile has 'speculative=true'; accepted
resolve_precision(Q, "fp16") -> ValueError: precision is 'fp16'; accepted: 'fp32', 'tf32', or None
resolve_precision(Q.half(), "tf32")
    -> ValueError: precision is 'tf32'; accepted: None, for tensors that are not float32
attention_backward(Q, Q, Q, Q, Q, LSE, wanted=("bias",))
    -> ValueError: wanted is ('bias',); accepted: a tuple of 'q', 'k', 'v'
attention_backward(None, Q, Q, Q, Q, LSE)
    -> ValueError: grad_out and grad_lse are None; accepted: one of them, or both
attention_backward(Q, Q, Q, Q, Q, LSE, dropout_p=0.1) -> ValueError: rng_state is None; accepted: int64
attention_backward(Q, Q, Q, Q, Q, LSE[:, :, 1:]) -> ValueError: lse has shape (1, 2, 15); accepted: (1, 2, 16)
attention_varlen_backward(*[Q[0]] * 5, LSE, CU, CU, 9, 9)
    -> ValueError: lse has shape (1, 2, 16); accepted: (2, 16) or (2, 2, 9 or more)
attention_varlen_backward(*[Q[0]] * 5, torch.zeros(2, 2, 6), CU, CU, 9, 9) -> ValueError: lse has shape (2, 2, 6); acc
attention_varlen_backward(*[Q[0]] * 5, torch.zeros(3, 2, 9), CU, CU, 9, 9) -> ValueError: lse has shape (3, 2, 9); acc
"""


def wide(n):
    return {"q": randn(2, 16, 4, n, dtype=BF16), "k": randn(2, 24, 2, n, dtype=BF16)}


def repeated(*shape):
    """Zeros of shape (*shape, 64), expanded from one row."""
    return torch.zeros(64, dtype=BF16).expand(*shape, 64)


# Accepted on the CPU, refused by kernels.
WRONG_FOR_KERNELS = """
dense(**{name: GOOD[name].double() for name in "qkv"})
    -> TypeError: q has dtype torch.float64; accepted on CUDA: torch.float16, torch.bfloat16, torch.float32
dense(**wide(584)) -> ValueError: q has head_dim 584
dense(bias=randn(1, 1, 16, 24).double()) -> TypeError: bias has dtype torch.float64; accepted: torch.float16
dense(alibi_slopes=randn(4).double()) -> TypeError: alibi_slopes has dtype torch.float64; accepted: torch.float32
dense(alibi_slopes=randn(8)[::2]) -> ValueError: alibi_slopes has strides (2,); accepted: a last stride of 1
dense(k=repeated(1, 2**30, 4), q=GOOD["q"][:1], v=repeated(1, 2**30, 4))
    -> ValueError: k has seqlen 1073741824; accepted on CUDA: up to 1073733632
dense(k=repeated(1, 2 ** 32 + 24, 4), q=GOOD["q"][:1], v=repeated(1, 2 ** 32 + 24, 4))
    -> ValueError: k has seqlen 4294967320; accepted on CUDA
dense(**{name: repeated(2 ** 30, 1, 2) for name in "qkv"})
    -> ValueError: q has 1073741824 sequences of 2 heads, 2147483648 in all; accepted on CUDA: up to 2147483647
varlen(k=repeated(2 ** 31 - 8, 4), v=repeated(2 ** 31 - 8, 4))
    -> ValueError: k has 2147483640 packed rows; accepted on CUDA: up to 2147475456
varlen(q=repeated(2 ** 30, 4), max_seqlen_q=2 ** 31 - 1)
    -> ValueError: max_seqlen_q is 1073741824; accepted on CUDA: up to 1073733632
varlen(max_seqlen_k=2 ** 31 - 1, dropout_p=0.1, dropout_mask="mem_efficient")
    -> ValueError: max_seqlen_k is 2147483647; accepted on CUDA: up to 1073733632
"""


DOORS = {
    "dense": lambda **changes: attention(**dense(**changes)),
    "varlen": lambda **changes: attention_varlen(**varlen(**changes)),
}


def called(arguments):
    return functools.partial(attention_varlen if "cu_seqlens_q" in arguments else attention, **arguments)


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    refusals.check(call, sentence, globals() | DOORS)


@refusals.each(WRONG_FOR_KERNELS)
def test_wrong_calls_of_kernels(call, sentence, as_on_cuda):
    refusals.check(call, sentence, globals() | DOORS)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """CPU tensors go through the checks of CUDA tensors; nothing is computed."""

    def checks(call: Call):
        check(call)
        check_for_kernels(call)
        return call.q, None, None

    monkeypatch.setattr(operators, "forward", checks)


def odd(x, dim):
    """x with size 1 in ``dim`` and a meaningless stride there."""
    x = x.narrow(dim, 0, 1)
    strides = list(x.stride())
    strides[dim] = 3
    return x.as_strided(x.shape, strides)


FINE = {
    "plain": dense(),
    "varlen": varlen(),
    "expanded_keys": dense(k=randn(2, 24, 1, 64, dtype=BF16).expand(2, 24, 2, 64)),
    "fused": dict(zip("qkv", randn(2, 16, 3, 4, 64, dtype=BF16).unbind(2), strict=True)),
    "batch_1": dense(q=odd(GOOD["q"], 0), k=odd(GOOD["k"], 0), v=odd(GOOD["v"], 0)),
    "one_row": dense(q=odd(GOOD["q"], 1)),
    "one_head": dense(k=odd(GOOD["k"], 2), v=odd(GOOD["v"], 2)),
    "bias_rows_of_odd_length": dense(bias=randn(1, 1, 16, 25)[..., :24]),
    "bias_last": dense(bias=randn(1, 1, 24, 16).transpose(2, 3)),
    "bias_unaligned": dense(bias=randn(16 * 24 + 1)[1:].view(1, 1, 16, 24)),
    "bias_without_keys": dense(k=GOOD["k"][:, :0], v=GOOD["v"][:, :0], bias=torch.zeros(16, 1)),
    "seqlen_k_0": dense(k=GOOD["k"][:, :0], v=GOOD["v"][:, :0]),
    "no_heads": dense(q=GOOD["q"][:, :, :0], k=GOOD["k"][:, :, :0], v=GOOD["v"][:, :, :0]),
    "batch_0": dense(q=GOOD["q"][:0], k=GOOD["k"][:0], v=GOOD["v"][:0]),
    "no_sequences": varlen(cu_seqlens_q=int32(0), cu_seqlens_k=int32(0)),
    "longer_than_all_rows": varlen(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1),
    "window_list": dense(window=[3, 0]),
    "window_minus_1": dense(window=(-1, -1)),
}


@pytest.mark.parametrize("name", FINE)
def test_calls_that_kernels_accept(name, as_on_cuda):
    called(FINE[name])()


@pytest.mark.parametrize("name", FINE)
def test_calls_that_the_cpu_computes(name):
    q = FINE[name]["q"]
    assert called(FINE[name])().shape == (*q.shape[:-1], 64)


BIASES = {
    "bool": lambda: randn(2, 1, 16, 24) > 0,
    "two_dims": lambda: randn(16, 24),
    "two_dims_of_bool": lambda: randn(1, 24) > 0,
    "three_dims": lambda: randn(4, 16, 24),
    "a_number_a_query": lambda: randn(2, 4, 16, 1),
    "transposed": lambda: randn(2, 4, 24, 16).mT,
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_any_shape(name):
    """All shapes that torch's attention accepts are accepted; the gradient has the given shape."""
    q, k, v = (randn(2, n, 4, 64, seed=n).requires_grad_() for n in (16, 24, 24))
    bias = BIASES[name]()
    leaves = [q, k, v, bias.requires_grad_()] if bias.is_floating_point() else [q, k, v]
    found, lse = attention(q, k, v, bias=bias, return_lse=True)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=bias).transpose(1, 2)
    grad_out, wanted = randn(*found.shape, seed=9), ("q", "k", "v", "bias")[: len(leaves)]
    given = [x.detach() for x in (grad_out, q, k, v, found, lse)]
    ours, gradients = (torch.autograd.grad(x, leaves, grad_out) for x in (found, expected))
    torch.testing.assert_close((found, *ours), (expected, *gradients))
    into = [torch.full_like(x, math.nan).detach() for x in leaves]
    for own in (None, into):
        again = attention_backward(*given, bias=bias.detach(), wanted=wanted, into=own)
        assert own is None or all(x is y for x, y in zip(again, own, strict=True))
        torch.testing.assert_close(again, gradients)


# ---- meaning of arguments ----

MASKS = [
    (False, (None, None), ("", UNBOUNDED, UNBOUNDED)),
    (False, (-1, None), ("", UNBOUNDED, UNBOUNDED)),
    (True, (None, None), ("causal", UNBOUNDED, 0)),
    ("bottom_right", (-1, 0), ("causal", UNBOUNDED, 0)),
    ("top_left", (None, None), ("causal_top_left", UNBOUNDED, 0)),
    (True, (0, None), ("window", 0, 0)),
    ("top_left", (5, 0), ("window_top_left", 5, 0)),
    (False, (0, 0), ("window", 0, 0)),
    (False, (None, 3), ("window", UNBOUNDED, 3)),
    (False, (3, None), ("window", 3, UNBOUNDED)),
    (False, (2**40, 2), ("window", UNBOUNDED, 2)),
]


@pytest.mark.parametrize(("causal", "window", "expected"), MASKS)
def test_masks(causal, window, expected):
    assert resolve_mask(causal, window) == expected


def test_both_operators_take_the_same_options():
    options = [
        {name: p for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
        for f in (attention, attention_varlen)
    ]
    varlen = {name: p for name, p in options[1].items() if name != "seqused_q"}
    assert varlen == options[0]


def test_returned_values():
    good = dense()
    out = attention(**good)
    assert isinstance(out, torch.Tensor) and out.dtype == BF16
    for flags, n in (({"return_lse": True}, 2), ({"return_softmax": True}, 2)):
        assert len(attention(**good, **flags)) == n
    out2, lse, softmax = attention(**good, return_lse=True, return_softmax=True)
    assert torch.equal(out, out2)
    assert lse.shape == (2, 4, 16) and lse.dtype == torch.float32
    assert softmax.shape == (2, 4, 16, 24) and softmax.dtype == BF16
    out, lse, softmax = attention_varlen(**varlen(), return_lse=True, return_softmax=True)
    assert out.shape == (16, 4, 64) and lse.shape == (4, 16) and softmax.shape == (2, 4, 10, 24)


# ---- dropout's seed ----


def test_the_rng_state_comes_from_torchs_generator():
    """This holds unless the state is given, or nothing is dropped."""
    good = dense(dropout_p=0.5)
    torch.manual_seed(1)
    first, second = attention(**good), attention(**good)
    torch.manual_seed(1)
    assert torch.equal(attention(**good), first) and not torch.equal(first, second)
    torch.manual_seed(1)
    state = draw_rng_state("cpu")
    assert state.shape == (2,) and state.dtype == torch.int64
    before = torch.get_rng_state()
    for _ in range(2):
        assert torch.equal(attention(**good, rng_state=state), first)
    attention(**dense(dropout_p=0.0, rng_state=torch.tensor([1, 2])))
    assert torch.equal(before, torch.get_rng_state())


# ---- continuing a forward ----


def test_backward_of_another_kernels_forward():
    q, k, v = (x.float().requires_grad_() for x in dense().values())
    bias, sinks = randn(1, 4, 1, 24).requires_grad_(), randn(4, seed=8).requires_grad_()
    options = {"causal": True, "softcap": 3.0, "dropout_p": 0.3}
    scores = {"bias": bias, "sinks": sinks, "rng_state": torch.tensor([-1, 7])}
    out, lse = attention(q, k, v, **scores, **options, return_lse=True)
    grad_out, grad_lse = randn(*out.shape, seed=5), randn(*lse.shape, seed=6)
    expected = torch.autograd.grad((out, lse), (q, k, v, bias, sinks), (grad_out, grad_lse))
    longer = torch.nn.functional.pad(lse.detach(), (0, 16))
    given = [x.detach() for x in (q, k, v, out)]
    options |= {"bias": bias.detach(), "sinks": sinks.detach(), "wanted": ("sinks", "bias", "v", "k", "q")}
    word = torch.tensor([-1, 7])
    for state in (word, word.view(torch.uint64), (2**64 - 1, 7), (torch.tensor(-1), torch.tensor([7]))):
        with torch.device("meta"):  # not where numbers belong
            grads = attention_backward(
                grad_out, *given, longer, grad_lse=grad_lse, rng_state=state, **options
            )
        torch.testing.assert_close(grads, expected[::-1])


def test_backward_of_a_varlen_forward():
    arguments = varlen()
    tensors = [arguments.pop(name).float().requires_grad_() for name in "qkv"]
    lengths = tuple(arguments.values())
    out, lse = attention_varlen(*tensors, *lengths, causal=True, return_lse=True)
    grad_out = randn(*out.shape, seed=5)
    expected = torch.autograd.grad(out, tensors, grad_out)
    given = [x.detach() for x in (*tensors, out)]
    apart = torch.full((2, 4, 32), math.nan)
    apart[0, :, :6], apart[1, :, :10] = lse.detach()[:, :6], lse.detach()[:, 6:]
    for one in (lse.detach(), apart):
        grads = attention_varlen_backward(grad_out, *given, one, *lengths, causal=True)
        torch.testing.assert_close(grads, expected)


def test_a_backward_has_its_forwards_arguments():
    for forward, backward in ((attention, attention_backward), (attention_varlen, attention_varlen_backward)):
        theirs, names = (set(inspect.signature(f).parameters) for f in (forward, backward))
        own = {"grad_out", "out", "lse", "grad_lse", "wanted", "into"}
        assert names - own == theirs - {
            *("return_lse", "return_softmax", "return_max_scores", "backward_tile", "out")
        }


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_an_lse_alone_gives_v_a_gradient_of_zeros(dtype):
    """CUDA does the same, even with NaN in v. Autograd itself would raise, since v is unused."""
    q, k, v = (randn(1, 5, 2, 8, dtype=dtype, seed=s).requires_grad_() for s in range(3))
    with torch.no_grad():
        v[0, 2] = math.nan
    out, lse = attention(q, k, v, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), (q, k, v))
    assert grads[0].any() and grads[1].any() and torch.equal(grads[2], torch.zeros_like(v))
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and out.dtype == dtype
    cu_seqlens = int32(0, 2, 5)
    packed_lse = attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 3, 3, return_lse=True)[1]
    packed_lse.sum().backward()
    assert torch.equal(v.grad, torch.zeros_like(v))


# ---- precision and autocast ----


def test_autocast_casts_fp32_as_pytorchs_attention_does():
    q, k, v = (randn(1, 16, 2, 32, seed=i) for i in range(3))
    bias = randn(1, 2, 16, 16, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(q, k, v, bias=bias)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias
        )
        expected = attention(*(x.bfloat16() for x in (q, k, v)), bias=bias.bfloat16())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("allowed", [False, True])
def test_precision_is_that_of_pytorchs_products(allowed, monkeypatch):
    flags = SimpleNamespace(fp32_precision="tf32" if allowed else "ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    q = randn(1, 16, 2, 32)
    assert resolve_precision(q) == ("tf32" if allowed else "")
    assert resolve_precision(q, "fp32") == "" and resolve_precision(q, "tf32") == "tf32"
    assert resolve_precision(q.half()) == ""


# ---- a given output ----


def test_a_given_output_is_written():
    q, k, v = (randn(1, 16, 2, 32, seed=i) for i in range(3))
    out = torch.full((1, 16, 4, 32), math.nan)[:, :, ::2]
    result, lse = attention(q, k, v, out=out, return_lse=True)
    expected, expected_lse = attention(q, k, v, return_lse=True)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_a_tile_of_another_kernel_changes_nothing_on_the_cpu():
    q = torch.randn(1, 8, 2, 16).bfloat16()  # no fp32 kernel has such a tile
    known = {"kernel": "sm80", "tile": "tile_n=32", "backward_tile": "tile_n=64"}
    assert torch.equal(attention(q, q, q, **known), attention(q, q, q, tile="speculative=true"))
