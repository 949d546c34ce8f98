"""Profile a plan on this machine: time of every step, compared with the measured peaks of the core."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from infer_server.cli.common import Cell, table
from infer_server.engines.backends import backend_named
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.plan.plan import Step
from infer_server.engines.plan.roofline import Peaks, TimeBound, bound
from infer_server.engines.runtime.contexts import AnyContext
from infer_server.engines.runtime.engine import Engine

SECONDS = 1.0                       # time for whole runs, and again for passes step by step, within these limits:
MIN_PASSES, MAX_PASSES = 5, 200


@dataclass(frozen=True)
class Line:
    """Step with its time, the minimum of all passes, and its bound; both for a whole batch on one thread."""
    step: Step
    seconds: float
    bound: TimeBound
    batch: int

    @property
    def macs(self) -> int:
        return self._items * self.step.macs

    @property
    def activation_bytes(self) -> int:
        return self._items * (self.step.bytes - self.step.constant_bytes)

    @property
    def _items(self) -> int:
        return self.batch if self.step.rows_per_item else 1

    @property
    def macs_per_second(self) -> float:
        return self.macs / self.seconds if self.seconds else 0.0

    @property
    def over(self) -> float:
        """Seconds above the bound."""
        return max(self.seconds - self.bound.seconds, 0.0)


@dataclass(frozen=True)
class Profile:
    """Profile of a plan."""
    lines: tuple[Line, ...]         # in the order of execution
    run: float                      # seconds of the whole network, the minimum of all runs: CPU time for one thread,
                                    # wall time for several threads or a GPU
    peaks: Peaks
    batch: int

    @property
    def seconds(self) -> float:
        """Sum of the times of all steps."""
        return sum(line.seconds for line in self.lines)

    @property
    def percent_of_peak(self) -> float:
        """Percentage of one core's peak arithmetic throughput over the whole run."""
        return _percent(sum(line.bound.compute for line in self.lines), self.run)


def profile(engine: Engine, context: AnyContext, batch: int) -> Profile:
    """Run the network on the contents of its inputs, as a whole and step by step, and measure the machine's peaks.

    The peaks of the CPU need the compiler (llvmlite).

    Parameters
    ----------
    engine : Engine
    context : context of the engine
        Context whose inputs are set.
    batch : int
        Number of items.

    Raises
    ------
    InputError
        The plan is a program, which has no steps of its own.
    """
    context.profile(batch, repeats=1)               # fails soon for a program
    backend = backend_named(engine.plan.machine.backend)
    peaks = backend.peaks()
    clock = thread_seconds if engine.threads == 1 and peaks.is_core else time.perf_counter

    def run_once() -> float:
        begin = clock()
        context.execute(batch)
        return clock() - begin

    passes = min(max(int(SECONDS / run_once()), MIN_PASSES), MAX_PASSES)
    run = min(run_once() for _ in range(passes))
    times = context.profile(batch, repeats=passes)
    peaks = peaks.or_better(backend.peaks())        # the clock frequency may change within a second
    lines = (Line(step, seconds, bound(step, context.plan, batch, peaks), batch) for step, seconds in times)
    return Profile(tuple(lines), run, peaks, batch)


# ---- text
def header(profile: Profile) -> str:
    """Return the peaks and the times of the whole network as text."""
    peaks = profile.peaks
    macs = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in peaks.macs_per_second.items())
    reads = ", ".join(f"{level.name} {level.bytes_per_second / 1e9:.0f}" for level in peaks.levels)
    clock = f", at {peaks.hertz / 1e9:.2f} GHz" if peaks.hertz else ""
    bounds = sum(line.bound.seconds for line in profile.lines)
    of = (f"one core of {peaks.processor} ({peaks.target}), measured now{clock}" if peaks.is_core else
          f"{peaks.processor} ({peaks.target}), as its data sheet has it")
    return (f"{of}: G MAC/s in {macs}; GB/s read from {reads}\n"
            f"batch {profile.batch}: {profile.run * 1e3:.3f} ms a run, {profile.percent_of_peak:.1f} % of the "
            f"arithmetic's peak; each step alone{' on one thread' * peaks.is_core} {profile.seconds * 1e3:.3f} ms in "
            f"all, bound {bounds * 1e3:.3f} ms")


def slowest(profile: Profile) -> str:
    """Return run-engine's table: slowest steps first, with their share of the peak and of the total time."""
    rows: list[tuple[Cell, ...]] = [
        (line.step.name, line.step.precision, line.seconds * 1e6, _percent(line.seconds, profile.seconds),
         line.macs_per_second / 1e9, of_peak(line, profile.peaks), line.step.tactic)
        for line in sorted(profile.lines, key=lambda line: -line.seconds)]
    return table(rows, ("kernel", "precision", "us", "% of all", "G MAC/s", "% of peak", "tactic"))


def roofline(profile: Profile) -> str:
    """Return inspect-engine's table: largest possible gains first, with the bound of each step."""
    rows: list[tuple[Cell, ...]] = [
        (line.step.name, line.over * 1e6, line.seconds * 1e6, line.bound.seconds * 1e6, line.bound.limit,
         line.macs / 1e6, line.activation_bytes / 1e3, line.step.constant_bytes / 1e3, line.step.tactic,
         " + ".join(line.step.fuses) or "-") for line in sorted(profile.lines, key=lambda line: -line.over)]
    return table(rows, ("kernel", "us over", "us", "bound us", "bound by", "M MAC", "KB moved", "KB weights", "tactic",
                        "fuses"))


def of_peak(line: Line, peaks: Peaks) -> float:
    """Return the percentage of the peak of the step's precision; 0 for a step without multiplications."""
    return _percent(line.macs_per_second, peaks.macs_per_second.get(line.step.precision, math.inf))


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


# ---- JSON
def as_json(profile: Profile) -> dict[str, Any]:
    """Return the profile as a JSON object; seconds, bytes and MACs are those of the whole batch."""
    peaks = profile.peaks
    return {"batch": profile.batch, "run_seconds": profile.run, "percent_of_peak": profile.percent_of_peak,
            "seconds": profile.seconds,
            "peaks": {"processor": peaks.processor, "target": peaks.target, "hertz": peaks.hertz,
                      "macs_per_second": dict(peaks.macs_per_second),
                      "bytes_per_second": {level.name: level.bytes_per_second for level in peaks.levels}},
            "kernels": [_line_json(line, peaks) for line in profile.lines]}


def _line_json(line: Line, peaks: Peaks) -> dict[str, Any]:
    step = line.step
    return {"name": step.name, "fuses": list(step.fuses), "precision": step.precision, "tactic": step.tactic,
            "seconds": line.seconds, "bound_seconds": line.bound.seconds, "bound_by": line.bound.limit,
            "macs": line.macs, "activation_bytes": line.activation_bytes,
            "constant_bytes": step.constant_bytes, "percent_of_peak": of_peak(line, peaks)}
