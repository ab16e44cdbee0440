"""Arguments of launch functions that are made once. A call sets only the addresses of their tensors.

TVM FFI converts each torch tensor argument of a function to a DLPack tensor, and each tuple to an array. If shapes and
strides are known beforehand, the converted arguments are kept, and no view is needed of a tensor that a kernel reads
with other strides. Sources: ``DLManagedTensor`` of dlpack.h; for the location of the address in a TVM FFI tensor,
``TVMFFITensorGetDLTensorPtr`` of tvm/ffi/c_api.h.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm_ffi

TYPES = {  # DLDataType: code and bits
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
CUDA = 2
_DEVICES = {"cpu": 1, "cuda": CUDA}  # DLDeviceType
_HEADER_BYTES = 24  # of a TVMFFIObject; a DLTensor follows it


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor. Its first field is the address; sizes and strides follow the struct in the same allocation."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


_libc = ctypes.CDLL(None)
_malloc = _libc.malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor argument of a kernel, a ``tvm_ffi.Tensor``, whose address each call sets before it passes it on."""

    tensor: Any
    address: ctypes.c_uint64


def slot(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Slot:
    """A :class:`Slot` for tensors of this metadata. device: a device with an index."""
    ndim, size = len(shape), ctypes.sizeof(_ManagedTensor)
    memory = _malloc(size + 16 * ndim)
    if memory is None:
        raise MemoryError
    own = _ManagedTensor(
        memory,  # until a call sets it
        _DEVICES[device.type],
        device.index or 0,
        ndim,
        *TYPES[dtype],
        1,
        memory + size,
        memory + size + 8 * ndim,
        0,
        None,
        _FREE,  # called when the last reference to the tensor is dropped, perhaps an array's
    )
    ctypes.memmove(memory, bytes(own) + struct.pack(f"{2 * ndim}q", *shape, *strides), size + 16 * ndim)
    tensor = tvm_ffi.from_dlpack(_new_capsule(memory, _CAPSULE, None))
    address = ctypes.c_uint64.from_address(tensor.__chandle__() + _HEADER_BYTES)
    if address.value != memory:
        raise RuntimeError(
            f"tvm_ffi {tvm_ffi.__version__} keeps a tensor's address elsewhere; accepted: 0.1.12"
        )
    return Slot(tensor, address)


_CAPSULE = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)


def takes_slots(function: Any) -> bool:
    """True for TVM FFI's functions; other functions accept only torch tensors."""
    return isinstance(function, tvm_ffi.Function)


def array(values: Any) -> Any:
    """A tuple of None, numbers, slots' tensors and tuples of them, converted once: TVM FFI would do so at each call."""
    return tvm_ffi.convert(values)


set_stream: Callable[[int, int, int], int] = tvm_ffi.core._env_set_current_stream
"""Set the stream on which functions launch, by type and index of its device. Returns the stream set before."""
