"""Export a graph as an ONNX model: Fused bodies unfolded, images channels first, Q/DQ pairs for quantised tensors.

A channels-last graph is written channels first without moving data: `OnnxWriter.names` maps each tensor to the ONNX
tensor that holds it and says if that one is channels first. A Transpose between the two layouts is then only another
name. A Transpose is written only for an operator that cannot work on the other layout.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from infer_server.engines.frontend.onnx_file import INTEGER_STATES
from infer_server.engines.frontend.operators.denormalise import (
    OPSET,
    channel_shuffle,
    denormalise,
    shuffled_groups,
    without_defaults,
)
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType
from infer_server.engines.ops import LayoutOp, op_of
from infer_server.engines.ops.blocks import in_blocks, unpacked
from infer_server.engines.ops.blocks import packed as packed_rows
from infer_server.engines.ops.recurrent import GATES
from infer_server.engines.version import COMPILER_VERSION


def _to_first(rank: int) -> tuple[int, ...]:
    """Return the perm NHWC -> NCHW of images or volumes."""
    return (0, rank - 1, *range(1, rank - 1))


def _to_last(rank: int) -> tuple[int, ...]:
    """Return the perm NCHW -> NHWC, which also maps an axis of NHWC to its index in NCHW."""
    return (0, *range(2, rank), 1)


def onnx_from_graph(graph: Graph, packed: bool = False) -> onnx.ModelProto:
    """Return the graph as a checked ONNX model of opset 20, with the graph's input and output names.

    packed: write products by 4-bit weights as MatMulNBits of ONNX Runtime; otherwise their weights are written in
    float, since this opset has no block scales.

    A quantised activation becomes QuantizeLinear -> DequantizeLinear after its producer, a quantised constant an
    integer initializer and a DequantizeLinear. Recurrent layers are written in float, since ONNX has no quantised
    ones; a property of the model names those whose states are multiplied as integers.

    Raises
    ------
    ModelError
        If ONNX cannot express a node, such as a Reshape with two symbolic extents.
    """
    graph = _without_blocks(graph, _by_matmul_n_bits if packed else _by_floats)
    writer = OnnxWriter(graph)
    for name in graph.inputs:
        writer.names[name] = OnnxTensor(name)
        writer.requantise(name)
    for node in graph.nodes:
        for part in node.body or (node,):
            writer.write(part)
        for output in node.outputs:
            writer.requantise(output)
    writer.name_outputs()

    inputs = [_value_info(name, graph.types[name]) for name in graph.inputs]
    outputs = [_value_info(name, graph.types[name]) for name in graph.outputs]
    proto = helper.make_graph(writer.nodes, graph.name, inputs, outputs, list(writer.initialisers.values()))
    opsets = [helper.make_opsetid(domain, version) for domain, version in sorted(writer.opsets.items())]
    model = helper.make_model(proto, opset_imports=opsets, producer_name="infer-server",
                              producer_version=COMPILER_VERSION)
    model.ir_version = 9        # the version of opset 20, for older runtimes
    if writer.integer_states:
        helper.set_model_props(model, {INTEGER_STATES: json.dumps(writer.integer_states)})
    onnx.checker.check_model(model)
    return model


_ROUNDED_ROWS = ("QuantizeBlocks", "FakeQuantizeBlocks")


def _without_blocks(graph: Graph, written: Callable[[Graph, Node, dict[str, Array]], Node]) -> Graph:
    """Replace each product by 4-bit weights by what `written` returns, which adds constants by name.

    Rounding of their rows in blocks is dropped; MatMulNBits has it as its accuracy level.
    """
    nodes, constants, types = list[Node](), dict[str, Array](), {}
    for node in graph.nodes:
        if node.op in _ROUNDED_ROWS:
            node = replace(node, op="Identity", attrs={})
            types[node.outputs[0]] = graph.types[node.inputs[0]]
        if node.anchor.op == "MatMulBlocks":
            node = node.with_body((written(graph, node.anchor, constants), *node.body[1:]))
        nodes.append(node)
    return graph.rebuild(nodes, constants, types)


def _by_floats(graph: Graph, product: Node, constants: dict[str, Array]) -> Node:
    x, q, scales, offsets, *bias = product.inputs
    name, numbers = f"{q}.real", unpacked(graph.constants[q], product.attrs["depth"])
    weights = in_blocks(numbers, graph.constants[scales], graph.constants.get(offsets), product.attrs["block"])
    constants[name] = np.ascontiguousarray(weights if bias else weights.T)
    op, attrs = ("Gemm", {"transB": 1}) if bias else ("MatMul", {})
    return replace(product, op=op, inputs=(x, name, *bias), attrs=attrs)


def _by_matmul_n_bits(graph: Graph, product: Node, constants: dict[str, Array]) -> Node:
    x, q, scales, offsets, *bias = product.inputs
    numbers, scale = unpacked(graph.constants[q], depth := product.attrs["depth"]), graph.constants[scales]
    size = next((size for size in (16, 32, 64, 128) if size >= min(product.attrs["block"], depth)), 256)
    count, parts = -(-depth // size), max(product.attrs["block"] // size, 1)
    elements = np.pad(numbers, ((0, 0), (0, -depth % size)))
    named = {f"{q}.n_bits": packed_rows(elements).reshape(len(numbers), count, -1),
             f"{scales}.n_bits": np.repeat(scale, parts, axis=1)[:, :count].reshape(-1)}
    if offsets:
        zeros = np.rint(np.divide(-graph.constants[offsets], scale, out=np.zeros_like(scale), where=scale != 0))
        zeros = np.repeat(zeros.astype(np.uint8), parts, axis=1)[:, :count]
        named[f"{offsets}.n_bits"] = packed_rows(zeros).reshape(-1)
    constants |= named
    inputs = (x, *named, *("" for _ in range(3 - len(named))))
    rounds = x in graph.producer and graph.producer[x].op in _ROUNDED_ROWS
    return replace(product, op="MatMulNBits", inputs=(*inputs, "", *bias) if bias else inputs[:1 + len(named)], attrs={
        "onnx_domain": "com.microsoft", "onnx_opset": 1, "K": depth, "N": len(numbers), "bits": 4, "block_size": size,
        "accuracy_level": 4 if rounds else 0})


def _value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind.dtype), kind.shape)


@dataclass(frozen=True)
class OnnxTensor:
    """ONNX tensor that holds a tensor of the graph; `first`: channels first, while the graph's is channels last."""
    name: str
    first: bool = False


@dataclass
class OnnxWriter:
    """Builder of the ONNX graph."""
    graph: Graph
    names: dict[str, OnnxTensor] = field(default_factory=dict)
    integers: dict[str, OnnxTensor] = field(default_factory=dict)        # quantised tensor -> its integers
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    named: set[str] = field(default_factory=set)        # names of nodes
    initialisers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=lambda: {"": OPSET})
    integer_states: list[str] = field(default_factory=list)     # recurrent layers with int8 states

    def emit(self, op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attrs: Any) -> str:
        attrs = without_defaults(op, attrs)
        name = outputs[0] if not name or name in self.named else name       # one node may become several ONNX nodes
        self.named.add(name)
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=name, **attrs))
        return outputs[0]

    def initialiser(self, name: str, array: Array) -> str:
        self.initialisers[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    # ---- nodes
    def write(self, node: Node) -> None:
        """Write a canonical node, in the layout of its inputs if possible."""
        perm = tuple(node.attrs.get("perm", ()))
        onnx_tensor = self.names.get(node.inputs[0]) if node.inputs else None
        if node.op == "Transpose" and onnx_tensor and perm == (_to_first if onnx_tensor.first else _to_last)(len(perm)):
            self.names[node.outputs[0]] = OnnxTensor(onnx_tensor.name, not onnx_tensor.first)
            return
        if self._joins_integers(node):
            self._write_joined(node)
            return
        if issubclass(op_of(node.op), LayoutOp):
            first = bool(node.attrs.get("channels_last"))
            inputs = [self.tensor(node.inputs[0], first), *(self.tensor(name) for name in node.inputs[1:])]
        elif first := self._channels_first(node):
            rank = len(self.graph.shape(node.outputs[0]))
            inputs = ([self.tensor(node.inputs[0], first), self.tensor(node.inputs[1])] if node.op == "Gather" else
                      [self.operand(name, rank) for name in node.inputs])
            node = replace(node, attrs=op_of(node.op).renumbered(node, rank, _to_last(rank).__getitem__))
        else:
            inputs = [self.tensor(name) for name in node.inputs]
        held = tuple(f"{name}.held" if name in self.graph.outputs else name for name in node.outputs)
        self._write_parts(node, inputs, held, first)
        self.names.update((name, OnnxTensor(other, first)) for name, other in zip(node.outputs, held, strict=True))

    def _joins_integers(self, node: Node) -> bool:
        """Return True for a Concat of tensors with the quantisation of its output."""
        quant = self.graph.types[node.outputs[0]].quant
        return (node.op == "Concat" and quant is not None and quant.axis is None and
                all(self.graph.types[name].quant == quant and name in self.integers for name in node.inputs))

    def _write_joined(self, node: Node) -> None:
        """Write a Concat of integers, which is exact.

        OpenVINO 2026.4 crashes on a Concat of dequantised tensors that is quantised again.
        """
        output, first = node.outputs[0], self._channels_first(node)
        inputs = [self._transposed(f"{name}.stored", self.integers[name], first) for name in node.inputs]
        axis = node.attrs["axis"]
        axis = _to_last(len(self.graph.shape(output)))[axis] if first else axis
        stored = self.emit("Concat", inputs, [f"{output}.stored"], node.name, axis=axis)
        self._dequantise(output, OnnxTensor(stored, first))

    def _write_parts(self, node: Node, inputs: list[str], held: tuple[str, ...], first: bool) -> None:
        output = node.outputs[0]
        types, rank = [self.graph.types[name] if name else None for name in node.inputs], len(self.graph.shape(output))

        def constant(label: str, array: Array) -> str:
            array = array.reshape(-1, *[1] * (rank - 2)) if first and _per_channel(array, node) else array
            return self.initialiser(f"{output}.{label}", array)

        domain = {"domain": node.attrs["onnx_domain"]} if "onnx_domain" in node.attrs else {}
        self.opsets.update((name, node.attrs["onnx_opset"]) for name in domain.values())
        written = replace(node, inputs=tuple(inputs), outputs=held)
        parts = denormalise(written, types, constant)
        indices = self.graph.constants.get(node.inputs[1]) if node.op == "Gather" else None
        if indices is not None and (groups := shuffled_groups(indices)):
            shape = self.graph.shape(node.inputs[0])
            shape = tuple(shape[axis] for axis in _to_first(rank)) if first else shape
            parts = channel_shuffle(written, shape, groups, constant)
        for op, names, outputs, attrs in parts:
            if op in GATES and node.precision == "int8":
                self.integer_states.append(outputs[0])
            self.emit(op, names, outputs, node.name if op == node.op else "", **attrs, **domain)

    def _channels_first(self, node: Node) -> bool:
        """Return True if a layout-agnostic node reads channels-first inputs and can work on them."""
        if not any(self.names[name].first for name in node.inputs if name in self.names):
            return False
        if node.op == "Gather":
            return len(self.graph.shape(node.inputs[1])) == 1
        ranks = {len(self.graph.shape(name)) for name in (*node.inputs, *node.outputs)
                 if name and name not in self.graph.constants}
        return op_of(node.op).along is not None and len(ranks - {0}) == 1       # 0: a scalar operand

    # ---- tensors
    def tensor(self, name: str, first: bool = False) -> str:
        """Return the ONNX tensor that holds a tensor, channels first or as in the graph."""
        if not name:
            return ""
        if name not in self.names:
            self.names[name] = OnnxTensor(self._constant(name))
        return self._transposed(name, self.names[name], first)

    def _transposed(self, name: str, onnx_tensor: OnnxTensor, first: bool) -> str:
        if onnx_tensor.first == first:
            return onnx_tensor.name
        turned = f"{name}.{'nchw' if first else 'nhwc'}"
        if not any(turned in node.output for node in self.nodes):
            self.emit("Transpose", [onnx_tensor.name], [turned],
                      perm=(_to_first if first else _to_last)(len(self.graph.shape(name))))
        return turned

    def operand(self, name: str, rank: int) -> str:
        """Return an operand of a channels-first node: images transposed, constants per channel as [C, 1, 1]."""
        constant = self.graph.constants.get(name)
        if constant is None or self.graph.types[name].quant:
            return self.tensor(name, first=len(self.graph.shape(name)) == rank) if name else ""
        if constant.ndim < 2 and constant.size == 1:
            return self.tensor(name)
        padded = constant.reshape((1,) * (rank - constant.ndim) + constant.shape).transpose(_to_first(rank))
        return self.initialiser(f"{name}.nchw", padded if constant.ndim == rank else padded[0])

    def _constant(self, name: str) -> str:
        quant = self.graph.types[name].quant
        if quant is None:
            return self.initialiser(name, self.graph.constants[name])
        stored = self.initialiser(f"{name}.stored", self.graph.constants[name])
        return self._convert("DequantizeLinear", stored, name, quant, name)

    def requantise(self, name: str) -> None:
        """Insert a Q/DQ pair after the producer of a quantised tensor."""
        quant, onnx_tensor = self.graph.types[name].quant, self.names[name]
        if quant is None or name in self.integers:
            return
        stored = self._convert("QuantizeLinear", onnx_tensor.name, name, self._quantisation(name, onnx_tensor),
                               f"{name}.stored")
        self._dequantise(name, OnnxTensor(stored, onnx_tensor.first))

    def _dequantise(self, name: str, stored: OnnxTensor) -> None:
        """Write a DequantizeLinear of the integers, which readers of the tensor read."""
        quant = self._quantisation(name, stored)
        rounded = self._convert("DequantizeLinear", stored.name, name, quant, f"{name}.rounded")
        self.integers[name], self.names[name] = stored, OnnxTensor(rounded, stored.first)

    def _quantisation(self, name: str, onnx_tensor: OnnxTensor) -> QParams:
        """Return the tensor's quantisation, its axis in the layout of the ONNX tensor."""
        quant, rank = self.graph.types[name].quant, len(self.graph.shape(name))
        assert quant is not None
        return replace(quant,
                       axis=_to_last(rank)[quant.axis]) if quant.axis is not None and onnx_tensor.first else quant

    def _convert(self, op: str, source: str, name: str, quant: QParams, output: str) -> str:
        """Write a QuantizeLinear or DequantizeLinear with the parameters of the tensor `name`."""
        scale, zero_point = np.array(quant.scale, np.float32), np.array(quant.zero_point, quant.dtype)
        if quant.axis is None:
            scale, zero_point = scale.reshape(()), zero_point.reshape(())
        inputs = [source, self.initialiser(f"{name}.scale", scale), self.initialiser(f"{name}.zero_point", zero_point)]
        attrs: dict[str, Any] = {} if quant.axis is None else {"axis": quant.axis}
        return self.emit(op, inputs, [output], **attrs)

    def name_outputs(self) -> None:
        """Rename the tensors that hold graph outputs; an input, a constant or a second output needs an Identity."""
        for name in self.graph.outputs:
            held = self.tensor(name)
            if held in self.graph.inputs or held in self.initialisers or held in self.graph.outputs:
                self.emit("Identity", [held], [name])
            else:
                self._rename(held, name)

    def _rename(self, old: str, new: str) -> None:
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
        self.names = {key: replace(onnx_tensor, name=new) if onnx_tensor.name == old else onnx_tensor
                      for key, onnx_tensor in self.names.items()}


def _per_channel(array: Array, node: Node) -> bool:
    """Return True for a bound of a Clip with one value per channel."""
    return node.op == "Clip" and array.ndim == 1 and array.size > 1
