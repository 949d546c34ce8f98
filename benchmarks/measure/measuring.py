"""Programs measured side by side: turns of a few calls each, one program after the other, again and again.

A turn begins with a call that is not counted, which brings the program's data back into the caches and its threads to
where they run; a call so long that this makes no difference is counted at once. A program's figure is the median over
its turns of a turn's median; two programs are compared turn by turn, so that what slows the machine for seconds meets
both sides of a ratio.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol, TypeVar

from benchmarks.measure.cycles import Counter

TURN_SECONDS = 0.03
LONG_SECONDS = 0.3      # of a call that warms its own caches
FEWEST_TURNS = 5
Name = TypeVar("Name")


class Clock(Protocol):
    unit: str

    def of(self, call: Callable[[], object]) -> int:
        """What one call costs, in millionths of the unit."""


class WallClock:
    """For several threads: what they cost together says little of how long a user waits."""
    unit = "ms"

    def of(self, call: Callable[[], object]) -> int:
        begin = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - begin


class WorkClock:
    """For one thread: user-mode cycles, or where there is no counter for them, CPU time."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.unit = "million cycles" if counter.unit == "cycles" else "ms of CPU time"

    def of(self, call: Callable[[], object]) -> int:
        return self._counter.of(call)


def interleaved(clock: Clock, calls: Mapping[Name, Callable[[], object]],
                seconds: float, fewest: int = FEWEST_TURNS) -> dict[Name, list[float]]:
    """{name: cost of a call in each turn, in the clock's unit}, all of them with as many turns, `fewest` at least."""
    costs: dict[Name, list[float]] = {name: [] for name in calls}
    end, order = time.perf_counter() + seconds, list(calls)
    while order and (len(costs[order[0]]) < fewest or time.perf_counter() < end):
        for name in order:
            costs[name].append(_turn(clock, calls[name]))
        order.reverse()         # nobody always follows the same one
    return costs


def _turn(clock: Clock, call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    first = clock.of(call)
    if time.perf_counter() - begin >= LONG_SECONDS:
        return first / 1e6
    counts: list[int] = []
    end = time.perf_counter() + TURN_SECONDS
    while not counts or time.perf_counter() < end:
        counts.append(clock.of(call))
    return median(counts) / 1e6
