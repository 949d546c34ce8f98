"""Execution of loaded plans on one thread, and the memory that their tables point into.

loaded.py fills the tables. workers.py is the executor of several threads, which share the chunks that chunks.py makes.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from infer_server.engines.backends.device import Show, final_before
from infer_server.engines.backends.llvm.runtime.by_item import ItemTables
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.segments import Segment, cut_before
from infer_server.engines.backends.llvm.runtime.zero_copy import address_of
from infer_server.engines.ir.graph import Array
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.plan.arena import Layout, array_at, write_halo
from infer_server.engines.plan.plan import TensorView


class Arena:
    """Buffers of one context, and the operand table that points into them.

    With `inputs`, the buffers of the plan's inputs are those of that other arena: several arenas read the same inputs.
    With `items`, too, this arena is for these items alone, and with `memory` it uses that memory.
    """

    def __init__(self, program: LoadedPlan, layout: Layout, inputs: Arena | None = None, items: range | None = None,
                 memory: Array | None = None) -> None:
        self._program, self._layout, self._inputs = program, layout, inputs
        self._items = items if items is not None else range(program.plan.batch_slots)
        self._bytes = program.memory(layout.total) if memory is None else memory
        self._address: int = self._bytes.ctypes.data
        self._filled = 0        # batch slots whose halos are written
        self._borrowed = frozenset(i for i, buffer in enumerate(program.machine.buffers)
                                   if buffer.first < 0) if inputs else frozenset()
        bases = self._address + layout.vector
        for i in self._borrowed:
            owner = self._owner(i)
            bases[i] = owner._address + owner._layout.offsets[i]
        for view in program.machine.inputs if inputs else ():
            bases[view.buffer] += self._items.start * view.item_stride
        self._operands = program.operand_table(bases)
        self.operands: int = self._operands.ctypes.data     # address of the operand table
        self._words = self._operands.data                    # memoryview: faster for single writes
        self._redirected: list[tuple[int, int]] = []              # (redirected operand, its own address)

    @cached_property
    def items(self) -> ItemTables:
        """Return the tables for steps that run item by item."""
        program = self._program
        return ItemTables(program.steps, self._operands, program.item_strides, program.operand_offsets,
                          len(self._items), program.zero_copy)

    @property
    def bytes(self) -> int:
        return self._layout.total

    def _owner(self, buffer: int) -> Arena:
        return self._inputs if self._inputs is not None and buffer in self._borrowed else self

    def array(self, view: TensorView, batch: int) -> Array:
        """Return the tensor as a view of the buffer: [batch, *shape], or shape if it has no batch axis."""
        owner = self._owner(view.buffer)
        return array_at(owner._bytes, owner._layout.offsets[view.buffer], view, batch)

    def redirect(self, view: TensorView, array: Array, in_place: bool = False) -> bool:
        """Make an array replace the buffer of an input or output. Returns False if it cannot.

        in_place: of an input, and the output that overwrites it.
        """
        buffers = self._program.zero_copy
        operands, begin = (buffers.in_place if in_place else buffers.operands).get(view.buffer), address_of(array)
        if operands is None or begin is None:
            return False
        offsets = self._program.operand_offsets
        for operand in operands:
            self._redirected.append((operand, self._words[operand]))
            self._words[operand] = begin + int(offsets[operand])
        return True

    def restore(self) -> None:
        """Make every operand point into its own buffer again."""
        while self._redirected:
            operand, address = self._redirected.pop()
            self._words[operand] = address

    def prepare(self, batch: int) -> None:
        """Write the halos of the first `batch` slots, unless that has been done. Inputs are written after this."""
        if batch <= self._filled:
            return
        for fill in self._program.machine.fills:
            if fill.view.buffer not in self._borrowed:
                slots = 1 if fill.view.buffer in self._layout.one_item else batch
                write_halo(self.array(fill.view, slots), fill, self._filled)
        self._filled = batch


class SerialExecution:
    """Execution on one thread, in one arena whose buffers share memory; inputs: another arena to read inputs from."""

    def __init__(self, program: LoadedPlan, inputs: Arena | None = None) -> None:
        self._program = program
        self._arena = Arena(program, program.shared_layout, inputs)
        self._scattered = False         # True if items of inputs are redirected
        self._calls: dict[tuple[int, bool], tuple[Callable[[], None], ...]] = {}    # key: (batch, `_scattered`)

    def input(self, view: TensorView, batch: int) -> Array:
        self._arena.prepare(batch)
        return self._arena.array(view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return self._arena.array(view, batch)

    def run(self, batch: int) -> None:
        for call in self._calls.get((batch, self._scattered)) or self._prepared(batch, self._scattered):
            call()

    def ready(self, batch: int) -> Callable[[], None]:
        calls = self._prepared(batch)
        return calls[0] if len(calls) == 1 else partial(self.run, batch)

    def set_buffer(self, view: TensorView, array: Array) -> bool:
        return self._arena.redirect(view, array)

    def set_in_place_buffer(self, view: TensorView, array: Array) -> bool:
        return self._arena.redirect(view, array, in_place=True)

    def accepts(self, view: TensorView, array: Array | None = None) -> bool:
        return self._program.zero_copy.accepts(view, array)

    def set_item_buffer(self, view: TensorView, first: int, array: Array) -> bool:
        # Check before `items` is used: it copies the operand table, which must not hold redirected addresses then.
        begin = self._program.zero_copy.address(view, array)
        if begin is not None:
            self._arena.items.redirect(view, first, begin, array.nbytes)
            self._scattered = True
        return begin is not None

    def release_buffers(self) -> bool:
        self._arena.restore()
        if self._scattered:
            self._arena.items.restore()
            self._scattered = False
        return True

    def _prepared(self, batch: int, scattered: bool = False) -> tuple[Callable[[], None], ...]:
        """Write the halos, and return the segments as calls. scattered: items of inputs are redirected."""
        self._arena.prepare(batch)
        program = self._program
        segments = program.serial_segments if batch > 1 else program.segments
        if scattered:
            segments = program.scattered_segments
        calls = self._calls[batch, scattered] = tuple(call_of(program, self._arena, segment, batch)
                                                      for segment in segments)
        return calls

    def show(self, batch: int, show: Show) -> None:
        self._arena.prepare(batch)
        whole, end = final_before(self._program.machine), len(self._program.machine.steps)
        for part in (*cut_before(self._program.serial_segments, whole), Segment(end, end)):
            for view in whole.get(part.first, ()):
                show(view.name, self._arena.array(view, batch))
            run_segment(self._program, self._arena, part, batch)

    def profile(self, batch: int, repeats: int) -> list[float]:
        return time_steps(self._program, self._arena, self._program.serial_segments, batch, repeats)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last view."""


def call_of(program: LoadedPlan, arena: Arena, segment: Segment, batch: int) -> Callable[[], None]:
    """Return a segment as a call on this thread, with arguments that ctypes need not convert at each call.

    The conversions would take about as long as a small network.
    """
    if segment.fallback is not None:
        return segment.fallback.ready(lambda view: arena.array(view, batch), batch)
    if segment.by_item:
        steps = arena.items.steps(segment.first, segment.last).ctypes.data
        values = (steps, arena.operands, 0, batch * (segment.last - segment.first), 1)
    else:
        values = (program.steps_address, arena.operands, segment.first, segment.last, batch)
    return partial(program.run_steps, *map(ctypes.c_int64, values))


def run_segment(program: LoadedPlan, arena: Arena, segment: Segment, batch: int) -> None:
    """Run a segment on this thread."""
    call_of(program, arena, segment, batch)()


def time_steps(program: LoadedPlan, arena: Arena, segments: Sequence[Segment], batch: int, repeats: int,
               fallbacks: bool = True) -> list[float]:
    """Measure the CPU time of each step of the segments on this thread, in seconds.

    The steps run in order, each timed alone; the result is the least of `repeats`, less the cost of a call. Without
    `fallbacks`, fallback steps are skipped and take 0 s: the reference may reject the contents of an arena that holds
    no request.
    """
    def seconds(call: Callable[[], None]) -> float:
        start = thread_seconds()
        call()
        return thread_seconds() - start

    arena.prepare(batch)
    steps = [replace(segment, first=i, last=i + 1) for segment in segments for i in range(segment.first, segment.last)]
    calls = [call_of(program, arena, step, batch) for step in steps]
    best = [math.inf if fallbacks or step.fallback is None else 0.0 for step in steps]
    nothing = call_of(program, arena, Segment(0, 0), batch)
    cost = math.inf
    for _ in range(repeats):
        cost = min(cost, seconds(nothing))
        for i, call in enumerate(calls):
            if best[i]:
                best[i] = min(best[i], seconds(call))
    return [max(least - cost, 0.0) for least in best]


@cache
def libc() -> Any:
    """Return the C library of this process."""
    return ctypes.CDLL(None, use_errno=True)
