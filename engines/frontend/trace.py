"""Infer the type of every tensor, node by node, and compute values that are known at import.

An empty tensor is known as soon as its shape is: its node is dropped. Passes and kernels meet empty tensors only as
inputs of nodes with non-empty outputs, such as a sum over no elements.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from infer_server.engines.capacity import bytes_of, too_large
from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType, type_of
from infer_server.engines.ir.shapes import MOST_AXES, is_empty, text
from infer_server.engines.ir.symbolic import is_symbolic
from infer_server.engines.ops import op_of
from infer_server.engines.ops.fallback import OnnxReferenceOp
from infer_server.engines.ops.symbolic import as_constant, depends_on_batch, follows_from_extents, infer, known

SMALL = 4096        # elements of a tensor that is computed at once; larger ones are left to passes.fold_constants,
MOST = 1 << 22      # unless a shape depends on their values, as on NonZero of a matrix of all pairs


@dataclass
class TypeInference:
    """State of type inference.

    `values` holds constants, object arrays of ints and Extents (infer_server.engines.ir.shapes), and values that follow
    from symbolic extents (infer_server.engines.ops.symbolic).
    """
    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    _inputs: set[str] = field(default_factory=set)
    _symbolic: bool = False         # whether an input has symbolic extents

    def input(self, name: str, kind: TensorType) -> None:
        self._inputs.add(name)
        self.types[name] = kind
        self._symbolic |= is_symbolic(kind.shape)
        self._know_empty(name, kind)

    def constant(self, name: str, array: Array) -> None:
        self.values[name], self.types[name] = array, type_of(array)

    def inputs(self, node: Node) -> list[TensorType | None]:
        """Return the types of a node's inputs. Raise GraphError if one is undefined."""
        if missing := [name for name in node.inputs if name and name not in self.types]:
            raise GraphError(f"input '{missing[0]}' is not produced by any node before it")
        return [self.types[name] if name else None for name in node.inputs]

    def sources(self, names: Iterable[str]) -> list[str]:
        """Return the graph inputs that the unknown ones among these tensors depend on, sorted."""
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
        """Append a canonical node, or store its outputs' values if they are known and small."""
        if node.op == "Constant":
            value = node.attrs["value"]
            self.constant(node.outputs[0], value)
            if isinstance(value, np.ndarray) and is_symbolic(value):     # an object array of extents
                self.types[node.outputs[0]] = TensorType(np.dtype(np.int64), value.shape)
            return
        node = self._without_empty_parts(node)
        op, inputs, values = op_of(node.op), self.inputs(node), self.known(node)
        try:
            types = infer(op, node, inputs, values) if self._symbolic else op.infer(node, inputs, values)
            types = types[:len(node.outputs)]
        except GraphError:      # the shape may depend on values that are known
            if op is not OnnxReferenceOp or (results := op.known(node, inputs,
                                                                 [*map(self._computed, node.inputs)])) is None:
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
        if self._symbolic and small and follows_from_extents(op, node, inputs, values, types):
            self._count(node, known(op, node, inputs, values, types))
        elif small and (results := op.known(node, inputs, values)) is not None:
            self._settle(node, results)
        else:
            self.nodes.append(node)

    def _computed(self, name: str) -> Array | None:
        """Return the value of a tensor, computed from known ones if it was too large to be stored; None if unknown."""
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
        """Store the value of an empty tensor, unless its shape depends on the batch."""
        extents = [extent for extent in kind.shape if isinstance(extent, int)]
        if is_empty(kind) and len(extents) == len(kind.shape):
            self.values[name] = np.zeros(extents, kind.dtype)

    def _make_empty(self, node: Node, types: Sequence[TensorType]) -> None:
        """Store a node's empty outputs as constants, or as a ConstantOfShape if the shape depends on the batch."""
        for name, kind in zip(node.outputs, types, strict=True):
            self._know_empty(name, kind)
            if name not in self.values:
                value = np.zeros(1, kind.dtype)
                self.nodes.append(Node("ConstantOfShape", (), (name,), {"shape": kind.shape, "value": value}, node.name,
                                       node.origin))

    def _without_empty_parts(self, node: Node) -> Node:
        """Return a Concat without its empty inputs; other nodes unchanged."""
        if node.op != "Concat":
            return node
        axis = node.attrs["axis"]
        full = tuple(name for name in node.inputs if name not in self.types or self.types[name].shape[axis] != 0)
        return replace(node, inputs=full or node.inputs[:1])

    def _settle(self, node: Node, results: tuple[Array, ...]) -> None:
        kinds = [self.types.get(name) for name in node.outputs]     # NumPy's products of bfloat16 are float32
        results = tuple(result.astype(kind.dtype, copy=False) if kind and result.dtype != object else result
                        for result, kind in zip(results, kinds, strict=False))
        self.values.update(zip(node.outputs, results, strict=True))
        if any(map(depends_on_batch, results)):      # also computed at run time, if a node reads it
            self.nodes.append(node)
        elif not self._symbolic or not any(map(is_symbolic, results)):
            self.types.update(zip(node.outputs, map(type_of, results), strict=True))

    def _count(self, node: Node, results: tuple[Array, ...]) -> None:
        """Store values that follow from symbolic extents; symbolic ones keep their node."""
        self.values.update(zip(node.outputs, results, strict=False))
        if any(depends_on_batch(result) for result in results):
            self.nodes.append(node)

    @property
    def constants(self) -> Mapping[str, Array]:
        made = {name for node in self.nodes for name in node.outputs}.union(self._inputs)
        return {name: as_constant(array, self.types[name]) if self._symbolic else array
                for name, array in self.values.items() if name not in made}


def _elements(kind: TensorType) -> int:
    """Return the number of elements; more than MOST for a tensor with symbolic extents."""
    return math.prod(extent if isinstance(extent, int) else MOST + 1 for extent in kind.shape)


def _check_shape(name: str, kind: TensorType) -> None:
    """Raise GraphError for an invalid shape, or one of which not even one item fits into memory."""
    if any(isinstance(extent, int) and extent < 0 for extent in kind.shape) or len(kind.shape) > MOST_AXES:
        raise GraphError(f"'{name}' would have shape {text(kind.shape)}; extents must not be negative, and at most "
                         f"{MOST_AXES} axes are supported")
    if wrong := too_large(bytes_of(kind)):
        raise GraphError(f"'{name}' {kind} takes {wrong}")
