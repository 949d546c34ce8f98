"""Interleaved measurement of programs, in alternating turns of a few calls each.

A turn begins with a warm-up call, which is counted only if calls are so long that warming up does not matter. The
result of a program is the median over its turns of each turn's median. Two programs are compared turn by turn, so that
load that slows the machine for seconds affects both sides of a ratio.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol, TypeVar

from benchmarks.measure.cycles import Counter

TURN_SECONDS = 0.03
LONG_SECONDS = 0.3      # calls of at least this length need no warm-up
MIN_TURNS = 5
Name = TypeVar("Name")


class Clock(Protocol):
    unit: str

    def of(self, call: Callable[[], object]) -> int:
        """Measure one call and return its cost in millionths of the unit."""


class WallClock:
    """Wall clock, for programs of several threads, whose CPU time does not show their latency."""
    unit = "ms"

    def of(self, call: Callable[[], object]) -> int:
        begin = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - begin


class WorkClock:
    """Clock for programs of one thread: user-mode cycles, or CPU time if there is no counter."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.unit = "million cycles" if counter.unit == "cycles" else "ms of CPU time"

    def of(self, call: Callable[[], object]) -> int:
        return self._counter.of(call)


def interleaved(clock: Clock, calls: Mapping[Name, Callable[[], object]],
                seconds: float, fewest: int = MIN_TURNS) -> dict[Name, list[float]]:
    """Return the cost of a call in each turn by name, in the clock's unit; all have equally many turns, >= `fewest`."""
    costs: dict[Name, list[float]] = {name: [] for name in calls}
    end, order = time.perf_counter() + seconds, list(calls)
    while order and (len(costs[order[0]]) < fewest or time.perf_counter() < end):
        for name in order:
            costs[name].append(_turn(clock, calls[name]))
        order.reverse()         # so that no program always follows the same one
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
