"""Contexts that keep the keys and values of a decoder's tokens."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from infer_server.engines.errors import CapacityError, ConfigError, GraphError, InputError, ModelError
from infer_server.engines.ir.dtypes import as_in_memory, memory_dtype
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.plan.arena import ChangingArray, Memory
from infer_server.engines.plan.extents import CACHE_CAPACITY, CACHES, Extents, Shapes, extents_of
from infer_server.engines.plan.plan import SLACK, IoTensor, Plan
from infer_server.engines.plan.symbolic.plans import LateMachine
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


# Function of the extents that returns the number of tokens after a run, by engine; missing before its first run.
_token_counts: WeakKeyDictionary[CachingSegment, Callable[[Extents], int]] = WeakKeyDictionary()


class CacheContext:
    """Context of a decoder that keeps the keys and values of all tokens so far. One owner thread at a time.

        context = engine.create_cache(2048)
        logits = context.run({"input_ids": prompt, "attention_mask": ones})["logits"]       # then token by token

    A run appends its tokens to the caches in place, so that its cost does not grow by copies of the earlier tokens. The
    memory of a cache grows with its tokens, page by page: pages that were never written take none.

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
        CapacityError
            The caches have no room for the tokens; they stay as they are.
        InputError
            An input does not fit.
        """
        arrays = {name: as_in_memory(np.asarray(value)) for name, value in feeds.items()}
        self._check_dtypes(arrays)
        shapes = {name: array.shape for name, array in arrays.items()}
        known = extents_of(self._engine.name, self._fed, shapes)
        pasts = {io.name: self._shape(io, known) for io in self._engine.inputs if io.name in self._caches}
        extents = {**self._engine.extents({**shapes, **pasts}), CACHE_CAPACITY: self.capacity}
        items = extents.pop(BATCH, 1)
        engine = self._engine_for(extents)
        with engine.pooled_context() as context:
            results = context.run_in_place(arrays, items, self._cache_arrays(pasts))
        cache = next(iter(self._caches.values()))           # all have equally many tokens
        present = next(io for io in engine.plan.outputs if io.name == cache["present"])
        self.length = present.shape_of(items)[cache["axis"]]
        return results

    def start(self, pasts: Mapping[str, Array]) -> None:
        """Replace the tokens in the caches, as by those of a common prefix.

        Parameters
        ----------
        pasts : mapping
            {input name: array} for all caches, with equally many tokens and items.

        Raises
        ------
        CapacityError
            They have more tokens than the capacity.
        InputError
            A cache is missing, or an array does not fit.
        """
        inputs = {io.name: io for io in self._engine.inputs if io.name in self._caches}
        if pasts.keys() != inputs.keys():
            raise InputError(f"{self._engine.name}: expected arrays for the caches {', '.join(inputs)}, got "
                             f"{', '.join(pasts) or 'none'}")
        arrays = {name: as_in_memory(np.asarray(array)) for name, array in pasts.items()}
        self._check_dtypes(arrays)
        extents_of(self._engine.name, [*inputs.values()], {name: array.shape for name, array in arrays.items()})
        counts = {name: array.shape[self._caches[name]["axis"]] for name, array in arrays.items()}
        tokens = max(counts.values())
        if min(counts.values()) < tokens:
            raise InputError(f"{self._engine.name}: the caches have unequal numbers of tokens: {counts}")
        if tokens > self.capacity:
            raise self._full(f"no room for {tokens} tokens")
        self.length = 0
        for name, array in arrays.items() if tokens else ():
            cache = self._allocate(name, array.dtype, self._with_capacity(name, array.shape))
            cache[(slice(None),) * self._caches[name]["axis"] + (slice(tokens),)] = array
        self.length = tokens

    def compile(self) -> None:
        """Trace the plan of a run for the shapes that the model was built for, which else the first run does.

        Raises
        ------
        EngineError
            The model computes a cache in a way that cannot grow in place, or the target has no kernels for it.
        """
        usual = {name: extent for name, extent in self._engine.plan.extents.items() if name != BATCH}
        largest = max((extent for extent in usual.values() if isinstance(extent, int)), default=0)
        self._caching({**usual, CACHE_CAPACITY: max(self.capacity, 2 * largest)})

    def reset(self, length: int = 0) -> None:
        """Forget the tokens from `length` on. Raises InputError if there are fewer."""
        if not 0 <= length <= self.length:
            raise InputError(f"{self._engine.name}: the cache has {self.length} tokens, {length} of which cannot be "
                             "kept")
        self.length = length

    def _engine_for(self, extents: Extents) -> Specialisation:
        """Return the engine for these extents. Raises CapacityError if the tokens do not fit."""
        if self.length >= self.capacity:
            raise self._full("the next one does not fit")
        count = _token_counts.get(self._engine)
        if count and (tokens := count(extents)) > self.capacity:        # tracing would take seconds to find out
            raise self._full(f"no room for {tokens} tokens")
        try:
            return self._caching(extents)
        except CapacityError as error:
            raise self._full(str(error)) from error
        except (GraphError, ModelError) as error:
            raise InputError(f"{self._engine.name}: the caches have {self.length} of {self.capacity} tokens, and the "
                             f"next ones cannot be run: {error}") from error

    def _caching(self, extents: Extents) -> Specialisation:
        engine = self._engine.caching(extents)
        if self._engine not in _token_counts and (count := self._token_count(engine)):
            _token_counts[self._engine] = count
        return engine

    def _token_count(self, engine: Specialisation) -> Callable[[Extents], int] | None:
        """Return the function from extents to the number of tokens after a run; None for a plan without symbols."""
        machine = engine.plan.machine
        if not isinstance(machine, LateMachine) or machine.symbolic is None:
            return None
        symbolic, cache = machine.symbolic, next(iter(self._caches.values()))
        present = next(io for io in symbolic.traced.outputs if io.name == cache["present"])
        function: Callable[..., int] = symbolic.function(present.shape[cache["axis"]])
        return lambda extents: function(*(extents[name] for name in symbolic.names))

    def _full(self, reason: str) -> CapacityError:
        return CapacityError(f"{self._engine.name}: the caches have {self.length} of {self.capacity} tokens: {reason}")

    def _check_dtypes(self, arrays: Mapping[str, Array]) -> None:
        for io in self._engine.inputs:
            if io.name in arrays and arrays[io.name].dtype != memory_dtype(io.dtype):
                raise InputError(f"{self._engine.name}: input '{io.name}' is {arrays[io.name].dtype}, the model takes "
                                 f"{memory_dtype(io.dtype)}")

    def _shape(self, io: IoTensor, known: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a past of `length` tokens, with the extents of the other inputs."""
        axis = self._caches[io.name]["axis"]
        return tuple(self.length if i == axis else extent if isinstance(extent, int) else known.get(extent, 1)
                     for i, extent in enumerate(io.shape))

    def _cache_arrays(self, pasts: Shapes) -> dict[str, Array]:
        """Return the caches, allocated at the first run. Raises InputError for another number of items."""
        for name, past in pasts.items():
            shape = self._with_capacity(name, past)
            before = self._arrays[name].shape if name in self._arrays else None
            if self.length and before != shape:
                raise InputError(f"{self._engine.name}: the cache '{name}' has shape {list(before or ())}, these "
                                 f"inputs need {list(shape)}; reset the context to run other items")
            if before != shape:
                dtype = next(io.dtype for io in self._engine.inputs if io.name == name)
                self._allocate(name, memory_dtype(dtype), shape)
        return self._arrays

    def _with_capacity(self, name: str, past: Sequence[int]) -> tuple[int, ...]:
        axis = self._caches[name]["axis"]
        return *past[:axis], self.capacity, *past[axis + 1:]

    def _allocate(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
        """Return new memory for a cache; a page of it takes memory once it is written."""
        count = int(np.prod(shape)) * dtype.itemsize
        memory = Memory(count + SLACK, huge_pages=False)
        array = memory.bytes[:count].view(dtype).reshape(shape).view(ChangingArray)
        array.address = memory.address
        self._arrays[name] = array
        return array
