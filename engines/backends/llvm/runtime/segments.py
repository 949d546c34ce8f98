"""The steps of a plan as segments: what one call of its code runs, and where that is cut."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engines.errors import PlanCorruptError
from engines.plan.plan import ItemMajorRun, Plan
from engines.runtime.fallback import FallbackStep


@dataclass(frozen=True)
class Segment:
    """Steps first..last - 1: all native, so that one call runs them, or one fallback."""
    first: int
    last: int
    fallback: FallbackStep | None = None
    by_item: bool = False       # one item after the other; else one step after the other


def segments_of(plan: Plan) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for index, step in enumerate(plan.machine.steps):
        if not step.symbol:
            if step.fallback is None:
                raise PlanCorruptError(f"{plan.name}: step '{step.name}' has neither a kernel nor a fallback")
            segments.append(Segment(index, index + 1, FallbackStep(step.fallback, plan.weights)))
        elif segments and segments[-1].fallback is None:
            segments[-1] = Segment(segments[-1].first, index + 1)
        else:
            segments.append(Segment(index, index + 1))
    return tuple(segments)


def cut_at_item_major_runs(segment: Segment, runs: Sequence[ItemMajorRun]) -> Iterator[Segment]:
    """The segment cut where item-major runs begin and end: what one thread runs."""
    at = segment.first
    for run in runs:
        if segment.first <= run.first and run.last <= segment.last:
            if at < run.first:
                yield Segment(at, run.first)
            yield Segment(run.first, run.last, by_item=True)
            at = run.last
    if at < segment.last:
        yield replace(segment, first=at)


def cut_before(segments: Sequence[Segment], steps: Collection[int]) -> Iterator[Segment]:
    """The segments cut before each of these steps."""
    for segment in segments:
        cuts = [step for step in sorted(steps) if segment.first < step < segment.last]
        for first, last in pairwise((segment.first, *cuts, segment.last)):
            yield replace(segment, first=first, last=last)
