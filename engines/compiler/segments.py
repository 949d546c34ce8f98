"""Compilation and calibration of the segments of a program as models of their own.

Segments are compiled for the inputs of a run, and calibrated by the inputs recorded while the program ran on the data.

    SegmentMaker(plan.program).plan(part, feed)     # for a segment or input types that the build has not run
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.specialise import compiled
from infer_server.engines.compiler.subject import KEPT, Subject, settled
from infer_server.engines.errors import CalibrationError, PlanTargetError
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.ir.graph import Array, TensorType
from infer_server.engines.passes.quantization.qdq import is_quantised
from infer_server.engines.plan.plan import IoTensor, Plan, ProgramPart, SegmentPart
from infer_server.engines.runtime.program import signature_of, signature_of_plan

MOST_FEEDS = 64         # recorded feeds of a segment: the body of a Loop has one for every step
Feed = Mapping[str, Array]


class SegmentMaker:
    """Compiler of the segments of a program for given inputs."""

    def __init__(self, part: ProgramPart, timing: bool = False, precision: str = "") -> None:
        """Take the program's options. precision: overrides the program's, for segments that are calibrated."""
        self._part, options = part, part.options
        self._config = BuildConfig(precision or options.precision, None, None, options.target,
                                   keep_float=options.keep_float, timing=timing, threads=options.threads,
                                   float_type=options.float_type, keep_fp32=options.keep_fp32)

    def plan(self, part: SegmentPart, feed: Mapping[str, Array]) -> Plan:
        """Return the plan of a segment with open extents, specialised for this feed. Raises EngineError."""
        return compiled(self.subject(part, feed))

    def in_float(self) -> SegmentMaker:
        """Return a compiler in the program's float precision, for segments with nothing to quantise."""
        return SegmentMaker(self._part, self._config.timing)

    def subject(self, part: SegmentPart, feed: Mapping[str, Array]) -> Subject:
        """Return a segment as a model whose usual extents are those of the feed. Raises EngineError."""
        if not part.model:
            raise PlanTargetError(f"{part.name}: stripped (--strip), so it cannot be compiled for what it is fed now")
        source = OnnxModel.from_document(part.name, part.model, {name: self._part.weights[name] for name in part.reads})
        types = {name: TensorType(array.dtype, tuple(f"{name}.{axis}" for axis in range(array.ndim)))
                 for name, array in feed.items()}
        usual = {f"{name}.{axis}": extent for name, array in feed.items() for axis, extent in enumerate(array.shape)}
        return settled(Subject(Builder(self._config), source.with_inputs(types), types, usual), feed)


@dataclass(frozen=True)
class Watched:
    """Functions that calibrate the segments of a program.

    items: returns the data for the program's inputs. plan: returns the plan of a segment, given its recorded feeds.
    """
    items: Callable[[Sequence[IoTensor]], Sequence[Feed]]
    plan: Callable[[Subject, Sequence[Feed]], Plan]


@dataclass
class _Sample:
    """Bounded sample of a segment's feeds: every n-th one, where n doubles when there are too many."""
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
        """Return the feeds of the most frequent shapes; their number is limited because each needs an engine."""
        shapes = [tuple(array.shape for array in feed.values()) for feed in self.feeds]
        often = {shape for shape, _ in Counter(shapes).most_common(KEPT)}
        return [feed for feed, shape in zip(self.feeds, shapes, strict=True) if shape in often]


class FedSegments:
    """Recorder of the feeds of segments while a program runs, by segment and types of its inputs."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, tuple[Any, ...]], _Sample] = {}

    def __call__(self, part: SegmentPart, feed: Feed) -> None:
        if all(array.size for array in feed.values()):
            self._samples.setdefault((part.name, signature_of(feed)), _Sample()).add(feed)

    def of(self, part: SegmentPart) -> list[list[Feed]]:
        """Return the sampled feeds of a segment for each combination of input types."""
        return [sample.usual() for (name, _), sample in self._samples.items() if name == part.name]


def calibrated(segments: Sequence[SegmentPart], maker: SegmentMaker, fed: FedSegments, watched: Watched,
               notify: Callable[[str], None]) -> tuple[SegmentPart, ...]:
    """Return the segments with plans for their recorded feeds, calibrated by these if there is something to quantise.

    A segment whose calibration fails stays in float, with a notice.
    """
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
                notify(f"{part.name} stays in float: {error}")
                plan = maker.in_float().plan(part, feeds[0])
            plans[signature_of_plan(plan)] = plan
        return replace(part, plans=tuple(plans.values()))

    return tuple(map(of, segments))
