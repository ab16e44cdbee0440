"""What holds at every door, by the definition and where CPU tensors go the way of a GPU's."""

import pytest
import torch

from cute_attn import sdpa
from cute_attn.host.activation import Options
from tests import machine
from tests.doors import DOORS, EMPTY, OPERATORS, Sizes, given, leaves, results

LEARNING = [name for name, door in DOORS.items() if leaves(door.inputs(Sizes()))]
DECLINED = "none of them 0"


class Launches:
    """Stands for the kernels: notes their names, and what numbers each was given."""

    def __init__(self):
        self.seen = []

    def kernel(self, kernel, target):
        def run(*arguments):
            self.seen.append((type(kernel).__name__, *map(_digest, machine.as_torch(arguments))))

        return run

    def of_backwards(self):
        return [one for one in self.seen if one[0].startswith("Backward")]


def _digest(x):
    if isinstance(x, tuple):
        return tuple(map(_digest, x))
    return x.double().nan_to_num().sum().item() if isinstance(x, torch.Tensor) else None


@pytest.fixture
def launches(monkeypatch):
    """Calls go the way of a GPU's, with NaN in new memory."""
    found = Launches()
    machine.gpu(monkeypatch, found.kernel)
    machine.poison(monkeypatch)
    activation = sdpa.Activation(Options(unsupported="error"), "CPU")
    yield found
    activation.remove()


def gradients(outputs, inputs):
    """Of what is learnt, for random gradients of all outputs that have one, equal in each call."""
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
    """What ``evidence`` says of the gradients after ``target`` has changed; None where torch refuses them.

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


# ---- nothing to attend ----


def call_of(door, sizes):
    """Results and gradients, for half-precision inputs."""
    torch.manual_seed(0)
    inputs = given(door.inputs(sizes), "cpu", torch.bfloat16)
    found = results(door.call(**inputs))
    return found, gradients(found, inputs) if leaves(inputs) else ()


def check_nothing(door, sizes, wanted, found):
    for own, other in zip(wanted, found, strict=True):
        for x, y in zip(own, other, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            torch.testing.assert_close(x, y)
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
    assert not [one for one in launches.seen if one[0] not in ("ListVisits", "AppendKv")]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("what", EMPTY)
def test_pytorchs_operators_are_served_for_nothing(launches, what, name):
    """Where there is no sequence, PyTorch's cuDNN attention returns None."""
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
    lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        **inputs, attn_bias=None, compute_log_sumexp=True
    )[1]
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
