"""Which steps run item by item: bands of steps whose tensors for all items do not fit a cache, but those of one do.

A batch goes through a network step by step, so that weights are read once; early layers of a network of images have few
weights and large tensors, and what one step hands on is out of the cache before the next one reads it. Item by item, it
is also written where the item before was, in memory that the cache has. Whether reading the weights anew costs more is
timed, as tactics are, and kept in the same cache: of two times their difference.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from engines.backends.llvm.runtime.execution import Arena, LoadedPlan, Span, run_span
from engines.machine.clock import thread_seconds
from engines.machine.timing_cache import TimingCache
from engines.plan.plan import Band, Buffer, Plan, Step, runs_by_item
from engines.version import COMPILER_VERSION

ITEMS = 8                       # of the batch that is timed
WINDOW = 6                      # steps of a piece of a run; neighbours are joined where both gain
LEAST_BYTES = 1 << 20           # that a band reads and writes for an item: less, and the items fit a cache together
MOST_CONSTANTS = 256 << 10      # bytes of a step's weights: more, and reading them for each item is no gain
ROUNDS = 3
GAIN = 0.97                     # of the time; less is noise


def with_bands(plan: Plan, cache: TimingCache, processor: str) -> Plan:
    """The plan with the bands that save most when they are timed on this machine, `processor` by name.

    Of each run of steps that may join, the whole of it is tried, and windows of it: alone a window is timed with what
    it reads at hand, which makes little of what a band saves between windows; but the whole may have parts that lose.
    """
    if plan.max_batch < ITEMS:
        return plan
    runs = [run for run in _runs(plan.steps) if _moves_much(plan.steps, run)]
    windows = {run: [window for window in _windows(run) if _moves_much(plan.steps, window)] for run in runs}
    saved = _saved(plan, windows, cache, processor)
    bands: list[Band] = []
    for run in runs:
        apart = [window for window in windows[run] if saved[window] > 0]
        whole = saved[run] > 0 and saved[run] >= sum(saved[window] for window in apart)
        bands += [run] if whole else _joined(apart)
    return banded(plan, bands)


def banded(plan: Plan, bands: Sequence[Band]) -> Plan:
    """The plan with these bands, and buffers that live as long as they need."""
    used = {band: {o.buffer for step in plan.steps[band.first:band.last] for o in step.operands} for band in bands}

    def lasting(number: int, buffer: Buffer) -> Buffer:
        for band in (band for band in bands if number in used[band] and not band.keeps(buffer)):
            buffer = replace(buffer, first=min(buffer.first, band.first), last=max(buffer.last, band.last - 1))
        return buffer

    return replace(plan, bands=tuple(bands), buffers=tuple(lasting(i, b) for i, b in enumerate(plan.buffers)))


def _runs(steps: Sequence[Step]) -> Iterator[Band]:
    """Neighbours that can run item by item and have few weights, as many as there are."""
    for joins, run in groupby(range(len(steps)), lambda index: _may_join(steps[index])):
        members = list(run)
        if joins and len(members) > 1:
            yield Band(members[0], members[-1] + 1)


def _may_join(step: Step) -> bool:
    return bool(step.symbol) and runs_by_item(step) and step.constant_bytes <= MOST_CONSTANTS


def _windows(run: Band) -> list[Band]:
    """A run in pieces of up to WINDOW steps, one step being none."""
    starts = range(run.first, run.last, WINDOW)
    return [Band(start, min(start + WINDOW, run.last)) for start in starts if start + 1 < run.last]


def _moves_much(steps: Sequence[Step], band: Band) -> bool:
    return sum(step.bytes - step.constant_bytes for step in steps[band.first:band.last]) >= LEAST_BYTES


def _joined(bands: Sequence[Band]) -> list[Band]:
    """Neighbours as one."""
    joined: list[Band] = []
    for band in bands:
        if joined and joined[-1].last == band.first:
            band = Band(joined.pop().first, band.last)
        joined.append(band)
    return joined


def _saved(plan: Plan, windows: Mapping[Band, Sequence[Band]], cache: TimingCache,
           processor: str) -> dict[Band, float]:
    """Microseconds that runs, and their windows, save item by item; 0 where that is not more than noise."""
    runs = list(windows)
    pieces = [window for run in runs for window in windows[run] if window != run]
    saved = {band: cache.get(_key(plan, band, processor)) for band in (*runs, *pieces)}
    if None in saved.values():
        by_step = _Way(plan, by_item=False)
        for bands in (runs, pieces):
            by_item = _Way(banded(plan, bands), by_item=True)
            for band in bands:
                if saved[band] is None:
                    saved[band] = found = _difference(by_step, by_item, band)
                    cache.put(_key(plan, band, processor), found)
    return {band: found or 0.0 for band, found in saved.items()}


def _key(plan: Plan, band: Band, processor: str) -> str:
    steps = [(step.symbol, step.rows_per_item) for step in plan.steps[band.first:band.last]]
    text = repr((COMPILER_VERSION, "saved item by item", ITEMS, steps))
    return f"{processor}/{hashlib.sha256(text.encode()).hexdigest()}"


class _Way:
    """A plan in memory of its own, to be timed."""

    def __init__(self, plan: Plan, by_item: bool) -> None:
        self._program, self._by_item = LoadedPlan(plan), by_item
        self._arena = Arena(self._program, self._program.shared_layout)
        self._arena.prepare(ITEMS)

    def seconds(self, band: Band) -> float:
        begin = thread_seconds()
        run_span(self._program, self._arena, Span(band.first, band.last, by_item=self._by_item), ITEMS)
        return thread_seconds() - begin


def _difference(by_step: _Way, by_item: _Way, band: Band) -> float:
    """Microseconds by which the second way is faster, by the fastest runs of both, taken in turns; 0 for noise."""
    rounds = [(by_step.seconds(band), by_item.seconds(band)) for _ in range(ROUNDS)]
    before, after = (min(seconds) for seconds in zip(*rounds, strict=True))
    return (before - after) * 1e6 if after < GAIN * before else 0.0
