"""Contexts of engines that select what to run by the shapes or the values of the inputs."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.extents import Extents, Shapes, extents_of
from infer_server.engines.plan.plan import IoTensor, Plan, Step
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.policy import IdleMemory
from infer_server.engines.runtime.specialisation import Specialisation


class Runs(Protocol):
    """Interface of the engine; `timed` profiles a feed step by step."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Sequence[IoTensor]: ...
    def usual_shapes(self) -> dict[str, tuple[int, ...]]: ...
    def check(self, shapes: Shapes) -> None: ...
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...
    def timed(self, feeds: Mapping[str, Array], batch: int, repeats: int) -> list[tuple[Step, float]]: ...
    def plan_of(self, feeds: Mapping[str, Array]) -> Plan: ...


class StagedContext:
    """Context that stages inputs in arrays of its own; `execute` passes them to the engine. One owner thread at a time.

    Inputs initially hold what `usual` returns for their shape, or zeros.
    """

    def __init__(self, engine: Runs, usual: Callable[[IoTensor, tuple[int, ...]], Array | None]) -> None:
        self._engine, self._usual = engine, usual
        self._declared = {io.name: io for io in engine.inputs}
        self._arrays: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._results: Mapping[str, Array] = {}
        self._extents: Extents = {}
        self.at(engine.usual_shapes())

    def at(self, shapes: Shapes) -> StagedContext:
        """Set the shapes of the inputs for later calls and return the context itself. Raises InputError."""
        self._engine.check(shapes)
        self._extents = extents_of(self._engine.name, self._engine.inputs, shapes)
        self._arrays = {key: array for key, array in self._arrays.items() if tuple(shapes[key[0]])[1:] == key[1][1:]}
        return self

    def input(self, name: str, batch: int = 1) -> Array:
        io = self._declared[name]
        shape = io.shape_of(batch, self._extents)
        if (name, shape) not in self._arrays:
            usual = self._usual(io, shape)
            self._arrays[name, shape] = np.zeros(shape, memory_dtype(io.dtype)) if usual is None else usual
        return self._arrays[name, shape]

    def execute(self, batch: int = 1) -> None:
        self._results = self._engine.run(self._feeds(batch))

    def output(self, name: str, batch: int = 1) -> Array:
        return self._results[name]

    def profile(self, batch: int = 1, repeats: int = 5) -> list[tuple[Step, float]]:
        return self._engine.timed(self._feeds(batch), batch, repeats)

    @property
    def plan(self) -> Plan:
        """Plan that runs the current values of the inputs."""
        return self._engine.plan_of(self._feeds(1))

    def close(self) -> None:
        """Do nothing: the engine owns the contexts that it runs on."""

    def _feeds(self, batch: int) -> dict[str, Array]:
        return {name: self.input(name, batch) for name in self._declared}


class Opens(Runs, Protocol):
    """Interface of infer_server.engines.runtime.segment.Segment."""

    plan: Plan
    def at(self, shapes: Shapes) -> Specialisation: ...
    def extents(self, shapes: Shapes) -> Extents: ...


class OpenContext:
    """Context that holds an ExecutionContext for each specialisation that it has run. One owner thread at a time.

        context.at({"x": (1, 77)})      # then as an ExecutionContext for these shapes
    """

    def __init__(self, engine: Opens, cpus: Sequence[int] | None) -> None:
        self._engine, self._cpus = engine, cpus
        self._contexts: WeakKeyDictionary[Specialisation, ExecutionContext] = WeakKeyDictionary()
        self._idle = IdleMemory[Specialisation](self._free)
        self._now = self.at(engine.usual_shapes())

    def at(self, shapes: Shapes) -> ExecutionContext | StagedContext:
        """Set the shapes of the inputs for later calls and return their context.

        A batch larger than the specialisation's maximum gets a StagedContext: the engine runs it in slices, on its own
        contexts, which are not pinned to `cpus`. Raises InputError, or an error of specialising.
        """
        engine = self._engine.at(shapes)
        slots = engine.plan.batch_slots
        if slots < self._engine.plan.max_batch and self._engine.extents(shapes).get(BATCH, 1) > slots:
            self._now = StagedContext(self._engine, lambda io, shape: None).at(shapes)      # runs in slices
            return self._now
        context = self._contexts.get(engine)
        if context is None:
            self._idle.use(engine, engine.arena_bytes)      # first, so that the new context reuses freed memory
            context = self._contexts[engine] = engine.create_context(self._cpus)
        elif context is not self._now:
            self._idle.use(engine, engine.arena_bytes)
        self._now = context
        return context

    def _free(self, engine: Specialisation) -> None:
        """Drop the context of a specialisation; there is none if its memory could not be allocated."""
        self._contexts.pop(engine, None)

    @property
    def plan(self) -> Plan:
        return self._now.plan

    def input(self, name: str, batch: int = 1) -> Array:
        return self._now.input(name, batch)

    def execute(self, batch: int = 1) -> None:
        self._now.execute(batch)

    def output(self, name: str, batch: int = 1) -> Array:
        return self._now.output(name, batch)

    def bind(self, name: str, array: Any) -> None:
        if isinstance(self._now, StagedContext):
            raise ConfigError(f"{self._engine.name}: so many items of such shapes are run in slices; bind fewer")
        self._now.bind(name, array)

    def profile(self, batch: int = 1, repeats: int = 5) -> list[tuple[Step, float]]:
        return self._now.profile(batch, repeats)

    def close(self) -> None:
        """Stop the threads of all contexts."""
        for context in self._contexts.values():
            context.close()


AnyContext = ExecutionContext | OpenContext | StagedContext
