"""Where a tensor lies: in which buffer, from which byte on, with which strides."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.ir.counted import as_int
from engines.ir.dtypes import memory_dtype
from engines.ir.graph import BATCH, Dim, TensorType
from engines.lowering.problems.view import Halo, View, dense_view
from engines.plan.plan import SLACK, TensorView

NO_BUFFER = -1
ITEMS = -1          # as an axis of an item: the axis before them, where it is no batch


@dataclass(frozen=True)
class Storage:
    """A buffer: `whole` is the view of all of it, halo included, one item; `pad` fills the halo."""
    name: str                   # of the tensor that it was made for
    whole: View
    items: Dim                  # BATCH, or how many
    halo: Halo = Halo()
    pad: float = 0.0


@dataclass(frozen=True)
class Placement:
    """A tensor in a buffer: `offset` is of element 0 of item 0."""
    buffer: int                 # NO_BUFFER: `constant` is where it lies
    offset: int
    view: View
    items: Dim
    constant: str = ""          # the constant's name

    def part(self, axis: int, start: int, stop: int, step: int = 1) -> Placement:
        """Indices start, start + step, ... below stop of an axis of the item, or of ITEMS."""
        if axis == ITEMS:
            offset, item = self.offset + start * self.view.item, self.view.item * step
            return replace(self, offset=offset, items=-(-(stop - start) // step), view=replace(self.view, item=item))
        shape, strides = list(self.view.shape), list(self.view.strides)
        shape[axis] = -(-(stop - start) // step)
        offset = self.offset + start * strides[axis]
        strides[axis] *= step
        return replace(self, offset=offset, view=replace(self.view, shape=tuple(shape), strides=tuple(strides)))

    def with_halo(self, halo: Halo) -> Placement:
        """The image and what its buffer has around it."""
        if not halo:
            return self
        return replace(self.moved(*halo.corner(len(self.view.shape))),
                       view=replace(self.view, shape=halo.around(self.view.shape)))

    def moved(self, *steps: int) -> Placement:
        """The same view, its origin moved by so many indices along each axis."""
        offset = sum(n * stride for n, stride in zip(steps, self.view.strides, strict=True))
        return replace(self, offset=self.offset + offset)


def items_of(tensor: TensorType) -> Dim:
    """BATCH if the tensor has that axis; else the leading extent, or 1 for a scalar."""
    return BATCH if BATCH in tensor.shape else tensor.shape[0] if tensor.shape else 1


def has_batch(tensor: TensorType) -> bool:
    """Whether an extent depends on the batch."""
    return not all(isinstance(extent, int) for extent in tensor.shape)


def batch_axis(tensor: TensorType) -> int:
    """Where the axis of the items stands. In memory it always leads."""
    return tensor.shape.index(BATCH) if BATCH in tensor.shape else 0


def axis_of_item(tensor: TensorType, axis: int) -> int:
    """An axis of the tensor as one of its item; ITEMS for that of the batch, or the leading one where there is none."""
    axis, batch = axis % len(tensor.shape), batch_axis(tensor)
    return ITEMS if axis == batch else axis - (axis > batch)


def items_stay(source: TensorType, target: TensorType) -> bool:
    """Whether two shapes of the same elements have the same items: as many numbers stand before their axis."""
    before, after = (math.prod(map(as_int, tensor.shape[:batch_axis(tensor)])) for tensor in (source, target))
    return BATCH in source.shape and BATCH in target.shape and before == after


def item_shape(tensor: TensorType) -> tuple[int, ...]:
    """The shape without the axis of the items."""
    axis = batch_axis(tensor)
    return tuple(as_int(extent) for i, extent in enumerate(tensor.shape) if i != axis)


def as_one_item(placement: Placement) -> Placement:
    """A tensor without batch seen as one item, its leading axis an axis like others."""
    return replace(placement, items=1, view=with_items(placement.view, as_int(placement.items)))


def with_items(view: View, items: int) -> View:
    """So many items seen as one, their axis leading."""
    return View(view.dtype, (items, *view.shape), (view.item, *view.strides), items * view.item)


def stored_dtype(tensor: TensorType) -> str:
    """numpy's name of the dtype in memory; bool and small integers as they are, what numpy lacks by its own name."""
    return tensor.quant.dtype if tensor.quant else str(np.dtype(tensor.dtype).name)


def reshaped(placement: Placement, shape: tuple[int, ...]) -> Placement | None:
    """The same elements in another shape: of an item if there is a batch, else of all; None if that is no view."""
    view = placement.view if placement.items == BATCH else as_one_item(placement).view
    strides = dense_view(view.dtype, shape).strides if placement.view.dense else reshaped_strides(view, shape)
    if strides is None:
        return None
    if placement.items == BATCH:
        return replace(placement, view=replace(view, shape=shape, strides=strides))
    return replace(placement, view=View(view.dtype, shape[1:], strides[1:], strides[0]), items=shape[0])


def reshaped_strides(view: View, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of the same elements in another shape; None if an axis would cross a gap, or the last be none."""
    runs: list[tuple[int, int]] = []        # (extent, stride) of axes that follow each other without a gap
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = (runs[-1][0] * extent, stride)
        elif extent != 1:
            runs.append((extent, stride))
    if runs and runs[-1][1] != view.size:
        return None
    strides: list[int] = []
    extent, stride = 1, view.size           # what is left of the run that is being cut, from its end
    for wanted in reversed(shape):
        if extent == 1 and wanted != 1 and runs:
            extent, stride = runs.pop()
        if extent % wanted:
            return None
        strides.append(stride)
        extent, stride = extent // wanted, stride * wanted
    return tuple(reversed(strides)) if extent == 1 and not runs else None


def strided(memory: Any, start: int, view: View, items: int) -> Any:
    """The tensor whose element 0 is at byte `start` of the memory, as a numpy array [items, *shape] over it."""
    return np.ndarray((items, *view.shape), memory_dtype(view.dtype), memory, start, (view.item, *view.strides))


def buffer_bytes(storage: Storage, max_batch: int) -> int:
    items = max_batch if storage.items == BATCH else as_int(storage.items)
    return items * storage.whole.item + SLACK


def tensor_view(name: str, placement: Placement, scalar: bool = False) -> TensorView:
    """The placement as a plan says it."""
    view = placement.view
    if placement.items == BATCH:
        return TensorView(name, view.dtype, view.shape, placement.buffer, placement.offset, view.strides, view.item)
    shape, strides = ((), ()) if scalar else ((as_int(placement.items), *view.shape), (view.item, *view.strides))
    return TensorView(name, view.dtype, shape, placement.buffer, placement.offset, strides, 0, batched=False)
