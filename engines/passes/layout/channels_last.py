"""Convert images to channels last [N, H, W, C] and propagate layouts through the graph.

Each tensor is stored in a layout (permutations.py), which one walk over the nodes decides:
* layout-sensitive nodes (Conv, pools, Resize, ...) read and write channels-last images, except those that run as well
  on channels-first images (channels_first.py) which no other node needs channels last;
* layout-agnostic nodes (pointwise, Concat, Softmax, ...) keep the layout of their inputs and have their axes
  renumbered, so that a Transpose sinks through them until it meets its inverse or the end of the graph;
  * a Transpose only changes the layout, and so does a Reshape of groups of axes that are adjacent in the layout. A
    flattening before Gemms copies nothing either: the columns of their weights are permuted instead;
* nodes on rows (the last axis) take any layout that keeps this axis last;
* all other nodes, and graph outputs, read tensors in ONNX's layout. Transposes remain there.

If no input's layout can be kept, the batch axis is stored first, whatever its position in ONNX's layout.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from infer_server.engines.ir.deferred import contiguous
from infer_server.engines.ir.graph import BATCH, Array, Dim, Graph, Node, TensorType
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops import LayoutOp, op_of
from infer_server.engines.passes.layout.channels_first import does_as_well, in_rows, stays_the_same
from infer_server.engines.passes.layout.permutations import (
    Perm,
    channels_last,
    identity,
    order_of_elements,
    permuted,
    reshaped,
    step,
    without,
)
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import NORMS, is_pointwise
from infer_server.engines.passes.rules.reshape import moves_only_ones

IMAGE = channels_last(4)
_LAYOUTS = {identity(4): "nchw", IMAGE: "nhwc", identity(5): "ncdhw", channels_last(5): "ndhwc"}


def to_channels_last(graph: Graph) -> Graph:
    """Return an equivalent graph over channels-last images; its inputs and outputs keep their layouts and names.

    An inner tensor keeps its name in any layout; the channels-last copy of a graph input or output `x` is `x.nhwc`.
    """
    return _LayoutPass(graph).run()


def _is_sensitive(graph: Graph, node: Node) -> bool:
    return (issubclass(op_of(node.op), LayoutOp) and len(node.outputs) == 1
            and len(graph.shape(node.inputs[0])) in (4, 5))


class _LayoutPass(GraphEditor):
    """State of the walk: `layouts` maps a tensor to its copies by layout, the one that its producer writes first."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.shapes: dict[str, tuple[Dim, ...]] = {name: kind.shape for name, kind in graph.types.items()}
        self.dtypes = {name: kind.dtype for name, kind in graph.types.items()}
        self.layouts: dict[str, dict[Perm, str]] = {}
        self.column_order: dict[str, Array] = {}       # matrix -> the order of its columns: see _fold_into_readers
        self.used = {*graph.inputs, *graph.constants}
        self.wants_image = _wanting_images(graph)
        for name in (*graph.inputs, *graph.constants):
            self.layouts[name] = {identity(len(self.shapes[name])): name}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._visit(node)
        for name in self.graph.outputs:
            self._as_onnx(name)
        return self.finish()

    def _visit(self, node: Node) -> None:
        if _is_sensitive(self.graph, node):
            if not self._stays_channels_first(node):
                self._sensitive(node)
        elif node.op == "Transpose":
            self._transpose(node)
        elif node.op == "Reshape":
            self._reshape(node)
        elif is_pointwise(node) or self._follows(node):
            self._any_layout(node)
        elif self._is_by_rows(node):
            self._by_rows(node)
        elif op_of(node.op).reduces or node.op == "Gather":
            self._drops_axes(node)
        else:
            self._keep_onnx_layout(node)

    def _follows(self, node: Node) -> bool:
        """Return True if the node works on any layout of its input and its outputs have that layout."""
        op = op_of(node.op)
        return op.along is not None and not op.reduces and self._rank(node) == len(self.shapes[node.outputs[0]])

    # ---- layouts
    def _producer_layout(self, tensor: str) -> Perm:
        """Return the layout that the tensor's producer writes."""
        return next(iter(self.layouts[tensor]))

    def _items_first(self, tensor: str) -> Perm:
        """Return ONNX's layout with the batch axis moved to the front."""
        shape = self.shapes[tensor]
        return tuple(sorted(range(len(shape)), key=lambda axis: shape[axis] != BATCH))

    def _rank(self, node: Node) -> int:
        return len(self.shapes[node.inputs[0]])

    def read(self, tensor: str, perm: Perm) -> str:
        """Return the name of the tensor's copy in a layout; add a node that computes it if there is none."""
        layouts = self.layouts[tensor]
        if perm not in layouts:
            produced = self._producer_layout(tensor)
            layouts[perm] = self._moved(tensor, layouts[produced], step(produced, perm), perm)
        return layouts[perm]

    def _moved(self, tensor: str, source: str, perm: Perm, layout: Perm) -> str:
        name = self._name(tensor, layout)
        if tensor in self.graph.constants:
            self.constants[name] = np.ascontiguousarray(self.graph.constants[tensor].transpose(layout))
            return name
        self.types[name] = self._type(tensor, layout)
        self.nodes.append(_move(source, name, perm, permuted(self.shapes[tensor], self._producer_layout(tensor))))
        return name

    def _output(self, tensor: str, perm: Perm) -> str:
        """Register that a node writes the tensor in this layout and return the output's name."""
        own = perm == identity(len(perm)) or tensor not in self.graph.outputs
        name = tensor if own else self._name(tensor, perm)
        self.used.add(name)
        self.types[name] = self._type(tensor, perm)
        self.layouts[tensor] = {perm: name}
        return name

    def _name(self, tensor: str, perm: Perm) -> str:
        if perm == identity(len(perm)) and tensor not in self.used:
            self.used.add(tensor)
            return tensor
        suffix = _LAYOUTS.get(perm, "axes" + "".join(map(str, perm)))
        return self.fresh_name(f"{tensor}.{suffix}")

    def _type(self, tensor: str, perm: Perm) -> TensorType:
        return TensorType(self.dtypes[tensor], permuted(self.shapes[tensor], perm))

    def _emit(self, node: Node, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        self.nodes.append(replace(node, inputs=tuple(inputs), outputs=tuple(outputs), attrs={**node.attrs, **attrs}))

    # ---- nodes
    def _sensitive(self, node: Node) -> None:
        image, *others = node.inputs
        layout = channels_last(self._rank(node))
        inputs = [self.read(image, layout), *(self._as_onnx(name) for name in others)]
        self._emit(node, inputs, [self._output(node.outputs[0], layout)], channels_last=1)

    def _stays_channels_first(self, node: Node) -> bool:
        """Add a node on channels-first images if it runs as well on these and no other node needs channels last.

        Returns False, with nothing added, otherwise.
        """
        source, result = node.inputs[0], node.outputs[0]
        shape, rank = self.shapes[source], self._rank(node)
        if self._producer_layout(source) != identity(rank) or channels_last(rank) in self.layouts[source] \
                or self._items_first(source) != identity(rank) or result in self.wants_image:
            return False
        if stays_the_same(self.graph, node):
            self._keep_onnx_layout(node)
            return True
        steps = in_rows(node, shape)
        for op, attrs, made in steps[:-1]:
            name = self.fresh_name(f"{result}.{op.lower()}")
            self.shapes[name], self.dtypes[name] = made, self.dtypes[source]
            source = self.make(self._output(name, identity(len(made))), op, [self._as_onnx(source)], attrs)
        if steps:
            op, attrs, made = steps[-1]
            node = replace(node, op=op, inputs=(source,), attrs=attrs)
            self._emit(node, [source], [self._output(result, identity(rank))])
        return bool(steps)

    def _keep_onnx_layout(self, node: Node) -> None:
        inputs = [self._as_onnx(name) for name in node.inputs]
        if node.inputs and node.inputs[0] in self.column_order:
            inputs[1] = self._with_columns_in_order(node)
        outputs = [self._output(name, identity(len(self.shapes[name]))) if name else "" for name in node.outputs]
        self._emit(node, inputs, outputs)

    def _as_onnx(self, tensor: str) -> str:
        if not tensor:
            return ""
        name = self.read(tensor, identity(len(self.shapes[tensor])))
        if tensor in self.graph.outputs and name != tensor:     # the copy belongs to a Transpose's input
            self.make(tensor, "Identity", [name])
            self.types[tensor] = self.graph.types[tensor]
            self.used.add(tensor)
            self.layouts[tensor][identity(len(self.shapes[tensor]))] = tensor
            return tensor
        return name

    def _transpose(self, node: Node) -> None:
        source, result = node.inputs[0], node.outputs[0]
        perm = node.attrs["perm"]
        self.layouts[result] = {tuple(perm.index(axis) for axis in layout): name
                              for layout, name in self.layouts[source].items()}

    def _reshape(self, node: Node) -> None:
        source, result = node.inputs[0], node.outputs[0]
        before, after, produced = self.shapes[source], self.shapes[result], self._producer_layout(source)
        trivial = moves_only_ones(produced, before)
        layout = identity(len(after)) if trivial else reshaped(produced, before, after)
        if layout is not None:
            name = self.layouts[source][produced]
        elif self._fold_into_readers(node):
            layout, name = identity(len(after)), self.layouts[source][produced]
        else:
            ahead = self._items_first(source)
            layout = reshaped(ahead, before, after)
            layout, name = (identity(len(after)), self._as_onnx(source)) if layout is None else (
                layout, self.read(source, ahead))
        self._emit(node, [name], [self._output(result, layout)], shape=permuted(after, layout))

    def _fold_into_readers(self, node: Node) -> bool:
        """Return True if a Reshape [N, C, H, W] -> [N, CHW] is read only by Gemms with constant weights.

        The elements then keep their order, which `column_order` records, and the weights' columns are permuted to it.
        """
        source, result = node.inputs[0], node.outputs[0]
        before, after, produced = self.shapes[source], self.shapes[result], self._producer_layout(source)
        readers = self.graph.consumers[result]
        if len(after) != 2 or before[0] != after[0] or produced[0] != 0 or result in self.graph.outputs or not readers:
            return False
        if not all(r.op == "Gemm" and not r.attrs.get("transA") and r.inputs[0] == result
                   and self.graph.is_constant(r.inputs[1]) and r.inputs.count(result) == 1 for r in readers):
            return False
        self.column_order[result] = order_of_elements(before, produced)
        return True

    def _with_columns_in_order(self, gemm: Node) -> str:
        """Return the name of a Gemm's weights with their columns in the order of the matrix it reads."""
        order, weight = self.column_order[gemm.inputs[0]], self.graph.constants[gemm.inputs[1]]
        return self.add_constant(f"{gemm.outputs[0]}.weight",
                                 weight[:, order] if gemm.attrs.get("transB") else weight[order])

    def _is_by_rows(self, node: Node) -> bool:
        """Return True for a product by a constant matrix or a norm along the last axis: both map row by row."""
        if node.op in NORMS:
            return node.attrs.get("axis", -1) % self._rank(node) == self._rank(node) - 1 and len(node.outputs) == 1
        return node.op == "MatMul" and self._rank(node) > 2 and getattr(
            self.graph.constants.get(node.inputs[1]), "ndim", 0) == 2

    def _by_rows(self, node: Node) -> None:
        """Add a node on rows, in a layout that keeps the last axis last."""
        source, *others = node.inputs
        last = self._rank(node) - 1
        stored = (self._producer_layout(source), self._items_first(source))
        layout = next((layout for layout in stored if layout[-1] == last), identity(last + 1))
        inputs = [self.read(source, layout), *(self._as_onnx(name) for name in others)]
        self._emit(node, inputs, [self._output(node.outputs[0], layout)])

    def _any_layout(self, node: Node) -> None:
        """Add a layout-agnostic node, whose inputs and outputs have one rank, in the cheapest layout."""
        rank = len(self.shapes[node.outputs[0]])
        full = [i for i in node.inputs if i and i not in self.graph.constants and len(self.shapes[i]) == rank]
        layout = self._cheapest_layout(node, full, rank)
        attrs = op_of(node.op).renumbered(node, rank, layout.index)
        keep = node.op == "Gather"          # its indices are read in ONNX's layout
        # Only pointwise nodes broadcast. If no other input has the result's rank, constants keep their leading ones.
        part = partial(self._operand, whole=not full) if is_pointwise(node) else self.read
        inputs = [self._as_onnx(name) if not name or keep and i else part(name, layout)
                  for i, name in enumerate(node.inputs)]
        self._emit(node, inputs, [self._output(name, layout) if name else "" for name in node.outputs], **attrs)

    def _cheapest_layout(self, node: Node, full: Sequence[str], rank: int) -> Perm:
        """Return the layout that moves the fewest elements; among equals channels last.

        A cache of a decoder has ONNX's layout, so that tokens can be appended in place.
        """
        if self._is_cache(node):
            return identity(rank)
        ahead = self._items_first(node.outputs[0])
        produced_layouts = dict.fromkeys(self._producer_layout(tensor) for tensor in full)
        image = channels_last(rank)
        choices = [layout for layout in produced_layouts if layout[:1] == ahead[:1]] or [ahead]
        if rank in (4, 5) and node.outputs[0] in self.wants_image:
            choices.append(image)
            if all(layout == identity(rank) for layout in choices[:-1]):
                return image

        def moves(tensor: str, layout: Perm) -> bool:
            produced = self._producer_layout(tensor)
            return layout not in self.layouts[tensor] and not moves_only_ones(step(produced, layout),
                                                                          permuted(self.shapes[tensor], produced))

        def cost(layout: Perm) -> tuple[int, bool]:
            return sum(self._elements(tensor) for tensor in full if moves(tensor, layout)), layout != image
        return min(choices, key=cost)

    def _is_cache(self, node: Node) -> bool:
        """Return True for a Concat of an input of the graph, or a part of it, and other tokens to an output."""
        def source(tensor: str) -> str:
            producer = self.graph.producer.get(tensor)
            return source(producer.inputs[0]) if producer and producer.op == "Slice" else tensor
        return node.op == "Concat" and node.outputs[0] in self.graph.outputs and any(
            source(name) in self.graph.inputs for name in node.inputs)

    def _elements(self, tensor: str) -> int:
        return math.prod(extent for extent in self.shapes[tensor] if not isinstance(extent, str))

    def _operand(self, tensor: str, layout: Perm, whole: bool = False) -> str:
        """Return the name of an operand of any rank in a form that broadcasts to tensors of this layout."""
        shape = self.shapes[tensor]
        full = (*(1,) * (len(layout) - len(shape)), *shape)
        if tensor in self.graph.constants:
            return self._constant_operand(tensor, full, layout, whole)
        if len(shape) == len(layout):
            return self.read(tensor, layout)
        if layout == identity(len(layout)):
            return self._as_onnx(tensor)
        wide = self.fresh_name(f"{tensor}.rank{len(layout)}")
        self.shapes[wide], self.dtypes[wide] = full, self.dtypes[tensor]
        self.make(self._output(wide, identity(len(layout))), "Reshape", [self._as_onnx(tensor)], {"shape": full})
        return self.read(wide, layout)

    def _constant_operand(self, tensor: str, full: tuple[Dim, ...], layout: Perm, whole: bool) -> str:
        """Return a permuted constant, without leading axes of 1 unless `whole`: one per channel becomes [C]."""
        array = self.graph.constants[tensor].reshape([as_int(extent) for extent in full]).transpose(layout)
        while not whole and array.ndim > 1 and array.shape[0] == 1:
            array = array[0]
        if array.shape == self.graph.constants[tensor].shape and layout == identity(len(layout)):
            return tensor
        return self.add_constant(f"{tensor}.last", contiguous(array))

    def _drops_axes(self, node: Node) -> None:
        """Add a reduction or a Gather of one index, in the producer's layout less the axes that it removes."""
        source, result = node.inputs[0], node.outputs[0]
        produced, rank = self._producer_layout(source), self._rank(node)
        axes = op_of(node.op).axes(node, rank)
        lost = rank - len(self.shapes[result])
        if lost not in (0, len(axes)):
            self._keep_onnx_layout(node)
            return
        layout = without(produced, axes) if lost else produced
        attrs = op_of(node.op).renumbered(node, rank, produced.index)
        others = [self._as_onnx(name) for name in node.inputs[1:]]
        self._emit(node, [self.read(source, produced), *others], [self._output(result, layout)], **attrs)


def _move(source: str, result: str, perm: Perm, shape: Sequence[Dim]) -> Node:
    """Return a Transpose by `perm` of a tensor of this shape, or a Reshape if only axes of extent 1 move."""
    if moves_only_ones(perm, tuple(shape)):
        return Node("Reshape", (source,), (result,), {"shape": permuted(shape, perm)}, result)
    return Node("Transpose", (source,), (result,), {"perm": perm}, result)


def _wanting_images(graph: Graph) -> set[str]:
    """Return the tensors that only layout-sensitive nodes read, perhaps through pointwise nodes: convert them early."""
    wanting: set[str] = set()

    def needs_image(node: Node) -> bool:
        return _is_sensitive(graph, node) and (node.outputs[0] in wanting or not does_as_well(graph, node))

    for node in reversed(graph.nodes):
        passes_on = is_pointwise(node) and node.outputs[0] in wanting
        for place, name in enumerate(node.inputs):
            if name in graph.outputs or len(graph.types[name].shape if name else ()) not in (4, 5):
                continue
            if all((needs_image(r) and r.inputs[0] == name) or
                   (is_pointwise(r) and r.outputs[0] in wanting) for r in graph.consumers[name]) \
                    and (passes_on or needs_image(node) and place == 0):
                wanting.add(name)
    return wanting
