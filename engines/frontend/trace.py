"""Following nodes in order: what is known already is computed, everything gets a type.

A tensor of no elements is known as soon as its shape is: nodes that make one are not run, and no pass or kernel meets
it but as the input of a node that makes something of nothing (a sum over no elements).
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engines.capacity import bytes_of, too_large
from engines.errors import GraphError
from engines.ir.counted import is_counted
from engines.ir.graph import Array, Node, TensorType, type_of
from engines.ir.shapes import MOST_AXES, is_empty, text
from engines.ops import op_of
from engines.ops.counting import as_constant, follows_from_extents, infer, is_symbolic, known
from engines.ops.fallback import Fallback

SMALL = 4096        # elements: computed at once, a shape may depend on it; more is left to passes.fold_constants ...
MOST = 1 << 22      # ... unless a shape does depend on it: on where a matrix of all pairs is not 0


@dataclass
class Trace:
    """Grows node by node. `values` holds constants, object arrays of ints and Extents (see engines.ir.shapes), and what
    follows from extents that are counted (engines.ops.counting)."""
    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    _inputs: set[str] = field(default_factory=set)
    _counted: bool = False          # whether an extent of an input is

    def input(self, name: str, kind: TensorType) -> None:
        self._inputs.add(name)
        self.types[name] = kind
        self._counted |= is_counted(kind.shape)
        self._know_empty(name, kind)

    def constant(self, name: str, array: Array) -> None:
        self.values[name], self.types[name] = array, type_of(array)

    def inputs(self, node: Node) -> list[TensorType | None]:
        """The types of a node's inputs. Raises GraphError if one does not exist."""
        if missing := [name for name in node.inputs if name and name not in self.types]:
            raise GraphError(f"it reads '{missing[0]}', which nothing before it produces")
        return [self.types[name] if name else None for name in node.inputs]

    def sources(self, names: Iterable[str]) -> list[str]:
        """The inputs of the graph that decide about the values of these tensors, as far as those are not known."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        found, waiting, seen = [], list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if not name or name in seen or name in self.values:
                continue
            seen.add(name)
            if name in makers:
                waiting += makers[name].inputs
            else:
                found.append(name)
        return sorted(found)

    def known(self, node: Node) -> list[Array | None]:
        return [self.values.get(name) for name in node.inputs]

    def add(self, node: Node) -> None:
        """Append a canonical node, or, if it is small and all its inputs are constant, its value."""
        if node.op == "Constant":
            value = node.attrs["value"]
            self.constant(node.outputs[0], value)
            if isinstance(value, np.ndarray) and is_counted(value):     # object arrays, as operators make of extents
                self.types[node.outputs[0]] = TensorType(np.dtype(np.int64), value.shape)
            return
        node = self._without_empty_parts(node)
        op, inputs, values = op_of(node.op), self.inputs(node), self.known(node)
        try:
            types = infer(op, node, inputs, values) if self._counted else op.infer(node, inputs, values)
            types = types[:len(node.outputs)]
        except GraphError:      # its shape may be one that depends on data, which may be known
            if op is not Fallback or (results := op.known(node, inputs, [*map(self._computed, node.inputs)])) is None:
                raise
            self._settle(node, results)
            return
        for name, kind in zip(node.outputs, types, strict=True):
            _check_shape(name, kind)
            self.types[name] = kind
        if all(map(is_empty, types)):
            self._make_empty(node, types)
            return
        small = all(_elements(kind) <= SMALL for kind in types)
        if self._counted and small and follows_from_extents(op, node, inputs, values, types):
            self._count(node, known(op, node, inputs, values, types))
        elif small and (results := op.known(node, inputs, values)) is not None:
            self._settle(node, results)
        else:
            self.nodes.append(node)

    def _computed(self, name: str) -> Array | None:
        """The value of a tensor, computed if it is one of many elements that follows from known ones."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        needed, waiting = set[str](), [name]
        while waiting:
            each = waiting.pop()
            if not each or each in self.values or each in needed:
                continue
            maker = makers.get(each)
            if maker is None or any(_elements(self.types[output]) > MOST for output in maker.outputs):
                return None
            needed.update(maker.outputs)
            waiting += maker.inputs
        values = dict(self.values) if needed else self.values
        for node in self.nodes:
            if needed.intersection(node.outputs):
                results = op_of(node.op).known(node, self.inputs(node), [values.get(each) for each in node.inputs])
                if results is None:
                    return None
                values.update(zip(node.outputs, results, strict=False))
        return values.get(name)

    # ---- tensors of no elements
    def _know_empty(self, name: str, kind: TensorType) -> None:
        """Its value, unless its shape depends on the batch."""
        extents = [extent for extent in kind.shape if isinstance(extent, int)]
        if is_empty(kind) and len(extents) == len(kind.shape):
            self.values[name] = np.zeros(extents, kind.dtype)

    def _make_empty(self, node: Node, types: Sequence[TensorType]) -> None:
        """The node's outputs as constants, or filled with zeros, none of them, where there is a batch."""
        for name, kind in zip(node.outputs, types, strict=True):
            self._know_empty(name, kind)
            if name not in self.values:
                value = np.zeros(1, kind.dtype)
                self.nodes.append(Node("ConstantOfShape", (), (name,), {"shape": kind.shape, "value": value}, node.name,
                                       node.origin))

    def _without_empty_parts(self, node: Node) -> Node:
        """A Concat of what adds to its axis."""
        if node.op != "Concat":
            return node
        axis = node.attrs["axis"]
        full = tuple(name for name in node.inputs if name not in self.types or self.types[name].shape[axis] != 0)
        return replace(node, inputs=full or node.inputs[:1])

    def _settle(self, node: Node, results: tuple[Array, ...]) -> None:
        kinds = [self.types.get(name) for name in node.outputs]     # NumPy makes float32 of products of bfloat16
        results = tuple(result.astype(kind.dtype, copy=False) if kind and result.dtype != object else result
                        for result, kind in zip(results, kinds, strict=False))
        self.values.update(zip(node.outputs, results, strict=True))
        if any(map(is_symbolic, results)):      # still computed at run time, if anybody asks
            self.nodes.append(node)
        elif not self._counted or not any(map(is_counted, results)):
            self.types.update(zip(node.outputs, map(type_of, results), strict=True))

    def _count(self, node: Node, results: tuple[Array, ...]) -> None:
        """What it makes follows from extents that are counted: a constant, or it would still be computed."""
        self.values.update(zip(node.outputs, results, strict=False))
        if any(is_symbolic(result) for result in results):
            self.nodes.append(node)

    @property
    def constants(self) -> Mapping[str, Array]:
        made = {name for node in self.nodes for name in node.outputs}.union(self._inputs)
        return {name: as_constant(array, self.types[name]) if self._counted else array
                for name, array in self.values.items() if name not in made}


def _elements(kind: TensorType) -> int:
    """Of a tensor that has a batch, more than are ever computed."""
    return math.prod(extent if isinstance(extent, int) else MOST + 1 for extent in kind.shape)


def _check_shape(name: str, kind: TensorType) -> None:
    """Raises GraphError for what is no shape, or that of a tensor of which not even one item fits into memory."""
    if any(isinstance(extent, int) and extent < 0 for extent in kind.shape) or len(kind.shape) > MOST_AXES:
        raise GraphError(f"'{name}' would be of shape {text(kind.shape)}; extents are 0 and more, of {MOST_AXES} axes "
                         "at most")
    if wrong := too_large(bytes_of(kind)):
        raise GraphError(f"'{name}' {kind} takes {wrong}")
