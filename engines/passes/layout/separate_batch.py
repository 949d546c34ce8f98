"""Split merged batch axes, so that the batch is a separate axis of every tensor, as kernels require.

Exporters merge it with other axes: the windows of images [16*batch, 49, 96], the heads of all items
[12*batch, 128, 64], the rows of a linear layer [197*batch, 768]. An axis of k * batch is split into its factors
again, from the Reshape that merged it to the one that splits it:

    Reshape [batch, 4, 7, C] -> [4*batch, 7, C]; Softmax(axis=2)   ->   (nothing); Softmax(axis=3) on [batch, 4, 7, C]

The pass rewrites all merged axes of a graph, or none if a node cannot work on separate axes.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import BATCH, Dim, Graph, Node, TensorType
from infer_server.engines.ir.shapes import BatchInt, extent, text
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import describe, op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import NORMS, is_pointwise
from infer_server.engines.passes.rewriting.notes import Note, note

Group = tuple[Dim, ...]         # the axes that were merged into one axis of a tensor


class _Stuck(Exception):
    """Raised, with the reason, if a merged axis cannot be split."""


def separate_batch(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Return the graph without axes of k * batch; unchanged if a node prevents that, which `log` says."""
    if not any(_merged_axis(kind.shape) is not None for kind in graph.types.values()):
        return graph
    separator = _Separator(graph)
    for node in graph.nodes:
        try:
            separator.visit(node)
        except _Stuck as reason:
            note(log, node, "separate_batch", str(reason))
            return graph
    if merged := [name for name in graph.outputs if name in separator.groups]:
        note(log, graph.producer[merged[0]], "separate_batch", "an output of the model counts more than the batch")
        return graph
    return separator.finish()


def check_batch(graph: Graph) -> Graph:
    """Return the graph. Raise ModelError if a tensor has a symbolic axis other than one axis of the batch."""
    for node in graph.nodes:
        for name in node.outputs:
            symbols = [dim for dim in graph.shape(name) if isinstance(dim, str)]
            if symbols not in ([], [BATCH]):
                shape = text(graph.shape(name))
                raise ModelError(f"{graph.name}: {describe(node)} makes a tensor of shape {shape}, but a tensor may "
                                 "have one axis of the batch, and no other that depends on it; fix the batch: give the "
                                 "input's whole shape with --shape")
    return graph


def _merged_axis(shape: Sequence[Dim]) -> int | None:
    """Return the axis whose extent is k * batch with k > 1, or None."""
    for axis, dim in enumerate(shape):
        if isinstance(size := extent(dim), BatchInt) and size.coefficient > 1 and not size.constant:
            return axis
    return None


class _Separator(GraphEditor):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.groups: dict[str, tuple[int, Group]] = {}      # tensor -> (its merged axis, the axes merged into it)

    def visit(self, node: Node) -> None:
        """Add the node, or its equivalent on separate axes. Raise _Stuck if there is none."""
        merged = any(name in self.groups for name in node.inputs)
        if not merged and all(_merged_axis(self.graph.shape(name)) is None for name in node.outputs if name):
            self.nodes.append(node)
        elif node.op in _VISITS:
            _VISITS[node.op](self, node)
        elif is_pointwise(node):
            self._broadcasts(node)
        elif op_of(node.op).along in ("axis", "axes"):
            self._along_axes(node)
        else:
            raise _Stuck(f"{node.op} counts more than the batch")

    # ---- shapes
    def _separated(self, name: str) -> tuple[Dim, ...]:
        """Return the tensor's shape in the new graph."""
        shape = self.graph.shape(name)
        if name not in self.groups:
            return shape
        axis, group = self.groups[name]
        return (*shape[:axis], *group, *shape[axis + 1:])

    def _axis(self, name: str, axis: int) -> int:
        """Return the index in the new shape of an axis of the old one. Raise _Stuck for the merged axis."""
        axis %= len(self.graph.shape(name))
        if name not in self.groups:
            return axis
        merged, group = self.groups[name]
        if axis == merged:
            raise _Stuck("it works along the axis that counts the batch")
        return axis + (len(group) - 1) * (axis > merged)

    def _emit(self, node: Node, axis: int | None, group: Group) -> None:
        """Add a node whose outputs have the merged axis `axis`, made of `group`; None if they have no merged axis."""
        for name in filter(None, node.outputs):
            if axis is not None:
                self.groups[name] = axis, group
            self.types[name] = TensorType(self.graph.types[name].dtype, self._separated(name))
        self.nodes.append(node)

    def _fitted(self, name: str, behind: int, group: Group) -> str:
        """Return an operand that broadcasts along the merged axis, which is the `behind`-th from the right."""
        shape = self._separated(name)
        if name in self.groups:
            axis, own = self.groups[name]
            if own != group or len(self.graph.shape(name)) - axis != behind:
                raise _Stuck(f"'{name}' merges its batch axis differently")
            return name
        if len(shape) < behind:
            return name
        if shape[-behind] != 1:
            raise _Stuck(f"'{name}' has another axis where other inputs have the batch")
        place = len(shape) - behind
        return self._reshaped(name, (*shape[:place], *(1,) * len(group), *shape[place + 1:]))

    def _reshaped(self, name: str, shape: tuple[Dim, ...]) -> str:
        if name in self.graph.constants:
            return self.add_constant(f"{name}.apart", self.graph.constants[name].reshape([as_int(d) for d in shape]))
        return self.add(f"{name}.apart", "Reshape", [name], {"shape": shape})

    # ---- operators
    def _reshape(self, node: Node) -> None:
        source, target = self._separated(node.inputs[0]), self.graph.shape(node.outputs[0])
        axis = _merged_axis(target)
        group = () if axis is None else _group_of(source, target, axis)
        shape = target if axis is None else (*target[:axis], *group, *target[axis + 1:])
        self._emit(replace(node, attrs={"shape": shape}), axis, group)

    def _broadcasts(self, node: Node) -> None:
        """Add a broadcasting node: pointwise, Expand, or a product of stacks of matrices."""
        behind, group = self._of_inputs(node)
        inputs = tuple(name and self._fitted(name, behind, group) for name in node.inputs)
        shape = self.graph.shape(node.outputs[0])
        axis = len(shape) - behind
        target = {"shape": (*shape[:axis], *group, *shape[axis + 1:])} if "shape" in node.attrs else {}
        self._emit(replace(node, inputs=inputs, attrs={**node.attrs, **target}), axis, group)

    def _gather_elements(self, node: Node) -> None:
        data = node.inputs[0]
        if data not in self.groups:
            raise _Stuck("its indices have a merged batch axis, but its data do not")
        self._broadcasts(replace(node, attrs={**node.attrs, "axis": self._axis(data, node.attrs["axis"])}))

    def _of_inputs(self, node: Node) -> tuple[int, Group]:
        """Return the merged axis of the inputs, counted from the right, and its group."""
        for name in node.inputs:
            if name in self.groups:
                axis, group = self.groups[name]
                return len(self.graph.shape(name)) - axis, group
        raise _Stuck(f"{node.op} makes an axis that counts more than the batch")

    def _product(self, node: Node) -> None:
        left, right = node.inputs
        behind, group = self._of_inputs(node)
        if behind > 2:
            self._broadcasts(node)
        elif left in self.groups and right not in self.groups and behind == 2 and len(self.graph.shape(right)) == 2:
            self._emit(node, self.groups[left][0], group)           # rows
        else:
            raise _Stuck("it multiplies along the axis that counts the batch")

    def _gemm(self, node: Node) -> None:
        """Add a Gemm of rows by constant weights as a MatMul, which allows more axes."""
        x, weight, *bias = node.inputs
        axis, group = self.groups[x]
        if axis or weight not in self.graph.constants or node.attrs.get("alpha", 1) != 1 or node.attrs.get("transA"):
            raise _Stuck("its factors are not rows and constant weights")
        matrix = self.graph.constants[weight]
        if node.attrs.get("transB"):
            weight = self.add_constant(f"{weight}.rows", np.ascontiguousarray(matrix.T))
        if not bias:
            self._emit(Node("MatMul", (x, weight), node.outputs, {}, node.name, node.origin), axis, group)
            return
        product = self.add(f"{node.outputs[0]}.product", "MatMul", [x, weight], origin=node.origin)
        self._emit(Node("Add", (product, *bias), node.outputs, {}, node.name, node.origin), axis, group)

    def _transpose(self, node: Node) -> None:
        source = node.inputs[0]
        merged, group = self.groups[source]
        perm: list[int] = []
        for axis in node.attrs["perm"]:
            perm += range(merged, merged + len(group)) if axis == merged else [self._axis(source, axis)]
        self._emit(replace(node, attrs={"perm": tuple(perm)}), tuple(node.attrs["perm"]).index(merged), group)

    def _along_axes(self, node: Node) -> None:
        """Add a node that works along the axes in its attributes and keeps the others."""
        op, source = op_of(node.op), next((name for name in node.inputs if name in self.groups), "")
        if not source:
            raise _Stuck(f"{node.op} makes an axis that counts more than the batch")
        (axis, group), rank = self.groups[source], len(self.graph.shape(source))
        if node.op == "Concat" and any(self.groups.get(name) != (axis, group) for name in node.inputs):
            raise _Stuck("its inputs merge the batch axis differently")
        attrs = op.renumbered(node, rank, lambda old: self._axis(source, old))
        self._emit(replace(node, attrs=attrs), op.kept(node, rank, axis), group)

    def _norm(self, node: Node) -> None:
        source = node.inputs[0]
        (axis, group), first = self.groups[source], self._axis(source, node.attrs["axis"])
        if first < axis:
            raise _Stuck("it normalises over the batch")
        self._emit(replace(node, attrs={**node.attrs, "axis": first}), axis, group)

    def _gather(self, node: Node) -> None:
        data, indices = node.inputs
        axis = node.attrs.get("axis", 0) % len(self.graph.shape(data))
        if data not in self.groups:
            place, group = self.groups[indices]
            self._emit(node, axis + place, group)
            return
        if indices in self.groups:
            raise _Stuck("its data and its indices both have a merged batch axis")
        merged, group = self.groups[data]
        moved = merged + (len(self.graph.shape(indices)) - 1) * (merged > axis)
        self._emit(replace(node, attrs={**node.attrs, "axis": self._axis(data, axis)}), moved, group)


def _group_of(source: Sequence[Dim], target: Sequence[Dim], axis: int) -> Group:
    """Return the factors of the merged axis of a Reshape's target: (before, batch, behind) without ones.

    The batch is a separate axis of `source`. A Reshape keeps the order of elements, so the extents before the batch in
    the source that are not before the axis in the target are merged into the axis.
    """
    size = extent(target[axis])
    assert isinstance(size, BatchInt)
    if BATCH not in source:
        raise _Stuck(f"{list(source)} has no axis of the batch")
    outside = math.prod(as_int(d) for d in target[:axis])
    before, rest = divmod(math.prod(as_int(d) for d in source[:source.index(BATCH)]), outside)
    behind, more = divmod(size.coefficient, before or 1)
    if rest or more or not before:
        raise _Stuck(f"{list(target)} mixes the axes of {list(source)}")
    return (*[before] * (before > 1), BATCH, *[behind] * (behind > 1))


_VISITS: Mapping[str, Callable[[_Separator, Node], None]] = {
    "Reshape": _Separator._reshape, "Transpose": _Separator._transpose, "MatMul": _Separator._product,
    "Gemm": _Separator._gemm, "Gather": _Separator._gather,
    "GatherElements": _Separator._gather_elements, "Expand": _Separator._broadcasts,
    **dict.fromkeys(NORMS, _Separator._norm),
}
