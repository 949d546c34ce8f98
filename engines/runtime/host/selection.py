"""Operators whose results have as many elements as the data say, and the movement that loops do by run-time numbers."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engines.ir.graph import Array

Attrs = Mapping[str, Any]
BLOCK = 64          # boxes of a class that are compared at a time


def _non_zero(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    return (np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((0, int(x != 0)), np.int64),)


def _compress(attrs: Attrs, x: Array, condition: Array) -> tuple[Array, ...]:
    return (np.compress(condition, x, attrs.get("axis")),)


def _unique(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    """The distinct elements or slices, where each was first, which one each is, and how many there are."""
    y, first, inverse, counts = np.unique(x, True, True, True, axis=attrs.get("axis"))
    inverse = inverse.reshape(-1)
    if not attrs.get("sorted", 1):      # in the order in which they come
        order = np.argsort(first)
        y, first, counts = np.take(y, order, attrs.get("axis") or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


def _range(attrs: Attrs, start: Array, limit: Array, delta: Array) -> tuple[Array, ...]:
    count = max(int(np.ceil((limit - start) / delta)), 0)
    return ((start + np.arange(count) * delta).astype(start.dtype),)


def _slice(attrs: Attrs, x: Array, starts: Array, ends: Array, axes: Array | None = None,
           steps: Array | None = None) -> tuple[Array, ...]:
    index = [slice(None)] * x.ndim
    chosen = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        if step < 0 and end < -x.shape[axis]:
            end = None          # NumPy would count an end before the first element from the last one
        index[axis] = slice(start, end, step)
    return (np.ascontiguousarray(x[tuple(index)]),)


def _gather(attrs: Attrs, x: Array, indices: Array) -> tuple[Array, ...]:
    axis = attrs.get("axis", 0)
    if indices.ndim or axis:
        return (np.take(x, indices, axis),)
    return (x[int(indices), ...],)      # a view


def _non_max_suppression(attrs: Attrs, boxes: Array, scores: Array, most: Array | None = None,
                         overlap: Array | None = None, least: Array | None = None) -> tuple[Array, ...]:
    """(batch, class, box) of the best boxes, none of which covers a better one by more than `overlap`."""
    limit = 0 if most is None else int(most.reshape(-1)[0])
    threshold = 0.0 if overlap is None else float(overlap.reshape(-1)[0])
    lowest = -np.inf if least is None else float(least.reshape(-1)[0])
    found: list[tuple[int, int, int]] = []
    for batch, corners in enumerate(map(_corners if not attrs.get("center_point_box", 0) else _around, boxes)):
        area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
        for kind, score in enumerate(scores[batch]):
            found += [(batch, kind, box) for box in _best(corners, area, score, limit, threshold, lowest)]
    return (np.array(found, np.int64).reshape(-1, 3),)


def _best(corners: Array, area: Array, score: Array, limit: int, threshold: float, lowest: float) -> list[int]:
    """By blocks of falling score: without those that boxes before them cover, then one after the other."""
    waiting = np.argsort(-score, kind="stable")
    waiting = waiting[score[waiting] > lowest] if np.isfinite(lowest) else waiting
    found = waiting[:0]
    for start in range(0, len(waiting), BLOCK):
        if len(found) >= limit:
            break
        block = waiting[start:start + BLOCK]
        block = block[~_covered(corners, area, found, block, threshold).any(0)]
        taken, gone = [], np.zeros(len(block), bool)
        for i, covered in enumerate(_covered(corners, area, block, block, threshold)):
            if not gone[i]:
                taken.append(i)
                gone |= covered
        found = np.concatenate([found, block[taken]])
    return list(map(int, found[:limit]))


def _covered(corners: Array, area: Array, by: Array, boxes: Array, threshold: float) -> Array:
    """Whether each of `by` (rows) covers each of the boxes by more than the threshold."""
    first, second = corners[by].T[:, :, None], corners[boxes].T
    sides = [np.maximum(np.minimum(first[axis + 2], second[axis + 2]) - np.maximum(first[axis], second[axis]), 0)
             for axis in (0, 1)]
    common = sides[0] * sides[1]
    union = area[by][:, None] + area[boxes] - common
    return np.asarray(~(common <= threshold * np.maximum(union, np.finfo(np.float32).tiny)))


def _corners(boxes: Array) -> Array:
    """Two opposite corners of each, whichever they are: the lower one first."""
    pairs = boxes.reshape(-1, 2, 2)
    return np.concatenate([pairs.min(1), pairs.max(1)], 1)


def _around(boxes: Array) -> Array:
    """The same of a centre, a width and a height."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1)


OPERATORS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "Compress": _compress, "Gather": _gather, "NonMaxSuppression": _non_max_suppression, "NonZero": _non_zero,
    "Range": _range, "Slice": _slice, "Unique": _unique}
