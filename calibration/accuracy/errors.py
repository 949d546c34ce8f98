"""Errors of outputs relative to a reference, over all items, and their limits for each precision."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from infer_server.calibration.accuracy.measures import POOR_DB, cosine, fault_of_int8, sqnr_db, zeroed
from infer_server.calibration.accuracy.parts import parts_of_tensor
from infer_server.calibration.accuracy.sources import Sources
from infer_server.engines.ir.dtypes import BITS, as_named
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import IoTensor

FLOOR = 1e-4        # a part's errors are relative to its range, but at least to this share of the whole output's range


@dataclass(frozen=True)
class ErrorLimits:
    """Limits of the errors of an output in one precision.

    relative    largest error as a share of the output's range
    sqnr_db     least SQNR, used where single values are not significant
    differing   share of integers, booleans and rows after a selection that may differ
    rows        tolerance of the elements of a row after a selection, as a share of their column's range
    """
    relative: float = math.inf
    sqnr_db: float = -math.inf
    differing: float = 0.01
    rows: float = 1e-3


LIMITS = {
    "fp32": ErrorLimits(relative=1e-3),                             # sums in another order: 1e-6 to 1e-4
    "fp16": ErrorLimits(relative=2e-2, differing=0.1, rows=2e-2),   # 11 bits a tensor, over all layers
    "bf16": ErrorLimits(relative=1e-1, differing=0.2, rows=1e-1),   # 8 bits
    "int8": ErrorLimits(sqnr_db=POOR_DB, differing=0.5, rows=1e-1),
    "weight-only": ErrorLimits(sqnr_db=POOR_DB, differing=0.5, rows=1e-1),      # against the float model
}


@dataclass(frozen=True)
class OutputErrors:
    """Errors of one output, or of a part of one, against the reference, over elements that are finite in both.

    largest     largest absolute error; `relative` is its share of the output's range, max - min of the expected values
    item        index of the item with the largest error, in the order of the data
    odd         number of elements that are NaN or infinite on one side and differ on the other
    zeroed      share of the nonzero elements that the engine computes as 0
    differing   share of the elements that are not equal
    rows        after a selection: number of compared rows; `missing` is the number of those without a match
    wrong       why the output cannot be compared: another dtype or shape, no finite value; "" if it can
    """
    name: str
    largest: float = 0.0
    relative: float = 0.0
    mean: float = 0.0
    median: float = 0.0
    item: int = 0
    sqnr_db: float = math.inf
    cosine: float = 1.0
    odd: int = 0
    zeroed: float = 0.0
    differing: float = 0.0
    floating: bool = True
    rows: int = -1
    missing: int = 0
    wrong: str = ""

    def fault(self, limits: ErrorLimits) -> str:
        """Say which limit the output exceeds first; "" if none."""
        if self.wrong or self.odd:
            return self.wrong or f"{self.odd} elements are NaN or infinite in one of the two only"
        if self.rows >= 0:
            allowed = max(limits.differing * self.rows, min(1.0, self.rows / 2))
            return (f"{self.missing} of {self.rows} selected rows are none of the model's; at most "
                    f"{100 * limits.differing:g} % may" if self.missing > allowed else "")
        if not self.floating:
            return (f"{100 * self.differing:.1f} % of the elements differ; at most {100 * limits.differing:g} % may"
                    if self.differing > limits.differing else "")
        if not self.relative <= limits.relative:
            return (f"its largest error is {self.relative:.3g} of its range (item {self.item}); at most "
                    f"{limits.relative:g} may be")
        return fault_of_int8(self.sqnr_db, self.zeroed) if limits.sqnr_db > -math.inf else ""


@dataclass(frozen=True)
class Pair:
    """Expected and computed values of an output in one run, [items, ...].

    wrong           why they cannot be compared; "" if they can
    counted         mask of the elements whose errors are measured; None: all
    rows, missing   see OutputErrors
    """
    expected: Array
    value: Array
    floating: bool = True
    wrong: str = ""
    measured: NDArray[np.bool_] | None = None
    rows: int = -1
    missing: int = 0


def pair_of(tensor: IoTensor, expected: Array, value: Array, selected: bool = False) -> Pair:
    """Pair two arrays of an output; selected: it is after a selection, and the numbers of rows may differ."""
    expected, value = (_readable(array, tensor) for array in (expected, value))
    fits = expected.ndim == value.ndim if selected else expected.shape == value.shape
    if not fits or expected.dtype != value.dtype:
        return Pair(expected, value, wrong=f"it is {value.dtype}{list(value.shape)}, and should be "
                                           f"{expected.dtype}{list(expected.shape)}")
    if tensor.batched:
        expected, value = (np.moveaxis(array, tensor.batch_axis, 0) for array in (expected, value))
    elif _is_one_item(expected, selected) and _is_one_item(value, selected):
        expected, value = expected[None], value[None]
    return Pair(expected, value, expected.dtype.kind == "f")


def _is_one_item(array: Array, selected: bool) -> bool:
    """Return True if the leading axis of an output without a batch axis does not count items."""
    return array.ndim < (3 if selected else 2) or array.shape[0] != 1


def _readable(array: Array, tensor: IoTensor) -> Array:
    """Convert what NumPy lacks, or its bits as an engine gives them, to float32."""
    return as_named(array, tensor.dtype).astype(np.float32) if tensor.dtype in BITS else array


# ---- errors
def errors_of(name: str, pairs: Sequence[Pair], floor: float = 0.0) -> OutputErrors:
    """Measure the errors of all runs. floor: minimum of the range that errors are relative to."""
    if wrong := next((pair.wrong for pair in pairs if pair.wrong), ""):
        return OutputErrors(name, wrong=wrong)
    rows = sum(pair.rows for pair in pairs) if pairs[0].rows >= 0 else -1
    errors = OutputErrors(name, floating=pairs[0].floating, rows=rows, missing=sum(pair.missing for pair in pairs))
    expected, value = (np.concatenate([_measured(pair, array) for pair, array in arrays]) for arrays in (
        [(p, p.expected) for p in pairs], [(p, p.value) for p in pairs]))
    same = (expected == value) | ((expected != expected) & (value != value))
    differing = 1.0 - float(same.mean()) if same.size else 0.0
    if not errors.floating:
        return replace(errors, differing=differing)
    finite = np.isfinite(expected) & np.isfinite(value)
    odd = int((~finite & ~same).sum())
    if not finite.any():
        nothing = f"none of its {expected.size} values is finite: nothing can be compared; give typical inputs, --calib"
        return replace(errors, odd=odd, wrong=nothing if expected.size and rows < 0 else "")
    wide = np.where(finite, expected, 0).astype(np.float64)
    error = np.abs(np.where(finite, value, 0).astype(np.float64) - wide)
    seen, largest = wide[finite], float(error.max())
    range_ = max(float(seen.max() - seen.min()), floor) or float(np.abs(seen).max()) or 1.0
    return replace(errors, largest=largest, relative=largest / range_, mean=float(error[finite].mean()),
                   median=float(np.median(error[finite])), item=_item(pairs, int(error.argmax())),
                   sqnr_db=sqnr_db(expected[finite], value[finite]), cosine=cosine(expected[finite], value[finite]),
                   odd=odd, zeroed=zeroed(expected[finite], value[finite]), differing=differing)


def errors_of_parts(name: str, pairs: Sequence[Pair], sources: Sequence[Sources]) -> Iterator[OutputErrors]:
    """Yield the errors of each part of an output; none for an output that is one part."""
    if any(pair.wrong or not pair.floating or pair.measured is not None for pair in pairs):
        return
    parts = parts_of_tensor([pair.expected for pair in pairs], sources)
    if len(parts.names) < 2:
        return
    values = np.concatenate([pair.expected[np.isfinite(pair.expected)] for pair in pairs])
    floor = FLOOR * float(np.ptp(values.astype(np.float64))) if values.size else 0.0
    masks = [dict(parts.masks(run, pair.expected.shape)) for run, pair in enumerate(pairs)]
    for part in parts.names:
        yield errors_of(f"{name}: {part}", [replace(pair, measured=mask[part])
                                            for pair, mask in zip(pairs, masks, strict=True)], floor)


def _measured(pair: Pair, array: Array) -> Array:
    return array.reshape(-1) if pair.measured is None else array[pair.measured]


def _item(pairs: Sequence[Pair], element: int) -> int:
    """Return the index of the item that contains an element; items may have different numbers of elements."""
    first = 0
    for pair in pairs:
        counts = (np.full(len(pair.value), pair.value[0].size) if pair.measured is None
                  else pair.measured.reshape(len(pair.measured), -1).sum(axis=1)) if len(pair.value) else np.zeros(0,
                                                                                                                   int)
        if element < counts.sum():
            return first + int(np.searchsorted(np.cumsum(counts), element, side="right"))
        element -= int(counts.sum())
        first += len(pair.value)
    return first
