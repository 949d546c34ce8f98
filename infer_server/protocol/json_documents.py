"""Reads large JSON requests in steps, without building an object for each of their values.

A parser of the whole text would keep the interpreter for seconds, and make up to thirty bytes of each that was sent.
Here only the *frame* of a document is parsed at once: all but its long arrays and long strings, which stay where they
were received until it is known which tensor they are (JsonArray.values, JsonString.content). The frame is bounded.

    {"inputs": [{"name": "x", "shape": [1, 3], "data": [0.1, ...]}]}        frame: all but [0.1, ...]

https://www.rfc-editor.org/rfc/rfc8259
"""
from __future__ import annotations

import re
from typing import Any, NamedTuple

from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protocol.json_values import (
    LONG_BYTES,
    MOST_DEPTH,
    PIECE_BYTES,
    Body,
    JsonArray,
    JsonString,
    Piece,
    Steps,
    parsed,
    string_end,
    structure_of,
    unreadable,
)

LARGE_BYTES = 64 << 10          # of JSON, from which on it is read in steps
MOST_FRAME_BYTES = 1 << 20
_MOST_ELEMENTS = 4096           # of an array or object that may have long values in it
_TOKENS_OF_A_STEP = 2000
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^ \t\n\r,\]}\[{\":]+")
_TOKEN = re.compile(rb"\"(?:[^\"\\]++|\\.)*+\"?|[\[\]{}]", re.DOTALL)        # a string, or a bracket
_QUOTE, _OPENING = ord('"'), b"{["
_BEFORE_A_STRING = re.compile(rb"[ \t\n\r\[]*")
_BEHIND_A_STRING = re.compile(rb"[ \t\n\r\]]*")


class _Long(NamedTuple):
    """A value that was left out of the frame."""
    path: tuple[str | int, ...]
    value: JsonArray | JsonString


def read_inference(body: Body, size: int) -> Steps[dict[str, Any]]:
    """Read an inference request; the long `data` of its inputs are JsonArrays.

    Parameters
    ----------
    body : begins with the JSON.
    size : of the JSON in bytes.

    Raises
    ------
    InvalidRequestError : it is no JSON object.
    TooLargeError : the frame has more than MOST_FRAME_BYTES.
    """
    reader = _Reader(body, size)
    return (yield from reader.read(_INFERENCE))


def read_members(body: Body, size: int) -> Steps[dict[str, Any]]:
    """Read an object whose long members, and those of its member `parameters`, are JsonArrays and JsonStrings. See
    read_inference."""
    reader = _Reader(body, size)
    return (yield from reader.read(_MEMBERS))


# Where long values may stand: the keys on the way; _ANY is any key, _EACH any element of an array.
_ANY, _EACH = "*", "[]"
_INFERENCE = (("inputs", _EACH, "data"),)
_MEMBERS = ((_ANY,), ("parameters", _ANY))


class _Reader:
    """Of one document. What its methods return is where in the body the value ends."""

    def __init__(self, body: Body, size: int) -> None:
        self._body, self._size = body, size
        self._frame: list[Body] = []            # pieces of its text
        self._framed = 0                        # where in the body the next one begins
        self._frame_bytes = 0
        self._long: list[_Long] = []
        self._tokens = 0                        # since the last step

    def read(self, places: tuple[tuple[str, ...], ...]) -> Steps[dict[str, Any]]:
        at = self._space(0)
        if self._body[at:at + 1] != b"{":
            raise unreadable("the request is no JSON object", at)
        at = self._space((yield from self._object(at, (), places)))
        if at != self._size:
            raise unreadable("Extra data", at)
        self._take(at)
        yield
        document: dict[str, Any] = parsed(b"".join(self._frame))
        for path, value in self._long:
            _put(document, path, value)
        return document

    def _object(self, at: int, path: tuple[str | int, ...], places: tuple[tuple[str, ...], ...]) -> Steps[int]:
        """Reads an object that begins at `at`. places: where in it long values may stand."""
        body, at, seen = self._body, self._space(at + 1), set[str]()
        while body[at:at + 1] != b"}" or seen:
            if body[at:at + 1] != b'"':
                raise unreadable("Expecting property name enclosed in double quotes", at)
            end = yield from self._string(at)
            key: str = parsed(body[at:end])
            if key in seen:
                raise InvalidRequestError(f"the member '{key[:100]}' is there twice in the request JSON")
            seen.add(key)
            if len(seen) > _MOST_ELEMENTS:
                raise TooLargeError(f"an object of the request JSON has more than {_MOST_ELEMENTS} members")
            at = self._space(end)
            if body[at:at + 1] != b":":
                raise unreadable("Expecting ':' delimiter", at)
            at = self._space(at + 1)
            inner = tuple(place[1:] for place in places if place[0] in (key, _ANY))
            at = self._space((yield from self._value(at, (*path, key), inner)))
            if body[at:at + 1] == b",":
                at = self._space(at + 1)
            elif body[at:at + 1] != b"}":
                raise unreadable("Expecting ',' delimiter", at)
            else:
                break
        return at + 1

    def _array(self, at: int, path: tuple[str | int, ...], places: tuple[tuple[str, ...], ...]) -> Steps[int]:
        """Reads an array whose elements may have long values."""
        body, at, count = self._body, self._space(at + 1), 0
        while body[at:at + 1] != b"]" or count:
            at = self._space((yield from self._value(at, (*path, count), places)))
            count += 1
            if count > _MOST_ELEMENTS:
                raise TooLargeError(f"'{path[-1]}' has more than {_MOST_ELEMENTS} elements")
            if body[at:at + 1] == b",":
                at = self._space(at + 1)
            elif body[at:at + 1] != b"]":
                raise unreadable("Expecting ',' delimiter", at)
            else:
                break
        return at + 1

    def _value(self, at: int, path: tuple[str | int, ...], places: tuple[tuple[str, ...], ...]) -> Steps[int]:
        """Reads a value. places: () if it may be long itself, and where in it long values may stand."""
        yield from self._count()
        self._check_frame(at - self._framed)
        first = self._body[at:at + 1]
        is_place, inner = () in places, tuple(place for place in places if place)
        if first == b"{" and inner:
            return (yield from self._object(at, path, inner))
        if first == b"[" and (within := tuple(place[1:] for place in inner if place[0] == _EACH)):
            return (yield from self._array(at, path, within))
        if is_place and first == b"[":
            return (yield from self._long_array(at, path))
        if is_place and first == b'"':
            end = yield from string_end(self._body, at, self._size)
            if end - at > LONG_BYTES:
                self._leave_out(at, end, path, JsonString(self._body, at, end))
            return end
        return (yield from self._short(at))

    def _short(self, at: int) -> Steps[int]:
        """Passes over a value of the frame. Whether it is JSON is found when the frame is parsed."""
        body, size, first = self._body, self._size, self._body[at:at + 1]
        if first == b'"':
            return (yield from self._string(at))
        if first not in (b"{", b"["):
            match = _SCALAR.match(body, at, min(size, at + MOST_FRAME_BYTES))
            if not match:
                raise unreadable("Expecting value", at)
            return match.end()
        depth = 0
        most = min(size, at + MOST_FRAME_BYTES)
        for count, token in enumerate(_TOKEN.finditer(body, at, most)):
            kind = body[token.start()]
            if kind != _QUOTE:
                depth += 1 if kind in _OPENING else -1
                if not depth:
                    return token.end()
            if count % _TOKENS_OF_A_STEP == _TOKENS_OF_A_STEP - 1:
                yield
        self._check_frame(size - self._framed)
        raise unreadable("Unterminated value", at)

    def _string(self, at: int) -> Steps[int]:
        end = yield from string_end(self._body, at, self._size)
        self._check_frame(end - at)
        return end

    def _long_array(self, at: int, path: tuple[str | int, ...]) -> Steps[int]:
        """Passes over an array of scalars and arrays. Flat arrays of numbers, which are most, are found by memchr."""
        body, size = self._body, self._size
        end = body.find(b"]", at, size) + 1
        if end and all(body.find(other, at + 1, end) < 0 for other in (b"[", b'"', b"{")):
            pieces = None
        else:
            pieces = yield from self._pieces(at)
            end = pieces[-1].end
        if end - at > LONG_BYTES:
            self._leave_out(at, end, path, JsonArray(body, at, end, pieces))
        return end

    def _pieces(self, begin: int) -> Steps[list[Piece]]:
        """Cut an array into pieces that are parsed one by one: at commas outside of strings, wherever they are nested.

        Raises InvalidRequestError: an object is in it, it does not end, is nested too deeply, or has too long a value.
        """
        pieces: list[Piece] = []
        at, depth = begin, 0
        while True:
            text = self._body[at:min(at + PIECE_BYTES, self._size)]
            found = structure_of(text, depth)
            if found.has_object:
                raise InvalidRequestError("an array of values has a JSON object in it")
            if found.deepest > MOST_DEPTH:
                raise InvalidRequestError(f"'data': JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})")
            if found.end:
                piece = Piece(at, at + found.end, depth, found.depth)
            else:
                piece = yield from self._piece_of_a_long_string(at, depth)
            pieces.append(piece)
            depth = piece.depth_behind
            if not depth:
                return pieces
            at = piece.end + 1              # behind its comma
            yield

    def _piece_of_a_long_string(self, at: int, depth: int) -> Steps[Piece]:
        """A piece with one string that is longer than other pieces are."""
        body, size = self._body, self._size
        most = min(size, at + PIECE_BYTES)
        match = _BEFORE_A_STRING.match(body, at, most)
        quote = match.end() if match else at
        if body[quote:quote + 1] != b'"':
            if most == size:
                raise unreadable("Unterminated array", at)
            raise InvalidRequestError(f"the value at byte {at} of the request JSON has more than {PIECE_BYTES} bytes")
        end = yield from string_end(body, quote, size)
        behind = _BEHIND_A_STRING.match(body, end, min(size, end + PIECE_BYTES))
        cut = behind.end() if behind else end
        depth_before, opened = depth, body.count(b"[", at, quote)
        depth += opened
        for position in range(end, cut):
            depth -= body[position] == ord("]")
            if not depth:
                return Piece(at, position + 1, depth_before, 0, (quote, end))
        if body[cut:cut + 1] != b"," or depth > MOST_DEPTH:
            raise unreadable("Expecting ',' delimiter", cut)
        return Piece(at, cut, depth_before, depth, (quote, end))

    # ---- the frame
    def _leave_out(self, begin: int, end: int, path: tuple[str | int, ...], value: JsonArray | JsonString) -> None:
        self._take(begin)
        self._frame.append(b"null")
        self._framed = end
        self._long.append(_Long(path, value))

    def _take(self, end: int) -> None:
        self._check_frame(end - self._framed)
        self._frame.append(self._body[self._framed:end])
        self._frame_bytes += end - self._framed
        self._framed = end

    def _check_frame(self, more: int) -> None:
        if self._frame_bytes + more > MOST_FRAME_BYTES:
            raise TooLargeError(f"the request has more than {MOST_FRAME_BYTES} bytes of JSON beside the values of its "
                                "tensors")

    def _space(self, at: int) -> int:
        match = _SPACE.match(self._body, at, min(self._size, at + MOST_FRAME_BYTES + 1))
        end = match.end() if match else at
        self._check_frame(end - at)
        return end

    def _count(self) -> Steps[None]:
        self._tokens += 1
        if self._tokens >= _TOKENS_OF_A_STEP:
            self._tokens = 0
            yield


def _put(document: Any, path: tuple[str | int, ...], value: JsonArray | JsonString) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


