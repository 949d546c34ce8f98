"""Contexts that keep the keys and values of a decoder's tokens."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from infer_server.engines.errors import ConfigError, GraphError, InputError, ModelError
from infer_server.engines.ir.dtypes import as_in_memory, memory_dtype
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.arena import ChangingArray, Memory
from infer_server.engines.plan.extents import CACHE_CAPACITY, CACHES, Extents, Shapes, extents_of
from infer_server.engines.plan.plan import SLACK, IoTensor, Plan
from infer_server.engines.runtime.specialisation import Specialisation


def no_caches(name: str, reason: str) -> ConfigError:
    """Return the error for a plan without caches, which says which plans have them."""
    return ConfigError(f"{name} keeps no caches: {reason}; a plan has them if the model is one graph with an output "
                       "that is an input of an open extent with further tokens")


class CachingSegment(Protocol):
    """Interface of infer_server.engines.runtime.segment.Segment."""

    plan: Plan

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Sequence[IoTensor]: ...
    def extents(self, shapes: Shapes) -> Extents: ...
    def caching(self, extents: Extents) -> Specialisation: ...


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

    def __init__(self, engine: CachingSegment, capacity: int) -> None:
        """Create a context without tokens.

        Raises
        ------
        ConfigError
            The capacity is less than 1, or no output of the model is an input of an open extent with further tokens.
        """
        self._caches = {document["past"]: document for document in engine.plan.metadata.get(CACHES, ())}
        if not self._caches:
            raise no_caches(engine.name, "no output is an input with further tokens" if engine.plan.open else
                            "its shapes are fixed")
        if capacity < 1:
            raise ConfigError(f"{engine.name}: a cache of capacity {capacity}; it needs at least 1 token")
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
            An input does not fit, or the caches are full.
        """
        arrays = {name: as_in_memory(np.asarray(value)) for name, value in feeds.items()}
        self._check_dtypes(arrays)
        shapes = {name: array.shape for name, array in arrays.items()}
        known = extents_of(self._engine.name, self._fed, shapes)
        pasts = {io.name: self._shape(io, known) for io in self._engine.inputs if io.name in self._caches}
        extents = {**self._engine.extents({**shapes, **pasts}), CACHE_CAPACITY: self.capacity}
        engine = self._engine_for({name: extent for name, extent in extents.items() if name != BATCH})
        items = extents.get(BATCH, 1)
        with engine.pooled_context() as context:
            results = context.run_in_place(arrays, items, self._cache_arrays(engine, items))
        present = {document["present"]: document["axis"] for document in self._caches.values()}
        self.length = max(io.shape_of(items)[present[io.name]] for io in engine.plan.outputs if io.name in present)
        return results

    def reset(self, length: int = 0) -> None:
        """Forget the tokens from `length` on. Raises InputError if there are fewer."""
        if not 0 <= length <= self.length:
            raise InputError(f"{self._engine.name}: the cache has {self.length} tokens, {length} of which cannot be "
                             "kept")
        self.length = length

    def _engine_for(self, extents: Extents) -> Specialisation:
        """Return the engine for these extents. Raises InputError if the caches are full."""
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

    def _cache_arrays(self, engine: Specialisation, items: int) -> dict[str, Array]:
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
