"""Runs a plan's steps: the tables that emitted code reads, the memory they point into, and the executor of one thread.

elf.py loads the code, expansion.py the constants that are computed; abi.py names the words of the tables; workers.py is
the executor of several threads, which share the chunks that chunks.py cuts.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.device import Show, final_before
from engines.backends.llvm.runtime.abi import STEP_WORDS, WORD, StepRow
from engines.backends.llvm.runtime.by_item import ItemTables
from engines.backends.llvm.runtime.elf import LoadedCode
from engines.backends.llvm.runtime.expansion import expand
from engines.backends.llvm.runtime.lending import Lendable, address_of
from engines.backends.llvm.runtime.segments import Segment, cut_at_item_major_runs, cut_before, segments_of
from engines.errors import PlanCorruptError, PlanTargetError
from engines.ir.graph import Array
from engines.machine.clock import thread_seconds
from engines.plan.arena import CACHE_LINE, Layout, Memory, array_at, plan_memory, write_halo
from engines.plan.plan import (
    EXPANDED,
    SHARED,
    SHARED_EXPANDED,
    ExpandedConstant,
    Plan,
    TensorView,
    item_strides,
)
from engines.plan.verification import verify

Words = NDArray[np.int64]
EmittedFunction = Callable[..., None]


class LoadedPlan:
    """A plan made ready to run: code loaded, tables filled. Read-only after that, and shared by every context."""

    def __init__(self, plan: Plan, threads: int = 1, beside: LoadedPlan | None = None) -> None:
        """threads: that make the constants which the plan's file does not have. beside: the plan that has those which
        both share. Raises PlanCorruptError, PlanTargetError."""
        self.plan, self.machine = verify(plan), plan.machine
        self._code = LoadedCode(self.machine.code)
        self._constants, self._constants_address = _aligned(self.machine.constants)
        self._expanded = expand(self.machine, self.kernel, self._constants_address, threads)
        self._beside = _checked(plan, beside) if self.machine.shared else None
        self.run_steps = self.function("run_steps", 5)
        self.steps = self._step_table()
        self.steps_address = self.steps.ctypes.data
        self.segments = segments_of(plan)
        self.serial_segments = tuple(part for segment in self.segments
                                     for part in cut_at_item_major_runs(segment, self.machine.item_major))
        operands = [operand for step in self.machine.steps for operand in step.operands]
        # The constants count as four buffers more, after the others.
        more = {kind: len(self.machine.buffers) + i for i, kind in enumerate((None, EXPANDED, SHARED, SHARED_EXPANDED))}
        buffers = [more.get(o.buffer, o.buffer) for o in operands]
        self._operand_buffers = np.array(buffers, np.int64)
        self._operand_offsets = np.array([o.offset for o in operands], np.int64)
        self.lendable = Lendable(plan, self._operand_buffers, self._operand_offsets)

    def function(self, name: str, parameters: int, user: str = "the executor") -> EmittedFunction:
        """An emitted function that takes i64s or addresses; a call releases the GIL."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)
        return prototype(self._address(name, user))

    @property
    def constant_addresses(self) -> tuple[int, int]:
        """Of the constants, and of those computed from them."""
        return self._constants_address, self._expanded.address

    def kernel(self, item: ExpandedConstant) -> EmittedFunction:
        """What makes a derived constant."""
        return self.function(item.symbol, 5, f"a constant of '{item.name}'")

    def _address(self, symbol: str, user: str) -> int:
        try:
            return self._code.addresses[symbol]
        except KeyError:
            raise PlanCorruptError(f"{self.plan.name}: {user} needs '{symbol}', which the plan's code does not define; "
                                   "build the plan again") from None

    def _step_table(self) -> Words:
        table = words(len(self.machine.steps), STEP_WORDS)
        operands = 0
        for row, step in zip(table, self.machine.steps, strict=True):
            if step.symbol:
                row[StepRow.FUNCTION] = self._address(step.symbol, f"step '{step.name}'")
            row[StepRow.OPERANDS] = operands * WORD
            row[StepRow.ROWS_PER_ITEM], row[StepRow.ROWS] = step.rows_per_item, 0 if step.rows_per_item else step.rows
            row[StepRow.COLUMNS] = step.columns
            operands += len(step.operands)
        return table

    @cached_property
    def one_item_bytes(self) -> dict[int, int]:
        """Buffers that hold one item, for only one item-major run uses them -> bytes that an item of theirs takes."""
        return {footprint.buffer: footprint.item_stride for run in self.machine.item_major
                for step in self.machine.steps[run.first:run.last] for footprint in step.writes
                if run.keeps(self.machine.buffers[footprint.buffer])}

    @cached_property
    def item_strides(self) -> Words:
        """Bytes from an item to the next, of each operand of the steps that may run item by item; 0 for those of
        others."""
        inside = {i for run in self.machine.item_major for i in range(run.first, run.last)} | self.lendable.readers
        strides = [stride if operand.buffer not in self.one_item_bytes else 0
                   for i, step in enumerate(self.machine.steps)
                   for operand, stride in zip(step.operands, item_strides(step) if i in inside else
                                              [0] * len(step.operands), strict=True)]
        return np.array(strides, np.int64)

    @cached_property
    def apart_segments(self) -> tuple[Segment, ...]:
        """The serial segments for inputs whose items lie apart: what reads these runs item by item, too."""
        readers = self.lendable.readers
        cuts = {step + behind for step in readers for behind in (0, 1)}
        return tuple(part for segment in self.serial_segments for part in (
            [segment] if segment.by_item else (replace(part, by_item=part.first in readers)
                                               for part in cut_before([segment], cuts))))

    @cached_property
    def shared_layout(self) -> Layout:
        """Of a context of one thread: buffers share memory; those that only one item-major run uses hold one item."""
        others = self.plan.batch_slots - 1
        buffers = [replace(buffer, bytes=buffer.bytes - others * self.one_item_bytes.get(i, 0))
                   for i, buffer in enumerate(self.machine.buffers)]
        return replace(plan_memory(buffers, self.machine.fills), one_item=frozenset(self.one_item_bytes))

    @cached_property
    def separate_layout(self) -> Layout:
        """Of a context of several threads: every buffer has memory of its own."""
        return plan_memory(self.machine.buffers, self.machine.fills, reuse=False)

    def operand_table(self, bases: Sequence[int]) -> Words:
        """The addresses of all operands of all steps, given that of each buffer."""
        shared = self._beside.constant_addresses if self._beside else (0, 0)
        every: Words = np.array([*bases, *self.constant_addresses, *shared], np.int64)
        return every[self._operand_buffers] + self._operand_offsets


def _checked(plan: Plan, beside: LoadedPlan | None) -> LoadedPlan:
    """The plan whose constants are shared, if it is the one that was meant."""
    if beside is None:
        raise PlanTargetError(f"{plan.name}: a specialisation, which runs beside the plan of its model; load that")
    machine = beside.machine
    if (len(machine.constants), machine.expanded_bytes) != plan.machine.shared:
        raise PlanCorruptError(f"{plan.name}: a specialisation of another plan than the one it is loaded beside; build "
                               "the plan again")
    return beside


def words(*shape: int) -> Words:
    """A zeroed table of i64 that begins on a cache line, in memory that nothing moves."""
    return np.ndarray(shape, np.int64, Memory(int(np.prod(shape)) * WORD).bytes)


def _aligned(constants: bytes | memoryview) -> tuple[Array, int]:
    """The constants and their address. Those of a plan that was read from a file lie on a page; others are copied."""
    array: Array = np.ndarray((len(constants),), np.uint8, constants)
    if array.ctypes.data % CACHE_LINE:
        copy = Memory(len(array)).bytes
        copy[:len(array)] = array
        array = copy
    return array, array.ctypes.data


class Arena:
    """The buffers of one context, and the operand table that points into them.

    With `inputs`, the buffers of the plan's inputs are those of that arena: one place to write them, many to run in.
    """

    def __init__(self, program: LoadedPlan, layout: Layout, inputs: Arena | None = None) -> None:
        self._program, self._layout, self._inputs = program, layout, inputs
        self._memory = Memory(layout.total)
        self._filled = 0        # batch slots whose halos are written
        self._borrowed = frozenset(i for i, buffer in enumerate(program.machine.buffers) if inputs and buffer.first < 0)
        bases = [owner._memory.address + owner._layout.offsets[i]
                 for i, owner in enumerate(map(self._owner, range(len(layout.offsets))))]
        self._operands = program.operand_table(bases)
        self.operands: int = self._operands.ctypes.data     # address of the operand table
        self._words = self._operands.data                    # ... which is quicker to write one by one
        self._lent: list[tuple[int, int]] = []              # operands that are elsewhere, and their own addresses

    @cached_property
    def items(self) -> ItemTables:
        """For what runs item by item."""
        program = self._program
        return ItemTables(program.steps, self._operands, program.item_strides, program.plan.batch_slots,
                          program.lendable)

    @property
    def bytes(self) -> int:
        return self._layout.total

    def _owner(self, buffer: int) -> Arena:
        return self._inputs if self._inputs is not None and buffer in self._borrowed else self

    def array(self, view: TensorView, batch: int) -> Array:
        """The tensor as it lies in memory: [batch, *shape], or shape if it has no batch axis."""
        owner = self._owner(view.buffer)
        return array_at(owner._memory.bytes, owner._layout.offsets[view.buffer], view, batch)

    def lend(self, view: TensorView, array: Array) -> bool:
        """Let an array stand in for the buffer of an input or output. False: it cannot."""
        places, begin = self._program.lendable.places.get(view.buffer), address_of(array)
        if places is None or begin is None:
            return False
        for operand, offset in places:
            self._lent.append((operand, self._words[operand]))
            self._words[operand] = begin + offset
        return True

    def take_back(self) -> None:
        """Every tensor lies in its own buffer again."""
        while self._lent:
            operand, address = self._lent.pop()
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
    """One thread, one arena whose buffers share memory. inputs: of another arena, where inputs are."""

    def __init__(self, program: LoadedPlan, inputs: Arena | None = None) -> None:
        self._program = program
        self._arena = Arena(program, program.shared_layout, inputs)
        self._apart = False         # whether items of inputs are lent
        self._calls: dict[tuple[int, bool], tuple[Callable[[], None], ...]] = {}    # of each batch, and `_apart`

    def input(self, view: TensorView, batch: int) -> Array:
        self._arena.prepare(batch)
        return self._arena.array(view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return self._arena.array(view, batch)

    def run(self, batch: int) -> None:
        for call in self._calls.get((batch, self._apart)) or self._prepared(batch, self._apart):
            call()

    def ready(self, batch: int) -> Callable[[], None]:
        calls = self._prepared(batch)
        return calls[0] if len(calls) == 1 else partial(self.run, batch)

    def lend(self, view: TensorView, array: Array) -> bool:
        return self._arena.lend(view, array)

    def takes(self, view: TensorView, array: Array | None = None) -> bool:
        return self._program.lendable.takes(view, array)

    def lend_items(self, view: TensorView, first: int, array: Array) -> bool:
        # Asked first: the tables are made of the addresses that stand there, which another input's may be lent ones.
        begin = self._program.lendable.address(view, array)
        if begin is not None:
            self._arena.items.lend(view, first, begin, array.nbytes)
            self._apart = True
        return begin is not None

    def take_back(self) -> bool:
        self._arena.take_back()
        if self._apart:
            self._arena.items.take_back()
            self._apart = False
        return True

    def _prepared(self, batch: int, apart: bool = False) -> tuple[Callable[[], None], ...]:
        """Halos written, and the spans as calls. apart: items of inputs are lent."""
        self._arena.prepare(batch)
        program = self._program
        segments = program.apart_segments if apart else program.serial_segments if batch > 1 else program.segments
        calls = self._calls[batch, apart] = tuple(call_of(program, self._arena, segment, batch)
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
        """Nothing to stop: the memory goes with the last view of it."""


def call_of(program: LoadedPlan, arena: Arena, segment: Segment, batch: int) -> Callable[[], None]:
    """A segment on this thread: a call whose arguments ctypes need not convert again, for a small network takes little
    longer than that."""
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
    """Seconds of each step of the spans, the least of `repeats`: they run in order, each timed alone, less the cost of
    a call.

    It is CPU time of this thread. Without `fallbacks` those are left out, and take 0 s: the reference may refuse what
    lies in an arena at rest.
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
    """This process's C library."""
    return ctypes.CDLL(None, use_errno=True)
