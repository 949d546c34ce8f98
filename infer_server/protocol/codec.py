"""Convert between tensors of the protocol and ndarrays.

Raw contents are little-endian, row-major, without padding; each BYTES element is preceded by its length as a 4-byte
integer. Typed contents hold one value for each element in the field of their kind; FP16 and BF16 have no such field and
must be raw.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.md
"""
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import InvalidRequestError, MalformedMessageError
from infer_server.protocol.wire import MAX_VARINT_BYTES, InferRequest, Packed, byte_strings
from infer_server.protos import inference, model_config

MAX_RANK = 32               # maximum rank of a tensor
_MAX_BYTES = (1 << 63) - 1  # maximum number of bytes, and of elements, of a tensor
_FEW_BYTES = 4096           # size below which a copy is as fast as a view
OBJECT_BYTES = 41           # memory of a BYTES element without its text: object and pointer
_NOWHERE: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Datatype:
    """Datatype of the protocol. BF16 has no dtype in NumPy; its bits are kept as integers."""
    name: str                       # "FP32"
    engine: str                     # name that engines use: "float32"
    array: np.dtype[Any]            # dtype of the raw contents
    contents: str                   # field of InferTensorContents; "" if there is none
    config: int                     # value of model_config.DataType


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


@dataclass(frozen=True)
class InputTensor:
    """Input as a request declares it, before its contents are read."""
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    model: str = ""                 # name of the model, for errors

    @functools.cached_property
    def raw_bytes(self) -> int:
        """Size of its raw contents, for numeric datatypes."""
        return math.prod(self.shape) * self.datatype.array.itemsize

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if any raw contents can be viewed as an array."""
        return self.datatype.name not in ("BYTES", "BOOL") and self.raw_bytes > 0

    @property
    def label(self) -> str:
        """Name of the input and of its model, as Triton's errors write them."""
        return f"'{self.name}' for model '{self.model}'" if self.model else f"'{self.name}'"

    def __str__(self) -> str:
        return f"input '{self.name}' ({self.datatype.name} {list(self.shape)})"


class DeclaredInput(Protocol):
    """Input as a message of any protocol declares it."""
    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


def declared_inputs(inputs: Iterable[DeclaredInput], model: str = "") -> tuple[InputTensor, ...]:
    """Return the declared inputs of a request, in its order.

    They are checked against the model before their contents are read, so that invalid requests cost little.

    Raises
    ------
    InvalidRequestError
        A name occurs twice, or a datatype or shape is not valid.
    """
    tensors: dict[str, InputTensor] = {}
    for tensor in inputs:
        if tensor.name in tensors:
            raise InvalidRequestError(f"input '{tensor.name}' already exists in request: it is given twice")
        datatype = DATATYPES.get(tensor.datatype)
        if datatype is None:
            raise InvalidRequestError(f"input '{tensor.name}': unknown datatype '{tensor.datatype}'; "
                                      f"expected one of {', '.join(DATATYPES)}")
        if len(tensor.shape) > MAX_RANK:
            raise InvalidRequestError(f"input '{tensor.name}': a shape of {len(tensor.shape)} axes; at most {MAX_RANK}")
        tensors[tensor.name] = declared = InputTensor(tensor.name, datatype, tuple(tensor.shape), model)
        _check_extents(declared)
    return tuple(tensors.values())


def _check_extents(tensor: InputTensor) -> None:
    name, shape, count = tensor.name, bracketed(tensor.shape), math.prod(tensor.shape)
    if any(extent < 0 for extent in tensor.shape):
        raise InvalidRequestError(f"All input dimensions should be specified for input {tensor.label}, got {shape}, "
                                  "which has a negative extent")
    if count > _MAX_BYTES:
        raise InvalidRequestError(f"invalid shape for input '{name}': shape {shape} causes total element count to "
                                  f"exceed maximum size of {_MAX_BYTES}")
    if tensor.raw_bytes > _MAX_BYTES and tensor.datatype.name != "BYTES":
        raise InvalidRequestError(f"byte size overflow for input '{name}': element count ({count}) * data type size "
                                  f"({tensor.datatype.array.itemsize}) exceeds maximum allowed size ({_MAX_BYTES})")


def bracketed(values: Iterable[object]) -> str:
    """Return a shape or names as Triton's errors write them: "[1,16]"."""
    return f"[{','.join(map(str, values))}]"


def decode_inputs(request: InferRequest, tensors: Sequence[InputTensor],
                  elsewhere: Mapping[int, Any] = _NOWHERE) -> dict[str, Any]:
    """Return the contents of `declared_inputs` by name; raw contents become views of the message.

    Parameters
    ----------
    request : InferRequest
        Request as `split_request` returns it.
    tensors : sequence of InputTensor
        Declared inputs.
    elsewhere : mapping of int to object
        Raw contents, or arrays, of inputs that are not in the message, by position of the input.

    Raises
    ------
    InvalidRequestError
        The contents do not match the declared shape and datatype exactly.
    """
    raw_inputs = request.raw_inputs
    if len(raw_inputs) == len(tensors) and not (elsewhere or request.packed or request.form.has_contents):
        return {tensor.name: from_raw(tensor, raw) for tensor, raw in zip(tensors, raw_inputs, strict=True)}
    awaited = [tensor for i, tensor in enumerate(tensors) if i not in elsewhere]
    if raw_inputs and len(raw_inputs) != len(awaited):
        without = [f"unable to find data for input tensor {tensor.label} in request: "
                   for tensor in awaited[len(raw_inputs):len(raw_inputs) + 1]]
        raise InvalidRequestError(f"{''.join(without)}raw_input_contents holds {len(raw_inputs)} tensors for "
                                  f"{len(awaited)} inputs; give one for each input")
    arrays: dict[str, Any] = {}
    raws = iter(raw_inputs)
    for i, (tensor, message) in enumerate(zip(tensors, request.header.inputs, strict=True)):
        if i not in elsewhere and not raw_inputs:
            arrays[tensor.name] = (_from_packed(tensor, request.packed[i]) if i in request.packed
                                   else _from_contents(tensor, message.contents))
        elif message.HasField("contents") or i in request.packed:
            raise InvalidRequestError(
                f"unexpected 'content' provided when using shared memory for input tensor {tensor.label}"
                if i in elsewhere else
                f"contents field must not be specified when using raw_input_contents for {tensor.label}: the two must "
                "not be mixed in a request")
        else:
            raw = elsewhere[i] if i in elsewhere else next(raws)
            arrays[tensor.name] = from_raw(tensor, raw) if isinstance(raw, memoryview) else raw
    return arrays


def encode_raw(array: NDArray[Any], datatype: Datatype) -> memoryview:
    """Return the raw contents of an array; a large contiguous array is not copied."""
    if datatype.name == "BYTES":
        return memoryview(b"".join(struct.pack("<I", len(value)) + value for value in map(_as_bytes, array.flat)))
    if array.dtype != datatype.array:
        array = array.view(datatype.array) if datatype.name == "BF16" else array.astype(datatype.array)
    if array.nbytes < _FEW_BYTES:
        return memoryview(array.tobytes())
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def from_raw(tensor: InputTensor, raw: memoryview) -> NDArray[Any]:
    """Return raw contents as an array, as a view for numeric datatypes. Raises InvalidRequestError for a wrong size."""
    datatype = tensor.datatype
    if tensor.is_plain and raw.nbytes == tensor.raw_bytes:
        return np.ndarray(tensor.shape, datatype.array, raw)
    if datatype.name == "BYTES":
        return _from_raw_bytes(tensor, raw)
    if raw.nbytes != tensor.raw_bytes:
        check_bytes(tensor, raw.nbytes)
    if datatype.name == "BOOL":     # any byte but 0 is true; numpy's own bool must hold nothing but 0 and 1
        return shaped(tensor, np.frombuffer(raw, np.uint8) != 0)
    return shaped(tensor, np.frombuffer(raw, datatype.array))


def check_bytes(tensor: InputTensor, byte_size: int) -> None:
    """Raise InvalidRequestError if the raw contents of a numeric tensor do not have `byte_size` bytes."""
    if byte_size != tensor.raw_bytes and tensor.datatype.name != "BYTES":
        raise _wrong_size(tensor, byte_size, f"bytes of {tensor.datatype.name} {list(tensor.shape)}")


def _wrong_size(tensor: InputTensor, byte_size: int, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"input byte size mismatch for input {tensor.label}. Expected {tensor.raw_bytes}, got "
                               f"{byte_size}: {reason}")


def _wrong_count(tensor: InputTensor, elements: int) -> InvalidRequestError:
    """Return the error for a BYTES tensor with `elements` elements."""
    count = math.prod(tensor.shape)
    return InvalidRequestError(
        f"expected {count} string elements for inference input {tensor.label}, got {elements}" if elements < count else
        f"unexpected number of string elements {elements} for inference input {tensor.label}, expecting {count}")


def _from_raw_bytes(tensor: InputTensor, raw: memoryview) -> NDArray[Any]:
    count = math.prod(tensor.shape)
    values: list[bytes] = []
    position = 0
    while position < raw.nbytes:
        if position + 4 > raw.nbytes:
            raise InvalidRequestError(f"incomplete string length indicator for inference input {tensor.label}, "
                                      f"expecting 4 bytes but only {raw.nbytes - position} bytes available for "
                                      f"element {len(values)}")
        if len(values) == count:
            raise _wrong_count(tensor, count + 1)
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + length > raw.nbytes:
            raise InvalidRequestError(f"{tensor}: element {len(values)} of {length} bytes ends after the raw contents")
        values.append(bytes(raw[position:position + length]))
        position += length
    if len(values) != count:
        raise _wrong_count(tensor, len(values))
    return shaped(tensor, object_array(values))


def _from_contents(tensor: InputTensor, contents: inference.InferTensorContents) -> NDArray[Any]:
    datatype = tensor.datatype
    _check_fields(tensor, [field.name for field, _ in contents.ListFields()])
    values: Sequence[Any] = getattr(contents, datatype.contents)
    _check_count(tensor, len(values))
    if datatype.name == "BYTES":
        return shaped(tensor, object_array(values))
    if datatype.array.kind not in "iu":
        return shaped(tensor, np.array(values, datatype.array))
    return narrowed(tensor, np.array(values, np.int64 if datatype.name != "UINT64" else np.uint64))


def _from_packed(tensor: InputTensor, packed: Packed) -> NDArray[Any]:
    datatype = tensor.datatype
    _check_fields(tensor, [packed.field])
    if datatype.name == "BYTES":
        elements = byte_strings(packed.values, math.prod(tensor.shape))
        _check_count(tensor, len(elements))
        return shaped(tensor, object_array(elements))
    if datatype.array.kind == "f":
        count, rest = divmod(packed.values.nbytes, datatype.array.itemsize)
        if rest:
            raise MalformedMessageError(f"{tensor}: {packed.field} ends within a value")
        _check_count(tensor, count)
        return shaped(tensor, np.frombuffer(packed.values, datatype.array))
    values = _varints(tensor, np.frombuffer(packed.values, np.uint8))
    if datatype.name == "BOOL":
        return shaped(tensor, values != 0)
    return narrowed(tensor, values.view(_VARINT_KIND[packed.field]) if packed.field.endswith("64_contents")
                     else values.astype(np.uint32).view(_VARINT_KIND[packed.field]))


# Integer type of each varint field; 32-bit types drop the higher bits, as protobuf does.
_VARINT_KIND = {"int_contents": np.int32, "uint_contents": np.uint32, "int64_contents": np.int64,
                "uint64_contents": np.uint64}


def _varints(tensor: InputTensor, data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Decode base-128 varints: seven bits in each byte, lowest first; the last byte of each is below 128."""
    lasts = data < 0x80
    count = int(np.count_nonzero(lasts))
    _check_count(tensor, count)         # before the allocation, which is then bounded by the model's shapes
    ends = np.flatnonzero(lasts)
    begins = np.concatenate(([0], ends[:-1] + 1)) if count else ends
    lengths = ends - begins + 1
    if data.size and (not lasts[-1] or lengths.max() > MAX_VARINT_BYTES):
        raise MalformedMessageError(f"{tensor}: a number of more than {MAX_VARINT_BYTES} bytes, or one without an end")
    values = np.zeros(count, np.uint64)
    for byte_index in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > byte_index)
        bits = (data[begins[longer] + byte_index] & np.uint8(0x7F)).astype(np.uint64)
        values[longer] |= bits << np.uint64(7 * byte_index)
    return values


def _check_fields(tensor: InputTensor, fields: Sequence[str]) -> None:
    """Raise InvalidRequestError unless the values are in the field of InferTensorContents for the datatype."""
    expected = tensor.datatype.contents
    if not expected:
        raise InvalidRequestError(f"{tensor}: {tensor.datatype.name} has no typed contents; send it in "
                                  "raw_input_contents")
    if others := [name for name in fields if name != expected]:
        raise InvalidRequestError(f"unexpected explicit tensor data for input tensor {tensor.label}: expected the "
                                  f"values of {tensor.datatype.name} in {expected}, got {', '.join(others)}")


def _check_count(tensor: InputTensor, elements: int) -> None:
    if elements == (count := math.prod(tensor.shape)):
        return
    if tensor.datatype.name == "BYTES":
        raise _wrong_count(tensor, elements)
    raise _wrong_size(tensor, elements * tensor.datatype.array.itemsize,
                      f"expected {count} values in {tensor.datatype.contents}, got {elements}")


def narrowed(tensor: InputTensor, array: NDArray[Any]) -> NDArray[Any]:
    """Convert integers to the datatype and shape of a tensor. Raises InvalidRequestError if one does not fit."""
    return shaped(tensor, narrow(tensor.datatype, str(tensor), array))


def narrow(datatype: Datatype, label: str, array: NDArray[Any]) -> NDArray[Any]:
    """Convert integers to a datatype; `label` names the tensor. Raises InvalidRequestError if one does not fit."""
    limits = np.iinfo(datatype.array)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise InvalidRequestError(f"{label}: a value is outside of {datatype.name}'s {limits.min}..{limits.max}")
    return array.astype(datatype.array)


def object_bytes(tensor: InputTensor, raw_bytes: int) -> int:
    """Return the memory of a BYTES tensor's objects without their text; 0 for numeric tensors.

    Parameters
    ----------
    tensor : InputTensor
        Declared input.
    raw_bytes : int
        Size of its encoded contents, of which each element takes two bytes or more.
    """
    return OBJECT_BYTES * min(math.prod(tensor.shape), raw_bytes // 2) if tensor.datatype.name == "BYTES" else 0


def object_array(values: Sequence[bytes]) -> NDArray[Any]:
    """Return a one-dimensional array of the elements of a BYTES tensor."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def shaped(tensor: InputTensor, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the declared shape. Raises InvalidRequestError if that is not possible."""
    try:
        return array.reshape(tensor.shape)
    except ValueError as error:     # an empty tensor whose dims overflow
        raise InvalidRequestError(f"{tensor}: {error}") from error


def _as_bytes(value: Any) -> bytes:
    """Return an element of an object array as bytes. Plain bytes(3) would give three zeros."""
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else str(value).encode()
