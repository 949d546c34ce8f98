"""Parse large JSON requests in steps: lists of numbers with orjson, everything else with ijson's incremental parser.

Parsing the whole text at once would block the event loop for seconds, and Python objects for its numbers would take
thirty times the bytes that were sent. Values of tensors become arrays instead (JsonArray); the rest of a document, the
*frame*, is limited to MAX_FRAME_BYTES. orjson parses a number in a sixth of ijson's time, but only complete texts:
where ijson has entered a list of numbers, orjson is given pieces of that list between two commas.

    {"inputs": [{"name": "x", "shape": [1, 3], "data": [0.1, ...]}]}        frame: all but 0.1, ...

Standard JSON has no NaN and no Infinity. A document with them is parsed at once, like a small one, if it is not too
large.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ijson
import orjson
from ijson.utils import sendable_list

from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protocol.json_values import MAX_DEPTH, JsonArray, Steps, parsed, too_deep

LARGE_BYTES = 64 << 10          # size from which JSON is parsed in steps
MAX_FRAME_BYTES = 1 << 20
_PIECE_BYTES = 16 << 10         # text parsed in one step, a few milliseconds
_VALUE_BYTES = 64               # accounted for each value of the frame in addition to its text
_MAX_AT_ONCE_BYTES = 1 << 20    # limit of a document with NaN or Infinity

_NUMBERS_BYTES = 128 << 10      # text of numbers that orjson parses in one step, in about a millisecond
_FEW_NUMBERS_BYTES = 256        # length of a list of numbers from which orjson is faster

_NUMBER_BYTES = b"-+.0123456789eE, \t\r\n"
_LONG_LIST = re.compile(rb"\[[-+.0-9eE, \t\r\n]{%d}" % _FEW_NUMBERS_BYTES)
_FRACTION = re.compile(rb"[.eE]")
_LONG_NUMBER = re.compile(rb"[0-9]{1000}")

# Paths of values that may be long. _ANY matches any key, _EACH any element of an array.
_ANY, _EACH = "*", "[]"
_INFERENCE = (("inputs", _EACH, "data"),)
_MEMBERS = ((_ANY,), ("parameters", _ANY))

Hold = Callable[[int], None]


def read_inference(body: bytes | bytearray, size: int, hold: Hold) -> Steps[dict[str, Any]]:
    """Parse an inference request; the `data` of its inputs become JsonArrays.

    Parameters
    ----------
    body : bytes-like
        Data that begins with the JSON.
    size : int
        Length of the JSON in bytes.
    hold : callable
        Accounts for bytes of memory before they are used; may raise.

    Raises
    ------
    InvalidRequestError
        The text is not a JSON object.
    TooLargeError
        The frame exceeds MAX_FRAME_BYTES.
    """
    return (yield from _read(body, size, hold, _INFERENCE))


def read_members(body: bytes | bytearray, size: int, hold: Hold) -> Steps[dict[str, Any]]:
    """Parse an object whose members, and those of its member `parameters`, may be long strings or arrays.

    These arrays become JsonArrays. Parameters and errors are those of read_inference.
    """
    return (yield from _read(body, size, hold, _MEMBERS))


def _read(body: bytes | bytearray, size: int, hold: Hold,
          long_paths: tuple[tuple[str, ...], ...]) -> Steps[dict[str, Any]]:
    try:
        return (yield from _parsed_in_steps(body, size, _DocumentBuilder(long_paths, hold), hold))
    except ijson.JSONError as error:
        if "overflow" in str(error):        # a number beyond int64 or float64: parse again with exact decimals
            return (yield from _parsed_in_steps(body, size, _DocumentBuilder(long_paths, hold), hold, use_float=False))
        if size <= _MAX_AT_ONCE_BYTES and (body.find(b"NaN") >= 0 or body.find(b"Infinity") >= 0):
            return _parsed_at_once(bytes(memoryview(body)[:size]), long_paths, hold)
        raise InvalidRequestError(f"failed to parse the request JSON: {str(error).splitlines()[0]}") from error
    except ValueError as error:                     # text that is not UTF-8, or a number with thousands of digits
        raise InvalidRequestError(f"failed to parse the request JSON: {error}") from error


def _parsed_in_steps(body: bytes | bytearray, size: int, document: _DocumentBuilder, hold: Hold,
                     use_float: bool = True) -> Steps[dict[str, Any]]:
    """Parse a document. Raises ijson.JSONError with a byte position, ValueError, and the errors of read_inference."""
    events, text, at, yielded_at = sendable_list(), memoryview(body), 0, 0
    parser = ijson.basic_parse_coro(events, use_float=use_float)
    try:
        while at < size:
            end, is_bracket = min(at + _PIECE_BYTES, size), False
            if use_float and (match := _LONG_LIST.search(body, at, min(end + _FEW_NUMBERS_BYTES, size))):
                is_bracket = match.start() == at        # parsed alone: within a string, it gives no event
                end = at + 1 if is_bracket else min(end, match.start())
            piece = bytes(text[at:end])
            if not use_float and _LONG_NUMBER.search(piece):        # Python refuses to convert it
                raise InvalidRequestError("failed to parse the request JSON: a number has more than 1000 digits")
            parser.send(piece)
            at = end
            if events:
                begins_list = is_bracket and len(events) == 1 and events[0][0] == "start_array"
                document.take(events)
                del events[:]
                if begins_list and document.collects:
                    at = yield from _numbers_in_steps(body, at, size, document)
            else:
                hold(2 * len(piece))                # within a long string, which the parser buffers and then decodes
            if at - yielded_at >= _PIECE_BYTES:
                yielded_at = at
                yield
        parser.close()
    except ijson.JSONError as error:
        reason, *_ = str(error).splitlines()
        raise ijson.JSONError(f"{reason} (at byte {at} or within {_PIECE_BYTES} behind it)") from error
    document.take(events)
    return document.root()


def _numbers_in_steps(body: bytes | bytearray, at: int, size: int, document: _DocumentBuilder) -> Steps[int]:
    """Add the numbers that begin a list at `at` to the document. Return the position of the first one not added.

    The last number, and what is no number, are left to ijson, which has read the list's bracket.
    """
    text = memoryview(body)
    while True:
        limit = min(at + _NUMBERS_BYTES, size)
        end = body.find(b"]", at, limit)
        piece = bytes(text[at:limit if end < 0 else end])
        comma = piece.rfind(b",")
        if comma >= 0 and not piece[comma + 1:].strip():        # a list does not end with a comma
            comma = piece.rfind(b",", 0, comma)
        if comma < 0 or piece.translate(None, _NUMBER_BYTES):
            return at
        piece = piece[:comma]
        try:
            values = orjson.loads(b"[%b]" % piece)
        except ValueError:                          # ijson reports the position, and reads numbers beyond float64
            return at
        if not values:
            return at
        document.take_numbers(values, float if _FRACTION.search(piece) else int)
        at += comma + 1
        if end >= 0:
            return at
        yield


def _parsed_at_once(text: bytes, long_paths: tuple[tuple[str, ...], ...], hold: Hold) -> dict[str, Any]:
    """Parse a document at once, with its long arrays as JsonArrays."""
    document = parsed(text)
    if not isinstance(document, dict):
        raise InvalidRequestError("the request is not a JSON object")

    def collect(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, list) and _is_long_path(path, long_paths):
            return JsonArray.of(value, hold)
        if isinstance(value, dict):
            return {key: collect(each, (*path, key)) for key, each in value.items()}
        return [collect(each, (*path, _EACH)) for each in value] if isinstance(value, list) and len(path) < 2 else value
    root: dict[str, Any] = collect(document, ())
    return root


def _is_long_path(path: tuple[str, ...] | list[str], long_paths: tuple[tuple[str, ...], ...]) -> bool:
    return any(len(path) == len(pattern) and all(part in (_ANY, key) for part, key in zip(pattern, path, strict=True))
               for pattern in long_paths)


class _DocumentBuilder:
    """Builder of a document from the parser's events."""

    def __init__(self, long_paths: tuple[tuple[str, ...], ...], hold: Hold) -> None:
        self._long_paths, self._hold = long_paths, hold
        self._root: Any = None
        self._open: list[dict[str, Any] | list[Any]] = []       # open containers, innermost last
        self._path: list[str] = []                              # key, or _EACH, of the next value of each of them
        self._frame_bytes = 0
        self._array: JsonArray | None = None                    # array that collects values, if any
        self._depth = 0                                         # nesting depth within that array

    def root(self) -> dict[str, Any]:
        if not isinstance(self._root, dict):
            raise InvalidRequestError("the request is not a JSON object")
        return self._root

    @property
    def collects(self) -> bool:
        """True if the next values belong to a JsonArray."""
        return self._array is not None

    def take_numbers(self, values: list[int | float], kind: type) -> None:
        """Add numbers to the JsonArray that collects values; with kind float, some of them are floats."""
        assert self._array is not None
        self._array.add(values, self._hold, {kind})

    def take(self, events: list[tuple[str, Any]]) -> None:
        """Add events. Raises InvalidRequestError or TooLargeError."""
        at = 0
        while at < len(events):
            if self._array is not None:
                at = self._take_values(self._array, events, at)
            else:
                self._take_event(*events[at])
                at += 1

    def _take_event(self, event: str, value: Any) -> None:
        if event == "map_key":
            self._count(len(value))
            inner = self._open[-1]
            if value in inner:
                raise InvalidRequestError(f"the member '{value[:100]}' occurs twice in the request JSON; send it once")
            self._path[-1] = value
        elif event == "start_map":
            self._begin({}, "")
        elif event == "start_array":
            if _is_long_path(self._path, self._long_paths):
                self._array, self._depth = JsonArray(), 1
                self._put(self._array)
            else:
                self._begin([], _EACH)
        elif event in ("end_map", "end_array"):
            self._open.pop()
            self._path.pop()
        else:
            is_long = isinstance(value, str) and _is_long_path(self._path, self._long_paths)
            if is_long:
                self._hold(len(value))
            self._count(len(value) if isinstance(value, str) and not is_long else 0)
            self._put(value)

    def _take_values(self, array: JsonArray, events: list[tuple[str, Any]], at: int) -> int:
        """Add values to an array until it ends or the events end. Return the position of the next event."""
        if at == 0 and not _BRACKETS.intersection([event for event, _ in events]):
            array.add([value for _, value in events], self._hold)
            return len(events)
        values: list[Any] = []
        for end in range(at, len(events)):
            event, value = events[end]
            if event == "start_array":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise too_deep()
            elif event == "end_array":
                self._depth -= 1
                if not self._depth:
                    self._array = None
                    break
            elif event == "start_map":
                raise InvalidRequestError("an array of values contains a JSON object; expected numbers, booleans or "
                                          "strings")
            else:
                values.append(value)
        if values:
            array.add(values, self._hold)
        return end + 1

    def _begin(self, container: dict[str, Any] | list[Any], key: str) -> None:
        self._count(0)
        self._put(container)
        self._open.append(container)
        self._path.append(key)
        if len(self._open) > MAX_DEPTH:
            raise InvalidRequestError(f"failed to parse the request JSON: it has more than {MAX_DEPTH} nested levels")

    def _put(self, value: Any) -> None:
        if not self._open:
            self._root = value
        elif isinstance(inner := self._open[-1], dict):
            inner[self._path[-1]] = value
        else:
            inner.append(value)

    def _count(self, text_bytes: int) -> None:
        self._frame_bytes += text_bytes + _VALUE_BYTES
        if self._frame_bytes > MAX_FRAME_BYTES:
            raise TooLargeError(f"the request JSON has too many members and elements beside the values of its tensors: "
                                f"they take more than {MAX_FRAME_BYTES} bytes")


_BRACKETS = frozenset(("start_array", "end_array", "start_map"))
