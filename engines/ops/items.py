"""Where the items of a batch stand in the result of an operator, if it keeps them apart.

An operator keeps items apart if item i of each result follows from item i of those inputs that have items, and from
inputs that are alike for all of them. `Op.item_axes` says so operator by operator, mostly by one of these functions;
passes/dependence.py follows it through a graph.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engines.ir.counted import as_int
from engines.ir.graph import BATCH, Dim, TensorType
from engines.ir.shapes import normal_axis

ItemAxes = Sequence[int | None]     # for each tensor the axis of its items; None: alike for all items, or absent


class Mixed(Exception):
    """Why a result is not known to follow item by item."""


def broadcast(inputs: Sequence[TensorType | None], axes: ItemAxes, rank: int) -> int:
    """The axis of the items in a result of that rank, to which the inputs are broadcast, aligned at the right."""
    behind = {len(kind.shape) - axis for kind, axis in zip(inputs, axes, strict=True)
              if kind is not None and axis is not None}
    if len(behind) != 1:
        raise Mixed("its operands have their items along different axes")
    return rank - behind.pop()


def repeated(shape: Sequence[Dim]) -> tuple[int]:
    """The axis of the items of a result that has the same for each of them."""
    if list(shape).count(BATCH) != 1:
        raise Mixed("its result has no axis that counts the items alone")
    return (list(shape).index(BATCH),)


def beside(shape: Sequence[Dim], items: int | None, used: Iterable[int], doing: str) -> int:
    """The axis of the items of the only input that has any, none of the axes that the operator works along."""
    if items is None:
        raise Mixed("its items come from an operand that is read for all of them")
    if items in {normal_axis(axis, len(shape)) for axis in used}:
        raise Mixed(f"it {doing} the axis of the items")
    return items


def only_first(axes: ItemAxes) -> int:
    """The axis of the items of the first input; no other one may have any."""
    if axes[0] is None or any(axis is not None for axis in axes[1:]):
        raise Mixed("its weights or parameters differ from item to item")
    return axes[0]


def viewed(source: Sequence[Dim], axis: int, target: Sequence[Dim]) -> int:
    """The axis of the items when the same elements are seen in another shape."""
    for place, extent in enumerate(target):
        if extent == BATCH and _count(target[:place]) == _count(source[:axis]):
            return place
    raise Mixed("its result has no axis that counts the items alone")


def _count(shape: Sequence[Dim]) -> int:
    """Elements of a shape; -1 where it depends on the batch."""
    return -1 if any(isinstance(extent, str) for extent in shape) else math.prod(map(as_int, shape))
