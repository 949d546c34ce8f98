"""Inputs of bulk scoring: Parquet, NumPy arrays or pictures, cut into splits that are read as streams.

Each split becomes one file of the result. Splits depend on the input alone, not on the number of processes.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from infer_server.batch.array_files import read_arrays
from infer_server.batch.columns import arrow
from infer_server.batch.frames import FileFrame
from infer_server.calibration.data.items import count_items
from infer_server.calibration.data.sources.arrays import SUFFIXES, headers_of
from infer_server.calibration.data.sources.images import PictureReader, is_image
from infer_server.engines.errors import CalibrationError, InputError

if TYPE_CHECKING:
    from infer_server.batch.scorer import Scorer

PARQUET = (".parquet", ".pq")
PIECES = 4              # most splits of a row group: each reads over those before it
CHUNK_ITEMS = 1024      # most items in memory at a time
CHUNK_BYTES = 64 << 20  # most bytes of their inputs
MAX_ITEMS = 4096        # default items of a split of Parquet; at most so many of other inputs
SPLITS = 32             # default number of splits of other inputs, unless these get smaller than:
MIN_ARRAYS, MIN_PICTURES = 1024, 64


@dataclass(frozen=True)
class Split:
    """Items `start` to `stop` of a file or of the list of pictures; of a row group for Parquet."""
    number: int
    start: int
    stop: int
    file: int = 0
    row_group: int = 0

    @property
    def items(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Consecutive items of a split.

    batch   rows for the Scorer
    names   function from a row to the name of its item
    failed  {name: reason} of items that could not be read and have no row
    items   number of items, with the failed ones
    """
    batch: Any
    names: Callable[[int], str]
    items: int
    failed: dict[str, str] = field(default_factory=dict)


class Source(Protocol):
    """An opened input; picklable."""
    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def splits(self) -> Sequence[Split]: ...
    @property
    def notes(self) -> Sequence[str]:
        """Lines that the user should read."""
    @property
    def failed(self) -> Mapping[str, str]:
        """Files that were left out, with the reasons."""

    def read(self, split: Split, scorer: Scorer) -> Iterator[Chunk]:
        """Yield the items of a split. Raises EngineError or OSError if it cannot be read."""

    def schema(self, scorer: Scorer) -> Any:
        """Return the Arrow schema of batches; the types are those of columns that are kept."""


def open_source(path: Path, scorer: Scorer, split_items: int = 0) -> Source:
    """Open a folder or a file, and cut it into splits of about `split_items` items (0: by their number).

    Raises
    ------
    InputError
        There are no items, or items of several kinds.
    CalibrationError, ConfigError
        Arrays or pictures do not fit the model.
    """
    if not path.exists():
        raise InputError(f"input {path} does not exist; give a folder of images, .npz, .npy or Parquet files, or "
                         "a file")
    files = [path] if path.is_file() else sorted(
        file for file in path.rglob("*") if file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts))
    base = path.parent if path.is_file() else path
    kinds = {"Parquet files": [file for file in files if file.suffix in PARQUET],
             "arrays": [file for file in files if file.suffix in SUFFIXES],
             "images": [file for file in files if is_image(file)]}
    present = {kind: these for kind, these in kinds.items() if these}
    if len(present) != 1:
        listed = " and ".join(f"{kind} ({these[0].name}, ...)" for kind, these in present.items())
        raise InputError(f"input {path} holds " + (
            f"{listed}; score them from folders of their own" if present else
            f"no images, .npz, .npy or Parquet files ({len(files)} other files)"))
    (kind, these), = present.items()
    openers: dict[str, Callable[..., Source]] = {
        "Parquet files": ParquetSource.of, "arrays": ArraySource.of, "images": ImageSource.of}
    source = openers[kind](these, base, scorer, split_items)
    if not any(split.items for split in source.splits):
        raise InputError(f"input {path} holds no items")
    return source


def _size(total: int, fewest: int) -> int:
    """Return the default items of a split."""
    return min(max(-(-total // SPLITS), fewest), MAX_ITEMS)


def _cut(items: int, size: int) -> list[tuple[int, int]]:
    """Cut items evenly into ranges of at most `size`."""
    pieces = max(1, -(-items // size))
    ends = [items * index // pieces for index in range(pieces + 1)]
    return list(zip(ends, ends[1:], strict=False))


def chunk_items(scorer: Scorer, item_bytes: int) -> int:
    """Return the number of items that are read at a time: whole executions within the limits."""
    most = min(CHUNK_ITEMS, CHUNK_BYTES // max(1, item_bytes))
    return max(1, most // scorer.items.batch) * scorer.items.batch


# ---- Parquet
@dataclass(frozen=True)
class ParquetSource:
    """Parquet files; a split is a row group, or a piece of a large one."""
    files: tuple[Path, ...]
    base: Path
    splits: tuple[Split, ...]
    row_bytes: int
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(files: Sequence[Path], base: Path, scorer: Scorer, split_items: int) -> ParquetSource:
        arrow()
        import pyarrow.parquet
        groups, schema, bytes_ = list[tuple[int, int, int]](), None, 0
        for number, file in enumerate(files):
            try:
                metadata = pyarrow.parquet.read_metadata(file)
            except (OSError, ValueError) as error:      # ArrowInvalid is a ValueError
                raise InputError(f"{file} cannot be read as Parquet: {error}") from error
            names = metadata.schema.to_arrow_schema()
            if schema is not None and not names.equals(schema):
                raise InputError(f"{file} has other columns than {files[0]}; score them from folders of their own")
            schema = names
            for group in range(metadata.num_row_groups):
                described = metadata.row_group(group)
                groups.append((number, group, described.num_rows))
                bytes_ += described.total_byte_size
        total = sum(rows for *_, rows in groups)
        scorer.schema(schema)       # raises InputError for missing columns
        size = split_items or MAX_ITEMS
        splits = [(number, group, start, stop) for number, group, rows in groups
                  for start, stop in _cut(rows, max(size, -(-rows // PIECES)))]
        return ParquetSource(tuple(files), base, tuple(
            Split(index, start, stop, number, group) for index, (number, group, start, stop) in enumerate(splits)),
            bytes_ // max(1, total))

    def read(self, split: Split, scorer: Scorer) -> Iterator[Chunk]:
        import pyarrow.parquet
        path = self.files[split.file]
        name = path.relative_to(self.base).as_posix()
        columns = dict.fromkeys((*scorer.inputs.values(), *scorer.kept(self.schema(scorer).names)))
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            before = sum(file.metadata.row_group(group).num_rows for group in range(split.row_group))
            at, size = 0, chunk_items(scorer, self.row_bytes)
            for batch in file.iter_batches(size, [split.row_group], list(columns), use_threads=False):
                start, stop = max(at, split.start), min(at + batch.num_rows, split.stop)
                if start < stop:
                    first = before + start
                    yield Chunk(batch.slice(start - at, stop - start), _numbered(name, first), stop - start)
                at += batch.num_rows
                if at >= split.stop:
                    return

    def schema(self, scorer: Scorer) -> Any:
        import pyarrow.parquet
        return pyarrow.parquet.read_schema(self.files[0])


def _numbered(name: str, first: int) -> Callable[[int], str]:
    return lambda row: f"{name}, row {first + row}"


# ---- arrays
@dataclass(frozen=True)
class ArraySource:
    """NumPy files; rows have the columns `path` and `item`, the number of the item in its file."""
    files: tuple[Path, ...]
    base: Path
    splits: tuple[Split, ...]
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(files: Sequence[Path], base: Path, scorer: Scorer, split_items: int) -> ArraySource:
        inputs = scorer.described.inputs
        counts, bad = list[int](), dict[str, str]()
        for file in files:
            try:
                counts.append(count_items(str(file), headers_of(file, inputs), inputs))
            except CalibrationError as error:
                if not scorer.skip_bad:
                    raise
                counts.append(0)
                bad[file.relative_to(base).as_posix()] = str(error)
        size = split_items or _size(sum(counts), MIN_ARRAYS)
        splits = [(number, start, stop) for number, count in enumerate(counts) for start, stop in _cut(count, size)]
        return ArraySource(tuple(files), base, tuple(
            Split(index, start, stop, number) for index, (number, start, stop) in enumerate(splits)), (), bad)

    def read(self, split: Split, scorer: Scorer) -> Iterator[Chunk]:
        path = self.files[split.file]
        name = path.relative_to(self.base).as_posix()
        inputs = scorer.described.inputs
        if not split.items:
            return
        item_bytes = sum(int(np.prod(header.shape[1:])) * header.dtype.itemsize
                         for header in headers_of(path, inputs).values())
        size = chunk_items(scorer, item_bytes)
        for start, arrays in read_arrays(path, inputs, split.start, split.stop, size):
            count = min(size, split.stop - start)
            columns = {scorer.inputs[io.name]: arrays[io.name] for io in inputs}
            yield Chunk(FileFrame({**columns, "path": np.full(count, name, object),
                                   "item": np.arange(start, start + count)}), _numbered(name, start), count)

    def schema(self, scorer: Scorer) -> Any:
        return _read_schema(scorer, path=arrow().string(), item=arrow().int64())


# ---- pictures
@dataclass(frozen=True)
class ImageSource:
    """Picture files; rows have the column `path`, relative to the folder."""
    files: tuple[Path, ...]
    base: Path
    splits: tuple[Split, ...]
    reader: PictureReader
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.reader.note, *self.reader.warnings)))

    @staticmethod
    def of(files: Sequence[Path], base: Path, scorer: Scorer, split_items: int) -> ImageSource:
        splits = _cut(len(files), split_items or _size(len(files), MIN_PICTURES))
        return ImageSource(tuple(files), base, tuple(
            Split(index, start, stop) for index, (start, stop) in enumerate(splits)), scorer.reader(files))

    def read(self, split: Split, scorer: Scorer) -> Iterator[Chunk]:
        column, = scorer.inputs.values()
        height, width = self.reader.preprocess.size or (0, 0)
        size = chunk_items(scorer, height * width * 16)
        for start in range(split.start, split.stop, size):
            items, names, failed = [], [], dict[str, str]()
            for file in self.files[start:min(start + size, split.stop)]:
                name = file.relative_to(self.base).as_posix()
                try:
                    items.append(self.reader.read(file))
                    names.append(name)
                except CalibrationError as error:
                    failed[name] = str(error)
            batch = {column: np.concatenate(items) if items else np.empty(0, np.float32),
                     "path": np.array(names, object)}
            yield Chunk(FileFrame(batch), names.__getitem__, len(names) + len(failed), failed)

    def schema(self, scorer: Scorer) -> Any:
        return _read_schema(scorer, path=arrow().string())


def _read_schema(scorer: Scorer, **columns: Any) -> Any:
    """Return the schema of rows that are read from files: the inputs, and columns that name the items."""
    pa = arrow()
    return pa.schema([*((name, pa.null()) for name in scorer.inputs.values()), *columns.items()])
