"""Models that are no single graph: cut, compiled segment by segment while they run once, and written as a plan.

    plan = plan_of(builder, source)
    SegmentMaker(plan).plan(part, feed)         # of a segment that was not met then, or not with such types
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engines.compiler.builder import BuildConfig, Builder
from engines.compiler.specialise import compiled
from engines.compiler.subject import Seen, Subject, read_subject, settled
from engines.errors import CompilerFault, ConfigError, EngineError, PlanTargetError, UnknownValueError
from engines.frontend.cutting.cut import Cut, cut, inputs_of
from engines.frontend.cutting.facts import may_need_cuts
from engines.frontend.extents import likely_extents
from engines.frontend.onnx_file import OnnxModel
from engines.ir.dtypes import dtype_named, memory_dtype
from engines.ir.graph import Array, TensorType
from engines.loading import program_engine
from engines.plan.extents import extents_of
from engines.plan.plan import IoTensor, MachinePart, OpenOptions, Plan, ProgramPart, SegmentPart
from engines.runtime.program_engine import NO_TENSORS, ProgramEngine
from engines.version import COMPILER_VERSION

Say = Callable[[str], None]
LENGTHS = (128, 16, 64, 512, 1, 1024)       # of open extents, one after the other, until the program runs


class SegmentMaker:
    """Compiles segments of a program for what they are fed."""

    def __init__(self, part: ProgramPart, timing: bool = False) -> None:
        """Raises PlanTargetError: the plan is stripped."""
        self._part, options = part, part.options
        self._config = BuildConfig(options.precision, None, None, options.target, keep_float=options.keep_float,
                                   timing=timing, threads=options.threads)

    def plan(self, part: SegmentPart, feed: Mapping[str, Array]) -> Plan:
        """The plan of a segment, with open extents, and specialised for this feed. Raises EngineError."""
        if not part.model:
            raise PlanTargetError(f"{part.name}: stripped (--strip), so it cannot be compiled for what it is fed now")
        source = OnnxModel.from_document(part.name, part.model, {name: self._part.weights[name] for name in part.reads})
        types = {name: TensorType(array.dtype, tuple(f"{name}.{axis}" for axis in range(array.ndim)))
                 for name, array in feed.items()}
        usual = {f"{name}.{axis}": extent for name, array in feed.items() for axis, extent in enumerate(array.shape)}
        return compiled(settled(Subject(Builder(self._config), source.with_inputs(types), types, usual), feed))


def plan_of(builder: Builder, source: OnnxModel, seen: Seen = lambda inputs: None, say: Say = lambda notice: None,
            graph_plan: Callable[[Subject], Plan] = compiled) -> Plan:
    """The plan of a model, as one graph where it can be one, else as a program.

    seen: an item of the data; graph_plan: makes the plan of a graph. Raises EngineError.
    """
    by_host: set[str] = set()
    found = cut(source) if may_need_cuts(source.proto.graph) else None
    while True:
        try:
            if found is None or found.is_whole:
                return graph_plan(read_subject(builder, source, seen))
            if builder.config.pixels or builder.config.profiles:
                raise ConfigError(f"{source.name}: data decide about extents or about what is computed, so it runs as "
                                  "a program, which takes neither --uint8-input nor profiles of shapes")
            return _tried(builder, source, seen, say, found)
        except UnknownValueError as error:      # a node that no segment can have after all is left to the host
            if not error.node or error.node in by_host:
                raise
            builder.forget()
            by_host.add(error.node)
            found = cut(source, by_host)


def _tried(builder: Builder, source: OnnxModel, seen: Seen, say: Say, found: Cut) -> Plan:
    """The plan of a program; its segments are compiled for what they are fed when it runs on an item, or on likely
    numbers."""
    config = builder.config
    precision = "fp32" if config.precision == "int8" else config.precision
    options = OpenOptions(precision, None, None, config.target, config.keep_float, None, config.threads)
    part = ProgramPart(found.main, options, found.segments, found.texts, found.weights)
    if config.precision == "int8":
        say("data decide about extents or about what is computed, so the model runs as a program: it stays in float")
    inputs = inputs_of(source, config.shapes)
    outputs = tuple(IoTensor(name, kind.dtype, kind.shape)
                    for name, kind in zip(found.main.outputs, found.main.kinds, strict=True))
    plan = Plan(source.name, config.precision, 0, inputs, outputs,
                MachinePart(builder.backend, builder.target, (), (), (), ()), program=part,
                dependence=ProgramEngine.dependence,
                metadata={"compiler": COMPILER_VERSION, "threads": config.threads})
    engine = program_engine(plan, maker=lambda: SegmentMaker(part, config.timing))
    reason: EngineError | None = None
    item = seen(inputs)
    for feed in [item] if item else _likely_feeds(plan):
        try:
            made = engine.run(feed)
            plan = replace(plan, outputs=tuple(_met(io, made[io.name]) for io in outputs))
            break
        except (CompilerFault, UnknownValueError):
            raise
        except EngineError as error:
            reason = reason or error
    else:
        say(f"the program could not be tried, so its segments are compiled when they are met: "
            f"{reason or 'there are no likely inputs for it'}")
        feed = {}
    segments = tuple(replace(one.part, plans=one.plans) for one in engine.segments)
    tensors = [io for io in inputs if io.name in feed and io.dtype not in NO_TENSORS]
    usual = extents_of(plan.name, tensors, {io.name: feed[io.name].shape for io in tensors})
    return replace(plan, program=replace(part, segments=segments), extents=usual)


def _met(io: IoTensor, value: Any) -> IoTensor:
    """An output as ONNX declares it, or, where it does not tell its axes, as it came."""
    if not isinstance(value, np.ndarray) or len(io.shape) == value.ndim and io.dtype:
        return io
    return IoTensor(io.name, io.dtype or value.dtype.name, tuple(f"{io.name}.{axis}" for axis in range(value.ndim)))


def _likely_feeds(plan: Plan) -> Iterator[dict[str, Array]]:
    """Inputs of one extent after the other: noise; ones for integers; texts of a letter."""
    if any(io.dtype in NO_TENSORS for io in plan.inputs):
        return
    types = {io.name: TensorType(dtype_named(io.dtype), io.shape) for io in plan.inputs if io.dtype != "object"}
    likely = likely_extents(types)
    lengths = LENGTHS if likely else LENGTHS[:1]
    random = np.random.default_rng(0)
    for length in lengths:
        feed = {}
        for io in plan.inputs:
            shape = [extent if isinstance(extent, int) else length if likely.get(extent, 1) > 1 else 1
                     for extent in io.shape]
            dtype = memory_dtype(io.dtype)
            feed[io.name] = (np.full(shape, "a", object) if io.dtype == "object" else
                             random.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype))
        yield feed
