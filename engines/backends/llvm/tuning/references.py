"""Times of fallback steps: the reference runs on one item, so that a build can report what it costs."""
from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from infer_server.engines.backends.llvm.runtime.execution import Arena, call_of
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.segments import Segment
from infer_server.engines.errors import PlanError
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.plan.plan import Plan, Step

SECONDS = 5.0       # limit for all steps together; the remaining steps are not timed
AGAIN = 0.05        # seconds; shorter steps are timed twice, because the first run also imports and allocates


def with_reference_times(plan: Plan, base: LoadedPlan | None = None) -> Plan:
    """Return the plan with the time of each fallback step.

    The time is 0 for a step that rejects the initial contents of an arena, without any input.
    """
    steps = list(plan.machine.steps)
    if not any(step.fallback for step in steps):
        return plan
    program = LoadedPlan(plan, base=base)
    arena = Arena(program, program.shared_layout)
    arena.prepare(1)
    left = SECONDS
    for index, step in enumerate(steps):
        if step.fallback and left > 0:
            spent, steps[index] = _timed(program, arena, index, step)
            left -= spent
    return plan.with_machine(steps=tuple(steps))


def _timed(program: LoadedPlan, arena: Arena, index: int, step: Step) -> tuple[float, Step]:
    """Return the seconds that timing took, and the step with its time."""
    segment, = (segment for segment in program.segments if segment.first == index)
    call = call_of(program, arena, Segment(index, index + 1, segment.fallback), 1)
    spent: list[float] = []
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            while not spent or len(spent) < 2 and spent[0] < AGAIN:
                begin = thread_seconds()
                call()
                spent.append(thread_seconds() - begin)
    except PlanError:
        return sum(spent), step
    return sum(spent), replace(step, time_us=round(min(spent) * 1e6, 3))
