"""Columns of a batch as dense arrays: rows of equal shape form a group, and rows that have no array a reason."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array

Encoded = list[bytes | None]        # encoded pictures, a row each; None: the row is null
RAGGED = "holds lists of different lengths, or nulls"


@dataclass(frozen=True)
class Group:
    """Rows of a column whose arrays have one shape.

    rows    int64 [n], ascending
    values  [n, ...]
    """
    rows: Array
    values: Array


@dataclass
class Column:
    """A column of `count` rows, each in one group or in `bad`, with the reason."""
    count: int
    groups: list[Group] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)


def arrow() -> Any:
    """Import PyArrow. Raises ConfigError if it is not installed."""
    from infer_server.engines.errors import ConfigError
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("Arrow tables and Parquet files need PyArrow: pip install 'infer-server[score]'") from None
    return pyarrow


# ---- from Arrow
def from_arrow(array: Any) -> Column | Encoded:
    """Convert an Arrow array: numbers, lists of them, fixed-shape tensors; binary values are encoded pictures."""
    pa = arrow()
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:     # Hugging Face's Image
        array = array.field("bytes")
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return list(array.to_pylist())
    return _from_arrow(array)


def _from_arrow(array: Any) -> Column:
    pa = arrow()
    column = Column(len(array))
    rows = np.arange(len(array))
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        column.bad = {int(row): "is null" for row in np.flatnonzero(~valid)}
        rows, array = rows[valid], array.filter(pa.array(valid))
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        inner = _from_arrow(array.storage)
        shape = getattr(array.type, "shape", None)
        column.groups = [Group(rows[group.rows], group.values.reshape(-1, *shape) if shape else group.values)
                         for group in inner.groups]
    elif types.is_fixed_size_list(array.type):
        _nest(column, rows, array.flatten(), array.type.list_size)
    elif types.is_list(array.type) or types.is_large_list(array.type):
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        for length in np.unique(lengths):
            chosen = np.flatnonzero(lengths == length)
            part = array if len(chosen) == len(array) else array.take(pa.array(chosen))
            _nest(column, rows[chosen], part.flatten(), int(length))
    elif types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = array.buffers()[1]
        values = np.frombuffer(data, np.uint8, len(array) * width, array.offset * width)
        column.groups = [Group(rows, values.reshape(-1, width))]
    else:
        column.groups = [Group(rows, array.to_numpy(zero_copy_only=False))]
    return column


def _nest(column: Column, rows: Array, elements: Any, length: int) -> None:
    """Add rows that are lists of `length` elements each to a column."""
    inner = _from_arrow(elements)
    if len(inner.groups) == 1 and not inner.bad:
        values = inner.groups[0].values
        column.groups.append(Group(rows, values.reshape(len(rows), length, *values.shape[1:])))
        return
    number, at = np.full(inner.count, -1), np.zeros(inner.count, np.int64)
    for index, group in enumerate(inner.groups):
        number[group.rows], at[group.rows] = index, np.arange(len(group.rows))
    numbers, indices, is_set = number.reshape(-1, length), at.reshape(-1, length), np.zeros(len(rows), bool)
    for index, group in enumerate(inner.groups):
        if (alike := (numbers == index).all(axis=1)).any():
            column.groups.append(Group(rows[alike], group.values[indices[alike]]))
            is_set |= alike
    column.bad |= {int(row): RAGGED for row in rows[~is_set]}


# ---- from NumPy and pandas
def from_numpy(value: Any) -> Column | Encoded:
    """Convert an array with a row for each item, or a sequence of arrays, lists or bytes."""
    if not isinstance(value, np.ndarray) or value.dtype == object:
        return _from_objects(list(value))
    return Column(len(value), [Group(np.arange(len(value)), value)])


def _from_objects(cells: Sequence[Any]) -> Column | Encoded:
    if any(isinstance(cell, bytes) for cell in cells):
        return [cell if isinstance(cell, bytes) else None for cell in cells]
    column, shapes = Column(len(cells)), dict[tuple[Any, ...], list[tuple[int, Array]]]()
    for row, cell in enumerate(cells):
        try:
            array = _solid(cell)
        except ValueError:
            column.bad[row] = RAGGED
            continue
        if cell is None:
            column.bad[row] = "is null"
        else:
            shapes.setdefault((array.shape, array.dtype), []).append((row, array))
    column.groups = [Group(np.array([row for row, _ in members]), np.stack([array for _, array in members]))
                     for members in shapes.values()]
    return column


def _solid(cell: Any) -> Array:
    """Return a cell as one array; nested sequences must have equal lengths, else ValueError."""
    array = np.asarray(cell)
    return np.stack([_solid(part) for part in array]) if array.dtype == object and array.ndim else array


# ---- several columns together
def together(columns: Sequence[Column]) -> Iterator[tuple[Array, list[Array]]]:
    """Yield (rows, the values of each column) for the rows that have an array in every column, by shapes."""
    if all(len(column.groups) == 1 and not column.bad for column in columns):
        yield columns[0].groups[0].rows, [column.groups[0].values for column in columns]
        return
    count = columns[0].count
    numbers = np.full((len(columns), count), -1)
    at = np.zeros((len(columns), count), np.int64)
    for index, column in enumerate(columns):
        for number, group in enumerate(column.groups):
            numbers[index, group.rows], at[index, group.rows] = number, np.arange(len(group.rows))
    for key in np.unique(numbers, axis=1).T:
        if (key >= 0).all():
            rows = np.flatnonzero((numbers == key[:, None]).all(axis=0))
            yield rows, [column.groups[number].values[at[index, rows]]
                         for index, (column, number) in enumerate(zip(columns, key, strict=True))]


# ---- to Arrow
def arrow_type(dtype: Any, shape: Sequence[int | None]) -> Any:
    """Return the type of a column of arrays: nested fixed-size lists, or lists up to the last open extent (None)."""
    pa = arrow()
    if not shape:
        return dtype
    inner = arrow_type(dtype, shape[1:])
    return pa.list_(inner) if None in shape else pa.list_(inner, shape[0])


def to_arrow(values: Array, type_: Any) -> Any:
    """Convert an array with a row for each item to an Arrow array of a type by `arrow_type`."""
    pa = arrow()
    extents, types = values.shape, [type_]
    while pa.types.is_list(types[-1]) or pa.types.is_fixed_size_list(types[-1]):
        types.append(types[-1].value_type)
    array = pa.array(np.ascontiguousarray(values).reshape(-1), types[-1])
    for axis in range(len(extents) - 1, 0, -1):
        outer, rows = types[axis - 1], int(np.prod(extents[:axis]))
        if pa.types.is_fixed_size_list(outer):
            array = pa.FixedSizeListArray.from_arrays(array, type=outer)
        else:
            offsets = pa.array(np.arange(rows + 1) * extents[axis], pa.int32())
            array = pa.ListArray.from_arrays(offsets, array, type=outer)
    return array


def with_plain_lists(batch: Any) -> Any:
    """Return a table or record batch with lists in place of fixed-size lists."""
    columns = [_plain(column) for column in batch.columns]
    return type(batch).from_arrays(columns, names=batch.schema.names)


def _plain(array: Any) -> Any:
    pa = arrow()
    if not isinstance(array, pa.FixedSizeListArray):
        return array
    offsets = pa.array(np.arange(len(array) + 1) * array.type.list_size, pa.int32())
    return pa.ListArray.from_arrays(offsets, _plain(array.flatten()))
