"""Times calls of kernels alone, side by side, on memory of their own."""
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from engines.backends.llvm.kernels.kernel import Grid
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View
from engines.machine.clock import thread_seconds

TIMING_SECONDS = 0.004      # spent on timing one tactic, in rounds among its rivals
ROUNDS = 3
ABANDON_RATIO = 1.5         # times the fastest tactic's first runs: a slower one is timed no further
PART_MACS, PART_BYTES = 1 << 30, 1 << 28    # of the work that one call is timed for: it takes some 20 ms
CONSTANTS_OF_PART = 8       # times its bytes are the part's least
CLOCK_US = 1e-3             # the least that is a time: some clocks stand still for a moment

C = TypeVar("C")
Part = Callable[[], float]      # does a part of the work, and says which share it was
Times = tuple[float, ...]       # microseconds of a tactic, for a batch of each size that it is timed with


def call_of(function: Any, arrays: list[Array], grid: Grid, items: int, parts: int = 1) -> Part:
    """A call of a kernel for a batch: for all of it, or for a part of its rows and, when called again, the next."""
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
    """Into how many parts a batch is cut to be timed: where all takes long, a part tells as much. But each part reads
    all constants, which must stay little beside the rest."""
    work = max(problem.macs * items // PART_MACS, problem.bytes * items // PART_BYTES)
    return max(1, min(work, problem.bytes * items // (CONSTANTS_OF_PART * max(constant_bytes, 1))))


def aligned(array: Array) -> Array:
    """A flat copy that begins on a cache line: numpy's own buffers need not."""
    array = np.ascontiguousarray(array).reshape(-1)
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start:start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def memory_of(view: View, items: int) -> Array:
    """Room for so many items of a view, halo and slack included, from element 0 on: there is more before it where an
    axis runs backwards."""
    begin, end = view.reach
    return aligned(np.zeros((items - 1) * view.item + end - begin + 256, np.uint8))[-begin:]


def measure(calls: Mapping[Any, Part]) -> dict[Any, float]:
    """{name: call} -> {name: microseconds of its fastest run}, the calls taken in turns; of what does a part of the
    work, those that all of it would take.

    The fastest run, because everything that disturbs a measurement makes it longer; in CPU time, for a slow kernel may
    never have the core to itself. Calls that are far behind after two runs are left at that.
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
    """CPU time of one call on this thread; infinite where the clock stood still, as a virtual
    machine's may for a moment: the least is looked for."""
    begin = thread_seconds()
    call()
    return thread_seconds() - begin or math.inf


def mean_ratios(times: Mapping[C, Times], least_of: Mapping[C, Times] | None = None) -> dict[C, float]:
    """Each one's time to the least, of `least_of` if given; of several batches the mean, so that each counts alike
    however long it takes."""
    fastest = [max(min(of_batch), CLOCK_US) for of_batch in zip(*(least_of or times).values(), strict=True)]
    return {one: sum(max(us, CLOCK_US) / unit for us, unit in zip(found, fastest, strict=True)) / len(fastest)
            for one, found in times.items()}
