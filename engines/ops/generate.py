"""Operators that create tensors."""
from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError, UnknownTensorError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import BatchInt, dim, extent, fixed
from infer_server.engines.ops.items import ItemAxes, repeated
from infer_server.engines.ops.op import Inputs, Op, Types, Values, present


class ConstantOfShape(Op):
    """Tensor of the attribute `shape` filled with the attribute `value` (one element)."""

    @classmethod
    def types(cls, node: Node) -> Types:
        return (TensorType(cls._value(node).dtype, tuple(node.attrs["shape"])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return repeated(outputs[0].shape)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        return np.full(fixed(node.attrs["shape"]), cls._value(node))

    @staticmethod
    def _value(node: Node) -> Array:
        return np.asarray(node.attrs.get("value", np.float32(0))).reshape(())


class Range(Op):
    """Sequence start, start + delta, ... below limit, from three scalars."""

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        first, *_ = present(inputs)
        if any(v is None for v in values) or len(values) < 3:
            raise UnknownTensorError("the length depends on data; start, limit and delta must be constants",
                                     node.inputs)
        start, limit, delta = (_whole(v.item()) for v in values if v is not None)
        if delta == 0 or any(isinstance(v, float) and not math.isfinite(v) for v in (start, limit, delta)):
            raise GraphError(f"the number of steps from {start} to {limit} by {delta} is undefined")
        length = limit - start
        if delta != 1 or not isinstance(length, BatchInt):
            integers = isinstance(length, int) and isinstance(delta, int)
            length = max(-(-length // delta) if integers else math.ceil(length / delta), 0)
        return (TensorType(first.dtype, (dim(extent(dim(length))),)),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        start, limit, delta = (a.item() for a in arrays)
        length = max(math.ceil((limit - start) / delta), 0)
        return np.asarray(start + delta * np.arange(length), arrays[0].dtype)


def _whole(value: Any) -> Any:
    """Convert an integral number to int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def random_numbers(process: int) -> np.random.Generator:
    """Return the random generator of a process, shared by its threads.

    Seeding per use would take longer than drawing, and a forked process must not continue its parent's sequence.
    """
    return np.random.default_rng()


class Multinomial(Op):
    """Draw of `sample_size` categories per row of x [N, categories], the logarithms of weights.

    Categories are int32 or int64 according to `dtype`. The argmax of x plus Gumbel noise is such a draw.

    References
    ----------
    Maddison et al., "A* Sampling", 2014, section 2.
    """
    attributes = ("dtype", "sample_size", "seed")

    @classmethod
    def random(cls, node: Node) -> bool:
        return True

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        if len(x.shape) != 2:
            raise GraphError("the input must be a matrix with a row of weights for each item")
        return (TensorType(cls._dtype(node), (x.shape[0], node.attrs.get("sample_size", 1))),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        drawn = x[:, None].astype(np.float64) + random_numbers(os.getpid()).gumbel(
            size=(len(x), node.attrs.get("sample_size", 1), x.shape[1]))
        return np.asarray(drawn.argmax(-1), cls._dtype(node))

    @staticmethod
    def _dtype(node: Node) -> np.dtype[Any]:
        wanted = {6: "int32", 7: "int64"}       # TensorProto.DataType
        if (number := node.attrs.get("dtype", 6)) not in wanted:
            raise GraphError("dtype must be int32 or int64")
        return np.dtype(wanted[number])
