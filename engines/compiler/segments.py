"""The segments of a program as models of their own: compiled for what they are fed, and calibrated by what they were
fed while the program ran on the data.

    SegmentMaker(plan.program).plan(part, feed)     # of a segment that was not met at the build, or not with such types
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engines.compiler.builder import BuildConfig, Builder
from engines.compiler.specialise import compiled
from engines.compiler.subject import KEPT, Subject, settled
from engines.errors import CalibrationError, PlanTargetError
from engines.frontend.onnx_file import OnnxModel
from engines.ir.graph import Array, TensorType
from engines.passes.quantization.given import is_quantised
from engines.plan.plan import IoTensor, Plan, ProgramPart, SegmentPart
from engines.runtime.program_engine import signature_of, signature_of_plan

MOST_FEEDS = 64         # of a segment that are kept: a body in a Loop has one for every step
Feed = Mapping[str, Array]


class SegmentMaker:
    """Compiles segments of a program for what they are fed."""

    def __init__(self, part: ProgramPart, timing: bool = False, precision: str = "") -> None:
        """precision: another one than the program's, for segments that are calibrated."""
        self._part, options = part, part.options
        self._config = BuildConfig(precision or options.precision, None, None, options.target,
                                   keep_float=options.keep_float, timing=timing, threads=options.threads)

    def plan(self, part: SegmentPart, feed: Mapping[str, Array]) -> Plan:
        """The plan of a segment, with open extents, and specialised for this feed. Raises EngineError."""
        return compiled(self.subject(part, feed))

    def in_float(self) -> SegmentMaker:
        """For segments in which there is nothing to quantise."""
        return SegmentMaker(self._part, self._config.timing)

    def subject(self, part: SegmentPart, feed: Mapping[str, Array]) -> Subject:
        """The segment as a model, whose usual extents are those of the feed. Raises EngineError."""
        if not part.model:
            raise PlanTargetError(f"{part.name}: stripped (--strip), so it cannot be compiled for what it is fed now")
        source = OnnxModel.from_document(part.name, part.model, {name: self._part.weights[name] for name in part.reads})
        types = {name: TensorType(array.dtype, tuple(f"{name}.{axis}" for axis in range(array.ndim)))
                 for name, array in feed.items()}
        usual = {f"{name}.{axis}": extent for name, array in feed.items() for axis, extent in enumerate(array.shape)}
        return settled(Subject(Builder(self._config), source.with_inputs(types), types, usual), feed)


@dataclass(frozen=True)
class Watched:
    """How the segments of a program are calibrated. items: the data, given the program's inputs; plan: makes that of a
    segment, given what it was fed."""
    items: Callable[[Sequence[IoTensor]], Sequence[Feed]]
    plan: Callable[[Subject, Sequence[Feed]], Plan]


@dataclass
class _Sample:
    """Every n-th of what comes: n grows, so that there are never too many."""
    feeds: list[Feed] = field(default_factory=list)
    every: int = 1
    met: int = 0

    def add(self, feed: Feed) -> None:
        if self.met % self.every == 0:
            self.feeds.append({name: np.array(array) for name, array in feed.items()})
        if len(self.feeds) > MOST_FEEDS:
            self.feeds, self.every = self.feeds[::2], 2 * self.every
        self.met += 1

    def usual(self) -> list[Feed]:
        """Those of the shapes that came most often, for each takes an engine of its own."""
        shapes = [tuple(array.shape for array in feed.values()) for feed in self.feeds]
        often = {shape for shape, _ in Counter(shapes).most_common(KEPT)}
        return [feed for feed, shape in zip(self.feeds, shapes, strict=True) if shape in often]


class FedSegments:
    """What segments are fed while a program runs; by segment, and by the types of its inputs."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, tuple[Any, ...]], _Sample] = {}

    def __call__(self, part: SegmentPart, feed: Feed) -> None:
        if all(array.size for array in feed.values()):
            self._samples.setdefault((part.name, signature_of(feed)), _Sample()).add(feed)

    def of(self, part: SegmentPart) -> list[list[Feed]]:
        """For each set of types the feeds that stand for all that were met."""
        return [sample.usual() for (name, _), sample in self._samples.items() if name == part.name]


def calibrated(segments: Sequence[SegmentPart], maker: SegmentMaker, fed: FedSegments, watched: Watched,
               say: Callable[[str], None]) -> tuple[SegmentPart, ...]:
    """The segments with plans for what they were fed, by ranges of it where there is something to quantise."""
    def of(part: SegmentPart) -> SegmentPart:
        plans = {signature_of_plan(plan): plan for plan in part.plans}
        for feeds in fed.of(part):
            subject = maker.subject(part, feeds[0])
            try:
                if is_quantised(subject.graph):
                    plan = compiled(subject)
                elif subject.builder.edges(subject.graph):
                    plan = watched.plan(subject, feeds)
                else:
                    plan = maker.in_float().plan(part, feeds[0])
            except CalibrationError as error:
                say(f"{part.name} stays in float: {error}")
                plan = maker.in_float().plan(part, feeds[0])
            plans[signature_of_plan(plan)] = plan
        return replace(part, plans=tuple(plans.values()))

    return tuple(map(of, segments))
