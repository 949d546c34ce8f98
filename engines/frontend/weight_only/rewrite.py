"""Write quantised weights into an ONNX model, as the nodes that the importer reads packed weights from.

    four bits     MatMulNBits of com.microsoft, and an Add for the bias of a Gemm
    eight bits    W = Cast(bytes) * scales, under the float initializer's name, so that its readers stay as they are

The importer turns both into constants on a grid, which passes/quantization/weights.py stores packed.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import helper

from infer_server.engines.frontend.onnx_file import OnnxModel, read_by
from infer_server.engines.frontend.weight_only.groups import GroupedWeights
from infer_server.engines.frontend.weight_only.layers import VIEWS, Layer
from infer_server.engines.ir.graph import Array

_MICROSOFT = "com.microsoft"
_CENTRE = 8             # element of MatMulNBits that means 0


def with_weights(source: OnnxModel, quantised: Mapping[Layer, GroupedWeights], accuracy_level: int) -> OnnxModel:
    """Return the model with quantised weights in place of the float ones of these layers."""
    return _Rewriter(source, accuracy_level).run(quantised)


def showing(source: OnnxModel, tensors: Iterable[str]) -> OnnxModel:
    """Return the model with inner tensors as further outputs; inputs among them are left out."""
    proto = onnx.ModelProto()
    proto.CopyFrom(source.proto)
    known = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in known)
    return source.with_proto(proto)


class _Rewriter:
    def __init__(self, source: OnnxModel, accuracy_level: int) -> None:
        self._source, self._level = source, accuracy_level
        self._weights = dict(source.weights)
        self._before: list[onnx.NodeProto] = []             # nodes that make the float weights of bytes
        self._replaced: dict[int, list[onnx.NodeProto]] = {}        # by index of the node
        self._names = {*source.weights, *(name for node in source.proto.graph.node for name in node.output)}

    def run(self, quantised: Mapping[Layer, GroupedWeights]) -> OnnxModel:
        bytes_, nibbles = dict[str, str](), dict[str, tuple[str, str]]()
        for layer, groups in quantised.items():
            if groups.bits == 8:
                if layer.weight not in bytes_:
                    bytes_[layer.weight] = layer.weight
                    self._as_bytes(layer, groups)
            else:
                if layer.weight not in nibbles:
                    nibbles[layer.weight] = self._packed(layer, groups)
                self._replaced[layer.index] = self._by_nibbles(layer, groups, *nibbles[layer.weight])
        proto = onnx.ModelProto()
        proto.CopyFrom(self._source.proto)
        nodes = [*self._before, *(node for index, node in enumerate(self._source.proto.graph.node)
                                  for node in self._replaced.get(index, [node]))]
        nodes = _without_idle_views(nodes, {value.name for value in proto.graph.output})
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in read_by(node)} | {value.name for value in proto.graph.output}
        gone = {layer.weight for layer in quantised if layer.weight in made or layer.weight not in read}
        inputs = [value for value in proto.graph.input if value.name not in gone]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        if nibbles and all(opset.domain != _MICROSOFT for opset in proto.opset_import):
            proto.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))
        weights = {name: array for name, array in self._weights.items() if name not in gone}
        return OnnxModel(self._source.name, proto, weights)

    def _name(self, like: str) -> str:
        """Return an unused name for a tensor."""
        name, number = like, 0
        while name in self._names:
            number += 1
            name = f"{like}.{number}"
        self._names.add(name)
        return name

    def _constant(self, like: str, array: Array) -> str:
        self._weights[name := self._name(like)] = array
        return name

    def _as_bytes(self, layer: Layer, groups: GroupedWeights) -> None:
        """Store the weights of a layer as bytes, in the axes of its initializer."""
        weight = layer.weight
        numbers, scales = (groups.numbers, groups.scales) if layer.turned else (groups.numbers.T, groups.scales.T)
        stored = self._constant(f"{weight}.int8", np.ascontiguousarray(numbers))
        cast, dtype = self._name(f"{weight}.cast"), self._source.weights[weight].dtype
        factors = self._constant(f"{weight}.scales", np.ascontiguousarray(scales, dtype))
        self._before += [
            helper.make_node("Cast", [stored], [cast], name=cast, to=helper.np_dtype_to_tensor_dtype(dtype)),
            helper.make_node("Mul", [cast, factors], [weight], name=f"{weight}.dequantised")]

    def _packed(self, layer: Layer, groups: GroupedWeights) -> tuple[str, str]:
        """Store the weights of a layer for MatMulNBits: uint8 [N, groups, group / 2], and scales [N * groups]."""
        rows, depth = groups.numbers.shape
        elements = np.pad((groups.numbers + _CENTRE).astype(np.uint8), ((0, 0), (0, -depth % groups.group)),
                          constant_values=_CENTRE)
        packed = (elements[:, ::2] | elements[:, 1::2] << 4).reshape(rows, -1, groups.group // 2)
        return (self._constant(f"{layer.weight}.int4", packed),
                self._constant(f"{layer.weight}.scales",
                               groups.scales.reshape(-1).astype(self._source.weights[layer.weight].dtype)))

    def _by_nibbles(self, layer: Layer, groups: GroupedWeights, packed: str, scales: str) -> list[onnx.NodeProto]:
        node = self._source.proto.graph.node[layer.index]
        bias = [name for name in node.input[2:] if name]
        output = self._name(f"{node.output[0]}.product") if bias else node.output[0]
        rows, depth = groups.numbers.shape
        product = helper.make_node("MatMulNBits", [layer.data, packed, scales], [output], name=layer.node,
                                   domain=_MICROSOFT, K=depth, N=rows, bits=4, block_size=groups.group,
                                   accuracy_level=self._level)
        return [product, *(helper.make_node("Add", [output, name], [node.output[0]], name=f"{layer.node}.bias")
                           for name in bias)]


def _without_idle_views(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Return the nodes without Transposes and Identities that nothing reads."""
    read, left = set(outputs), list[onnx.NodeProto]()
    for node in reversed(nodes):
        if node.op_type not in VIEWS or node.domain or not read.isdisjoint(node.output):
            left.append(node)
            read.update(read_by(node))
    return left[::-1]
