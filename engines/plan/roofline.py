"""Roofline model: a lower bound of a step's time from the measured peaks of a machine.

    bound = max(MACs / peak MACs per second, sum over operands of bytes / bytes per second)

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures" (CACM
2009), with a roof for each cache level. Activations were just written, so they are read from the smallest cache that
holds them. Weights were last read one inference ago, so they are read from the smallest level that holds the weights of
the whole network. Writes count as reads. MACs are those of the operator's definition: a Winograd convolution needs
fewer and may be faster than its bound.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from infer_server.engines.plan.plan import Plan, Step


@dataclass(frozen=True)
class Level:
    """Cache level, or main memory with bytes = inf."""
    name: str
    bytes: float
    bytes_per_second: float         # read by one core


@dataclass(frozen=True)
class Peaks:
    """Measured peak rates of one core, or of a GPU."""
    processor: str
    target: str                                 # instruction set that the kernels were compiled for
    macs_per_second: Mapping[str, float]        # by precision: "int8", "fp32", ...
    levels: tuple[Level, ...]                   # the smallest first; the last one is unlimited
    hertz: float | None = None                  # clock of the core during the measurement, if known
    is_core: bool = True                        # a core, timed by its CPU time; False: a GPU, timed by the wall clock

    def or_better(self, other: Peaks) -> Peaks:
        """Return the higher of each rate of two measurements of one processor."""
        macs = {precision: max(rate, other.macs_per_second[precision])
                for precision, rate in self.macs_per_second.items()}
        levels = tuple(max(pair, key=lambda level: level.bytes_per_second)
                       for pair in zip(self.levels, other.levels, strict=True))
        hertz = max(filter(None, (self.hertz, other.hertz)), default=None)
        return replace(self, macs_per_second=macs, levels=levels, hertz=hertz)

    def level(self, size: float) -> Level:
        """Return the smallest level that holds `size` bytes."""
        return next(level for level in self.levels if size <= level.bytes)


@dataclass(frozen=True)
class TimeBound:
    """Lower bounds of a step's time in seconds, by arithmetic and by memory traffic."""
    compute: float
    memory: float
    limit: str                  # the precision if compute-bound, else the level that takes most of the time

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def bound(step: Step, plan: Plan, batch: int, peaks: Peaks) -> TimeBound:
    """Return the bound of one run of a step on `batch` items by one thread.

    A step without MACs and bytes, such as a fallback, has bound 0.
    """
    items = batch if step.rows_per_item else 1
    compute = items * step.macs / peaks.macs_per_second.get(step.precision, math.inf)
    activations, constants = items * (step.bytes - step.constant_bytes), _constants_read(step, items)
    near = peaks.level(activations)
    far = peaks.level(sum(_constants_read(other, items) for other in plan.machine.steps))
    near_s, far_s = activations / near.bytes_per_second, constants / far.bytes_per_second
    memory = near_s + far_s
    return TimeBound(compute, memory, step.precision if compute >= memory else (near if near_s >= far_s else far).name)


def _constants_read(step: Step, items: int) -> int:
    """Return the bytes of constants read: all, but of a lookup table (no MACs) at most the bytes of the result."""
    return step.constant_bytes if step.macs else min(step.constant_bytes, items * (step.bytes - step.constant_bytes))


# ---- recorded by a build for GPUs
def expected(plan: Plan) -> str:
    """Return the expected throughput and latency as a line of text, or "" if the build recorded none."""
    found = plan.machine.cpu.get("expected")
    if not found:
        return ""
    items, seconds = found["items"], found["seconds"]
    how = "as its kernels were timed there" if found["timed"] else "by the cost model: nothing was timed"
    return (f"expected on {plan.machine.cpu['model']}: {items / seconds:,.0f} items/s at batch {items} "
            f"({seconds * 1e3:.3g} ms), {how}")


def expected_us(plan: Plan) -> Sequence[float]:
    """Return the cost model's time of each step for one item in microseconds; () if the build recorded none."""
    found: Sequence[float] = plan.machine.cpu.get("expected", {}).get("steps_us", ())
    return found
