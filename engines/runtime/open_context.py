"""Execution contexts of engines with open extents."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.errors import ConfigError, GraphError, InputError, ModelError
from infer_server.engines.ir.dtypes import as_in_memory, memory_dtype
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.arena import ChangingArray, Memory
from infer_server.engines.plan.extents import CACHE_CAPACITY, CACHES, Extents, Shapes, extents_of
from infer_server.engines.plan.plan import SLACK, IoTensor, Plan, Step
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


class CachingEngine(Protocol):
    """Interface of infer_server.engines.runtime.open_engine.OpenEngine."""

    @property
    def name(self) -> str: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def inputs(self) -> Sequence[IoTensor]: ...
    def extents(self, shapes: Shapes) -> Extents: ...
    def caching(self, extents: Extents) -> Engine: ...


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


class CacheContext:
    """Context of a decoder that keeps the keys and values of all tokens so far. One owner thread at a time.

        context = engine.create_cache(2048)
        logits = context.run({"input_ids": prompt, "attention_mask": ones})["logits"]       # then token by token

    A run appends its tokens to the caches in place, so that its cost does not grow by copies of the earlier tokens.

    Attributes
    ----------
    length : int
        Number of tokens in the caches.
    capacity : int
        Largest number of tokens.
    """

    def __init__(self, engine: CachingEngine, capacity: int) -> None:
        """Create a context without tokens.

        Raises
        ------
        ConfigError
            The capacity is less than 1, or no output of the model is an input with further tokens.
        """
        self._caches = {document["past"]: document for document in engine.plan.metadata.get(CACHES, ())}
        if not self._caches:
            raise ConfigError(f"{engine.name}: no output is an input with further tokens, so there is no cache to keep")
        if capacity < 1:
            raise ConfigError(f"{engine.name}: a cache of capacity {capacity}; it needs room for at least 1 token")
        self.capacity, self.length = capacity, 0
        self._engine = engine
        self._fed = [io for io in engine.inputs if io.name not in self._caches]
        self._arrays: dict[str, Array] = {}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model on new tokens.

        Parameters
        ----------
        feeds : mapping
            {input name: array} without the caches. All runs since the last `reset` have the same number of items.

        Returns
        -------
        dict
            {output name: array} without the caches.

        Raises
        ------
        InputError
            An input does not fit, or the caches have no room for the tokens.
        """
        arrays = {name: as_in_memory(np.asarray(value)) for name, value in feeds.items()}
        self._check_dtypes(arrays)
        shapes = {name: array.shape for name, array in arrays.items()}
        known = extents_of(self._engine.name, self._fed, shapes)
        pasts = {io.name: self._shape(io, known) for io in self._engine.inputs if io.name in self._caches}
        extents = {**self._engine.extents({**shapes, **pasts}), CACHE_CAPACITY: self.capacity}
        engine = self._engine_for({name: extent for name, extent in extents.items() if name != BATCH})
        items = extents.get(BATCH, 1)
        with engine.lent() as context:
            results = context.run_in_place(arrays, items, self._placed(engine, items))
        present = {document["present"]: document["axis"] for document in self._caches.values()}
        self.length = max(io.shape_of(items)[present[io.name]] for io in engine.plan.outputs if io.name in present)
        return results

    def reset(self, length: int = 0) -> None:
        """Forget the tokens from `length` on. Raises InputError if there are fewer."""
        if not 0 <= length <= self.length:
            raise InputError(f"{self._engine.name}: the cache has {self.length} tokens, {length} of which cannot be "
                             "kept")
        self.length = length

    def _engine_for(self, extents: Extents) -> Engine:
        """Return the engine for these extents. Raises InputError if the caches have no room for the tokens."""
        reason = "the next one does not fit"
        if self.length < self.capacity:
            try:
                return self._engine.caching(extents)
            except (GraphError, ModelError) as error:
                reason = str(error)
        raise InputError(f"{self._engine.name}: the caches have {self.length} of {self.capacity} tokens: {reason}")

    def _check_dtypes(self, arrays: Mapping[str, Array]) -> None:
        for io in self._fed:
            if io.name in arrays and arrays[io.name].dtype != memory_dtype(io.dtype):
                raise InputError(f"{self._engine.name}: input '{io.name}' is {arrays[io.name].dtype}, the model takes "
                                 f"{memory_dtype(io.dtype)}")

    def _shape(self, io: IoTensor, known: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a past of `length` tokens, with the extents of the other inputs."""
        axis = self._caches[io.name]["axis"]
        return tuple(self.length if i == axis else extent if isinstance(extent, int) else known.get(extent, 1)
                     for i, extent in enumerate(io.shape))

    def _placed(self, engine: Engine, items: int) -> dict[str, Array]:
        """Return the caches, which are made at the first run. Raises InputError for another number of items."""
        for io in engine.plan.inputs:
            if io.name not in self._caches:
                continue
            dtype, shape = memory_dtype(io.dtype), io.shape_of(items)
            before = self._arrays[io.name].shape if io.name in self._arrays else None
            if self.length and before != shape:
                raise InputError(f"{self._engine.name}: the cache '{io.name}' has shape {list(before or ())}, these "
                                 f"inputs need {list(shape)}; reset the context to run other items")
            if before != shape:
                count = int(np.prod(shape)) * dtype.itemsize
                memory = Memory(count + SLACK)
                array = memory.bytes[:count].view(dtype).reshape(shape).view(ChangingArray)
                array.address = memory.address
                self._arrays[io.name] = array
        return self._arrays


AnyContext = ExecutionContext | OpenContext | StagedContext
