"""Implicit states that grow in place (use_growable_memory): each sequence owns a cache, to which its requests append.

The cache belongs to the instance's thread while a request executes, and to the event loop otherwise. Its memory grows
page by page up to its capacity, and is freed when the sequence ends.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from infer_server.backend import CacheContext, CachingEngine, ExecutionContext
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.engines.errors import CapacityError, InputError
from infer_server.errors import InvalidRequestError, MemoryLimitError


class CachingExecutor:
    """Executor of the requests of sequences, one at a time, each in the cache of its sequence."""

    def __init__(self, model: str, engine: CachingEngine, context: ExecutionContext, capacity: int,
                 initial: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> None:
        """Create an executor.

        Parameters
        ----------
        model : str
            Name of the model, for messages.
        engine : CachingEngine
            Engine that creates caches.
        context : ExecutionContext
            Context of the instance, which is closed with it.
        capacity : int
            Largest number of tokens of a cache.
        initial : mapping
            Initial value of each state that grows, by input name.
        outputs : sequence of str
            Outputs to read, without these states.
        """
        self._model, self._engine, self._context = model, engine, context
        self._capacity, self._initial, self._outputs = capacity, initial, outputs

    def close(self) -> None:
        self._context.close()

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        (request,) = batch                  # BatchPolicy.merges is False
        started_ns = time.monotonic_ns()
        try:
            computed = self._cache_of(request).run(request.inputs)
        except CapacityError as error:
            return [(request, MemoryLimitError(
                f"{error}; the sequence keeps its state: end it or start it anew, or raise the parameter "
                f"state_capacity of model '{self._model}', which is {self._capacity}"))], None
        except InputError as error:
            return [(request, InvalidRequestError(str(error)))], None
        computed_ns = time.monotonic_ns()
        outcome = request, request.encode({name: computed[name] for name in self._outputs})
        return [outcome], BatchExecution(1, request.enqueued_ns, started_ns, started_ns, computed_ns,
                                         time.monotonic_ns())

    def _cache_of(self, request: Request) -> CacheContext:
        cache = request.cache
        assert cache is not None
        if cache.context is None:
            context = self._engine.create_cache(self._capacity)
            context.start(self._initial)
            cache.context = context
        return cache.context
