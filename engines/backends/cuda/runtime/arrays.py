"""Arrays of other libraries in GPU memory (torch, cupy, pycuda, numba, jax), used without a copy.

    tensor = device_tensor(array, stream)       # by __cuda_array_interface__, else by DLPack
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.plan.plan import TensorView

_VERSION, _READ_ONLY = (1, 0), 1        # DLPack's version, and its flag for read-only arrays
_ON_CUDA = (2, 13)                      # kDLCUDA, kDLCUDAManaged
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}      # DLPack's


@dataclass(frozen=True)
class DeviceTensor:
    """C-contiguous tensor in GPU memory."""
    address: int
    shape: tuple[int, ...]
    dtype: str                  # NumPy's name, or bfloat16
    owner: Any                  # keeps the memory alive
    stream: int | None = None   # to synchronise with before the tensor is read
    read_only: bool = False


class NotOnDevice(Exception):
    """The array cannot be used without a copy; the message says why."""


def device_tensor(array: Any, stream: int) -> DeviceTensor:
    """Return a view of an array in GPU memory.

    Parameters
    ----------
    array : object
        Array with __cuda_array_interface__ or __dlpack__.
    stream : int
        Our CUDA stream; a DLPack exporter makes it wait for its own pending work.

    Raises
    ------
    NotOnDevice
        The array is not on a GPU, is not C-contiguous, or its library does not export it.
    """
    found = _query(lambda: getattr(array, "__cuda_array_interface__", None))
    by_dlpack = hasattr(array, "__dlpack__")
    if found is not None and not (by_dlpack and np.dtype(found["typestr"]).kind == "V"):    # bfloat16 has no typestr
        return _by_interface(array, found)
    if by_dlpack and _query(array.__dlpack_device__)[0] in _ON_CUDA:
        return _by_dlpack(_query(lambda: _exported(array, stream)))
    raise NotOnDevice("it is in host memory, or has neither __cuda_array_interface__ nor __dlpack__")


def _query(what: Callable[[], Any]) -> Any:
    """Call into the array's library, and turn its error (for example "requires grad") into NotOnDevice."""
    try:
        return what()
    except Exception as error:
        raise NotOnDevice(f"its library does not export it: {error}") from error


def _by_interface(array: Any, interface: dict[str, Any]) -> DeviceTensor:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    _check_dense(shape, interface.get("strides"), dtype.itemsize)
    if interface.get("mask") is not None:
        raise NotOnDevice("it has a mask")
    address, read_only = interface["data"]
    return DeviceTensor(address, shape, dtype.name, array, interface.get("stream"), bool(read_only))


# ---- DLPack
def _exported(array: Any, stream: int) -> Any:
    """Export by DLPack, in the versioned form with the read-only flag if the library supports it."""
    try:
        return array.__dlpack__(stream=stream, max_version=_VERSION)
    except TypeError:           # library older than DLPack 1.0
        return array.__dlpack__(stream=stream)


def _by_dlpack(capsule: Any) -> DeviceTensor:
    """Return the tensor of a capsule, which is kept because it frees the memory when it is collected."""
    read_only = False
    if _is_capsule(capsule, b"dltensor_versioned"):
        managed = ctypes.cast(_pointer(capsule, b"dltensor_versioned"), POINTER(_Versioned)).contents
        if managed.major != _VERSION[0]:
            raise NotOnDevice(f"it is exported by DLPack {managed.major}, and only version {_VERSION[0]} is supported")
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor = ctypes.cast(_pointer(capsule, b"dltensor"), POINTER(_DLTensor)).contents
    if tensor.lanes != 1:
        raise NotOnDevice(f"its elements are vectors of {tensor.lanes}")
    shape, size = tuple(tensor.shape[:tensor.ndim]), tensor.bits // 8
    strides = [step * size for step in tensor.strides[:tensor.ndim]] if tensor.strides else None
    _check_dense(shape, strides, size)
    kind = _KINDS.get(tensor.code, "unknown")
    dtype = kind if kind == "bool" else f"{kind}{tensor.bits}"
    return DeviceTensor((tensor.data or 0) + tensor.byte_offset, shape, dtype, capsule, read_only=read_only)


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device", c_int32), ("number", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of DLPack."""
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("tensor", _DLTensor)]


_is_capsule = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _check_dense(shape: tuple[int, ...], strides: Any, size: int) -> None:
    expected = [size * math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    if strides is not None and any(step != array_offset and extent > 1 for step, array_offset, extent
                                   in zip(strides, expected, shape, strict=True)):
        raise NotOnDevice(f"it is not C-contiguous: shape {list(shape)}, strides {list(strides)}; "
                          "copy it to a contiguous array")


# ---- conversion from and to a plan's tensors
def misfit(tensor: DeviceTensor, view: TensorView) -> str:
    """Return why an array cannot be a tensor of a plan, or "" if it can. The number of items is not checked."""
    dtype = "bfloat16" if view.dtype == "bfloat16" else memory_dtype(view.dtype).name
    if tensor.dtype not in (dtype, memory_dtype(view.dtype).name):
        return f"it is {tensor.dtype}, the model has {dtype}"
    if tensor.shape[view.batched:] != view.shape or len(tensor.shape) != len(view.shape) + view.batched:
        expected = ["batch"] * view.batched + [str(extent) for extent in view.shape]
        return f"its shape is {list(tensor.shape)}, the model has [{', '.join(expected)}]"
    return ""


class StridedCopy(NamedTuple):
    """Strided copy of `number` rows of `width` bytes.

    Rows begin at `tensor_offset` in the plan's tensor, `step` bytes apart, and at `array_offset` in the contiguous
    array.
    """
    tensor_offset: int
    step: int
    array_offset: int
    width: int
    number: int


def rows_of(view: TensorView, items: int) -> Iterator[StridedCopy]:
    """Yield the strided copies that move a tensor of `items` items."""
    extents = ([items] if view.batched else []) + list(view.shape)
    strides = ([view.item_stride] if view.batched else []) + list(view.strides)
    width = memory_dtype(view.dtype).itemsize
    while extents and (extents[-1] == 1 or strides[-1] == width):
        width *= extents.pop()
        strides.pop()
    count, step = (extents.pop(), strides.pop()) if extents else (1, width)
    for number, indices in enumerate(np.ndindex(*extents)):
        tensor_offset = sum(index * stride for index, stride in zip(indices, strides, strict=True))
        yield StridedCopy(view.offset + tensor_offset, step, number * count * width, width, count)
