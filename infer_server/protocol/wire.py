"""Wire format of ModelInfer's messages, without copies of the tensors.

protobuf's parser copies every element of raw_input_contents into a bytes object. Here the top level of a request is
parsed by hand: the tensors become views of the received message, and only the rest, a few dozen bytes, is parsed by
protobuf. Typed contents become views, too, since the parser would make a Python number of each element.

A response is the serialised header, which is reused, joined once with the tensors. Headers of requests are cached: one
that was received before, byte for byte, is not parsed again.

https://protobuf.dev/programming-guides/encoding
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from google.protobuf.message import DecodeError

from infer_server.errors import MalformedMessageError, TooLargeError
from infer_server.protocol.parameters import MemoryReference, from_messages, references_of
from infer_server.protos import inference

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_RAW_INPUT = inference.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_REQUEST_ID = inference.ModelInferRequest.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_RESPONSE_ID = inference.ModelInferResponse.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_RAW_OUTPUT = inference.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_INPUT = inference.ModelInferRequest.INPUTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_CONTENTS = inference.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PACKED_FIELDS = {field.number << 3 | _LENGTH_DELIMITED: field.name       # tag -> name
                  for field in inference.InferTensorContents.DESCRIPTOR.fields if field.name != "bytes_contents"}
_MANY_BYTES = 4096          # size of an input below which protobuf's parser is as fast
MAX_VARINT_BYTES = 10
_BYTES_CONTENTS = inference.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MAX_HEADER_BYTES = 256 << 10       # limit of a request without its tensors: parsed, it takes 20 times as much memory
_MAX_FIELDS = 4096          # limit at the top level: many empty fields would block the event loop
MAX_CACHED_FORMS = 1024
MAX_CACHED_HEADER_BYTES = 2048              # maximum size of the header or JSON of a cached form


@dataclass(frozen=True, slots=True)
class Packed:
    """Typed contents of an input, as received, if they are a single packed field or byte strings.

    Byte strings include the tag and length of each element.
    """
    field: str                              # "fp32_contents"
    values: memoryview


_NONE: Mapping[int, Packed] = MappingProxyType({})


@dataclass(eq=False)
class RequestForm:
    """Request without its id and tensors.

    Equal requests may share one object: it is never changed, and results that depend on it can be cached by it.
    """
    header: inference.ModelInferRequest
    is_cached: bool = False                 # True if it is cached for equal requests

    def __post_init__(self) -> None:
        self.model, self.version = self.header.model_name, self.header.model_version
        self.has_contents = any(tensor.HasField("contents") for tensor in self.header.inputs)
        self.outputs_have_parameters = any(tensor.parameters for tensor in self.header.outputs)

    @functools.cached_property
    def references(self) -> Mapping[int, MemoryReference]:
        """References of the inputs in shared memory, by position. Raises InvalidRequestError."""
        return references_of((tensor.name, from_messages(tensor.parameters)) for tensor in self.header.inputs)


class InferRequest(NamedTuple):
    """ModelInferRequest with its tensors as views of the received message."""
    form: RequestForm
    raw_inputs: Sequence[memoryview]
    packed: Mapping[int, Packed] = _NONE    # typed contents by position of the input
    id: str = ""

    @property
    def header(self) -> inference.ModelInferRequest:
        return self.form.header


def split_request(data: bytes) -> InferRequest:
    """Parse a serialised ModelInferRequest without trusting any length. Raises MalformedMessageError, TooLargeError."""
    if layout := layout_of(data):
        view = memoryview(data)
        return InferRequest(layout.form, [view[begin:end] for begin, end in layout.tensors])
    view = memoryview(data)
    size = len(data)
    raw_inputs: list[memoryview] = []
    tensors: list[tuple[int, int]] = []     # begin and end of each
    header: list[memoryview | bytes] = []   # the data between the tensors
    packed: dict[int, Packed] = {}
    request_id = b""
    position = stretch = fields = inputs = 0
    while position < size:
        fields += 1
        if fields > _MAX_FIELDS:
            raise _malformed(f"it has more than {_MAX_FIELDS} fields")
        tag = data[position]
        if tag < 0x80 and tag & 7 == _LENGTH_DELIMITED and position + 1 < size and data[position + 1] < 0x80:
            begin = position + 2                # fast path for a one-byte tag and length
            end = begin + data[position + 1]
        else:
            tag, begin, end = _field(data, position)
        if end > size:
            raise _malformed(f"the field at byte {position} ends {end - size} bytes after the message")
        if tag == _RAW_INPUT:
            header.append(view[stretch:position])
            raw_inputs.append(view[begin:end])
            tensors.append((begin, end))
            stretch = end
        elif tag == _INPUT:
            if end - begin >= _MANY_BYTES and (parsed := _parse_packed(data, view, begin, end)):
                packed[inputs], rest = parsed
                header += (view[stretch:position], length_delimited(_INPUT, len(rest)), rest)
                stretch = end
            inputs += 1
        elif tag == _REQUEST_ID:
            header.append(view[stretch:position])
            request_id = data[begin:end]
            stretch = end
        position = end
    header.append(view[stretch:])
    try:
        request = InferRequest(_form(b"".join(header)), raw_inputs, packed, request_id.decode())
        if request.form.is_cached and not (request_id or packed):
            _last_of(size)[:] = (_layout(data, tensors, request.form),)
        return request
    except (DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error


class MessageLayout(NamedTuple):
    """Positions of the tensors in a message without an id, and the bytes between them.

    Messages of a client often differ only in the bytes of their tensors; then they need no parsing.
    """
    tensors: Sequence[tuple[int, int]]          # begin and end of each
    between: Sequence[tuple[int, bytes]]        # all other bytes, with their positions
    form: RequestForm


def layout_of(data: bytes) -> MessageLayout | None:
    """Return the layout of the last message of equal length if `data` equals it except for tensors, else None."""
    for layout in _last_of(len(data)):
        for begin, piece in layout.between:
            if not data.startswith(piece, begin):
                return None
        return layout
    return None


def _layout(data: bytes, tensors: Sequence[tuple[int, int]], form: RequestForm) -> MessageLayout:
    begins, ends = (0, *(end for _, end in tensors)), (*(begin for begin, _ in tensors), len(data))
    return MessageLayout(tensors, [(begin, data[begin:end]) for begin, end in zip(begins, ends, strict=True)], form)


@functools.lru_cache(MAX_CACHED_FORMS)
def _last_of(size: int) -> list[MessageLayout]:
    """Return a list with the layout of the last message of this size, if there is one."""
    return []


def _form(header: bytes) -> RequestForm:
    """Parse a header. Raises DecodeError or TooLargeError."""
    if len(header) > _MAX_HEADER_BYTES:
        raise TooLargeError(f"the request has {len(header)} bytes in addition to the contents of its tensors, more "
                            f"than the limit of {_MAX_HEADER_BYTES}; send tensors in raw_input_contents, or as packed "
                            "values")

    return _cached_form(header) if len(header) <= MAX_CACHED_HEADER_BYTES else RequestForm(
        inference.ModelInferRequest.FromString(header))


@functools.lru_cache(MAX_CACHED_FORMS)
def _cached_form(header: bytes) -> RequestForm:
    return RequestForm(inference.ModelInferRequest.FromString(header), is_cached=True)


def _field(data: bytes, position: int) -> tuple[int, int, int]:
    """Return tag, begin and end of the contents of the field at `position`."""
    tag, value = (data[position], position + 1) if data[position] < 0x80 else _varint(data, position)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        length, begin = _varint(data, value)
        return tag, begin, begin + length
    if wire_type == _VARINT:
        return tag, value, _varint(data, value)[1]
    if wire_type in (_FIXED32, _FIXED64):
        return tag, value, value + (4 if wire_type == _FIXED32 else 8)
    raise _malformed(f"wire type {wire_type} at byte {position}")


def join_response(header: bytes, request_id: str, raw_outputs: Sequence[memoryview]) -> bytes:
    """Return a serialised ModelInferResponse. Copies each tensor once.

    Parameters
    ----------
    header : bytes
        Serialised response without its id and tensors.
    request_id : str
        Id of the request.
    raw_outputs : sequence of memoryview
        Raw contents of the outputs.
    """
    pieces: list[bytes | memoryview] = [header]
    if request_id:
        encoded = request_id.encode()
        pieces += (length_delimited(_RESPONSE_ID, len(encoded)), encoded)
    for raw in raw_outputs:
        pieces += (length_delimited(_RAW_OUTPUT, raw.nbytes), raw)
    return b"".join(pieces)


def response_prefix(header: bytes, size: int) -> bytes:
    """Return the bytes before the contents of the only tensor of a response, which has `size` bytes."""
    return header + length_delimited(_RAW_OUTPUT, size)


def _parse_packed(data: bytes, view: memoryview, begin: int, end: int) -> tuple[Packed, bytes] | None:
    """Return the typed contents of an input and the input without them; None if they have another form.

    protobuf's parser handles all other forms: several contents, unpacked values, or fields of other types.
    """
    field: tuple[int, int, int, int] | None = None          # begin and end of the field, and of its contents
    position, fields = begin, 0
    while position < end:
        fields += 1
        if fields > _MAX_FIELDS:
            return None
        tag, value = _varint(data, position)
        if tag & 7 == _LENGTH_DELIMITED:
            length, start = _varint(data, value)
            after = start + length
        elif tag & 7 == _VARINT:
            start, (_, after) = value, _varint(data, value)
        else:
            return None
        if after > end or (tag == _CONTENTS and field):
            return None
        if tag == _CONTENTS:
            field = position, after, start, after
        position = after
    if not field or field[2] == field[3]:
        return None
    field_at, field_end, start, stop = field
    rest = bytes(view[begin:field_at]) + bytes(view[field_end:end])
    tag, value = _varint(data, start)
    if tag == _BYTES_CONTENTS:
        return Packed("bytes_contents", view[start:stop]), rest
    length, first = _varint(data, value) if tag in _PACKED_FIELDS else (0, 0)
    if first + length != stop:
        return None
    return Packed(_PACKED_FIELDS[tag], view[first:stop]), rest


def byte_strings(values: memoryview, most: int) -> list[bytes]:
    """Return the elements of packed byte strings, at most one more than `most`. Raises MalformedMessageError."""
    data, strings, position = bytes(values), list[bytes](), 0
    while position < len(data) and len(strings) <= most:
        if data[position] != _BYTES_CONTENTS:
            raise _malformed("contents of several kinds in one input")
        length, begin = _varint(data, position + 1)
        position = begin + length
        if position > len(data):
            raise _malformed("an element of bytes_contents ends after its tensor")
        strings.append(data[begin:position])
    return strings


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the base-128 varint at `position` and its end."""
    value = shift = 0
    try:
        if data[position] < 0x80:
            return data[position], position + 1
        for end in range(position + 1, position + 1 + MAX_VARINT_BYTES):
            byte = data[end - 1]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, end
            shift += 7
    except IndexError:
        raise _malformed(f"it ends within the number at byte {position}") from None
    raise _malformed(f"the number at byte {position} has more than {MAX_VARINT_BYTES} bytes")


@functools.lru_cache(MAX_CACHED_FORMS)
def length_delimited(tag: int, length: int) -> bytes:
    """Return the tag and length that precede a field of `length` bytes."""
    encoded = bytearray((tag,))
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _malformed(reason: str) -> MalformedMessageError:
    return MalformedMessageError(f"not a ModelInferRequest: {reason}")
