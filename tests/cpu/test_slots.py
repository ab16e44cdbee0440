"""Arguments of launching functions that are made once."""

import gc

import pytest
import torch
import tvm_ffi

from cute_attn.host import slots

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
