"""Propagation of the batch axis through operators that keep items independent.

An operator keeps items independent if item i of each result depends on item i of batched inputs, and on inputs shared
by
all items. `Op.item_axes` defines it per operator, mostly by one of these functions; passes/dependence.py propagates it
through a graph.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from infer_server.engines.ir.graph import BATCH, Dim, TensorType
from infer_server.engines.ir.shapes import normal_axis
from infer_server.engines.ir.symbolic import as_int

ItemAxes = Sequence[int | None]     # batch axis of each tensor; None: shared by all items, or absent


class Mixed(Exception):
    """Reason why a result is not known to be independent per item."""


def broadcast(inputs: Sequence[TensorType | None], axes: ItemAxes, rank: int) -> int:
    """Return the batch axis of a result of that rank to which the inputs broadcast."""
    behind = {len(kind.shape) - axis for kind, axis in zip(inputs, axes, strict=True)
              if kind is not None and axis is not None}
    if len(behind) != 1:
        raise Mixed("its operands have their items along different axes")
    return rank - behind.pop()


def repeated(shape: Sequence[Dim]) -> tuple[int]:
    """Return the batch axis of a result that is equal for all items."""
    if list(shape).count(BATCH) != 1:
        raise Mixed("its result has no axis that counts the items alone")
    return (list(shape).index(BATCH),)


def untouched_axis(shape: Sequence[Dim], items: int | None, used: Iterable[int], doing: str) -> int:
    """Return the batch axis of the only batched input, which must not be among the axes `used`.

    `doing` describes the use in the error.
    """
    if items is None:
        raise Mixed("its items come from an operand that is read for all of them")
    if items in {normal_axis(axis, len(shape)) for axis in used}:
        raise Mixed(f"it {doing} the axis of the items")
    return items


def only_first(axes: ItemAxes) -> int:
    """Return the batch axis of the first input; no other input may be batched."""
    if axes[0] is None or any(axis is not None for axis in axes[1:]):
        raise Mixed("its weights or parameters differ from item to item")
    return axes[0]


def viewed(source: Sequence[Dim], axis: int, target: Sequence[Dim]) -> int:
    """Return the batch axis of a reshaped tensor."""
    for place, extent in enumerate(target):
        if extent == BATCH and _count(target[:place]) == _count(source[:axis]):
            return place
    raise Mixed("its result has no axis that counts the items alone")


def _count(shape: Sequence[Dim]) -> int:
    """Return the number of elements of a shape, or -1 if it depends on the batch."""
    return -1 if any(isinstance(extent, str) for extent in shape) else math.prod(map(as_int, shape))
