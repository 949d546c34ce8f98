"""Comparison of the rows that a selection returns (detections, sorted elements), independent of their order.

A difference in the last bit may swap nearly equal rows, or select another candidate that nearly equals the last
selected one. Therefore each expected row is matched with the most similar computed row, and rows at the end of the
ranking are not counted.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer_server.calibration.accuracy.sources import Selection
from infer_server.engines.ir.graph import Array

PAIRS = 1 << 22         # most pairs of rows compared; with more, each row is compared to those of similar rank
MOST_COLUMNS = 64       # most columns used to match rows; if rows are images, some of their pixels


@dataclass(frozen=True)
class Matched:
    """Computed rows in the order of the expected ones.

    value       rows in the shape of the expected array; a row without a match is the expected one
    matched     mask of the elements whose row has a match, in that shape
    missing     number of missing or superfluous rows
    rows        number of compared rows: those that are surely selected
    """
    value: Array
    matched: NDArray[np.bool_]
    missing: int
    rows: int


Decided = Mapping[tuple[int, int], NDArray[np.bool_]]       # (sets, rows) -> the rows that are surely selected


def match_rows(expected: Array, value: Array, selection: Selection, tolerance: float, decided: Decided) -> Matched:
    """Match the rows of two arrays.

    Parameters
    ----------
    expected, value : arrays of one dtype and rank, [items, ...]
        They may differ in the number of rows.
    tolerance : float
        How far elements of a row may be apart, as a share of their column's range. Columns of whole numbers, such as
        class numbers, must be equal.
    decided : see `decided_rows`
    """
    axis = _row_axis(expected.shape, selection)
    reference, actual = _rows(expected, axis), _rows(value, axis)
    if reference.shape[0] != actual.shape[0] or reference.shape[2] != actual.shape[2]:
        count = reference.shape[0] * reference.shape[1]
        return Matched(expected, np.zeros(expected.shape, bool), count, count)
    result, matched = reference.copy(), np.zeros(reference.shape[:2], bool)
    limits = _limits(reference, tolerance)
    if not selection.ordered:
        matched = (np.abs(actual.astype(np.float64) - reference) <= limits)[:, :, 0]
        result = np.where(matched[:, :, None], actual, reference)
    for number, (expected_rows, rows) in enumerate(zip(reference, actual, strict=True) if selection.ordered else ()):
        for i, j in _pairs(expected_rows, rows, limits):
            result[number, i], matched[number, i] = rows[j], True
    counted = decided.get(reference.shape[:2], np.ones(reference.shape[:2], bool))
    missing = int((counted & ~matched).sum()) + reference.shape[0] * max(actual.shape[1] - reference.shape[1], 0)
    whole = np.broadcast_to(matched[:, :, None], reference.shape)
    return Matched(result.reshape(expected.shape), whole.reshape(expected.shape), missing, int(counted.sum()))


def decided_rows(outputs: Iterable[tuple[Array, Selection]], tolerance: float) -> Decided:
    """Tell which rows of an item are surely selected: those further than the tolerance above the last one.

    Rows are ranked by a column that falls from row to row in every item, in any of the outputs: the scores may be an
    output of their own. Outputs for which there is no such ranking are left out.
    """
    masks: dict[tuple[int, int], NDArray[np.bool_]] = {}
    for array, selection in outputs:
        if array.dtype.kind != "f" or not selection.ordered:
            continue
        rows = _rows(array, _row_axis(array.shape, selection))
        for column in range(min(rows.shape[2], MOST_COLUMNS) if rows.shape[1] > 1 else 0):
            ranked = rows[:, :, column].astype(np.float64)
            if np.isfinite(ranked).all() and (np.diff(ranked, axis=1) <= 0).all():
                masks[rows.shape[:2]] = np.asarray(ranked > ranked[:, -1:] + tolerance * np.abs(ranked).max())
                break
    return masks


# ---- rows of an array
def _row_axis(shape: tuple[int, ...], selection: Selection) -> int:
    """Find the axis along which the selected elements stand: by their number, else the first behind the items."""
    if not selection.ordered:
        return len(shape)
    named = [axis for axis in range(1, len(shape)) if shape[axis] in selection.counts]
    first = 2 if len(shape) > 3 and shape[1] == 1 else 1
    return named[0] if named else min(first, len(shape))


def _rows(array: Array, axis: int) -> Array:
    """View an array as [sets, rows, columns]; without a row axis, every element is a row in a set of its own."""
    shape = array.shape
    rows = shape[axis] if axis < len(shape) else 1
    return array.reshape(math.prod(shape[:axis]), rows, math.prod(shape[axis + 1:]))


# ---- what is alike
def _limits(reference: Array, tolerance: float) -> Array:
    """Say for each column how far elements may be apart; 0 where they are whole numbers."""
    if reference.dtype.kind != "f" or not reference.size:
        return np.zeros(reference.shape[2])
    columns = reference.reshape(-1, reference.shape[2]).astype(np.float64)
    finite = np.where(np.isfinite(columns), columns, 0)
    range_ = finite.max(axis=0) - finite.min(axis=0)
    range_ = np.where(range_ > 0, range_, np.abs(finite).max(axis=0))
    whole = (finite == np.rint(finite)).all(axis=0) & (range_ > 0) & (reference.shape[2] > 1)
    return np.where(whole, 0.0, tolerance * range_)


def _pairs(reference: Array, actual: Array, limits: Array) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows that are alike, each row once: in the order of the reference, the nearest first."""
    columns = np.unique(np.linspace(0, reference.shape[1] - 1, min(reference.shape[1], MOST_COLUMNS)).astype(int))
    a, b, limit = reference[:, columns], actual[:, columns], limits[columns]
    if a.dtype.kind == "f":
        a, b = (np.nan_to_num(array.astype(np.float64)) for array in (a, b))
    window = max(PAIRS // max(len(a), 1), 64)
    free = np.ones(len(b), bool)
    for i, row in enumerate(a):
        low, high = max(i - window, 0), min(i + window, len(b))
        if high <= low or not columns.size:
            continue
        if a.dtype.kind == "f":
            apart = np.abs(b[low:high] - row)
            alike = free[low:high] & (apart <= limit).all(axis=1)
            distance = (apart / np.where(limit > 0, limit, 1)).max(axis=1)
        else:
            alike = free[low:high] & (b[low:high] == row).all(axis=1)
            distance = np.abs(np.arange(low, high) - i)
        if alike.any():
            j = low + int(np.where(alike, distance, np.inf).argmin())
            free[j] = False
            yield i, j
