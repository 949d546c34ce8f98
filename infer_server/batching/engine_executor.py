"""Execute batches on an engine: gather the requests' inputs in one context, run it, scatter the outputs.

Inputs and outputs that are on the engine's own GPU stay there. Inputs that the engine can read in the request's memory
are not copied either.
"""
from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import ExecutionContext, ZeroCopyContext
from infer_server.batching.request import Arrays, EncodesTogether, Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.gpu_tensors import GpuTensor

_NO_BUFFERS: Mapping[str, Any] = MappingProxyType({})
_SMALL_COPY = 500           # number of elements up to which numpy keeps the interpreter lock
_JOINED_BYTES = 256 << 10   # size of a batch's input up to which copying it twice is cheaper than a copy a request


def copy_into(slots: NDArray[Any], items: NDArray[Any]) -> None:
    """Copy items into slots of the same number of elements without releasing the interpreter lock.

    numpy releases the lock for every large copy and then waits for the event loop to give it back: for images of 600 KB
    that took ten times as long as the copies themselves, during which nothing is computed.
    """
    if slots.size <= _SMALL_COPY:
        slots[...] = items.reshape(slots.shape)
        return
    plain = slots.dtype == items.dtype and not slots.dtype.hasobject
    if plain and slots.flags.c_contiguous and items.flags.c_contiguous:
        slots.reshape(-1).view(np.uint8).data[:] = items.reshape(-1).view(np.uint8).data
    else:
        slots[...] = items.reshape(slots.shape)


def _join_into(batch: list[Request], name: str, slots: NDArray[Any]) -> bool:
    """Copy an input of a batch into its slots at once; return False if it needs a copy for each request."""
    if slots.nbytes > _JOINED_BYTES or slots.dtype.hasobject or not slots.flags.c_contiguous:
        return False
    tensors = [request.inputs[name] for request in batch]
    first = tensors[0]
    if isinstance(first, GpuTensor) or first.dtype != slots.dtype or first.shape[1:] != slots.shape[1:]:
        return False
    shape, dtype = first.shape, first.dtype
    if any([type(tensor) is not np.ndarray or tensor.shape != shape or tensor.dtype is not dtype
            for tensor in tensors]):
        return False
    if first.size <= _SMALL_COPY:
        np.concatenate(tensors, out=slots)
        return True
    try:
        contents = b"".join(tensors)            # type: ignore[arg-type]        # arrays are buffers
    except (BufferError, ValueError):           # not contiguous, or a dtype that the struct module lacks
        return False
    slots.reshape(-1).view(np.uint8).data[:] = contents
    return True


def _array(tensor: NDArray[Any] | GpuTensor) -> NDArray[Any]:
    """Return the tensor in host memory."""
    return tensor.array() if isinstance(tensor, GpuTensor) else tensor


def _copy_arrays(computed: Arrays) -> Arrays:
    """Return copies that stay valid after the next execution."""
    return {name: array.copy() for name, array in computed.items()}


class EngineExecutor:
    """Executor of one execution context; belongs to the executing thread."""

    def __init__(self, context: ExecutionContext, outputs: Sequence[str], max_batch: int,
                 is_open: bool = False, gpu: int | None = None, is_mixed: bool = False) -> None:
        """Create an executor.

        Parameters
        ----------
        context : ExecutionContext
            Context to execute in.
        outputs : sequence of str
            Outputs to read.
        max_batch : int
            Maximum batch of the engine; 0 if it has no batch axis.
        is_open : bool
            True if shapes differ from batch to batch.
        gpu : int, optional
            Number of the GPU; None for the CPU.
        is_mixed : bool
            True if the batch axis is not the leading one of every tensor; then each request is a batch of its own.
        """
        self._context = context
        self._outputs = outputs
        self._takes_count = max_batch > 0           # the context takes the number of items
        self._batched = self._takes_count and not is_mixed       # tensors have a leading batch axis
        self._max_batch = max_batch
        self._is_open, self._gpu, self._may_bind = is_open, gpu, not is_mixed
        self._zero_copy = self._zero_copy_context(context)      # None if it cannot read inputs in place

    def close(self) -> None:
        self._context.close()

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution]:
        items = sum([request.items for request in batch])
        if self._batched and items > self._max_batch:
            return self._execute_in_pieces(batch[0])
        started_ns = time.monotonic_ns()
        context = self._context.at(self._shapes(batch, items)) if self._is_open else self._context
        slots = items or 1 if self._takes_count else 1
        if not items:
            self._zero_inputs(context, batch[0])
        arrays = self._gather(context, batch, slots)
        buffers: Sequence[Mapping[str, Any]] = ()
        if self._gpu is not None:
            buffers = [self._output_buffers(context, request, slots) for request in batch]
            for name in {name for own in buffers for name in own}:
                arrays[name] = [own.get(name, request.items) for own, request in zip(buffers, batch, strict=True)]
        copied_ns = time.monotonic_ns()
        if arrays:
            cast(ZeroCopyContext, context).execute_with(slots, arrays)
        else:
            context.execute(slots)
        computed_ns = time.monotonic_ns()
        outcomes = self._scatter(context, batch, slots, buffers)
        return outcomes, BatchExecution(items or 1, batch[0].enqueued_ns, started_ns, copied_ns, computed_ns,
                                        time.monotonic_ns(), self._gpu)

    def _execute_in_pieces(self, request: Request) -> tuple[list[Outcome], BatchExecution]:
        """Execute a request of more items than the engine's maximum batch, which is alone in its batch."""
        started_ns = time.monotonic_ns()
        copying_ns = computing_ns = 0
        pieces: list[Arrays] = []
        arrays = {name: _array(tensor) for name, tensor in request.inputs.items()}
        for first in range(0, request.items, self._max_batch):
            end = min(first + self._max_batch, request.items)
            inputs = {name: array[first:end] for name, array in arrays.items()}
            part = replace(request, inputs=inputs, items=end - first, encode=_copy_arrays, output_buffers=_NO_BUFFERS)
            ((_, outputs),), execution = self.execute([part])
            pieces.append(outputs)
            copying_ns += execution.copied_ns - execution.started_ns
            computing_ns += execution.computed_ns - execution.copied_ns
        outputs = {name: np.concatenate([piece[name] for piece in pieces]) for name in self._outputs}
        outcome = (request, request.encode(outputs))
        return [outcome], BatchExecution(request.items, request.enqueued_ns, started_ns, started_ns + copying_ns,
                                         started_ns + copying_ns + computing_ns, time.monotonic_ns(), self._gpu)

    def _zero_copy_context(self, context: ExecutionContext) -> ZeroCopyContext | None:
        """Return the context if it may read inputs in place. An isinstance check of the protocol would take 10 us."""
        may_bind = self._may_bind and bool(getattr(context, "zero_copy_inputs", ()))
        return cast(ZeroCopyContext, context) if may_bind else None

    def _zero_inputs(self, context: ExecutionContext, request: Request) -> None:
        """Fill one item with zeros for a request of none: executing it yields the shapes of the outputs."""
        for name in request.inputs:
            slot = context.input(name, 1)
            slot[...] = np.zeros((), slot.dtype)

    def _shapes(self, batch: Sequence[Request], items: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the batch's inputs; its requests differ only in their number of items."""
        return {name: (items or 1, *array.shape[1:]) if self._batched else array.shape
                for name, array in batch[0].inputs.items()}

    def _gather(self, context: ExecutionContext, batch: list[Request], items: int) -> dict[str, list[Any]]:
        """Copy the requests' inputs into the context, and return those that are used in place, by name.

        See `ZeroCopyContext` for the form of the result.
        """
        arrays: dict[str, list[Any]] = {}
        zero_copy = self._zero_copy_context(context) if self._is_open else self._zero_copy
        for name in batch[0].inputs:
            slots = context.input(name, items)
            reader = zero_copy if zero_copy and name in zero_copy.zero_copy_inputs else None
            pieces: list[Any] = []
            if reader is None and self._batched and len(batch) > 1 and _join_into(batch, name, slots):
                continue
            first, has_in_place = 0, False
            for request in batch:
                tensor = request.inputs[name]
                slot = slots[first:first + request.items] if self._batched else slots
                first += request.items
                if isinstance(tensor, GpuTensor):
                    in_place = tensor.gpu == self._gpu
                else:
                    if tensor.shape != slot.shape:
                        tensor = tensor.reshape(slot.shape)
                    in_place = reader is not None and reader.accepts(name, tensor)
                if not in_place:
                    copy_into(slot, _array(tensor))
                pieces.append(tensor if in_place else request.items)
                has_in_place |= in_place
            if has_in_place:
                arrays[name] = pieces
        return arrays

    def _output_buffers(self, context: ExecutionContext, request: Request, items: int) -> dict[str, GpuTensor]:
        """Return the output buffers of a request that are on the engine's own GPU."""
        tensors: dict[str, GpuTensor] = {}
        for name, buffer in request.output_buffers.items():
            if buffer.gpu == self._gpu:
                view = context.output(name, items)
                shape = (request.items, *view.shape[1:]) if self._batched else view.shape
                if tensor := buffer.tensor(shape, view.dtype):
                    tensors[name] = tensor
        return tensors

    def _encode_together(self, batch: list[Request], outputs: Arrays, buffers: Sequence[Mapping[str, Any]]
                          ) -> Sequence[Any] | None:
        """Encode single-item requests with one call of their common encoder; return None if it cannot."""
        encode = batch[0].encode
        each = getattr(encode, "each", None)        # of EncodesTogether; isinstance with a protocol takes 10 us
        if each is None or any(buffers) or any([request.encode is not encode for request in batch]):
            return None
        return cast(EncodesTogether, encode).each(outputs, len(batch))

    def _scatter(self, context: ExecutionContext, batch: list[Request], items: int,
                 buffers: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Encode each request's outputs while their views are valid.

        `buffers` has the outputs that are in each request's own buffers; it may be empty.
        """
        outputs = {name: context.output(name, items) for name in self._outputs}
        if self._batched and len(batch) in (1, items) and batch[0].items and (
                responses := self._encode_together(batch, outputs, buffers)):
            return list(zip(batch, responses, strict=True))
        outcomes: list[Outcome] = []
        first = 0
        for request, own in zip(batch, buffers or itertools.repeat(_NO_BUFFERS), strict=False):
            end = first + request.items
            views = {name: view[first:end] for name, view in outputs.items()} if self._batched else outputs
            outcomes.append((request, request.encode({**views, **own} if own else views)))
            first = end
        return outcomes
