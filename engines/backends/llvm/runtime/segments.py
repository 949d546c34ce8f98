"""Segments of a plan's steps: what one call of its code runs."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from infer_server.engines.backends.fallback import FallbackStep
from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.plan.plan import ItemMajorRun, Plan


@dataclass(frozen=True)
class Segment:
    """Steps first..last - 1: either native ones, which one call runs, or a single fallback."""
    first: int
    last: int
    fallback: FallbackStep | None = None
    by_item: bool = False       # run all steps for one item after the other; else one step after the other


def segments_of(plan: Plan) -> tuple[Segment, ...]:
    """Return the longest segments of native steps, and the fallbacks between them."""
    segments: list[Segment] = []
    for index, step in enumerate(plan.machine.steps):
        if not step.symbol:
            if step.fallback is None:
                raise PlanCorruptError(f"{plan.name}: step '{step.name}' has neither a kernel nor a fallback; "
                                       "build the plan again")
            segments.append(Segment(index, index + 1, FallbackStep(step.fallback, plan.weights)))
        elif segments and segments[-1].fallback is None:
            segments[-1] = Segment(segments[-1].first, index + 1)
        else:
            segments.append(Segment(index, index + 1))
    return tuple(segments)


def cut_at_item_major_runs(segment: Segment, runs: Sequence[ItemMajorRun]) -> Iterator[Segment]:
    """Yield the parts of a segment between the boundaries of item-major runs, for a single thread."""
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
    """Yield the segments, split before each of these steps."""
    for segment in segments:
        cuts = [step for step in sorted(steps) if segment.first < step < segment.last]
        for first, last in pairwise((segment.first, *cuts, segment.last)):
            yield replace(segment, first=first, last=last)
