"""Timing inside the network: tactics whose times alone are close are timed again between the other layers.

A kernel that is timed alone was the last to use its weights and inputs, so they are in L1 or L2. Inside a network all
other layers ran in between: weights come from the last level of cache or from memory, and inputs are where the step
before left them. Times alone do not show how a tactic copes with that (prefetched weights, fewer bytes of them, another
order of blocks).

So the close candidates of every call become steps of their own, on the same buffers, in one trial plan. A run executes
one of each in order, and times every step. All problems are judged at once, within some dozens of runs. Runs with one
choice follow each other, and the first does not count, so that each choice finds the caches as it left them.

A time inside the network is a sample of a few runs on a busy machine; a time alone is the least of many, but biased.
The two are combined, weighted by their errors.
"""
from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from infer_server.engines.backends.base import Progress
from infer_server.engines.backends.llvm.runtime.execution import Arena, call_of
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.runtime.segments import Segment
from infer_server.engines.backends.llvm.tuning.candidates import Candidate, Choice, packing
from infer_server.engines.backends.llvm.tuning.tuner import Estimate, Tuner
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.plan.plan import Buffer, Plan
from infer_server.engines.version import COMPILER_VERSION

LEAST_SHARE = 0.002         # least share of all kernels' time that is worth a trial
MOST_RUN = 1.0              # seconds of a run above which times alone suffice
MOST_CANDIDATES = (2, 6)    # candidates of a problem, if a run takes seconds, and otherwise
MOST_BYTES = 1 << 30        # most bytes of constants in packings of the trial only
RUNS = 2                    # runs with one choice, of which the first does not count
ROUNDS = (3, 200)           # least and most rounds over all choices
LEAST_ERROR = 0.003         # least relative error of such a time: two copies of one network differ by as much
REFINEMENTS = 3             # iterations of the estimate of each run's speed
SECONDS = 4.0               # time limit of the rounds beyond the least number

Choices = Mapping[Problem, Sequence[Choice]]
Run = dict[int, float]      # seconds of the steps of one run, by their numbers


class Trial(NamedTuple):
    """Plan in which the candidates of every call are consecutive steps."""
    plan: Plan
    candidates: Sequence[range]     # steps of the candidates of each call
    problems: Sequence[Problem | None]      # problem of each call; None for a fallback


def settled(choices: Mapping[Problem, Choice], uses: Sequence[Problem], tuner: Tuner, items: int,
            make_trial: Callable[[Choices], Trial], progress: Progress | None = None) -> dict[Problem, Choice]:
    """Return the choices with their times inside the network; among close candidates, the fastest there.

    Parameters
    ----------
    uses : problems of the network's calls, in order.
    items : batch size for timing.
    make_trial : return a trial plan for candidates.

    Times are stored in the tuner's cache by network, so that another build of it needs no trial.
    """
    if sum(choices[problem].time_us for problem in uses) * items > MOST_RUN * 1e6:
        return dict(choices)
    candidates = _close_candidates(choices, uses, tuner, items)
    key = _Key(tuner, uses, items)
    known = {problem: {one: tuner.cache.get(key(one)) for one in some} for problem, some in candidates.items()}
    if any(None in times.values() for times in known.values()):
        trial = make_trial(tuner.trials(candidates, progress))
        measured = times_in_network(trial, items, progress)
        for problem, some in candidates.items():
            calls = [steps for steps, its in zip(trial.candidates, trial.problems, strict=True) if its == problem]
            times = [_mean([measured[steps[rank]] for steps in calls]) for rank in range(len(some))]
            taken = times[0]
            for one, time in zip(some, times, strict=True):
                ratio = Estimate(time.value / taken.value, math.hypot(time.error, taken.error) / taken.value)
                known[problem][one] = us = taken.value * ratio.with_(tuner.alone(problem, one)).value
                tuner.cache.put(key(one), us)
    return tuner.settle({problem: {one: us for one, us in times.items() if us is not None}
                         for problem, times in known.items()})


def _close_candidates(choices: Mapping[Problem, Choice], uses: Sequence[Problem], tuner: Tuner,
                      items: int) -> dict[Problem, list[Candidate]]:
    """Return the close candidates of each problem; only the choice itself if its share of the time is too small."""
    times = {problem: choice.time_us * uses.count(problem) for problem, choice in choices.items()}
    whole = sum(times.values())
    most = int(SECONDS / max(whole * items / 1e6 * RUNS * ROUNDS[0], 1e-9))
    most = min(max(most, MOST_CANDIDATES[0]), MOST_CANDIDATES[1])
    candidates, bytes_left = {}, MOST_BYTES
    for problem, us in times.items():
        candidates[problem] = list[Candidate]()
        packed = {packing(choices[problem])}
        for one in tuner.close_candidates(problem, most if us >= LEAST_SHARE * whole else 1):
            more = 0 if packing(one) in packed else uses.count(problem) * tuner.constant_bytes(one)
            if more <= bytes_left:
                candidates[problem].append(one)
                packed.add(packing(one))
                bytes_left -= more
    return candidates


def _mean(times: Sequence[Estimate]) -> Estimate:
    return Estimate(statistics.fmean(time.value for time in times),
                    math.hypot(*(time.error for time in times)) / len(times))


class _Key:
    """Cache key of a candidate's time inside one network."""

    def __init__(self, tuner: Tuner, uses: Sequence[Problem], items: int) -> None:
        network = hashlib.sha256(repr(uses).encode()).hexdigest()
        self._tuner, self._context = tuner, repr((COMPILER_VERSION, "in place", items, network))

    def __call__(self, candidate: Candidate) -> str:
        text = self._context + self._tuner.digest(candidate)
        return f"{self._tuner.processor}/{hashlib.sha256(text.encode()).hexdigest()}"


def trial_buffers(buffers: Sequence[Buffer], candidates: Sequence[range]) -> tuple[Buffer, ...]:
    """Convert buffer lifetimes from numbers of calls to numbers of the steps of a trial.

    A tensor that no call accesses, such as the states of a layer of which only the last is used, is alive at the end.
    """
    end = candidates[-1].stop if candidates else 0
    starts, stops = [*(steps.start for steps in candidates), end], [*(steps.stop - 1 for steps in candidates), end]

    def alive(buffer: Buffer) -> Buffer:
        first = starts[buffer.first] if buffer.first >= 0 else buffer.first
        return replace(buffer, first=first, last=stops[buffer.last])
    return tuple(map(alive, buffers))


def times_in_network(trial: Trial, items: int, progress: Progress | None = None) -> list[Estimate]:
    """Return the microseconds of each step inside the network; 0 for fallbacks."""
    program = LoadedPlan(trial.plan)
    arena = Arena(program, program.shared_layout)
    arena.prepare(items)
    native = [steps for steps, problem in zip(trial.candidates, trial.problems, strict=True) if problem is not None]
    calls = {step: call_of(program, arena, Segment(step, step + 1), items) for steps in native for step in steps}

    def run(choice: int) -> Run:
        seconds = {}
        for steps in native:
            step = steps[choice % len(steps)]
            begin = thread_seconds()
            calls[step]()
            seconds[step] = thread_seconds() - begin
        return seconds

    ways = max(map(len, native))
    run(0)      # warm-up: maps the memory
    rounds = int(SECONDS / max(sum(run(0).values()) * RUNS * ways, 1e-9))
    rounds = min(max(rounds, ROUNDS[0]), ROUNDS[1])
    counted: list[Run] = []
    for done in range(rounds):
        for choice in range(ways):
            counted += [run(choice) for _ in range(RUNS)][1:]
        if progress:
            progress(done + 1, rounds, "timed in the network")
    seconds = typical(counted)
    nothing = Estimate(0.0, 0.0)
    return [Estimate(1e6 * found.value, 1e6 * found.error) for steps in trial.candidates for step in steps
            for found in (seconds.get(step, nothing),)]


def typical(runs: Sequence[Run]) -> dict[int, Estimate]:
    """Estimate the time of each step in a run of median speed.

    The clock rate and the caches that other processes leave make a run slower than the next, and all of its steps with
    it: time = speed of the run * cost of the step. Each run's speed is estimated as the median of its steps' ratios to
    their costs, and divided out.
    """
    cost = _medians(runs, [1.0] * len(runs))
    for _ in range(REFINEMENTS):
        # A clock that stood still during a run gives no speed.
        speeds = [statistics.median(run[step] / cost[step].value for step in run) or 1.0 for run in runs]
        cost = _medians(runs, speeds)
    return cost


def _medians(runs: Sequence[Run], speeds: Sequence[float]) -> dict[int, Estimate]:
    found: dict[int, list[float]] = {}
    for run, speed in zip(runs, speeds, strict=True):
        for step, seconds in run.items():
            found.setdefault(step, []).append(seconds / speed)
    return {step: _median(seconds) for step, seconds in found.items()}


def _median(seconds: Sequence[float]) -> Estimate:
    """Return the median and its standard error, estimated from the median distance as for a normal distribution."""
    middle = max(statistics.median(seconds), 1e-9)
    distance = statistics.median(abs(value - middle) for value in seconds)
    return Estimate(middle, max(1.25 * 1.48 * distance / math.sqrt(len(seconds)), LEAST_ERROR * middle))
