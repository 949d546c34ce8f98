"""The sections of a plan file in memory of the process's own: read once, checked while they are read.

A section is a range of the file's bytes under a name. All but the weights are read when the plan is, so that what runs
depends on the file no longer, and checked by the sums that the manifest has of them.
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

from engines.errors import PlanCorruptError, PlanError
from engines.plan.arena import Memory
from engines.plan.checksums import PAGE, Bytes, read_into, strong

REBUILD = "build the plan again, or copy it again from where it came"
WEIGHTS = "weights"         # the section that is read when it is asked for; "weights.open" is another such
INFLATED = 64 << 20         # bytes of a JSON document or of code, at most: a damaged one could ask for all memory


@dataclass(frozen=True)
class Section:
    """Where a section lies in the file, and its checksum."""
    offset: int
    bytes: int
    checksum: str


def summed(name: str) -> bool:
    """Whether a section is checked by sums of its pages, for there may be much of it; else by BLAKE2b."""
    return name.partition(".")[0] in ("constants", WEIGHTS)


def is_weights(name: str) -> bool:
    """Whether a section holds the weights of a graph or of a model."""
    return name.partition(".")[0] == WEIGHTS


class Sections:
    """A plan file's sections by name: read-only views of one private copy. The constants begin on a huge page.

    The weights have a copy of their own, made when somebody first asks for them: of the file that was opened, whatever
    has its name by then.
    """

    def __init__(self, path: str, file: int, records: Mapping[str, Section], end: int) -> None:
        """file: its descriptor. end: of the last section. Raises PlanCorruptError: overlapping, cut short, altered."""
        self.path, self._records = path, records
        if any(map(is_weights, records)):
            self._file = os.dup(file)
            weakref.finalize(self, os.close, self._file)
        self._check_order(records, file, end)
        at_once = {name: record for name, record in records.items() if not is_weights(name)}
        self._copy = Memory(max((record.offset + record.bytes for record in at_once.values()), default=PAGE) - PAGE)
        self._views: dict[str, memoryview] = {}
        whole = self._copy.bytes.data
        for name, record in at_once.items():
            begin = record.offset - PAGE
            view = whole[begin:begin + record.bytes]
            self._read(name, view, file, record)
            self._views[name] = view.toreadonly()
        self._copy.freeze()

    def _read_weights(self, name: str) -> None:
        """Raises PlanCorruptError: not those that the plan was loaded with."""
        record, memory = self._records[name], Memory(self._records[name].bytes)
        try:
            self._read(name, memory.bytes.data[:record.bytes], self._file, record)
        except (OSError, PlanCorruptError) as error:
            raise PlanCorruptError(f"{error} (the weights are read when the plan is to be compiled for another target; "
                                   "has the file been written to since it was loaded?)") from error
        memory.freeze()
        self._views[name] = memory.bytes.data[:record.bytes].toreadonly()

    def _check_order(self, records: Mapping[str, Section], file: int, end: int) -> None:
        """One after the other, with nothing but zeros between them."""
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

    def inflated(self, name: str) -> bytes:
        """What a compressed section holds."""
        return inflate(self[name], f"{self.path}: section '{name}'")

    def document(self, name: str) -> dict[str, Any]:
        """The JSON object that a compressed section holds."""
        return read_document(self[name], f"{self.path}: section '{name}'")


def deflate(data: bytes, what: str) -> bytes:
    """Compressed. Raises PlanError for more than would be read again."""
    if len(data) > INFLATED:
        raise PlanError(f"{what} has {len(data)} bytes; a plan holds up to {INFLATED}")
    return zlib.compress(data)


def inflate(data: Bytes, what: str) -> bytes:
    """The inverse. Raises PlanCorruptError: not compressed, incomplete, or more than a plan holds."""
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, INFLATED + 1)
    except zlib.error as error:
        raise PlanCorruptError(f"{what} cannot be decompressed ({error}); {REBUILD}") from error
    if not inflater.eof or inflater.unused_data or len(content) > INFLATED:
        raise PlanCorruptError(f"{what} is incomplete, or holds more than {INFLATED} bytes; {REBUILD}")
    return content


def read_document(data: Bytes, what: str) -> dict[str, Any]:
    """A compressed JSON object. Raises PlanCorruptError."""
    try:
        document = json.loads(inflate(data, what))
    except (ValueError, RecursionError) as error:
        raise PlanCorruptError(f"{what} is no JSON ({error}); {REBUILD}") from error
    if not isinstance(document, dict):
        raise PlanCorruptError(f"{what} is no JSON object; {REBUILD}")
    return document


@contextmanager
def reading_manifest(path: str) -> Iterator[None]:
    """Raises PlanCorruptError in the place of what a manifest that is no plan's makes its reader raise."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanCorruptError(f"{path}: the manifest is not a plan's ({error}); {REBUILD}") from error
