"""StagedContext: a context of an engine that selects what to run by the values of its inputs."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.extents import Extents, Shapes, extents_of
from infer_server.engines.plan.plan import IoTensor, Plan, Step


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
