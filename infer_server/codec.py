"""Tensors of the protocol <-> ndarrays: the only place that knows how either is laid out.

Raw contents are little-endian, row-major, without padding; BYTES elements are each preceded by their length as a 4-byte
integer. Typed contents hold one value an element in the field of their kind; FP16 and BF16 have none and must be raw.
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.md
"""
from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import InvalidRequestError
from infer_server.wire import InferRequest
from protos import inference, model_config


@dataclass(frozen=True)
class Datatype:
    """An element type of the protocol. BF16 has no dtype in numpy: its bits are kept as integers."""
    name: str                       # "FP32"
    engine: str                     # the name engines use: "float32"
    array: np.dtype[Any]            # as received and sent
    contents: str                   # the field of InferTensorContents; "" if there is none
    config: int                     # the value of model_config.DataType


def _datatype(name: str, engine: str, array: str, contents: str) -> Datatype:
    config = "STRING" if name == "BYTES" else name
    return Datatype(name, engine, np.dtype(array), contents, model_config.DataType.Value(f"TYPE_{config}"))


DATATYPES = {datatype.name: datatype for datatype in (
    _datatype("BOOL", "bool", "?", "bool_contents"),
    _datatype("UINT8", "uint8", "u1", "uint_contents"),
    _datatype("UINT16", "uint16", "<u2", "uint_contents"),
    _datatype("UINT32", "uint32", "<u4", "uint_contents"),
    _datatype("UINT64", "uint64", "<u8", "uint64_contents"),
    _datatype("INT8", "int8", "i1", "int_contents"),
    _datatype("INT16", "int16", "<i2", "int_contents"),
    _datatype("INT32", "int32", "<i4", "int_contents"),
    _datatype("INT64", "int64", "<i8", "int64_contents"),
    _datatype("FP16", "float16", "<f2", ""),
    _datatype("FP32", "float32", "<f4", "fp32_contents"),
    _datatype("FP64", "float64", "<f8", "fp64_contents"),
    _datatype("BF16", "bfloat16", "<u2", ""),
    _datatype("BYTES", "object", "O", "bytes_contents"),
)}
FROM_ENGINE = {datatype.engine: datatype for datatype in DATATYPES.values()}
FROM_CONFIG = {datatype.config: datatype for datatype in DATATYPES.values()}


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as it was sent: its array has the declared shape, and nothing is known yet of the model it is for."""
    datatype: str
    array: NDArray[Any]


def decode_inputs(request: InferRequest) -> dict[str, InputTensor]:
    """The inputs of a request by name, as views of the message where they were sent raw.

    Raises InvalidRequestError where contents do not fill the declared shape and datatype exactly.
    """
    tensors = request.header.inputs
    raw_inputs = request.raw_inputs
    if raw_inputs and len(raw_inputs) != len(tensors):
        raise InvalidRequestError(
            f"raw_input_contents holds {len(raw_inputs)} tensors for {len(tensors)} inputs; give one for each input")
    decoded: dict[str, InputTensor] = {}
    for i, tensor in enumerate(tensors):
        if tensor.name in decoded:
            raise InvalidRequestError(f"input '{tensor.name}' is given twice")
        datatype = DATATYPES.get(tensor.datatype)
        if datatype is None:
            raise InvalidRequestError(f"input '{tensor.name}': unknown datatype '{tensor.datatype}'; "
                                      f"expected one of {', '.join(DATATYPES)}")
        shape = tuple(tensor.shape)
        if any(extent < 0 for extent in shape):
            raise InvalidRequestError(f"input '{tensor.name}': shape {list(shape)} has a negative extent")
        where = f"input '{tensor.name}' ({datatype.name} {list(shape)})"
        if raw_inputs:
            if tensor.HasField("contents"):
                raise InvalidRequestError(f"{where}: raw_input_contents and contents must not be mixed in a request")
            array = _from_raw(where, datatype, shape, raw_inputs[i])
        else:
            array = _from_contents(where, datatype, shape, tensor.contents)
        decoded[tensor.name] = InputTensor(datatype.name, array)
    return decoded


def encode_raw(array: NDArray[Any], datatype: Datatype) -> memoryview:
    """The raw contents of an array, without a copy if it is contiguous."""
    if datatype.name == "BYTES":
        return memoryview(b"".join(struct.pack("<I", len(value)) + value for value in map(_as_bytes, array.flat)))
    if array.dtype != datatype.array:
        array = array.view(datatype.array) if datatype.name == "BF16" else array.astype(datatype.array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _from_raw(where: str, datatype: Datatype, shape: tuple[int, ...], raw: memoryview) -> NDArray[Any]:
    if datatype.name == "BYTES":
        return _from_raw_bytes(where, shape, raw)
    expected = math.prod(shape) * datatype.array.itemsize
    if raw.nbytes != expected:
        raise InvalidRequestError(f"{where}: expected {expected} bytes of raw contents, got {raw.nbytes}")
    if datatype.name == "BOOL":     # any byte but 0 is true; numpy's own bool must hold nothing but 0 and 1
        return _shaped(where, np.frombuffer(raw, np.uint8) != 0, shape)
    return _shaped(where, np.frombuffer(raw, datatype.array), shape)


def _from_raw_bytes(where: str, shape: tuple[int, ...], raw: memoryview) -> NDArray[Any]:
    count = math.prod(shape)
    values: list[bytes] = []
    position = 0
    while position < raw.nbytes and len(values) < count:
        if position + 4 > raw.nbytes:
            raise InvalidRequestError(f"{where}: the raw contents end within the length of element {len(values)}")
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + length > raw.nbytes:
            raise InvalidRequestError(f"{where}: element {len(values)} of {length} bytes ends after the raw contents")
        values.append(bytes(raw[position:position + length]))
        position += length
    if len(values) != count or position != raw.nbytes:
        raise InvalidRequestError(f"{where}: expected {count} elements, each with its length, got {len(values)} and "
                                  f"{raw.nbytes - position} more bytes")
    return _shaped(where, _object_array(values), shape)


def _from_contents(where: str, datatype: Datatype, shape: tuple[int, ...],
                   contents: inference.InferTensorContents) -> NDArray[Any]:
    if not datatype.contents:
        raise InvalidRequestError(f"{where}: {datatype.name} has no typed contents; send it in raw_input_contents")
    others = [field.name for field, _ in contents.ListFields() if field.name != datatype.contents]
    if others:
        raise InvalidRequestError(f"{where}: expected its values in {datatype.contents}, got {', '.join(others)}")
    values: Sequence[Any] = getattr(contents, datatype.contents)
    count = math.prod(shape)
    if len(values) != count:
        raise InvalidRequestError(f"{where}: expected {count} values in {datatype.contents}, got {len(values)}")
    if datatype.name == "BYTES":
        return _shaped(where, _object_array(values), shape)
    if datatype.array.kind not in "iu":
        return _shaped(where, np.array(values, datatype.array), shape)
    array = np.array(values, np.int64 if datatype.name != "UINT64" else np.uint64)
    limits = np.iinfo(datatype.array)
    if count and (array.min() < limits.min or array.max() > limits.max):
        raise InvalidRequestError(f"{where}: a value is outside of {datatype.name}'s {limits.min}..{limits.max}")
    return _shaped(where, array.astype(datatype.array), shape)


def _object_array(values: Sequence[bytes]) -> NDArray[Any]:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def _shaped(where: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        return array.reshape(shape)
    except ValueError as error:     # more axes than numpy has, or an empty tensor of absurd extents
        raise InvalidRequestError(f"{where}: {error}") from error


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
