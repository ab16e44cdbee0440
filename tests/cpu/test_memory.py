"""Properties of tensors that kernels must respect: lazy views, overlaps, versions, rows that no sequence owns."""

import contextlib
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_attn.host import memory
from cute_attn.host.memory import all_plain, overlap, overlaps_itself
from cute_attn.host.record import overwritten
from tests.tensors import LAZY

LAZY = LAZY | {"conjugated": lambda x: torch.zeros(x.shape, dtype=torch.complex64).conj().imag}


def addresses(x):
    """Offset of every element in the tensor's storage."""
    places = [x.storage_offset()]
    for size, step in zip(x.shape, x.stride(), strict=True):
        places = [place + i * step for place in places for i in range(size)]
    return places


def strided(pick, storage):
    rank = pick.randint(1, 4)
    shape = [pick.randint(0 if pick.random() < 0.05 else 1, 4) for _ in range(rank)]
    strides = [pick.choice((0, 1, 2, 3, 4, 6, 8, 12, 24, 30, 60, 100)) for _ in range(rank)]
    return storage.as_strided(shape, strides, pick.randint(0, 200))


def test_overlaps_are_those_of_addresses():
    pick, storage = random.Random(0), torch.zeros(4000, dtype=torch.float16)
    found = [0, 0]
    for _ in range(3000):
        x, y = strided(pick, storage), strided(pick, storage)
        own, other = addresses(x), addresses(y)
        inside, between = len(set(own)) < len(own), not set(own).isdisjoint(other)
        assert overlaps_itself(x) == inside, (x.shape, x.stride())
        assert overlap(x, y) == between, (x.shape, x.stride(), y.shape, y.stride())
        found[0] += inside
        found[1] += between
    assert min(found) > 300


def test_elements_of_two_sizes_overlap_by_bytes():
    storage = torch.zeros(16, dtype=torch.int8)
    halves, words = storage[2:10].view(torch.float16), storage[8:].view(torch.float32)
    assert overlap(halves, words) and overlap(words, halves)
    assert not overlap(halves[:3], words) and not overlap(halves, storage[10:].view(torch.float16))


def test_parts_of_one_tensor_whose_rows_alternate_do_not_overlap():
    pages = torch.empty(50, 2, 16, 8, 128, dtype=torch.float16)
    fused = torch.empty(1000, 16, 8, 192, dtype=torch.float16)
    for k, v in (pages.unbind(1), fused.split([128, 64], -1)):
        assert not overlap(k, v) and not overlaps_itself(k)
    assert overlap(fused[..., :128], fused[..., 120:])
    assert not overlap(torch.zeros(3), torch.zeros(3))


def test_a_search_without_an_end_finds_nothing(monkeypatch):
    x = torch.zeros(4000).as_strided((20, 20, 20), (7, 11, 13))
    y = x.as_strided((20, 20, 20), (8, 12, 14), 1)
    assert overlap(x, y)
    monkeypatch.setattr(memory, "_MAX_TRIALS", 1)
    memory._overlap.cache_clear()
    assert not overlap(x, y)
    memory._overlap.cache_clear()


@pytest.mark.parametrize("name", LAZY)
def test_what_is_more_than_memory(name):
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert all_plain((x, None, torch.nn.Parameter(x)))
    assert not all_plain((x, LAZY[name](x))) and not all_plain(
        (x.as_subclass(type("Own", (torch.Tensor,), {})),)
    )


def test_fake_tensors_have_no_memory():
    """Neither have meta tensors, tensors of function transforms and traced tensors. Subclasses with storage have."""
    x, seen = torch.ones(2, 3), []
    with FakeTensorMode():
        fakes = [torch.ones(2, 3, device=device) for device in ("cpu", "cuda")]
    assert memory.has_memory(x) and memory.has_memory(x.as_subclass(type("Own", (torch.Tensor,), {})))
    assert not any(map(memory.has_memory, (*fakes, x.to("meta"), torch._to_functional_tensor(x))))
    torch.func.vmap(lambda y: seen.append(memory.has_memory(y)) or y)(x)
    torch.func.grad(lambda y: seen.append(memory.has_memory(y)) or y.sum())(x)
    torch.compile(lambda y: y + memory.has_memory(y), fullgraph=True, backend="eager")(x).equal(x)
    assert seen == [False, False]
    assert memory.may_be_aligned(fakes[1]) and not memory.may_be_aligned(torch.ones(3)[1:])


def test_launches_go_to_the_tensors_device(monkeypatch):
    entered = []
    monkeypatch.setattr(memory, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    for index in (1, 0, -1):  # -1 for the CPU
        with memory.on_device(index):
            pass
    assert entered == [0]


def test_overwritten_memory_is_told_to_autograd():
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        other = torch.ones(3)
    y = (x * weight).sum()
    overwritten(x, other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_rows_of_no_sequence_stay():
    some = torch.tensor([1, 3, 3, 4], dtype=torch.int32)
    for starts, owned in ((some, slice(1, 4)), (None, slice(None)), (some[:1], slice(0))):
        out, expected = torch.full((6, 2, 4), 7.0), torch.full((6, 2, 4), 7.0)
        expected[owned] = 3.0
        assert memory.write_owned(out, torch.full_like(out, 3.0), starts) is out and out.equal(expected)
        expected[owned] = 0.0
        assert memory.clear_owned(out, starts) is out and out.equal(expected)
