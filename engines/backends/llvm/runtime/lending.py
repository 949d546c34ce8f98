"""Inputs that are read where their caller has them, and outputs that are written where he gets them: nothing is copied.

Steps find tensors by the operand table. While an array is lent, the words that point into the tensor's buffer point
into the array; so the buffer must be that tensor and nothing else.
"""
from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engines.ir.dtypes import memory_dtype
from engines.ir.graph import Array
from engines.plan.arena import PAGE
from engines.plan.plan import SLACK, MachinePart, Plan, TensorView

Words = NDArray[np.int64]
Places = tuple[tuple[int, int], ...]        # (an operand's number, how many bytes from the buffer's beginning it lies)


class Lendable:
    """The buffers of a plan that arrays may stand in for."""

    def __init__(self, plan: Plan, buffers: Words, offsets: Words) -> None:
        """buffers, offsets: of each operand of the operand table."""
        self._plan, self._buffers, self._offsets = plan, buffers, offsets

    @cached_property
    def places(self) -> dict[int, Places]:
        """Of each such buffer, the operands that lie in it."""
        machine, found = self._plan.machine, {}
        if machine.item_major or any(step.fallback for step in machine.steps):
            return {}           # these find tensors by other tables, too
        views = (*machine.inputs, *machine.outputs)
        count = Counter(view.buffer for view in views)
        for view in views:
            if count[view.buffer] == 1 and _is_all(view, machine, self._plan.batch_slots):
                operands = np.flatnonzero(self._buffers == view.buffer)
                found[view.buffer] = tuple(zip(operands.tolist(), self._offsets[operands].tolist(), strict=True))
        return found


def _is_all(view: TensorView, machine: MachinePart, slots: int) -> bool:
    """Whether a buffer is one tensor, item by item, in one piece."""
    stride = memory_dtype(view.dtype).itemsize
    for extent, given in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent != 1 and given != stride:
            return False
        stride *= extent
    items = slots if view.batched else 1
    behind = machine.buffers[view.buffer].bytes - items * stride
    return (view.offset, view.batch_axis) == (0, 0) and (items == 1 or view.item_stride == stride) \
        and 0 <= behind <= SLACK and all(fill.view.buffer != view.buffer for fill in machine.fills)


def address_of(array: Array) -> int | None:
    """Where an array begins. None: kernels cannot work in it, for its elements are not in one piece, or SLACK behind
    them, which is read too, may not be there: it is if it is on the page of the last one."""
    if not array.flags.c_contiguous or not array.flags.aligned:
        return None
    begin: int = array.__array_interface__["data"][0]
    end = begin + array.nbytes
    return begin if (end - 1) // PAGE == (end + SLACK - 1) // PAGE else None
