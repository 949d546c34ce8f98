"""Signals [N, C, T] as images of one row [N, C, 1, T]: windows over lines have the kernels of windows over images.

    Conv(x [N, C, T], w [O, C, K])   =   Conv(x [N, C, 1, T], w [O, C, 1, K])

Convolutions and pools of one axis are rewritten, and with them the pointwise nodes and joins between them, so that
nothing stands between a layer and what fuses with it. Where another node reads such a tensor, a Reshape is left.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engines.ir.graph import Array, Dim, Graph, Node, TensorType
from engines.ops import LayoutOp, op_of
from engines.passes.rewriting.facts import is_pointwise
from engines.passes.rewriting.rewrite import fresh_name

# What the row's axis has in each attribute of a window.
_OF_ROW: Mapping[str, int] = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}


def lines_to_images(graph: Graph) -> Graph:
    """The graph without windows over one axis; as it is if it has none."""
    if not any(_slides_over_lines(graph, node) for node in graph.nodes):
        return graph
    return _Rewriter(graph).run()


def _slides_over_lines(graph: Graph, node: Node) -> bool:
    return (issubclass(op_of(node.op), LayoutOp) and "kernel_shape" in node.attrs and len(node.outputs) == 1
            and len(graph.shape(node.inputs[0])) == 3
            and all(graph.is_constant(name) for name in node.inputs[1:] if name))


def _with_row(shape: Sequence[Any]) -> tuple[Any, ...]:
    """[..., C, T] -> [..., C, 1, T]"""
    return (*shape[:-1], 1, shape[-1])


class _Rewriter:
    """The nodes, constants and types of the new graph, as they grow. `rows`: tensor -> its image of one row."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.types: dict[str, TensorType] = {}
        self.rows: dict[str, str] = {}
        self._made = {*graph.inputs, *graph.constants}      # tensors that exist as they were
        self._taken = {*graph.types, *graph.constants}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._visit(node)
        for name in self.graph.outputs:
            self._line(name)
        return self.graph.rebuild(self.nodes, self.constants, self.types)

    def _visit(self, node: Node) -> None:
        if _slides_over_lines(self.graph, node):
            image, *constants = node.inputs
            inputs = [self._row(image), *(self._weights(name) for name in constants)]
            self._emit(node, inputs, _window(node.attrs))
        elif self._follows(node):
            self._emit(node, [name and self._row(name) for name in node.inputs], node.attrs)
        elif node.op == "Concat" and node.attrs["axis"] in (1, -2) and all(name in self.rows for name in node.inputs):
            self._emit(node, [self.rows[name] for name in node.inputs], {"axis": 1})
        else:
            for name in node.inputs:
                self._line(name)
            self.nodes.append(node)
            self._made.update(node.outputs)

    def _follows(self, node: Node) -> bool:
        """Pointwise on at least one image; the others are lines, or constants."""
        shape = self.graph.shape(node.outputs[0]) if node.outputs else ()
        return (is_pointwise(node) and len(shape) == 3 and any(name in self.rows for name in node.inputs)
                and all(name in self.graph.constants or len(self.graph.shape(name)) == 3
                        for name in node.inputs if name))

    def _emit(self, node: Node, inputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
        output = node.outputs[0]
        made = self._image_of(output)
        self.nodes.append(replace(node, inputs=tuple(inputs), outputs=(made,), attrs=attrs))

    def _image_of(self, name: str) -> str:
        """A new tensor: the image of one row of a line."""
        kind = self.graph.types[name]
        self.rows[name] = fresh_name(f"{name}.row", self._taken)
        self.types[self.rows[name]] = TensorType(kind.dtype, _with_row(kind.shape))
        return self.rows[name]

    def _row(self, name: str) -> str:
        """A tensor or constant as nodes on images read it."""
        if name in self.rows:
            return self.rows[name]
        if name in self.graph.constants:
            array = self.graph.constants[name]
            return self._constant(name, array.reshape(_with_row(array.shape))) if array.ndim > 1 else name
        made = self._image_of(name)
        self._reshape(name, made, self.types[made].shape)
        return made

    def _weights(self, name: str) -> str:
        """Weights with a row; a bias stays."""
        array = self.graph.constants[name] if name else np.zeros(0)
        return self._constant(name, array.reshape(_with_row(array.shape))) if array.ndim == 3 else name

    def _constant(self, name: str, array: Array) -> str:
        made = fresh_name(f"{name}.row", self._taken)
        self.constants[made] = array
        return made

    def _line(self, name: str) -> None:
        """Makes a tensor as it was, if only its image exists."""
        if name in self.rows and name not in self._made:
            self._made.add(name)
            self._reshape(self.rows[name], name, self.graph.shape(name))

    def _reshape(self, source: str, target: str, shape: Sequence[Dim]) -> None:
        self.nodes.append(Node("Reshape", (source,), (target,), {"shape": tuple(shape)}, target))


def _window(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a window one row high."""
    wide = {key: (_OF_ROW[key], *value) if key in _OF_ROW else value for key, value in attrs.items()}
    if "pads" in attrs:
        before, after = attrs["pads"]
        wide["pads"] = (0, before, 0, after)
    return wide
