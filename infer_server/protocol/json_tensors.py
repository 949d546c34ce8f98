"""Tensors as JSON <-> ndarrays."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import InvalidRequestError
from infer_server.protocol.codec import InputTensor, narrowed, object_array, shaped

NO_JSON = ("FP16", "BF16")                         # datatypes
_DEEPEST = 100                                     # lists within lists; as deep as Triton reads, of whatever rank


def from_json(tensor: InputTensor, data: Any) -> NDArray[Any]:
    """Numbers, truths or strings, nested or in one list, row-major. Raises InvalidRequestError."""
    datatype = tensor.datatype
    if datatype.name in NO_JSON:
        raise InvalidRequestError(f"receiving {datatype.name} data via JSON is not supported. Please use the binary "
                                  f"data format for input {tensor.name}")
    if not isinstance(data, list):
        raise InvalidRequestError(f"Unable to parse 'data' of {tensor}: it is missing, or no list")
    values, found = _flat(data)
    count = math.prod(tensor.shape)
    if len(values) != count:
        raise InvalidRequestError("Unable to parse 'data': Shape does not match true shape of 'data' field: expected "
                                  f"{count} values for {tensor}, got {len(values)}")
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {float, int}, "O": {str}}
    if others := found - kinds.get(datatype.array.kind, {int}):
        raise InvalidRequestError(f"{tensor}: a {others.pop().__name__} in 'data' is no {datatype.name}")
    if datatype.name == "BYTES":
        return shaped(tensor, object_array([value.encode() for value in values]))
    try:
        if datatype.array.kind in "iu":
            return narrowed(tensor, np.array(values, np.uint64 if datatype.name == "UINT64" else np.int64))
        return shaped(tensor, np.array(values, datatype.array))
    except OverflowError as error:
        raise InvalidRequestError(f"{tensor}: a value is outside of what {datatype.name} holds") from error


def to_json(array: NDArray[Any], datatype: str, errors: str = "strict") -> list[Any]:
    """The elements in one list. errors: what becomes of BYTES that are no UTF-8, as bytes.decode has it. Raises
    InvalidRequestError: there are such, and it is "strict"."""
    if datatype == "BYTES":
        try:
            return [value.decode(errors=errors) if isinstance(value, bytes) else str(value) for value in array.flat]
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                "bytes that are no UTF-8 have no JSON form; ask for them as binary data") from error
    values: list[Any] = array.reshape(-1).tolist()
    return values


def flat(data: list[Any]) -> list[Any]:
    """A nested list as one. Raises InvalidRequestError: it is nested too deeply."""
    return _flat(data)[0]


def _flat(data: list[Any]) -> tuple[list[Any], set[type]]:
    """The same, and the types of its elements."""
    for _ in range(_DEEPEST):
        types = set(map(type, data))            # the quickest look at all of a list
        if list not in types:
            return data, types
        data = [inner for value in data for inner in (value if isinstance(value, list) else (value,))]
    raise InvalidRequestError(f"'data': JSON nesting depth exceeds maximum allowed limit ({_DEEPEST})")
