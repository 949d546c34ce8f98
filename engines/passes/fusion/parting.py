"""Split a wide convolution or product and its Split into one layer per part, the inverse of siblings.py.

    a, b = Split(Relu(Conv(x, [Wa; Wb])))   =   a = Relu(Conv(x, Wa)); b = Relu(Conv(x, Wb))

x is read once for each part, but each result is stored separately: in INT8 with its own scale.
"""
from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Graph, Node, TensorType
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import is_weighted, output_axis, reader


def can_part(graph: Graph, split: Node) -> bool:
    """Return True for a Split of the output channels of a layer that has constant weights and no other reader."""
    source, axis = split.inputs[0], split.attrs.get("axis", 0)
    wide, rank = graph.producer.get(source), len(graph.shape(split.inputs[0]))
    if split.op != "Split" or wide is None or axis % rank != rank - 1 or reader(graph, source) is not split:
        return False
    anchor = wide.anchor
    if not is_weighted(wide) or not all(graph.is_constant(name) for name in wide.inputs[1:]):
        return False
    if anchor.op == "Conv":
        return anchor.attrs.get("group", 1) == 1 and bool(anchor.attrs.get("channels_last"))
    if anchor.op == "Gemm" and anchor.attrs != {"transB": 1}:
        return False
    return anchor.op in ("Gemm", "MatMul") and graph.constants[anchor.inputs[1]].ndim == 2


def with_layers_parted(graph: Graph, splits: frozenset[str]) -> Graph:
    """Replace each Split that outputs one of the tensors `splits`, and its wide layer, by one layer per part."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        if node.op == "Split" and not splits.isdisjoint(node.outputs):
            _part(editor, node)
        else:
            editor.nodes.append(node)
    return editor.finish()


def _part(editor: GraphEditor, split: Node) -> None:
    """Add a layer for each part of the Split."""
    graph, sizes = editor.graph, split.attrs["split"]
    wide = graph.producer[split.inputs[0]]
    for output, (start, stop) in zip(split.outputs, pairwise((0, *accumulate(sizes))), strict=True):
        editor.nodes.append(_PartialLayer(editor, wide, output, slice(start, stop), sum(sizes)).layer())


class _PartialLayer:
    """Layer of some of the output channels of a wide layer."""

    def __init__(self, editor: GraphEditor, wide: Node, output: str, part: slice, channels: int) -> None:
        self.editor, self.wide, self.output, self.slice, self.channels = editor, wide, output, part, channels
        self.names = {wide.outputs[0]: output}

    def layer(self) -> Node:
        """Return the layer's node."""
        parts = [self._part(part) for part in self.wide.body or (self.wide,)]
        return replace(self.wide, name=self.output, outputs=(self.output,)).with_body(parts)

    def _part(self, part: Node) -> Node:
        """Return a node of the body on these channels; a Clip to [0, inf) becomes a Relu."""
        is_anchor = part is self.wide.anchor
        inputs = [self._input(part, position, name, is_anchor) for position, name in enumerate(part.inputs)]
        attrs = {key: value[self.slice] if isinstance(value, tuple) and part.op == "Clip" else value
                 for key, value in part.attrs.items()}
        if part.op == "Clip" and (_only(attrs.get("min")), _only(attrs.get("max"))) == (0.0, math.inf):
            part, attrs = replace(part, op="Relu"), {}
        return replace(part, inputs=tuple(inputs), outputs=(self._inner(part.outputs[0]),), attrs=attrs,
                       name=self._inner(part.outputs[0]))

    def _inner(self, name: str) -> str:
        if name not in self.names:
            kind = self.editor.graph.types[name]
            self.names[name] = self.editor.add_tensor(f"{self.output}.inner", TensorType(
                kind.dtype, (*kind.shape[:-1], self.slice.stop - self.slice.start)))
        return self.names[name]

    def _input(self, part: Node, position: int, name: str, is_anchor: bool) -> str:
        array = self.editor.graph.constants.get(name)
        if array is None:
            return self.names.get(name, name)
        axis = -1
        if is_anchor and position == 1:
            axis = output_axis(part)
        elif array.ndim == 0 or array.shape[-1] != self.channels or array.size == 1:
            return name
        index = [slice(None)] * array.ndim
        index[axis] = self.slice
        return self.editor.add_constant(f"{self.output}.{position}", np.ascontiguousarray(array[tuple(index)]))


def _only(numbers: Any) -> float | None:
    """Return the only value in a tuple of equal numbers, else None."""
    return numbers[0] if isinstance(numbers, tuple) and len(set(numbers)) == 1 else None
