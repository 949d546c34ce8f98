"""ModelInfer's messages on the wire, without copies of the tensors.

protobuf's parser copies every element of raw_input_contents into a bytes object. Here the top level of a request is
walked by hand: the tensors become views of the received message, and only the rest, a few dozen bytes, is parsed. Typed
contents become views too: the parser would make a Python number of each element.
A response is likewise the serialised header, which repeats, joined with the tensors once. So does a request's: one that
was met before, byte for byte, is not parsed again.

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
from infer_server.protocol.parameters import Reference, from_messages, references_of
from protos import inference

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_RAW_INPUT = inference.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_REQUEST_ID = inference.ModelInferRequest.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_RESPONSE_ID = inference.ModelInferResponse.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_RAW_OUTPUT = inference.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_INPUT = inference.ModelInferRequest.INPUTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_CONTENTS = inference.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PACKED_FIELDS = {field.number << 3 | _LENGTH_DELIMITED: field.name       # tag -> name
                  for field in inference.InferTensorContents.DESCRIPTOR.fields if field.name != "bytes_contents"}
_MANY_BYTES = 4096          # of an input; with fewer, protobuf's parser is as fast
MAX_VARINT_BYTES = 10
_BYTES_CONTENTS = inference.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MOST_HEADER_BYTES = 256 << 10      # of what a message says beside its tensors: protobuf makes 20 times as much of it
_MAX_FIELDS = 4096          # at the top level; a message of nothing but empty fields would hold up the event loop
KEPT_FORMS, KEPT_BYTES = 1024, 2048         # that are kept, and the most that the header, or the JSON, of one may have


@dataclass(frozen=True, slots=True)
class Packed:
    """The values of an InferTensorContents that holds nothing else than one packed field, or byte strings, as they were
    received: the latter each with its tag and length."""
    field: str                              # "fp32_contents"
    values: memoryview


_NONE: Mapping[int, Packed] = MappingProxyType({})


@dataclass(eq=False)
class Form:
    """What a request says but its id and its tensors. Requests that say the same may have the same one: it is never
    changed, and what follows of it can be kept under it."""
    header: inference.ModelInferRequest
    is_kept: bool = False                   # it may come again

    def __post_init__(self) -> None:
        self.model, self.version = self.header.model_name, self.header.model_version
        self.has_contents = any(tensor.HasField("contents") for tensor in self.header.inputs)
        self.outputs_have_parameters = any(tensor.parameters for tensor in self.header.outputs)

    @functools.cached_property
    def references(self) -> Mapping[int, Reference]:
        """The inputs that lie in shared memory, by their positions. Raises InvalidRequestError."""
        return references_of((tensor.name, from_messages(tensor.parameters)) for tensor in self.header.inputs)


class InferRequest(NamedTuple):
    """A ModelInferRequest whose tensors stayed where they were received."""
    form: Form
    raw_inputs: Sequence[memoryview]
    packed: Mapping[int, Packed] = _NONE    # typed contents by the position of their input
    id: str = ""

    @property
    def header(self) -> inference.ModelInferRequest:
        return self.form.header


def split_request(data: bytes) -> InferRequest:
    """Splits a serialised ModelInferRequest. No length in it is trusted. Raises MalformedMessageError."""
    if layout := layout_of(data):
        view = memoryview(data)
        return InferRequest(layout.form, [view[begin:end] for begin, end in layout.tensors])
    view = memoryview(data)
    size = len(data)
    raw_inputs: list[memoryview] = []
    tensors: list[tuple[int, int]] = []     # where they begin and end
    header: list[memoryview | bytes] = []   # the stretches between the tensors
    packed: dict[int, Packed] = {}
    request_id = b""
    position = stretch = fields = inputs = 0
    while position < size:
        fields += 1
        if fields > _MAX_FIELDS:
            raise _malformed(f"it has more than {_MAX_FIELDS} fields")
        tag = data[position]
        if tag < 0x80 and tag & 7 == _LENGTH_DELIMITED and position + 1 < size and data[position + 1] < 0x80:
            begin = position + 2                # most fields are short ones
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
            if end - begin >= _MANY_BYTES and (taken := _take_packed(data, view, begin, end)):
                packed[inputs], rest = taken
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
        if request.form.is_kept and not (request_id or packed):
            _last_of(size)[:] = (_layout(data, tensors, request.form),)
        return request
    except (DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error


class Layout(NamedTuple):
    """The positions of the tensors in a message without an id, and the bytes between them.

    Messages of a client mostly differ in the bytes of their tensors alone: then they are not parsed.
    """
    tensors: Sequence[tuple[int, int]]          # where they begin and end
    between: Sequence[tuple[int, bytes]]        # all other bytes, and where they begin
    form: Form


def layout_of(data: bytes) -> Layout | None:
    """Return the layout of the last message of the same length, if `data` has the same bytes beside its tensors."""
    for layout in _last_of(len(data)):
        for begin, piece in layout.between:
            if not data.startswith(piece, begin):
                return None
        return layout
    return None


def _layout(data: bytes, tensors: Sequence[tuple[int, int]], form: Form) -> Layout:
    begins, ends = (0, *(end for _, end in tensors)), (*(begin for begin, _ in tensors), len(data))
    return Layout(tensors, [(begin, data[begin:end]) for begin, end in zip(begins, ends, strict=True)], form)


@functools.lru_cache(KEPT_FORMS)
def _last_of(size: int) -> list[Layout]:
    """The layout of the last message of so many bytes, if that has one."""
    return []


def _form(header: bytes) -> Form:
    """Raises DecodeError, TooLargeError."""
    if len(header) > _MOST_HEADER_BYTES:
        raise TooLargeError(f"the request has {len(header)} bytes beside the contents of its tensors, and may have "
                            f"{_MOST_HEADER_BYTES}: send these in raw_input_contents, or as packed values")
    return _kept_form(header) if len(header) <= KEPT_BYTES else Form(inference.ModelInferRequest.FromString(header))


@functools.lru_cache(KEPT_FORMS)
def _kept_form(header: bytes) -> Form:
    return Form(inference.ModelInferRequest.FromString(header), is_kept=True)


def _field(data: bytes, position: int) -> tuple[int, int, int]:
    """The tag of the field at `position`, where its contents begin, and where they end."""
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
    """A serialised ModelInferResponse. Copies each tensor once.

    header: the response without its id and its tensors, serialised: what repeats from one response to the next.
    """
    pieces: list[bytes | memoryview] = [header]
    if request_id:
        encoded = request_id.encode()
        pieces += (length_delimited(_RESPONSE_ID, len(encoded)), encoded)
    for raw in raw_outputs:
        pieces += (length_delimited(_RAW_OUTPUT, raw.nbytes), raw)
    return b"".join(pieces)


def response_prefix(header: bytes, size: int) -> bytes:
    """Return what comes before the contents of the only tensor of a response, which have `size` bytes."""
    return header + length_delimited(_RAW_OUTPUT, size)


def _take_packed(data: bytes, view: memoryview, begin: int, end: int) -> tuple[Packed, bytes] | None:
    """The packed values of an input that lies there, and the input without them; None if they lie in another form.

    protobuf reads every form: several contents, unpacked values, or fields that are not numbers.
    """
    found: tuple[int, int, int, int] | None = None          # where the field is, where what it holds is
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
        if after > end or (tag == _CONTENTS and found):
            return None
        if tag == _CONTENTS:
            found = position, after, start, after
        position = after
    if not found or found[2] == found[3]:
        return None
    field_at, field_end, start, stop = found
    rest = bytes(view[begin:field_at]) + bytes(view[field_end:end])
    tag, value = _varint(data, start)
    if tag == _BYTES_CONTENTS:
        return Packed("bytes_contents", view[start:stop]), rest
    length, first = _varint(data, value) if tag in _PACKED_FIELDS else (0, 0)
    if first + length != stop:
        return None
    return Packed(_PACKED_FIELDS[tag], view[first:stop]), rest


def byte_strings(values: memoryview, most: int) -> list[bytes]:
    """Return the elements of Packed byte strings; no more than one beyond `most`. Raises MalformedMessageError."""
    data, found, position = bytes(values), list[bytes](), 0
    while position < len(data) and len(found) <= most:
        if data[position] != _BYTES_CONTENTS:
            raise _malformed("contents of several kinds in one input")
        length, begin = _varint(data, position + 1)
        position = begin + length
        if position > len(data):
            raise _malformed("an element of bytes_contents ends after its tensor")
        found.append(data[begin:position])
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The base-128 integer at `position`, and where it ends."""
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


@functools.lru_cache(KEPT_FORMS)
def length_delimited(tag: int, length: int) -> bytes:
    """What comes before a field of so many bytes."""
    encoded = bytearray((tag,))
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _malformed(reason: str) -> MalformedMessageError:
    return MalformedMessageError(f"not a ModelInferRequest: {reason}")
