"""Ranges of items of .npy and .npz files, read as streams: memory holds some items, never a whole file."""
from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from infer_server.calibration.data.items import holds_items
from infer_server.calibration.data.sources.arrays import UNREADABLE, headers_of
from infer_server.engines.errors import InputError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor

BLOCK = 1 << 20     # bytes that are read over at a time


def read_arrays(path: Path, inputs: Sequence[IoTensor], start: int, stop: int, size: int
                ) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield (first item, {input: array with an item a row}) for items `start` to `stop`, `size` at a time.

    Inputs without a batch axis are repeated for each item. Raises InputError, naming the file.
    """
    headers = headers_of(path, inputs)
    try:
        with ExitStack() as stack:
            if path.suffix == ".npy":
                array = np.load(path, mmap_mode="r", allow_pickle=False)
                streams = {inputs[0].name: _mapped(array, inputs[0], start, stop, size)}
            else:
                archive = stack.enter_context(zipfile.ZipFile(path))
                members = {name.removesuffix(".npy"): name for name in archive.namelist()}
                streams = {io.name: _streamed(stack.enter_context(archive.open(members[io.name])), io,
                                              len(headers[io.name].shape), start, stop, size) for io in inputs}
            for first in range(start, stop, size):
                yield first, {name: next(stream) for name, stream in streams.items()}
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _counts(io: IoTensor, rank: int) -> bool:
    """Return True if the leading axis of an array counts items; an array of one item may lack it."""
    return holds_items(io) and rank == len(io.shape)


def _mapped(array: Array, io: IoTensor, start: int, stop: int, size: int) -> Iterator[Array]:
    for first in range(start, stop, size):
        count = min(size, stop - first)
        if _counts(io, array.ndim):
            yield np.array(array[first:first + count])
        else:
            yield np.broadcast_to(array, (count, *array.shape))


def _streamed(stream: IO[bytes], io: IoTensor, rank: int, start: int, stop: int, size: int) -> Iterator[Array]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError(f"'{io.name}' holds Python objects")
    if not _counts(io, rank) or fortran:
        whole = _array(stream, shape[::-1] if fortran else shape, dtype)
        yield from _mapped(whole.transpose() if fortran else whole, io, start, stop, size)
        return
    row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
    _skip(stream, start * row_bytes)
    for first in range(start, stop, size):
        yield _array(stream, (min(size, stop - first), *shape[1:]), dtype)


def _array(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    array = np.empty(shape, dtype)
    view = array.reshape(-1).view(np.uint8).data
    at = 0
    while at < len(view):
        if not (part := stream.read(len(view) - at)):
            raise ValueError(f"it ends {len(view) - at} bytes too early")
        view[at:at + len(part)] = part
        at += len(part)
    return array


def _skip(stream: IO[bytes], count: int) -> None:
    while count > 0 and (part := stream.read(min(BLOCK, count))):
        count -= len(part)
