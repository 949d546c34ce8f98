"""GraphEditor builds a new graph from an immutable one by collecting changes.

    editor = GraphEditor(graph)
    for node in graph.nodes:
        if node.op == "HardSigmoid":
            half = editor.add_constant("half", np.float32([0.5]))
            editor.make(node.outputs[0], "Add", (node.inputs[0], half))
        else:
            editor.nodes.append(node)
    return editor.finish()

Passes that keep more state extend it. `finish` drops the nodes and constants that nothing reads.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from infer_server.engines.ir.deferred import Deferred
from infer_server.engines.ir.graph import Array, Dim, Graph, Node, QParams, TensorType, type_of
from infer_server.engines.ops import op_of


class GraphEditor:
    """Builder of a graph from `graph`, which stays unchanged: `nodes`, in order, become the nodes of the next one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}       # new, or overriding those of the graph
        self.types: dict[str, TensorType] = {}      # new, or overriding those of the graph
        self._taken = {*graph.inputs, *graph.types, *graph.constants}
        self._replaced: dict[str, str] = {}

    # ---- queries
    def type(self, name: str) -> TensorType:
        return self.types.get(name) or self.graph.types[name]

    def shape(self, name: str) -> tuple[Dim, ...]:
        return self.type(name).shape

    def constant(self, name: str) -> Array | None:
        """Return the values of a constant of the graph or of the editor; None for any other tensor."""
        return self.constants.get(name, self.graph.constants.get(name))

    # ---- additions
    def fresh_name(self, hint: str) -> str:
        """Reserve and return `hint`, or if it is taken `hint.1`, `hint.2`, ..."""
        name = next(n for i in count() if (n := f"{hint}.{i}" if i else hint) not in self._taken)
        self._taken.add(name)
        return name

    def add_tensor(self, hint: str, type_: TensorType) -> str:
        """Return the name of a new tensor, for which the caller must add a node."""
        name = self.fresh_name(hint)
        self.types[name] = type_
        return name

    def add_constant(self, hint: str, array: Array, quant: QParams | None = None) -> str:
        """Add a constant and return its name."""
        name = self.add_tensor(hint, type_of(array, quant))
        # NumPy's arithmetic on arrays without axes gives scalars
        self.constants[name] = array if isinstance(array, Deferred) else np.asarray(array)
        return name

    def add(self, hint: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None,
            origin: Sequence[str] = ()) -> str:
        """Add a node with one new output, whose type is inferred; return the output's name."""
        type_, *_ = op_of(op).infer(Node(op, tuple(inputs), (hint,), attrs or {}),
                                    [self.type(name) if name else None for name in inputs],
                                    [self.constant(name) for name in inputs])
        return self.make(self.add_tensor(hint, type_), op, inputs, attrs, origin)

    def make(self, output: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None,
             origin: Sequence[str] = ()) -> str:
        """Add the node that computes `output`, a tensor of known type, and is named after it; return `output`."""
        self.nodes.append(Node(op, tuple(inputs), (output,), attrs or {}, output, tuple(origin)))
        return output

    # ---- the next graph
    def replace(self, name: str, by: str) -> None:
        """Let all readers of the tensor `name`, and graph outputs, read `by` instead."""
        self._replaced[name] = by

    def current(self, name: str) -> str:
        """Return the tensor that replaces `name`; `name` itself if nothing does."""
        while name in self._replaced:
            name = self._replaced[name]
        return name

    def finish(self) -> Graph:
        """Return the new graph, which the caller verifies."""
        return self.graph.rebuild(self._renamed() if self._replaced else self.nodes, self.constants, self.types)

    def _renamed(self) -> list[Node]:
        """Return the nodes, with replaced tensors substituted in their inputs.

        A graph output keeps its name: the node that computes its replacement takes over that name. If the
        replacement is itself an input, a constant or an output, an Identity computes the output.
        """
        target = {name: self.current(name) for name in self._replaced}
        made = {output for node in self.nodes for output in node.outputs}
        identities: list[Node] = []
        for output in self.graph.outputs:
            if (value := target.get(output)) is None:
                continue
            if value in made and value not in self.graph.outputs and value not in target:
                target[value] = output
                target = {name: output if to == value else to for name, to in target.items() if name != output}
            else:
                identities.append(Node("Identity", (value,), (output,), name=output))
        return [*(renamed(node, target) for node in self.nodes), *identities]


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node, including its body, with the tensors in `names` renamed; the node itself if nothing changes."""
    if not node.body and names.keys().isdisjoint(node.inputs) and names.keys().isdisjoint(node.outputs):
        return node
    return replace(node, inputs=tuple(names.get(i, i) for i in node.inputs),
                   outputs=tuple(names.get(o, o) for o in node.outputs),
                   body=tuple(renamed(part, names) for part in node.body))


def merged_origin(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the names of the ONNX nodes that `nodes` implement, in order, without duplicates."""
    return tuple(dict.fromkeys(name for node in nodes for name in node.origin))
