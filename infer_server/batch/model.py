"""Rows of a batch as items of a model: shapes and dtypes of inputs, executions, rows of outputs, top-k."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from infer_server.batch.columns import Group
from infer_server.batch.frames import Output
from infer_server.calibration.data.items import holds_items, kind_of
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.dtypes import BITS, from_bfloat16, to_bfloat16
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import shape_text

if TYPE_CHECKING:
    from infer_server.engines.loading import Description
    from infer_server.engines.runtime.engine import Engine


@dataclass(frozen=True)
class Items:
    """Rules by which rows become items of a model.

    batch       maximum number of rows of an execution; 1 for models whose items are not independent
    leading     the leading extent 1 of unbatched tensors is left out of rows
    """
    inputs: Sequence[IoTensor]
    outputs: Mapping[str, Output]
    tensors: Mapping[str, IoTensor]
    batch: int
    leading: bool

    @staticmethod
    def of(described: Description, batch: int) -> Items:
        """Return the rules for a plan."""
        tensors = (*described.inputs, *described.outputs)
        apart = bool(described.dependence) or not described.max_batch or not all(io.batched for io in tensors)
        leading = any(holds_items(io) and not io.batched for io in described.inputs)
        outputs = {io.name: Output(_dtype(io), tuple(extent if isinstance(extent, int) else None
                                                     for extent in _item_shape(io, leading)))
                   for io in described.outputs}
        return Items(described.inputs, outputs, {io.name: io for io in tensors}, 1 if apart else batch, leading)

    def fit(self, columns: Sequence[Array]) -> list[Array] | str:
        """Return the values [rows, *item] of each input in the model's dtypes and shapes, or why they do not fit."""
        fitted = []
        for io, values in zip(self.inputs, columns, strict=True):
            shape = _item_shape(io, self.leading)
            if not _matches(values.shape[1:], shape):
                if any(isinstance(extent, str) for extent in shape) or math.prod(values.shape[1:]) != math.prod(shape):
                    return (f"input '{io.name}' has shape {shape_text(values.shape[1:])}; the model takes "
                            f"{shape_text(shape)}")
                values = values.reshape(-1, *shape)
            if (converted := _converted(io, values)) is None:
                return f"input '{io.name}' is {values.dtype}; the model takes {io.dtype}"
            fitted.append(converted)
        return fitted

    def run(self, engine: Engine, columns: Sequence[Array]) -> dict[str, Array]:
        """Run the engine on rows, at most `batch` at a time, and return the rows of each output."""
        batches: dict[str, list[Array]] = {name: [] for name in self.outputs}
        for start in range(0, len(columns[0]), self.batch):
            part = {io.name: self._feed(io, values[start:start + self.batch])
                    for io, values in zip(self.inputs, columns, strict=True)}
            for name, array in engine.run(part).items():
                batches[name].append(self._rows(self.tensors[name], array))
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in batches.items()}

    def _feed(self, io: IoTensor, rows: Array) -> Array:
        if io.batched:
            return np.moveaxis(rows, 0, io.batch_axis) if io.batch_axis else rows
        return rows if self.leading and holds_items(io) else rows[0]

    def _rows(self, io: IoTensor, array: Array) -> Array:
        if io.dtype in ("bfloat16", "float16"):
            array = from_bfloat16(array) if io.dtype == "bfloat16" else array.astype(np.float32)
        if io.batched:
            return np.moveaxis(array, io.batch_axis, 0) if io.batch_axis else array
        return array if self.leading and io.shape[:1] == (1,) else array[None]


def _item_shape(io: IoTensor, leading: bool) -> tuple[int | str, ...]:
    """Return the shape of a row."""
    if io.batched:
        return tuple(extent for axis, extent in enumerate(io.shape) if axis != io.batch_axis)
    return io.shape[1:] if leading and io.shape[:1] == (1,) else io.shape


def _dtype(io: IoTensor) -> np.dtype[Any]:
    """Return the dtype of an output's column: 16-bit floats are widened, since few readers of Parquet know them."""
    if io.dtype in ("bfloat16", "float16"):
        return np.dtype(np.float32)
    dtype = np.dtype(BITS.get(io.dtype, io.dtype))
    return np.dtype(object) if dtype.kind in "OSU" else dtype


def _matches(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    return len(shape) == len(expected) and all(
        isinstance(extent, str) or size == extent for size, extent in zip(shape, expected, strict=True))


def _converted(io: IoTensor, values: Array) -> Array | None:
    """Return the values in an input's dtype, or None if they are of another kind or exceed its range."""
    if io.dtype == "bfloat16":
        return to_bfloat16(values) if values.dtype.kind == "f" else None
    if io.dtype in BITS:
        return values if values.dtype == BITS[io.dtype] else None
    dtype = np.dtype(io.dtype)
    if dtype == values.dtype:
        return np.ascontiguousarray(values)
    if kind_of(dtype) in "iu" and kind_of(values.dtype) in "iu":
        limits = np.iinfo(dtype)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            return None
    elif kind_of(dtype) != kind_of(values.dtype):
        return None
    return values.astype(dtype)


def top_k(output: Output, column: str, k: int, labels: Sequence[str]) -> dict[str, Output]:
    """Return the columns of an output's k largest elements, the largest first; of equal ones the first.

    Raises ConfigError if an index has no label.
    """
    shape = (min(k, output.shape[0]) if output.shape[0] else k,)
    order = [np.argsort(-group.values.astype(np.float64), axis=1, kind="stable")[:, :k] for group in output.groups]
    named = {f"{column}_index": Output(np.dtype(np.int64), shape, [
                Group(group.rows, best) for group, best in zip(output.groups, order, strict=True)]),
             f"{column}_score": Output(output.dtype, shape, [
                 Group(group.rows, np.take_along_axis(group.values, best, axis=1))
                 for group, best in zip(output.groups, order, strict=True)])}
    if labels:
        classes = output.shape[0] or max((group.values.shape[1] for group in output.groups), default=0)
        if classes > len(labels):
            raise ConfigError(f"there are {len(labels)} labels, and output '{column}' has {classes} classes")
        names = np.array(labels, object)
        named[f"{column}_label"] = Output(np.dtype(object), shape, [
            Group(group.rows, names[best]) for group, best in zip(output.groups, order, strict=True)])
    return named
