"""Rewrite convolutions and pools over signals [N, C, T] as those over images of one row [N, C, 1, T].

    Conv(x [N, C, T], w [O, C, K])   =   Conv(x [N, C, 1, T], w [O, C, 1, K])

They then run on the kernels of images. Pointwise nodes, norms and Concats between them are rewritten too, so that
no Reshape prevents fusion. A Reshape remains where another node reads such a tensor.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ops import LayoutOp, op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import is_pointwise

# Value of the row's axis in each attribute of a window.
_OF_ROW: Mapping[str, int] = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}


def conv1d_to_conv2d(graph: Graph) -> Graph:
    """Return the graph with windows over one spatial axis rewritten as windows over two."""
    if not any(_slides_over_signals(graph, node) for node in graph.nodes):
        return graph
    return _SignalsToImages(graph).run()


def _slides_over_signals(graph: Graph, node: Node) -> bool:
    return (issubclass(op_of(node.op), LayoutOp) and "kernel_shape" in node.attrs and len(node.outputs) == 1
            and len(graph.shape(node.inputs[0])) == 3
            and all(graph.is_constant(name) for name in node.inputs[1:] if name))


def _with_row(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape [..., C, 1, T] for a shape [..., C, T]."""
    return (*shape[:-1], 1, shape[-1])


class _SignalsToImages(GraphEditor):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.images: dict[str, str] = {}        # signal -> the image of one row that has its values
        self._kept = {*graph.inputs, *graph.constants}      # tensors that exist with the shape they had

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._visit(node)
        for name in self.graph.outputs:
            self._signal(name)
        return self.finish()

    def _visit(self, node: Node) -> None:
        if _slides_over_signals(self.graph, node):
            image, *constants = node.inputs
            inputs = [self._image(image), *(self._weights(name) for name in constants)]
            self._emit(node, inputs, _window(node.attrs))
        elif self._follows(node):
            self._emit(node, [name and self._image(name) for name in node.inputs], node.attrs)
        elif node.op == "Concat" and node.attrs["axis"] in (1, -2) and all(name in self.images for name in node.inputs):
            self._emit(node, [self.images[name] for name in node.inputs], {"axis": 1})
        else:
            for name in node.inputs:
                self._signal(name)
            self.nodes.append(node)
            self._kept.update(node.outputs)

    def _follows(self, node: Node) -> bool:
        """Return True for a pointwise node or InstanceNormalization on signals, of which at least one has an image."""
        shape = self.graph.shape(node.outputs[0]) if node.outputs else ()
        each_by_itself = is_pointwise(node) or node.op == "InstanceNormalization"
        return (each_by_itself and len(shape) == 3 and any(name in self.images for name in node.inputs)
                and all(name in self.graph.constants or len(self.graph.shape(name)) == 3
                        for name in node.inputs if name))

    def _emit(self, node: Node, inputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
        self.nodes.append(replace(node, inputs=tuple(inputs), outputs=(self._new_image(node.outputs[0]),), attrs=attrs))

    def _new_image(self, signal: str) -> str:
        type_ = self.graph.types[signal]
        self.images[signal] = self.add_tensor(f"{signal}.row", replace(type_, shape=_with_row(type_.shape)))
        return self.images[signal]

    def _image(self, name: str) -> str:
        """Return the name of a signal's image, or of a constant that broadcasts to images."""
        if name in self.images:
            return self.images[name]
        if name in self.graph.constants:
            return self._constant_with_row(name) if self.graph.constants[name].ndim > 1 else name
        image = self._new_image(name)
        return self.make(image, "Reshape", [name], {"shape": self.shape(image)})

    def _weights(self, name: str) -> str:
        """Return the name of weights with a row axis; a bias is unchanged."""
        return self._constant_with_row(name) if name and self.graph.constants[name].ndim == 3 else name

    def _constant_with_row(self, name: str) -> str:
        array = self.graph.constants[name]
        return self.add_constant(f"{name}.row", array.reshape(_with_row(array.shape)))

    def _signal(self, name: str) -> None:
        """Add a Reshape to the signal's own shape if only its image exists."""
        if name in self.images and name not in self._kept:
            self._kept.add(name)
            self.make(name, "Reshape", [self.images[name]], {"shape": self.graph.shape(name)})


def _window(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a window with a row axis of extent 1."""
    wide = {key: (_OF_ROW[key], *value) if key in _OF_ROW else value for key, value in attrs.items()}
    if "pads" in attrs:
        before, after = attrs["pads"]
        wide["pads"] = (0, before, 0, after)
    return wide
