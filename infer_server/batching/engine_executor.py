"""Executes batches on an engine: items side by side in one context, run, taken apart.

What lies on the GPU that the engine executes on is taken from there, and what is to lie there is put there. What the
engine can read where a request has it is not copied either.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import ExecutionContext, PlacesTensors
from infer_server.batching.request import Arrays, EncodesTogether, Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.gpu_tensors import GpuTensor

_NOWHERE: Mapping[str, Any] = MappingProxyType({})
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


def _joined(batch: list[Request], name: str, slots: NDArray[Any]) -> bool:
    """Copy the small inputs of a batch into their slots at once. False: they are to be copied one by one."""
    if slots.size > _FEW * len(batch):
        return False
    tensors = [request.inputs[name] for request in batch]
    first = tensors[0]
    if isinstance(first, GpuTensor) or first.dtype != slots.dtype or any([
            type(tensor) is not np.ndarray or tensor.shape != first.shape for tensor in tensors]) or (
            first.shape[1:] != slots.shape[1:]):
        return False
    np.concatenate(tensors, out=slots)
    return True


def _array(tensor: NDArray[Any] | GpuTensor) -> NDArray[Any]:
    """In the host's memory."""
    return tensor.array() if isinstance(tensor, GpuTensor) else tensor


def _copied(computed: Arrays) -> Arrays:
    """What outlives the execution of a piece."""
    return {name: array.copy() for name, array in computed.items()}


class EngineExecutor:
    """One execution context; belongs to the thread that executes."""

    def __init__(self, context: ExecutionContext, outputs: Sequence[str], max_batch: int,
                 is_open: bool = False, gpu: int | None = None, is_mixed: bool = False) -> None:
        """max_batch: of the engine; 0: it has no batch axis. is_open: shapes differ from batch to batch. gpu: that it
        executes on; None: the CPU. is_mixed: not all tensors have the batch axis in front, and no requests share a
        batch."""
        self._context = context
        self._outputs = outputs
        self._counts = max_batch > 0                # the context is told how many items there are
        self._batched = self._counts and not is_mixed       # tensors have a leading batch axis
        self._max_batch = max_batch
        self._is_open, self._gpu, self._lends = is_open, gpu, not is_mixed
        self._placing = self._placing_of(context)   # at the shapes that it has now

    def close(self) -> None:
        self._context.close()

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution]:
        items = sum([request.items for request in batch])
        if self._batched and items > self._max_batch:
            return self._execute_in_pieces(batch[0])
        started_ns = time.monotonic_ns()
        context = self._context.at(self._shapes(batch[0], items)) if self._is_open else self._context
        slots = items or 1 if self._counts else 1
        if not items:
            self._blank(context, batch[0])
        placed = self._gather(context, batch, slots)
        there = [self._in_rooms(context, request, slots) if request.rooms else _NOWHERE for request in batch]
        for name in {name for mine in there for name in mine}:
            placed[name] = [mine.get(name, request.items) for mine, request in zip(there, batch, strict=True)]
        copied_ns = time.monotonic_ns()
        if placed:
            cast(PlacesTensors, context).execute_with(slots, placed)
        else:
            context.execute(slots)
        computed_ns = time.monotonic_ns()
        outcomes = self._scatter(context, batch, slots, there)
        return outcomes, BatchExecution(items or 1, batch[0].enqueued_ns, started_ns, copied_ns, computed_ns,
                                        time.monotonic_ns(), self._gpu)

    def _execute_in_pieces(self, request: Request) -> tuple[list[Outcome], BatchExecution]:
        """A request of more items than the engine takes at once, which is alone in its batch."""
        started_ns = time.monotonic_ns()
        copying_ns = computing_ns = 0
        pieces: list[Arrays] = []
        arrays = {name: _array(tensor) for name, tensor in request.inputs.items()}
        for first in range(0, request.items, self._max_batch):
            end = min(first + self._max_batch, request.items)
            inputs = {name: array[first:end] for name, array in arrays.items()}
            part = replace(request, inputs=inputs, items=end - first, encode=_copied, rooms=_NOWHERE)
            ((_, outputs),), took = self.execute([part])
            pieces.append(outputs)
            copying_ns += took.copied_ns - took.started_ns
            computing_ns += took.computed_ns - took.copied_ns
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in self._outputs}
        outcome = (request, request.encode(joined))
        return [outcome], BatchExecution(request.items, request.enqueued_ns, started_ns, started_ns + copying_ns,
                                         started_ns + copying_ns + computing_ns, time.monotonic_ns(), self._gpu)

    def _placing_of(self, context: ExecutionContext) -> PlacesTensors | None:
        """The context, if it may read requests' own memory. Not by isinstance: to ask a protocol takes 10 us."""
        lends = self._lends and bool(getattr(context, "in_place", ()))
        return cast(PlacesTensors, context) if lends else None

    def _blank(self, context: ExecutionContext, request: Request) -> None:
        """Zeros as the one item that is executed for a request of none: it tells the shapes of the outputs."""
        for name in request.inputs:
            slot = context.input(name, 1)
            slot[...] = np.zeros((), slot.dtype)

    def _shapes(self, request: Request, items: int) -> dict[str, tuple[int, ...]]:
        """Those of the batch's inputs: all its requests have the same, but for their items."""
        return {name: (items or 1, *array.shape[1:]) if self._batched else array.shape
                for name, array in request.inputs.items()}

    def _gather(self, context: ExecutionContext, batch: list[Request], items: int) -> dict[str, list[Any]]:
        """Copies the requests' inputs side by side into the context, but for what is taken where it lies: that, by
        name; see PlacesTensors."""
        placed: dict[str, list[Any]] = {}
        placing = self._placing_of(context) if self._is_open else self._placing
        for name in batch[0].inputs:
            slots = context.input(name, items)
            reader = placing if placing and name in placing.in_place else None
            pieces: list[Any] = []
            if reader is None and self._batched and len(batch) > 1 and _joined(batch, name, slots):
                continue
            first, is_there = 0, False
            for request in batch:
                tensor = request.inputs[name]
                room = slots[first:first + request.items] if self._batched else slots
                first += request.items
                if isinstance(tensor, GpuTensor):
                    stays = tensor.gpu == self._gpu
                else:
                    if tensor.shape != room.shape:
                        tensor = tensor.reshape(room.shape)
                    stays = reader is not None and reader.takes(name, tensor)
                if not stays:
                    copy_into(room, _array(tensor))
                pieces.append(tensor if stays else request.items)
                is_there |= stays
            if is_there:
                placed[name] = pieces
        return placed

    def _in_rooms(self, context: ExecutionContext, request: Request, items: int) -> dict[str, GpuTensor]:
        """The outputs that are to be put where a request wants them, on the engine's own GPU."""
        found: dict[str, GpuTensor] = {}
        for name, room in request.rooms.items():
            if room.gpu == self._gpu:
                view = context.output(name, items)
                shape = (request.items, *view.shape[1:]) if self._batched else view.shape
                if tensor := room.tensor(shape, view.dtype):
                    found[name] = tensor
        return found

    def _encoded_together(self, batch: list[Request], outputs: Arrays, there: Sequence[Mapping[str, Any]]
                          ) -> Sequence[Any] | None:
        """Return the responses of requests of one item each that have one encoder; None if it cannot."""
        encode = batch[0].encode
        each = getattr(encode, "each", None)        # of EncodesTogether: to ask a protocol takes 10 us
        if each is None or any([request.encode is not encode for request in batch]) or any(there):
            return None
        return cast(EncodesTogether, encode).each(outputs, len(batch))

    def _scatter(self, context: ExecutionContext, batch: list[Request], items: int,
                 there: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Encodes each request's items while the views of the outputs are valid. there: its outputs that are where it
        wants them."""
        outputs = {name: context.output(name, items) for name in self._outputs}
        if self._batched and len(batch) == items > 1 and (responses := self._encoded_together(batch, outputs, there)):
            return list(zip(batch, responses, strict=True))
        outcomes: list[Outcome] = []
        first = 0
        for request, own in zip(batch, there, strict=True):
            end = first + request.items
            mine = {name: view[first:end] for name, view in outputs.items()} if self._batched else outputs
            outcomes.append((request, request.encode({**mine, **own} if own else mine)))
            first = end
        return outcomes
