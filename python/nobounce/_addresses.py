"""Where the bytes of Python objects are: DLPack, the CUDA array interface, the buffer protocol. Nothing is copied."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from .errors import ListError

# Device types of DLPack.
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13


class Bytes(NamedTuple):
    """An address, a length, whether it is memory of a GPU and read-only, and what keeps it alive."""

    address: int
    nbytes: int
    is_gpu: bool
    is_read_only: bool
    owner: object


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def bytes_of(memory: Any) -> Bytes:
    """The bytes of an array, tensor or buffer; ListError says why they cannot be used in place."""
    if hasattr(memory, "__cuda_array_interface__"):
        return _of_cuda(memory)
    if hasattr(memory, "__dlpack__") and not hasattr(memory, "__array_interface__"):
        return _of_dlpack(memory)
    return _of_buffer(memory)


def _check_strides(memory: object, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    """Strides in the unit of the expected ones: items, here."""
    if strides is None or 0 in shape:
        return
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            raise ListError(f"{_kind(memory)} of shape {shape} is not contiguous (strides {strides} in items): pass a contiguous array, or its base and offsets")
        expected *= size


def _kind(memory: object) -> str:
    return f"{type(memory).__module__}.{type(memory).__qualname__}"


def _of_cuda(memory: Any) -> Bytes:
    described = memory.__cuda_array_interface__
    shape, item = tuple(described["shape"]), int(described["typestr"][2:])
    strides = described.get("strides")
    if strides is not None:
        strides = tuple(stride / item for stride in strides)
    _check_strides(memory, shape, strides)
    address, is_read_only = described["data"]
    # A tensor of torch may be given other storage while it lives.
    storage = memory.untyped_storage() if hasattr(memory, "untyped_storage") else None
    return Bytes(address or 0, math.prod(shape) * item, True, bool(is_read_only), (memory, storage))


def _of_dlpack(memory: Any) -> Bytes:
    device, _ = memory.__dlpack_device__()
    if device not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
        raise ListError(f"{_kind(memory)} is on a device that nobounce does not know (DLPack device type {device}): host and CUDA memory can be used")
    # A stream of -1 asks for no synchronisation: `after` orders transfers behind work of the GPU.
    capsule = memory.__dlpack__() if device == _CPU else memory.__dlpack__(stream=-1)
    tensor = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
    strides = tuple(tensor.strides[at] for at in range(tensor.ndim)) if tensor.strides else None
    _check_strides(memory, shape, strides)
    nbytes = math.prod(shape) * ((tensor.bits * tensor.lanes + 7) // 8)
    held = _fixed_storage(memory) if device == _CPU else None
    return Bytes((tensor.data or 0) + tensor.byte_offset, nbytes, device == _CUDA, _is_jax(memory), (memory, capsule, held))


def _fixed_storage(memory: Any) -> object:
    """The storage of a CPU tensor of torch, as an array of numpy: torch does not resize it any more, while the NIC writes there."""
    if not hasattr(memory, "untyped_storage"):
        return None
    import torch
    storage = memory.untyped_storage()
    try:
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    except RuntimeError:  # torch was built for another numpy, or there is none
        return storage


def _is_jax(memory: object) -> bool:
    """Whether it is an array of jax: those never change, and DLPack does not say so."""
    return type(memory).__module__.startswith(("jax", "jaxlib"))


def _of_buffer(memory: Any) -> Bytes:
    try:
        view = memoryview(memory)
    except ValueError:  # a type of numpy's that buffers do not know
        if not memory.flags.c_contiguous:
            raise ListError(f"{_kind(memory)} of shape {memory.shape} is not contiguous: pass a contiguous array, or its base and offsets") from None
        return _of_buffer(memory.reshape(-1).view("u1"))
    except TypeError:
        raise ListError(f"{_kind(memory)} has no bytes to register: expected an array with __dlpack__ or __cuda_array_interface__, or a buffer") from None
    if not view.c_contiguous:
        raise ListError(f"{_kind(memory)} of shape {view.shape} is not contiguous (strides {view.strides} in bytes): pass a contiguous array, or its base and offsets")
    if view.nbytes == 0:
        return Bytes(0, 0, False, view.readonly, memory)
    if view.readonly:
        return Bytes(_address_of(view), view.nbytes, False, True, (memory, view))
    # Holds the buffer as long as it lives.
    held = ctypes.c_char.from_buffer(view)
    return Bytes(ctypes.addressof(held), view.nbytes, False, False, (memory, held))


class _Buffer(ctypes.Structure):
    """The first fields of Py_buffer, and room for the others."""

    _fields_ = [("buf", ctypes.c_void_p), ("others", ctypes.c_byte * 256)]


def _address_of(view: memoryview) -> int:
    """Of a read-only buffer, which ctypes gives no address of. The view holds it."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    address = found.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return int(address)
