"""Split recurrent layers into the input projection of all steps, a matrix product, and a Recurrence.

    LSTM(X, W, R, B) = Recurrence(X W' + b, R)

The projection of all steps of both directions is one contraction that fuses and quantises like any other. The
Recurrence has the batch axis first whatever the layer's layout; the Transposes that this adds mostly cancel against
those that PyTorch exports around batch_first layers (passes/layout moves them together).

An initial state of zeros, and sequence lengths equal to the number of steps, are dropped.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import Array, Dim, Graph, Node, TensorType, trimmed
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.recurrent import GATES, added_biases
from infer_server.engines.passes.rewriting.dataflow import Walk, dataflow
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import moved_from
from infer_server.engines.passes.rewriting.notes import Note, note

_TIME_FIRST = (1, 0, 2)


def split_recurrent(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Replace every LSTM, GRU and RNN of constant weights by a MatMul, an Add and a Recurrence."""
    split = _RecurrentSplitter(graph, log)
    for node in graph.nodes:
        split.visit(node)
    return split.finish()


@dataflow
def filled_with(graph: Graph, name: str) -> Walk[float | None]:
    """Return the value that all elements of a tensor have, or None if they differ or are known at run time only."""
    if name in graph.constants:
        array = graph.constants[name]
        return float(array.flat[0]) if array.size and (array == array.flat[0]).all() else None
    node = graph.producer.get(name)
    if node is None:
        return None
    if node.op == "ConstantOfShape":
        return float(np.asarray(node.attrs["value"]).reshape(-1)[0])
    first, *others = (node.inputs if node.op == "Cast" else moved_from(node)) or ("",)
    value = (yield first) if first else None
    for part in others:
        if value is None or (yield part) != value:
            return None
    return value


class _RecurrentSplitter(GraphEditor):
    def __init__(self, graph: Graph, log: list[Note] | None) -> None:
        super().__init__(graph)
        self.log = log

    def visit(self, node: Node) -> None:
        if node.op not in GATES and node.op != "DynamicQuantizeLSTM":
            self.nodes.append(node)
        elif variable := [name for name in (*node.inputs[1:4], *node.inputs[7:8])
                          if name and name not in self.graph.constants]:
            note(self.log, node, "split_recurrent", f"'{variable[0]}' is computed at run time")
            self.nodes.append(node)
        else:
            self._split(node)

    def _split(self, node: Node) -> None:
        x, w, r, b, lengths, *states, p = (*node.inputs, *("",) * (8 - len(node.inputs)))
        recurrent = self.graph.constants[r]
        count, rows, hidden = recurrent.shape
        bias = self.graph.constants[b] if b else np.zeros((count, 2 * rows), recurrent.dtype)
        outside, inside = added_biases(node, bias, hidden)

        if not node.attrs["layout"]:
            x = self._items_first(node, x)
        items, steps, _ = self.shape(x)
        if w:
            matrix = np.ascontiguousarray(self.graph.constants[w].reshape(count * rows, -1).T)
            x = self._node(node, "MatMul", (x, self._constant(node, "projection", matrix)))
        projected = self._node(node, "Add", (x, self._constant(node, "bias", outside.reshape(-1))))

        lengths = "" if lengths and filled_with(self.graph, lengths) == steps else lengths
        optional = ["" if inside is None else self._constant(node, "inside", inside), p, lengths,
                    *(self._first(node, state) for state in states)]
        y, last = (items, steps, count * hidden), (items, count * hidden)
        outputs = list(node.outputs)
        while len(outputs) > 1 and not self.graph.consumers[outputs[-1]] and outputs[-1] not in self.graph.outputs:
            outputs.pop()
        made = [self.add_tensor(f"{node.outputs[0]}.state{i}" if i else f"{node.outputs[0]}.steps",
                                self._type(node, last if i else y)) for i in range(len(outputs))]
        attrs = {key: value for key, value in node.attrs.items() if key != "layout"}
        attrs |= {"cell": node.op} if node.op in GATES else {"cell": "LSTM", "rounds_state": 1}
        self.nodes.append(replace(node, op="Recurrence", inputs=trimmed([projected, r, *optional]),
                                  outputs=tuple(made), attrs=attrs))
        for i, (source, target) in enumerate(zip(made, outputs, strict=True)):
            self._unfold(node, source, target, (*(last if i else y)[:-1], count, hidden))

    def _items_first(self, node: Node, x: str) -> str:
        """Transpose [T, N, I] to [N, T, I]; a single step takes a Reshape, which merges with the views before it."""
        steps, items, features = self.shape(x)
        if steps == 1:
            return self._node(node, "Reshape", (x,), shape=(items, 1, features))
        return self._node(node, "Transpose", (x,), perm=_TIME_FIRST)

    def _unfold(self, node: Node, source: str, target: str, shape: Sequence[Dim]) -> None:
        """Compute the layer's output `target`, in its layout, from a Recurrence's output [N, ..., D H]."""
        if node.attrs["layout"]:
            self.make(target, "Reshape", (source,), {"shape": tuple(shape)}, node.origin)
            return
        split = self._node(node, "Reshape", (source,), shape=tuple(shape))
        perm = (1, 2, 0, 3) if len(shape) == 4 else _TIME_FIRST
        self.make(target, "Transpose", (split,), {"perm": perm}, node.origin)

    def _first(self, node: Node, state: str) -> str:
        """Return the name of an initial state as [N, D H]; "" if it is absent or zeros."""
        if not state or filled_with(self.graph, state) == 0:
            return ""
        made = self.graph.producer.get(state)
        if made is not None and made.op == "Expand" and made.inputs[0] in self.graph.constants:
            state = made.inputs[0]      # the same initial state for every item
        if state in self.graph.constants:
            array = self.graph.constants[state]
            array = array if node.attrs["layout"] else array.transpose(_TIME_FIRST)
            return self._constant(node, "first", np.ascontiguousarray(array.reshape(len(array), -1)))
        if not node.attrs["layout"]:
            state = self._node(node, "Transpose", (state,), perm=_TIME_FIRST)
        items, *extents = self.shape(state)
        return self._node(node, "Reshape", (state,), shape=(items, math.prod(map(as_int, extents))))

    # ---- new tensors, named after the layer's first output
    def _constant(self, node: Node, suffix: str, array: Array) -> str:
        return self.add_constant(f"{node.outputs[0]}.{suffix}", array)

    def _type(self, node: Node, shape: Sequence[Dim]) -> TensorType:
        return TensorType(self.graph.types[node.inputs[0]].dtype, tuple(shape))

    def _node(self, node: Node, op: str, inputs: tuple[str, ...], **attrs: object) -> str:
        return self.add(f"{node.outputs[0]}.{op.lower()}", op, inputs, attrs, node.origin)
