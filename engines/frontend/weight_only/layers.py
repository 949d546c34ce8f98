"""Find the weights of an ONNX model that can be stored in few bits.

They are matrices of float32 or float16, of at least SMALLEST elements, that MatMul and Gemm nodes multiply by, and
tables whose rows Gather nodes read. Smaller ones are a small share of a model, and stay float, as do those that other
operators read.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import helper, numpy_helper

from infer_server.engines.frontend.onnx_file import OnnxModel, read_by
from infer_server.engines.frontend.weight_only.groups import GroupedWeights
from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array

SMALLEST = 1 << 14          # least number of weights of a layer
FLOATS = (FLOAT, np.dtype(np.float16))
VIEWS = ("Transpose", "Identity")
_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Layer:
    """Node with constant weights.

    Attributes
    ----------
    node : str
        Name of the ONNX node.
    index : int
        Index of the node in the model.
    is_table : bool
        True for a Gather of rows.
    data : str
        Tensor that the weights multiply; the indices of a Gather.
    weight : str
        Name of the initializer.
    turned : bool
        The initializer is [N, K]: a row of it is an output channel, or a row of the table.
    """
    node: str
    index: int
    is_table: bool
    data: str
    weight: str
    turned: bool

    def rows(self, weights: Mapping[str, Array]) -> Array:
        """Return the weights [N, K] of the output channels, or the rows of the table, in float32."""
        stored = weights[self.weight]
        return np.ascontiguousarray(stored if self.turned else stored.T, FLOAT)

    def depth(self, weights: Mapping[str, Array]) -> int:
        """Return K."""
        return int(weights[self.weight].shape[1 if self.turned else 0])


class Rounder(Protocol):
    """Rounding of a layer's weights."""

    def __call__(self, layer: Layer, rows: Array, bits: int, group: int) -> tuple[GroupedWeights, str, float | None]:
        """Round weights [N, K] in groups.

        Returns
        -------
        GroupedWeights, the name of the method, and the SQNR of the layer's output in dB if it is known.
        """


@dataclass(frozen=True)
class Found:
    """Layers to quantise, and the reason why other nodes keep float weights, by name."""
    layers: tuple[Layer, ...]
    kept: Mapping[str, str]


def with_initializers(source: OnnxModel) -> OnnxModel:
    """Return the model with its Constant nodes as initializers: some exporters write all weights as such nodes."""
    outputs = {value.name for value in source.proto.graph.output}
    constants = {node.output[0]: numpy_helper.to_array(node.attribute[0].t) for node in source.proto.graph.node
                 if node.op_type == "Constant" and [each.name for each in node.attribute] == ["value"]
                 and node.output[0] not in outputs}
    proto = onnx.ModelProto()
    proto.CopyFrom(source.proto)
    del proto.graph.node[:]
    proto.graph.node.extend(node for node in source.proto.graph.node if node.output[0] not in constants)
    return replace(source, proto=proto, weights={**source.weights, **constants}, nodes=[]) if constants else source


def find_layers(source: OnnxModel, kept: Collection[str] = ()) -> Found:
    """Return the layers of a model whose weights can be quantised, except the nodes with names in `kept`."""
    views, candidates, others = _views(source), list[Layer](), dict[str, str]()
    reasons: dict[str, str] = {}
    for index, node in enumerate(source.proto.graph.node):
        name, layer = name_of(node), _layer(node, index, views, source.weights)
        read = [views[each][0] for each in read_by(node) if each in views]
        if layer is None:
            others |= {weight: name for weight in read if node.op_type not in VIEWS}
            continue
        others |= {weight: name for weight in read if weight != layer.weight}
        if layer.node in kept:
            reasons[name], others[layer.weight] = "kept in float", name
        elif (size := source.weights[layer.weight].size) < SMALLEST:
            reasons[name] = f"fewer than {SMALLEST} weights ({size})"
        elif not np.isfinite(source.weights[layer.weight]).all():
            reasons[name] = "weights that are not finite"
        else:
            candidates.append(layer)
    exposed = {views[value.name][0] for value in source.proto.graph.output if value.name in views}
    layers, ways = [], {(layer.weight, layer.turned) for layer in candidates}
    for layer in candidates:
        if (layer.weight, not layer.turned) in ways:
            reasons[layer.node] = "its weights are read along both axes"
        elif layer.weight in others:
            reasons[layer.node] = f"'{others[layer.weight]}' reads its weights, too"
        elif layer.weight in exposed:
            reasons[layer.node] = "its weights are an output of the model"
        else:
            layers.append(layer)
    return Found(tuple(layers), reasons)


def name_of(node: onnx.NodeProto) -> str:
    """Return the name of a node as the importer gives it."""
    return node.name or next((name for name in node.output if name), "")


def _views(source: OnnxModel) -> dict[str, tuple[str, bool]]:
    """Map the names of float matrices to the initializer that they are, and whether they are its transpose."""
    views = {name: (name, False) for name, array in source.weights.items()
             if array.dtype in FLOATS and array.ndim == 2 and array.size}
    for node in source.proto.graph.node:
        if node.op_type in VIEWS and not node.domain and node.input and node.input[0] in views:
            root, turned = views[node.input[0]]
            perm = _attributes(node).get("perm", (1, 0)) if node.op_type == "Transpose" else (0, 1)
            views[node.output[0]] = root, turned ^ (tuple(perm) == (1, 0))
    return views


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
            if not attribute.ref_attr_name}


def _layer(node: onnx.NodeProto, index: int, views: Mapping[str, tuple[str, bool]], constants: Collection[str],
           ) -> Layer | None:
    """Return the layer that a node is, or None. A Gather at constant indices is computed at the build."""
    if node.domain not in ("", "ai.onnx") or len(node.input) < 2:
        return None
    attributes = _attributes(node)
    if node.op_type == "Gather":
        root, turned = views.get(node.input[0], ("", True))
        if turned or attributes.get("axis", 0) or node.input[1] in constants:
            return None
        return Layer(name_of(node), index, True, node.input[1], root, True)
    if node.op_type not in _PRODUCTS or node.input[0] in views or node.input[1] not in views:
        return None
    if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1:
        return None
    root, turned = views[node.input[1]]
    return Layer(name_of(node), index, False, node.input[0], root, turned ^ bool(attributes.get("transB", 0)))
