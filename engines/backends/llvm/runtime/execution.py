"""Loaded plans: the tables that emitted code reads, the memory that they point into, and the single-threaded executor.

elf.py loads the code, expansion.py the constants that are computed, abi.py names the words of the tables. workers.py is
the executor of several threads, which share the chunks that chunks.py makes.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from engines.backends.device import Show, final_before
from engines.backends.llvm.runtime.abi import STEP_WORDS, WORD, StepRow
from engines.backends.llvm.runtime.by_item import ItemTables
from engines.backends.llvm.runtime.elf import LoadedCode
from engines.backends.llvm.runtime.expansion import expand
from engines.backends.llvm.runtime.lending import ZeroCopyBuffers, address_of
from engines.backends.llvm.runtime.segments import Segment, cut_at_item_major_runs, cut_before, segments_of
from engines.errors import PlanCorruptError, PlanTargetError
from engines.ir.graph import Array
from engines.machine.clock import thread_seconds
from engines.plan.arena import (
    HUGE_PAGE,
    Layout,
    Layouts,
    Memory,
    MemoryPool,
    array_at,
    on_cache_line,
    plan_memory,
    write_halo,
)
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
    """Plan ready to run: code loaded, tables filled. It is read-only afterwards, and shared by all contexts."""

    def __init__(self, plan: Plan, threads: int = 1, beside: LoadedPlan | None = None) -> None:
        """Load a plan.

        Parameters
        ----------
        threads : number of threads that compute expanded constants.
        beside : for a specialisation, the loaded plan whose constants both share.

        Raises
        ------
        PlanCorruptError, PlanTargetError
        """
        self.plan, self.machine = plan if plan.of_template else verify(plan), plan.machine
        self._beside = _checked(plan, beside) if self.machine.shared else None
        # Plans of one model have code in common, and their contexts take turns.
        self._codes: WeakValueDictionary[tuple[int, ...], LoadedCode] = (
            self._beside._codes if self._beside else WeakValueDictionary())
        self._pool: MemoryPool | None = self._beside._pool if self._beside else MemoryPool() if plan.open else None
        self._layouts: Layouts = self._beside._layouts if self._beside else Layouts()
        self._code = self._loaded_code()
        self._constants, self._constants_address = on_cache_line(self.machine.constants)
        self._expanded = expand(self.machine, self.kernel, self._constants_address, threads)
        self.run_steps = self.function("run_steps", 5)
        self.steps = self._step_table()
        self.steps_address = self.steps.ctypes.data
        self.segments = segments_of(plan)
        self.serial_segments = tuple(part for segment in self.segments
                                     for part in cut_at_item_major_runs(segment, self.machine.item_major))
        operands = [operand for step in self.machine.steps for operand in step.operands]
        # The four kinds of constants are numbered as buffers after the others.
        more = {kind: len(self.machine.buffers) + i for i, kind in enumerate((None, EXPANDED, SHARED, SHARED_EXPANDED))}
        buffers = [more.get(o.buffer, o.buffer) for o in operands]
        self._operand_buffers = np.array(buffers, np.int64)
        self._operand_offsets = np.array([o.offset for o in operands], np.int64)
        self.zero_copy = ZeroCopyBuffers(plan, self._operand_buffers, self._operand_offsets)

    def _loaded_code(self) -> LoadedCode:
        key = tuple(map(id, self.machine.code))
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = LoadedCode(self.machine.code)
        return code

    def memory(self, size: int) -> NDArray[np.uint8]:
        """Return memory for the buffers of a context. Raises PlanError: there is not so much."""
        # A batch of one item would touch a huge page for each of its tensors, and most of each page is of other items.
        large = size // self.plan.batch_slots >= 4 * HUGE_PAGE
        return self._pool.take(size, large) if self._pool else Memory(size).bytes

    def function(self, name: str, parameters: int, user: str = "the executor") -> EmittedFunction:
        """Return an emitted function that takes i64s or addresses; a call releases the GIL."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)
        return prototype(self._address(name, user))

    @property
    def constant_addresses(self) -> tuple[int, int]:
        """Return the address of the constants, and of those computed from them."""
        return self._constants_address, self._expanded.address

    def kernel(self, item: ExpandedConstant) -> EmittedFunction:
        """Return the kernel that computes an expanded constant."""
        return self.function(item.symbol, 5, f"a constant of '{item.name}'")

    def _address(self, symbol: str, user: str) -> int:
        try:
            return self._code.addresses[symbol]
        except KeyError:
            raise PlanCorruptError(f"{self.plan.name}: {user} needs '{symbol}', which the plan's code does not define; "
                                   "build the plan again") from None

    def _step_table(self) -> Words:
        rows, operands = list[tuple[int, ...]](), 0
        for step in self.machine.steps:
            function = self._address(step.symbol, f"step '{step.name}'") if step.symbol else 0
            rows.append((function, operands * WORD, step.rows_per_item, 0 if step.rows_per_item else step.rows,
                         step.columns))           # in the order of StepRow
            operands += len(step.operands)
        table = words(len(rows), STEP_WORDS)
        if rows:                                  # numpy takes 1 us for each element that is set alone
            table[:, :len(StepRow)] = rows
        return table

    @cached_property
    def one_item_bytes(self) -> dict[int, int]:
        """Return {buffer: bytes of an item} of buffers that hold one item, as only one item-major run uses them."""
        return {footprint.buffer: footprint.item_stride for run in self.machine.item_major
                for step in self.machine.steps[run.first:run.last] for footprint in step.writes
                if run.keeps(self.machine.buffers[footprint.buffer])}

    @cached_property
    def item_strides(self) -> Words:
        """Return the item stride in bytes of each operand of steps that may run item by item; 0 for other steps."""
        inside = {i for run in self.machine.item_major for i in range(run.first, run.last)} | self.zero_copy.readers
        strides = [stride if operand.buffer not in self.one_item_bytes else 0
                   for i, step in enumerate(self.machine.steps)
                   for operand, stride in zip(step.operands, item_strides(step) if i in inside else
                                              [0] * len(step.operands), strict=True)]
        return np.array(strides, np.int64)

    @cached_property
    def scattered_segments(self) -> tuple[Segment, ...]:
        """Return the serial segments for inputs with scattered items: steps that read these run item by item too."""
        readers = self.zero_copy.readers
        cuts = {step + behind for step in readers for behind in (0, 1)}
        return tuple(part for segment in self.serial_segments for part in (
            [segment] if segment.by_item else (replace(part, by_item=part.first in readers)
                                               for part in cut_before([segment], cuts))))

    @cached_property
    def shared_layout(self) -> Layout:
        """Return the layout of a context of one thread.

        Buffers share memory; those that only one item-major run uses hold one item.
        """
        others, buffers = self.plan.batch_slots - 1, self.machine.buffers
        if others and self.one_item_bytes:
            buffers = tuple(replace(buffer, bytes=buffer.bytes - others * self.one_item_bytes.get(i, 0))
                            for i, buffer in enumerate(buffers))
        plan = self._layouts.plan if self.plan.of_template else plan_memory
        return replace(plan(buffers, self.machine.fills), one_item=frozenset(self.one_item_bytes))

    @cached_property
    def separate_layout(self) -> Layout:
        """Return the layout of a context of several threads, in which every buffer has its own memory."""
        return plan_memory(self.machine.buffers, self.machine.fills, reuse=False)

    def operand_table(self, bases: Sequence[int]) -> Words:
        """Return the addresses of all operands of all steps, given the base address of each buffer."""
        shared = self._beside.constant_addresses if self._beside else (0, 0)
        every: Words = np.array([*bases, *self.constant_addresses, *shared], np.int64)
        return every[self._operand_buffers] + self._operand_offsets


def _checked(plan: Plan, beside: LoadedPlan | None) -> LoadedPlan:
    """Return `beside`, the plan whose constants are shared, if it is the right one."""
    if beside is None:
        raise PlanTargetError(f"{plan.name}: a specialisation cannot be loaded alone; load the plan of its model")
    machine = beside.machine
    if (len(machine.constants), machine.expanded_bytes) != plan.machine.shared:
        raise PlanCorruptError(f"{plan.name}: this specialisation does not belong to the plan it is loaded with; build "
                               "the plan again")
    return beside


def words(*shape: int) -> Words:
    """Return a zeroed table of i64 that begins on a cache line, in memory that is never moved."""
    return np.ndarray(shape, np.int64, Memory(int(np.prod(shape)) * WORD).bytes)


class Arena:
    """Buffers of one context, and the operand table that points into them.

    With `inputs`, the buffers of the plan's inputs are those of that other arena: several arenas read the same inputs.
    """

    def __init__(self, program: LoadedPlan, layout: Layout, inputs: Arena | None = None) -> None:
        self._program, self._layout, self._inputs = program, layout, inputs
        self._bytes = program.memory(layout.total)
        self._address: int = self._bytes.ctypes.data
        self._filled = 0        # batch slots whose halos are written
        self._borrowed = frozenset(i for i, buffer in enumerate(program.machine.buffers) if inputs and buffer.first < 0)
        bases = [owner._address + owner._layout.offsets[i]
                 for i, owner in enumerate(map(self._owner, range(len(layout.offsets))))]
        self._operands = program.operand_table(bases)
        self.operands: int = self._operands.ctypes.data     # address of the operand table
        self._words = self._operands.data                    # memoryview: faster for single writes
        self._redirected: list[tuple[int, int]] = []              # (redirected operand, its own address)

    @cached_property
    def items(self) -> ItemTables:
        """Return the tables for steps that run item by item."""
        program = self._program
        return ItemTables(program.steps, self._operands, program.item_strides, program.plan.batch_slots,
                          program.zero_copy)

    @property
    def bytes(self) -> int:
        return self._layout.total

    def _owner(self, buffer: int) -> Arena:
        return self._inputs if self._inputs is not None and buffer in self._borrowed else self

    def array(self, view: TensorView, batch: int) -> Array:
        """Return the tensor as a view of the buffer: [batch, *shape], or shape if it has no batch axis."""
        owner = self._owner(view.buffer)
        return array_at(owner._bytes, owner._layout.offsets[view.buffer], view, batch)

    def redirect(self, view: TensorView, array: Array) -> bool:
        """Make an array replace the buffer of an input or output. Returns False if it cannot."""
        operands, begin = self._program.zero_copy.operands.get(view.buffer), address_of(array)
        if operands is None or begin is None:
            return False
        for operand, offset in operands:
            self._redirected.append((operand, self._words[operand]))
            self._words[operand] = begin + offset
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

    def lend(self, view: TensorView, array: Array) -> bool:
        return self._arena.redirect(view, array)

    def takes(self, view: TensorView, array: Array | None = None) -> bool:
        return self._program.zero_copy.takes(view, array)

    def lend_items(self, view: TensorView, first: int, array: Array) -> bool:
        # Check before `items` is used: it copies the operand table, which must not hold redirected addresses then.
        begin = self._program.zero_copy.address(view, array)
        if begin is not None:
            self._arena.items.redirect(view, first, begin, array.nbytes)
            self._scattered = True
        return begin is not None

    def take_back(self) -> bool:
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
