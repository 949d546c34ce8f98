"""Deciding inputs, on whose values shapes or branches depend.

A graph is imported for one set of these values, as it is for one set of extents.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from infer_server.engines.frontend.onnx_file import OnnxModel, array_of
from infer_server.engines.ir.dtypes import is_float
from infer_server.engines.ir.graph import Array, TensorType

MOST = 64           # most elements of a deciding input
MOST_FLOATS = 16
GUESSES = (1, 0, 2, 16, 224)    # values to try if the model compares the input with none


def may_decide(kind: TensorType) -> bool:
    """Return True if an input is so small that it can decide, because few different values are to be expected."""
    if kind.dtype.kind in "iub":
        return len(kind.shape) <= 1 or _elements(kind) <= MOST
    return _elements(kind) <= MOST_FLOATS


def likely_values(source: OnnxModel, types: Mapping[str, TensorType], names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sets of one number per input to try, first those that the model compares the input with."""
    choices = {name: list(dict.fromkeys((*_compared(source, name), *GUESSES))) for name in names}
    for index in range(max(map(len, choices.values()), default=0)):
        yield {name: numbers[min(index, len(numbers) - 1)] for name, numbers in choices.items()}


def filled(kind: TensorType, shape: Sequence[int], number: int) -> Array:
    """Return an array filled with a number; integers count up from it, since lists of axes have no duplicates."""
    if kind.dtype.kind in "iu":
        return (number + np.arange(math.prod(shape))).reshape(shape).astype(kind.dtype)
    return np.full(shape, bool(number) if kind.dtype.kind == "b" else number, np.float32 if is_float(kind)
                   else kind.dtype).astype(kind.dtype)


def _elements(kind: TensorType) -> float:
    return math.prod(extent if isinstance(extent, int) else math.inf for extent in kind.shape)


def _compared(source: OnnxModel, name: str) -> list[int]:
    """Return the scalar constants that Equal nodes compare the input with."""
    nodes = source.proto.graph.node
    constants = {node.output[0]: attribute.t for node in nodes if node.op_type == "Constant"
                 for attribute in node.attribute if attribute.HasField("t")}
    found = []
    for node in nodes:
        if node.op_type == "Equal" and name in node.input:
            for other in node.input:
                value = source.weights.get(other)
                if value is None and other in constants:
                    value = array_of(source.name, constants[other])
                if value is not None and value.size == 1:
                    found.append(int(value.item()))
    return found
