"""A profile of a plan on this machine: every step's time, beside the peaks of the core that it ran on."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from engines.backends import backend_named
from engines.errors import InputError
from engines.machine.clock import thread_seconds
from engines.plan.plan import Step
from engines.plan.roofline import Bound, Peaks, bound
from engines.runtime.open_context import AnyContext
from engines.runtime.program_engine import AnyEngine, ProgramEngine
from infer_server.cli.common import Cell, table

SECONDS = 1.0                       # of runs, and again of passes step by step, as far as they are within:
FEWEST_PASSES, MOST_PASSES = 5, 200


@dataclass(frozen=True)
class Line:
    """A step, its time (the least of all passes) and its bound, both of one run of the whole batch on one thread."""
    step: Step
    seconds: float
    bound: Bound
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
        """Seconds that it takes beyond its bound."""
        return max(self.seconds - self.bound.seconds, 0.0)


@dataclass(frozen=True)
class Profile:
    lines: tuple[Line, ...]         # in the order of execution
    run: float                      # seconds of the whole network, the least of all runs: CPU time of one thread, or of
                                    # several, and of a GPU, the time on the wall
    peaks: Peaks
    batch: int

    @property
    def seconds(self) -> float:
        """Of all steps, one by one."""
        return sum(line.seconds for line in self.lines)

    @property
    def percent_of_peak(self) -> float:
        """Of one core's arithmetic, over the whole run."""
        return _percent(sum(line.bound.compute for line in self.lines), self.run)


def profile(engine: AnyEngine, context: AnyContext, batch: int) -> Profile:
    """Runs the network on what its inputs hold, step by step, between two measurements of the machine's peaks (for a
    plan of compiled code they need the compiler: llvmlite). Raises InputError: a program has no steps of its own."""
    if isinstance(engine, ProgramEngine):
        raise InputError(f"{engine.name}: --profile is of plans that are one graph, and this is a program")
    backend = backend_named(engine.plan.machine.backend)
    peaks = backend.peaks()
    clock = thread_seconds if engine.threads == 1 and peaks.is_core else time.perf_counter

    def run_once() -> float:
        begin = clock()
        context.execute(batch)
        return clock() - begin

    passes = min(max(int(SECONDS / run_once()), FEWEST_PASSES), MOST_PASSES)
    run = min(run_once() for _ in range(passes))
    times = context.profile(batch, repeats=passes)
    peaks = peaks.or_better(backend.peaks())        # a core's clock moves within a second
    lines = (Line(step, seconds, bound(step, context.plan, batch, peaks), batch) for step, seconds in times)
    return Profile(tuple(lines), run, peaks, batch)


# ---- as people read it
def header(found: Profile) -> str:
    """The peaks that the rest is measured by."""
    peaks = found.peaks
    macs = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in peaks.macs_per_second.items())
    reads = ", ".join(f"{level.name} {level.bytes_per_second / 1e9:.0f}" for level in peaks.levels)
    clock = f", at {peaks.hertz / 1e9:.2f} GHz" if peaks.hertz else ""
    bounds = sum(line.bound.seconds for line in found.lines)
    of = (f"one core of {peaks.processor} ({peaks.target}), measured now{clock}" if peaks.is_core else
          f"{peaks.processor} ({peaks.target}), as its data sheet has it")
    return (f"{of}: G MAC/s in {macs}; GB/s read from {reads}\n"
            f"batch {found.batch}: {found.run * 1e3:.3f} ms a run, {found.percent_of_peak:.1f} % of the arithmetic's "
            f"peak; each step alone{' on one thread' * peaks.is_core} {found.seconds * 1e3:.3f} ms in all, "
            f"bound {bounds * 1e3:.3f} ms")


def slowest(found: Profile) -> str:
    """run-engine's table: the slowest first, with their share of the arithmetic's peak and of the whole time."""
    rows: list[tuple[Cell, ...]] = [
        (line.step.name, line.step.precision, line.seconds * 1e6, _percent(line.seconds, found.seconds),
         line.macs_per_second / 1e9, of_peak(line, found.peaks), line.step.tactic)
        for line in sorted(found.lines, key=lambda line: -line.seconds)]
    return table(rows, ("kernel", "precision", "us", "% of all", "G MAC/s", "% of peak", "tactic"))


def roofline(found: Profile) -> str:
    """inspect-engine's table: what there is most to gain from first, with what bounds each step."""
    rows: list[tuple[Cell, ...]] = [
        (line.step.name, line.over * 1e6, line.seconds * 1e6, line.bound.seconds * 1e6, line.bound.limit,
         line.macs / 1e6, line.activation_bytes / 1e3, line.step.constant_bytes / 1e3, line.step.tactic,
         " + ".join(line.step.fuses) or "-") for line in sorted(found.lines, key=lambda line: -line.over)]
    return table(rows, ("kernel", "us over", "us", "bound us", "bound by", "M MAC", "KB moved", "KB weights", "tactic",
                        "fuses"))


def of_peak(line: Line, peaks: Peaks) -> float:
    """Percent of the peak of the step's arithmetic; 0 where nothing is multiplied."""
    return _percent(line.macs_per_second, peaks.macs_per_second.get(line.step.precision, math.inf))


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


# ---- as programs read it
def as_json(found: Profile) -> dict[str, Any]:
    """All of it; seconds, bytes and MACs are of the whole batch."""
    peaks = found.peaks
    return {"batch": found.batch, "run_seconds": found.run, "percent_of_peak": found.percent_of_peak,
            "seconds": found.seconds,
            "peaks": {"processor": peaks.processor, "target": peaks.target, "hertz": peaks.hertz,
                      "macs_per_second": dict(peaks.macs_per_second),
                      "bytes_per_second": {level.name: level.bytes_per_second for level in peaks.levels}},
            "kernels": [_line_json(line, peaks) for line in found.lines]}


def _line_json(line: Line, peaks: Peaks) -> dict[str, Any]:
    step = line.step
    return {"name": step.name, "fuses": list(step.fuses), "precision": step.precision, "tactic": step.tactic,
            "seconds": line.seconds, "bound_seconds": line.bound.seconds, "bound_by": line.bound.limit,
            "macs": line.macs, "activation_bytes": line.activation_bytes,
            "constant_bytes": step.constant_bytes, "percent_of_peak": of_peak(line, peaks)}
