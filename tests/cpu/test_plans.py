"""Plans found by torch's guards, and by the whole key of a call."""

import pytest
import torch

from cute_attn.host import plans
from tests import machine

KEY = ("some", 0.5, None)
PLANS = [object() for _ in range(12)]


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    machine.forget_plans(monkeypatch)


def tensors(seqlen=5, **given):
    """A call's tensors, q to rng_state."""
    fields = {name: torch.randn(2, seqlen, 4, 8) for name in ("q", "k", "v")}
    fields |= dict.fromkeys(("cu_q", "cu_k", "used_q", "used_k", "slopes", "bias", "state"))
    return tuple((fields | given).values())


def seen(call, key=KEY):
    found = plans.find(key, call)
    return found and found.plan


def guarded(call, key=KEY):
    """Found by guards alone."""
    whole, plans._plans = plans._plans, {}
    try:
        return seen(call, key)
    finally:
        plans._plans = whole


@pytest.fixture(params=[True, False], ids=["guards", "keys"])
def keep(request, monkeypatch):
    """Keep a plan, to be found by guards or by keys."""
    if not request.param:
        monkeypatch.setattr(plans, "tensor_guards", None)

    def keep(call, plan, key=KEY):
        plans.keep(key, call, plan)
        assert seen(call, key) is plan and (guarded(call, key) is plan) == request.param

    return keep


def test_an_equal_call_finds_the_plan(keep):
    assert seen(tensors()) is None
    keep(tensors(), PLANS[0])
    assert seen(tensors()) is PLANS[0]
    assert seen(tensors(), ("other",)) is None


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


class Own(torch.Tensor):
    pass


OTHERS = {
    "shape": lambda: tensors(6),
    "dtype": lambda: tensors(q=torch.randn(2, 5, 4, 8).half()),
    "strides": lambda: tensors(v=torch.randn(2, 4, 5, 8).transpose(1, 2)),
    "parameter": lambda: tensors(k=torch.nn.Parameter(torch.randn(2, 5, 4, 8), False)),
    "one more": lambda: tensors(state=torch.tensor([1, 2])),
    "subclass": lambda: tensors(k=torch.randn(2, 5, 4, 8).as_subclass(Own)),
    "negative view": lambda: tensors(k=torch._neg_view(torch.randn(2, 5, 4, 8))),
    "no tensor": lambda: tensors(k=None),
    "a number": lambda: tensors(k=3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_different_call_finds_none(keep, name):
    keep(tensors(), PLANS[0])
    other = OTHERS[name]()
    assert seen(other) is None
    if name not in ("subclass", "negative view", "no tensor", "a number"):
        keep(other, PLANS[1])
        assert seen(OTHERS[name]()) is PLANS[1]
        assert seen(tensors()) is PLANS[0]


def test_tensors_that_are_more_than_memory_have_no_plan():
    for name in ("subclass", "negative view"):
        call = OTHERS[name]()
        plans.keep(KEY, call, PLANS[0])
        assert seen(call) is None, name


def test_arguments_of_the_same_metadata_are_not_confused(keep):
    for place, name in enumerate(("used_q", "used_k")):
        keep(tensors(**{name: lengths(3, 4)}), PLANS[place])
    assert seen(tensors(used_q=lengths(1, 2))) is PLANS[0]
    assert seen(tensors(used_k=lengths(1, 2))) is PLANS[1]


def test_one_tensor_may_be_two_arguments(keep):
    starts, other = lengths(0, 5), lengths(0, 5)
    keep(tensors(cu_q=starts, cu_k=starts), PLANS[0])
    assert seen(tensors(cu_q=other, cu_k=other)) is PLANS[0]
    assert seen(tensors(cu_q=other, cu_k=starts)) is PLANS[0]
    assert seen(tensors(cu_q=other, cu_k=lengths(0, 5, 7))) is None
    assert seen(tensors(cu_q=starts, cu_k=starts.long())) is None


def test_whether_a_gradient_is_required_is_known(keep):
    keep(tensors(), PLANS[0])
    assert plans.find(KEY, tensors()).constant
    q = torch.randn(2, 5, 4, 8).requires_grad_()
    assert not plans.find(KEY, tensors(q=q)).constant
    assert not plans.find(KEY, tensors(q=q)).constant and plans.find(KEY, tensors()).constant


def test_guards_of_the_last_few_calls_are_kept(monkeypatch):
    for n, kept in enumerate(PLANS):
        plans.keep(KEY, tensors(n + 1), kept)
        assert seen(tensors(n + 1)) is kept
    assert [guarded(tensors(n + 1)) for n in range(12)] == [None] * 4 + PLANS[4:]
    assert [seen(tensors(n + 1)) for n in range(12)] == PLANS
    monkeypatch.setattr(plans, "_MAX_PLANS", 3)
    for n in range(5):
        plans.keep((n,), tensors(), PLANS[n])
        seen(tensors(), (n,))
    assert len(plans._plans) <= 3 and len(plans._guarded) <= 3


def test_keys_that_cannot_be_hashed():
    assert plans.find(([],), tensors()) is None
    assert plans.keep(([],), tensors(), PLANS[0]) is PLANS[0] and not plans._plans


def test_an_owners_plans_are_forgotten_alone():
    first, second = object(), object()
    for owner in (first, second):
        plans.keep((owner, 1), tensors(), PLANS[0])
        assert seen(tensors(), (owner, 1)) is PLANS[0]
    plans.forget(first)
    assert seen(tensors(), (first, 1)) is None and seen(tensors(), (second, 1)) is PLANS[0]


def test_more_calls_in_turn_than_have_guards_make_no_guards_anew(monkeypatch):
    for n, kept in enumerate(PLANS):
        plans.keep(KEY, tensors(n + 1), kept)
        seen(tensors(n + 1))
    monkeypatch.setattr(plans, "guards", None)
    assert [seen(tensors(n + 1)) for n in range(12)] == PLANS
