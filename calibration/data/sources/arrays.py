"""Calibration data in NumPy files: .npz with an array for each input, .npy for a model of one input."""
from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from infer_server.calibration.data.corrupt import CorruptFiles
from infer_server.calibration.data.items import CalibrationData, Feed, Header, batched_inputs, count_items, split_items
from infer_server.engines.errors import CalibrationError
from infer_server.engines.plan.plan import IoTensor

SUFFIXES = (".npz", ".npy")
UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile)


def from_arrays(source: str, files: Sequence[Path], inputs: Sequence[IoTensor],
                allow_corrupt: bool = False) -> CalibrationData:
    """Return the items of files in order; headers are checked and counted now, contents are read later.

    Raises CalibrationError, naming the file, if its arrays do not match the model's inputs, or if it is unreadable and
    such files are not allowed.
    """
    corrupt = CorruptFiles(allow_corrupt)
    for file in files[:1]:
        if file.suffix == ".npy":
            _only(inputs, file)
    headers = corrupt.readable(files, lambda file: headers_of(file, inputs))
    counts = {file: count_items(str(file), arrays, inputs) for file, arrays in headers}

    def read() -> Iterator[Feed]:
        for file, arrays in corrupt.readable(list(counts), lambda file: _load(file, inputs)):
            yield from split_items(str(file), arrays, inputs)

    return CalibrationData(source, read, sum(counts.values()), batched_inputs(inputs), corrupt=corrupt)


def headers_of(file: Path, inputs: Sequence[IoTensor]) -> dict[str, Header]:
    """Return the header of each array by input name, read from its first bytes.

    Raises CalibrationError, naming the file.
    """
    try:
        if file.suffix == ".npy":
            with file.open("rb") as stream:
                return {_only(inputs, file): _header(stream)}
        headers = {}
        with zipfile.ZipFile(file) as archive:
            for member in archive.namelist():
                with archive.open(member) as stream:
                    headers[member.removesuffix(".npy")] = _header(stream)
        return headers
    except UNREADABLE as error:
        raise CalibrationError(f"{file} cannot be read: {error}") from error


def _header(stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return Header(shape, dtype)


def _load(file: Path, inputs: Sequence[IoTensor]) -> Feed:
    try:
        if file.suffix == ".npy":
            return {_only(inputs, file): np.load(file, mmap_mode="r", allow_pickle=False)}
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except UNREADABLE as error:
        raise CalibrationError(f"{file} cannot be read: {error}") from error


def _only(inputs: Sequence[IoTensor], file: Path) -> str:
    if len(inputs) != 1:
        raise CalibrationError(f"{file}: an .npy file has no names, and the model has {len(inputs)} inputs "
                               f"({', '.join(tensor.name for tensor in inputs)}); give .npz files")
    return inputs[0].name
