"""Compilation of programs: partition a model, compile its segments during a trial run, and return the plan.

    plan = plan_of(builder, source)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.compiler.builder import Builder
from infer_server.engines.compiler.segments import FedSegments, SegmentMaker, Watched, calibrated
from infer_server.engines.compiler.specialise import compiled
from infer_server.engines.compiler.subject import Seen, Subject, read_subject
from infer_server.engines.errors import CompilerFault, ConfigError, EngineError, UnknownValueError
from infer_server.engines.frontend.cutting.both import with_both_branches
from infer_server.engines.frontend.cutting.cut import Partition, cut, inputs_of
from infer_server.engines.frontend.cutting.facts import may_need_cuts
from infer_server.engines.frontend.cutting.unrolling import with_steps_unrolled
from infer_server.engines.frontend.extents import likely_extents
from infer_server.engines.frontend.names import nodes_in
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.ir.dtypes import dtype_named, memory_dtype
from infer_server.engines.ir.graph import Array, TensorType
from infer_server.engines.passes.quantization.kept import check_names
from infer_server.engines.plan.extents import extents_of
from infer_server.engines.plan.plan import IoTensor, MachinePart, OpenOptions, Plan, ProgramPart, SegmentPart
from infer_server.engines.runtime.load.create import program_of
from infer_server.engines.runtime.load.options import ON_TRIAL
from infer_server.engines.runtime.program import NO_TENSORS, Program
from infer_server.engines.version import COMPILER_VERSION

Notify = Callable[[str], None]
OTHER_LENGTHS = (-27, 8, -8, 1, -1)     # changes of open extents for a second trial run: see specialise.STEPS
LENGTHS = (128, 16, 64, 512, 1, 1024)       # numbers for open extents, tried until the program runs


def plan_of(builder: Builder, source: OnnxModel, seen: Seen = lambda inputs: None, notify: Notify = lambda notice: None,
            graph_plan: Callable[[Subject], Plan] = compiled, watched: Watched | None = None) -> Plan:
    """Compile a model as one graph if possible, else as a program.

    Parameters
    ----------
    builder : Builder
    source : OnnxModel
    seen : callable
        Returns an item of the data for the declared inputs, or None.
    notify : callable
        Called with notices.
    graph_plan : callable
        Compiles a model that is one graph.
    watched : Watched, optional
        Calibrates the segments of a program.

    Raises
    ------
    EngineError
    """
    by_host: set[str] = set()
    source = with_steps_unrolled(with_both_branches(source))
    found = cut(source, bounded=builder.selects) if may_need_cuts(source.proto.graph) else None
    while True:
        try:
            if found is None or found.is_whole:
                return graph_plan(read_subject(builder, source, seen))
            if builder.config.pixels or builder.config.profiles:
                raise ConfigError(f"{source.name}: data decide about extents or about what is computed, so it runs as "
                                  "a program, which takes neither --uint8-input nor profiles of shapes")
            return _tried(builder, source, seen, notify, found, watched)
        except UnknownValueError as error:      # a node that cannot be part of a segment is left to the host
            if not error.node or error.node in by_host:
                raise
            builder.forget()
            by_host.add(error.node)
            found = cut(source, by_host, builder.selects)


def _tried(builder: Builder, source: OnnxModel, seen: Seen, notify: Notify, partition: Partition,
           watched: Watched | None) -> Plan:
    """Return the plan of a program, with segments compiled for their inputs in a run on the data or likely inputs."""
    config = builder.config
    if config.weight_only and config.precision != "fp32":
        raise ConfigError(f"{source.name}: data decide about extents or about what is computed, so it runs as a "
                          f"program, whose weights stay packed in fp32 builds alone: leave --{config.precision} out")
    check_names(source.name, {node.name for node in nodes_in(source.proto.graph.node)}, config.keep_float)
    plan = _declared(builder, source, partition)
    part, inputs = plan.program, plan.inputs
    assert part is not None
    fed = FedSegments() if watched else None
    program = program_of(plan, ON_TRIAL, lambda: SegmentMaker(part, config.timing and not watched), fed)
    item = None if watched else seen(inputs)
    feeds = watched.items(inputs) if watched else [item] if item else _likely_feeds(plan, program)
    tried, made, reason = _run(program, feeds, all_of_them=watched is not None)
    if not tried:
        notify(f"the program could not be tried, so its segments are compiled when they are met: "
               f"{reason or 'there are no likely inputs for it'}")
    if watched and fed:
        segments = calibrated(_segments_of(program), SegmentMaker(part, config.timing, config.precision), fed, watched,
                              notify)
        program = program_of(replace(plan, program=replace(part, segments=segments)), ON_TRIAL)
    if tried and config.symbolic_plans:
        _run_at_other_extents(program, tried, notify)
    tensors = [io for io in inputs if io.name in tried and io.dtype not in NO_TENSORS]
    usual = extents_of(plan.name, tensors, {io.name: tried[io.name].shape for io in tensors})
    outputs = tuple(_met(io, made[io.name]) if made else io for io in plan.outputs)
    return replace(plan, outputs=outputs, program=replace(part, segments=_segments_of(program)), extents=usual)


def _declared(builder: Builder, source: OnnxModel, partition: Partition) -> Plan:
    """Return the plan of a program without compiled segments."""
    config = builder.config
    precision = "fp32" if config.precision == "int8" else config.precision      # segments without calibration are float
    options = OpenOptions(precision, None, None, config.target, config.keep_float, None, config.threads,
                          config.float_type, config.keep_fp32)
    part = ProgramPart(partition.main, options, partition.segments, partition.texts, partition.weights)
    outputs = tuple(IoTensor(name, kind.dtype, kind.shape)
                    for name, kind in zip(partition.main.outputs, partition.main.kinds, strict=True))
    return Plan(source.name, config.precision, 0, inputs_of(source, config.shapes), outputs,
                MachinePart(builder.backend, builder.target, (), (), (), ()), program=part,
                dependence="the model runs as a program of several parts",
                metadata={"compiler": COMPILER_VERSION, "threads": config.threads})


def _run(program: Program, feeds: Iterable[Mapping[str, Array]], all_of_them: bool,
         ) -> tuple[Mapping[str, Array], dict[str, Any], EngineError | None]:
    """Run the program on feeds until one succeeds, or on all of them.

    Return the first feed that succeeds, its outputs, and the first error.
    """
    tried: Mapping[str, Array] = {}
    first: dict[str, Any] = {}
    reason: EngineError | None = None
    for feed in feeds:
        try:
            made = program.run(feed)
        except (CompilerFault, UnknownValueError):
            raise
        except EngineError as error:
            reason = reason or error
            continue
        if not tried:
            tried, first = feed, made
        if not all_of_them:
            break
    return tried, first, reason


def _run_at_other_extents(program: Program, tried: Mapping[str, Array], notify: Notify) -> None:
    """Run the program on inputs of other extents, at which its segments get symbolic plans.

    Their plans at the first extents verify these. A notice says so if the program does not run on such inputs.
    """
    open_inputs = [io for io in program.inputs if any(isinstance(extent, str) for extent in io.shape)]
    reason: EngineError | None = None
    for length in OTHER_LENGTHS if open_inputs else ():
        try:
            program.run({io.name: _other(io, tried[io.name], length) for io in program.inputs if io.name in tried})
            return
        except EngineError as error:
            reason = error
    if reason:
        notify(f"the program ran at no other lengths, so symbolic plans for these are made when they are met: {reason}")


def _segments_of(program: Program) -> tuple[SegmentPart, ...]:
    part = program.whole_plan().program
    assert part is not None
    return part.segments


def _other(io: IoTensor, value: Array, change: int) -> Array:
    """Return a value with changed open extents, and integers increased by 1, because some are lengths."""
    if io.dtype in NO_TENSORS:
        return value
    shape = [extent + change if isinstance(name, str) and extent > 1 else extent
             for name, extent in zip(io.shape, value.shape, strict=True)]
    other = np.resize(value, [max(extent, 1) for extent in shape])
    return other + other.dtype.type(1) if other.dtype.kind in "iu" and other.size else other


def _met(io: IoTensor, value: Any) -> IoTensor:
    """Return the declaration of an output, completed by the dtype and rank of its value if ONNX leaves them open."""
    if not isinstance(value, np.ndarray) or len(io.shape) == value.ndim and io.dtype:
        return io
    return IoTensor(io.name, io.dtype or value.dtype.name, tuple(f"{io.name}.{axis}" for axis in range(value.ndim)))


def _likely_feeds(plan: Plan, program: Program) -> Iterator[dict[str, Array]]:
    """Yield inputs for each of LENGTHS: noise, ones for integers, and strings that encoders know."""
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
            feed[io.name] = (program.usual(io, shape) if io.dtype == "object" else
                             random.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype))
        yield feed
