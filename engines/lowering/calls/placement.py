"""Placement of a tensor: its buffer, offset and strides."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import BATCH, Dim, TensorType
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.problems.view import Halo, View, dense_view
from infer_server.engines.plan.plan import SLACK, TensorView

NO_BUFFER = -1
ITEMS = -1          # pseudo-axis of an item: the leading axis of a tensor without a batch


@dataclass(frozen=True)
class Storage:
    """Buffer. `whole` is the view of one item, halo included; `pad` is the value of the halo."""
    name: str                   # name of the tensor that the buffer was created for
    whole: View
    items: Dim                  # BATCH, or a number
    halo: Halo = Halo()
    pad: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Tensor in a buffer. `offset` is the byte offset of element 0 of item 0."""
    buffer: int                 # NO_BUFFER: the tensor is `constant`
    offset: int
    view: View
    items: Dim
    constant: str = ""          # name of the constant

    def part(self, axis: int, start: int, stop: int, step: int = 1) -> Placement:
        """Return the view of indices start, start + step, ... below stop along an axis of the item, or ITEMS."""
        if axis == ITEMS:
            offset, item = self.offset + start * self.view.item, self.view.item * step
            return replace(self, offset=offset, items=-(-(stop - start) // step), view=replace(self.view, item=item))
        shape, strides = list(self.view.shape), list(self.view.strides)
        shape[axis] = -(-(stop - start) // step)
        offset = self.offset + start * strides[axis]
        strides[axis] *= step
        return replace(self, offset=offset, view=replace(self.view, shape=tuple(shape), strides=tuple(strides)))

    def with_halo(self, halo: Halo) -> Placement:
        """Return the view that includes the halo."""
        if not halo:
            return self
        return replace(self.moved(*halo.corner(len(self.view.shape))),
                       view=replace(self.view, shape=halo.around(self.view.shape)))

    def moved(self, *steps: int) -> Placement:
        """Return the view with its origin moved by `steps` indices along each axis."""
        offset = sum(n * stride for n, stride in zip(steps, self.view.strides, strict=True))
        return replace(self, offset=self.offset + offset)


def items_of(tensor: TensorType) -> Dim:
    """Return BATCH if the tensor has that axis, else the leading extent, or 1 for a scalar."""
    return BATCH if BATCH in tensor.shape else tensor.shape[0] if tensor.shape else 1


def has_batch(tensor: TensorType) -> bool:
    """Return True if an extent depends on the batch."""
    return not all(isinstance(extent, int) for extent in tensor.shape)


def batch_axis(tensor: TensorType) -> int:
    """Return the position of the batch axis. In memory the batch always leads."""
    return tensor.shape.index(BATCH) if BATCH in tensor.shape else 0


def axis_of_item(tensor: TensorType, axis: int) -> int:
    """Convert an axis of the tensor to one of its item; the batch, or else the leading axis, is ITEMS."""
    axis, batch = axis % len(tensor.shape), batch_axis(tensor)
    return ITEMS if axis == batch else axis - (axis > batch)


def items_stay(source: TensorType, target: TensorType) -> bool:
    """Return True if a reshape keeps the items, that is, the extents before the batch axis have the same product."""
    before, after = (math.prod(map(as_int, tensor.shape[:batch_axis(tensor)])) for tensor in (source, target))
    return BATCH in source.shape and BATCH in target.shape and before == after


def item_shape(tensor: TensorType) -> tuple[int, ...]:
    """Return the shape without the batch axis, or without the leading axis if there is no batch."""
    axis = batch_axis(tensor)
    return tuple(as_int(extent) for i, extent in enumerate(tensor.shape) if i != axis)


def as_one_item(placement: Placement) -> Placement:
    """View a tensor without a batch as one item that includes the leading axis."""
    return replace(placement, items=1, view=with_items(placement.view, as_int(placement.items)))


def with_items(view: View, items: int) -> View:
    """View `items` items as one, with a leading axis."""
    return View(view.dtype, (items, *view.shape), (view.item, *view.strides), items * view.item)


def stored_dtype(tensor: TensorType) -> str:
    """Return the name of the dtype in memory: NumPy's, or ours where NumPy has none."""
    return tensor.quant.dtype if tensor.quant else str(np.dtype(tensor.dtype).name)


def reshaped(placement: Placement, shape: tuple[int, ...]) -> Placement | None:
    """Return the placement reshaped, per item if there is a batch, or None if that is not a view."""
    view = placement.view if placement.items == BATCH else as_one_item(placement).view
    strides = dense_view(view.dtype, shape).strides if placement.view.dense else reshaped_strides(view, shape)
    if strides is None:
        return None
    if placement.items == BATCH:
        return replace(placement, view=replace(view, shape=shape, strides=strides))
    return replace(placement, view=View(view.dtype, shape[1:], strides[1:], strides[0]), items=shape[0])


def reshaped_strides(view: View, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a reshaped view, or None if a new axis crosses a gap or the last one is not contiguous."""
    runs: list[tuple[int, int]] = []        # (extent, stride) of merged contiguous axes
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = (runs[-1][0] * extent, stride)
        elif extent != 1:
            runs.append((extent, stride))
    if runs and runs[-1][1] != view.size:
        return None
    strides: list[int] = []
    extent, stride = 1, view.size           # the rest of the run that is being split, from its end
    for size in reversed(shape):
        if extent == 1 and size != 1 and runs:
            extent, stride = runs.pop()
        if extent % size:
            return None
        strides.append(stride)
        extent, stride = extent // size, stride * size
    return tuple(reversed(strides)) if extent == 1 and not runs else None


def strided(memory: Any, start: int, view: View, items: int) -> Any:
    """Return a NumPy view [items, *shape] of memory, with element 0 at byte `start`."""
    return np.ndarray((items, *view.shape), memory_dtype(view.dtype), memory, start, (view.item, *view.strides))


def buffer_bytes(storage: Storage, max_batch: int) -> int:
    """Return the size of a buffer in bytes, with SLACK."""
    items = max_batch if storage.items == BATCH else as_int(storage.items)
    return items * storage.whole.item + SLACK


def tensor_view(name: str, placement: Placement, scalar: bool = False) -> TensorView:
    """Convert a placement to the view that plans store."""
    view = placement.view
    if placement.items == BATCH:
        return TensorView(name, view.dtype, view.shape, placement.buffer, placement.offset, view.strides, view.item)
    shape, strides = ((), ()) if scalar else ((as_int(placement.items), *view.shape), (view.item, *view.strides))
    return TensorView(name, view.dtype, shape, placement.buffer, placement.offset, strides, 0, batched=False)
