"""Properties that every door has: by the definition, and with CPU tensors on the code path of a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cute_attn import (
    attention,
    attention_backward,
    attention_varlen,
    attention_with_kvcache,
    flash_attn,
    flex,
    merge_attention,
    score_mod,
    sdpa,
)
from cute_attn.api import append, merge
from cute_attn.flash_attn import flash_attn_3, rotary
from cute_attn.host import plans
from cute_attn.host.activation import Options
from cute_attn.host.record import Record
from tests import machine
from tests.doors import DOORS, EMPTY, OPERATORS, Sizes, given, leaves, results
from tests.tensors import tensors_in

LEARNING = [name for name, door in DOORS.items() if leaves(door.inputs(Sizes()))]
DECLINED = "none of them 0"


class Launches:
    """Replaces the kernels; records the name of each launched kernel and the values of its arguments.

    A kernel fills new memory, which is NaN, with a number.
    """

    def __init__(self):
        self.seen = []

    def kernel(self, kernel, target):
        def run(given):
            self.seen.append((type(kernel).__name__, *map(_digest, vars(given).values())))
            for x in tensors_in(vars(given)):
                if x.is_floating_point() and x.isnan().all():
                    x.data.fill_(len(type(kernel).__name__))
            if kernel.traits.op == "block_visits":
                for x in (*given.of_queries, *given.of_keys):
                    x.fill_(given.mKinds.sum())

        return run

    def of_backwards(self):
        return [one for one in self.seen if one[0].startswith("Backward")]


def _digest(x):
    if isinstance(x, tuple):
        return tuple(map(_digest, x))
    if isinstance(x, torch.Tensor):
        return x.double().nan_to_num().sum().item()
    return x if isinstance(x, float) else None


@pytest.fixture
def launches(monkeypatch):
    """Calls take the code path of a GPU; new memory is filled with NaN."""
    found = Launches()
    machine.gpu(monkeypatch, found.kernel)
    machine.poison(monkeypatch)
    activation = sdpa.Activation(Options(unsupported="error"), "CPU")
    yield found
    activation.remove()


def gradients(outputs, inputs):
    """Gradients of the leaves, for random output gradients that are equal in each call."""
    torch.manual_seed(1)
    learnt = [x for x in outputs if x.requires_grad]
    return torch.autograd.grad(learnt, list(leaves(inputs).values()), [torch.randn_like(x) for x in learnt])


# ---- in place between forward and backward ----


def change(x):
    if x.dtype == torch.bool:
        x.logical_not_()
    elif x.is_floating_point():
        x.mul_(2).add_(0.25)
    else:
        x.add_(1)


def after_a_change(name, doors, target, dtype, before, evidence):
    """``evidence`` of the gradients after ``target`` has changed in place; None if torch refuses the backward.

    before: how many calls come first. target: an input's name, the number of an output, or None.
    """
    for last in [False] * before + [True]:
        torch.manual_seed(0)
        inputs = given(doors[name].inputs(Sizes()), "cpu", dtype)
        outputs = results(doors[name].call(**inputs))
        if last and target is not None:
            with torch.no_grad():
                change(inputs[target] if isinstance(target, str) else outputs[target])
        try:
            found = evidence(outputs, inputs)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "has been modified inplace" in str(
                error
            )
            return None
    return found


def targets(door):
    tensors = [name for name, x in door.inputs(Sizes()).items() if isinstance(x, torch.Tensor)]
    return [*tensors, 0, *([1] if "lse" in door.call.__qualname__ else [])]


@pytest.mark.parametrize("name", LEARNING)
def test_gradients_after_a_change_in_place_are_right_or_refused(name):
    plain = after_a_change(name, DOORS, None, torch.float64, 0, gradients)
    for target in targets(DOORS[name]):
        found = after_a_change(name, DOORS, target, torch.float64, 0, gradients)
        if found is not None:
            torch.testing.assert_close(found, plain, msg=f"{target} changed")


@pytest.mark.parametrize("before", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("name", [*LEARNING, *OPERATORS])
def test_a_backward_kernel_never_sees_a_change_in_place(launches, name, before):
    doors = DOORS | OPERATORS

    def evidence(outputs, inputs):
        launches.seen.clear()
        gradients(outputs, inputs)
        return launches.of_backwards()

    plain = after_a_change(name, doors, None, torch.bfloat16, before, evidence)
    assert plain
    refused = 0
    for target in targets(doors[name]):
        found = after_a_change(name, doors, target, torch.bfloat16, before, evidence)
        assert found in (None, plain), f"{target} changed"
        refused += found is None
    assert refused or "odd" in name


# ---- from a record, on other tensors ----


def rows(q=(2, 130, 4, 64), k=(2, 140, 2, 64), learns=False):
    return [torch.randn(shape).bfloat16().requires_grad_(learns) for shape in (q, k, k)]


def gradients_of(*shapes, **options):
    """A call and its gradients; several CTAs add to them in a fixed order."""

    def call():
        leaves = rows(*shapes, learns=True)
        out = attention(*leaves, causal=True, deterministic=True, **options)
        return torch.autograd.grad(out, leaves, torch.randn(out.shape).bfloat16())

    return call


def cached(page=0, new=0, rotary=False, dim_v=128, **options):
    """A call with a cache; fewer columns of values are the first ones of the keys."""

    def call():
        cache, added = torch.randn(8, page or 500, 2, 128).bfloat16(), torch.randn(2, new, 2, 128).bfloat16()
        own = {"cache_seqlens": torch.randint(9, 60, (2,)).int(), "return_lse": True} | options
        own |= {"page_table": torch.randperm(8).int().view(2, 4)} if page else {}
        own |= {"k": added, "v": added[..., :dim_v]} if new else {}
        own |= {name: torch.randn(500, 32).bfloat16() for name in ("rotary_cos", "rotary_sin") if rotary}
        keys = cache if page else cache[:2]
        values = keys[..., :dim_v] if dim_v < 128 else torch.randn(keys.shape).bfloat16()
        return attention_with_kvcache(torch.randn(2, new or 1, 8, 128).bfloat16(), keys, values, **own)

    return call


@score_mod("doors_slope", example=lambda batch, nheads, *_: (torch.randn(nheads), 0.5))
def doors_slope(score, b, h, q_idx, kv_idx, slopes, factor):
    return score - slopes[h] * factor * (q_idx - kv_idx).abs()


def biased(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, 1:][kv_idx % 29]


NEAR = create_block_mask(lambda b, h, i, j: (i - j).abs() < 70, None, None, 130, 140, device="cpu")
REPEATED = {
    "window": lambda: attention(*rows(), causal=True, window=(30, 0), return_max_scores=True),
    "sm80": lambda: attention(*rows(), kernel="sm80"),
    "out": lambda: attention(*rows(), out=torch.zeros(2, 130, 4, 64).bfloat16()),
    "fp32": lambda: attention(*(x.float() for x in rows((2, 1030, 4, 64), (2, 1030, 2, 64))), precision="fp32"),
    "few queries": lambda: attention(*rows((1, 8, 4, 64), (1, 9000, 2, 64)), return_lse=True),
    "dropout, drawn": lambda: attention(*rows(), dropout_p=0.3),
    "BlockMask": lambda: attention(*rows(), block_mask=NEAR),
    "mask_mod": lambda: attention(*rows(), mask_mod=lambda b, h, i, j: (i + j) % 3 > 0),
    "views of a table": lambda: attention(*rows(), score_mod=biased(torch.randn(4, 30))),
    "a registered function": lambda: attention(*rows(), epilogues={"doors_slope": (torch.randn(4), 0.5)}),
    "gradients, sm80": gradients_of(kernel="sm80"),
    "gradients of divided heads": gradients_of((1, 300, 16, 128), (1, 300, 1, 128)),
    "flash_attn window": lambda: flash_attn.flash_attn_func(*rows(), causal=True, window_size=(30, 0)),
    "flash_attn qkvpacked": lambda: flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 130, 3, 4, 64).bfloat16()),
    "cache, split": cached(num_splits=3),
    "cache, pages": cached(64),
    "cache, rotary": cached(new=2, rotary=True),
    "cache, latent": cached(new=3, dim_v=64),
    "merge": lambda: merge_attention(torch.randn(3, 2, 50, 4, 64), torch.randn(3, 2, 4, 50), dtype=torch.bfloat16),
}  # fmt: skip
"""Calls of random tensors, in addition to the doors'."""
UNRECORDED = ("attention negative scale", "flex block_mask")
"""The latter makes a new mask each time."""


@pytest.mark.parametrize("name", [*DOORS, *OPERATORS, *REPEATED])
def test_a_repeated_call_launches_what_a_first_one_does(launches, name, monkeypatch):
    """The same kernels, with arguments of this call's values, and results that lie in memory alike."""
    for operator, launch in (("append_kv", append.append_cuda), ("merge", merge.merge_cuda)):
        monkeypatch.setattr(torch.ops.cute_attn, operator, SimpleNamespace(default=launch))

    def call(seed):
        launches.seen.clear()
        torch.manual_seed(seed)
        if name in REPEATED:
            found = results(REPEATED[name]())
        else:
            door = (DOORS | OPERATORS)[name]
            inputs = given(door.inputs(Sizes()), "cpu", torch.bfloat16)
            found = results(door.call(**inputs))
            found += gradients(found, inputs) if leaves(inputs) else ()
        seen = [one for one in launches.seen if one[0] != "ListVisits"]  # into memory of any values
        return seen, [(x.shape, x.stride(), x.dtype, _digest(x)) for x in found]

    expected = []
    for seed in range(5):
        plans.forget()
        expected.append(call(seed))
    plans.forget()
    assert [call(seed) for seed in range(5)] == expected
    assert len({str(one[0]) for one in expected}) == 5
    records = [one for one in plans._records.values() if isinstance(one, Record)]
    assert bool(records or plans._guarded) != (name in UNRECORDED)


# ---- nothing to attend ----


def call_of(door, sizes):
    """Results and gradients, for half-precision inputs."""
    torch.manual_seed(0)
    inputs = given(door.inputs(sizes), "cpu", torch.bfloat16)
    found = results(door.call(**inputs))
    return found, gradients(found, inputs) if leaves(inputs) else ()


def check_nothing(door, sizes, wanted, found):
    torch.testing.assert_close(found, wanted)
    inputs = leaves(door.inputs(sizes))
    for (name, x), grad in zip(inputs.items(), found[1], strict=True):
        assert grad.shape == x.shape and (name == "sinks" or not grad.any()), name


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("what", EMPTY)
def test_nothing_gives_zeros(monkeypatch, what, name):
    door, sizes = DOORS[name], EMPTY[what]
    if what in door.declines:
        for on_gpu in (False, True):
            if on_gpu:
                machine.gpu(monkeypatch, Launches().kernel)
            with pytest.raises(ValueError, match=DECLINED):
                call_of(door, sizes)
        return
    wanted = call_of(door, sizes)
    assert not wanted[0][0].any() or name == "append_kv"
    assert len(wanted[0]) == 1 or wanted[0][1].isinf().all() or "sinks" in name
    check_nothing(door, sizes, wanted, wanted)
    launches = Launches()
    machine.gpu(monkeypatch, launches.kernel)
    machine.poison(monkeypatch)
    for _ in range(4):  # planned, known, recorded, repeated
        check_nothing(door, sizes, wanted, call_of(door, sizes))
    assert not [one for one in launches.seen if one[0] != "ListVisits"]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("what", EMPTY)
def test_pytorchs_operators_are_served_for_nothing(launches, what, name):
    """Without sequences, PyTorch's cuDNN attention returns None."""
    door, sizes = OPERATORS[name], EMPTY[what]
    inputs = door.inputs(sizes)
    out = torch.zeros(*inputs["query"].shape[:3], sizes.head_dim, dtype=torch.bfloat16)
    zeros = tuple(torch.zeros_like(x, dtype=torch.bfloat16) for x in leaves(inputs).values())
    for _ in range(4):
        check_nothing(door, sizes, ((out,), zeros), call_of(door, sizes))
    assert not launches.seen


def test_the_lse_of_pytorchs_operators_without_keys_is_infinite(launches):
    inputs = given(OPERATORS["flash operator"].inputs(EMPTY["no key"]), "cpu", torch.bfloat16)
    assert (torch.ops.aten._scaled_dot_product_flash_attention(**inputs)[1] == torch.inf).all()
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    lse = efficient(**inputs, attn_bias=None, compute_log_sumexp=True)[1]
    assert lse.shape == (2, 2, 32) and (lse == torch.inf).all()


@pytest.mark.parametrize(
    "name",
    ["attention", "attention bias of keys", "attention sinks", "attention dropout", "varlen", "flash_attn"],
)
def test_nothing_gives_zeros_compiled(name):
    door = DOORS[name]
    for what in ("no sequence", "no query", "no key"):
        torch._dynamo.reset()
        compiled = door._replace(call=torch.compile(door.call, backend="aot_eager"))
        check_nothing(door, EMPTY[what], call_of(door, EMPTY[what]), call_of(compiled, EMPTY[what]))


# ---- numbers ----

Q, CACHE, CU = (
    torch.randn(2, 6, 2, 16),
    torch.randn(2, 128, 2, 16),
    torch.tensor([0, 6, 12], dtype=torch.int32),
)
ROWS, TURNS, LSE = Q.flatten(0, 1), torch.rand(16, 8), torch.zeros(2, 2, 6)
NUMBERS = {
    "scale": (0.3, lambda n: attention(Q, Q, Q, softmax_scale=n)),
    "softcap": (2.0, lambda n: attention(Q, Q, Q, softcap=n)),
    "dropout": (0.5, lambda n: attention(Q, Q, Q, dropout_p=n, rng_state=torch.tensor([4, 8]))),
    "window": (2, lambda n: attention(Q, Q, Q, window=(n, n))),
    "longest": (6, lambda n: attention_varlen(ROWS, ROWS, ROWS, CU, CU, n, n, bias=torch.ones(1, 1, 6, 1))),
    "words": (4, lambda n: attention_backward(Q, Q, Q, Q, Q, LSE, dropout_p=0.5, rng_state=(n, n))[0]),
    "cache": (
        2,
        lambda n: attention_with_kvcache(
            Q, CACHE, CACHE, cache_seqlens=n, num_splits=n, softmax_scale=n, softcap=n, window=(n, n)
        ),
    ),
    "packed cache": (6, lambda n: attention_with_kvcache(ROWS, CACHE, CACHE, cu_seqlens_q=CU, max_seqlen_q=n)),
    "flash_attn": (2, lambda n: flash_attn.flash_attn_func(Q, Q, Q, 0.0, n, window_size=(n, n), softcap=n)),
    "flash_attn scale": (0.3, lambda n: flash_attn.flash_attn_func(Q, Q, Q, softmax_scale=n)),
    "flash_attn varlen": (6, lambda n: flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, n, n)),
    "flash_attn cache": (
        9,
        lambda n: flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=n, num_splits=n),
    ),
    "flash_attn_3 heads": (2, lambda n: flash_attn_3.flash_attn_qkvpacked_func(torch.ones(2, 6, 6, 16), num_heads_q=n)),
    "rotary": (3, lambda n: rotary.apply_rotary_emb(Q, TURNS, TURNS, seqlen_offsets=n)),
    "flex": (0.3, lambda n: flex.flex_attention(Q, Q, Q, scale=n)),
    "interval_mask": (
        6,
        lambda n: flex.interval_mask(*torch.zeros(2, 1, 1, 6, dtype=torch.int32), seqlen_k=n).kv_indices,
    ),
    "reason": (0.3, lambda n: torch.tensor(sdpa.reason(Q, Q, Q, scale=n, dropout_p=n) is None)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numpys_numbers_are_numbers(name):
    value, call = NUMBERS[name]
    kinds = (
        (np.int64, np.int32, np.asarray) if isinstance(value, int) else (np.float64, np.float32, np.asarray)
    )
    for kind in kinds:
        number = kind(value)
        assert torch.equal(call(number), call(number.item())), kind


def test_numpys_numbers_find_plans(launches):
    q = Q.half()
    for _ in range(3):
        for scale in (np.float32(0.3), np.float32(0.5), 0.5):
            attention(q, q, q, softmax_scale=scale)
    given = [one[7] for one in launches.seen]
    assert given == [float(np.float32(0.3)), 0.5, 0.5] * 3


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout", "longest", "cache", "packed cache"])
def test_a_tensor_is_no_number(name):
    """Reading it would wait for the device, and a learnt one would have no gradient."""
    value, call = NUMBERS[name]
    with pytest.raises((TypeError, ValueError), match="accepted: "):
        call(torch.tensor(value))
