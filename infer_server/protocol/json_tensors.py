"""Convert between tensors in JSON and ndarrays."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import InvalidRequestError
from infer_server.protocol.codec import OBJECT_BYTES, Datatype, InputTensor, narrow, object_array, shaped
from infer_server.protocol.json_values import JsonArray, Steps, flat

NO_JSON = ("FP16", "BF16")      # datatypes without a JSON form
MANY = 2048                     # elements that are encoded at a time, in about a millisecond
_KINDS = {"i": int, "u": int, "f": float, "b": bool}       # Python type by dtype kind of a JsonArray's chunk


def from_json(tensor: InputTensor, data: Any) -> NDArray[Any]:
    """Convert numbers, booleans or strings, nested or flat in row-major order. Raises InvalidRequestError."""
    check_json(tensor.datatype, tensor.name)
    if not isinstance(data, list):
        raise InvalidRequestError(f"Unable to parse 'data' of {tensor}: it is missing, or not a list")
    values = flat(data)
    _check_count(tensor, len(values))
    return shaped(tensor, _array(tensor.datatype, str(tensor), values))


def read_values(tensor: InputTensor, data: JsonArray, hold: Callable[[int], None]) -> Steps[NDArray[Any]]:
    """Convert the values of a tensor in steps. Errors are those of from_json; for `hold` see read_array."""
    array = yield from read_array(tensor.datatype, tensor.name, str(tensor), data, hold, math.prod(tensor.shape))
    _check_count(tensor, len(array))
    return shaped(tensor, array)


def read_array(datatype: Datatype, name: str, label: str, data: JsonArray, hold: Callable[[int], None],
               most: int | None = None) -> Steps[NDArray[Any]]:
    """Convert the values of a long array to a flat ndarray in steps; this empties the long array.

    Parameters
    ----------
    datatype : Datatype
        Datatype of the tensor.
    name : str
        Name of the tensor.
    label : str
        Description of the tensor for errors.
    data : JsonArray
        Values.
    hold : callable
        Accounts for the bytes of the result before they are allocated; may raise.
    most : int, optional
        Number of values that the tensor has.

    Raises
    ------
    InvalidRequestError
        There are too many values, or values that are not of the datatype.
    """
    check_json(datatype, name)
    if most is not None and data.count > most:
        raise _wrong_count(most, label, str(data.count))
    hold(data.count * datatype.array.itemsize)
    array, size = np.empty(data.count, datatype.array), 0
    for chunk in data.take_chunks():
        part = _array(datatype, label, chunk)
        if datatype.name == "BYTES":
            hold(sum(map(len, part)) + OBJECT_BYTES * len(part))
        array[size:size + len(part)] = part
        size += len(part)
        yield
    return array


def check_json(datatype: Datatype, name: str) -> None:
    """Raise InvalidRequestError for a datatype without a JSON form."""
    if datatype.name in NO_JSON:
        raise InvalidRequestError(f"receiving {datatype.name} data via JSON is not supported. Please use the binary "
                                  f"data format for input {name}")


def _check_count(tensor: InputTensor, elements: int) -> None:
    if elements != (count := math.prod(tensor.shape)):
        raise _wrong_count(count, str(tensor), str(elements))


def _wrong_count(count: int, label: str, elements: str) -> InvalidRequestError:
    return InvalidRequestError("Unable to parse 'data': Shape does not match true shape of 'data' field: expected "
                               f"{count} values for {label}, got {elements}")


def _array(datatype: Datatype, label: str, values: list[Any] | NDArray[Any]) -> NDArray[Any]:
    """Convert values to a flat array. Raises InvalidRequestError for values that are not of the datatype."""
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {float, int}, "O": {str}}
    types = {_KINDS[values.dtype.kind]} if isinstance(values, np.ndarray) else set(map(type, values))
    if others := types - kinds.get(datatype.array.kind, {int}):
        raise InvalidRequestError(f"{label}: a {others.pop().__name__} in 'data' is not valid for {datatype.name}")
    if datatype.name == "BYTES":
        return object_array([value.encode() for value in values])
    try:
        if datatype.array.kind in "iu":
            return narrow(datatype, label, _integers(datatype, values))
        return np.asarray(values, datatype.array)
    except OverflowError as error:
        raise InvalidRequestError(f"{label}: a value is out of range for {datatype.name}") from error


def _integers(datatype: Datatype, values: list[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return integers as uint64 for UINT64, else as int64. Raises OverflowError for values out of range."""
    widest = np.dtype(np.uint64 if datatype.name == "UINT64" else np.int64)
    if isinstance(values, np.ndarray) and values.dtype != widest and (
            int(values.max()) > np.iinfo(widest).max or int(values.min()) < np.iinfo(widest).min):
        raise OverflowError
    return np.asarray(values, widest)


def to_json(array: NDArray[Any], datatype: str, errors: str = "strict") -> list[Any]:
    """Return the elements in one list.

    `errors` says how BYTES that are not UTF-8 are decoded, as in bytes.decode; "strict" raises InvalidRequestError.
    """
    if datatype == "BYTES":
        try:
            return [value.decode(errors=errors) if isinstance(value, bytes) else str(value) for value in array.flat]
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                "bytes that are not UTF-8 have no JSON form; request binary data") from error
    values: list[Any] = array.reshape(-1).tolist()
    return values


def json_pieces(array: NDArray[Any], datatype: str, errors: str = "strict") -> Iterator[bytes]:
    """Yield the text of to_json's list in pieces, each of which holds the interpreter lock only briefly."""
    elements = array.reshape(-1)
    yield b"["
    for begin in range(0, elements.size, MANY):
        text = json.dumps(to_json(elements[begin:begin + MANY], datatype, errors), separators=(",", ":")).encode()
        yield (b"," if begin else b"") + text[1:-1]
    yield b"]"
