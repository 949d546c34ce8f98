"""Folder of results: a Parquet file for each split, and a manifest that identifies plan and input.

A file gets its name when its split is complete; a run that was killed is therefore continued by the same command,
and each item is in one file. Readers of Parquet ignore names that begin with `_` or `.`.
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer_server.batch.columns import arrow
from infer_server.engines.errors import InputError
from infer_server.engines.files import atomic_write

MANIFEST, SUCCESS = "_score.json", "_SUCCESS"
VERSION = 1
BUFFER_BYTES = 32 << 20     # results that are gathered before they are written as a row group
_KEY = b"infer_server.score"


@dataclass
class Outcome:
    """Result of one split, or of several.

    items   items of the splits, with the failed ones
    failed  {name: reason}
    """
    items: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.items += other.items
        self.failed |= other.failed


@dataclass(frozen=True)
class Results:
    """A folder of results."""
    folder: Path

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"

    @contextmanager
    def claimed(self, manifest: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for one run. Raises InputError if it has results of another plan, other options or inputs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another run writes to {self.folder}; wait for it, or give another "
                                 "--output") from None
            except OSError:         # a file system without locks
                pass
            self._check({"version": VERSION, **manifest})
            self._remove_temporary()
            yield
        finally:
            self._remove_temporary()
            os.close(handle)

    def _check(self, manifest: Mapping[str, Any]) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            if other := next(self.folder.glob("*.parquet"), None):
                raise InputError(f"{self.folder} holds {other.name} and no {MANIFEST}: it was not written by score; "
                                 "give another --output")
            with atomic_write(path) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            return
        try:
            before = json.loads(path.read_bytes())
        except ValueError:
            raise InputError(f"{path} cannot be read; give another --output, or remove the folder") from None
        for key, now in json.loads(json.dumps(manifest)).items():
            if (then := before.get(key)) != now:
                raise InputError(f"{self.folder} holds results of another run: its {difference(key, then, now)}; give "
                                 "another --output, or remove the folder")

    def _remove_temporary(self) -> None:
        for path in self.folder.glob(".part-*"):
            with suppress(OSError):
                path.unlink()

    def done(self, number: int) -> Outcome | None:
        """Return the outcome of a split whose file is there, else None."""
        pa = arrow()
        import pyarrow.parquet
        try:
            metadata = pyarrow.parquet.read_metadata(self.part(number)).metadata
            return Outcome(**json.loads(metadata[_KEY]))
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None

    @contextmanager
    def writing(self, number: int, schema: Any) -> Iterator[PartWriter]:
        """Write the file of a split, which appears when the block ends without an error."""
        arrow()
        import pyarrow.parquet
        with atomic_write(self.part(number)) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
            part = PartWriter(writer)
            yield part
            part.flush()
            writer.add_key_value_metadata({_KEY.decode(): json.dumps(vars(part.outcome))})

    def finish(self) -> None:
        """Mark the results as complete, as Hadoop and Spark do."""
        (self.folder / SUCCESS).touch()


class PartWriter:
    """Writer of the rows of a split, which gathers them to row groups."""

    def __init__(self, writer: Any) -> None:
        self.outcome = Outcome()
        self._writer, self._tables, self._bytes = writer, list[Any](), 0

    def write(self, table: Any) -> None:
        self._tables.append(table)
        self._bytes += table.nbytes
        if self._bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._tables:
            self._writer.write_table(arrow().concat_tables(self._tables))
        self._tables, self._bytes = [], 0


def difference(key: str, then: Any, now: Any) -> str:
    """Return where two values of a manifest differ: "options: batch was 8, is 16"."""
    if isinstance(then, dict) and isinstance(now, dict):
        name = next(name for name in {**now, **then} if then.get(name) != now.get(name))
        return f"{key}: {difference(name, then.get(name), now.get(name))}"
    return f"{key} was {_short(then)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
