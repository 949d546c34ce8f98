"""Timing of kernels alone, in turns, on memory of their own."""
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from infer_server.engines.backends.llvm.kernels.kernel import Grid
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.machine.clock import thread_seconds

TIMING_SECONDS = 0.004      # time for one tactic, in rounds with the others
ROUNDS = 3
ABANDON_RATIO = 1.5         # tactics slower than this multiple of the fastest one's first runs are dropped
PART_MACS, PART_BYTES = 1 << 30, 1 << 28    # work of one timed call, about 20 ms
CONSTANTS_OF_PART = 8       # least ratio of a part's bytes to those of its constants
CLOCK_US = 1e-3             # least time that counts, because some clocks stand still for a moment

C = TypeVar("C")
Part = Callable[[], float]      # does a part of the work, and returns its share
Times = tuple[float, ...]       # microseconds of a tactic, for each batch size that it is timed with


def call_of(function: Any, arrays: list[Array], grid: Grid, items: int, parts: int = 1) -> Part:
    """Return a call of a kernel for a batch: for all of its rows, or for one of `parts`, the next one in each call."""
    table = np.array([array.ctypes.data for array in arrays], np.int64)
    address, keep = table.ctypes.data, (arrays, table)
    rows = items * grid.rows_per_item
    each = min(-(-rows // parts // grid.row_step) * grid.row_step, rows)
    begins = itertools.cycle(range(0, rows - each + 1, each))

    def call(keep: Any = keep) -> float:
        begin = next(begins)
        function(address, begin, begin + each, 0, grid.columns)
        return each / rows
    return call


def parts_of(problem: Problem, items: int, constant_bytes: int) -> int:
    """Return the number of parts that a batch is divided into for timing.

    If the whole takes long, a part suffices. But each part reads all constants, which must be a small share of its
    bytes.
    """
    work = max(problem.macs * items // PART_MACS, problem.bytes * items // PART_BYTES)
    return max(1, min(work, problem.bytes * items // (CONSTANTS_OF_PART * max(constant_bytes, 1))))


def aligned(array: Array) -> Array:
    """Return a flat copy that begins on a cache line, which NumPy's own buffers may not."""
    array = np.ascontiguousarray(array).reshape(-1)
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start:start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def memory_of(view: View, items: int) -> Array:
    """Return zeroed memory for so many items of a view, halo and slack included, from element 0 on.

    An axis that runs backwards has its elements before that.
    """
    begin, end = view.reach
    return aligned(np.zeros((items - 1) * view.item + end - begin + 256, np.uint8))[-begin:]


def measure(calls: Mapping[Any, Part]) -> dict[Any, float]:
    """Return the microseconds of the fastest run of each call, measured in turns.

    A call that does a part of the work counts with the time of all of it. The fastest run counts, because every
    disturbance makes a run longer. It is CPU time, because a slow kernel may never have the core to itself. Calls that
    are far behind after two runs are not timed further.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()                      # touch the memory, fill the caches
    for _ in range(2):
        for name, call in calls.items():
            best[name] = min(best[name], _seconds_of_all(call))
    limit = ABANDON_RATIO * min(best.values(), default=0.0)
    hopeful = [name for name, seconds in best.items() if seconds <= limit]
    for _ in range(ROUNDS):
        for name in hopeful:
            end = time.perf_counter() + TIMING_SECONDS / ROUNDS
            while True:
                best[name] = min(best[name], _seconds_of_all(calls[name]))
                if time.perf_counter() >= end:
                    break
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _seconds_of_all(call: Part) -> float:
    shares: list[float] = []
    return seconds_of(lambda: shares.append(call())) / shares[0]


def seconds_of(call: Callable[[], None]) -> float:
    """Return the CPU time of one call on this thread; infinity if the clock stood still.

    A virtual machine's clock may stand still for a moment, and callers look for the least time.
    """
    begin = thread_seconds()
    call()
    return thread_seconds() - begin or math.inf


def mean_ratios(times: Mapping[C, Times], least_of: Mapping[C, Times] | None = None) -> dict[C, float]:
    """Return the time of each candidate relative to the least, of `least_of` if given.

    For several batch sizes it is the mean of the ratios, so that each size has equal weight.
    """
    fastest = [max(min(of_batch), CLOCK_US) for of_batch in zip(*(least_of or times).values(), strict=True)]
    return {one: sum(max(us, CLOCK_US) / unit for us, unit in zip(found, fastest, strict=True)) / len(fastest)
            for one, found in times.items()}
