"""Conversion between NumPy arrays and ModelInfer messages.

Contents are raw: row-major and little-endian, BYTES with their lengths.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""
from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.clients.errors import InvalidRequestError, ResponseError
from infer_server.protos import inference as pb

Array = NDArray[Any]
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "UINT8": np.dtype(np.uint8), "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32), "UINT64": np.dtype(np.uint64), "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16), "INT32": np.dtype(np.int32), "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16), "FP32": np.dtype(np.float32), "FP64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
LENGTH_BYTES = 4
_CONTENTS_TAG = bytes((pb.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2,))


def datatype_of(array: Array) -> str:
    """Return the protocol's name of an array's dtype. Raises InvalidRequestError if it has none."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    name = _NAMES.get(array.dtype.newbyteorder("="))
    if name is None:
        raise InvalidRequestError(f"dtype {array.dtype} has no counterpart in the protocol; "
                                  f"convert to one of {', '.join(str(dtype) for dtype in _NAMES)}")
    return name


def encode(array: Array) -> bytes:
    """Return the raw contents of an array; elements of an object array are bytes, or str (sent as UTF-8)."""
    if datatype_of(array) == "BYTES":
        return b"".join(_prefixed(element) for element in array.flat)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _prefixed(element: object) -> bytes:
    data = element.encode() if isinstance(element, str) else element
    if not isinstance(data, bytes):
        raise InvalidRequestError(f"an element of a BYTES tensor is str or bytes, not {type(element).__name__}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def decode(raw: bytes, datatype: str, shape: tuple[int, ...]) -> Array:
    """Return the array of raw contents: a view of `raw`, a float32 copy for BF16, or an object array for BYTES.

    Raises ResponseError if the length of `raw` does not match the datatype and the shape.
    """
    if datatype == "BYTES":
        elements = list(_split(raw))
        if len(elements) != math.prod(shape):
            raise ResponseError(f"{len(elements)} BYTES elements where shape {list(shape)} has {math.prod(shape)}")
        return np.array(elements, object).reshape(shape)
    dtype = np.dtype(np.uint16) if datatype == "BF16" else DATATYPES.get(datatype)
    if dtype is None:
        raise ResponseError(f"unknown datatype '{datatype}'")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ResponseError(f"{len(raw)} bytes of contents do not make a {datatype} tensor of shape {list(shape)}")
    array = np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape)
    if datatype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)         # the upper half of a float32
    return array if sys.byteorder == "little" else array.astype(dtype)


def _split(raw: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(raw):
        start = position + LENGTH_BYTES
        position = start + int.from_bytes(raw[position:start], "little")
        if position > len(raw):
            raise ResponseError(f"a BYTES element ends at byte {position} of {len(raw)}")
        yield raw[start:position]


def infer_request(model: str, inputs: Mapping[str, Array], *, version: str = "", request_id: str = "",
                  priority: int = 0) -> pb.ModelInferRequest:
    """Return the message of a request; `priority` 0 is the model's default level, 1 the most urgent."""
    request, arrays = _without_contents(model, inputs, version, request_id, priority)
    request.raw_input_contents.extend(map(encode, arrays))
    return request


def serialised_request(model: str, inputs: Mapping[str, Array], *, version: str = "", request_id: str = "",
                       priority: int = 0) -> tuple[bytes, ...]:
    """Return the serialised request in parts; each tensor's contents are a part, so they are not copied."""
    request, arrays = _without_contents(model, inputs, version, request_id, priority)
    parts = [request.SerializeToString()]
    for raw in map(encode, arrays):
        parts += _CONTENTS_TAG + _varint(len(raw)), raw
    return tuple(parts)


def _without_contents(model: str, inputs: Mapping[str, Array], version: str, request_id: str, priority: int
                      ) -> tuple[pb.ModelInferRequest, list[Array]]:
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    if priority:
        request.parameters["priority"].uint64_param = priority
    arrays = []
    for name, value in inputs.items():
        array = np.asarray(value)
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        arrays.append(array)
    return request, arrays


def _varint(number: int) -> bytes:
    """Encode a number as a protobuf varint."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def infer_outputs(response: pb.ModelInferResponse) -> dict[str, Array]:
    """Return the arrays of a response with raw contents, by output name."""
    if len(response.raw_output_contents) != len(response.outputs):
        raise ResponseError(f"{len(response.outputs)} outputs but {len(response.raw_output_contents)} raw contents")
    return {output.name: decode(raw, output.datatype, tuple(output.shape))
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
