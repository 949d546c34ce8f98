"""Executions on several threads: a pool of the caller and helper threads, which sleep until it wakes them.

chunks.py divides the work, abi.py defines the tables, execution.py has the arenas. The emitted code
(../codegen/executor.py) tolerates that another process takes a core: late chunks are run again, so that nobody waits
for a thread that is not running.

A late helper may stay in the arena of an earlier request for an unknown time. So there is one arena more than there are
helpers, and a request runs in one without helpers; inputs are read from one arena, where helpers never write; outputs
are copied out. Zero-copy arrays of a run are kept alive while any helper may be late in it, and zero-copy outputs are
then replaced by copies. After a fork the child has no helpers: it runs alone, with correct results.
"""
from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import count

import numpy as np

from infer_server.engines.backends.llvm.runtime.abi import (
    CONTROL_WORDS,
    RUN_WORDS,
    STATUS_WORDS,
    WORD,
    WORKER_WORDS,
    ControlRow,
    RunRow,
    WorkerRow,
)
from infer_server.engines.backends.llvm.runtime.chunks import Schedule, make_schedule, most_chunks
from infer_server.engines.backends.llvm.runtime.execution import Arena, SerialExecution, call_of, libc, time_steps
from infer_server.engines.backends.llvm.runtime.item_groups import ItemGroups, divides_by_items
from infer_server.engines.backends.llvm.runtime.loaded import EmittedFunction, LoadedPlan, Words, words
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.plan import TensorView

_log = logging.getLogger(__name__)

SPIN_US = 50.0          # time that a helper spins before it sleeps; requests within it cost no wake-up (6-7 us)
CALIBRATION_RUNS = 3
LOOKS = 8               # polls, about 1 us each, for helpers that are about to leave a finished run


class ParallelProgram:
    """Chunk tables, and the step times behind them, shared by the contexts of one engine and number of workers."""

    def __init__(self, program: LoadedPlan, workers: int) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"threads={workers}: several threads for one request need Linux (futex); use threads=1, "
                              "and several contexts")
        self.program, self.workers = program, workers
        self._schedules: dict[int, tuple[Schedule | None, ...]] = {}
        self._worth: dict[int, bool] = {}
        self._step_us: Sequence[float] | None = None
        self._lock = threading.Lock()

    @cached_property
    def ticks_per_us(self) -> float:
        """Return the rate of the emitted code's clock in ticks per microsecond, measured over 5 ms."""
        ticks, out = self.program.function("ticks", 1), words(2)
        start = time.perf_counter()
        ticks(out.ctypes.data)
        time.sleep(0.005)
        ticks(out.ctypes.data + WORD)
        return float(out[1] - out[0]) / (time.perf_counter() - start) / 1e6

    def calibrate(self, arena: Arena) -> None:
        """Time the steps at batch 1, once for all contexts. The arena holds no request."""
        with self._lock:
            if self._step_us is None:
                self._step_us = [s * 1e6 for s in time_steps(
                    self.program, arena, self.program.segments, 1, CALIBRATION_RUNS, fallbacks=False)]

    def worth_sharing(self, batch: int) -> bool:
        """Return True if helpers take part in a run of so many items."""
        found = self._worth.get(batch)
        if found is None:
            found = self._worth[batch] = self.divides_by_items(batch) or any(self.schedules(batch))
        return found

    def divides_by_items(self, batch: int) -> bool:
        """Return True if the threads share a batch by its items rather than by parts of each step."""
        return divides_by_items(self.program, batch, self.workers)

    def schedules(self, batch: int) -> tuple[Schedule | None, ...]:
        """Return the tables of each segment.

        None for those that the caller runs alone: fallbacks, and steps that are too short.
        """
        found = self._schedules.get(batch)
        if found is None:
            assert self._step_us is not None, "calibrate first"
            found = tuple(None if segment.fallback else make_schedule(self.program, segment, batch, self.workers,
                                                                   self._step_us, self.ticks_per_us)
                          for segment in self.program.segments)
            with self._lock:
                found = self._schedules.setdefault(batch, found)
        return found


class ParallelExecution:
    """One context: `workers` - 1 helper threads, and as many arenas as workers.

    Batches that are too small to share run on the caller, in a further arena.
    """

    def __init__(self, shared: ParallelProgram, cpus: Sequence[int] | None = None) -> None:
        """Make the arenas and start the helpers.

        cpus: the CPU of each worker, the caller first, to pin the helpers to; None: any CPU but the caller's.
        """
        self._shared, self._program = shared, shared.program
        program, workers = shared.program, shared.workers
        first = Arena(program, program.separate_layout)
        self.arenas = [first, *(Arena(program, program.separate_layout, inputs=first) for _ in range(workers - 1))]
        self._alone = SerialExecution(program, inputs=first)
        self._groups = ItemGroups(program, first, workers)
        first.prepare(1)
        shared.calibrate(first)

        # One for each segment: the rows of a segment must not change while a late helper is in it.
        self._statuses = [[words(most_chunks(s, workers), STATUS_WORDS) for s in program.segments] for _ in self.arenas]
        self.runs = [words(len(program.segments), RUN_WORDS) for _ in self.arenas]
        self._calls: list[tuple[int, Sequence[Callable[[], None]]]] = [(0, ())] * workers   # (batch, calls) by arena
        self._epochs = count(1)
        self._pool = WorkerPool(program, workers, shared.ticks_per_us, len(self.arenas), cpus,
                          (self.arenas, self._statuses, self.runs, shared, self._groups))
        self._inside = self.workers[1:, WorkerRow.INSIDE]       # hazard pointer of each helper
        self._run_chunks = program.function("run_chunks", 2)
        self._free_arena = partial(program.function("free_arena", 1), ctypes.c_int64(self._pool.control.ctypes.data))
        slots = program.plan.batch_slots
        self._outputs = {view.name: np.empty_like(first.array(view, slots)) for view in program.machine.outputs}
        self._next_arena: int | None = None             # arena of the next run, if it has been chosen
        self._zero_copy: dict[str, Array] = {}           # zero-copy arrays of that run
        self._retained: list[dict[str, Array]] = []     # zero-copy arrays of earlier runs in which helpers may be late

    def input(self, view: TensorView, batch: int) -> Array:
        self.arenas[0].prepare(batch)
        return self.arenas[0].array(view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        if not self._shared.worth_sharing(batch):
            return self._alone.output(view, batch)
        output = self._outputs[view.name]
        return output[(slice(None),) * view.batch_axis + (slice(batch),)] if view.batched else output

    def run(self, batch: int) -> None:
        if not self._shared.worth_sharing(batch):
            self.arenas[0].prepare(batch)
            self._alone.run(batch)
            return
        index = self._pick_arena()
        filled, calls = self._calls[index]
        if filled != batch:
            calls = self._prepared(index, batch)
        self._pool.keep_off_this_cpu()
        for call in calls:
            call()
        self._copy_outputs(index, batch)
        if not self._zero_copy:
            self._next_arena = None

    def _copy_outputs(self, index: int, batch: int) -> None:
        """Copy the outputs out of the arena, or out of the arenas of groups of items, except for zero-copy ones."""
        for view in self._program.machine.outputs:
            if self._shared.divides_by_items(batch):
                for items, array in self._groups.division(batch).outputs(view):
                    output = self.output(view, batch)
                    np.copyto(output[(slice(None),) * view.batch_axis + (slice(items.start, items.stop),)], array)
            elif view.name not in self._zero_copy:
                np.copyto(self.output(view, batch), self.arenas[index].array(view, batch))

    def ready(self, batch: int) -> Callable[[], None]:
        return partial(self.run, batch) if self._shared.worth_sharing(batch) else self._alone.ready(batch)

    def set_buffer(self, view: TensorView, array: Array) -> bool:
        if not view.batched and self._program.plan.batch_slots > 1:
            return False            # its shape does not tell the batch size
        if not self._shared.worth_sharing(array.shape[view.batch_axis] if view.batched else 1):
            return self._alone.set_buffer(view, array)
        # Memory that NumPy does not own may be unmapped while a late helper uses it, even if the array is referenced.
        if not _is_numpys(array) or not self.arenas[self._pick_arena()].redirect(view, array):
            return False
        self._zero_copy[view.name] = array
        return True

    def release_buffers(self) -> bool:
        self._alone.release_buffers()
        if not self._zero_copy:
            return True
        assert self._next_arena is not None
        self.arenas[self._next_arena].restore()
        self._retained.append(self._zero_copy)
        self._next_arena, self._zero_copy = None, {}
        helpers_left = any(not self._inside.any() for _ in range(LOOKS))
        if helpers_left:
            self._retained.clear()
        return helpers_left

    def _pick_arena(self) -> int:
        if self._next_arena is None:
            self._free_arena()
            self._next_arena = int(self._pool.control[ControlRow.FREE])
        return self._next_arena

    def _prepared(self, index: int, batch: int) -> Sequence[Callable[[], None]]:
        """Write the halos, and return the segments as calls, in an arena without helpers."""
        arena = self.arenas[index]
        if self._shared.divides_by_items(batch):
            self.arenas[0].prepare(batch)
            calls = [self._shared_call(index, 0, self._groups.division(batch).schedule, operands=0)]
            self._calls[index] = batch, calls
            return calls
        arena.prepare(batch)
        segments = enumerate(zip(self._program.segments, self._shared.schedules(batch), strict=True))
        calls = [self._shared_call(index, number, schedule, arena.operands) if schedule
                 else call_of(self._program, arena, segment, batch) for number, (segment, schedule) in segments]
        self._calls[index] = batch, calls
        return calls

    def _shared_call(self, arena: int, segment: int, schedule: Schedule, operands: int) -> Callable[[], None]:
        row = self._run_row(arena, segment, schedule, operands)
        publish = partial(self._run_chunks, *map(ctypes.c_int64, (self._pool.control.ctypes.data, row.ctypes.data)))

        def run(epochs: Iterator[int] = self._epochs) -> None:      # no reference to self, to avoid a cycle
            row[RunRow.EPOCH] = next(epochs)
            publish()
        return run

    def _run_row(self, arena: int, segment: int, schedule: Schedule, operands: int) -> Words:
        """Fill the RunRow of a segment in an arena, except for the epoch; nobody reads it until it is published.

        operands: address that the chunks' operands are relative to.
        """
        row: Words = self.runs[arena][segment]
        row[RunRow.ARENA], row[RunRow.WORKERS] = arena, self._shared.workers
        row[RunRow.CHUNKS], row[RunRow.STATUS] = schedule.chunks.ctypes.data, self._statuses[arena][segment].ctypes.data
        row[RunRow.OPERANDS] = operands
        row[RunRow.STAGES], row[RunRow.DEPENDS] = schedule.stages.ctypes.data, schedule.depends.ctypes.data
        row[RunRow.STAGE_COUNT], row[RunRow.STAGE_BYTES] = len(schedule.stages) - 1, schedule.stages.strides[0]
        return row

    def profile(self, batch: int, repeats: int) -> list[float]:
        return self._alone.profile(batch, repeats)

    @property
    def workers(self) -> Words:
        """Return the state and counters of each worker, the caller first: [workers, WORKER_WORDS], see WorkerRow."""
        return self._pool.workers

    def close(self) -> None:
        """Stop the helpers; afterwards the caller runs alone."""
        self._pool.close()


def _is_numpys(array: Array) -> bool:
    """Return True if NumPy owns the memory of an array, or of the array that it is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.flags.owndata


class WorkerPool:
    """Helper threads of one context, and the control block through which emitted code talks to them."""

    def __init__(self, program: LoadedPlan, workers: int, ticks_per_us: float, arenas: int, cpus: Sequence[int] | None,
                 keep_alive: object) -> None:
        """Start the helpers. keep_alive: objects that a late helper may access, which must outlive the threads."""
        self.control = words(CONTROL_WORDS + workers * WORKER_WORDS)
        self.workers = self.control[CONTROL_WORDS:].reshape(workers, WORKER_WORDS)
        self.control[ControlRow.WORKERS], self.control[ControlRow.ARENAS] = workers, arenas
        self.control[ControlRow.SYSCALL] = ctypes.cast(libc().syscall, ctypes.c_void_p).value or 0
        self.control[ControlRow.SPIN] = round(SPIN_US * ticks_per_us)
        self._cpus = os.sched_getaffinity(0)        # affinity of this thread, which helpers inherit
        self._cpu = -1
        help_ = program.function("help", 2)
        self._threads = [threading.Thread(target=_help, args=(help_, self.control, number, (program, keep_alive)),
                                          daemon=True, name=f"{program.plan.name}-helper-{number}")
                         for number in range(1, workers)]
        for thread in self._threads:
            thread.start()
        if cpus is not None:
            for thread, cpu in zip(self._threads, cpus[1:], strict=True):
                self._move(thread, {cpu})
            self._cpus = set()
        # Stop a pool that is garbage, or alive when the interpreter exits, before its memory is freed.
        self._finalizer = weakref.finalize(self, _stop, program.function("stop_helpers", 1), self.control,
                                           self._threads, (program, keep_alive))

    def keep_off_this_cpu(self) -> None:
        """Let helpers use every CPU but the caller's.

        Linux may wake one there, where it would wait for milliseconds.
        """
        if not self._cpus:      # pinned, or setting the affinity failed
            return
        cpu = libc().sched_getcpu()
        others = self._cpus - {cpu}
        if cpu != self._cpu and others:
            self._cpu = cpu
            for thread in self._threads:
                self._move(thread, others)

    def _move(self, thread: threading.Thread, cpus: set[int]) -> None:
        # After a fork the parent's threads do not run in the child, and their ids may belong to other threads.
        if not thread.is_alive() or thread.native_id is None:
            return
        try:
            os.sched_setaffinity(thread.native_id, cpus)
        except OSError as error:
            _log.warning("cannot set the CPU affinity of helper threads (%s); they run on any CPU", error)
            self._cpus = set()

    def close(self) -> None:
        self._finalizer()


def _help(help_: EmittedFunction, control: Words, number: int, keep_alive: object) -> None:
    """Run a helper. `keep_alive` is in its frame, so that nothing it may access is freed before it returns."""
    help_(control.ctypes.data, number)


def _stop(stop: EmittedFunction, control: Words, threads: Sequence[threading.Thread], keep_alive: object) -> None:
    """Stop the helpers. `keep_alive` holds the code that runs here, which the helpers may release before it returns."""
    stop(control.ctypes.data)
    for thread in threads:
        if thread is not threading.current_thread():    # the garbage collector may run on any thread, helpers too
            thread.join()
