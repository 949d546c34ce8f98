"""Item-major runs: steps that run for one item of the batch after the other, so that tensors between them stay in L2.

They serve steps whose tensors fit L2 for one item, but not for all items.

A batch usually goes through a network step by step, so that weights are read once. Early layers of image networks have
few weights and large tensors; the output of a step has left the cache before the next step reads it. Item by item, an
output is also written to memory that is in the cache, where the previous item was. Whether reading the weights again
costs more is measured, and the time saved is stored in the timing cache. For other shapes of a model nothing is timed:
runs that gained at the usual shape are used again.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from infer_server.engines.backends.llvm.runtime.execution import Arena, run_segment
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.segments import Segment
from infer_server.engines.backends.llvm.tuning.timing import seconds_of
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.plan import Buffer, ItemMajorRun, MachinePart, Plan, Step, runs_by_item
from infer_server.engines.version import COMPILER_VERSION

ITEMS = 8                       # batch size for timing
WINDOW = 6                      # steps in a window of a run; adjacent windows are joined if both gain
LEAST_BYTES = 1 << 20           # least traffic of a run for one item; with less, all items fit a cache together
MOST_BYTES = 64 << 20           # most traffic of a step for one item; with more, no cache holds its output
MOST_CONSTANTS = 1 << 20      # most bytes of a step's weights; with more, reading them for each item costs too much
ROUNDS = 3
GAIN = 0.97                     # relative time that counts as a gain over noise


def with_item_major_runs(plan: Plan, cache: TimingCache, processor: str, base: LoadedPlan | None = None) -> Plan:
    """Return the plan with the item-major runs that save most, timed on this machine.

    Of adjacent steps that may form a run, the whole sequence is tried, and windows of a few steps. A window that is
    timed alone finds its inputs in the cache, which hides what a longer run saves between windows; but parts of a
    longer run may be slower in it.

    Parameters
    ----------
    processor : name of this machine's CPU, for the cache.
    base : the loaded plan that this one shares constants with.
    """
    if plan.max_batch < ITEMS or _is_watched(plan.machine):
        return plan
    runs = [run for run in _runs(plan.machine.steps) if _moves_much(plan.machine.steps, run)]
    windows = {run: [window for window in _windows(run) if _moves_much(plan.machine.steps, window)] for run in runs}
    saved = _saved(plan, windows, cache, processor, base)
    chosen: list[ItemMajorRun] = []
    for run in runs:
        apart = [window for window in windows[run] if saved[window] > 0]
        whole = saved[run] > 0 and saved[run] >= sum(saved[window] for window in apart)
        chosen += [run] if whole else _joined(apart)
    return run_item_major(plan, chosen)


def item_major_as_in(usual: MachinePart, machine: MachinePart, max_batch: int) -> MachinePart:
    """Return the machine part with the item-major runs of the model's usual shape.

    Steps of a usual run form a run here if they are adjacent and move as many bytes. Steps that the usual shape lacks
    (borders) do not interrupt a run.
    """
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
    """Return True if outputs are only shown between two steps, for all items: a run holds one item of them."""
    made = (machine.buffers[view.buffer] for view in machine.outputs)
    return any(buffer.first >= 0 and buffer.last < len(machine.steps) for buffer in made)


def run_item_major(plan: Plan, runs: Sequence[ItemMajorRun]) -> Plan:
    """Return the plan with these item-major runs, and with buffer lifetimes extended accordingly."""
    return replace(plan, machine=_run_by_item(plan.machine, runs))


def _run_by_item(machine: MachinePart, runs: Sequence[ItemMajorRun]) -> MachinePart:
    used = {run: {o.buffer for step in machine.steps[run.first:run.last] for o in step.operands} for run in runs}

    def lasting(number: int, buffer: Buffer) -> Buffer:
        for run in (run for run in runs if number in used[run] and not run.keeps(buffer)):
            buffer = replace(buffer, first=min(buffer.first, run.first), last=max(buffer.last, run.last - 1))
        return buffer

    return replace(machine, item_major=tuple(runs), buffers=tuple(lasting(i, b) for i, b in enumerate(machine.buffers)))


def _runs(steps: Sequence[Step]) -> Iterator[ItemMajorRun]:
    """Yield the longest sequences of steps that can run item by item and have few weights."""
    def may_join(index: int) -> bool:
        step = steps[index]
        return (bool(step.symbol) and runs_by_item(step) and step.constant_bytes <= MOST_CONSTANTS
                and step.bytes - step.constant_bytes <= MOST_BYTES)

    for joins, run in groupby(range(len(steps)), may_join):
        members = list(run)
        if joins and len(members) > 1:
            yield ItemMajorRun(members[0], members[-1] + 1)


def _windows(run: ItemMajorRun) -> list[ItemMajorRun]:
    """Divide a run into windows of up to WINDOW steps; windows of a single step are left out."""
    starts = range(run.first, run.last, WINDOW)
    return [ItemMajorRun(start, min(start + WINDOW, run.last)) for start in starts if start + 1 < run.last]


def _moves_much(steps: Sequence[Step], run: ItemMajorRun) -> bool:
    return sum(step.bytes - step.constant_bytes for step in steps[run.first:run.last]) >= LEAST_BYTES


def _joined(runs: Sequence[ItemMajorRun]) -> list[ItemMajorRun]:
    """Join adjacent runs."""
    joined: list[ItemMajorRun] = []
    for run in runs:
        if joined and joined[-1].last == run.first:
            run = ItemMajorRun(joined.pop().first, run.last)
        joined.append(run)
    return joined


def _saved(plan: Plan, windows: Mapping[ItemMajorRun, Sequence[ItemMajorRun]], cache: TimingCache,
           processor: str, base: LoadedPlan | None) -> dict[ItemMajorRun, float]:
    """Return the microseconds that each run and window saves item by item; 0 if the gain is not above the noise."""
    runs = list(windows)
    pieces = [window for run in runs for window in windows[run] if window != run]
    saved = {run: cache.get(_key(plan, run, processor)) for run in (*runs, *pieces)}
    if None in saved.values():
        by_step = _Way(plan, False, base)
        for some in (runs, pieces):
            by_item = _Way(run_item_major(plan, some), True, base)
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
    """Loaded plan with its own memory, to be timed."""

    def __init__(self, plan: Plan, by_item: bool, base: LoadedPlan | None) -> None:
        self._program, self._by_item = LoadedPlan(plan, base=base), by_item
        self._arena = Arena(self._program, self._program.shared_layout)
        self._arena.prepare(ITEMS)

    def seconds(self, run: ItemMajorRun) -> float:
        segment = Segment(run.first, run.last, by_item=self._by_item)
        return seconds_of(partial(run_segment, self._program, self._arena, segment, ITEMS))


def _difference(by_step: _Way, by_item: _Way, run: ItemMajorRun) -> float:
    """Return the microseconds by which `by_item` is faster, from the fastest runs of both in turns; 0 for noise."""
    rounds = [(by_step.seconds(run), by_item.seconds(run)) for _ in range(ROUNDS)]
    before, after = (min(seconds) for seconds in zip(*rounds, strict=True))
    return (before - after) * 1e6 if after < GAIN * before else 0.0
