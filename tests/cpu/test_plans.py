"""Records found by torch's guards, and by the whole key of a call."""

import pytest
import torch
import tvm_ffi
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask

from cute_attn import attention, flash_attn, flex, transformers
from cute_attn.host import block_masks, plans, record
from tests import machine
from tests.tensors import int32

KEY = ("some", 0.5, None)
NUMBERS = [float(n) for n in range(12)]


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: None)


@tvm_ffi.convert
def fill(out, number):
    machine.as_torch(out).fill_(number)


def tensors(seqlen=5, **given):
    """A call's tensors, q to rng_state."""
    fields = {name: torch.randn(2, seqlen, 4, 8) for name in ("q", "k", "v")}
    fields |= dict.fromkeys(("cu_q", "cu_k", "used_q", "used_k", "slopes", "bias", "state"))
    return tuple((fields | given).values())


def seen(call, key=KEY):
    """The number that the call's record writes, or None."""
    found = plans.find(key, call)
    out = None if found is None else found[0].run(found[1])
    return None if out is None else out.item()


def guarded(call, key=KEY):
    """The result of a call that only its guards can find."""
    whole, plans._records = plans._records, {}
    try:
        return seen(call, key)
    finally:
        plans._records = whole


def learn(call, number, key=KEY):
    """Record a call that writes a number, as if it came for the second time."""

    def run():
        out = record.empty(call[0], (1,), (1,), torch.float32)
        record.launch(fill, out, number)
        return out

    for _ in range(2):
        assert plans.recorded(key, call, run).item() == number


@pytest.fixture(params=[True, False], ids=["guards", "keys"])
def keep(request, monkeypatch):
    """Record a call, to be found by guards or by keys."""
    if not request.param:
        monkeypatch.setattr(plans, "_guard", lambda *arguments: None)

    def keep(call, number, key=KEY):
        learn(call, number, key)
        assert seen(call, key) == number and (guarded(call, key) == number) == request.param

    return keep


def test_an_equal_call_finds_the_record(keep):
    assert seen(tensors()) is None
    keep(tensors(), NUMBERS[0])
    assert seen(tensors()) == NUMBERS[0]
    assert seen(tensors(), ("other",)) is None


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
    "nested": lambda: tensors(q=torch.nested.nested_tensor([torch.randn(5, 4, 8)] * 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_different_call_finds_none(keep, name):
    keep(tensors(), NUMBERS[0])
    other = OTHERS[name]()
    assert seen(other) is None
    if name not in ("subclass", "negative view", "no tensor", "a number", "nested"):
        keep(other, NUMBERS[1])
        assert seen(OTHERS[name]()) == NUMBERS[1]
        assert seen(tensors()) == NUMBERS[0]


def test_tensors_that_are_more_than_memory_have_no_plan():
    for name in ("subclass", "negative view"):
        call = OTHERS[name]()
        learn(call, NUMBERS[0])
        assert seen(call) is None, name


def test_arguments_of_the_same_metadata_are_not_confused(keep):
    for place, name in enumerate(("used_q", "used_k")):
        keep(tensors(**{name: int32(3, 4)}), NUMBERS[place])
    assert seen(tensors(used_q=int32(1, 2))) == NUMBERS[0]
    assert seen(tensors(used_k=int32(1, 2))) == NUMBERS[1]


def test_one_tensor_may_be_two_arguments(keep):
    starts, other = int32(0, 5), int32(0, 5)
    keep(tensors(cu_q=starts, cu_k=starts), NUMBERS[0])
    assert seen(tensors(cu_q=other, cu_k=other)) == NUMBERS[0]
    assert seen(tensors(cu_q=other, cu_k=starts)) is None, "the record's launch got one address"
    assert seen(tensors(cu_q=other, cu_k=int32(0, 5, 7))) is None
    assert seen(tensors(cu_q=starts, cu_k=starts.long())) is None


def test_whether_a_gradient_is_required_is_known(keep):
    keep(tensors(), NUMBERS[0])
    assert plans.find(KEY, tensors())[0].constant
    q = torch.randn(2, 5, 4, 8).requires_grad_()
    assert plans.find(KEY, tensors(q=q)) is None
    learn(tensors(q=q), NUMBERS[1])
    assert not plans.find(KEY, tensors(q=q))[0].constant and plans.find(KEY, tensors())[0].constant


def test_guards_of_the_last_few_calls_are_kept(monkeypatch):
    for n, kept in enumerate(NUMBERS):
        learn(tensors(n + 1), kept)
        assert seen(tensors(n + 1)) == kept
    assert [guarded(tensors(n + 1)) for n in range(12)] == [None] * 4 + NUMBERS[4:]
    assert [seen(tensors(n + 1)) for n in range(12)] == NUMBERS
    monkeypatch.setattr(plans, "_MOST", 3)
    for n in range(5):
        learn(tensors(), NUMBERS[n], (n,))
        seen(tensors(), (n,))
        plans.plan((n,), tensors(), list)
    assert all(0 < len(kept) <= 3 for kept in (plans._plans, plans._records, plans._guarded))


def test_keys_that_cannot_be_hashed():
    assert plans.find(([],), tensors()) is None
    made = object()
    assert plans.plan(([],), tensors(), lambda: made) is made and not plans._plans
    learn(tensors(), NUMBERS[0], ([],))
    assert not plans._records


def test_a_plan_is_made_once():
    made = [plans.plan(KEY, tensors(n), object) for n in (5, 5, 6, 5)]
    assert made[0] is made[1] is made[3] is not made[2]


def test_a_call_within_a_recorded_one_is_part_of_it():
    """A nested call is neither looked up nor recorded separately."""
    inner, outer = tensors(), tensors(7)

    def call():
        plans.repeat(("inner",), inner, lambda: learn(inner, 2.0, ("innermost",)) or torch.zeros(1))
        out = record.empty(outer[0], (1,), (1,), torch.float32)
        record.launch(fill, out, 3.0)
        return out

    for _ in range(3):
        assert plans.repeat(KEY, outer, call).item() == 3.0
    assert seen(outer) == 3.0 and seen(inner, ("inner",)) is None


def test_what_functions_read_is_compared():
    """A new function with equal values is known; with another value or other code it is not. Tensors may differ."""

    def made(number, table):
        return lambda score, b, h, i, j: score * number + table[j]

    call, runs = tensors(), []

    def attend(function):
        def run():
            runs.append(function)
            out = record.empty(call[0], (1,), (1,), torch.float32)
            record.launch(fill, out, function(1.0, 0, 0, 0, 0).item())
            return out

        return plans.repeat(KEY, call, run, ((function,), None)).item()

    for _ in range(3):
        attend(made(2.0, torch.tensor([5.0])))
    assert len(runs) == 2
    assert attend(made(2.0, torch.tensor([5.0]))) == 7.0 and len(runs) == 2
    assert attend(made(3.0, torch.tensor([5.0]))) == 8.0 and len(runs) == 3
    assert attend(lambda score, b, h, i, j: score * 2.0 + torch.tensor(9.0)) == 11.0 and len(runs) == 4
    assert attend(made(2.0, torch.ones(1).double())) == 3.0 and len(runs) == 5


DOORS = {
    "attention": attention,
    "flash_attn": flash_attn.flash_attn_func,
    "flex": flex.flex_attention,
    "transformers": lambda *x: transformers.attention_forward(torch.nn.Module(), *x, None),
}


def given_to(door, q, k, v):
    """A door's tensors, of rows before heads."""
    return [x.transpose(1, 2) if door in ("flex", "transformers") else x for x in (q, k, v)]


@pytest.mark.parametrize("door", ["attention", "flash_attn", "flex"])
def test_the_precision_of_fp32_is_that_of_each_call(door, monkeypatch):
    """The same holds at outermost doors that have no argument for the precision."""
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel.traits.precision))
    given, flags = given_to(door, *[torch.randn(2, 64, 4, 64)] * 3), torch.backends.cuda.matmul
    before = flags.allow_tf32
    try:
        for allowed in (False, True, False):
            flags.allow_tf32 = allowed
            for _ in range(4):
                launched.clear()
                DOORS[door](*given)
                assert set(launched) == {"tf32" if allowed else ""}
    finally:
        flags.allow_tf32 = before


# ---- calls of the doors, recorded, and what then differs ----


def randn(*shape, grad=False):
    return torch.randn(shape).bfloat16().requires_grad_(grad)


@pytest.fixture
def launches(monkeypatch):
    """The kernels that calls launch, which records repeat."""
    found = []

    def launched(kernel, target):
        return lambda given: found.append(kernel.traits)

    machine.kernels(monkeypatch, launched, prepared=True)
    return found


@pytest.fixture
def recordings(monkeypatch):
    """The calls that were recorded, rather than repeated from a record."""
    found, record_call = [], plans._record

    def noted(*arguments):
        found.append(arguments[0])
        return record_call(*arguments)

    monkeypatch.setattr(plans, "_record", noted)
    return found


def scaled(number):
    return lambda score, b, h, q_idx, kv_idx: score * number


def test_a_record_without_gradients_is_none_of_a_call_with_some(launches):
    q, k, v, slopes = *(randn(2, 128, 4, 64) for _ in range(3)), torch.rand(4, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        attention(q, k, v, alibi_slopes=slopes)


def test_a_record_without_gradients_of_a_given_output(launches):
    """The call's metadata equals the metadata of a call with gradients enabled and none required."""
    (q, k, v), out = (randn(2, 128, 4, 64) for _ in range(3)), randn(2, 128, 4, 64)
    with torch.no_grad():
        for _ in range(3):
            attention(q.clone().requires_grad_(), k, v, out=out)
    for _ in range(3):
        assert attention(q, k, v, out=out) is out
    assert len(launches) == 6


@pytest.mark.parametrize("door", DOORS)
def test_a_tangent_is_followed_after_a_record(door, launches):
    call, given = DOORS[door], given_to(door, *(randn(2, 128, 4, 64) for _ in range(3)))
    for _ in range(3):
        call(*given)
    assert len(launches) == 3
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        found = call(dual, *given[1:])
        out, dot = forward_ad.unpack_dual(found[0] if isinstance(found, tuple) else found)
    assert len(launches) == 3  # the tensors' operator, in memory of the CPU, is the definition
    assert dot.shape == out.shape and dot.abs().max() > 0


def test_a_function_of_one_tensor_is_recorded_once(launches, recordings):
    q, function = randn(2, 128, 4, 64), scaled(0.5)
    for _ in range(5):
        attention(q, q, q, score_mod=function)
    assert len(recordings) == 1


def test_a_capture_is_no_record(launches, recordings, monkeypatch):
    q, k, v = (randn(2, 128, 4, 64) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    attention(q, k, v, block_mask=mask)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(block_masks, "_capture", lambda x: 7)
        attention(q, k, v, block_mask=mask)
    assert not recordings
    for _ in range(4):
        attention(q, k, v, block_mask=mask)
    assert len(recordings) == 1


def test_an_argument_too_many_is_refused_after_a_call_that_is_known():
    tensors = [torch.randn(2, 64, 4, 64).bfloat16() for _ in range(3)]
    # All of flash_attn_func's arguments.
    call = (*tensors, 0.0, None, True, (-1, -1), 0.0, None, False, False)
    for _ in range(3):
        flash_attn.flash_attn_func(*call)
    with pytest.raises(TypeError, match="too many positional arguments"):
        flash_attn.flash_attn_func(*call, "one more")
