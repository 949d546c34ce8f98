"""Builder of the canonical nodes that replace one ONNX node.

    w = NodeBuilder(call)
    flat = w("Reshape", call.node.inputs[0], shape=(...))
    return w.finish("Relu", flat)

Names of inner tensors begin with the name of the node's first output.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.deferred import Deferred
from infer_server.engines.ir.graph import Array, Node


class NodeBuilder:
    """Builder of nodes, which carry the name of the ONNX node that they replace."""

    def __init__(self, call: OperatorCall) -> None:
        self._node = call.node
        self.nodes: list[Node] = []

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one inner output and return the output's name."""
        return self._add(op, inputs, self._fresh(op.lower()), attrs)

    def several(self, op: str, *inputs: str, outputs: int, **attrs: Any) -> tuple[str, ...]:
        """Add a node with several inner outputs and return their names."""
        names = tuple(f"{self._fresh(op.lower())}.{index}" for index in range(outputs))
        self.nodes.append(replace(self._node, op=op, inputs=inputs, outputs=names, attrs=attrs))
        return names

    def constant(self, array: Array) -> str:
        value = array if isinstance(array, Deferred) else np.asarray(array)
        return self._add("Constant", (), self._fresh("constant"), {"value": value})

    def output(self, index: int, op: str, *inputs: str, **attrs: Any) -> None:
        """Add the node that computes the ONNX node's output `index`, if the node has that output."""
        if index < len(self._node.outputs):
            self._add(op, inputs, self._node.outputs[index], attrs)

    def finish(self, op: str, *inputs: str, **attrs: Any) -> list[Node]:
        """Add the node that computes the first output and return all nodes."""
        self.output(0, op, *inputs, **attrs)
        return self.nodes

    def _fresh(self, hint: str) -> str:
        return f"{self._node.outputs[0]}.{hint}{len(self.nodes)}"

    def _add(self, op: str, inputs: tuple[str, ...], name: str, attrs: dict[str, Any]) -> str:
        self.nodes.append(replace(self._node, op=op, inputs=inputs, outputs=(name,), attrs=attrs))
        return name
