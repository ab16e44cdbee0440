"""The host side of the backward on CPU tensors, with kernels in plain torch instead of the real ones.

They take and write the same arguments as the real ones, with another layout of the workspace: gradients are right only
if every shape, stride, offset and constant is.
"""

import contextlib
import math
from dataclasses import replace

import pytest
import torch

from cute_attn import Unsupported, reference
from cute_attn.api import operators
from cute_attn.compiler import registry
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host import backward, plans
from cute_attn.host.backward import check_blocks, gradients, query_blocks
from cute_attn.host.call import NUM_TENSORS
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import PADDED_TENSORS
from tests import backward_workspace, machine, refusals
from tests.padded_rows import copy_rows
from tests.problem import Case
from tests.tensors import score_coords

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    """Gradients of the output are drawn without a generator: tolerances allow for these, not for any."""
    torch.manual_seed(0)


class Torch:
    """Replaces the compiler: each kernel that it builds computes in float32 by loops."""

    def __init__(self):
        self.built, self.launched = [], []

    def kernel(self, kernel, target):
        """The function that the kernel's launch runs."""
        traits, tile = kernel.traits, kernel.tile
        self.built.append((traits, tile))
        functions = {"backward": self.main, "backward_split": self.split}
        functions |= {"backward_preprocess": self.preprocess, "backward_convert": backward_workspace.convert}
        functions |= dict.fromkeys(PADDED_TENSORS, lambda traits, tile, given: copy_rows(traits, given))

        def function(given):
            self.launched.append((traits, tile, given))
            functions[traits.op](traits, tile, given)

        return function

    @staticmethod
    def preprocess(traits, tile, given):
        workspace = (given.mLSElog2, given.mMinusD, given.mDQaccum, given.mCounters)
        assert (given.gradients is not None) == traits.varlen
        for x, side in zip(given.gradients or (), "qkk", strict=False):
            ends = getattr(given.seqlens, f"cu_seqlens_{side}")
            x[: ends[0]], x[ends[-1] :] = 0, 0
        given.mCounters[:] = 0
        for x in workspace:
            assert x.is_contiguous() and x.data_ptr() % 16 == 0
        backward_workspace.preprocess(traits, tile, given)

    @staticmethod
    def split(traits, tile, given):
        """Parts whose sum is the tensor; nothing of one with a row that is far smaller than others."""
        for x, own, i in zip(given.mX, given.mTerms, range(4), strict=True):
            rows = x.abs().amax(-1)
            given.mScales[i] = 0.25 if rows.min() > 2**-13 * rows.max() else 0
            if given.mScales[i]:
                hi = (4 * x).half()
                assert own.shape[-2] == traits.fp32_terms
                for part, value in zip(own.unbind(-2), (hi, 4 * x - hi.float()), strict=False):
                    part[..., : x.shape[-1]] = value

    @staticmethod
    def main(traits, tile, given):
        q, k, v, do = operands = given.mQ, given.mK, given.mV, given.mDO
        if traits.arch == "sm80":
            scales = given.scales
            assert (scales is None) == (tile.operands == "whole")
            if scales is not None and bool((scales != 0).all()) != tile.in_terms:
                return
            if tile.in_terms:
                dims = (traits.head_dim, traits.head_dim, traits.head_dim_v, traits.head_dim_v)
                whole = [x.float().sum(-2) * scale for x, scale in zip(operands, scales, strict=True)]
                q, k, v, do = (x[..., :dim] for x, dim in zip(whole, dims, strict=True))
        dk, dv, seqlens, scale = given.mDK, given.mDV, given.seqlens, given.softmax_scale
        num_splits, split_stride, counter, _ = given.schedule
        assert counter.view(torch.int32)[0] == 0
        width, heads, group = padded(traits.head_dim), q.shape[-2], q.shape[-2] // k.shape[-2]
        score, parts = list(given.score_args), max(dk.shape[-2] // heads, 1)
        cap, (left, right) = score.pop(0), score.pop(0) or (0, 0)
        slopes = score.pop(0)[0] if traits.alibi else None
        bias = score.pop(0) if traits.bias else (None,)
        state, rescale = (score[0][0], score[0][2]) if traits.dropout else (None, 1.0)
        inputs = ScoreInputs(left, right, slopes, bias[0], softcap=cap if traits.softcap else 0.0)
        for b, (rows, _), (keys, all_keys), first in backward_workspace.sequences(traits, tile, seqlens, q):

            def own(x, b=b):
                return x if traits.varlen else x[b]

            n_q, n_k = rows.stop - rows.start, keys.stop - keys.start
            own_q, own_do = own(q)[rows].float(), own(do)[rows].float()
            own_k, own_v = (own(x)[keys].float().repeat_interleave(group, 1) for x in (k, v))
            longest = (seqlens.max_seqlen_q, seqlens.max_seqlen_k)
            at = (b, torch.arange(heads), torch.arange(n_q), torch.arange(n_k))
            coords = score_coords(at, heads, (n_q, n_k), longest, top_left=traits.top_left)
            raw = scale * torch.einsum("qhd,khd->hqk", own_q, own_k)[None].requires_grad_()
            with torch.enable_grad():
                scores = reference.modify_scores(raw, coords, reference.Features(traits.mask), inputs)
            lse = own(given.mLSElog2)[:, first : first + n_q, None] / math.log2(math.e)
            p, keep = torch.exp(scores.detach()[0] - lse), torch.ones(())
            if traits.dropout:
                keep = reference.DROPOUT_KEEP[traits.dropout](coords, 1 - 1 / rescale, state)[0]
            dp = keep * torch.einsum("qhd,khd->hqk", own_do, own_v)
            ds = p * (dp + own(given.mMinusD)[:, first : first + n_q, None])
            if traits.bias_grad:
                if bias[2]:  # several scores may have one element
                    target = bias[1].view(torch.float32)[b, :, :n_q, :n_k]
                    target = target[tuple(slice(None if step else 1) for step in target.stride())]
                    target += (rescale * ds).sum_to_size(target.shape)
                else:
                    bias[1][b, :, :n_q, :n_k] = (rescale * ds).to(bias[1].dtype)
            ds = torch.autograd.grad(scores, raw, ds[None])[0][0]
            for target, weights, x in ((dk, scale * ds, own_q), (dv, p * keep, own_do)):
                of_one = heads * parts // target.shape[-2]
                cuts = [slice(n_q * i // parts, n_q * (i + 1) // parts) for i in range(parts)]
                sums = [torch.einsum("hqk,qhd->khd", weights[:, cut], x[cut]) for cut in cuts]
                sums = torch.stack(sums, 2).reshape(n_k, target.shape[-2], of_one, x.shape[-1]).sum(2)
                own(target)[all_keys] = 0
                own(target)[keys] = (rescale * sums).to(target.dtype)
            if getattr(tile, "dq_direct", False):
                assert not traits.varlen and (n_q <= tile.dq_rows if tile.dq_rows else n_k <= tile.tile_n)
                dq = rescale * scale * torch.einsum("hqk,khd->qhd", ds, own_k)
                given.mDQaccum[b, rows] = dq.to(given.mDQaccum.dtype)
                continue
            for block in range(-(-n_k // tile.tile_n)):
                part = slice(block * tile.tile_n, (block + 1) * tile.tile_n)
                accumulator = given.mDQaccum.view(-1)[block % num_splits * split_stride :]
                accumulator = own(accumulator[: given.mDQaccum[0].numel()].view(given.mDQaccum.shape[1:]))
                target = accumulator[:, first * width : (first + n_q) * width].unflatten(1, (n_q, width))
                target[..., : traits.head_dim] += torch.einsum("hqk,khd->hqd", ds[..., part], own_k[part])


@pytest.fixture
def torch_kernels(monkeypatch):
    kernels = Torch()
    machine.device(monkeypatch, multiprocessors=3, target="sm90")
    machine.kernels(monkeypatch, kernels.kernel)
    machine.poison(monkeypatch)
    return kernels


SMALL = Case("small", seqlen_q=21, seqlen_k=150, nheads=4, nheads_kv=2, head_dim=40, head_dim_v=24)
VARLEN = replace(SMALL, lengths_q=(5, 0, 66, 1), lengths_k=(30, 7, 0, 141))
CASES = {
    "plain": SMALL,
    "causal": replace(SMALL, causal=True, layout="padded"),
    "window-softcap": replace(SMALL, window=(20, 3), softcap=2.0),
    "alibi-expanded": replace(SMALL, alibi="heads", layout="expanded"),
    "bias": replace(SMALL, bias="bf16"),
    "bias-fp32-over-b": replace(SMALL, bias="fp32", bias_broadcast="b"),
    "bias-over-hq": replace(SMALL, bias="bf16", bias_broadcast="hq", causal=True),
    "bias-hides-dropout": replace(SMALL, bias="fp16", bias_hides=True, dropout_p=0.25),
    "mem_efficient": replace(SMALL, dropout_p=0.25, dropout_mask="mem_efficient"),
    "seqused_k": replace(SMALL, seqused_k=(150, 0), causal=True),
    "varlen": replace(VARLEN, causal=True),
    "varlen-seqused-bias": replace(VARLEN, seqused_q=(3, 0, 66, 1), seqused_k=(30, 7, 0, 129), bias="bf16",
        bias_broadcast="q"),
    "sinks": replace(SMALL, sinks="fp32", causal=True, seqlen_q=160),
    "sinks-dropout": replace(SMALL, sinks="bf16", dropout_p=0.25, window=(20, 3)),
    "sinks-varlen-seqused": replace(VARLEN, seqused_q=(3, 0, 66, 1), sinks="bf16"),
    "sinks-no-keys": replace(SMALL, seqlen_k=0, sinks="fp32"),
    "sinks-varlen-no-keys": replace(VARLEN, lengths_k=(0, 0, 0, 0), seqused_q=(3, 0, 60, 1), sinks="fp32"),
    "few-keys": replace(SMALL, seqlen_k=40),
    "short": replace(SMALL, seqlen_q=200, nheads=3, nheads_kv=3, causal=True),
    "few-keys-dropout": replace(SMALL, seqlen_k=40, dropout_p=0.25, causal=True, head_dim=64, head_dim_v=64),
    "few-keys-many-queries": replace(SMALL, batch=1, nheads=1, nheads_kv=1, seqlen_q=6000, seqlen_k=40),
    "few-keys-many-queries-of-two-heads": replace(SMALL, batch=1, nheads=2, nheads_kv=1, seqlen_q=3000, seqlen_k=40),
    "odd": replace(SMALL, head_dim=43, head_dim_v=21, causal=True),
    "odd-v-bias": replace(SMALL, head_dim_v=21, bias="fp32", bias_broadcast="b"),
    "odd-padded-dropout": replace(SMALL, head_dim=33, head_dim_v=24, layout="padded", dropout_p=0.25,
        dropout_mask="mem_efficient"),
    "odd-varlen-sinks": replace(VARLEN, head_dim=59, head_dim_v=59, seqused_q=(3, 0, 66, 1), sinks="fp32"),
    "no-queries": replace(SMALL, seqlen_q=0),
    "no-keys": replace(SMALL, seqlen_k=0),
    "one-by-one": replace(SMALL, seqlen_q=1, seqlen_k=1, batch=1, layout="odd_strides"),
}  # fmt: skip


def the_call(problem, **options):
    """The parameters that attention passes to the operator for a problem."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "forward", lambda call: calls.append(call) or (call.q, call.q, None))
        with contextlib.suppress(TypeError, IndexError):
            problem.run(**options)
    (call,) = calls
    return call


def expected_gradients(problem, inputs, grads):
    """Gradients by autograd through the reference in float32."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    changed = replace(
        problem,
        tensors=tuple(x.float() for x in leaves[:3]),
        inputs=replace(problem.inputs, bias=leaves[3], sinks=leaves[4]),
        owned=slice(None),
    )
    results = changed.expected(torch.float32)
    outputs = [(results[name], g) for name, g in zip(("out", "lse"), grads, strict=True) if g is not None]
    finite = [(x, g.masked_fill(x.isinf(), 0)) for x, g in outputs]
    wanted = [x for x in leaves if x is not None]
    starts, weights = [x for x, _ in finite], [g.to(x.dtype) for x, g in finite]
    return torch.autograd.grad(starts, wanted, weights, materialize_grads=True)


NEEDED = (True, True, True, False, False)


def prepared(case, changes=None, **options):
    """A call of a case, and its backward's inputs: gradients of out and of LSE (None), and both results."""
    call = the_call(case.build("cpu"), **options)._replace(**(changes or {}))
    out, lse, _ = operators.forward_cpu(call)
    return call, (torch.randn(out.shape).to(BF16), None, out, lse)


@pytest.mark.parametrize(
    ("lse_only", "deterministic"), [(False, False), (False, True), (True, False)], ids=["out", "both", "lse"]
)
@pytest.mark.parametrize("name", CASES)
def test_gradients(torch_kernels, name, lse_only, deterministic):
    case = CASES[name]
    problem = case.build("cpu")
    call = the_call(problem, deterministic=deterministic)
    out, lse, _ = operators.forward_cpu(call)
    grad_out, grad_lse = torch.randn(out.shape).to(BF16), torch.randn(lse.shape)
    grads = (None if lse_only else grad_out, grad_lse if lse_only or deterministic else None)
    needed = (True, True, True, case.bias != "", case.sinks != "")
    inputs = (call.q, call.k, call.v, call.bias, call.sinks)
    actual = gradients(call, (*grads, out, lse), needed)
    if case.varlen:  # rows out of bounds are NaN
        inputs = (*(x.nan_to_num(0) for x in inputs[:3]), call.bias, call.sinks)
        problem = replace(problem, tensors=inputs[:3])
    elif case.seqused_k:
        inputs = (call.q, call.k.nan_to_num(0), call.v.nan_to_num(0, 0, 0), call.bias, call.sinks)
    expected = expected_gradients(problem, inputs, grads)
    present = [(x, found) for x, found in zip("qkvbs", actual, strict=True) if found is not None]
    for (x, found), right in zip(present, expected, strict=True):
        assert found.dtype == right.dtype and found.shape == right.shape and found.is_contiguous()
        size = max(1e-3, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(
            found / size, right / size, atol=0.02, rtol=0.02, msg=lambda m, x=x: f"{x}: {m}"
        )
    mains = [
        (tile, given.schedule) for traits, tile, given in torch_kernels.launched if traits.op == "backward"
    ]
    assert len(mains) == (0 if 0 in problem.case.longest else 1)
    for tile, schedule in mains:
        case, one_block = problem.case, problem.case.longest[1] <= tile.tile_n
        few_keys = one_block and not (case.varlen or case.window != (None, None))
        assert tile.dq_direct == (few_keys or name == "short") and (tile.dq_rows > 0) == (name == "short")
        assert tile.dq_in_order == (deterministic and not tile.dq_direct)
        assert 1 <= schedule.num_splits <= 3


def test_queries_of_few_keys_are_divided(torch_kernels):
    call, outer = prepared(CASES["few-keys-many-queries"])
    gradients(call, outer, NEEDED)
    (given,) = (given for traits, _, given in torch_kernels.launched if traits.op == "backward")
    assert given.mDK.shape[-2] == 3, "three multiprocessors, one head"
    assert given.mDQaccum.dtype == BF16 and "backward_convert" not in {
        t.op for t, *_ in torch_kernels.launched
    }


@pytest.mark.parametrize(
    ("name", "tile", "accepted"),
    [
        ("few-keys", "dq_bulk=false,dq_direct=true", True),
        ("plain", "dq_bulk=false,dq_direct=true", False),
        ("window-softcap", "dq_direct=true", False),
        ("varlen", "dq_bulk=false,dq_direct=true", False),
        ("short", "tile_m=64,dq_bulk=false,dq_direct=true,dq_rows=256", True),
        ("short", "tile_m=64,dq_bulk=false,dq_direct=true,dq_rows=128", False),
        ("plain", "tile_m=64,dq_bulk=false,dq_direct=true,dq_rows=256", False),
    ],
)
def test_a_tile_that_stores_dq_is_named(torch_kernels, name, tile, accepted):
    call = the_call(CASES[name].build("cpu"), deterministic=True)._replace(backward_tile=tile)
    out, lse, _ = operators.forward_cpu(call._replace(backward_tile=""))
    outer = (torch.randn(out.shape).to(BF16), None, out, lse)
    refusal = pytest.raises(
        ValueError, match=r"^backward_tile has dq_direct=true, dq_rows=\d+; accepted: true for"
    )
    with contextlib.nullcontext() if accepted else refusal:
        gradients(call, outer, NEEDED)
        assert [t.dq_direct for traits, t, _ in torch_kernels.launched if traits.op == "backward"] == [True]


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("name", ["causal", "few-keys", "bias-over-hq", "varlen", "odd", "no-keys"])
def test_a_scale_that_is_not_positive(torch_kernels, name, scale):
    """Kernels get a positive scale and q times its sign; the gradients are the ones of the call as given."""
    problem = CASES[name].build("cpu")
    call = the_call(problem)._replace(softmax_scale=scale)
    if call.varlen:  # rows of no sequence are NaN
        call = call._replace(q=call.q.nan_to_num(0), k=call.k.nan_to_num(0), v=call.v.nan_to_num(0))
    out, lse, _ = operators.forward_cpu(call)
    grad_out, needed = torch.randn(out.shape).to(BF16), (True, True, True, call.bias is not None, False)
    found = gradients(call, (grad_out, None, out, lse), needed)
    inputs = [None if x is None else x.detach().float().requires_grad_() for x in (*call[:3], call.bias)]
    exact = call._replace(q=inputs[0], k=inputs[1], v=inputs[2], bias=inputs[3])
    expected = torch.autograd.grad(
        operators.forward_cpu(exact)[0], [x for x in inputs if x is not None], grad_out.float()
    )
    for own, right in zip([x for x in found if x is not None], expected, strict=True):
        size = max(1e-3, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(own.float() / size, right / size, atol=0.02, rtol=0.02)
    for traits, _, given in torch_kernels.launched:
        assert traits.op != "backward" or given.softmax_scale == (0.3 if scale else 1.0)


def shifted(x, elements):
    """``x`` so many elements behind a multiple of 16 bytes."""
    return torch.empty(x.numel() + elements, dtype=x.dtype)[elements:].view(x.shape).copy_(x)


def test_tensors_are_padded_only_where_they_have_to_be(torch_kernels):
    """Calls with equal metadata whose tensors differ in alignment have separate plans."""
    call, outer = prepared(SMALL)
    right = gradients(call, outer, NEEDED)
    for names in (("q",), ("k", "v"), ("q", "k", "v"), ("v",)) * 2:
        moved = call._replace(**{name: shifted(getattr(call, name), 1) for name in names})
        torch_kernels.launched.clear()
        found = gradients(moved, outer, NEEDED)
        assert all(map(torch.equal, found[:3], right[:3]))
        ops = [traits.op for traits, _, _ in torch_kernels.launched]
        assert ops == ["backward_pad", "backward_preprocess", "backward", "backward_convert"]
        (*_, pad), _, (*_, main), _ = torch_kernels.launched
        assert pad.which == sum(1 << "qkv".index(name) for name in names)
        for name in "qkv":
            assert (getattr(main, f"m{name.upper()}") is getattr(call, name)) == (name not in names)


@pytest.mark.parametrize("name", ["sinks-varlen-seqused", "odd-varlen-sinks"])
def test_a_sink_whose_exponential_is_infinite(torch_kernels, name):
    problem = CASES[name].build("cpu")
    call = the_call(problem)
    call.sinks.fill_(100.0)
    out, lse, _ = operators.forward_cpu(call)
    grad_lse = torch.randn(lse.shape)
    found = gradients(call, (None, grad_lse, out, lse), (False,) * 4 + (True,))[4]
    rows = torch.where(lse.isinf(), 0.0, grad_lse)  # the sink has all of a row's softmax
    torch.testing.assert_close(found.float(), rows.sum(-1), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("odd", [False, True])
def test_given_gradients_of_padded_calls(torch_kernels, odd, scale):
    """Kernels write those that they can; of others the padding's inverse writes every element."""
    problem = replace(SMALL, head_dim=43, head_dim_v=21) if odd else SMALL
    call, outer = prepared(problem, {"softmax_scale": scale})
    call = call._replace(q=shifted(call.q, 3))
    right = gradients(call, outer, NEEDED)
    strided = call.v.new_empty((*call.v.shape, 2))[..., 1]
    into = (shifted(call.q, 1), torch.empty_like(call.k), strided, None, None)
    found = gradients(call, outer, NEEDED, into)
    assert all(x is own for x, own in zip(found[:3], into, strict=False))
    assert all(map(torch.equal, found[:3], right[:3]))
    traits, _, unpad = torch_kernels.launched[-1]
    assert traits.op == "backward_unpad" and unpad.which == (0b111 if odd else 0b101)
    assert unpad.mTarget[0] is into[0] and unpad.mTarget[2] is into[2]


def test_packed_gradients_of_padded_calls(torch_kernels):
    qkv = torch.randn(2, 21, 3, 4, 43).to(BF16)
    q, k, v = qkv.unbind(2)
    case = replace(SMALL, head_dim=43, head_dim_v=43, seqlen_k=21, nheads_kv=4)
    call, outer = prepared(case, {"q": q, "k": k, "v": v})
    right = gradients(call, outer, NEEDED)
    found = gradients(call, outer, NEEDED, backward.NOTHING)[:3]
    assert all(map(torch.equal, found, right[:3]))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    assert all(x.stride() == q.stride() for x in found)


def test_more_rows_than_are_counted_are_refused(torch_kernels, monkeypatch):
    monkeypatch.setattr("cute_attn.host.padding.MAX_ROWS", 2 * 21 * 4 - 1)
    call, outer = prepared(replace(SMALL, head_dim=43))
    with pytest.raises(ValueError, match="q has rows of heads, 168 in all; accepted on CUDA: up to 167"):
        gradients(call, outer, NEEDED)


FP32 = replace(SMALL, dtype="fp32")
FP32_CASES = {"plain": FP32, "varlen": replace(FP32, lengths_q=(5, 0, 66, 1), lengths_k=(30, 7, 0, 141))}


@pytest.mark.parametrize("small_row", [None, "q", "v", "grad_out"])
@pytest.mark.parametrize("name", [*FP32_CASES, "tf32"])
def test_one_of_two_main_kernels_computes_in_fp32(torch_kernels, name, small_row):
    """Operands are split into terms; if one row is too small for that, whole operands are used."""
    precision = "tf32" if name == "tf32" else ""
    problem = (FP32 if precision else FP32_CASES[name]).build("cpu")
    call = the_call(problem, backward_tile="operands=terms")._replace(precision=precision, kernel="sm80")
    inputs = [x.nan_to_num(0, 0, 0).abs().clamp(0.1) for x in call[:3]]
    grad_out = torch.rand(*call.q.shape[:-1], call.v.shape[-1]) + 0.1
    changed = dict(zip(("q", "k", "v"), inputs, strict=True)) | {"grad_out": grad_out}
    if small_row:
        changed[small_row].view(-1, changed[small_row].shape[-1])[3] *= 1e-8
    call = call._replace(q=inputs[0], k=inputs[1], v=inputs[2])
    out, lse, _ = operators.forward_cpu(call)
    found = gradients(call, (grad_out, None, out, lse), NEEDED)[:3]
    leaves = (*inputs, None, None)
    expected = expected_gradients(replace(problem, tensors=tuple(inputs)), leaves, (grad_out, None))
    for own, right in zip(found, expected, strict=True):
        assert own.dtype == torch.float32
        atol = (1e-2 if precision else 1e-4) * float(right.abs().max())
        torch.testing.assert_close(own, right, atol=atol, rtol=1e-3)
    launched = [(traits.op, getattr(tile, "operands", "")) for traits, tile, _ in torch_kernels.launched]
    assert launched == [
        *(("backward_preprocess", ""), ("backward_split", ""), ("backward", "terms")),
        *(("backward", "fallback"), ("backward_convert", "fallback")),
    ]


@pytest.mark.parametrize("precision", ["", "tf32"])
def test_small_calls_in_fp32_have_whole_operands(torch_kernels, monkeypatch, precision):
    """Large calls use terms unless they have too many rows; naming a tile does not lift that limit."""
    call, (grad_out, *outer) = prepared(FP32, {"precision": precision, "kernel": "sm80"})

    def operands(call):
        machine.forget_plans(monkeypatch)
        found = backward.plan_of(call, (grad_out.float(), *outer), NEEDED)
        return found.kernel.tile.operands, "split" in found.functions, "fallback" in found.functions

    assert operands(call) == ("whole", False, False)
    monkeypatch.setattr("cute_attn.kernels.backward_sm80.kernel.TERMS_LEAST_FLOP", {2: 1, 1: 1})
    assert operands(call) == ("terms", True, True)
    monkeypatch.setattr("cute_attn.host.split_fp32.MAX_ROWS", 10)
    assert operands(call) == ("whole", False, False)
    with pytest.raises(ValueError, match=r"more than .* rows of heads; accepted: fewer, or operands=whole"):
        operands(call._replace(backward_tile="dq_unroll=1"))


@pytest.mark.parametrize("name", ["sinks-dropout", "sinks-varlen-seqused", "sinks-no-keys", "bias"])
def test_gradients_are_written_into_given_tensors(torch_kernels, name):
    case = CASES[name]
    call, (grad_out, _, out, lse) = prepared(case)
    grad_lse = torch.randn(lse.shape)
    needed = (True, True, True, case.bias != "", case.sinks != "")
    expected = gradients(call, (grad_out, grad_lse, out, lse), needed)
    into = tuple(None if x is None else torch.full_like(x, math.nan) for x in expected)
    versions = [None if x is None else x._version for x in into]
    found = gradients(call, (grad_out, grad_lse, out, lse), needed, into=into)
    for own, given, right, version in zip(found, into, expected, versions, strict=True):
        assert own is given and (own is None or (own.equal(right) and own._version > version))


@pytest.mark.parametrize("name", ["q", "grad_out", "dq"])
def test_gradients_have_memory_of_their_own(torch_kernels, name):
    call, storage = the_call(SMALL.build("cpu")), torch.zeros(200_000, dtype=BF16)

    def part(x, place):
        return storage[place * 40_000 :][: x.numel()].view(x.shape)

    call = call._replace(q=part(call.q, 0).copy_(call.q))
    out, lse, _ = operators.forward_cpu(call)
    grad_out, dq = part(out, 1), part(call.q, 2)
    into = (dq, part(call.k, ("q", "grad_out", "dq").index(name)), None, None, None)
    with pytest.raises(ValueError, match=f"^dk shares memory with {name}; accepted: memory of its own"):
        gradients(call, (grad_out, None, out, lse), (True, True, False, False, False), into=into)
    assert not torch_kernels.launched


def test_only_needed_gradients_are_computed(torch_kernels):
    call, outer = prepared(CASES["bias"])
    for needed in (
        (False, True, False, False, False),
        (False, False, False, True, False),
        (True, *4 * [False]),
    ):
        torch_kernels.built.clear()
        found = gradients(call, outer, needed)
        assert tuple(x is not None for x in found) == needed
        names = [traits.name for traits, _ in torch_kernels.built]
        assert any(name.startswith("backward_convert") for name in names) == needed[0]
        assert any("bias_grad" in name for name in names) == needed[3]


def test_any_layout_of_the_outputs_gradient_is_accepted(torch_kernels):
    call, (dense, _, out, lse) = prepared(SMALL)
    storage = torch.empty(out.numel() + 1, dtype=BF16)
    grads = {
        "transposed": dense.transpose(1, 2).contiguous().transpose(1, 2),
        "columns": dense.transpose(2, 3).contiguous().transpose(2, 3),
        "unaligned": storage[1:].view(out.shape).copy_(dense),
        "repeated": dense[:, :1].expand(out.shape),
        "one number": torch.ones((), dtype=BF16).expand(out.shape),
    }
    for name, grad in grads.items():
        found = gradients(call, (grad, None, out, lse), NEEDED)
        right = gradients(call, (grad.contiguous().clone(), None, out.clone(), lse), NEEDED)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], right[:3], strict=True)), name
        read = torch_kernels.launched[-6][2].mDO
        assert read.stride(-1) == 1 and read.data_ptr() % 16 == 0
        assert (read.data_ptr() == grad.data_ptr()) == (name in ("transposed", "repeated"))


def test_the_second_call_reuses_the_plan(torch_kernels):
    call, outer = prepared(SMALL)
    for n in (1, 2):
        gradients(call, outer, NEEDED)
        assert len(torch_kernels.built) == 3 and len(torch_kernels.launched) == 3 * n
    gradients(call, (outer[0], torch.zeros_like(outer[3]), *outer[2:]), NEEDED)
    assert len(torch_kernels.built) == 6
    with machine.deterministic():
        gradients(call, outer, NEEDED)
    assert len(torch_kernels.built) == 9
    assert any(getattr(built[1], "dq_in_order", False) for built in torch_kernels.built[6:])


def test_saved_tensors_may_return_with_other_strides(torch_kernels):
    """So may the gradient of LSE."""
    call, (grad, _, out, lse) = prepared(replace(SMALL, layout="padded"))
    grad_lse = torch.randn(lse.shape)
    first = gradients(call, (grad, grad_lse, out, lse), NEEDED)
    views = out.new_empty((*out.shape[:-1], 2 * out.shape[-1]))[..., ::2].copy_(out)
    rows_first = [x.mT.contiguous().mT for x in (grad_lse, lse)]
    apart = [torch.stack((x, x), -1)[..., 0] for x in (grad_lse, lse)]
    for one, result, (change, own) in (
        *((call._replace(k=call.k.contiguous()), out, (grad_lse, lse)), (call, views, (grad_lse, lse))),
        *((call, out, rows_first), (call, out, apart)),
    ):
        again = gradients(one, (grad, change, result, own), NEEDED)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
        read = next(
            given for traits, _, given in torch_kernels.launched[-3:] if traits.op.endswith("process")
        )
        assert read.mLSE.is_contiguous() and read.mDLSE.stride(-1) == change.stride(-1)
    assert len(plans._plans) == 5


def test_the_callers_kernel_and_tile_are_used(torch_kernels):
    call, outer = prepared(SMALL, kernel="sm80", backward_tile="tile_n=128")
    gradients(call, outer, NEEDED)
    assert {traits.arch for traits, _ in torch_kernels.built} == {"sm80"}
    assert torch_kernels.built[0][1].tile_n == 128
    with pytest.raises(ValueError, match=r"tile has 'rows=3'; accepted: FIELD=VALUE"):
        wrong = call._replace(backward_tile="rows=3")
        gradients(wrong, outer, NEEDED)
    with pytest.raises(Unsupported, match=r"needs \d+ bytes of shared memory"):
        wrong = call._replace(backward_tile="tile_n=8192")
        gradients(wrong, outer, NEEDED)


def test_variants(torch_kernels, monkeypatch):
    """A forward's variant leaves the backward its arch's default kernel; a backward's variant is used."""
    from cute_attn.kernels.backward_sm80.kernel import BackwardSm80
    from cute_attn.kernels.forward_sm80 import ForwardSm80

    monkeypatch.setattr(registry, "KERNELS", dict(registry.KERNELS))
    registry.register(type("Mine", (ForwardSm80,), {}), variant="mine")
    call, outer = prepared(SMALL, kernel="sm80:mine")
    first = gradients(call, outer, NEEDED)
    assert [traits.variant for traits, _ in torch_kernels.built] == ["", "", ""]
    registry.register(type("Mine", (BackwardSm80,), {}), variant="mine", op="backward")
    second = gradients(call, outer, NEEDED)
    assert [traits.variant for traits, _ in torch_kernels.built[3:]] == ["mine", "", ""]
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))


def test_lengths_beyond_all_rows_take_no_more_blocks(torch_kernels):
    """A varlen sequence has at most all rows, even if max_seqlen is larger."""
    call, outer = prepared(CASES["varlen"])
    rows = call.q.shape[0], call.k.shape[0]
    for deterministic in (False, True):
        stated = call._replace(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1, deterministic=deterministic)
        found = gradients(stated, outer, NEEDED)
        honest = call._replace(deterministic=deterministic)
        right = gradients(honest, outer, NEEDED)
        for x, y in zip(found[:3], right[:3], strict=True):  # heads may be split otherwise
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        given = [given for *_, given in torch_kernels.launched[-6:-3]]
        assert [one.seqlens[4:6] for one in given] == [rows] * 3
        assert given[1].schedule[0] <= -(-rows[1] // torch_kernels.built[0][1].tile_n)


def test_no_sequences_have_gradients_of_zeros(torch_kernels):
    none = torch.zeros(1, dtype=torch.int32)
    call, outer = prepared(VARLEN, {"cu_seqlens_q": none, "cu_seqlens_k": none})
    found = gradients(call, outer, NEEDED)
    assert not torch_kernels.launched
    assert all(torch.equal(a, torch.zeros_like(b)) for a, b in zip(found, call[:3], strict=False))


def many(sequences, rows_q, rows_k=1, heads=4, heads_kv=4):
    """A varlen call of expanded tensors, which need no memory; each sequence may have all rows."""
    row, cu_seqlens = torch.zeros(8, dtype=BF16), torch.zeros(1, dtype=torch.int32).expand(sequences + 1)
    call = the_call(VARLEN.build("cpu"))
    tensors = {"q": row.expand(rows_q, heads, 8)} | dict.fromkeys("kv", row.expand(rows_k, heads_kv, 8))
    tensors |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens)
    return call._replace(**tensors, max_seqlen_q=rows_q, max_seqlen_k=rows_k)


TILE = BackwardSm80Tile(tile_m=64, tile_n=128)


def blocks(call, rows, splits):
    check_blocks(call, TILE, rows, splits, call.k.shape[-2])


@refusals.each(f"""
blocks(many(2**19, 2**15), 32, 1) -> ValueError: \
max_seqlen_q is 32768, which makes {2**19} sequences of 4 heads of 1024 blocks of 32 queries, {2**31}
blocks(many(2**25, 5), 64, 1)
    -> ValueError: q has 5 rows in {2**25} sequences, each padded to blocks of 64 rows, {2**31} in all
blocks(many(2**24, 5), 64, 1)
    -> ValueError: k has 1 rows in {2**24} sequences, each padded to blocks of 128 rows, {2**31} in all
blocks(many(2**22, 5, 2**16), 64, 512) -> ValueError: \
max_seqlen_k is 65536, which makes {2**22} sequences of 512 splits of their key blocks, {2**31} in all
blocks(many(2**20, 5, 2**16, heads=128, heads_kv=128), 64, 16) -> ValueError: \
max_seqlen_k is 65536, which makes 128 heads of {2**24} splits of their key blocks, {2**31} in all
blocks(many(5, 5, heads=2**26), 64, 1) -> ValueError: q has heads, {2**26} in all; accepted on CUDA: up to {2**25}
""")
def test_counts_beyond_32_bits_are_refused(call, sentence):
    refusals.check(call, sentence, globals())
    blocks(many(2**22, 5, 2**16 - 128), 64, 511)
    blocks(many(2**20, 5, 2**16, heads=127, heads_kv=127), 64, 16)


def test_steps_of_varlen_sequences_are_bounded_by_all_rows():
    """The bound does not depend on max_seqlen."""
    assert query_blocks(many(1000, 2**20, heads=4), 64) == 4 * (2**14 + 1000)
    assert query_blocks(the_call(SMALL.build("cpu")), 16) == 2 * 4 * 2


def test_wrong_shapes_are_refused(torch_kernels):
    call, (_, _, out, lse) = prepared(SMALL)
    with pytest.raises(ValueError, match=r"grad_out has shape \(2, 21, 4, 8\); accepted: \(2, 21, 4, 24\)"):
        gradients(call, (out[..., :8], None, out, lse), NEEDED)


# ---- autograd's node ----


def test_the_node_computes_only_needed_gradients(monkeypatch):
    """Attention.apply, whose forward computes the reference."""
    calls = []

    def answer(call, outer, needed, launched):
        calls.append((*outer[:2], needed))
        return tuple(
            torch.zeros_like(x) if n else None
            for x, n in zip((*call[:3], call.bias, call.sinks), needed, strict=True)
        )

    monkeypatch.setattr(operators, "backward", answer)
    the_case = the_call(SMALL.build("cpu"))
    monkeypatch.setattr(operators, "launch", operators.forward_cpu)
    node = operators.Node.of(the_case)
    q, present = the_case.q.clone().requires_grad_(), [x for x in the_case[1:NUM_TENSORS] if x is not None]
    out, _, softmax = operators.Attention.apply(node, None, (), q, *present)
    assert softmax is None
    out.sum().backward()
    lse2 = operators.Attention.apply(node, None, (), q, *present)[1]
    lse2.sum().backward()
    assert (
        calls[0][1] is None and calls[0][0] is not None and calls[0][2] == (True, False, False, False, False)
    )
    assert calls[1][0] is None and calls[1][1] is not None
    (again,) = torch.autograd.grad(
        operators.Attention.apply(node, None, (), q, *present)[0].sum(), q, create_graph=True
    )
    (twice,) = torch.autograd.grad(again.sum(), q)
    out = operators.forward_cpu(the_case._replace(q=q))[0]
    (right,) = torch.autograd.grad(torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum(), q)
    torch.testing.assert_close(twice, right, atol=2e-2, rtol=2e-2)
