"""Calls that are recorded and repeated from their record, by functions of TVM FFI on CPU tensors."""

import gc
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import tvm_ffi

from cute_attn.compiler import registry
from cute_attn.host import memory, padding, record, slots
from cute_attn.host.record import Recording
from cute_attn.traits import Traits
from tests import machine
from tests.padded_rows import copy_rows


def kernel(function):
    """A kernel's launching function of TVM FFI, which accepts slots."""
    return tvm_ffi.convert(lambda *arguments: function(*map(machine.as_torch, arguments)))


def copying(traits):
    """The padding copies."""
    return machine.compiled(registry.lookup(traits), partial(copy_rows, traits), prepared=True)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    machine.device(monkeypatch, schedule=tvm_ffi.convert((7,)))


@kernel
def scale_and_add(x, more, out, numbers):
    """``more``: (tensor or None, factor)."""
    out.copy_(x * numbers[0])
    if more[0] is not None:
        out.add_(more[0] * more[1])


def call(x, y, function=scale_and_add):
    """(2x + 3y transposed, 2x)."""
    out = record.empty(x, (4, 5), (5, 1), x.dtype)
    second = record.empty(x, (4, 5), (5, 1), x.dtype)
    record.launch(function, x, (y.t(), 3.0), out, (2.0,))
    record.launch(function, x, (None, 0.0), second, (2.0,))
    return out.t(), second


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randn(5, 4, generator=generator)


class Calls:
    """Repeated calls, and how many ran step by step."""

    def __init__(self, call=call, users=0):
        self.record, self.tried, self.in_steps, self.call, self.users = None, False, 0, call, users

    def __call__(self, *tensors):
        found = None if self.record is None else self.record.run(tensors)
        if found is not None:
            return found
        self.in_steps += 1
        if self.tried:
            return self.call(*tensors)
        with Recording(tensors, self.users) as recording:
            found = self.call(*tensors)
        self.record, self.tried = recording.record(found), not recording.unlike
        return found


def check(found, x, y):
    torch.testing.assert_close(found[0], (2 * x + 3 * y.t()).t())
    torch.testing.assert_close(found[1], 2 * x)


def steps_of(run, expected):
    """How many of three calls ran step by step; all have the results that are expected of their inputs."""
    calls = Calls(run)
    for seed in range(3):
        x, y = inputs(seed)
        for found, right in zip(calls(x, y), expected(*inputs(seed)), strict=True):
            torch.testing.assert_close(found, right)
    return calls.in_steps


def test_a_repeated_call_launches_on_torchs_stream(monkeypatch):
    """The stream that was set before is set again afterwards."""
    seen, stream = [], partial(tvm_ffi.core._env_get_current_stream, slots.CUDA, 0)

    def run(x):
        out = record.contiguous(x, (4, 5))
        record.launch(tvm_ffi.convert(lambda *given: seen.append(stream())), x, out)
        return out

    calls = Calls(run)
    calls(inputs(0)[0])
    monkeypatch.setattr(memory, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    replace(calls.record, device=0).run(inputs(1)[:1])
    assert seen == [0, 7] and stream() == 0


def test_a_result_is_allocated_in_the_layout_that_is_returned():
    calls = Calls()
    results = [calls(*inputs(seed))[0] for seed in range(2)]
    assert results[0]._base is not None and results[1]._base is None


def test_parts_of_one_allocation_are_results():
    def parts(x, y):
        whole = record.empty(x, (2, 4, 5), (20, 5, 1), x.dtype)
        record.launch(scale_and_add, x, (y.t(), 1.0), whole[0], (1.0,))
        record.launch(scale_and_add, x, (y.t(), 2.0), whole[1], (1.0,))
        return whole[1], 7, whole[0]

    assert steps_of(parts, lambda x, y: (x + 2 * y.t(), 7, x + y.t())) == 1
    calls = Calls(parts)
    second, _, first = [calls(*inputs(seed)) for seed in range(2)][1]
    assert first.data_ptr() + 80 == second.data_ptr()


@pytest.mark.parametrize("recorded", [0, 1], ids=["aligned", "unaligned"])
def test_only_tensors_that_kernels_read_in_place_have_to_be_aligned(recorded):
    """A tensor that padding copies may start at any address, and so may lengths, whatever the recorded call had."""
    pad = copying(Traits("forward_pad", "sm80", "fp32", 5, 8))

    @kernel
    def add(x, y, lengths, out):
        out.copy_((x + y) * lengths.view(4, 1, 1))

    def padded(x, y, lengths):
        out = record.empty(x, (4, 1, 8), (8, 8, 1), x.dtype)
        copy, own, _ = padding.pad(pad, (x, y, y), (True, False, False))
        record.launch(add, copy, own, lengths, out)
        return (out,)

    calls = Calls(padded)
    words, numbers, y = torch.randn(24), torch.arange(8, dtype=torch.int32), torch.randn(4, 1, 8)
    assert words.data_ptr() % 16 == numbers.data_ptr() % 16 == y.data_ptr() % 16 == 0
    for first in (recorded, 1 - recorded, 2, 0):
        x, lengths = words[first : first + 20].view(4, 1, 5), numbers[first : first + 4]
        (found,) = calls(x, y, lengths)
        expected = (torch.nn.functional.pad(x, (0, 3)) + y) * lengths.view(4, 1, 1)
        torch.testing.assert_close(found, expected)
    assert calls.in_steps == 1
    shifted = torch.randn(33)[1:].view(4, 1, 8)
    calls(words[:20].view(4, 1, 5), shifted, numbers[:4])
    assert calls.in_steps == 2, "a kernel that reads it where it is assumes its address"


@pytest.mark.parametrize(("users", "in_steps"), [(0, 1), (1, 2)])
def test_integers_of_users_have_to_be_aligned_as_recorded(users, in_steps):
    """A user's epilogue may read several at once, such as a mask's words, and a record's launch checks no address."""

    @kernel
    def add(x, words, out):
        out.copy_(x + words)

    def step(x, words):
        out = record.empty(x, (4,), (1,), x.dtype)
        record.launch(add, x, words, out)
        return (out,)

    calls, x = Calls(step, users), torch.randn(4)
    numbers = torch.arange(8, dtype=torch.int32)
    for first in (0, 1):
        words = numbers[first : first + 4]
        (found,) = calls(x, words)
        torch.testing.assert_close(found, x + words)
    assert calls.in_steps == in_steps


def test_one_tensor_as_two_arguments_is_no_record_of_two():
    def add(x, y):
        out = record.empty(x, (4, 5), (5, 1), x.dtype)
        record.launch(scale_and_add, x, (y, 1.0), out, (1.0,))
        return (out,)

    calls = Calls(add)
    for first, second in ((0, 0), (1, 2), (3, 3), (4, 5)):
        x = inputs(first)[0]
        y = x if first == second else inputs(second)[0]
        assert torch.equal(calls(x, y)[0], x + y)
    assert calls.in_steps == 3  # one was like the first


def test_views_of_tensors_with_one_memory_are_not_recorded():
    def rows(x, y):
        out = record.empty(x, (3, 5), (5, 1), x.dtype)
        record.launch(scale_and_add, x[1:], (y[1:], 1.0), out, (1.0,))
        return (out,)

    calls = Calls(rows)
    both = torch.randn(8, 5)
    for x, y in (both.split(4), (torch.randn(4, 5), torch.randn(4, 5))):
        torch.testing.assert_close(calls(x, y)[0], x[1:] + y[1:])
    assert calls.in_steps == 2


def test_a_tensor_that_starts_elsewhere_is_no_repeat():
    calls, storage = Calls(), torch.randn(21)
    x, y = inputs(0)
    check(calls(x, y), x, y)
    shifted = storage[1:].view(4, 5)
    assert shifted.data_ptr() % 16
    check(calls(shifted, y), shifted, y)
    assert calls.in_steps == 2
    check(calls(x, y), x, y)
    assert calls.in_steps == 2


@pytest.mark.parametrize(
    "kind", ["python", "more", "unknown", "dtype", "copied result", "given result", "nothing"]
)
def test_what_a_record_would_lack_runs_in_steps(kind):
    def odd(x, y):
        if kind == "more":
            record.also()
        function = (lambda *a: scale_and_add(*a)) if kind == "python" else scale_and_add
        given = y.t().clone() if kind == "unknown" else y.t()
        given = given.double() if kind == "dtype" else given
        out = record.empty(x, (4, 5), (5, 1), x.dtype)
        if kind == "nothing":
            return (out.copy_(x * 2 + 3 * given),)
        record.launch(function, x, (given, 3.0), out, (2.0,))
        if kind == "given result":
            return (y.t().copy_(out),)
        return (out.clone() if kind == "copied result" else out,)

    assert steps_of(odd, lambda x, y: (2 * x + 3 * y.t(),)) == 3


def test_a_call_unlike_others_leaves_the_record_to_another():
    odd = [True]

    def run(x, y):
        if odd.pop() if odd else False:
            record.unlike_others()
        return call(x, y)

    calls = Calls(run)
    for seed in range(4):
        check(calls(*inputs(seed)), *inputs(seed))
    assert calls.in_steps == 2


def test_work_tiles_are_those_of_the_moment(monkeypatch):
    seen = []

    @kernel
    def note(x, tiles, out):
        seen.append(tuple(tiles))

    def run(x, y):
        out = record.empty(x, (1,), (1,), x.dtype)
        record.launch(note, x, record.work_tiles(-1), out)
        return (out,)

    calls = Calls(run)
    for number in (1, 2, 3):
        machine.device(monkeypatch, schedule=tvm_ffi.convert((number,)))
        calls(*inputs(0))
    assert seen == [(1,), (2,), (3,)] and calls.in_steps == 1


def test_a_record_keeps_no_tensor():
    calls = Calls()
    references = []
    for seed in range(3):
        x, y = inputs(seed)
        found = calls(x, y)
        references += map(weakref.ref, (x, y, *found))
        del x, y, found
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_concurrent_calls_have_separate_arguments():
    """A launching function runs without the interpreter's lock, so other threads' calls may run in between."""
    calls, inside, results = Calls(), threading.Event(), {}
    go_on = threading.Event()

    @kernel
    def slow(x, more, out, numbers):
        if threading.current_thread().name == "slow" and not inside.is_set():
            inside.set()
            go_on.wait(10)
        out.copy_(x * numbers[0])
        if more[0] is not None:
            out.add_(more[0] * more[1])

    calls.call = lambda x, y: call(x, y, slow)
    calls(*inputs(0))
    thread = threading.Thread(target=lambda: results.update(slow=calls(*inputs(1))), name="slow")
    thread.start()
    assert inside.wait(10)
    check(calls(*inputs(2)), *inputs(2))
    go_on.set()
    thread.join()
    check(results["slow"], *inputs(1))
    assert calls.in_steps == 1


def test_what_is_written_of_the_given_tensors():
    """Versions rise, and tensors that overlap by now are another call."""

    def run(x, out):
        record.launch(scale_and_add, x, (None, 0.0), out, (2.0,))
        record.overwritten(out, alone=True)
        return out

    calls, whole = Calls(run), torch.zeros(8, 5)
    for _ in range(3):
        x, out = inputs(0)[0], torch.zeros(4, 5)
        version = out._version
        assert calls(x, out) is out and out._version == version + 1
        torch.testing.assert_close(out, 2 * x)
    assert calls.in_steps == 1
    calls(whole[:4], whole[4:])
    assert calls.in_steps == 1, "one memory, but apart"
    calls(whole[:4], whole[2:6])
    assert calls.in_steps == 2


def test_what_changes_a_given_tensor_unseen_is_no_record():
    def run(x, y):
        y.add_(1.0)
        return call(x, y)

    assert steps_of(run, lambda x, y: ((2 * x + 3 * (y + 1).t()).t(), 2 * x)) == 3


@pytest.mark.parametrize("in_a_list", [False, True])
def test_results_in_a_list_are_no_record(in_a_list):
    """An operator may return gradients as a list of tensors. An empty list is made anew in each call."""

    def run(x, y):
        out = record.empty(x, (4, 5), (5, 1), x.dtype)
        record.launch(scale_and_add, x, (y.t(), 3.0), out, (2.0,))
        return out, [out] if in_a_list else []

    calls = Calls(run)
    found = [calls(*inputs(seed)) for seed in range(3)]
    assert calls.in_steps == (3 if in_a_list else 1)
    assert found[1][1] is not found[2][1] and len(found[2][1]) == in_a_list


def test_counts_are_those_of_each_call():
    from cute_attn.host.doors import Served

    served = Served()

    def run(x, y):
        served.add("door")
        return call(x, y)

    assert steps_of(run, call) == 1 and served == {("door", ""): 3}


# ---- arguments that are made once ----

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "strides"), [((3,), (1,)), ((2, 5, 4), (40, 8, 1)), ((2, 4, 5), (40, 1, 8)), ((2, 6), (0, 1))]
)
def test_a_slot_shows_the_memory_at_its_address(shape, strides, dtype):
    one = slots.slot(shape, strides, dtype, CPU)
    for start in (0, 100):
        memory = torch.arange(start, start + 100).to(dtype)
        one.address.value = memory.data_ptr()
        seen = torch.from_dlpack(one.tensor)
        assert seen.dtype == dtype and (seen.shape, seen.stride()) == (shape, strides)
        assert torch.equal(seen, memory.as_strided(shape, strides))


def test_a_slot_on_a_gpu():
    one = slots.slot((2, 8), (8, 1), torch.bfloat16, torch.device("cuda", 3))
    assert one.tensor.__dlpack_device__() == (2, 3)


def test_an_array_keeps_its_slots_tensors():
    one = slots.slot((2,), (1,), torch.int64, CPU)
    found = slots.array((None, 3, 0.5, (one.tensor, ())))
    address = one.address
    assert [found[0], found[1], found[2]] == [None, 3, 0.5] and len(found[3][1]) == 0
    assert list(slots.array(found)[:3]) == [None, 3, 0.5]
    memory = torch.tensor([5, 6])
    address.value = memory.data_ptr()
    del one
    gc.collect()
    assert torch.from_dlpack(found[3][0]).tolist() == [5, 6]


def test_which_functions_take_slots():
    assert slots.takes_slots(tvm_ffi.convert(lambda: None))
    assert not slots.takes_slots(print) and not slots.takes_slots(None)


def test_another_layout_of_tvm_ffis_tensors_is_refused(monkeypatch):
    monkeypatch.setattr(slots, "_HEADER_BYTES", slots._HEADER_BYTES + 8)
    with pytest.raises(RuntimeError, match="keeps a tensor's address elsewhere"):
        slots.slot((1,), (1,), torch.int64, CPU)
