"""Program: executor of a plan with data-dependent shapes or control flow.

An interpreter runs its main region, operator by operator, and compiled segments between them.
"""
from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.backends.device import ready
from infer_server.engines.errors import ConfigError, InputError
from infer_server.engines.ir.dtypes import BITS, as_in_memory, as_named, dtype_named, memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.extents import Shapes, extents_of
from infer_server.engines.plan.plan import IoTensor, Plan, SegmentPart, Step
from infer_server.engines.runtime.caches import CacheContext, no_caches
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.contexts import StagedContext
from infer_server.engines.runtime.host.categories import strings_for
from infer_server.engines.runtime.interpreter import Runner
from infer_server.engines.runtime.segment import Segment
from infer_server.engines.runtime.specialisation import Specialisation

Signature = tuple[tuple[np.dtype[Any], int], ...]       # dtype and rank of each input of a segment
Watch = Callable[[SegmentPart, Mapping[str, Array]], None]
FeedKind = tuple[str, tuple[int, ...], np.dtype[Any]]      # name, shape and dtype
NO_TENSORS = ("sequence", "optional", "map", "sparse_tensor", "")      # values of IoTensor.dtype that are no tensors


class SegmentMaker(Protocol):
    """Interface of the compiler of segments: infer_server.engines.compiler.segments.SegmentMaker."""

    def plan(self, part: SegmentPart, feed: Mapping[str, Array]) -> Plan: ...


@dataclass(eq=False)
class _Bound:
    """Segment bound to the memory of a context; implements infer_server.engines.runtime.iteration.Bound."""
    run: Callable[[], None]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    kept: Any = None


@dataclass(frozen=True, slots=True)
class _Met:
    """Specialisation that a segment was bound to last, with the dtypes and shapes of its inputs."""
    engine: Specialisation
    kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Cached result of checking the inputs of a program.

    kinds       names, shapes and dtypes of the main region's inputs, if equal ones need no further check; else None
    """
    shapes: Shapes = field(default_factory=dict)
    kinds: Sequence[FeedKind] | None = None

    def taken(self, feeds: Mapping[str, Any]) -> list[Array] | None:
        """Return the region's inputs if the feeds match the cached kinds, else None."""
        if self.kinds is None or len(feeds) != len(self.kinds):
            return None
        inputs: list[Array] = []
        for name, shape, dtype in self.kinds:
            array = feeds.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
            inputs.append(array)
        return inputs


class Dispatcher:
    """Segment of a program: selects what is compiled by the dtypes and ranks of the inputs, or compiles it."""

    def __init__(self, part: SegmentPart, load: Callable[[Plan], Segment], maker: Callable[[], SegmentMaker],
                 lock: threading.Lock, watch: Watch | None = None) -> None:
        """Load the segment's plans.

        Parameters
        ----------
        part : SegmentPart
        load : callable
            Loads a plan.
        maker : callable
            Returns the compiler of further plans.
        lock : Lock
            Held while a plan is compiled.
        watch : callable, optional
            Called with the inputs of every run.
        """
        self.part, self._load, self._maker, self._lock, self._watch = part, load, maker, lock, watch
        self._segments: dict[Signature, Segment] = {}
        # The segment that ran last, on any thread, and whether some outputs are bits of a dtype that NumPy lacks.
        self._last: tuple[Segment | None, bool] = None, False
        self._met: _Met | None = None                   # the specialisation bound last, on any thread
        self._initial: dict[Signature, Plan] = {}           # plans as loaded, without later specialisations
        self._bounds: WeakKeyDictionary[ExecutionContext, _Bound] = WeakKeyDictionary()
        for plan in part.plans:
            self._add(signature_of_plan(plan), plan)

    def _add(self, signature: Signature, plan: Plan) -> None:
        self._initial[signature] = plan
        self._segments[signature] = self._load(plan)

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        feed = dict(zip(self.part.inputs, inputs, strict=True))
        if self._watch:
            self._watch(self.part, feed)
        segment, has_bits = self._last
        results = segment.rerun(feed) if segment else None
        if segment is None or results is None:
            segment = self._segment_for(feed)
            results = segment.run(feed)
            has_bits = any(io.dtype in BITS for io in segment.outputs)       # else later operators would see integers
            self._last = segment, has_bits
        if has_bits:
            return [as_named(results[io.name], io.dtype) for io in segment.outputs]
        return [results[io.name] for io in segment.outputs]

    @contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[_Bound]:
        """Yield the segment bound to a context whose inputs hold these values."""
        feed = {name: as_in_memory(array) for name, array in zip(self.part.inputs, inputs, strict=True)}
        engine = self._engine_at(inputs, feed)
        with engine.pooled_context() as context:
            bound = self._bounds.get(context)
            if bound is None:
                bound = self._bounds[context] = _Bound(
                    ready(context.execution, 1), {io.name: context.input(io.name) for io in engine.inputs},
                    {io.name: as_named(context.output(io.name), io.dtype) for io in engine.outputs})
            for name, array in bound.inputs.items():
                array[...] = feed[name]
            if self._watch:
                named = dict(zip(self.part.inputs, inputs, strict=True))
                bound = _Bound(partial(self._run_watched, self._watch, bound, named), bound.inputs, bound.outputs)
            yield bound

    def _run_watched(self, watch: Watch, bound: _Bound, inputs: Mapping[str, Array]) -> None:
        watch(self.part, {name: as_named(bound.inputs.get(name, array), array.dtype.name)
                          for name, array in inputs.items()})
        bound.run()

    def _engine_at(self, inputs: Sequence[Array], feed: Mapping[str, Array]) -> Specialisation:
        """Return the specialisation for the dtypes, shapes and deciding values of the inputs.

        feed: the inputs by name, in the dtypes of memory.
        """
        kinds, met = [(array.dtype, array.shape) for array in inputs], self._met
        if met and met.kinds == kinds:
            return met.engine
        segment = self._segment_for(dict(zip(self.part.inputs, inputs, strict=True)))
        engine = segment.for_feed(feed)
        self._met = _Met(engine, kinds) if not segment.deciding and segment.keeps(engine) else None
        return engine

    def _segment_for(self, feed: Mapping[str, Array]) -> Segment:
        """Return the segment for the types of the inputs, compiling it if they are new."""
        signature = signature_of(feed)
        segment = self._segments.get(signature)
        if segment is None:
            with self._lock:
                if signature not in self._segments:
                    self._add(signature, self._maker().plan(self.part, feed))
                segment = self._segments[signature]
        return segment

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans with their current specialisations; unchanged if they are for another machine."""
        return tuple(initial if segment.plan.machine.target != initial.machine.target else segment.whole_plan()
                     for initial, segment in zip(self._initial.values(), self._segments.values(), strict=True))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments.values())


def signature_of(feed: Mapping[str, Array]) -> Signature:
    return tuple((array.dtype, array.ndim) for array in feed.values())


def signature_of_plan(plan: Plan) -> Signature:
    return tuple((dtype_named(io.dtype), len(io.shape)) for io in plan.open_part.inputs)


class Program:
    """Executor of a program. Thread-safe."""
    is_steady = False

    def __init__(self, plan: Plan, load: Callable[[Plan], Segment], maker: Callable[[], SegmentMaker],
                 watch: Watch | None = None) -> None:
        """Load a program.

        Parameters
        ----------
        plan : Plan
            Plan with a program part.
        load : callable
            Loads the plan of a segment.
        maker : callable
            Returns the compiler of segments when it is first needed; raises PlanTargetError if the plan is stripped or
            the compiler is not installed.
        watch : callable, optional
            Called with the inputs of every run of a segment.
        """
        assert plan.program is not None
        self.plan, self.part, self.name, self.inputs, self.outputs = (
            plan, plan.program, plan.name, plan.inputs, plan.outputs)
        self.deciding = tuple(io.name for io in plan.inputs)    # the value of any may decide about shapes or branches
        lock = threading.Lock()
        self.segments = [Dispatcher(part, load, maker, lock, watch) for part in self.part.segments]
        texts = {name: np.array(text.words, object).reshape(text.shape) for name, text in self.part.texts.items()}
        self._dtypes = {io.name: memory_dtype(io.dtype) for io in plan.inputs if io.dtype not in NO_TENSORS}
        self._fitting = _Fitting()      # the last check, of any thread
        self._constants: Mapping[str, Array] = ChainMap(texts, self.part.weights)   # type: ignore[arg-type]
        self._main = Runner(self.part.main, self.segments, self._constants)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of one context of each compiled segment."""
        return sum(one.arena_bytes for segment in self.segments for one in segment.segments)

    def usual_shapes(self, batch: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs with which the build ran the program."""
        return {io.name: tuple(extent if isinstance(extent, int) else self.plan.extents.get(extent, 1)  # type: ignore
                               for extent in io.shape) for io in self.inputs}

    def check(self, shapes: Shapes) -> None:
        """Raise InputError if shapes of inputs are inconsistent."""
        tensors = [io for io in self.inputs if io.dtype not in NO_TENSORS]
        extents_of(self.name, tensors, {name: shape for name, shape in shapes.items()
                                        if name not in {io.name for io in self.inputs} - {io.name for io in tensors}})

    def usual_values(self) -> dict[str, Array]:
        """Return valid values of the inputs in their usual shapes; not of sequences, maps and absent inputs."""
        shapes = self.usual_shapes()
        return {io.name: self.usual(io, shapes[io.name]) for io in self.inputs if io.dtype not in NO_TENSORS}

    def items(self, arrays: Mapping[str, Array]) -> int:
        """Check a feed. Raises InputError."""
        self._checked_inputs(arrays)
        return 1

    def at(self, shapes: Shapes, values: Mapping[str, Array] = {}) -> Specialisation:       # noqa: B006
        raise ConfigError(f"{self.name} is a program of {len(self.segments)} segments, which have specialisations of "
                          "their own")

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run on all inputs, of any shapes that the model accepts."""
        return self._run(self._checked_inputs(feeds))

    def rerun(self, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
        """Run without checks if names, shapes and dtypes are those of the last run; otherwise run nothing."""
        inputs = self._fitting.taken(feeds)
        return None if inputs is None else self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> dict[str, Any]:
        values = self._main.run(inputs, {})
        return {io.name: value if isinstance(value, list) or value is None else _as_output(np.asarray(value))
                for io, value in zip(self.plan.outputs, values, strict=True)}

    def _checked_inputs(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the values of the main region's inputs. Raises InputError."""
        named = {io.name: self._checked(io, feeds) for io in self.plan.inputs}
        shapes = {name: value.shape for name, value in named.items() if isinstance(value, np.ndarray)}
        if not feeds.keys() <= named.keys():
            shapes |= {name: () for name in feeds if name not in named}
        if shapes != self._fitting.shapes:
            self.check(shapes)
        self._fitting = _Fitting(shapes, self._kinds(named))
        return [named[name] for name in self.part.main.inputs]

    def _kinds(self, fed: Mapping[str, Any]) -> Sequence[FeedKind] | None:
        """Return name, shape and dtype of the main region's inputs; None if some are not plain numeric arrays."""
        if fed.keys() != set(self.part.main.inputs) or not all(
                isinstance(fed[io.name], np.ndarray) and fed[io.name].dtype.kind in "biuf" and io.dtype not in BITS
                for io in self.plan.inputs):
            return None
        return [(name, fed[name].shape, fed[name].dtype) for name in self.part.main.inputs]

    def _checked(self, io: IoTensor, feeds: Mapping[str, Any]) -> Any:
        if io.name not in feeds:
            if io.dtype == "optional":
                return None
            raise InputError(f"{self.name}: input '{io.name}' is missing; the model takes "
                             f"{', '.join(repr(other.name) for other in self.inputs)}")
        value = feeds[io.name]
        declared = self._dtypes.get(io.name)
        if type(value) is np.ndarray and value.dtype is declared and not declared.hasobject:
            return as_named(value, io.dtype)
        if declared is None:
            return [as_in_memory(np.asarray(item)) for item in value] if isinstance(value, list | tuple) else value
        array = as_in_memory(np.asarray(value))
        if declared.hasobject and array.dtype.kind in "OUS":
            return _as_text(array)
        if array.dtype != declared:
            raise InputError(f"{self.name}: input '{io.name}' is {array.dtype}, the model takes {io.dtype}")
        return as_named(array, io.dtype)

    def create_context(self, cpus: Sequence[int] | None = None) -> StagedContext:
        """Create a context for one owner thread at a time. cpus: ignored, segments run on their caller's thread."""
        return StagedContext(self, self.usual)

    def create_cache(self, capacity: int) -> CacheContext:
        raise no_caches(self.name, "it is a program")

    def usual(self, io: IoTensor, shape: Sequence[int]) -> Array:
        """Return valid values of an input: ones, or strings that the program's encoders know."""
        if io.dtype != "object":
            return np.ones(shape, memory_dtype(io.dtype))
        strings = self._usual_strings[io.name]
        return np.resize(strings[:1] if strings.ndim and strings.shape[1:] == tuple(shape)[1:] else strings, shape)

    @cached_property
    def _usual_strings(self) -> Mapping[str, Array]:
        """Valid strings for each string input, in its usual shape."""
        shapes = {name: [max(extent, 1) for extent in shape] for name, shape in self.usual_shapes().items()
                  if any(io.name == name and io.dtype == "object" for io in self.inputs)}
        return strings_for(self.part.main, self._constants, shapes)

    def plan_of(self, feeds: Mapping[str, Array]) -> Plan:
        return self.plan

    def timed(self, feeds: Mapping[str, Array], batch: int, repeats: int) -> list[tuple[Step, float]]:
        raise InputError(f"{self.name}: a profile needs a plan of one graph, and this is a program; profile its "
                         "segments as models of their own")

    def whole_plan(self) -> Plan:
        """Return the plan with the current specialisations of its segments."""
        segments = tuple(replace(one.part, plans=one.plans) for one in self.segments)
        return replace(self.plan, program=replace(self.part, segments=segments), fingerprint="")

    def close(self) -> None:
        """Stop the threads of all segments."""
        for segment in self.segments:
            for one in segment.segments:
                one.close()


def _as_text(array: Array) -> Array:
    """Return an object array with UTF-8 bytes decoded to str; other bytes stay bytes."""
    values = array.astype(object)
    if any(type(value) is bytes for value in values.flat):
        values = values.copy() if values is array else values
        values.reshape(-1)[:] = [_decoded(value) for value in values.flat]
    return values


def _decoded(value: Any) -> Any:
    try:
        return value.decode() if type(value) is bytes else value
    except UnicodeDecodeError:
        return value


def _as_output(array: Array) -> Array:
    """Return an output in the dtypes of memory, strings as an array of objects."""
    return array.astype(object) if array.dtype.kind in "US" else as_in_memory(array)
