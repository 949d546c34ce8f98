"""Execution contexts of engines with open extents."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.extents import Extents, Shapes
from infer_server.engines.plan.plan import Plan, Step
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.policy import IdleMemory
from infer_server.engines.runtime.staged import Runs, StagedContext


class EngineOfShapes(Runs, Protocol):
    """Interface of infer_server.engines.runtime.open_engine.OpenEngine."""

    @property
    def max_batch(self) -> int: ...
    def at(self, shapes: Shapes) -> Engine: ...
    def extents(self, shapes: Shapes) -> Extents: ...


class OpenContext:
    """Context that holds an ExecutionContext for each specialisation that it has run. One owner thread at a time.

        context.at({"x": (1, 77)})      # then as an ExecutionContext for these shapes
    """

    def __init__(self, engine: EngineOfShapes, cpus: Sequence[int] | None) -> None:
        self._engine, self._cpus = engine, cpus
        self._contexts: WeakKeyDictionary[Engine, ExecutionContext] = WeakKeyDictionary()
        self._idle = IdleMemory[Engine](self._free)
        self._now = self.at(engine.usual_shapes())

    def at(self, shapes: Shapes) -> ExecutionContext | StagedContext:
        """Set the shapes of the inputs for later calls and return their context.

        A batch larger than the specialisation's maximum gets a StagedContext: the engine runs it in slices, on its own
        contexts, which are not pinned to `cpus`. Raises InputError, or an error of specialising.
        """
        engine = self._engine.at(shapes)
        slots = engine.plan.batch_slots
        if slots < self._engine.max_batch and self._engine.extents(shapes).get(BATCH, 1) > slots:
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

    def _free(self, engine: Engine) -> None:
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
