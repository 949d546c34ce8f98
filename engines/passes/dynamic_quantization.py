"""Rewrite dynamic quantisation, whose ranges are measured at run time, as arithmetic around an integer product.

    DynamicQuantizeLinear       scale = (max(x, 0) - min(x, 0)) / 255       zero = round(-min(x, 0) / scale)
                                q     = round(x / scale) + zero             stored as it is: uint8 of scale 1
    MatMulInteger, ConvInteger  sum of (q - zero) * (w - z)  =  sum of q * (w - z)  -  zero * sum of (w - z)

q is stored as uint8 and the weights are whole numbers, so kernels compute the product in int8; the term of the zero
point and the scale are operands of its epilogue. If uint8 weights minus their zero point z exceed int8, 128 is
subtracted instead of z, and (128 - z) times the sum of q over the inner axis (for a convolution: a convolution by ones)
is added. A bias that is added to the int32 sums is added in float32.

If the model reads the sums as integers, the weights must be so small that float32 holds every sum exactly.
"""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.convolution import Conv
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.notes import Note, note
from infer_server.engines.passes.rules.pad import never_negative

SMALLEST = float(np.finfo(np.float32).tiny)     # lower bound of a scale: a tensor of zeros stays zeros
WHOLE = 1 << 24                                 # float32 represents all integers up to this one
_PRODUCTS = ("MatMulInteger", "ConvInteger")


def write_out_dynamic(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Rewrite the DynamicQuantizeLinear, MatMulInteger and ConvInteger nodes of float32 by constant weights.

    A product that cannot be rewritten stays, and `log` says why.
    """
    if not any(node.op in (*_PRODUCTS, "DynamicQuantizeLinear") for node in graph.nodes):
        return graph
    return _DynamicRewriter(graph, log).run()


class _DynamicRewriter(GraphEditor):
    """State of the pass. `real` maps an integer tensor to the float32 tensor that has its values."""

    def __init__(self, graph: Graph, log: list[Note] | None) -> None:
        super().__init__(graph)
        self.log = log
        self.real: dict[str, str] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.op == "DynamicQuantizeLinear" and self.graph.types[node.inputs[0]].dtype == FLOAT:
                self._quantise(node)
            elif node.op in _PRODUCTS and not (reason := self._why_not(node)):
                self._multiply(node)
            elif node.op == "Add" and self.real.keys() & {*node.inputs}:
                self.real[node.outputs[0]] = self._of(node, "Add", *(
                    self.real.get(name) or self._of(node, "Cast", name, to=FLOAT.name) for name in node.inputs))
            elif node.op == "Cast" and node.attrs["to"] == FLOAT.name and node.inputs[0] in self.real:
                self.replace(node.outputs[0], self.real[node.inputs[0]])
            else:
                if node.op in _PRODUCTS:
                    note(self.log, node, "dynamic", f"stays as it is: {reason}")
                self.nodes.append(node)
        return self.finish()

    def _of(self, node: Node, op: str, *inputs: str, **attrs: object) -> str:
        return self.add(f"{node.outputs[0]}.{op.lower()}", op, inputs, attrs, node.origin)

    def _number(self, node: Node, label: str, value: float | Array) -> str:
        return self.add_constant(f"{node.outputs[0]}.{label}", np.asarray(value, np.float32).reshape(
            np.shape(value) or (1,)))

    # ---- quantising
    def _quantise(self, node: Node) -> None:
        x, (stored, *numbers) = node.inputs[0], node.outputs
        nothing = self._number(node, "nothing", 0.0)
        top = self._of(node, "Max", self._extreme(node, "ReduceMax"), nothing)
        if never_negative(self.graph, x):
            span, zero = top, nothing
        else:
            low = self._of(node, "Min", self._extreme(node, "ReduceMin"), nothing)
            span = self._of(node, "Sub", top, low)
        # exact=1: multiplying by 1 / 255 rounds many scales differently, which changes some of the integers
        share = self._of(node, "Div", span, self._number(node, "steps", 255.0), exact=1)
        scale = self._of(node, "Max", share, self._number(node, "smallest", SMALLEST))
        if span != top:
            middle = self._of(node, "Round", self._of(node, "Div", self._of(node, "Neg", low), scale))
            zero = self._of(node, "Clip", middle, min=0.0, max=255.0)
        steps = self._of(node, "Add", self._of(node, "Round", self._of(node, "Div", x, scale)), zero)
        whole = self._of(node, "FakeQuantize", steps, **_AS_IT_IS)
        self.real.update(zip(node.outputs, (whole, scale, zero), strict=False))
        self.make(stored, "Cast", [whole], {"to": "uint8"}, node.origin)
        for name, value, dtype in zip(numbers, (scale, zero), ("float32", "uint8"), strict=False):
            number = self._of(node, "Reshape", value, shape=())
            self.make(name, "Cast", [number], {"to": dtype}, node.origin)

    def _extreme(self, node: Node, op: str) -> str:
        """Return the name of the maximum or minimum of a node's input over all items, float32 [1]."""
        x = node.inputs[0]
        every = self._of(node, op, x, axes=tuple(range(len(self.shape(x)))), keepdims=1)
        return self._of(node, "Reshape", every, shape=(1,))

    # ---- products
    def _why_not(self, node: Node) -> str:
        """Return why a product cannot be rewritten; "" if it can."""
        graph, (x, w, *zeros) = self.graph, (*node.inputs, "", "")[:4]
        if w not in graph.constants or zeros[1] and zeros[1] not in graph.constants:
            return "its weights are not constant"
        if graph.constants[w].ndim < 2 or node.op == "MatMulInteger" and graph.constants[w].ndim > 2:
            return "its weights are not a matrix"
        if len(graph.shape(x)) < 2 or zeros[0] and math.prod(map(as_int, graph.shape(zeros[0]))) != 1:
            return "its input has several zero points"
        if node.op == "ConvInteger" and not all(isinstance(extent, int) for extent in graph.shape(x)[1:]):
            return "the size of its image is unknown"
        if not read_as_float(self.graph, node.outputs[0]) and not _exact(node, *self._weights(node)):
            return "its sums are read as integers, and may exceed those that float32 represents exactly"
        return ""

    def _multiply(self, node: Node) -> None:
        """Add the product of the stored integers and subtract the terms of the zero points."""
        x, _, x_zero, _ = (*node.inputs, "", "")[:4]
        signed, rest = self._weights(node)
        whole = self._whole(node, x)
        result = self._product(node, whole, signed)
        if np.any(rest):
            factor = rest.reshape(rest.shape[:1] + rest.shape[2:])
            result = self._of(node, "Sub", result, self._of(
                node, "Mul", self._total(node, whole, signed), self._number(node, "rest", factor)))
        known = self.constant(self.real.get(x_zero, x_zero))
        if x_zero and (known is None or np.any(known)):
            taken = self._of(node, "Mul", self._zero_point(node, x_zero), self._sums(node, signed - rest))
            result = self._of(node, "Sub", result, taken)
        if read_as_float(self.graph, node.outputs[0]):
            self.real[node.outputs[0]] = result
        else:
            self.make(node.outputs[0], "Cast", [result], {"to": "int32"}, node.origin)

    def _weights(self, node: Node) -> tuple[Array, Array]:
        """Return (weights in the int8 range, rest), both float32, with weights - zero point = first - rest.

        The rest is 0, a scalar, or one number per output channel.
        """
        w, _, zero = (*node.inputs[1:], "", "")[:3]
        by_channel = [1] * (self.graph.constants[w].ndim - 1) if node.op == "ConvInteger" else []
        weights = self.graph.constants[w].astype(np.int32)
        middle = self.graph.constants[zero].astype(np.int32) if zero else np.zeros((), np.int32)
        middle = middle.reshape(-1, *by_channel) if middle.size > 1 else middle.reshape(())
        rest = np.zeros_like(middle)
        if not _fits(weights - middle) and (node.op == "MatMulInteger" or node.attrs["group"] in (1, len(weights))):
            rest, middle = middle - 128, np.full_like(middle, 128)
        return np.asarray(weights - middle, np.float32), rest.astype(np.float32)

    def _whole(self, node: Node, x: str) -> str:
        """Return the input as a float32 tensor of whole numbers that is stored in uint8 without loss."""
        if x in self.real:
            return self.real[x]
        signed = self.graph.types[x].dtype == np.int8
        return self._of(node, "FakeQuantize", self._of(node, "Cast", x, to=FLOAT.name),
                        **{**_AS_IT_IS, "zero_point": 128 if signed else 0})

    def _zero_point(self, node: Node, name: str) -> str:
        """Return the name of a zero point as float32 [1]."""
        if name in self.real:
            return self.real[name]
        return self._of(node, "Reshape", self._of(node, "Cast", name, to=FLOAT.name), shape=(1,))

    def _product(self, node: Node, x: str, weights: Array) -> str:
        op, attrs = ("MatMul", {}) if node.op == "MatMulInteger" else ("Conv", node.attrs)
        return self._of(node, op, x, self.add_constant(f"{node.outputs[0]}.weights", weights), **attrs)

    def _total(self, node: Node, x: str, weights: Array) -> str:
        """Return the name of the sum of the inputs that each output is computed from."""
        if node.op == "MatMulInteger":
            return self._of(node, "ReduceSum", x, axes=(-1 % len(self.shape(x)),), keepdims=1)
        ones = np.ones((node.attrs["group"], *weights.shape[1:]), np.float32)
        return self._of(node, "Conv", x, self.add_constant(f"{node.outputs[0]}.ones", ones), **node.attrs)

    def _sums(self, node: Node, weights: Array) -> str:
        """Return the product of an all-ones input: [N]; for a Conv [M, 1, 1], or an image if it has padding."""
        if node.op == "MatMulInteger":
            return self._number(node, "sums", weights.sum(axis=0, dtype=np.float64))
        channels = weights.sum(axis=tuple(range(1, weights.ndim)), dtype=np.float64)
        if not any(node.attrs["pads"]):
            return self._number(node, "sums", channels.reshape(-1, *[1] * (weights.ndim - 2)))
        ones = np.ones((1, 1, *map(int, self.graph.shape(node.inputs[0])[2:])), np.float32)     # all channels are equal
        alike = replace(node, attrs={**node.attrs, "group": 1})
        return self._number(node, "sums", Conv.compute(alike, ones, weights.sum(axis=1, keepdims=True)))


@dataflow
def read_as_float(graph: Graph, name: str) -> Walk[bool]:
    """Return True if an integer tensor is read only by Casts to float32, perhaps after Adds."""
    if name in graph.outputs:
        return False
    for reader in graph.consumers[name]:
        if reader.op == "Add":
            if not (yield reader.outputs[0]):
                return False
        elif reader.op != "Cast" or reader.attrs["to"] != FLOAT.name:
            return False
    return True


_AS_IT_IS = {"scale": 1.0, "zero_point": 0, "low": 0, "high": 255}


def _exact(node: Node, weights: Array, rest: Array) -> bool:
    """Return True if float32 represents the sum of any bytes times the weights, and each of its terms, exactly."""
    inner = tuple(range(1, weights.ndim)) if node.op == "ConvInteger" else (0,)
    parts = (weights, weights - rest, np.broadcast_to(rest, weights.shape))
    return all(255 * np.abs(part).sum(axis=inner, dtype=np.float64).max() < WHOLE for part in parts)


def _fits(weights: Array) -> bool:
    return bool(weights.min() >= -128 and weights.max() <= 127)
