"""Item-major runs: steps that run for one item of the batch after the other, so that tensors between them stay in L2.

Their tensors for all items do not fit the second-level cache, but those of one item do.

A batch goes through a network step by step, so that weights are read once; early layers of a network of images have few
weights and large tensors, and what one step hands on is out of the cache before the next one reads it. Item by item, it
is also written where the item before was, in memory that the cache has. Whether reading the weights anew costs more is
timed, as tactics are, and kept in the same cache: of two times their difference. For other shapes of the same model
nothing is timed: what gained at the usual shape is done again.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from engines.backends.llvm.runtime.execution import Arena, LoadedPlan, run_segment
from engines.backends.llvm.runtime.segments import Segment
from engines.backends.llvm.tuning.timing import seconds_of
from engines.machine.timing_cache import TimingCache
from engines.plan.plan import Buffer, ItemMajorRun, MachinePart, Plan, Step, runs_by_item
from engines.version import COMPILER_VERSION

ITEMS = 8                       # of the batch that is timed
WINDOW = 6                      # steps of a piece of a run; neighbours are joined where both gain
LEAST_BYTES = 1 << 20           # that a run reads and writes for an item: less, and the items fit a cache together
MOST_BYTES = 64 << 20           # that a step reads and writes for an item: more, and no cache holds what it hands on
MOST_CONSTANTS = 256 << 10      # bytes of a step's weights: more, and reading them for each item is no gain
ROUNDS = 3
GAIN = 0.97                     # of the time; less is noise


def with_item_major_runs(plan: Plan, cache: TimingCache, processor: str, beside: LoadedPlan | None = None) -> Plan:
    """beside: what the plan shares constants with.

    The plan with the item-major runs that save most when they are timed on this machine, `processor` by name.

    Of neighbouring steps that may join, all together are tried, and windows of a few of them. A window that is timed
    alone finds its inputs in the cache already, which hides what a longer run saves between windows; but a longer run
    may have parts that are slower so.
    """
    if plan.max_batch < ITEMS or _is_watched(plan.machine):
        return plan
    runs = [run for run in _runs(plan.machine.steps) if _moves_much(plan.machine.steps, run)]
    windows = {run: [window for window in _windows(run) if _moves_much(plan.machine.steps, window)] for run in runs}
    saved = _saved(plan, windows, cache, processor, beside)
    chosen: list[ItemMajorRun] = []
    for run in runs:
        apart = [window for window in windows[run] if saved[window] > 0]
        whole = saved[run] > 0 and saved[run] >= sum(saved[window] for window in apart)
        chosen += [run] if whole else _joined(apart)
    return run_item_major(plan, chosen)


def item_major_as_in(usual: MachinePart, machine: MachinePart, max_batch: int) -> MachinePart:
    """The machine part of a model at some shape with the item-major runs of that at its usual shape, where their steps
    follow each other here, too, and move as much. Steps that are not there (borders) part no run."""
    steps, before = machine.steps, usual.steps
    known = {step.name for step in before}
    inside = {step.name for run in usual.item_major for step in before[run.first:run.last]}
    if not inside or max_batch < ITEMS or _is_watched(machine):
        return machine
    parts = [list(part) for run in _runs(steps)
             for gains, part in groupby(range(run.first, run.last),
                                        lambda i: steps[i].name in inside or steps[i].name not in known) if gains]
    runs = [ItemMajorRun(part[0], part[-1] + 1) for part in parts if len(part) > 1]
    return _run_by_item(machine, [run for run in runs if _moves_much(steps, run)])


def _is_watched(machine: MachinePart) -> bool:
    """Whether outputs are only shown, for all items between two steps: in a run there is room for one item of them."""
    made = (machine.buffers[view.buffer] for view in machine.outputs)
    return any(buffer.first >= 0 and buffer.last < len(machine.steps) for buffer in made)


def run_item_major(plan: Plan, runs: Sequence[ItemMajorRun]) -> Plan:
    """The plan with these item-major runs, and buffers that live as long as they need."""
    return replace(plan, machine=_run_by_item(plan.machine, runs))


def _run_by_item(machine: MachinePart, runs: Sequence[ItemMajorRun]) -> MachinePart:
    used = {run: {o.buffer for step in machine.steps[run.first:run.last] for o in step.operands} for run in runs}

    def lasting(number: int, buffer: Buffer) -> Buffer:
        for run in (run for run in runs if number in used[run] and not run.keeps(buffer)):
            buffer = replace(buffer, first=min(buffer.first, run.first), last=max(buffer.last, run.last - 1))
        return buffer

    return replace(machine, item_major=tuple(runs), buffers=tuple(lasting(i, b) for i, b in enumerate(machine.buffers)))


def _runs(steps: Sequence[Step]) -> Iterator[ItemMajorRun]:
    """Neighbours that can run item by item and have few weights, as many as there are."""
    def may_join(index: int) -> bool:
        step = steps[index]
        return (bool(step.symbol) and runs_by_item(step) and step.constant_bytes <= MOST_CONSTANTS
                and step.bytes - step.constant_bytes <= MOST_BYTES)

    for joins, run in groupby(range(len(steps)), may_join):
        members = list(run)
        if joins and len(members) > 1:
            yield ItemMajorRun(members[0], members[-1] + 1)


def _windows(run: ItemMajorRun) -> list[ItemMajorRun]:
    """A run in pieces of up to WINDOW steps, one step being none."""
    starts = range(run.first, run.last, WINDOW)
    return [ItemMajorRun(start, min(start + WINDOW, run.last)) for start in starts if start + 1 < run.last]


def _moves_much(steps: Sequence[Step], run: ItemMajorRun) -> bool:
    return sum(step.bytes - step.constant_bytes for step in steps[run.first:run.last]) >= LEAST_BYTES


def _joined(runs: Sequence[ItemMajorRun]) -> list[ItemMajorRun]:
    """Neighbours as one."""
    joined: list[ItemMajorRun] = []
    for run in runs:
        if joined and joined[-1].last == run.first:
            run = ItemMajorRun(joined.pop().first, run.last)
        joined.append(run)
    return joined


def _saved(plan: Plan, windows: Mapping[ItemMajorRun, Sequence[ItemMajorRun]], cache: TimingCache,
           processor: str, beside: LoadedPlan | None) -> dict[ItemMajorRun, float]:
    """Microseconds that runs, and their windows, save item by item; 0 where that is not more than noise."""
    runs = list(windows)
    pieces = [window for run in runs for window in windows[run] if window != run]
    saved = {run: cache.get(_key(plan, run, processor)) for run in (*runs, *pieces)}
    if None in saved.values():
        by_step = _Way(plan, False, beside)
        for some in (runs, pieces):
            by_item = _Way(run_item_major(plan, some), True, beside)
            for run in some:
                if saved[run] is None:
                    saved[run] = found = _difference(by_step, by_item, run)
                    cache.put(_key(plan, run, processor), found)
    return {run: found or 0.0 for run, found in saved.items()}


def _key(plan: Plan, run: ItemMajorRun, processor: str) -> str:
    steps = [(step.symbol, step.rows_per_item) for step in plan.machine.steps[run.first:run.last]]
    text = repr((COMPILER_VERSION, "saved item by item", ITEMS, steps))
    return f"{processor}/{hashlib.sha256(text.encode()).hexdigest()}"


class _Way:
    """A plan in memory of its own, to be timed."""

    def __init__(self, plan: Plan, by_item: bool, beside: LoadedPlan | None) -> None:
        self._program, self._by_item = LoadedPlan(plan, beside=beside), by_item
        self._arena = Arena(self._program, self._program.shared_layout)
        self._arena.prepare(ITEMS)

    def seconds(self, run: ItemMajorRun) -> float:
        segment = Segment(run.first, run.last, by_item=self._by_item)
        return seconds_of(partial(run_segment, self._program, self._arena, segment, ITEMS))


def _difference(by_step: _Way, by_item: _Way, run: ItemMajorRun) -> float:
    """Microseconds by which the second way is faster, by the fastest runs of both, taken in turns; 0 for noise."""
    rounds = [(by_step.seconds(run), by_item.seconds(run)) for _ in range(ROUNDS)]
    before, after = (min(seconds) for seconds in zip(*rounds, strict=True))
    return (before - after) * 1e6 if after < GAIN * before else 0.0
