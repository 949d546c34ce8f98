"""Tensor class of triton_python_backend_utils, and its encoding of BYTES tensors."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.protocol.codec import DATATYPES, encode_raw, object_array
from infer_server.python_backend.channel import datatype_of

_ON_CPU = 1, 0                          # DLPack's device kDLCPU with device id 0


class TritonModelException(Exception):  # noqa: N818  (Triton's name)
    """Exception that a model raises to fail a request or its loading with a message."""


class Tensor:
    """Named array."""

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}': expected a NumPy array, got {type(array)}")
        self._name, self._array = as_text(name), array
        if not self._name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype_of(self._array)

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Create a tensor from an object with the DLPack interface, or from a DLPack capsule."""
        try:
            array = np.from_dlpack(tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"Tensor '{name}' cannot be taken from DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException("DLPack tensor is not contiguous. Only contiguous DLPack tensors that are "
                                       "stored in C-Order are supported.")
        return cls(name, array)

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the array, or a copy if it is read-only, which DLPack cannot express."""
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return datatype_of(self._array).config

    def is_cpu(self) -> bool:
        return True


class _Capsule:
    """Adapter that gives a DLPack capsule, as from torch.utils.dlpack.to_dlpack(), the interface that NumPy expects."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU                  # NumPy itself rejects capsules of other devices


def as_text(name: str | bytes) -> str:
    """Return a name as str; Triton also accepts bytes, such as an element of a BYTES tensor. Raises TypeError."""
    if not isinstance(name, str | bytes):
        raise TypeError(f"expected a name, got {name!r}")
    return name.decode() if isinstance(name, bytes) else name


def as_tensors(elements: Iterable[Tensor]) -> list[Tensor]:
    """Return a list of tensors. Raises TritonModelException if an element is not a Tensor."""
    tensors = list(elements)
    if wrong := [tensor for tensor in tensors if not isinstance(tensor, Tensor)]:
        raise TritonModelException(f"expected Tensor objects, got {type(wrong[0])}")
    return tensors


def serialize_byte_tensor(array: NDArray[Any]) -> bytes:
    return bytes(encode_raw(array, DATATYPES["BYTES"]))


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[Any]:
    data, end, elements = memoryview(encoded_tensor), 0, []
    while end < len(data):
        begin = end + 4
        end = begin + int.from_bytes(data[end:begin], "little")
        elements.append(bytes(data[begin:end]))
    return object_array(elements)
