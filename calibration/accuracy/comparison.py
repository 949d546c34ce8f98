"""Measure the outputs of many quantised models against those of one float model.

A search compares dozens of quantised models with the same float outputs. All that depends on the float outputs alone
(the elements of each part, which of them are finite, the sums of their powers) is computed once, by Reference.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from infer_server.calibration.accuracy.measures import Powers, fault_of_int8, typical
from infer_server.calibration.accuracy.parts import TensorParts
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array

MIN_CLASSES = 3     # an output [items, classes] with at least this many classes is treated as a classifier's
CHUNK = 1 << 14     # elements measured at once, so that their float64 copies stay in the caches


@dataclass(frozen=True)
class Errors:
    """Errors of quantised outputs relative to the float outputs, over all items, of the worst part.

    peak_db     signal to noise ratio in the 4-norm, the criterion of the search
    sqnr_db     signal to quantisation noise ratio
    cosine      cosine of the angle between them, mean over items
    top1        share of items with the same largest element, 0..1; None if no output looks like a classifier's
    part        part with the least peak_db, "y: boxes" for "boxes" of output "y"; "" if there is only one
    fault       why the outputs are too inexact to be used, with the part; "" if they are not
    """
    peak_db: float
    sqnr_db: float
    cosine: float
    top1: float | None
    part: str = ""
    fault: str = ""

    def __str__(self) -> str:
        top1 = " " * 9 * bool(self.part) if self.top1 is None else f"  {100 * self.top1:5.1f} %"
        return (f"{self.peak_db:7.2f} dB  {self.sqnr_db:7.2f} dB  {self.cosine:.5f}{top1}"
                + f"  {self.part}" * bool(self.part))


class Reference:
    """Float outputs of several runs, prepared for any number of comparisons."""

    # noqa: B006
    def __init__(self, runs: Sequence[Mapping[str, Array]], parts: Mapping[str, TensorParts] = {}) -> None:
        """Prepare the reference.

        runs: {output: array} of each run, items on the leading axis; only floating-point outputs count. parts: parts of
        outputs that are measured separately.
        """
        self._runs = [{name: _Output(name, np.atleast_1d(array), parts.get(name, TensorParts()), number)
                       for name, array in run.items() if array.dtype.kind == "f"} for number, run in enumerate(runs)]

    def errors(self, outputs: Iterable[Mapping[str, Array]]) -> Errors:
        """Measure the errors of outputs computed from the reference's feeds, in their order.

        Outputs that are missing on one side are ignored. Raises CalibrationError if none is left or all are zero.
        """
        measured: dict[str, _Sums] = {}
        agreements: list[float] = []
        for run, actual in zip(self._runs, outputs, strict=True):
            for output in (output for name, output in run.items() if name in actual):
                values = np.atleast_1d(actual[output.name])
                for label, items in output.parts.items():
                    sums = measured.setdefault(label, _Sums())
                    for item, value in zip(items, values, strict=True):
                        item.measure(value, sums)
                agreements += output.agreements(values)
        return _errors_of(measured, agreements)


def compare(reference: Sequence[Mapping[str, Array]], outputs: Iterable[Mapping[str, Array]],
            parts: Mapping[str, TensorParts] = {}) -> Errors:  # noqa: B006
    """Measure the errors of `outputs` against `reference` once; see Reference."""
    return Reference(reference, parts).errors(outputs)


@dataclass
class _Sums:
    """Measurements of one part, by item."""
    powers: list[Powers] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    zeroed: list[float] = field(default_factory=list)


def _errors_of(measured: Mapping[str, _Sums], agreements: Sequence[float]) -> Errors:
    """Summarise the measurements of all parts."""
    mean = {label: powers for label, sums in measured.items() if (powers := typical(sums.powers))}
    if not mean:
        raise CalibrationError("calibrators cannot be compared: the model has no floating point output, or only zeros "
                               "in it; choose one yourself (--calibrator)")
    worst = min(mean, key=lambda label: mean[label].peak_snr_db)
    faults = (f"'{label}': {fault}" for label, powers in mean.items()
              if (fault := fault_of_int8(powers.sqnr_db, float(np.mean(measured[label].zeroed)))))
    return Errors(mean[worst].peak_snr_db, min(powers.sqnr_db for powers in mean.values()),
                  min(float(np.mean(measured[label].cosines)) for label in mean),
                  float(np.mean(agreements)) if agreements else None, worst if len(mean) > 1 else "",
                  "; ".join(faults))


class _Output:
    """Output of a run. parts: the items of each part, by its label in reports."""

    def __init__(self, name: str, array: Array, parts: TensorParts, run: int) -> None:
        self.name = name
        self.parts = {f"{name}: {part}" if part else name: list(_items(array, mask))
                      for part, mask in parts.masks(run, array.shape)}
        is_classifier = array.ndim == 2 and array.shape[1] >= MIN_CLASSES
        self._classes = np.argmax(array, axis=1) if is_classifier else None

    def agreements(self, values: Array) -> list[float]:
        """Return 1 for each item whose largest element is the right one, and 0 for others; none of other outputs."""
        return [] if self._classes is None else list(map(float, self._classes == np.argmax(values, axis=1)))


def _items(array: Array, mask: NDArray[np.bool_] | None) -> Iterator[_Item]:
    """Yield the part of each item that a mask selects; items with equal masks share their indices."""
    last: NDArray[np.intp] | None = None
    for number, values in enumerate(array):
        if mask is not None:
            where = np.flatnonzero(mask[number])
            last = last if last is not None and np.array_equal(where, last) else where
        yield _Item(np.reshape(values, -1), last)


class _Item:
    """Reference values of one item, or of a part of it, and the sums of their powers."""

    def __init__(self, values: Array, where: NDArray[np.intp] | None) -> None:
        """Take the values of an item. where: indices of the part; None: the whole item."""
        self._where = where
        self._values = values if where is None else values[where]
        self._nonzero = int(np.count_nonzero(self._values))
        finite = np.isfinite(self._values)
        self._finite = None if finite.all() else finite     # masked scores, for instance, are infinite
        self._r2, self._r4 = _powers(_chunks(self._of_finite(self._values)))

    def _of_finite(self, values: Array) -> Array:
        """Select the elements that are finite in the reference."""
        return values if self._finite is None else values[self._finite]

    def measure(self, value: Array, sums: _Sums) -> None:
        """Add the errors of a quantised item."""
        actual = np.reshape(value, -1)
        actual = actual if self._where is None else actual[self._where]
        lost = int(np.count_nonzero((actual == 0) & (self._values != 0)))
        v2, e2, e4 = 0.0, 0.0, 0.0
        for r, v in zip(_chunks(self._of_finite(self._values)), _chunks(self._of_finite(actual)), strict=True):
            v2 += _dot(v, v)
            two, four = _powers([np.subtract(r, v, out=r)])
            e2, e4 = e2 + two, e4 + four
        product, norms = (self._r2 + v2 - e2) / 2, math.sqrt(self._r2) * math.sqrt(v2)
        sums.powers.append(Powers(self._r2, e2, self._r4, e4))
        sums.cosines.append(product / norms if norms else float(e2 == 0.0))
        sums.zeroed.append(lost / max(self._nonzero, 1))


def _chunks(values: Array) -> Iterator[NDArray[np.float64]]:
    """Yield copies in float64 of at most CHUNK elements."""
    for start in range(0, len(values), CHUNK):
        yield values[start:start + CHUNK].astype(np.float64)


def _powers(chunks: Iterable[NDArray[np.float64]]) -> tuple[float, float]:
    """Return the sums of squares and of fourth powers; overwrites the chunks."""
    two, four = 0.0, 0.0
    for chunk in chunks:
        squares = np.square(chunk, out=chunk)
        two, four = two + float(squares.sum()), four + _dot(squares, squares)
    return two, four


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the inner product; by one thread, which BLAS does not promise."""
    return float(np.einsum("i,i->", a, b))
