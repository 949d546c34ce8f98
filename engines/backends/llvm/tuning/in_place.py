"""Choosing in place: tactics that are near each other alone are timed again inside the network, which decides.

A kernel that is timed alone was the last to use its weights and inputs, so they are in the nearest caches. Inside a
network all other layers ran since: weights come from the last level of cache or from memory, inputs lie where the step
before left them. What a tactic does about that (weights asked for ahead, fewer bytes of them, another order of blocks)
is not to be seen alone.

So the rivals of every call become steps of their own, on the same buffers, in one trial plan. A run takes one of each,
in order, and every step is timed; all problems are judged at once, and it takes some dozens of runs, however many
problems there are. The runs with one choice follow each other, and the first does not count: what the others find in
the caches is what the same choice left there.

A time in place is a sample of a few runs on a machine that has other things to do; one alone is the least of many, but
not the whole truth. So the two are put together, each weighed by how sure it is.
"""
from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from engines.backends.base import Progress
from engines.backends.llvm.runtime.execution import Arena, LoadedPlan, call_of
from engines.backends.llvm.runtime.segments import Segment
from engines.backends.llvm.tuning.candidates import Candidate, Choice, packing
from engines.backends.llvm.tuning.tuner import Estimate, Tuner
from engines.lowering.problems.problem import Problem
from engines.machine.clock import thread_seconds
from engines.plan.plan import Buffer, Plan
from engines.version import COMPILER_VERSION

LEAST_SHARE = 0.002         # of all kernels' time: less is not worth a trial
MOST_RUN = 1.0              # seconds of the network: of what runs longer, times alone tell enough
MOST_RIVALS = (2, 6)        # of a problem: where a run takes seconds, and else
MOST_BYTES = 1 << 30        # of constants packed as no plan will have them
RUNS = 2                    # with one choice after the other, of which the first does not count
ROUNDS = (3, 200)           # of all choices: at least, at most
LEAST_ERROR = 0.003         # of a time in place: two copies of one network differ by so much
REFINEMENTS = 3             # of the estimate of how fast each run was
SECONDS = 4.0               # that the rounds may take, where they are more than the least

Choices = Mapping[Problem, Sequence[Choice]]
Run = dict[int, float]      # seconds of the steps of one run, by their numbers


class Trial(NamedTuple):
    """A plan in which every call has its rivals as steps that follow each other."""
    plan: Plan
    rivals: Sequence[range]         # the steps of each call
    problems: Sequence[Problem | None]      # and its problem; None: the reference runs it


def settled(choices: Mapping[Problem, Choice], uses: Sequence[Problem], tuner: Tuner, items: int,
            make_trial: Callable[[Choices], Trial], progress: Progress | None = None) -> dict[Problem, Choice]:
    """The choices, each with its time inside the network; of rivals those that are the fastest there.

    uses: the network, as the problems of its calls in order. items: of the batch that it is timed with. Times go into
    the tuner's cache, by network: another build of it is a lookup.
    """
    if sum(choices[problem].time_us for problem in uses) * items > MOST_RUN * 1e6:
        return dict(choices)
    rivals = _rivals(choices, uses, tuner, items)
    key = _Key(tuner, uses, items)
    known = {problem: {one: tuner.cache.get(key(one)) for one in some} for problem, some in rivals.items()}
    if any(None in times.values() for times in known.values()):
        trial = make_trial(tuner.trials(rivals, progress))
        measured = times_in_place(trial, items, progress)
        for problem, some in rivals.items():
            calls = [steps for steps, its in zip(trial.rivals, trial.problems, strict=True) if its == problem]
            times = [_mean([measured[steps[rank]] for steps in calls]) for rank in range(len(some))]
            taken = times[0]
            for one, time in zip(some, times, strict=True):
                in_place = Estimate(time.value / taken.value, math.hypot(time.error, taken.error) / taken.value)
                known[problem][one] = us = taken.value * in_place.with_(tuner.alone(problem, one)).value
                tuner.cache.put(key(one), us)
    return tuner.settle({problem: {one: us for one, us in times.items() if us is not None}
                         for problem, times in known.items()})


def _rivals(choices: Mapping[Problem, Choice], uses: Sequence[Problem], tuner: Tuner,
            items: int) -> dict[Problem, list[Candidate]]:
    """Of each problem; only the choice, where its share of the time is not worth more."""
    times = {problem: choice.time_us * uses.count(problem) for problem, choice in choices.items()}
    whole = sum(times.values())
    most = int(SECONDS / max(whole * items / 1e6 * RUNS * ROUNDS[0], 1e-9))
    most = min(max(most, MOST_RIVALS[0]), MOST_RIVALS[1])
    rivals, room = {}, MOST_BYTES
    for problem, us in times.items():
        rivals[problem] = list[Candidate]()
        packed = {packing(choices[problem])}
        for one in tuner.rivals(problem, most if us >= LEAST_SHARE * whole else 1):
            more = 0 if packing(one) in packed else uses.count(problem) * tuner.constant_bytes(one)
            if more <= room:
                rivals[problem].append(one)
                packed.add(packing(one))
                room -= more
    return rivals


def _mean(times: Sequence[Estimate]) -> Estimate:
    return Estimate(statistics.fmean(time.value for time in times),
                    math.hypot(*(time.error for time in times)) / len(times))


class _Key:
    """Names a candidate's time inside one network."""

    def __init__(self, tuner: Tuner, uses: Sequence[Problem], items: int) -> None:
        network = hashlib.sha256(repr(uses).encode()).hexdigest()
        self._tuner, self._context = tuner, repr((COMPILER_VERSION, "in place", items, network))

    def __call__(self, candidate: Candidate) -> str:
        text = self._context + self._tuner.digest(candidate)
        return f"{self._tuner.processor}/{hashlib.sha256(text.encode()).hexdigest()}"


def trial_buffers(buffers: Sequence[Buffer], rivals: Sequence[range]) -> tuple[Buffer, ...]:
    """Buffers whose lifetimes count calls, counting the steps that stand for each call instead.

    A tensor that no call touches, such as the states of a layer of which only the last is wanted, lives at the end.
    """
    end = rivals[-1].stop if rivals else 0
    starts, stops = [*(steps.start for steps in rivals), end], [*(steps.stop - 1 for steps in rivals), end]

    def alive(buffer: Buffer) -> Buffer:
        first = starts[buffer.first] if buffer.first >= 0 else buffer.first
        return replace(buffer, first=first, last=stops[buffer.last])
    return tuple(map(alive, buffers))


def times_in_place(trial: Trial, items: int, progress: Progress | None = None) -> list[Estimate]:
    """Microseconds of each step inside the network; 0 for one that the reference runs."""
    program = LoadedPlan(trial.plan)
    arena = Arena(program, program.shared_layout)
    arena.prepare(items)
    native = [steps for steps, problem in zip(trial.rivals, trial.problems, strict=True) if problem is not None]
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
    run(0)      # touches the memory
    rounds = int(SECONDS / max(sum(run(0).values()) * RUNS * ways, 1e-9))
    rounds = min(max(rounds, ROUNDS[0]), ROUNDS[1])
    counted: list[Run] = []
    for done in range(rounds):
        for choice in range(ways):
            counted += [run(choice) for _ in range(RUNS)][1:]
        if progress:
            progress(done + 1, rounds, "timed in place")
    seconds = typical(counted)
    nothing = Estimate(0.0, 0.0)
    return [Estimate(1e6 * found.value, 1e6 * found.error) for steps in trial.rivals for step in steps
            for found in (seconds.get(step, nothing),)]


def typical(runs: Sequence[Run]) -> dict[int, Estimate]:
    """What each step takes in a run of median speed.

    A core's clock, and what its neighbours leave of the caches, make one run slower than the next, and with it all of
    its steps: time = speed of the run * cost of the step. So each run's speed is taken out, as the median over its
    steps of how far they are from their own costs.
    """
    cost = _medians(runs, [1.0] * len(runs))
    for _ in range(REFINEMENTS):
        # of a run during which the clock stood still, no speed is known
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
    """With the standard error of a median, by the median distance from it, as if they were normally distributed."""
    middle = max(statistics.median(seconds), 1e-9)
    distance = statistics.median(abs(value - middle) for value in seconds)
    return Estimate(middle, max(1.25 * 1.48 * distance / math.sqrt(len(seconds)), LEAST_ERROR * middle))
