"""Values that follow from extents which are counted (engines.ir.counted), while a model is imported.

What shapes may depend on, small integers that operators compute symbolically, is an object array of numbers that are
counted, as it is one of Extents where the batch is open. Everything else is a Deferred: the operator's reference runs
when the extents are known.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.errors import UnknownTensorError
from engines.ir.counted import Pinned, counting_in, is_counted
from engines.ir.deferred import Deferred, numbers
from engines.ir.graph import Array, Node, TensorType
from engines.ir.shapes import Extent
from engines.ops import op_of
from engines.ops.op import Inputs, Op, Types, Values
from engines.ops.reference import run_node

EXACT = 1 << 24         # whole numbers below it are float32's


def is_symbolic(value: Any) -> bool:
    """Whether an array depends on the batch."""
    return isinstance(value, np.ndarray) and value.dtype == object and any(isinstance(v, Extent) for v in value.flat)


def follows_from_extents(op: type[Op], node: Node, inputs: Inputs, values: Values, types: Types) -> bool:
    """Whether all that the node reads is known, and what it makes, or of what shape that is, is counted."""
    given = [value for value, kind in zip(values, inputs, strict=True) if kind is not None]
    if op.random(node) or any(map(is_symbolic, given)) or any(
            isinstance(extent, str) for kind in types for extent in kind.shape):
        return False
    if node.op in ("Shape", "Size"):
        return any(is_counted(kind.shape) for kind in inputs if kind is not None)
    return all(value is not None for value in given) and (
        any(isinstance(value, Deferred) or is_counted(value) for value in given)
        or is_counted(tuple(node.attrs.values())) or any(is_counted(kind.shape) for kind in types))


def infer(op: type[Op], node: Node, inputs: Inputs, values: Values) -> Types:
    """op.infer; what values that follow from extents would say against the node is checked once they are known. Raises
    Pinned: what a deferred one says is asked for."""
    late = [isinstance(value, Deferred) or is_counted(value) and not is_symbolic(value) for value in values]
    if not any(late):
        return op.infer(node, inputs, values)
    said = [_in_floats(value) if isinstance(value, Deferred) and node.op == "Range" else
            None if isinstance(value, Deferred) else value for value in values]
    try:
        types = op.infer(node, inputs, said)
    except UnknownTensorError as error:
        raise Pinned(str(error)) from error
    computed = any(value is None or is_symbolic(value) for value, kind in zip(values, inputs, strict=True) if kind)
    if computed and (counting := counting_in(list(map(_listed, values)))):
        given = [as_constant(value, kind) if kind and follows else None
                 for value, kind, follows in zip(values, inputs, late, strict=True)]
        counting.checks.append(Deferred(_inferred, (node, tuple(inputs), tuple(given)), np.dtype(object), ()))
    return types


def _in_floats(value: Deferred) -> Any:
    """The numbers that a Cast made floats, in which they are exact."""
    if value.function is _made and value.arguments[2].op == "Cast" and value.dtype in (np.float32, np.float64):
        found = value.arguments[3].listed
        if found is not None and all(-EXACT < number < EXACT for number in found):
            array = np.empty(value.shape, object)
            array.reshape(-1)[:] = found
            return array
    return None


def _listed(value: Any) -> Any:
    """The elements of an object array."""
    return value.reshape(-1).tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def _inferred(node: Node, inputs: Inputs, values: Values) -> Types:
    """Raises GraphError: the values do not fit."""
    return op_of(node.op).infer(node, inputs, values)


def known(op: type[Op], node: Node, inputs: Inputs, values: Values, types: Types) -> tuple[Any, ...]:
    """The values that the node makes: numbers, or Deferreds."""
    if not any(isinstance(value, Deferred) for value in values) and not any(is_counted(kind.shape) for kind in types):
        try:
            results = op.known(node, inputs, values)
        except Pinned:
            results = None
        if results is not None:
            return results
    arguments = [as_constant(value, kind) if kind else None for value, kind in zip(values, inputs, strict=True)]
    return deferred(node, arguments, types)


def is_deferred(node: Node, given: Values, types: Types) -> bool:
    """Whether what a node makes of constants is not known before the extents are."""
    return any(isinstance(value, Deferred) for value in given) or is_counted(tuple(node.attrs.values())) or any(
        is_counted(kind.shape) for kind in types)


def deferred(node: Node, arguments: Sequence[Any], types: Types) -> tuple[Any, ...]:
    """What the reference makes of constants, once the extents are known."""
    return tuple(Deferred(_made, (which, kind.dtype, node, *arguments), kind.dtype, kind.shape)
                 for which, kind in enumerate(types))


def as_constant(value: Any, kind: TensorType) -> Any:
    """A known value as a constant of a graph."""
    if isinstance(value, np.ndarray) and is_counted(value):
        return numbers(value.reshape(-1).tolist(), kind.dtype, value.shape)
    return value


def _made(which: int, dtype: np.dtype[Any], node: Node, *arrays: Array) -> Array:
    return run_node(node, arrays)[which].astype(dtype, copy=False)
