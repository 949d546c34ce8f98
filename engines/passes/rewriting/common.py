"""Common subexpression elimination: merge equal nodes of equal inputs, and equal constants."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.ir.deferred import Deferred
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.shapes import SymbolicDim
from infer_server.engines.ir.symbolic import SymbolicInt, structure
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor


def merge_common(graph: Graph) -> Graph:
    """Return the graph with one node for each set of equal deterministic nodes, and with equal constants merged."""
    editor = GraphEditor(graph)
    for names in _look_alikes(graph.constants):
        for name, first in _first_equal(names, graph.constants) if len(names) > 1 else ():
            if first != name and name not in graph.outputs:
                editor.replace(name, first)
    seen: dict[Hashable, Node] = {}
    for node in graph.nodes:
        inputs = tuple(map(editor.current, node.inputs))
        node = node if inputs == node.inputs else replace(node, inputs=inputs)
        first_node = seen.setdefault(_key(node), node) if _repeatable(node) else node
        if first_node is node:
            editor.nodes.append(node)
        for name, equal in zip(node.outputs, first_node.outputs, strict=True):
            if name != equal:
                editor.replace(name, equal)
    return editor.finish()


def _look_alikes(constants: Mapping[str, Array]) -> Iterable[list[str]]:
    """Group the names of constants by dtype, shape and first row: only constants of one group may be equal."""
    found: dict[Hashable, list[str]] = {}
    for name, array in constants.items():
        if isinstance(array, Deferred):
            continue
        row = array[(0,) * (array.ndim - 1)].tobytes() if array.size else b""
        found.setdefault((str(array.dtype), array.shape, row), []).append(name)
    return found.values()


def _first_equal(names: Iterable[str], constants: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
    """Yield each name with the first name of an equal constant.

    Views of one address with equal strides are not compared: layers that share a weight each have a transposed view.
    """
    first_at: dict[Hashable, str] = {}
    first_of: dict[bytes, str] = {}
    for name in names:
        array = constants[name]
        place = array.ctypes.data, array.strides
        if place not in first_at:
            first_at[place] = first_of.setdefault(array.tobytes(), name)
        yield name, first_at[place]


def _repeatable(node: Node) -> bool:
    return not op_of(node.op).random(node) and all(node.outputs)


def _key(node: Node) -> Hashable:
    inputs = tuple(sorted(node.inputs)) if op_of(node.op).commutative else node.inputs
    return node.op, inputs, len(node.outputs), _frozen(node.attrs)


def _frozen(value: Any) -> Hashable:
    """Return an attribute in a form that is compared and hashed by value."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, SymbolicDim):
        return structure(value.extent)
    if type(value) is SymbolicInt:      # compared by expression
        return structure(value)
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if isinstance(value, Hashable) else repr(value)
