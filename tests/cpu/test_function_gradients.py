"""Gradients of tensors that functions capture: on score tiles, in calls of a backward, and refused cases."""

import math
from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from torch.nn.attention.flex_attention import create_block_mask

from cute_attn import attention, reference, score_mod
from cute_attn.api import operators
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.functions.gradients import Bins, first_of, of_this_cta, one_copy
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.names import user_epilogue
from cute_attn.host.block_masks import epilogue_of_block_mask
from cute_attn.host.call import ATTENTION, NUM_TENSORS
from cute_attn.host.epilogue_gradients import (
    BINNED_BYTES,
    COPIED_BYTES,
    COPIES,
    MAX_BINNED_BYTES,
    MAX_ELEMENTS,
    bins_of,
    gradient_of,
    with_targets,
)
from cute_attn.reference.check_epilogue import BACKWARD, Scores
from cute_attn.reference.tilings import SMALL, TILINGS, TINY
from tests.cpu.test_ops import call
from tests.tensors import run


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TABLE, SLOPES, CAP, WEIGHTS = randn(3, 33), randn(3), torch.tensor(2.0), randn(2, 90)
FUNCTIONS = {
    "relative": lambda s, b, h, q, k: s + TABLE[h, (k - q).clamp(-4, 4) + 4],
    "each-score-its-own": lambda s, b, h, q, k: s + TABLE[h, (7 * k - q) % 33] * TABLE[h, q % 33],
    "softcap-and-slopes": lambda s, b, h, q, k: CAP * torch.tanh(s * SLOPES[h] / CAP),
    "keys-where": lambda s, b, h, q, k: torch.where(q >= k, s + WEIGHTS[b, k], s * WEIGHTS[b, q]),
}


@pytest.mark.parametrize("bins", [0, 9, 33])
@pytest.mark.parametrize("tiling", BACKWARD)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_score_tiles_add_up_to_the_gradient(function, tiling, bins):
    name, tensors = epilogue_of(function, None)
    every = tuple(range(len(tensors)))
    own, numbers = user_epilogue(name).with_gradients(every, every if bins else ())
    assert numbers == every
    problem = Scores.random(2, 3, 70, 90, extra={name: tensors})
    traits = TINY[tiling].of(name, op="backward").traits
    grad_out = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1))
    leaves = tuple(x.double().requires_grad_() for x in tensors)
    expected = _with(problem, name, leaves).expected_gradients(traits, grad_out)
    targets = tuple(one_copy(x, bins) for x in tensors)
    got = _with(problem, own, (*tensors, *targets)).differentiate(
        TINY[tiling].of(own, op="backward"), grad_out, expected.lse, -expected.dpsum
    )
    torch.testing.assert_close(got.scores, expected.scores.float(), atol=1e-4, rtol=1e-4)
    for found, leaf in zip(targets, leaves, strict=True):
        largest = float(leaf.grad.abs().max())
        torch.testing.assert_close(gradient_of(leaf, found), leaf.grad, atol=2e-5 * largest, rtol=1e-4)


def _with(problem, name, given):
    return replace(problem, inputs=replace(problem.inputs, extra={name: given}))


def test_one_of_several_ctas_with_the_same_scores_adds(monkeypatch):
    """Wide head dims divide columns among CTAs, and every CTA needs the gradients of the scores."""

    alone, traced = EpilogueChain.backward, []

    def backward(chain, state, tile, saved):
        traced.append(chain)
        for part in range(3):
            other = tile.of(cute.make_rmem_tensor_like(tile.acc))
            for i in range(cute.size(tile.acc)):
                other.acc[i] = tile.acc[i]
            alone(chain, state, other, saved, adds=Int32(part) == 0)
        for i in range(cute.size(tile.acc)):
            tile.acc[i] = other.acc[i]

    def function(s, b, h, q, k):  # no other test has traced it
        return CAP * torch.tanh(s * SLOPES[h] / CAP) * 1.5

    monkeypatch.setattr(EpilogueChain, "backward", backward)
    test_score_tiles_add_up_to_the_gradient(function, BACKWARD[0], bins=0)
    assert traced


@pytest.mark.parametrize("masks", ["mask", "blocks", "index"])
def test_what_masks_and_indices_read_has_a_gradient_of_zeros(masks):
    weights = randn(2, 90).requires_grad_()

    def seen(b, h, q, k):
        return weights[b, k] > 0.3

    if masks == "blocks":
        name, tensors = epilogue_of(None, seen, torch.device("cpu"), unites=False)
        tensors = (*tensors, *(torch.zeros(1, 1, 1, 1).int() for _ in range(4)))
    elif masks == "mask":
        name, tensors = epilogue_of(None, seen)
    else:
        name, tensors = epilogue_of(lambda s, b, h, q, k: s + TABLE[h, weights[b, k].int()], None)
    letters = "t" * len(tensors)
    q = randn(1, 8, 3, 16)
    given = call(q, q, q)._replace(
        epilogues=(f"{name}:{letters}",), epilogue_tensors=tensors, deterministic=True
    )
    wanted = tuple(x is weights for x in tensors)
    asked, targets = with_targets(given, wanted)
    assert asked.epilogues == given.epilogues and asked.epilogue_tensors == tensors
    assert [x is not None for x in targets] == list(wanted)


@score_mod(
    "scaled_and_shifted", example=lambda batch, nheads, *_: (0.5, torch.randn(nheads), torch.ones(4).int())
)
def scaled_and_shifted(score, b, h, q_idx, kv_idx, scale, shift, table):
    return scale * score + shift[h] * table[kv_idx % 4]


def _called(shift, **options):
    """A call with an epilogue of a number and two tensors after one with a tensor."""
    q, k, v = (randn(1, 8, 3, 16) for _ in range(3))
    name, tensors = epilogue_of(FUNCTIONS["relative"], None)
    own = {"epilogues": (f"{name}:t", "scaled_and_shifted:ftt"), "epilogue_numbers": (0.5,), **options}
    return call(q, k, v)._replace(epilogue_tensors=(*tensors, shift, torch.ones(4).int()), **own)


def test_a_backward_gets_tensors_to_add_to():
    given = _called(randn(3).half())
    asked, targets = with_targets(given, (True, True, False))
    table, shift, numbers = given.epilogue_tensors
    assert [x if x is None else (x.dtype, x.shape) for x in targets] == [
        (torch.float32, (COPIES, *table.shape)),
        (torch.float32, (COPIES, *shift.shape)),
        None,
    ]
    assert [x.partition(":")[2] for x in asked.epilogues] == ["tt", "fttt"]
    order = (table, targets[0], shift, numbers, targets[1])
    assert all(x is y for x, y in zip(asked.epilogue_tensors, order, strict=True))
    inputs = asked.score_inputs()
    for item, other in zip(asked.epilogues, given.epilogues, strict=True):
        epilogue = user_epilogue(item.partition(":")[0])
        assert len(epilogue.host_args(inputs)) == len(epilogue.fake_args()), other
    second = user_epilogue(asked.epilogues[1].partition(":")[0])
    assert second.wanted == (1,) and second.graph is user_epilogue("scaled_and_shifted").graph
    alone, targets = with_targets(given, (False, True, False))
    assert alone.epilogues[0] == given.epilogues[0] and targets[0] is None


def test_large_gradients_have_few_copies():
    """Few CTAs of many add to the same element of a large one."""
    shift = torch.zeros(COPIED_BYTES // 4 // 3 + 1)
    _, targets = with_targets(_called(shift), (False, True, False))
    assert targets[1].shape == (2, *shift.shape)


def test_the_operator_returns_them():
    """Observed or traced calls go through the operator; on the CPU the reference computes it."""
    shift = randn(3).requires_grad_()
    given = _called(shift)
    out, lse, _ = torch.ops.cute_attn.forward.default(*given.values(ATTENTION))
    (found,) = torch.autograd.grad(out.sum(), shift)
    (expected,) = torch.autograd.grad(operators.forward_cpu(given)[0].sum(), shift)
    torch.testing.assert_close(found, expected)
    assert expected.abs().max() > 0
    needed = (False,) * 5 + (False, True, False)
    detached = (x.detach() for x in (torch.ones_like(out), out, lse))
    grad, *others = operators.backward(given, (next(detached), None, *detached), needed)[-2:-4:-1]
    torch.testing.assert_close(grad, expected)
    assert others == [None]


@pytest.mark.parametrize("tensor", [TABLE, CAP], ids=["table", "number"])
def test_calls_that_read_no_element_have_a_gradient_of_zeros(tensor):
    """The gradient on a GPU is zeros too."""
    own = tensor.clone().requires_grad_()
    q = randn(1, 8, 3, 16)
    out = attention(q, q, q, mask_mod=lambda b, h, i, j: (own[h, i] if own.dim() else own + i) > -9)
    (found,) = torch.autograd.grad(out.sum(), own)
    assert torch.equal(found, torch.zeros_like(own))


def test_what_is_refused():
    wanted = (True, True, False)
    with pytest.raises(
        ValueError, match=f"of shape .2147483648,. .* accepted: at most {MAX_ELEMENTS} elements"
    ):
        bins_of(_called(torch.zeros(1).expand(2**31)), wanted)
    bins_of(_called(torch.zeros(1).expand(2**31)), (True, False, False))
    most = MAX_BINNED_BYTES // (8 * 9)
    shift = torch.zeros(1).expand(most + 1)
    with pytest.raises(
        ValueError, match=f"of shape .{most + 1},. .* accepted: at most {most} elements, .* 4 GiB"
    ):
        bins_of(_called(shift, deterministic=True), wanted)
    bins_of(_called(shift[1:], deterministic=True), wanted)
    given = _called(SLOPES, deterministic=True)
    long = {"max_seqlen_q": 2**20, "max_seqlen_k": 2**20}
    with pytest.raises(ValueError, match=f"up to {2**40} scores load an element; accepted: {2**39}"):
        bins_of(given._replace(**long), wanted)
    assert len(_called(SLOPES)[:NUM_TENSORS]) == NUM_TENSORS


# ---- gradients that repeat ----

SCORES = {  # functions -> how many scores of (3, 5, 70, 90) add to one element of a (5, 70, 90)
    "each": (lambda t: lambda s, b, h, q, k: s + t[h, q, k], 3),
    "each of a head": (lambda t: lambda s, b, h, q, k: s + t[0, q, k], 15),
    "each twice": (lambda t: lambda s, b, h, q, k: s * t[h, q, k] + t[h, q, k] * t[h, q, 0], 3 + 3 * 90),
    "each of the near": (lambda t: lambda s, b, h, q, k: s + t[h, q, k.clamp(max=20)], 3 * 90),
    "beyond": (lambda t: lambda s, b, h, q, k: s + t[h, q, :60][k], 3 * 90),
    "batches": (lambda t: lambda s, b, h, q, k: s + t[b, q, k], 5),
    "heads": (lambda t: lambda s, b, h, q, k: s + t[h, 0, 0], 3 * 70 * 90),
    "all": (lambda t: lambda s, b, h, q, k: s + t[0, 0, 0], 3 * 5 * 70 * 90),
}


@pytest.mark.parametrize("name", SCORES)
def test_the_scores_that_add_to_an_element_are_counted(name):
    function, count = SCORES[name]
    table = torch.zeros(5, 70, 90)
    known, tensors = epilogue_of(function(table), None)
    sizes = {"batch": 3, "head": 5, "query": 70, "key": 90}
    assert user_epilogue(known).readers(0, tuple(tensors[0].shape), sizes, 210) == count
    packed = user_epilogue(known).readers(0, tuple(tensors[0].shape), sizes, 100)
    assert packed == {"heads": 100 * 90, "all": 5 * 100 * 90}.get(name, count)


@pytest.mark.parametrize("by", ["call", "torch"])
def test_a_repeating_backward_gets_bins_to_add_to(by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    given = _called(randn(3).half(), deterministic=by == "call")
    table, shift, _ = given.epilogue_tensors
    for length, bins in ((16, 9), (17, 17), (4096, 17), (4097, 33), (2**16 + 1, 65)):
        asked, targets = with_targets(
            given._replace(max_seqlen_q=length, max_seqlen_k=length), (True, True, False)
        )
        copies = [min(COPIES, BINNED_BYTES // (8 * bins * x.numel())) for x in (table, shift)]
        assert [(x.dtype, x.shape) for x in targets[:2]] == [
            (torch.int64, (copies[0], bins, *table.shape)),
            (torch.int64, (copies[1], bins, *shift.shape)),
        ]
        inputs = asked.score_inputs()
        for item in asked.epilogues:
            epilogue = user_epilogue(item.partition(":")[0])
            assert epilogue.exact == epilogue.wanted != ()
            assert len(epilogue.host_args(inputs)) == len(epilogue.fake_args())


def test_at_most_two_scores_add_to_an_element_of_fp32():
    table = torch.zeros(3, 8, 8)
    name, tensors = epilogue_of(lambda s, b, h, q, k: s + table[h, q, k], None)
    q = randn(3, 8, 3, 16)
    given = call(q, q, q)._replace(epilogues=(f"{name}:t",), epilogue_tensors=tensors, deterministic=True)
    assert bins_of(given, (True,)) == [9]
    assert bins_of(given._replace(q=q[:2]), (True,)) == [0]


@cute.jit
def add_each(copies: cute.Tensor, x: cute.Tensor, order: cute.Tensor):
    """Add x[i] to element i % 4 of int64 (copies, bins, 4)."""
    copy = of_this_cta(copies)
    bins, first = Bins.of(copy), first_of(copy)
    for n in cutlass.range(order.shape[0]):
        bins.add_to(first.iterator + order[n] % 4, x[order[n]])


def added(x, bins, order):
    copies = one_copy(torch.zeros(4), bins)
    run(add_each, copies, x, order.int())
    return copies


NUMBERS = [1e-3, -1e-3, 3.4e38, -3.4e38, 2.0**-126, -(2.0**-126), 1e-40, 0.0, -0.0, 1.5, 7e-9, -1e20, 65504.0]


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_bins_add_up_exactly_in_any_order(width):
    random = torch.Generator().manual_seed(width)
    x = torch.tensor(NUMBERS + [0.0] * 51)
    x = torch.cat(
        [x, torch.randn(192, generator=random) * 10.0 ** torch.randint(-30, 30, (192,), generator=random)]
    )
    bins = 256 // width + 1
    found = [added(x, bins, order) for order in (torch.arange(256), torch.randperm(256, generator=random))]
    assert torch.equal(*found)
    sums = gradient_of(torch.zeros(4, dtype=torch.float64), found[0])
    normal = x.where(x.abs() >= 2.0**-126, 0.0).double()
    for i, own in enumerate(sums.tolist()):
        numbers = normal[i::4].tolist()
        assert abs(own - math.fsum(numbers)) <= 2.0**-50 * max(map(abs, numbers))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_sum_of_what_is_not_finite_is_nan(number):
    x = torch.ones(256)
    x[[5, 9]] = torch.tensor([number, -number])
    sums = gradient_of(torch.zeros(4), added(x, 33, torch.arange(256)))
    assert sums.isnan().tolist() == [False, True, False, False] and sums[0] == 64


# ---- scores that are hidden, where functions are infinite or NaN ----

UNKNOWN = torch.cat([randn(3, 60), torch.full((3, 70), torch.nan)], 1)
HIDDEN = {
    "reciprocal": (lambda s, b, h, q, k: s / (q - k + 1), ()),
    "kerple": (lambda s, b, h, q, k, x: s - x[h] * torch.log(1 + x[h] * (q - k)), (SLOPES.abs(),)),
    "root": (lambda s, b, h, q, k, x: x[h] * torch.sqrt(s * 0 + (q - k + 1)) * s, (SLOPES,)),
    "of the score": (lambda s, b, h, q, k: torch.sqrt(s + 0.1 * (q - k) + 9), ()),
    "table": (lambda s, b, h, q, k, x: s * x[h, q] + torch.where(q >= k, x[h, k], torch.inf), (UNKNOWN,)),
}
ON_TILES = (
    ("reciprocal", "causal_top_left", "wgmma1-16x64-transposed"),
    ("reciprocal", "", "wgmma1-64x16"),
    ("kerple", "causal_top_left", "warps2x1-32x16"),
    ("kerple", "", "warps2x1-16x32-transposed"),
    ("root", "causal_top_left", "wgmma1-16x64-transposed"),
    ("of the score", "causal_top_left", "warps2x1-32x16"),
    ("table", "causal_top_left", "warps2x1-32x16"),
    ("table", "", "wgmma1-16x64-transposed"),
)


def seen_by(q, k):
    return q >= k


def of_visible(function, scores, seen, tensors):
    """The function, evaluated only at visible scores; -inf elsewhere."""
    at = seen.expand(scores.shape).nonzero(as_tuple=True)
    return torch.full_like(scores, -torch.inf).index_put(at, function(scores[at], *at, *tensors))


def with_tensors(function, tensors):
    return lambda *cell: function(*cell, *tensors)


@pytest.mark.parametrize(("case", "mask", "tiling"), ON_TILES)
def test_hidden_scores_reach_no_gradient_of_a_kernel(case, mask, tiling):
    """A score is hidden by a mask or lies beyond the lengths, which are no multiples of a block."""
    function, tensors = HIDDEN[case]
    name, _ = epilogue_of(with_tensors(function, tensors), None if mask else lambda b, h, q, k: seen_by(q, k))
    own, _ = user_epilogue(name).with_gradients(tuple(range(len(tensors))))
    problem = Scores.random(2, 3, 70, 90)
    used = torch.full((2,), 60, dtype=torch.int32)
    problem = replace(problem, lengths=reference.Lengths(seqused_q=used, seqused_k=used))
    leaves = [x.double().requires_grad_() for x in tensors]
    raw = (problem.products.double() * problem.scale).requires_grad_()
    q, k = torch.arange(70)[:, None], torch.arange(90)
    scores = of_visible(function, raw, seen_by(q, k) & (q < 60) & (k < 60), leaves)
    empty, lse = (q >= 60).expand(70, 1), scores.logsumexp(-1)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    grad_out = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1))
    out = torch.einsum("bhqk,bkhd->bqhd", p, problem.v.double())
    (out * grad_out).sum().backward()
    minus_d = -(out * grad_out).sum(-1).transpose(1, 2).detach().float()
    targets = tuple(map(one_copy, tensors))
    tile = TINY[tiling].of(f"{mask}-seqused_q-seqused_k-{own}".removeprefix("-"), op="backward")
    got = _with(problem, own, (*tensors, *targets)).differentiate(
        tile, grad_out, lse.detach().float(), minus_d
    )
    assert got.p.isfinite().all()
    torch.testing.assert_close(got.scores, raw.grad.float(), atol=1e-4, rtol=1e-4)
    for found, leaf in zip(targets, leaves, strict=True):
        largest = float(leaf.grad.abs().max())
        torch.testing.assert_close(found.view(leaf.shape).double(), leaf.grad, atol=2e-5 * largest, rtol=1e-4)


@pytest.mark.parametrize("hides", ["causal", "blocks"])
def test_hidden_scores_reach_no_output_of_a_kernel(hides):
    function, tensors = HIDDEN["kerple"]
    name, _ = epilogue_of(with_tensors(function, tensors), None)
    problem, extra = Scores.random(1, 2, 140, 140), {name: tensors}
    if hides == "blocks":
        mask = create_block_mask(lambda b, h, q, k: seen_by(q, k), None, None, 140, 140, device="cpu")
        other, lists = epilogue_of_block_mask(mask, problem.q, problem.k)
        extra[other] = lists
        made = TILINGS["warps4x1-128x32"].of(f"{name}-{other}")
        assert made.epilogues.visits_lists
    else:
        made = TILINGS[SMALL].of(f"causal-{name}")
    found = replace(problem, inputs=replace(problem.inputs, extra=extra)).emulate(made)
    index = torch.arange(140)
    scores = problem.products.double() * problem.scale
    scores = of_visible(function, scores, seen_by(index[:, None], index), tensors)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1).float(), atol=1e-3, rtol=1e-3)
    right = scores.softmax(-1).float() @ problem.v.transpose(1, 2)
    torch.testing.assert_close(found.out, right, atol=2e-3, rtol=1e-2)
