"""Execute ragged batches on an engine: requests of unequal shapes, concatenated in one tensor."""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from infer_server.backend import ExecutionContext, Shapes
from infer_server.batching.engine_executor import copy_into
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.ragged import Ragged
from infer_server.engines.errors import InputError
from infer_server.errors import ExecutionError

log = logging.getLogger(__name__)


class RaggedExecutor:
    """Execution context of an engine without a batch axis; belongs to the executing thread."""

    def __init__(self, context: ExecutionContext, config: ModelConfig, ragged: Ragged, gpu: int | None = None) -> None:
        """Create an executor on a GPU, or on the CPU if `gpu` is None."""
        self._context, self._ragged, self._gpu = context, ragged, gpu
        self._outputs, self._batched = config.outputs, config.batched

    def close(self) -> None:
        self._context.close()

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        started_ns = time.monotonic_ns()
        inputs = self._inputs(batch)
        try:
            context = self._context.at({name: _shape(parts) for name, parts in inputs.items()})
        except InputError:
            if len(batch) == 1:
                raise
            return self._in_halves(batch)       # the concatenation exceeds the engine's maximum shapes
        for name, parts in inputs.items():
            _concatenate_into(context.input(name, 1), parts)
        copied_ns = time.monotonic_ns()
        context.execute(1)
        computed_ns = time.monotonic_ns()
        outcomes = self._scatter(context, batch)
        items = sum(request.items for request in batch)
        return outcomes, BatchExecution(items, batch[0].enqueued_ns, started_ns, copied_ns, computed_ns,
                                        time.monotonic_ns(), self._gpu)

    def _inputs(self, batch: Sequence[Request]) -> dict[str, list[NDArray[Any]]]:
        """Return the parts of each input: one for each request, or one for a computed input (batch_input)."""
        inputs = {name: [request.inputs[name].reshape(-1) if name in self._ragged.inputs else request.inputs[name]
                         for request in batch] for name in batch[0].inputs}
        for computed in self._ragged.computed:
            shapes = [request.inputs[computed.source].shape for request in batch]
            if self._batched and [shape[0] for shape in shapes] != [request.items for request in batch]:
                raise ExecutionError(f"input '{computed.source}' has other items than its requests: its shapes are "
                                     f"{', '.join(map(str, map(list, shapes)))}, and one's rows would be another's")
            inputs |= dict.fromkeys(computed.names, [computed.values(shapes)])
        return inputs

    def _in_halves(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        """Execute a batch as two halves and report the successful ones as one execution."""
        half = len(batch) // 2
        (first, before), (second, after) = self._half(batch[:half]), self._half(batch[half:])
        if not before or not after:
            return first + second, before or after
        copied_ns = before.copied_ns + after.copied_ns - after.started_ns
        return first + second, before._replace(
            items=before.items + after.items, copied_ns=copied_ns, encoded_ns=after.encoded_ns,
            computed_ns=copied_ns + sum(timing.computed_ns - timing.copied_ns for timing in (before, after)))

    def _half(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        """Execute one half; an error fails only its requests, because those of the other may already be answered."""
        try:
            return self.execute(batch)
        except Exception as error:          # an engine may raise anything
            log.exception("a part of a ragged batch failed, of %d requests", len(batch))
            return [(request, ExecutionError(f"the engine failed: {error}")) for request in batch], None

    def _scatter(self, context: ExecutionContext, batch: list[Request]) -> list[Outcome]:
        """Encode each request's part of the outputs while their views are valid."""
        parts = {spec.name: self._parts(spec, context.output(spec.name, 1), batch) for spec in self._outputs}
        return [(request, request.encode({name: each[at] for name, each in parts.items()}))
                for at, request in enumerate(batch)]

    def _parts(self, spec: TensorSpec, output: NDArray[Any], batch: list[Request]) -> list[NDArray[Any]]:
        """Split an output into one part for each request. Raises ExecutionError if the parts do not cover it."""
        shapes = [self._shape_for(spec, output, request) for request in batch]
        ends = list(accumulate(map(math.prod, shapes)))
        if ends[-1] != output.size:
            raise ExecutionError(f"output '{spec.name}' is of shape {list(output.shape)}, but the requests' parts of "
                                 f"it are {', '.join(map(str, map(list, shapes)))}; give it a batch_output, or other "
                                 "dims")
        flat = output.reshape(-1)
        return [flat[end - math.prod(shape):end].reshape(shape) for shape, end in zip(shapes, ends, strict=True)]

    def _shape_for(self, spec: TensorSpec, output: NDArray[Any], request: Request) -> tuple[int, ...]:
        source = self._ragged.scattered.get(spec.name)
        if source is None:
            return (request.items, *output.shape[1:]) if self._batched else output.shape
        dims, input_shape = spec.dims if spec.reshape is None else spec.reshape, request.inputs[source].shape
        return tuple(input_shape[axis] if extent == -1 else extent
                     for axis, extent in enumerate((-1, *dims) if self._batched else dims))


def _shape(parts: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """Return the shape of the concatenated parts."""
    first = parts[0].shape
    return first if len(parts) == 1 else (sum(len(part) for part in parts), *first[1:])


def _concatenate_into(slots: NDArray[Any], parts: Sequence[NDArray[Any]]) -> None:
    if len(parts) == 1:
        copy_into(slots, parts[0])
        return
    first = 0
    for part in parts:
        copy_into(slots[first:first + len(part)], part)
        first += len(part)



def single_request_shapes(ragged: Ragged, shapes: Shapes) -> Shapes:
    """Return the shapes of the engine's inputs for a batch of a single request."""
    computed = {name: each.values([tuple(shapes[each.source])]).shape
                for each in ragged.computed for name in each.names}
    return {name: (math.prod(shape),) if name in ragged.inputs else shape for name, shape in shapes.items()} | computed
