"""Buffers of a lowered graph: sizes, lifetimes and halos."""
from __future__ import annotations

from dataclasses import replace

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.symbolic import is_symbolic, plain
from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall
from infer_server.engines.lowering.calls.placement import Placement, Storage, buffer_bytes, tensor_view
from infer_server.engines.lowering.lower import Lowered
from infer_server.engines.lowering.problems.movement import HaloFill
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.plan.arena import peak_bytes, plan_memory
from infer_server.engines.plan.plan import Buffer, Fill

# Largest ratio of a context's memory to the peak of live buffers: room for constant halos, kept inputs and gaps.
SPARE = 1.75


def buffers_of(lowered: Lowered, max_batch: int) -> tuple[Buffer, ...]:
    """Return the buffers with sizes and lifetimes.

    Parameters
    ----------
    lowered : Lowered
        Lowered graph; steps are its calls.
    max_batch : int
        Largest batch.

    Returns
    -------
    tuple of Buffer
        In the order of Aliasing.buffers.
    """
    used: dict[int, list[int]] = {}
    for step, call in enumerate(lowered.calls):
        for placement in (*call.inputs, *call.outputs):
            used.setdefault(placement.buffer, []).append(step)
    written: dict[int, int] = {}
    for step, call in reversed(list(enumerate(lowered.calls))):
        written |= dict.fromkeys((placement.buffer for placement in call.outputs), step)
    end, placements, graph = len(lowered.calls), lowered.placements, lowered.graph
    kept = (name for name in graph.outputs if name not in graph.watched)
    inputs, outputs = ({placements[name].buffer for name in names} for names in (graph.inputs, kept))
    result = []
    for i, storage in enumerate(placements.buffers):
        # No step writes a tensor without elements, but one may read it.
        first = -1 if i in inputs else written.get(i, min(used.get(i, [end])))
        last = end if i in outputs else max([*used.get(i, []), first])
        size = buffer_bytes(storage, max(max_batch, 1)) if i in used or i in inputs or i in outputs else 0
        result.append(Buffer(storage.name, size, first, last))
    return tuple(result)


def fills_of(lowered: Lowered) -> tuple[Fill, ...]:
    """Return the halos that are constant for the lifetime of a context."""
    fills = []
    for i, storage in enumerate(lowered.placements.buffers):
        if storage.halo and i not in lowered.borders:
            cells = storage.halo.cells(len(storage.whole.shape))
            view = tensor_view(storage.name, Placement(i, 0, storage.whole, storage.items))
            fills.append(Fill(view, storage.pad, cells if view.batched else ((0, 0), *cells)))
    return tuple(fills)


def write_borders(lowered: Lowered, max_batch: int) -> Lowered:
    """Return the lowered graph with some halos rewritten in every run, enough to keep memory small.

    A constant halo needs exclusive memory. A halo that is written in each run costs a short step, but its buffer shares
    memory like any other. Constant halos of one geometry already share memory, so they are converted together, those
    first that free the most bytes per step. Symbolic sizes count with their example values; any choice is correct.
    """
    buffers, fills = _buffers_and_fills(lowered, max_batch)
    largest = peak_bytes(buffers)
    groups: dict[object, list[int]] = {}
    for fill in fills:
        i = fill.view.buffer
        if buffers[i].first >= 0:       # < 0: an input, which no step writes
            groups.setdefault(replace(fill, view=replace(fill.view, name="", buffer=0)), []).append(i)
    for group in sorted(groups.values(), key=lambda group: -buffers[group[0]].bytes / len(group)):
        if plan_memory(buffers, fills).total <= SPARE * largest:
            break
        lowered = _with_borders(lowered, group)
        buffers, fills = _buffers_and_fills(lowered, max_batch)
    return lowered


def _buffers_and_fills(lowered: Lowered, max_batch: int) -> tuple[tuple[Buffer, ...], tuple[Fill, ...]]:
    """Return buffers and halos, with example values for symbolic sizes."""
    buffers, fills = buffers_of(lowered, max_batch), fills_of(lowered)
    return plain((buffers, fills)) if is_symbolic(buffers) else (buffers, fills)


def _with_borders(lowered: Lowered, group: list[int]) -> Lowered:
    """Insert calls that write the borders of these buffers before their first writer."""
    calls: list[AnyCall] = []
    missing = set(group)
    for call in lowered.calls:
        for buffer in sorted(missing.intersection(placement.buffer for placement in call.outputs)):
            calls.append(border(lowered.placements.buffers[buffer], buffer))
            missing.remove(buffer)
        calls.append(call)
    return replace(lowered, calls=tuple(calls), borders=lowered.borders.union(group))


def border(storage: Storage, buffer: int) -> ProblemCall:
    """Return a call that writes the halo of a buffer."""
    whole = storage.whole
    *planes, (top, bottom), (left, right), _ = storage.halo.cells(len(whole.shape))
    *step, row, pixel, _ = whole.strides
    (front, back), plane = planes[0] if planes else (0, 0), step[0] if step else 0
    left, right = left * pixel, right * pixel
    rows, deep = whole.shape[-3] - top - bottom, tuple(whole.shape[0] - front - back for _ in planes)
    behind = front * plane + (top + rows) * row - right                               # after the first plane's last row
    cuts = ((0, (1,), (row,), front * plane + top * row + left),                        # (offset, runs, steps, bytes)
            (front * plane + (top + 1) * row - right, (*deep, rows - 1), (*step, row), right + left),
            (behind, tuple(n - 1 for n in deep) or (0,), (plane,), right + (bottom + top) * row + left),
            (behind + (sum(deep) - 1) * plane if deep else behind, (1,), (row,), right + bottom * row + back * plane))
    placements = [Placement(buffer, offset, View("uint8", (*runs, size), (*steps, 1), whole.item), storage.items)
                  for offset, runs, steps, size in cuts if min(runs) and size]
    value = int(storage.pad)        # 0 for floats, whose bytes are 0, too
    node = Node("Pad", (), (storage.name,), name=f"border of {storage.name}")
    return ProblemCall(node, HaloFill(tuple(placement.view for placement in placements), value), (), tuple(placements))
