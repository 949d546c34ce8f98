"""Batches of rows in the libraries that users have: Arrow tables, pandas DataFrames, dicts of NumPy arrays."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from infer_server.batch.columns import Column, Encoded, Group, arrow, arrow_type, from_arrow, from_numpy, to_arrow
from infer_server.engines.errors import InputError
from infer_server.engines.ir.graph import Array


@dataclass(frozen=True)
class Output:
    """A column that scoring adds.

    dtype   NumPy's dtype of an element; object: text
    shape   extents of a row's array; None: open
    groups  rows of equal shape; together, each scored row once
    """
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    groups: Sequence[Group] = ()

    @property
    def arrow_type(self) -> Any:
        pa = arrow()
        return arrow_type(pa.string() if self.dtype == object else pa.from_numpy_dtype(self.dtype), self.shape)

    def to_arrow(self) -> Any:
        """Return the rows in order as an Arrow array."""
        pa, type_ = arrow(), self.arrow_type
        parts = [to_arrow(group.values, type_) for group in self.groups]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return pa.array([], type_)
        return pa.concat_arrays(parts).take(pa.array(self._order()))

    def to_numpy(self) -> Array:
        """Return the rows in order: one array if all have one shape, else an array of arrays."""
        if len(self.groups) == 1:
            return self.groups[0].values
        if not self.groups:
            return np.empty((0, *(extent or 0 for extent in self.shape)), self.dtype)
        if len({group.values.shape[1:] for group in self.groups}) == 1:
            whole: Array = np.concatenate([group.values for group in self.groups])[self._order()]
            return whole
        rows = [row for group in self.groups for row in group.values]
        cells = np.empty(len(rows), object)
        for position, index in enumerate(self._order()):
            cells[position] = rows[index]
        return cells

    def _order(self) -> Array:
        return np.argsort(np.concatenate([group.rows for group in self.groups]), kind="stable")


class Frame(Protocol):
    """A batch of rows of one library."""
    @property
    def names(self) -> list[str]: ...
    @property
    def rows(self) -> int: ...

    def column(self, name: str) -> Column | Encoded: ...

    def scored(self, keep: Sequence[str], rows: Array | None, outputs: Mapping[str, Output]) -> Any:
        """Return a batch of the columns to keep, of these rows (None: all), and the outputs."""


class ArrowFrame:
    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.names: list[str] = list(batch.schema.names)
        self.rows: int = batch.num_rows

    def column(self, name: str) -> Column | Encoded:
        return from_arrow(self._batch.column(name))

    def scored(self, keep: Sequence[str], rows: Array | None, outputs: Mapping[str, Output]) -> Any:
        pa = arrow()
        copied = self._batch.select(list(keep))
        if rows is not None:
            copied = copied.take(pa.array(rows))
        added = {name: output.to_arrow() for name, output in outputs.items()}
        return type(self._batch).from_arrays(
            [*copied.columns, *added.values()],
            schema=pa.schema([*copied.schema, *(pa.field(name, array.type) for name, array in added.items())]))


class NumpyFrame:
    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch = batch
        self.names = list(batch)
        lengths = {name: len(value) for name, value in batch.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"the columns of the batch have different numbers of rows: {lengths}")
        self.rows = next(iter(lengths.values()), 0)

    def column(self, name: str) -> Column | Encoded:
        return from_numpy(self._batch[name])

    def scored(self, keep: Sequence[str], rows: Array | None, outputs: Mapping[str, Output]) -> Any:
        copied = {name: self._batch[name] if rows is None else np.asarray(self._batch[name])[rows] for name in keep}
        return {**copied, **{name: output.to_numpy() for name, output in outputs.items()}}


class FileFrame(NumpyFrame):
    """Arrays that were read from files; the result is an Arrow table."""

    def scored(self, keep: Sequence[str], rows: Array | None, outputs: Mapping[str, Output]) -> Any:
        pa = arrow()
        copied = {name: pa.array(values, pa.string() if values.dtype == object else None)
                  for name, values in super().scored(keep, rows, {}).items()}
        return pa.table({**copied, **{name: output.to_arrow() for name, output in outputs.items()}})


class PandasFrame:
    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.names = [str(name) for name in batch.columns]
        self.rows = len(batch)

    def column(self, name: str) -> Column | Encoded:
        series = self._batch[name]
        return from_numpy(series.to_numpy() if isinstance(series.dtype, np.dtype) else list(series))

    def scored(self, keep: Sequence[str], rows: Array | None, outputs: Mapping[str, Output]) -> Any:
        copied = self._batch[list(keep)]
        copied = copied if rows is None else copied.iloc[rows]
        return copied.assign(**{name: _cells(output.to_numpy()) for name, output in outputs.items()})


def frame_of(batch: Any) -> Frame:
    """Return the frame of a batch. Raises InputError for a type that is none of the three."""
    if isinstance(batch, NumpyFrame):
        return batch
    if isinstance(batch, Mapping):
        return NumpyFrame(batch)
    if hasattr(batch, "schema") and hasattr(batch, "num_rows"):
        return ArrowFrame(batch)
    if hasattr(batch, "iloc") and hasattr(batch, "columns"):
        return PandasFrame(batch)
    raise InputError(f"a batch is an Arrow table or record batch, a pandas DataFrame or a dict of arrays; this is a "
                     f"{type(batch).__name__}")


def _cells(values: Array) -> Any:
    """Return the cells of a pandas column: scalars, arrays of one axis, or lists of such, which Arrow converts."""
    return values if values.ndim == 1 else [_cell(row) for row in values]


def _cell(array: Array) -> Any:
    return array if array.ndim <= 1 else [_cell(part) for part in array]
