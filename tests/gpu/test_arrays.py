"""Tests of other libraries' GPU arrays: both interfaces, and refusals."""
from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.cuda.runtime.arrays import NotOnDevice, StridedCopy, device_tensor, rows_of
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import TensorView

ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
CUDA, FLOAT, BFLOAT = 2, 2, 4           # DLPack's codes of a device and of element types


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h, with its DLTensor."""
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32),
                ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
                ("shape", ctypes.POINTER(c_int64)), ("strides", ctypes.POINTER(c_int64)), ("byte_offset", c_uint64)]


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class OfDlpack:
    """Array of a library with DLPack 1."""

    def __init__(self, device: int = CUDA, **fields: int) -> None:
        self.device = device
        self.shape = (c_int64 * ARRAY.ndim)(*ARRAY.shape)
        self.managed = Versioned(**{
            "major": 1, "minor": 1, "data": ARRAY.ctypes.data, "device_type": device, "ndim": ARRAY.ndim, "code": FLOAT,
            "bits": 32, "lanes": 1, "shape": self.shape, **fields})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> object:
        assert max_version >= (1, 0)
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)


class OfOlderDlpack(OfDlpack):
    def __dlpack__(self, *, stream: int) -> object:         # type: ignore[override]
        return ARRAY.__dlpack__()


class OfInterface:
    def __init__(self, array: Array = ARRAY, **fields: object) -> None:
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "version": 3,
                                         "data": (array.ctypes.data, False), **fields}


class OfBoth(OfInterface, OfDlpack):
    """Tensor of bfloat16, for which the older interface has no name."""

    def __init__(self) -> None:
        OfInterface.__init__(self, typestr="<V2")
        OfDlpack.__init__(self, code=BFLOAT, bits=16)


@pytest.mark.parametrize(("array", "dtype", "read_only"), [
    (OfDlpack(), "float32", False), (OfDlpack(flags=1), "float32", True), (OfDlpack(device=13), "float32", False),
    (OfDlpack(flags=2), "float32", False), (OfOlderDlpack(), "float32", False), (OfInterface(), "float32", False),
    (OfInterface(data=(ARRAY.ctypes.data, True)), "float32", True), (OfBoth(), "bfloat16", False)],
    ids=["DLPack 1", "read-only", "managed", "a copy", "DLPack 0", "interface", "read-only interface", "bfloat16"])
def test_an_array_is_read_by_whichever_interface_it_has(array: Any, dtype: str, read_only: bool) -> None:
    tensor = device_tensor(array, 1)
    assert (tensor.address, tensor.shape, tensor.dtype) == (ARRAY.ctypes.data, (2, 3, 4), dtype)
    assert tensor.read_only == read_only


class Refusing:
    """Array that refuses access to its memory, as torch's tensors with requires_grad do."""

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("requires grad")


class RefusingDlpack(OfDlpack):
    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] = (0, 0)) -> object:
        raise BufferError("use tensor.detach()")


@pytest.mark.parametrize(("array", "why"), [
    (ARRAY, "it is in host memory"), (OfDlpack(device=1), "it is in host memory"),
    (OfDlpack(major=2), "it is exported by DLPack 2"), (OfDlpack(lanes=4), "its elements are vectors of 4"),
    (OfDlpack(strides=(c_int64 * 3)(1, 2, 6)), "it is not C-contiguous"),
    (OfInterface(ARRAY.T, strides=ARRAY.T.strides), "it is not C-contiguous"),
    (OfInterface(mask=OfInterface()), "it has a mask"), (Refusing(), "does not export it: requires grad"),
    (RefusingDlpack(), r"does not export it: use tensor\.detach\(\)")], ids=lambda value: type(value).__name__)
def test_what_cannot_be_used_where_it_lies_is_refused_with_the_reason(array: Any, why: str) -> None:
    with pytest.raises(NotOnDevice, match=why):
        device_tensor(array, 1)


def test_a_tensor_with_gaps_is_copied_by_rows() -> None:
    view = TensorView("x", "float32", (3, 4), 0, 64, (32, 4), 128)
    assert list(rows_of(view, 2)) == [StridedCopy(64, 32, 0, 16, 3), StridedCopy(192, 32, 48, 16, 3)]
    assert list(rows_of(replace(view, strides=(16, 4), item_stride=48), 2)) == [StridedCopy(64, 96, 0, 96, 1)]
