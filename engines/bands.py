"""Which steps run item by item: bands of steps whose tensors for all items do not fit a cache, but those of one do.

A batch goes through a network step by step, so that weights are read once; early layers of a network of images have few
weights and large tensors, and what one step hands on is out of the cache before the next one reads it. Item by item, it
is also written where the item before was, in memory that the cache has. Whether reading the weights anew costs more is
timed, as tactics are, and kept in the same cache: of two times their ratio.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from engines.clock import thread_seconds
from engines.execution import Arena, Program, Span, run_span
from engines.plan import Band, Buffer, Plan, Step, runs_by_item
from engines.tactics import TimingCache
from engines.version import COMPILER_VERSION

ITEMS = 8                       # of the batch that is timed
WINDOW = 6                      # steps that are tried together; neighbours are joined where both gain
LEAST_BYTES = 1 << 20           # that a window reads and writes for an item: less, and the items fit a cache together
MOST_CONSTANTS = 256 << 10      # bytes of a step's weights: more, and reading them for each item is no gain
ROUNDS = 3
GAIN = 0.97                     # of the time; less is noise


def with_bands(plan: Plan, cache: TimingCache, processor: str) -> Plan:
    """The plan with the bands that made it faster when they were timed on this machine, `processor` by name."""
    if plan.max_batch < ITEMS:
        return plan
    windows = list(_windows(plan.steps))
    gains = [window for window, gain in zip(windows, _gains(plan, windows, cache, processor), strict=True) if gain]
    joined: list[Band] = []
    for band in gains:
        if joined and joined[-1].last == band.first:
            joined[-1] = Band(joined[-1].first, band.last)
        else:
            joined.append(band)
    return banded(plan, joined)


def banded(plan: Plan, bands: Sequence[Band]) -> Plan:
    """The plan with these bands, and buffers that live as long as they need."""
    used = {band: {o.buffer for step in plan.steps[band.first:band.last] for o in step.operands} for band in bands}

    def lasting(number: int, buffer: Buffer) -> Buffer:
        for band in (band for band in bands if number in used[band] and not band.keeps(buffer)):
            buffer = replace(buffer, first=min(buffer.first, band.first), last=max(buffer.last, band.last - 1))
        return buffer

    return replace(plan, bands=tuple(bands), buffers=tuple(lasting(i, b) for i, b in enumerate(plan.buffers)))


def _windows(steps: Sequence[Step]) -> Iterator[Band]:
    """Runs of up to WINDOW steps that can run item by item, have few weights and move much."""
    for joins, run in groupby(range(len(steps)), lambda index: _may_join(steps[index])):
        members = list(run) if joins else []
        for start in range(0, len(members), WINDOW):
            window = members[start:start + WINDOW]
            if len(window) > 1 and sum(steps[i].bytes - steps[i].constant_bytes for i in window) >= LEAST_BYTES:
                yield Band(window[0], window[-1] + 1)


def _may_join(step: Step) -> bool:
    return bool(step.symbol) and runs_by_item(step) and step.constant_bytes <= MOST_CONSTANTS


def _gains(plan: Plan, windows: Sequence[Band], cache: TimingCache, processor: str) -> list[bool]:
    """For each window whether it is faster item by item."""
    keys = [_key(plan, window, processor) for window in windows]
    known = [cache.get(key) for key in keys]
    if None in known:
        ways = [_Way(banded(plan, windows), by_item=True), _Way(plan, by_item=False)]
        for i, window in enumerate(windows):
            if known[i] is None:
                known[i] = ratio = _ratio(ways, window)
                cache.put(keys[i], ratio)
    return [ratio is not None and ratio < GAIN for ratio in known]


def _key(plan: Plan, window: Band, processor: str) -> str:
    steps = [(step.symbol, step.rows_per_item) for step in plan.steps[window.first:window.last]]
    return f"{processor}/{hashlib.sha256(repr((COMPILER_VERSION, 'item in place', ITEMS, steps)).encode()).hexdigest()}"


class _Way:
    """A plan in memory of its own, to be timed."""

    def __init__(self, plan: Plan, by_item: bool) -> None:
        self._program, self._by_item = Program(plan), by_item
        self._arena = Arena(self._program, self._program.shared_layout)
        self._arena.prepare(ITEMS)

    def seconds(self, window: Band) -> float:
        begin = thread_seconds()
        run_span(self._program, self._arena, Span(window.first, window.last, by_item=self._by_item), ITEMS)
        return thread_seconds() - begin


def _ratio(ways: Sequence[_Way], window: Band) -> float:
    """The time of the first way over that of the second, the fastest of each, taken in turns."""
    rounds = [[way.seconds(window) for way in ways] for _ in range(ROUNDS)]
    return min(first for first, _ in rounds) / min(second for _, second in rounds)
