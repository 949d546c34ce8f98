"""Accuracy of the cost model: every candidate for every kernel of a plan is timed alone on this machine.

    python -m benchmarks.costs resnet50.plan minilm.plan

Reports for each plan the slowdown if each kernel is chosen by cost instead of time, and for each kernel the ratio of
time to cost in cycles of the measured clock: its spread misleads the choice among tactics, its median the choice
between kernels. Times are of one item with weights in the cache; candidates slower than twice the fastest are omitted.
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles

from benchmarks.reports.document import Cell, machine, markdown_table
from infer_server.engines.backends.llvm.codegen.isa import Isa, best_isa
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.backends.llvm.tuning.peaks import measure_peaks
from infer_server.engines.backends.llvm.tuning.tuner import Tuner
from infer_server.engines.lowering.buffers import write_borders
from infer_server.engines.lowering.lower import lower
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import graph_of

FAR = 2.0       # candidates slower than this multiple of the fastest are left out of the ratios
Times = Mapping[Candidate, float]       # microseconds


def surveyed(path: Path, isa: Isa) -> tuple[Mapping[Problem, Times], Counter[Problem]]:
    """Time all candidates for each problem of a plan; return the times, and the number of steps with each problem."""
    plan = read_plan(path)
    calls = write_borders(lower(graph_of(plan), isa.lanes), plan.max_batch).compiled
    tuner = Tuner(isa, TimingCache(), detect().model)
    return tuner.survey({call.problem: call.constants for call in calls}), Counter(call.problem for call in calls)


def loss(isa: Isa, by_problem: Mapping[Problem, Times], uses: Mapping[Problem, int]) -> float:
    """Return the relative slowdown of choosing candidates by cost instead of time."""
    chosen = sum(uses[problem] * times[min(times, key=lambda one: one.kernel.cost(isa, one.tactic))]
                 for problem, times in by_problem.items())
    return chosen / sum(uses[problem] * min(times.values()) for problem, times in by_problem.items()) - 1


def ratios(isa: Isa, surveys: Sequence[Mapping[Problem, Times]], hertz: float) -> dict[str, list[float]]:
    """Return the ratios of time to cost by kernel, of candidates that are not far from the fastest."""
    of_kernels = defaultdict(list)
    for times in (times for problems in surveys for times in problems.values()):
        for one, us in times.items():
            if (cost := one.kernel.cost(isa, one.tactic)) and us <= FAR * min(times.values()):
                of_kernels[type(one.kernel).__name__].append(us * 1e-6 * hertz / cost)
    return of_kernels


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.costs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    isa, plans = best_isa(detect().features), parser.parse_args(arguments).plans
    surveys = {path: surveyed(path, isa) for path in plans}
    hertz = measure_peaks().hertz or 1.0
    losses = [(path.stem, f"{100 * loss(isa, times, uses):.1f} %") for path, (times, uses) in surveys.items()]
    rows: list[list[Cell]] = []
    for kernel, some in sorted(ratios(isa, [times for times, _ in surveys.values()], hertz).items()):
        low, *_, middle, _, _, _, high = quantiles(some, n=10, method="inclusive") if len(some) > 1 else some * 9
        rows.append([kernel, len(some), *(f"{ratio:.2f}" for ratio in (low, middle, high))])
    print(f"On {machine()}, kernels for {isa.name}, a clock of {hertz / 1e9:.2f} GHz.\n")
    print(markdown_table(("plan", "lost by choosing by cost"), losses), end="\n\n")
    print(markdown_table(("kernel", "candidates", "time over cost: tenth", "median", "nine tenths"), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
