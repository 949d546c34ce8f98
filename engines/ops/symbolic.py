"""Values that depend on symbolic sizes (infer_server.engines.ir.symbolic) during import.

Small integers that operators compute symbolically, such as shapes, are object arrays of symbolic numbers, or of
BatchInts for an open batch. All other values are Deferred: the operator's reference runs once the sizes are known.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import UnknownTensorError
from infer_server.engines.ir.deferred import Deferred, numbers
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import BatchInt
from infer_server.engines.ir.symbolic import NotSymbolic, env_in, is_symbolic, structure
from infer_server.engines.ops import op_of
from infer_server.engines.ops.op import Inputs, Op, Types, Values
from infer_server.engines.ops.reference import run_node

EXACT = 1 << 24         # integers below it are exact in float32


def depends_on_batch(value: Any) -> bool:
    """Return True if an array depends on the batch."""
    return isinstance(value, np.ndarray) and value.dtype == object and any(isinstance(v, BatchInt) for v in value.flat)


def follows_from_extents(op: type[Op], node: Node, inputs: Inputs, values: Values, types: Types) -> bool:
    """Return True if all inputs are known, and the outputs or their shapes depend on symbolic sizes."""
    given = [value for value, kind in zip(values, inputs, strict=True) if kind is not None]
    if op.random(node) or any(map(depends_on_batch, given)) or any(
            isinstance(extent, str) for kind in types for extent in kind.shape):
        return False
    if node.op in ("Shape", "Size"):
        return any(is_symbolic(kind.shape) for kind in inputs if kind is not None)
    return all(value is not None for value in given) and (
        any(isinstance(value, Deferred) or is_symbolic(value) for value in given)
        or is_symbolic(tuple(node.attrs.values())) or any(is_symbolic(kind.shape) for kind in types))


def infer(op: type[Op], node: Node, inputs: Inputs, values: Values) -> Types:
    """Infer output types; values that depend on symbolic sizes are checked once these are known.

    Raises
    ------
    NotSymbolic
        The types depend on a deferred value.
    """
    late = [isinstance(value, Deferred) or is_symbolic(value) and not depends_on_batch(value) for value in values]
    if not any(late):
        return op.infer(node, inputs, values)
    said = [_in_floats(value) if isinstance(value, Deferred) and node.op == "Range" else
            None if isinstance(value, Deferred) else value for value in values]
    try:
        types = op.infer(node, inputs, said)
    except UnknownTensorError as error:
        raise NotSymbolic(str(error)) from error
    computed = any(value is None or depends_on_batch(value) for value, kind in zip(values, inputs, strict=True) if kind)
    reads_values = op.types_with.__func__ is not Op.types_with.__func__         # type: ignore[attr-defined]
    if computed and reads_values and (env := env_in(list(map(_listed, values)))):
        given = [as_constant(value, kind) if kind and follows else None
                 for value, kind, follows in zip(values, inputs, late, strict=True)]
        # Without names, so that the layers of a model have one check.
        unnamed = replace(node, name="", inputs=tuple("x" if name else "" for name in node.inputs),
                          outputs=tuple("y" if name else "" for name in node.outputs))
        check = Deferred(_inferred, (unnamed, tuple(inputs), tuple(given)), np.dtype(object), ())
        env.checks.setdefault(structure(check), check)
    return types


def _in_floats(value: Deferred) -> Any:
    """Return the integers that a Cast made floats, if they are exact, else None."""
    if value.function is _computed and value.arguments[2].op == "Cast" and value.dtype in (np.float32, np.float64):
        found = value.arguments[3].listed
        if found is not None and all(-EXACT < number < EXACT for number in found):
            array = np.empty(value.shape, object)
            array.reshape(-1)[:] = found
            return array
    return None


def _listed(value: Any) -> Any:
    """Return the elements of an object array as a list."""
    return value.reshape(-1).tolist() if isinstance(value, np.ndarray) and value.dtype == object else value


def _inferred(node: Node, inputs: Inputs, values: Values) -> Types:
    """Infer again with known values. Raises GraphError if they do not fit."""
    return op_of(node.op).infer(node, inputs, values)


def known(op: type[Op], node: Node, inputs: Inputs, values: Values, types: Types) -> tuple[Any, ...]:
    """Return the values of the outputs: numbers, or Deferreds."""
    if not any(isinstance(value, Deferred) for value in values) and not any(is_symbolic(kind.shape) for kind in types):
        try:
            results = op.known(node, inputs, values)
        except NotSymbolic:
            results = None
        if results is not None:
            return results
    arguments = [as_constant(value, kind) if kind else None for value, kind in zip(values, inputs, strict=True)]
    return deferred(node, arguments, types)


def is_deferred(node: Node, values: Values, types: Types) -> bool:
    """Return True if a node of constants has outputs that depend on symbolic sizes."""
    return any(isinstance(value, Deferred) for value in values) or is_symbolic(tuple(node.attrs.values())) or any(
        is_symbolic(kind.shape) for kind in types)


def deferred(node: Node, arguments: Sequence[Any], types: Types) -> tuple[Any, ...]:
    """Return the outputs of a node of constants as Deferreds."""
    return tuple(Deferred(_computed, (which, kind.dtype, node, *arguments), kind.dtype, kind.shape)
                 for which, kind in enumerate(types))


def as_constant(value: Any, kind: TensorType) -> Any:
    """Convert a known value to a constant of a graph."""
    if isinstance(value, np.ndarray) and is_symbolic(value):
        return numbers(value.reshape(-1).tolist(), kind.dtype, value.shape)
    return value


def _computed(which: int, dtype: np.dtype[Any], node: Node, *arrays: Array) -> Array:
    return run_node(node, arrays)[which].astype(dtype, copy=False)
