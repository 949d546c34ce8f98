"""Loaded plans: the tables that emitted code reads.

elf.py loads the code, expansion.py the constants that are computed, abi.py names the words of the tables. execution.py
has the memory that the tables point into, and runs the code.

A Program is what a plan has for all extents. A LoadedPlan adds the numbers: if a symbolic plan made
the plan, they are one vector, which a function of the extents fills, and nothing is done for each step.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.backends.llvm.runtime.abi import STEP_WORDS, WORD, StepRow
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.backends.llvm.runtime.expansion import expand
from infer_server.engines.backends.llvm.runtime.segments import Segment, cut_at_item_major_runs, cut_before, segments_of
from infer_server.engines.backends.llvm.runtime.zero_copy import ZeroCopyBuffers
from infer_server.engines.errors import PlanCorruptError, PlanTargetError
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.plan.arena import (
    CACHE_LINE,
    HUGE_PAGE,
    Layout,
    Layouts,
    Memory,
    MemoryPool,
    halos_of,
    on_cache_line,
    plan_memory,
)
from infer_server.engines.plan.plan import (
    EXPANDED,
    SHARED,
    SHARED_EXPANDED,
    ExpandedConstant,
    MachinePart,
    Plan,
    Step,
    item_strides,
)
from infer_server.engines.plan.symbolic.plans import LateMachine, SymbolicPlan
from infer_server.engines.plan.verification import verify

Words = NDArray[np.int64]
EmittedFunction = Callable[..., None]
GRID = slice(StepRow.ROWS_PER_ITEM, StepRow.COLUMNS + 1)


def words(*shape: int) -> Words:
    """Return a zeroed table of i64 that begins on a cache line, in memory that is never moved."""
    raw = np.zeros(int(np.prod(shape)) * WORD + CACHE_LINE, np.uint8)
    return np.ndarray(shape, np.int64, raw, -raw.ctypes.data % CACHE_LINE)


class Program:
    """Parts of a plan that its extents do not change: code, segments, buffers of operands."""

    def __init__(self, plan: Plan, code: LoadedCode, symbolic: SymbolicPlan | None = None) -> None:
        """symbolic: the symbolic plan, if `plan` is what it traced. Raises PlanCorruptError."""
        machine = plan.machine
        self._name, self._code = plan.name, code
        self.run_steps = self.function("run_steps", 5)
        self.run_steps_address = self._address("run_steps", "the executor")
        self.segments = segments_of(plan)
        self.serial_segments = tuple(part for segment in self.segments
                                     for part in cut_at_item_major_runs(segment, machine.item_major))
        operands = [operand for step in machine.steps for operand in step.operands]
        # The four kinds of constants are numbered as buffers after the others.
        more = {kind: len(machine.buffers) + i for i, kind in enumerate((None, EXPANDED, SHARED, SHARED_EXPANDED))}
        self.operand_buffers = np.array([more.get(o.buffer, o.buffer) for o in operands], np.int64)
        self.zero_copy = ZeroCopyBuffers(plan, self.operand_buffers, symbolic=symbolic is not None)
        self.layouts = Layouts([(buffer.first, buffer.last) for buffer in machine.buffers], halos_of(machine.fills))
        numbers = _numbers(machine)
        changing = [i for i, number in enumerate(numbers) if type(number) is SymbolicInt]
        self._changing = np.array(changing, np.int64)
        self._numbers = np.array([0 if type(number) is SymbolicInt else number for number in numbers], np.int64)
        self._changed = symbolic.function([numbers[i] for i in changing]) if symbolic and changing else None
        ends = np.cumsum([3 * len(machine.steps), len(operands), len(machine.buffers)])
        self._parts = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        self._steps = self._step_rows(machine)

    def tables(self, arguments: Sequence[int]) -> tuple[Words, Words, Words]:
        """Return the step table, the offset of each operand, and the size of each buffer, for these extents."""
        numbers = self._numbers
        if self._changed:
            numbers = numbers.copy()
            numbers[self._changing] = self._changed(*arguments)
        grids, offsets, sizes = (numbers[part] for part in self._parts)
        steps = words(*self._steps.shape)
        steps[:] = self._steps
        steps[:, GRID] = grids.reshape(-1, 3)
        return steps, offsets, sizes

    def function(self, name: str, parameters: int, user: str = "the executor") -> EmittedFunction:
        """Return an emitted function that takes i64s or addresses; a call releases the GIL."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)
        return prototype(self._address(name, user))

    def _address(self, symbol: str, user: str) -> int:
        try:
            return self._code.addresses[symbol]
        except KeyError:
            raise PlanCorruptError(f"{self._name}: {user} needs '{symbol}', which the plan's code does not define; "
                                   "build the plan again") from None

    def _step_rows(self, machine: MachinePart) -> Words:
        """Return the step table without the grids."""
        table, operands = np.zeros((len(machine.steps), STEP_WORDS), np.int64), 0
        for row, step in zip(table, machine.steps, strict=True):
            row[StepRow.FUNCTION] = self._address(step.symbol, f"step '{step.name}'") if step.symbol else 0
            row[StepRow.OPERANDS] = operands * WORD
            operands += len(step.operands)
        return table


def _numbers(machine: MachinePart) -> list[Any]:
    """Return the grid of each step, the offset of each operand and the size of each buffer; some may be symbolic."""
    return [*(number for step in machine.steps for number in (step.rows_per_item, _rows(step), step.columns)),
            *(operand.offset for step in machine.steps for operand in step.operands),
            *(buffer.bytes for buffer in machine.buffers)]


def _rows(step: Step) -> Any:
    return step.rows if type(step.rows_per_item) is int and not step.rows_per_item else 0


class LoadedPlan:
    """Plan ready to run: code loaded, tables filled. It is read-only afterwards, and shared by all contexts."""

    def __init__(self, plan: Plan, threads: int = 1, base: LoadedPlan | None = None) -> None:
        """Load a plan.

        Parameters
        ----------
        threads : number of threads that compute expanded constants.
        base : for a specialisation, the loaded plan whose constants both share.

        Raises
        ------
        PlanCorruptError, PlanTargetError
        """
        self.plan, self.machine = plan if plan.of_symbolic else verify(plan), plan.machine
        self._base = _checked(plan, base) if self.machine.shared else None
        # Plans of one model have code in common, and their contexts take turns.
        self._codes: WeakValueDictionary[tuple[int, ...], LoadedCode] = (
            self._base._codes if self._base else WeakValueDictionary())
        self._programs: WeakKeyDictionary[SymbolicPlan, Program] = (
            self._base._programs if self._base else WeakKeyDictionary())
        self._pool: MemoryPool | None = self._base._pool if self._base else MemoryPool() if plan.open else None
        self.program, arguments = self._program()
        self._constants, self._constants_address = on_cache_line(self.machine.constants)
        self._expanded = expand(self.machine, self.kernel, self._constants_address, threads) if (
            self.machine.expanded) else None
        self.steps, self.operand_offsets, self.sizes = self.program.tables(arguments)
        self.steps_address: int = self.steps.ctypes.data
        self.run_steps, self.function = self.program.run_steps, self.program.function
        self.run_steps_address = self.program.run_steps_address
        self.segments, self.serial_segments = self.program.segments, self.program.serial_segments
        self.zero_copy = self.program.zero_copy

    def _program(self) -> tuple[Program, Sequence[int]]:
        """Return the program, and the extents that it needs."""
        machine = self.machine
        symbolic = machine.symbolic if isinstance(machine, LateMachine) else None
        program = self._programs.get(symbolic) if symbolic else None
        if program is None:
            # Fallback steps are made with their numbers.
            if symbolic is None or any(step.fallback for step in symbolic.traced.machine.steps):
                return Program(self.plan, self._loaded_code()), ()
            program = self._programs[symbolic] = Program(symbolic.traced, self._loaded_code(), symbolic)
        return program, machine.arguments           # type: ignore[attr-defined]

    def _loaded_code(self) -> LoadedCode:
        key = tuple(map(id, self.machine.code))
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = LoadedCode(self.machine.code)
        return code

    def memory(self, size: int) -> NDArray[np.uint8]:
        """Return memory for the buffers of a context. Raises PlanError: there is not so much."""
        if self._pool is None:
            return Memory(size).bytes
        # A batch of one item would touch a huge page for each of its tensors, and most of each page is of other items.
        item = self.plan.batch_slots * HUGE_PAGE
        return self._pool.take(size, size >= 4 * item and int(self.sizes.max(initial=0)) >= item)

    @property
    def constant_addresses(self) -> tuple[int, int]:
        """Return the address of the constants, and of those computed from them."""
        return self._constants_address, self._expanded.address if self._expanded else 0

    def kernel(self, item: ExpandedConstant) -> EmittedFunction:
        """Return the kernel that computes an expanded constant."""
        return self.program.function(item.symbol, 5, f"a constant of '{item.name}'")

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
        others, sizes = self.plan.batch_slots - 1, self.sizes
        if others and self.one_item_bytes:
            sizes = sizes.copy()
            for i, item in self.one_item_bytes.items():
                sizes[i] -= others * item
        if self.plan.of_symbolic:
            layout = self.program.layouts.plan(sizes)
        else:
            buffers = [replace(buffer, bytes=size) for buffer, size in zip(self.machine.buffers, sizes.tolist(),
                                                                           strict=True)]
            layout = plan_memory(buffers, self.machine.fills)
        return replace(layout, one_item=frozenset(self.one_item_bytes)) if self.one_item_bytes else layout

    @cached_property
    def separate_layout(self) -> Layout:
        """Return the layout of a context of several threads, in which every buffer has its own memory."""
        return plan_memory(self.machine.buffers, self.machine.fills, reuse=False)

    def operand_table(self, bases: Sequence[int] | Words) -> Words:
        """Return the addresses of all operands of all steps, given the base address of each buffer."""
        shared = self._base.constant_addresses if self._base else (0, 0)
        every = np.concatenate([bases, (*self.constant_addresses, *shared)]).astype(np.int64, copy=False)
        table: Words = every[self.program.operand_buffers]
        table += self.operand_offsets
        return table


def _checked(plan: Plan, base: LoadedPlan | None) -> LoadedPlan:
    """Return `base`, the plan whose constants are shared, if it is the right one."""
    if base is None:
        raise PlanTargetError(f"{plan.name}: a specialisation cannot be loaded alone; load the plan of its model")
    machine = base.machine
    if (len(machine.constants), machine.expanded_bytes) != plan.machine.shared:
        raise PlanCorruptError(f"{plan.name}: this specialisation does not belong to the plan it is loaded with; build "
                               "the plan again")
    return base
