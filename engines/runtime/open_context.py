"""The contexts of an engine with open extents."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from engines.ir.graph import Array
from engines.plan.extents import Shapes
from engines.plan.plan import Plan, Step
from engines.runtime.context import ExecutionContext
from engines.runtime.engine import Engine
from engines.runtime.staged import StagedContext


class EngineOfShapes(Protocol):
    """engines.runtime.open_engine.OpenEngine."""

    def usual_shapes(self) -> Shapes: ...
    def at(self, shapes: Shapes) -> Engine: ...


class OpenContext:
    """Contexts of specialisations, one for each that its owner has met. One owner thread at a time.

        context.at({"x": (1, 77)})      # then as an ExecutionContext for these shapes
    """

    def __init__(self, engine: EngineOfShapes, cpus: Sequence[int] | None) -> None:
        self._engine, self._cpus = engine, cpus
        self._contexts: WeakKeyDictionary[Engine, ExecutionContext] = WeakKeyDictionary()
        self._now = self.at(engine.usual_shapes())

    def at(self, shapes: Shapes) -> ExecutionContext:
        """The context for inputs of these shapes, which are those of what follows. Raises InputError, or what
        specialising raises."""
        engine = self._engine.at(shapes)
        context = self._contexts.get(engine)
        if context is None:
            context = self._contexts[engine] = engine.create_context(self._cpus)
        self._now = context
        return context

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
        self._now.bind(name, array)

    def profile(self, batch: int = 1, repeats: int = 5) -> list[tuple[Step, float]]:
        return self._now.profile(batch, repeats)

    def close(self) -> None:
        """Stop the threads of all of them."""
        for context in self._contexts.values():
            context.close()


AnyContext = ExecutionContext | OpenContext | StagedContext
