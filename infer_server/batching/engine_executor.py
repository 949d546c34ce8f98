"""Executes batches on an engine: items side by side in one context, run, taken apart."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import ExecutionContext
from infer_server.batching.request import Arrays, Outcome, Request
from infer_server.batching.statistics import BatchExecution

_FEW = 500                  # elements, for which numpy keeps the interpreter lock


def copy_into(slots: NDArray[Any], items: NDArray[Any]) -> None:
    """Copies items into slots of the same shape without letting go of the interpreter lock.

    numpy releases it for every large copy and then waits for the event loop to give it back: with images of 600 KB that
    took ten times as long as the copies, of a batch's time in which nothing is computed.
    """
    if slots.size <= _FEW:
        slots[...] = items.reshape(slots.shape)
        return
    plain = slots.dtype == items.dtype and not slots.dtype.hasobject
    if plain and slots.flags.c_contiguous and items.flags.c_contiguous:
        slots.reshape(-1).view(np.uint8).data[:] = items.reshape(-1).view(np.uint8).data
    else:
        slots[...] = items.reshape(slots.shape)


def _copied(computed: Arrays) -> Arrays:
    """What outlives the execution of a piece."""
    return {name: array.copy() for name, array in computed.items()}


class EngineExecutor:
    """One execution context; belongs to the thread that executes."""

    def __init__(self, context: ExecutionContext, outputs: Sequence[str], max_batch: int,
                 is_open: bool = False, gpu: int | None = None) -> None:
        """max_batch: of the engine; 0: it has no batch axis. is_open: shapes differ from batch to batch. gpu: that it
        executes on; None: the CPU."""
        self._context = context
        self._outputs = outputs
        self._batched = max_batch > 0               # tensors have a leading batch axis
        self._max_batch = max_batch
        self._is_open, self._gpu = is_open, gpu

    def close(self) -> None:
        self._context.close()

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution]:
        items = sum([request.items for request in batch])
        if self._batched and items > self._max_batch:
            return self._execute_in_pieces(batch[0])
        started_ns = time.monotonic_ns()
        context = self._context.at(self._shapes(batch[0], items)) if self._is_open else self._context
        self._gather(context, batch, items)
        copied_ns = time.monotonic_ns()
        context.execute(items)
        computed_ns = time.monotonic_ns()
        outcomes = self._scatter(context, batch, items)
        return outcomes, BatchExecution(items, batch[0].enqueued_ns, started_ns, copied_ns, computed_ns,
                                        time.monotonic_ns(), self._gpu)

    def _execute_in_pieces(self, request: Request) -> tuple[list[Outcome], BatchExecution]:
        """A request of more items than the engine takes at once, which is alone in its batch."""
        started_ns = time.monotonic_ns()
        copying_ns = computing_ns = 0
        pieces: list[Arrays] = []
        for first in range(0, request.items, self._max_batch):
            end = min(first + self._max_batch, request.items)
            inputs = {name: array[first:end] for name, array in request.inputs.items()}
            part = replace(request, inputs=inputs, items=end - first, encode=_copied)
            ((_, outputs),), took = self.execute([part])
            pieces.append(outputs)
            copying_ns += took.copied_ns - took.started_ns
            computing_ns += took.computed_ns - took.copied_ns
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in self._outputs}
        outcome = (request, request.encode(joined))
        return [outcome], BatchExecution(request.items, request.enqueued_ns, started_ns, started_ns + copying_ns,
                                         started_ns + copying_ns + computing_ns, time.monotonic_ns(), self._gpu)

    def _shapes(self, request: Request, items: int) -> dict[str, tuple[int, ...]]:
        """Those of the batch's inputs: all its requests have the same, but for their items."""
        return {name: (items, *array.shape[1:]) if self._batched else array.shape
                for name, array in request.inputs.items()}

    def _gather(self, context: ExecutionContext, batch: list[Request], items: int) -> None:
        """Copies the requests' inputs side by side into the context: the only copy between message and engine."""
        for name in batch[0].inputs:
            slots = context.input(name, items)
            if not self._batched:
                copy_into(slots, batch[0].inputs[name])
                continue
            first = 0
            for request in batch:
                copy_into(slots[first:first + request.items], request.inputs[name])
                first += request.items

    def _scatter(self, context: ExecutionContext, batch: list[Request], items: int) -> list[Outcome]:
        """Encodes each request's items while the views of the outputs are valid."""
        outputs = {name: context.output(name, items) for name in self._outputs}
        outcomes: list[Outcome] = []
        first = 0
        for request in batch:
            end = first + request.items
            mine = {name: view[first:end] for name, view in outputs.items()} if self._batched else outputs
            outcomes.append((request, request.encode(mine)))
            first = end
        return outcomes
