"""Ragged batches (allow_ragged_batch, batch_input, batch_output): requests of unequal shapes share an execution.

The elements of a ragged input of all requests in a batch are concatenated in one dimension. Computed inputs, which
clients do not send, tell the model where each request begins, or its shape; outputs that are concatenated likewise are
split by the shapes of an input. For a ragged input x in requests of shapes [1, 3], [1, 4], [1, 5]:

    x                                   [12]
    ELEMENT_COUNT                       3, 4, 5
    ACCUMULATED_ELEMENT_COUNT           3, 7, 12
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO 0, 3, 7, 12
    MAX_ELEMENT_COUNT_AS_SHAPE          five zeros: only its shape matters
    ITEM_SHAPE                          [[3], [4], [5]], a row for each item of a request
    ITEM_SHAPE_FLATTEN                  the same rows, concatenated
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infer_server.errors import ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype
from infer_server.protos import model_config

Shape = tuple[int, ...]


def _counts(shapes: Sequence[Shape]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _rows(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape[1:] for shape in shapes for _ in range(shape[0])]


_VALUES: dict[str, Callable[[Sequence[Shape]], ArrayLike]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: list(accumulate(_counts(shapes))),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: list(accumulate(_counts(shapes), initial=0)),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(max(_counts(shapes))),
    "BATCH_ITEM_SHAPE": _rows,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: [extent for row in _rows(shapes) for extent in row],
}


@dataclass(frozen=True)
class ShapeInput:
    """Inputs of the model that are computed from the shapes of another input (batch_input)."""
    kind: str
    names: tuple[str, ...]
    datatype: Datatype
    source: str

    def values(self, shapes: Sequence[Shape]) -> NDArray[Any]:
        """Return the value of the inputs for the source's shapes in each request of the batch, as clients send them."""
        return np.array(_VALUES[self.kind](shapes), self.datatype.array)


@dataclass(frozen=True)
class Ragged:
    """Ragged batching configuration of a model."""
    inputs: frozenset[str]                  # ragged inputs
    computed: tuple[ShapeInput, ...]
    scattered: Mapping[str, str]            # batch_output: for each output, the input whose shapes split it

    @property
    def names(self) -> frozenset[str]:
        """Names of the computed inputs."""
        return frozenset(name for computed in self.computed for name in computed.names)

    @property
    def sources(self) -> list[tuple[str, str]]:
        """Pairs of a field and the input that it names as its source."""
        return [*(("batch_input", computed.source) for computed in self.computed),
                *(("batch_output", source) for source in self.scattered.values())]

    def check_sources(self, inputs: Collection[str]) -> None:
        """Raise ModelConfigError if a source is not among these inputs."""
        for field, source in self.sources:
            if source not in inputs:
                raise ModelConfigError(f"{field}: source_input '{source}' is not an input; the inputs are "
                                       f"{', '.join(inputs)}")


def ragged_of(message: model_config.ModelConfig) -> Ragged | None:
    """Parse the ragged batching of a configuration; None if it has none. Raises ModelConfigError."""
    inputs = frozenset(spec.name for spec in message.input if spec.allow_ragged_batch)
    if not inputs and not message.batch_input and not message.batch_output:
        return None
    if message.HasField("sequence_batching"):
        raise ModelConfigError("allow_ragged_batch: the requests of a sequence are not concatenated; pad them to equal "
                               "shapes in the client, and remove it")
    computed = tuple(_shape_input(item) for item in message.batch_input)
    names = [name for each in computed for name in each.names]
    if twice := [name for name in names if names.count(name) > 1 or name in {spec.name for spec in message.input}]:
        raise ModelConfigError(f"batch_input: '{twice[0]}' is given twice; name it in one batch_input, and not in "
                               "`input`")
    scattered: dict[str, str] = {}
    for item in message.batch_output:
        source = _source("batch_output", "BATCH_SCATTER_WITH_INPUT_SHAPE", item.source_input)
        for name in item.target_name:
            if name in scattered:
                raise ModelConfigError(f"batch_output: target_name '{name}' is given twice")
            scattered[name] = source
    return Ragged(inputs, computed, scattered)


def check_ragged(ragged: Ragged, message: model_config.ModelConfig) -> None:
    """Check ragged batching against the completed configuration.

    Raises
    ------
    ModelConfigError
        A tensor does not exist, or the shapes of an output do not follow from its source.
    """
    inputs, outputs = ({spec.name: spec for spec in specs} for specs in (message.input, message.output))
    ragged.check_sources(inputs)
    for name, source in ragged.scattered.items():
        if name not in outputs:
            raise ModelConfigError(f"batch_output: target_name '{name}' is not an output; the outputs are "
                                   f"{', '.join(outputs)}")
        dims = model_dims(outputs[name])
        if -1 in dims[len(inputs[source].dims):]:
            raise ModelConfigError(f"output '{name}': dims {list(dims)} follow from those of '{source}', "
                                   f"{list(inputs[source].dims)}, where they are -1; write numbers for the others")


def model_dims(spec: Any) -> list[int]:
    """Return the dims of a tensor in the model: its reshape, or else its dims."""
    return list(spec.reshape.shape if spec.HasField("reshape") else spec.dims)


def _shape_input(batch_input: model_config.BatchInput) -> ShapeInput:
    kind = model_config.BatchInput.Kind.Name(batch_input.kind)
    source = _source("batch_input", kind, batch_input.source_input)
    if batch_input.data_type not in (model_config.TYPE_INT32, model_config.TYPE_FP32):
        raise ModelConfigError(f"batch_input {kind}: data_type must be TYPE_INT32 or TYPE_FP32")
    if not batch_input.target_name:
        raise ModelConfigError(f"batch_input {kind}: give target_name, the input of the model to compute")
    return ShapeInput(kind, tuple(batch_input.target_name), FROM_CONFIG[batch_input.data_type], source)


def _source(field: str, kind: str, names: Sequence[str]) -> str:
    if len(names) != 1:
        raise ModelConfigError(f"{field} {kind}: expected one source_input, got {len(names)}")
    return names[0]
