"""Verification of a plan's consistency, run when a plan is read or loaded.

Checks the invariants that Python and the executor rely on: every address is inside its buffer, every buffer is alive
where it is used, dtypes, extents and strides keep every index inside its memory, and every grid is valid. The accesses
of a kernel itself cannot be checked: machine code is trusted, as a program is.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.ir.dtypes import BITS, memory_dtype
from infer_server.engines.ir.graph import QParams
from infer_server.engines.plan.plan import (
    EXPANDED,
    SHARED,
    SHARED_EXPANDED,
    ExpandedConstant,
    Fallback,
    Fill,
    Footprint,
    IoTensor,
    ItemMajorRun,
    Operand,
    Plan,
    Step,
    TensorView,
    runs_by_item,
)

ADDRESSABLE = 1 << 46       # maximum bytes of a process: sums of offsets below it cannot overflow an i64
_NUMBERS = "biufc"          # NumPy's kinds of dtypes with plain numeric elements


class _Broken(Exception):
    """Inconsistency of a plan; the message describes it."""


def verify(plan: Plan) -> Plan:
    """Check that a plan is consistent and return it. Raises PlanCorruptError, naming the faulty part."""
    try:
        _check_plan(plan)
        for index, buffer in enumerate(plan.machine.buffers):
            _check(0 <= buffer.bytes <= ADDRESSABLE, f"buffer {index} '{buffer.name}' has {buffer.bytes} bytes")
        for kind, tensors, views in (("inputs", plan.inputs, plan.machine.inputs),
                                     ("outputs", plan.outputs, plan.machine.outputs)):
            if plan.program is None:
                _check_io(plan, kind, tensors, views)
        for fill in plan.machine.fills:
            _check_fill(plan, fill)
        for index, step in enumerate(plan.machine.steps):
            _check_step(plan, index, step, f"step {index} '{step.name}'")
        for before, run in zip((ItemMajorRun(0, 0), *plan.machine.item_major), plan.machine.item_major, strict=False):
            _check_item_major_run(plan, run, before.last)
    except _Broken as broken:
        raise PlanCorruptError(f"{plan.name}: {broken}; build the plan again, and if that does not help, report it: it "
                               "is a fault of the compiler") from None
    return plan


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise _Broken(what)


def _check_plan(plan: Plan) -> None:
    features = plan.machine.cpu.get("features", [])
    _check(isinstance(features, list | tuple) and all(isinstance(feature, str) for feature in features),
           f"cpu features {features!r}")
    architecture = plan.machine.cpu.get("architecture", "")
    _check(isinstance(architecture, str), f"architecture {architecture!r}")
    _check(0 <= plan.max_batch <= ADDRESSABLE, f"batches of up to {plan.max_batch}")
    threads = plan.metadata.get("threads", 1)
    _check(isinstance(threads, int) and threads >= 1, f"built for {threads!r} threads")
    for item in plan.machine.expanded:
        _check_expanded(plan, item)
    _check(len(plan.machine.shared) in (0, 2), f"constants shared with another plan: {list(plan.machine.shared)}")
    _check(bool(plan.machine.shared) or not any(operand.buffer in (SHARED, SHARED_EXPANDED) for step in
                                                plan.machine.steps for operand in step.operands),
           "constants shared with no other plan")
    _check(sum(max(buffer.bytes, 0) for buffer in plan.machine.buffers) + plan.machine.expanded_bytes <= ADDRESSABLE,
           "buffers of more bytes than a process can address")


def _check_expanded(plan: Plan, item: ExpandedConstant) -> None:
    size = len(plan.machine.constants)
    _check(0 <= item.source <= size and item.offset >= 0 and item.bytes >= 0
           and item.offset + item.bytes <= ADDRESSABLE,
           f"the constant of '{item.name}' is made of byte {item.source} of {size}, as {item.bytes} bytes at "
           f"{item.offset}")
    _check(0 <= item.rows <= ADDRESSABLE and 0 <= item.columns <= ADDRESSABLE,
           f"the constant of '{item.name}' has {item.rows} rows and {item.columns} columns")


# ---- tensors
def _check_io(plan: Plan, kind: str, tensors: Sequence[IoTensor], views: Sequence[TensorView]) -> None:
    names = [tensor.name for tensor in tensors]
    _check(len({*names}) == len(names), f"two {kind} of one name among {names}")
    _check(len(tensors) == len(views), f"{len(tensors)} {kind}, of which {len(views)} lie somewhere")
    for tensor, view in zip(tensors, views, strict=True):
        _check_view(plan, view, kind)
        own = list(tensor.shape)
        if view.batched:
            _check(bool(plan.max_batch) and view.batch_axis < len(own) and isinstance(own.pop(view.batch_axis), str),
                   f"{kind}: '{tensor.name}' {list(tensor.shape)} has no batch on axis {view.batch_axis}")
        _check(tuple(own) == view.shape, f"{kind}: '{tensor.name}' {list(tensor.shape)} lies as {list(view.shape)}")
        _check(tensor.dtype == view.dtype, f"{kind}: '{tensor.name}' is {tensor.dtype}, but stored as {view.dtype}")


def _check_view(plan: Plan, view: TensorView, where: str) -> None:
    where = f"{where}: '{view.name}'"
    count = len(plan.machine.buffers)
    _check(0 <= view.buffer < count, f"{where} lies in buffer {view.buffer}, of {count}")
    _check(element_bytes(view.dtype) > 0, f"{where} has dtype '{view.dtype}'")
    _check(len(view.shape) == len(view.strides) and len(view.shape) < 32 and min((0, *view.shape, *view.strides)) == 0,
           f"{where} has extents {list(view.shape)} and strides {list(view.strides)}")
    _check(math.prod(map(float, view.shape)) <= ADDRESSABLE, f"{where} has extents {list(view.shape)}")
    _check(0 <= view.batch_axis <= (len(view.shape) if view.batched else 0), f"{where} has its batch on axis "
           f"{view.batch_axis}")
    _check(view.item_stride >= (1 if view.batched and 0 not in view.shape else 0),
           f"{where} has items {view.item_stride} bytes apart")
    buffer, end = plan.machine.buffers[view.buffer], view.end(plan.batch_slots)
    _check(view.offset >= 0 and end <= buffer.bytes,
           f"{where} ends at byte {end} of buffer '{buffer.name}', which has {buffer.bytes}")
    if view.quant is not None:
        _check(view.quant.dtype == view.dtype, f"{where} is {view.dtype}, but quantised to {view.quant.dtype}")
        _check_quant(view.quant, len(view.shape) + view.batched, where)


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a dtype; 0 if tensors cannot have that dtype."""
    if dtype in BITS:
        return memory_dtype(dtype).itemsize
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return 0
    # Only canonical names: np.dtype also accepts "4,i8" and "<i4".
    return found.itemsize if found.name == dtype and found.kind in _NUMBERS else 0


def _check_quant(quant: QParams, axes: int, where: str) -> None:
    _check(quant.dtype in ("int8", "uint8") and all(0 < scale < math.inf for scale in quant.scale),
           f"{where} is quantised as {quant.dtype}, with scales {list(quant.scale)[:4]}")
    low, high = (-128, 127) if quant.dtype == "int8" else (0, 255)
    _check(all(low <= zero <= high for zero in quant.zero_point), f"{where} has zero points {quant.zero_point[:4]}")
    _check(len(quant.scale) == len(quant.zero_point) >= 1 and (len(quant.scale) == 1 if quant.axis is None
                                                               else 0 <= quant.axis < max(axes, 1)),
           f"{where} has {len(quant.scale)} scales, {len(quant.zero_point)} zero points and axis {quant.axis}")


def _check_fill(plan: Plan, fill: Fill) -> None:
    view = fill.view
    _check_view(plan, view, "halos")
    _check(len(fill.halo) == len(view.shape) and all(cells >= 0 for pair in fill.halo for cells in pair),
           f"halos: '{view.name}' {list(view.shape)} has cells {fill.halo}")
    if view.dtype not in BITS and np.dtype(view.dtype).kind in "iu":
        limits = np.iinfo(view.dtype)
        _check(math.isfinite(fill.value) and limits.min <= fill.value <= limits.max,
               f"halos: '{view.name}' of {view.dtype} is filled with {fill.value}")


# ---- steps
def _check_step(plan: Plan, index: int, step: Step, where: str) -> None:
    _check(all(0 <= d < index for d in step.depends), f"{where} depends on steps {list(step.depends)}")
    _check(bool(step.symbol) == (step.fallback is None), f"{where} has neither a kernel nor a fallback, or both")
    _check(0 <= step.rows_per_item <= ADDRESSABLE and 0 <= step.rows <= ADDRESSABLE and 0 <= step.columns <= ADDRESSABLE
           and step.row_step >= 1 and step.column_step >= 1,
           f"{where} has a grid of {step.rows_per_item} or {step.rows} rows by {step.row_step}, and {step.columns} "
           f"columns by {step.column_step}")
    if step.launch is not None:
        _check(1 <= step.launch.threads <= 1024 and 0 <= step.launch.shared_bytes <= ADDRESSABLE,
               f"{where} has blocks of {step.launch.threads} threads and {step.launch.shared_bytes} bytes")
    _check(0 <= step.further_item <= 1, f"{where} takes {step.further_item} of its first item's time for another one")
    for operand in step.operands:
        _check_operand(plan, index, operand, where)
    for footprint in (*step.reads, *step.writes):
        _check_footprint(plan, index, footprint, where)
    if step.fallback is not None:
        _check_fallback(plan, index, step.fallback, where)


def _check_operand(plan: Plan, index: int, operand: Operand, where: str) -> None:
    if operand.buffer is None:
        size = len(plan.machine.constants)
    elif operand.buffer == EXPANDED:
        size = plan.machine.expanded_bytes
    elif operand.buffer in (SHARED, SHARED_EXPANDED):
        size = plan.machine.shared[operand.buffer == SHARED_EXPANDED]
    else:
        _check_life(plan, index, operand.buffer, where)
        size = plan.machine.buffers[operand.buffer].bytes
    _check(0 <= operand.offset <= size, f"{where} has an operand at byte {operand.offset} of {size}")


def _check_footprint(plan: Plan, index: int, touched: Footprint, where: str) -> None:
    _check_life(plan, index, touched.buffer, where)
    _check(min(touched.stride, touched.item_stride) >= 0 and min(touched.rows, touched.period) >= 1
           and max(abs(touched.begin), abs(touched.end), touched.stride, touched.item_stride) <= ADDRESSABLE,
           f"{where} touches bytes {touched.begin} to {touched.end} of buffer {touched.buffer}, then {touched.stride} "
           f"further every {touched.rows} rows, and {touched.item_stride} every {touched.period}")


def _check_life(plan: Plan, index: int, number: int, where: str) -> None:
    _check(0 <= number < len(plan.machine.buffers), f"{where} uses buffer {number}, of {len(plan.machine.buffers)}")
    buffer = plan.machine.buffers[number]
    _check(buffer.first <= index <= buffer.last,
           f"{where} uses buffer '{buffer.name}', which is alive in steps {buffer.first} to {buffer.last}")


def _check_fallback(plan: Plan, index: int, fallback: Fallback, where: str) -> None:
    _check(len(fallback.constant_quant) in (0, len(fallback.inputs)),
           f"{where} has {len(fallback.inputs)} inputs, and says how {len(fallback.constant_quant)} are stored")
    _check(bool(fallback.outputs), f"{where} has no output")
    for view in (*fallback.inputs, *fallback.outputs):
        if isinstance(view, TensorView):
            _check_view(plan, view, where)
            _check_life(plan, index, view.buffer, where)
        else:
            _check(not view or view in plan.weights, f"{where} reads '{view}', which is none of the constants")


def _check_item_major_run(plan: Plan, run: ItemMajorRun, behind: int) -> None:
    _check(behind <= run.first < run.last <= len(plan.machine.steps),
           f"steps {run.first} to {run.last - 1} are to run item by item")
    for index in range(run.first, run.last):
        step = plan.machine.steps[index]
        where = f"step {index} '{step.name}'"
        _check(bool(step.symbol) and runs_by_item(step), f"{where} cannot run item by item")
        for buffer in _buffers(step.operands):
            if not run.keeps(plan.machine.buffers[buffer]):
                _check_life(plan, run.first, buffer, where)
                _check_life(plan, run.last - 1, buffer, where)


def _buffers(operands: Iterable[Operand]) -> set[int]:
    return {operand.buffer for operand in operands if operand.buffer is not None and not operand.constant}
