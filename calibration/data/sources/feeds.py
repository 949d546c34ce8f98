"""Calibration data from a function that yields feeds each time it is called."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.calibration.data.items import CalibrationData, Feed, batched_inputs, split_items
from infer_server.engines.errors import CalibrationError
from infer_server.engines.plan.plan import IoTensor

Feeds = Callable[[], Iterable[Any]]     # yields {input: array of one or many items}, which is checked


def from_feeds(source: str, feeds: Feeds, inputs: Sequence[IoTensor]) -> CalibrationData:
    """Return the items of feeds, which are called again for each pass; their number is unknown.

    Reading them raises CalibrationError if they do not match the model's inputs, and any exception of `feeds`.
    """
    def read() -> Iterator[Feed]:
        for where, arrays in _arrays(source, feeds):
            yield from split_items(where, arrays, inputs)

    return CalibrationData(source, read, None, batched_inputs(inputs))


def digest_of(source: str, feeds: Feeds) -> str:
    """Return a digest of the names, dtypes, shapes and values of all feeds in order."""
    hasher = hashlib.blake2b(digest_size=20)
    for _, arrays in _arrays(source, feeds):
        for name, array in sorted(arrays.items()):
            hasher.update(repr((name, str(array.dtype), array.shape)).encode())
            hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _arrays(source: str, feeds: Feeds) -> Iterator[tuple[str, Feed]]:
    """Yield (name in errors, arrays) of each feed."""
    for number, feed in enumerate(feeds()):
        where = f"{source}: feed {number}"
        if not isinstance(feed, Mapping):
            raise CalibrationError(f"{where} is a {type(feed).__name__}; give dicts {{input name: array}}")
        arrays = {str(name): _array(where, name, value) for name, value in feed.items()}
        yield where, arrays


def _array(where: str, name: str, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:     # lists of different lengths
        raise CalibrationError(f"{where}: '{name}' is no array: {error}") from error
    if array.dtype.hasobject:
        raise CalibrationError(f"{where}: '{name}' is no array of numbers, but of {array.dtype}")
    return array
