"""Zero-copy inputs and outputs: kernels read and write the caller's arrays.

Steps find tensors by the operand table. For a zero-copy array, the words that point into the tensor's buffer are made
to point into the array; so the buffer must hold that tensor and nothing else. The items of an input may be scattered if
the steps that read it run for one item after the other (by_item.py).
"""
from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.symbolic import identical
from infer_server.engines.plan.arena import PAGE, ChangingArray
from infer_server.engines.plan.plan import SLACK, MachinePart, Operand, Plan, Step, TensorView, runs_by_item

Words = NDArray[np.int64]
OperandNumbers = tuple[int, ...]
# Families of problems whose kernels use the values that they read for arithmetic only. In other families values decide
# on addresses or loop counts (an index, a count, an order); these check a value, and then read it again.
VOLATILE_SAFE = frozenset({
    "contraction", "blocked_product", "rounded_product", "depthwise", "pointwise", "pool", "global_pool", "product",
    "integer_product", "permute", "take", "resize", "softmax", "norm", "scaled_norm", "scaled_rows",
    "lrn", "reduce", "halo_fill"})


class ZeroCopyBuffers:
    """Buffers of a plan that zero-copy arrays may replace."""

    def __init__(self, plan: Plan, buffers: Words, symbolic: bool = False) -> None:
        """Prepare the analysis of a plan.

        Parameters
        ----------
        buffers : buffer number of each operand of the operand table.
        symbolic : the plan has symbolic extents; what is found holds for all of them.
        """
        self._plan, self._buffers, self._symbolic = plan, buffers, symbolic

    @cached_property
    def operands(self) -> dict[int, OperandNumbers]:
        """Return the operands in each buffer that an array may replace."""
        machine = self._plan.machine
        if machine.item_major or any(step.fallback for step in machine.steps):
            return {}           # item-major runs and fallbacks find tensors by other tables too
        return {view.buffer: self._operands_of(view.buffer) for view in (*machine.inputs, *machine.outputs)
                if self._is_alone(view) and _is_all(view, machine, self._plan.batch_slots)}

    @cached_property
    def in_place(self) -> dict[int, OperandNumbers]:
        """Return the operands in each buffer of an input with an output that overwrites it, or a part of it."""
        machine = self._plan.machine
        if machine.item_major or any(step.fallback for step in machine.steps):
            return {}
        written = {touched.buffer for step in machine.steps for touched in step.writes}
        return {view.buffer: self._operands_of(view.buffer) for view in machine.inputs
                if view.buffer in written and _is_all(view, machine, self._plan.batch_slots)}

    @cached_property
    def items(self) -> dict[int, OperandNumbers]:
        """Return the operands in each input's buffer whose items arrays may replace; none for symbolic extents."""
        machine = self._plan.machine
        return {} if self._symbolic else {view.buffer: self._operands_of(view.buffer) for view in machine.inputs
                if view.batched and self._is_alone(view) and _is_all(view, machine, self._plan.batch_slots)
                and view.end(1) == view.item_stride
                and all(_reads_by_item(step, view) for step in machine.steps)}

    @cached_property
    def volatile_safe(self) -> frozenset[int]:
        """Return the buffers of `items` that another process may write during a run without harm to this one.

        The result of the run is then undefined. All steps that read such a buffer are of families in VOLATILE_SAFE.
        """
        steps = self._plan.machine.steps
        return frozenset(buffer for buffer in self.items if all(
            step.tactic.partition(":")[0] in VOLATILE_SAFE
            for step in steps if any(operand.buffer == buffer for operand in step.operands)))

    def accepts(self, view: TensorView, array: Array | None) -> bool:
        """Return True if the items of an input may be replaced, by this array if it is not None."""
        return view.buffer in self.items and (array is None or self.address(view, array) is not None)

    def address(self, view: TensorView, array: Array) -> int | None:
        """Return the address of an array that may replace items of an input, or None if it may not."""
        buffers = self.volatile_safe if isinstance(array, ChangingArray) else self.items
        return address_of(array) if view.buffer in buffers else None

    @cached_property
    def readers(self) -> frozenset[int]:
        """Return the steps that read the buffers of `items`."""
        return frozenset(i for i, step in enumerate(self._plan.machine.steps)
                         if any(operand.buffer in self.items for operand in step.operands))

    def _is_alone(self, view: TensorView) -> bool:
        """Return True if no other input or output is in its buffer."""
        machine = self._plan.machine
        return sum(view.buffer == other.buffer for other in (*machine.inputs, *machine.outputs)) == 1

    def _operands_of(self, buffer: int) -> OperandNumbers:
        return tuple(np.flatnonzero(self._buffers == buffer).tolist())


def _is_all(view: TensorView, machine: MachinePart, slots: int) -> bool:
    """Return True if a buffer holds one tensor only, item by item, contiguously."""
    stride = memory_dtype(view.dtype).itemsize
    for extent, given in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if not identical(extent, 1) and not identical(given, stride):
            return False
        stride *= extent
    items = slots if view.batched else 1
    behind = machine.buffers[view.buffer].bytes - items * stride
    is_whole = identical(view.offset, 0) and view.batch_axis == 0 and type(behind) is int and 0 <= behind <= SLACK
    return is_whole and (items == 1 or identical(view.item_stride, stride)) and all(
        fill.view.buffer != view.buffer for fill in machine.fills)


def _reads_by_item(step: Step, view: TensorView) -> bool:
    """Return True if a step does not read an input, or can read each of its items from a different place.

    It is False for steps with many weights, which would be read again for each item at a higher cost than copying the
    item.
    """
    if step.fallback and any(not isinstance(tensor, str) and tensor.buffer == view.buffer
                             for tensor in step.fallback.inputs):
        return False
    if Operand(view.buffer) not in (replace(operand, offset=0) for operand in step.operands):
        return True
    touched = [touched for touched in step.reads if touched.buffer == view.buffer]
    return runs_by_item(step) and 2 * step.constant_bytes <= view.item_stride and all(
        one.item_stride == view.item_stride and one.begin >= 0
        and one.end + (one.period - 1) // one.rows * one.stride <= view.item_stride + SLACK for one in touched)


def address_of(array: Array) -> int | None:
    """Return the address of an array that kernels can use in place, or None.

    None means that the array is not contiguous, or that the SLACK bytes past its end, which kernels may read, may be
    unmapped. They are mapped if they are on the page of the last byte, or if the array guarantees it. No alignment is
    needed.
    """
    if not array.flags.c_contiguous:
        return None
    if isinstance(array, ChangingArray) and array.address:
        return array.address
    begin: int = array.__array_interface__["data"][0]
    end = begin + array.nbytes
    is_there = isinstance(array, ChangingArray) or (end - 1) // PAGE == (end + SLACK - 1) // PAGE
    return begin if is_there else None
