"""Operators with results of data-dependent size, and movements at run-time indices that loops perform."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array, Node

Attrs = Mapping[str, Any]
FEW = 1024      # up to so many elements ndarray.nonzero is faster


def _non_zero(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    if not x.ndim:
        return (np.zeros((0, int(x != 0)), np.int64),)
    if x.size <= FEW:
        return (np.array(x.nonzero()),)
    place = np.flatnonzero(np.asarray(x != 0))      # much faster on booleans and along one axis
    found = np.empty((x.ndim, len(place)), np.int64)
    for axis in range(x.ndim - 1, 0, -1):
        place, found[axis] = np.divmod(place, x.shape[axis])
    found[0] = place
    return (found,)


def _first_rows(attrs: Attrs, x: Array, count: Array) -> tuple[Array, ...]:
    """Return the valid rows of a padded result of a segment."""
    return (x[:int(count[0])],)


def _non_max_suppression(attrs: Attrs, boxes: Array, scores: Array, *numbers: Array | None) -> tuple[Array, ...]:
    """Run NonMaxSuppression on the host, for backends that have neither a kernel nor reference steps."""
    from infer_server.engines.ops.selection import BoundedNonMaxSuppression  # imported at the first run

    limits: list[Array] = [np.zeros(1, np.int64), np.zeros(1, np.float32), np.full(1, -np.inf, np.float32)]
    for index, number in enumerate(numbers):
        if number is not None:
            limits[index] = number
    node = Node("BoundedNonMaxSuppression", (), (), {**attrs, "limit": boxes.shape[1]})
    found, count = BoundedNonMaxSuppression.reference(node, boxes, scores, *limits)
    return (found[:int(count[0])],)


def _compress(attrs: Attrs, x: Array, condition: Array) -> tuple[Array, ...]:
    return (np.compress(condition, x, attrs.get("axis")),)


def _unique(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    """Return the distinct elements or slices, their first indices, the inverse indices, and their counts."""
    y, first, inverse, counts = np.unique(x, True, True, True, axis=attrs.get("axis"))
    inverse = inverse.reshape(-1)
    if not attrs.get("sorted", 1):      # in the order in which they come
        order = np.argsort(first)
        y, first, counts = np.take(y, order, attrs.get("axis") or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


def _range(attrs: Attrs, start: Array, limit: Array, delta: Array) -> tuple[Array, ...]:
    if not delta:
        raise ValueError("its delta is 0")
    if start.dtype.kind == "i":
        return (np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype),)
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
        return (x.take(indices, axis),)
    return (x[int(indices), ...],)      # a view


OPERATORS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "Compress": _compress, "FirstRows": _first_rows, "Gather": _gather, "Identity": lambda attrs, x: (x,),
    "NonMaxSuppression": _non_max_suppression, "NonZero": _non_zero,
    "Range": _range, "Slice": _slice, "Unique": _unique}
