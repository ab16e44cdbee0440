"""Launchers found by torch's tensor guards, before the whole key of a call is made."""

import pytest
import torch

from cute_attn.host import launcher
from cute_attn.host.launcher import known_launcher, recall, remember

OPTIONS = ("some", 0.5, None)
LAUNCHERS = [object() for _ in range(8)]


@pytest.fixture(autouse=True)
def no_launchers(monkeypatch):
    monkeypatch.setattr(launcher, "_last", {})


def tensors(seqlen=5, **given):
    """A call's tensors, q to rng_state."""
    fields = {name: torch.randn(2, seqlen, 4, 8) for name in ("q", "k", "v")}
    fields |= dict.fromkeys(("cu_q", "cu_k", "used_q", "used_k", "slopes", "bias", "state"))
    return tuple((fields | given).values())


def seen(call, options=OPTIONS):
    found = recall(call, options)
    return found and found.launcher


def test_an_equal_call_finds_the_launcher():
    assert seen(tensors()) is None
    remember(tensors(), OPTIONS, LAUNCHERS[0])
    assert seen(tensors()) is LAUNCHERS[0]
    assert seen(tensors(), ("other",)) is None


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


OTHERS = {
    "shape": lambda: tensors(6),
    "dtype": lambda: tensors(q=torch.randn(2, 5, 4, 8).half()),
    "strides": lambda: tensors(v=torch.randn(2, 4, 5, 8).transpose(1, 2)),
    "gradient": lambda: tensors(k=torch.randn(2, 5, 4, 8).requires_grad_()),
    "parameter": lambda: tensors(k=torch.nn.Parameter(torch.randn(2, 5, 4, 8), False)),
    "subclass": lambda: tensors(k=torch.randn(2, 5, 4, 8).as_subclass(type("Own", (torch.Tensor,), {}))),
    "one more": lambda: tensors(state=torch.tensor([1, 2])),
    "no tensor": lambda: tensors(k=None),
    "a number": lambda: tensors(k=3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_different_call_finds_none(name):
    remember(tensors(), OPTIONS, LAUNCHERS[0])
    other = OTHERS[name]()
    assert seen(other) is None
    if name not in ("no tensor", "a number"):
        remember(other, OPTIONS, LAUNCHERS[1])
        assert seen(OTHERS[name]() if name != "subclass" else other) is LAUNCHERS[1]
        assert seen(tensors()) is LAUNCHERS[0]


def test_arguments_of_the_same_metadata_are_not_confused():
    for place, name in enumerate(("used_q", "used_k")):
        remember(tensors(**{name: lengths(3, 4)}), OPTIONS, LAUNCHERS[place])
    assert seen(tensors(used_q=lengths(1, 2))) is LAUNCHERS[0]
    assert seen(tensors(used_k=lengths(1, 2))) is LAUNCHERS[1]


def test_starts_may_be_the_same_tensor():
    starts, other = lengths(0, 5), lengths(0, 5)
    remember(tensors(cu_q=starts, cu_k=starts), OPTIONS, LAUNCHERS[0])
    remember(tensors(cu_q=starts, cu_k=other), OPTIONS, LAUNCHERS[1])
    assert seen(tensors(cu_q=other, cu_k=other)) is LAUNCHERS[0]
    assert seen(tensors(cu_q=other, cu_k=starts)) is LAUNCHERS[1]


def test_aliased_arguments_are_left_to_the_key():
    call = tensors()
    call = (*call[:2], call[1], *call[3:])
    remember(call, OPTIONS, LAUNCHERS[0])
    assert seen(call) is None


def test_the_biass_alignment_matters():
    storage = torch.randn(2 * 5 * 5 * 4 + 1)
    at = [storage[i : i + 200].view(2, 4, 5, 5) for i in (0, 1)]
    remember(tensors(bias=at[0]), OPTIONS, LAUNCHERS[0])
    assert seen(tensors(bias=at[1])) is None
    remember(tensors(bias=at[1]), OPTIONS, LAUNCHERS[1])
    assert [seen(tensors(bias=bias)) for bias in at] == LAUNCHERS[:2]


def test_requires_grad_is_recorded():
    remember(tensors(), OPTIONS, LAUNCHERS[0])
    assert recall(tensors(), OPTIONS).constant
    q = torch.randn(2, 5, 4, 8).requires_grad_()
    remember(tensors(q=q), OPTIONS, LAUNCHERS[0])
    assert not recall(tensors(q=q), OPTIONS).constant and recall(tensors(), OPTIONS).constant


def test_the_last_few_are_kept(monkeypatch):
    for n, kept in enumerate(LAUNCHERS):
        remember(tensors(n + 1), OPTIONS, kept)
    found = [seen(tensors(n + 1)) for n in range(8)]
    assert found == [None] * 4 + LAUNCHERS[4:]
    monkeypatch.setattr(launcher, "_MAX_LAUNCHERS", 3)
    for n in range(5):
        remember(tensors(), (n,), LAUNCHERS[n])
    assert len(launcher._last) <= 3


def test_without_guards_nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(launcher, "_tensor_guards", None)
    remember(tensors(), OPTIONS, LAUNCHERS[0])
    assert seen(tensors()) is None


def test_options_that_cannot_be_hashed():
    assert recall(tensors(), ([],)) is None and known_launcher(tensors(), ([],)) is None
