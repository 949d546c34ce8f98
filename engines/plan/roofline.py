"""The roofline of a step: what it cannot be faster than, by a machine's measured peaks.

    bound = max(MACs / peak MACs a second, sum over what it moves of bytes / bytes a second)

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures" (CACM
2009), with a roof for each cache. Where a byte is read from follows from who touched it last: a step's activations were
just written, so they lie in the smallest cache that holds them; its weights were last read one inference ago, so they
lie in the smallest that holds the weights of the whole network. Writes count as reads. The MACs are those of the
definition: a Winograd convolution, which makes do with fewer, may be faster than its bound.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engines.plan.plan import Plan, Step


@dataclass(frozen=True)
class Level:
    """A cache, or (of infinitely many bytes) main memory."""
    name: str
    bytes: float
    bytes_per_second: float         # of one core that reads


@dataclass(frozen=True)
class Peaks:
    """What one core does at best, or a GPU."""
    processor: str
    target: str                                 # the instruction set that the kernels were made for
    macs_per_second: Mapping[str, float]        # by arithmetic: "int8", "fp32", ...
    levels: tuple[Level, ...]                   # the smallest first; the last one holds everything
    hertz: float | None = None                  # the core's clock meanwhile, where it is measured
    is_core: bool = True                        # ... by whose own time a run is measured; a GPU is waited for

    def or_better(self, other: Peaks) -> Peaks:
        """The higher of each figure: the same core's, at another time."""
        macs = {precision: max(rate, other.macs_per_second[precision])
                for precision, rate in self.macs_per_second.items()}
        levels = tuple(max(pair, key=lambda level: level.bytes_per_second)
                       for pair in zip(self.levels, other.levels, strict=True))
        hertz = max(filter(None, (self.hertz, other.hertz)), default=None)
        return replace(self, macs_per_second=macs, levels=levels, hertz=hertz)

    def level(self, size: float) -> Level:
        """The smallest level that holds so many bytes."""
        return next(level for level in self.levels if size <= level.bytes)


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, and what of."""
    compute: float
    memory: float
    limit: str                  # the arithmetic, or the level that most bytes' time goes to

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def bound(step: Step, plan: Plan, batch: int, peaks: Peaks) -> Bound:
    """The bound of one run of a step on `batch` items, by one thread; all 0 for a fallback, which has no cost model."""
    items = batch if step.rows_per_item else 1
    compute = items * step.macs / peaks.macs_per_second.get(step.precision, math.inf)
    activations, constants = items * (step.bytes - step.constant_bytes), _constants_read(step, items)
    near = peaks.level(activations)
    far = peaks.level(sum(_constants_read(other, items) for other in plan.machine.steps))
    near_s, far_s = activations / near.bytes_per_second, constants / far.bytes_per_second
    memory = near_s + far_s
    return Bound(compute, memory, step.precision if compute >= memory else (near if near_s >= far_s else far).name)


def _constants_read(step: Step, items: int) -> int:
    """All of them, but of a table whose rows are only looked up: no more than comes out of it."""
    return step.constant_bytes if step.macs else min(step.constant_bytes, items * (step.bytes - step.constant_bytes))
