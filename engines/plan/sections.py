"""Sections of a plan file, copied into private memory and verified while they are read.

A section is a named range of the file's bytes, with a checksum in the manifest. All sections but the weights are read
with the plan, so that a loaded plan does not depend on the file.
"""
from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from infer_server.engines.errors import PlanCorruptError, PlanError
from infer_server.engines.plan.arena import Memory
from infer_server.engines.plan.checksums import PAGE, Bytes, read_into, strong

REBUILD = "build the plan again, or copy it again from where it came"
WEIGHTS = "weights"         # sections of this name or prefix ("weights.open") are read on first access
INFLATED = 64 << 20         # maximum bytes of decompressed JSON or code: a damaged section could exhaust memory


@dataclass(frozen=True)
class Section:
    """Offset, size and checksum of a section."""
    offset: int
    bytes: int
    checksum: str


def summed(name: str) -> bool:
    """Return True if a section, because it may be large, has a page checksum; others have BLAKE2b."""
    return name.partition(".")[0] in ("constants", WEIGHTS)


def is_weights(name: str) -> bool:
    """Return True if a section holds the weights of a graph or of a model."""
    return name.partition(".")[0] == WEIGHTS


class Sections:
    """Sections of a plan file by name: read-only views of one private copy, in which constants begin on a huge page.

    Weights are copied on first access, from the file that was opened even if its path names another one by then.
    """

    def __init__(self, path: str, file: int, records: Mapping[str, Section], end: int) -> None:
        """Read and verify all sections but the weights.

        Parameters
        ----------
        path : str
            Path of the file, for messages.
        file : int
            Descriptor of the open file.
        records : mapping of str to Section
        end : int
            Offset of the end of the last section.

        Raises
        ------
        PlanCorruptError
            Sections overlap, or the file is truncated or altered.
        """
        self.path, self._records = path, records
        if any(map(is_weights, records)):
            self._file = os.dup(file)
            weakref.finalize(self, os.close, self._file)
        self._check_order(records, file, end)
        run_steps = {name: record for name, record in records.items() if not is_weights(name)}
        self._copy = Memory(max((record.offset + record.bytes for record in run_steps.values()), default=PAGE) - PAGE)
        self._views: dict[str, memoryview] = {}
        whole = self._copy.bytes.data
        for name, record in run_steps.items():
            begin = record.offset - PAGE
            view = whole[begin:begin + record.bytes]
            self._read(name, view, file, record)
            self._views[name] = view.toreadonly()
        self._copy.freeze()

    def _read_weights(self, name: str) -> None:
        """Read and verify a section of weights. Raises PlanCorruptError if it changed since the plan was loaded."""
        record, memory = self._records[name], Memory(self._records[name].bytes)
        try:
            self._read(name, memory.bytes.data[:record.bytes], self._file, record)
        except (OSError, PlanCorruptError) as error:
            raise PlanCorruptError(f"{error} (the weights are read when the plan is to be compiled for another target; "
                                   "has the file been written to since it was loaded?)") from error
        memory.freeze()
        self._views[name] = memory.bytes.data[:record.bytes].toreadonly()

    def _check_order(self, records: Mapping[str, Section], file: int, end: int) -> None:
        """Check that the sections do not overlap and that only zeros separate them."""
        at = PAGE
        for name, record in sorted(records.items(), key=lambda item: (item[1].offset, item[1].bytes)):
            if record.bytes < 0 or record.offset < at or record.offset + record.bytes > end:
                raise PlanCorruptError(f"{self.path}: section '{name}' ({record.bytes} bytes at {record.offset}) lies "
                                       f"over another one or outside the file; {REBUILD}")
            self._check_gap(file, at, record.offset)
            at = record.offset + record.bytes
        self._check_gap(file, at, end)

    def _check_gap(self, file: int, begin: int, end: int) -> None:
        if end - begin >= PAGE or any(os.pread(file, end - begin, begin)):
            raise PlanCorruptError(f"{self.path}: bytes {begin} to {end} belong to no section; {REBUILD}")

    def _read(self, name: str, view: memoryview, file: int, record: Section) -> None:
        try:
            found = read_into(view, file, record.offset)
        except EOFError as error:
            raise PlanCorruptError(f"{self.path}: cut short while it was read, {error}; {REBUILD}") from error
        if (found if summed(name) else strong(view)) != record.checksum:
            raise PlanCorruptError(f"{self.path}: section '{name}' ({record.bytes} bytes at {record.offset}) has a "
                                   f"wrong checksum; {REBUILD}")

    def __getitem__(self, name: str) -> memoryview:
        if is_weights(name) and name in self._records and name not in self._views:
            self._read_weights(name)
        try:
            return self._views[name]
        except KeyError:
            raise PlanCorruptError(f"{self.path}: there is no section '{name}'; {REBUILD}") from None

    def get(self, name: str, default: bytes) -> Bytes:
        """Return a section, or the default if the file has none of this name."""
        return self[name] if name in self._records else default

    def inflated(self, name: str) -> bytes:
        """Return the decompressed content of a section."""
        return inflate(self[name], f"{self.path}: section '{name}'")

    def document(self, name: str) -> dict[str, Any]:
        """Return the JSON object that a compressed section holds."""
        return read_document(self[name], f"{self.path}: section '{name}'")


def deflate(data: bytes, what: str) -> bytes:
    """Compress data with zlib. Raises PlanError for more than INFLATED bytes, which inflate would reject."""
    if len(data) > INFLATED:
        raise PlanError(f"{what} has {len(data)} bytes; a plan holds up to {INFLATED}")
    return zlib.compress(data)


def inflate(data: Bytes, what: str) -> bytes:
    """Decompress data. Raises PlanCorruptError if it is damaged, incomplete or holds more than INFLATED bytes."""
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, INFLATED + 1)
    except zlib.error as error:
        raise PlanCorruptError(f"{what} cannot be decompressed ({error}); {REBUILD}") from error
    if not inflater.eof or inflater.unused_data or len(content) > INFLATED:
        raise PlanCorruptError(f"{what} is incomplete, or holds more than {INFLATED} bytes; {REBUILD}")
    return content


def read_document(data: Bytes, what: str) -> dict[str, Any]:
    """Return a compressed JSON object. Raises PlanCorruptError."""
    try:
        document = json.loads(inflate(data, what))
    except (ValueError, RecursionError) as error:
        raise PlanCorruptError(f"{what} is no JSON ({error}); {REBUILD}") from error
    if not isinstance(document, dict):
        raise PlanCorruptError(f"{what} is no JSON object; {REBUILD}")
    return document


@contextmanager
def reading_manifest(path: str) -> Iterator[None]:
    """Convert the errors that reading a malformed manifest raises to PlanCorruptError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanCorruptError(f"{path}: the manifest is not a plan's ({error}); {REBUILD}") from error
