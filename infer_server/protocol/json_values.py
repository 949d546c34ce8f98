"""Values of JSON requests: small documents, which are parsed at once, and long arrays of large ones."""
from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from sys import getsizeof
from typing import Any, TypeVar

import orjson

from infer_server.errors import InvalidRequestError

T = TypeVar("T")
Steps = Generator[None, None, T]        # yields where the event loop may run other work

MAX_DEPTH = 100                 # maximum nesting depth of lists, as in Triton
_FEW_BYTES = 4096               # size up to which json is as fast as orjson
_POINTER_BYTES = 8


def parsed(text: bytes | bytearray) -> Any:
    """Parse JSON at once. Raises InvalidRequestError for invalid JSON, invalid UTF-8 or lone surrogates.

    Integers of more than 64 bits are floats in a text of _FEW_BYTES or more.
    """
    if len(text) >= _FEW_BYTES:
        with suppress(ValueError):          # json also accepts NaN and 1e400, and its errors are clearer
            return orjson.loads(text)
    try:
        decoded = str(text, "utf-8")
        value = json.loads(decoded)
        if "\\ud" in decoded or "\\uD" in decoded:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"failed to parse the request JSON: {error}") from error


class JsonArray:
    """Flat values of a long array, in chunks: ndarrays of numbers or booleans, lists of anything else."""

    def __init__(self) -> None:
        self.count = 0                      # number of values
        self._chunks: deque[Any] = deque()

    @classmethod
    def of(cls, data: list[Any], hold: Callable[[int], None]) -> JsonArray:
        """Return the values of nested lists."""
        array = cls()
        array.add(flat(data), hold)
        return array

    def add(self, values: list[Any], hold: Callable[[int], None], kinds: set[type] | None = None) -> None:
        """Append values; `hold` accounts for the bytes that they take and may raise.

        kinds: types of the values if known; {float} if they are numbers of which some are floats.
        """
        chunk = _compact(values, set(map(type, values)) if kinds is None else kinds)
        hold(sum(map(getsizeof, chunk)) + _POINTER_BYTES * len(chunk) if isinstance(chunk, list) else chunk.nbytes)
        self._chunks.append(chunk)
        self.count += len(chunk)

    def take_chunks(self) -> Iterator[Any]:
        """Yield the chunks and drop each once it was read."""
        while self._chunks:
            yield self._chunks.popleft()


def _compact(values: list[Any], kinds: set[type]) -> Any:
    """Return values of one type as an ndarray (int64, uint64, float64 or bool), others unchanged."""
    import numpy as np  # here: frontend workers that read no JSON do without it
    if Decimal in kinds:                    # from the parser with exact decimals
        values = [float(value) if type(value) is Decimal else value for value in values]
        kinds = kinds - {Decimal} | {float}
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if kinds == {int}:
        for dtype in (np.int64, np.uint64):
            with suppress(OverflowError):
                return np.array(values, dtype)
        return values
    if kinds == {float}:
        return np.array(values, np.float64)
    if kinds == {int, float}:
        with suppress(OverflowError):       # an integer beyond float64
            return np.array(values, np.float64)
    return values


def flat(data: list[Any]) -> list[Any]:
    """Flatten nested lists. Raises InvalidRequestError if they are nested too deeply."""
    for depth in range(MAX_DEPTH, 0, -1):
        types = set(map(type, data))        # the fastest way to inspect a long list
        if list not in types:
            return data
        if len(types) > 1:
            values: list[Any] = []
            _flatten(data, values, depth)
            return values
        data = list(chain.from_iterable(data))
    raise too_deep()


def too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"'data': JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def _flatten(data: list[Any], values: list[Any], depth: int) -> None:
    if not depth:
        raise too_deep()
    if list not in set(map(type, data)):
        values += data
        return
    for value in data:
        if type(value) is list:
            _flatten(value, values, depth - 1)
        else:
            values.append(value)
