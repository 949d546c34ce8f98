"""GraphEditor: the one way to build a graph from another. Graphs are immutable; an editor collects what is to change.

    editor = GraphEditor(graph)
    for node in graph.nodes:
        if node.op == "HardSigmoid":
            half = editor.add_constant("half", np.float32([0.5]))
            editor.make(node.outputs[0], "Add", (node.inputs[0], half))
        else:
            editor.nodes.append(node)
    return editor.finish()

Passes that keep more state extend it. What is added and in the end not needed costs nothing: `finish` drops it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from engines.ir.deferred import Deferred
from engines.ir.graph import Array, Dim, Graph, Node, QParams, TensorType, type_of
from engines.ops import op_of


class GraphEditor:
    """`graph` is the graph that is read and stays as it is; `nodes`, in order, and what is added make the next one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}       # added, or in place of one of the same name
        self.types: dict[str, TensorType] = {}      # likewise
        self._taken = {*graph.inputs, *graph.types, *graph.constants}
        self._replaced: dict[str, str] = {}

    # ---- what there is
    def type(self, name: str) -> TensorType:
        return self.types.get(name) or self.graph.types[name]

    def shape(self, name: str) -> tuple[Dim, ...]:
        return self.type(name).shape

    def constant(self, name: str) -> Array | None:
        """The values of a tensor that is constant, before or by what was added; else None."""
        return self.constants.get(name, self.graph.constants.get(name))

    # ---- what is new
    def fresh_name(self, wanted: str) -> str:
        """`wanted`, or with a number behind it if the name is taken; it is taken from now on."""
        name = next(n for i in count() if (n := f"{wanted}.{i}" if i else wanted) not in self._taken)
        self._taken.add(name)
        return name

    def add_tensor(self, wanted: str, type_: TensorType) -> str:
        """The name of a new tensor, which a node is still to make."""
        name = self.fresh_name(wanted)
        self.types[name] = type_
        return name

    def add_constant(self, wanted: str, array: Array, quant: QParams | None = None) -> str:
        """The name of a new constant."""
        name = self.add_tensor(wanted, type_of(array, quant))
        # NumPy's arithmetic on arrays without axes gives scalars
        self.constants[name] = array if isinstance(array, Deferred) else np.asarray(array)
        return name

    def add(self, wanted: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None,
            origin: Sequence[str] = ()) -> str:
        """The name of a new tensor, whose type follows from the node that makes it."""
        type_, *_ = op_of(op).infer(Node(op, tuple(inputs), (wanted,), attrs or {}),
                                    [self.type(name) if name else None for name in inputs],
                                    [self.constant(name) for name in inputs])
        return self.make(self.add_tensor(wanted, type_), op, inputs, attrs, origin)

    def make(self, output: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None,
             origin: Sequence[str] = ()) -> str:
        """The node, called after its output, that makes a tensor whose type is known; its name once more."""
        self.nodes.append(Node(op, tuple(inputs), (output,), attrs or {}, output, tuple(origin)))
        return output

    # ---- the next graph
    def replace(self, name: str, by: str) -> None:
        """Whoever reads the tensor `name`, the graph's outputs too, reads `by` instead."""
        self._replaced[name] = by

    def current(self, name: str) -> str:
        """The tensor that stands in the place of `name` by now: mostly itself."""
        while name in self._replaced:
            name = self._replaced[name]
        return name

    def finish(self) -> Graph:
        """The next graph; verify() is the caller's part."""
        return self.graph.rebuild(self._renamed() if self._replaced else self.nodes, self.constants, self.types)

    def _renamed(self) -> list[Node]:
        """The nodes, reading what stands in the place of replaced tensors.

        A graph output keeps its name: there the node that makes the value makes the output's name instead, and where
        that cannot be (the value is itself an input, a constant or an output) an Identity stays.
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
    """The node, and the nodes of its body, with other names for the tensors in `names`; itself if it has none."""
    if not node.body and names.keys().isdisjoint(node.inputs) and names.keys().isdisjoint(node.outputs):
        return node
    return replace(node, inputs=tuple(names.get(i, i) for i in node.inputs),
                   outputs=tuple(names.get(o, o) for o in node.outputs),
                   body=tuple(renamed(part, names) for part in node.body))


def merged_origin(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The ONNX nodes that all of `nodes` stand for, in order, each once."""
    return tuple(dict.fromkeys(name for node in nodes for name in node.origin))
