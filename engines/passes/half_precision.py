"""Compute float16 and bfloat16 models in float32.

    x float16, MatMul by w float16 -> y float16
    =  x -> Cast -> float32, MatMul by w float32 -> Cast -> y float16

Every 16-bit float tensor becomes float32, constants too; graph inputs and outputs keep the model's dtypes. Kernels
then round once where ONNX rounds after each node. A Cast from another dtype to 16 bits stays, since it rounds.

float64 and integers are not converted: their values may not fit float32.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import EngineError
from infer_server.engines.ir.dtypes import FLOAT, is_narrow
from infer_server.engines.ir.graph import Graph, Node, TensorType
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.notes import Note, note


def widen_floats(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Return the graph with float32 in place of 16-bit floats, except inputs, outputs and results of Casts.

    `log` receives a note for each node whose operator requires 16-bit operands.
    """
    if not any(is_narrow(kind) for kind in graph.types.values()):
        return graph
    return _Widener(graph, log).run()


class _Widener(GraphEditor):
    """State of the pass: `wide` and `narrow` map a tensor to its float32 and its 16-bit version, added when read."""

    def __init__(self, graph: Graph, log: list[Note] | None) -> None:
        super().__init__(graph)
        self.log = log
        self.wide: dict[str, str] = {name: name for name, kind in graph.types.items() if not is_narrow(kind)}
        self.narrow: dict[str, str] = {name: name for name in graph.inputs}

    def _visit(self, node: Node) -> None:
        """Add the node on float32 operands, or on the model's dtypes if its operator does not allow float32."""
        if node.op == "Cast" and self._is_narrow(node.outputs[0]):
            self._round(node)
        elif not any(name and self._is_narrow(name) for name in (*node.inputs, *node.outputs)):
            self.nodes.append(node)
        elif self._fits(node):
            inputs = [self._as_wide(name) for name in node.inputs]
            self._emit(node, inputs, [self._wide_name(name) for name in node.outputs])
        else:
            note(self.log, node, "widen", "it is computed in the model's 16-bit dtype, which its operator requires")
            inputs = [self._as_narrow(name) for name in node.inputs]
            self._emit(node, inputs, [self._narrow_name(name) for name in node.outputs])

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._visit(node)
        for name in self.graph.outputs:
            if self._is_narrow(name) and (narrow := self._as_narrow(name)) != name:
                self.make(name, "Identity", [narrow])
        return self.finish()

    # ---- nodes
    def _emit(self, node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.nodes.append(replace(node, inputs=tuple(inputs), outputs=tuple(outputs)))

    def _round(self, node: Node) -> None:
        """Add a Cast to 16 bits; one from the dtype that it casts to does not round."""
        source, output = node.inputs[0], node.outputs[0]
        if self.graph.types[source].dtype == self.graph.types[output].dtype:
            self._emit(replace(node, attrs={"to": FLOAT.name}), [self._as_wide(source)], [self._wide_name(output)])
        else:
            self._emit(node, [self._as_wide(source)], [self._narrow_name(output)])

    def _fits(self, node: Node) -> bool:
        """Return True if float32 inputs turn the node's 16-bit outputs into float32 and leave the others unchanged."""
        inputs = [self._widened(name) if name else None for name in node.inputs]
        values = [self.graph.constants.get(name) for name in node.inputs]
        wanted = [self._widened(name).dtype for name in node.outputs]
        try:
            made = op_of(node.op).infer(node, inputs, values)
        except EngineError:
            return False
        return [kind.dtype for kind in made[:len(wanted)]] == wanted

    def _widened(self, name: str) -> TensorType:
        kind = self.graph.types[name]
        return replace(kind, dtype=FLOAT) if is_narrow(kind) else kind

    def _is_narrow(self, name: str) -> bool:
        return is_narrow(self.graph.types[name])

    # ---- tensors
    def _wide_name(self, name: str) -> str:
        """Return the name of a tensor's float32 version: the tensor's own, unless it is a graph input or output."""
        if name in self.wide:
            return name
        own = name not in self.graph.outputs and name not in self.graph.inputs
        self.wide[name] = made = name if own else self.fresh_name(f"{name}.float32")
        self.types[made] = self._widened(name)
        return made

    def _narrow_name(self, name: str) -> str:
        if not name or not self._is_narrow(name):
            return name
        own = name in self.graph.outputs
        self.narrow[name] = made = name if own else self.fresh_name(f"{name}.{self.graph.types[name].dtype}")
        self.types[made] = self.graph.types[name]
        return made

    def _as_wide(self, name: str) -> str:
        if not name or name in self.wide:
            return self.wide.get(name, "")
        return self._converted(name, self._wide_name(name), self.narrow, FLOAT)

    def _as_narrow(self, name: str) -> str:
        if not name or not self._is_narrow(name) or name in self.narrow:
            return self.narrow.get(name, name)
        return self._converted(name, self._narrow_name(name), self.wide, self.graph.types[name].dtype)

    def _converted(self, name: str, version: str, sources: Mapping[str, str], dtype: np.dtype[Any]) -> str:
        """Add one version of `name`, called `version`, as a Cast of the other, or as a converted constant."""
        if name in self.graph.constants:
            self.constants[version] = self.graph.constants[name].astype(dtype, copy=False)
            return version
        return self.make(version, "Cast", [sources[name]], {"to": dtype.name})
