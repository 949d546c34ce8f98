"""Values of a JSON request: parsed at once where they are short, piece by piece where they are long."""
from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from infer_server.errors import InvalidRequestError

Body = bytes | bytearray
T = TypeVar("T")
Steps = Generator[None, None, T]        # yields where the event loop may have its turn

LONG_BYTES = 4 << 10            # of an array or string that is not read with the rest of its document
PIECE_BYTES = 32 << 10          # that are parsed at a time: a millisecond or two
_MOST_ESCAPED_BYTES = 8 << 20   # of a string with escapes, which is parsed at once
MOST_DEPTH = 100                # of lists within lists: as deep as Triton reads, of whatever rank
_FEW_BYTES = 4096               # of JSON, which json parses as quickly
_CONTROL = re.compile(rb"[\x00-\x1f]")
_CHARACTERS = re.compile(rb"(?:[^\"\\]++|\\.)*+", re.DOTALL)     # of a string
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_QUOTE, _OPEN, _CLOSE, _COMMA, _BRACE = b'"[],{'
# Five times as fast as json, if it is installed. Integers of more than 64 bits are floats.
_orjson_loads: Callable[[Body], Any] | None = import_module("orjson").loads if find_spec("orjson") else None


def parsed(text: Body) -> Any:
    """Parse JSON. Raises InvalidRequestError: it is none, or has text in it that no UTF-8 is, halves of characters."""
    if _orjson_loads and len(text) >= _FEW_BYTES:
        with suppress(ValueError):          # what json reads beyond JSON (NaN, 1e400), and its words for what is none
            return _orjson_loads(text)
    try:
        decoded = str(text, "utf-8")
        value = json.loads(decoded)
        if "\\ud" in decoded or "\\uD" in decoded:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"failed to parse the request JSON: {error}") from error


def unreadable(what: str, at: int) -> InvalidRequestError:
    """Return the error of a document that is no JSON at byte `at`."""
    return InvalidRequestError(f"failed to parse the request JSON: {what}: byte {at}")


class Piece(NamedTuple):
    """A part of an array's text, between two commas."""
    begin: int
    end: int
    depth: int = 1                          # of the arrays that are open before it
    depth_behind: int = 1
    string: tuple[int, int] | None = None   # where its one string begins and ends, if that is long


class JsonArray(NamedTuple):
    """An array of numbers, truths or strings, nested or not, that has not been parsed."""
    body: Body
    begin: int
    end: int
    pieces: list[Piece] | None              # None: it has no brackets and no strings in it

    @property
    def most_values(self) -> int:
        """An upper bound of the number of its values: each has a character and a comma, or the bracket."""
        return (self.end - self.begin) // 2

    def values(self) -> Iterator[Steps[list[Any]]]:
        """Iterate over the values piece by piece, each a flat list.

        Raises InvalidRequestError: a piece is no JSON.
        """
        for piece in self.pieces if self.pieces is not None else self._flat_pieces():
            yield self._values(piece)

    def _flat_pieces(self) -> Iterator[Piece]:
        at, end = self.begin + 1, self.end - 1
        while at + PIECE_BYTES < end:
            cut = self.body.rfind(b",", at, at + PIECE_BYTES)
            if cut < 0:
                raise InvalidRequestError(
                    f"the value at byte {at} of the request JSON has more than {PIECE_BYTES} bytes")
            yield Piece(at, cut)
            at = cut + 1
        if at > self.begin + 1 or self.body[at:end].strip():
            yield Piece(at, end)

    def _values(self, piece: Piece) -> Steps[list[Any]]:
        if piece.string:
            return [(yield from JsonString(self.body, *piece.string).content())]
        text = self.body[piece.begin:piece.end]
        is_last = not piece.depth_behind or piece.end == self.end - 1
        if piece.begin > self.begin + 1 and text.lstrip()[:1] in (b"]", b"") or (
                not is_last and text.rstrip()[-1:] in (b"[", b"")):
            raise unreadable("Expecting value", piece.begin)
        try:
            return flat(parsed(b"[" * piece.depth + text + b"]" * piece.depth_behind))
        except InvalidRequestError as error:
            if isinstance(cause := error.__cause__, json.JSONDecodeError):
                raise unreadable(cause.msg, piece.begin + cause.pos - piece.depth) from error
            raise


class JsonString(NamedTuple):
    """A string that has not been parsed; `begin` and `end` are those of its quotes."""
    body: Body
    begin: int
    end: int

    def content(self) -> Steps[bytes]:
        """Return its text in UTF-8. Raises InvalidRequestError: it is no JSON string."""
        body, begin, end = self.body, self.begin + 1, self.end - 1
        if body.find(b"\\", begin, end) >= 0:
            if end - begin > _MOST_ESCAPED_BYTES:
                raise InvalidRequestError(
                    f"the string at byte {self.begin} of the request JSON has escapes and more than "
                    f"{_MOST_ESCAPED_BYTES} bytes: send it without escapes, or as binary data")
            yield
            text: str = parsed(body[self.begin:self.end])
            return text.encode()
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(begin, end, 4 * PIECE_BYTES):
            piece = body[at:min(end, at + 4 * PIECE_BYTES)]
            if control := _CONTROL.search(piece):
                raise unreadable("Invalid control character", at + control.start())
            try:
                decoder.decode(piece, at + len(piece) == end)
            except UnicodeDecodeError as error:
                raise unreadable(f"no UTF-8 ({error.reason})", at + error.start) from error
            yield
        return bytes(body[begin:end])


def string_end(body: Body, at: int, size: int) -> Steps[int]:
    """Return where the string ends that begins at `at`. Raises InvalidRequestError: before `size` it does not."""
    quote = body.find(b'"', at + 1, size)
    if quote >= 0 and body.find(b"\\", at + 1, quote) < 0:
        return quote + 1
    end = at + 1
    while True:
        match = _CHARACTERS.match(body, end, min(size, end + PIECE_BYTES))
        begin, end = end, match.end() if match else end
        if body[end:end + 1] == b'"' and end < size:
            return end + 1
        if begin == end:
            raise unreadable("Unterminated string", at)
        yield


class Structure(NamedTuple):
    """The brackets of a text that begins within an array."""
    has_object: bool
    deepest: int
    end: int            # of the array, or of the text before the last comma outside of strings; 0: there is none
    depth: int          # there


def structure_of(text: Body, depth: int) -> Structure:
    """Look for brackets and commas outside of strings. depth: of the arrays that are open before the text."""
    import numpy as np  # here: fronts that read no JSON do without it
    masked = _ESCAPE.sub(b"__", text) if b"\\" in text else text
    chars = np.frombuffer(masked, np.uint8)
    if b'"' in text:
        quotes = chars == _QUOTE
        chars = np.where(np.cumsum(quotes, dtype=np.uint8) & 1, 0, chars)
    steps = (chars == _OPEN).astype(np.int8) - (chars == _CLOSE).astype(np.int8)
    depths = depth + np.cumsum(steps, dtype=np.int32)
    ends = np.flatnonzero((depths == 0) & (steps < 0))
    if ends.size:
        end, behind = int(ends[0]) + 1, 0
    else:
        commas = np.flatnonzero(chars == _COMMA)
        end = int(commas[-1]) if commas.size else 0
        behind = int(depths[end])
    seen = slice(0, end or None)
    return Structure(bool((chars[seen] == _BRACE).any()), int(depths[seen].max(initial=0)), end, behind)


def flat(data: list[Any]) -> list[Any]:
    """Flatten nested lists. Raises InvalidRequestError: they are nested too deeply."""
    for depth in range(MOST_DEPTH, 0, -1):
        types = set(map(type, data))        # the quickest look at all of a list
        if list not in types:
            return data
        if len(types) > 1:
            values: list[Any] = []
            _flatten(data, values, depth)
            return values
        data = list(chain.from_iterable(data))
    raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"'data': JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})")


def _flatten(data: list[Any], values: list[Any], depth: int) -> None:
    if not depth:
        raise _too_deep()
    if list not in set(map(type, data)):
        values += data
        return
    for value in data:
        if type(value) is list:
            _flatten(value, values, depth - 1)
        else:
            values.append(value)
