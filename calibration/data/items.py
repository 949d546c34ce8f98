"""Calibration items: feeds of all the model's inputs, streamed, counted, checked, stacked to batches."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from infer_server.calibration.data.corrupt import CorruptFiles
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.dtypes import BITS
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import Preprocess, shape_text

Feed = Mapping[str, Array]      # every model input by name


@dataclass(frozen=True)
class CalibrationData:
    """Iterable of calibration items, read again on every iteration.

    An item is a feed whose inputs with a batch axis have leading extent 1.

    count       number of items; None if unknown before all are read
    batched     inputs with a symbolic batch axis; if there is none, items are never stacked
    preprocess  preprocessing of images, resolved for the input; None for arrays
    note        default that was chosen, to be shown to the user; "" if none
    warnings    warnings about the data that are known before they are read
    corrupt     files that cannot be read, as far as the data were read
    """
    source: str
    items: Callable[[], Iterator[Feed]]
    count: int | None
    batched: frozenset[str]
    preprocess: Preprocess | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()
    corrupt: CorruptFiles = field(default_factory=CorruptFiles)

    def __iter__(self) -> Iterator[Feed]:
        """Yield the items in order. Raises CalibrationError if there is none."""
        empty = True
        for item in self.items():
            empty = False
            yield item
        if empty:
            raise CalibrationError(f"{self.source} holds no items")

    def batches(self, size: int) -> Iterator[Feed]:
        """Yield feeds of up to `size` consecutive items, stacked on the leading axis.

        Items that differ in shape, or in an input without a batch axis, never share a batch.
        """
        pending: list[Feed] = []
        for item in self:
            if pending and (len(pending) >= size or not self._stackable(pending[0], item)):
                yield self._stack(pending)
                pending = []
            pending.append(item)
        yield self._stack(pending)

    def items_in(self, feed: Feed) -> int:
        """Return the number of items in a feed of `batches`."""
        return next((len(feed[name]) for name in self.batched), 1)

    def limit(self, count: int) -> CalibrationData:
        """Return the data restricted to the first `count` items."""
        return self._sliced(0, count, 1)

    def every(self, step: int, start: int = 0) -> CalibrationData:
        """Return the data restricted to items start, start + step, start + 2 step, ..."""
        return self._sliced(start, None, step)

    def without_every(self, step: int, start: int) -> CalibrationData:
        """Return the data without the items of `every`."""
        def items() -> Iterator[Feed]:
            return (item for number, item in enumerate(self.items()) if number < start or (number - start) % step)
        count = None if self.count is None else self.count - len(range(self.count)[start::step])
        return replace(self, items=items, count=count)

    def _sliced(self, start: int, stop: int | None, step: int) -> CalibrationData:
        count = None if self.count is None else len(range(self.count)[start:stop:step])
        return replace(self, items=lambda: itertools.islice(self.items(), start, stop, step), count=count)

    def _stackable(self, a: Feed, b: Feed) -> bool:
        return bool(self.batched) and all(
            a[name].shape == b[name].shape if name in self.batched else np.array_equal(a[name], b[name]) for name in a)

    def _stack(self, items: Sequence[Feed]) -> Feed:
        if len(items) == 1:
            return items[0]
        return {name: np.concatenate([item[name] for item in items]) if name in self.batched else first
                for name, first in items[0].items()}


# ---- what fits the model
def batched_inputs(inputs: Sequence[IoTensor]) -> frozenset[str]:
    """Return the names of the inputs whose leading extent is the batch."""
    return frozenset(tensor.name for tensor in inputs if tensor.shape[:1] == (BATCH,))


def holds_items(tensor: IoTensor) -> bool:
    """Return True if the leading axis counts items: it is the batch, or 1, so that an array of N means N runs."""
    return tensor.shape[:1] in ((1,), (BATCH,))


@dataclass(frozen=True)
class Header:
    """Shape and dtype of an array, read without its values."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def count_items(where: str, arrays: Mapping[str, Header], inputs: Sequence[IoTensor]) -> int:
    """Return the number of items in arrays, which may lack the batch axis.

    Raises CalibrationError, with the prefix `where`, if names, dtypes or shapes are not the model's. Floats and
    integers may have another width. An integer for a float is rejected, because it has not been normalised.
    """
    expected = {tensor.name: tensor for tensor in inputs}
    if arrays.keys() != expected.keys():
        raise CalibrationError(f"{where} holds {sorted(arrays)}; the model's inputs are {sorted(expected)}")
    counts = {}
    for name, tensor in expected.items():
        header = arrays[name]
        if kind_of(header.dtype) != kind_of(np.dtype(tensor.dtype)):
            raise CalibrationError(f"{where}: '{name}' is {header.dtype}; the model takes {tensor.dtype}")
        shape = _with_batch_axis(header.shape, tensor)
        if not _fits(shape, tensor):
            raise CalibrationError(f"{where}: '{name}' has shape {shape_text(header.shape)}; the model takes "
                                   f"{shape_text(tensor.shape)}, or the same without the batch axis")
        if holds_items(tensor):
            counts[name] = shape[0]
    if len(set(counts.values())) > 1:
        raise CalibrationError(f"{where}: the inputs hold different numbers of items: {counts}")
    return next(iter(counts.values()), 1)


def split_items(where: str, arrays: Feed, inputs: Sequence[IoTensor]) -> Iterator[Feed]:
    """Yield the items of arrays with leading extent 1, in the model's dtypes. Raises as `count_items`."""
    count = count_items(where, {name: Header(array.shape, array.dtype) for name, array in arrays.items()}, inputs)
    for item in range(count):
        feed = {}
        for tensor in inputs:
            array = arrays[tensor.name]
            array = array.reshape(_with_batch_axis(array.shape, tensor))
            part = array[item:item + 1] if holds_items(tensor) else array
            feed[tensor.name] = np.require(_fitting(where, part, tensor), tensor.dtype, "C")
        yield feed


def _fitting(where: str, array: Array, tensor: IoTensor) -> Array:
    """Return the array. Raises CalibrationError if integers exceed the range of the input's dtype."""
    if array.dtype.kind in "iu" and tensor.dtype not in BITS and not np.can_cast(array.dtype, tensor.dtype):
        limits = np.iinfo(tensor.dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise CalibrationError(f"{where}: '{tensor.name}' holds {array.min()} to {array.max()}; the model takes "
                                   f"{tensor.dtype}, {limits.min} to {limits.max}")
    return array


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return NumPy's letter of a dtype's kind, also for dtypes that NumPy lacks."""
    return ("i" if "int" in dtype.name else "f") if dtype.name in BITS else dtype.kind


def _fits(shape: tuple[int, ...], tensor: IoTensor) -> bool:
    first = 1 if holds_items(tensor) else 0
    return len(shape) == len(tensor.shape) and all(
        isinstance(declared, str) or extent == declared
        for extent, declared in zip(shape[first:], tensor.shape[first:], strict=True))


def _with_batch_axis(shape: tuple[int, ...], tensor: IoTensor) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == len(tensor.shape) - 1 and holds_items(tensor) else shape
