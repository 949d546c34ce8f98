"""Unroll recurrent layers whose weights are computed at run time into the nodes of each step.

    gates = X W' + b;  for t in time: sums = gates[t] + h R';  h, c = cell(sums, c)

The kernel of a Recurrence packs its weights at the build; a product of two run-time tensors packs nothing. A GRU
without linear_before_reset multiplies r * h by the last rows of R. Two directions are two chains of steps.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.recurrent import DEFAULTS, GATES, activations, directions
from infer_server.engines.passes.fusion.recurrent import filled_with
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.notes import Note, note

MOST_STEPS = 64         # limit of steps times directions
WRITTEN = {"Sigmoid", "Tanh", "Relu"}


def write_out_recurrent(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Unroll every LSTM, GRU and RNN of run-time weights and at most MOST_STEPS steps; `log` says why others stay."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        weights = [name for name in (*node.inputs[1:4], *node.inputs[7:8]) if name]
        if node.op not in GATES or all(name in graph.constants for name in weights):
            editor.nodes.append(node)
        elif reason := _refusal(graph, node):
            note(log, node, "write_out_recurrent", reason)
            editor.nodes.append(node)
        else:
            _UnrolledLayer(editor, node).write()
    return editor.finish()


def _refusal(graph: Graph, node: Node) -> str:
    _, _, _, _, lengths, _, _, peepholes = (*node.inputs, *("",) * (8 - len(node.inputs)))
    steps = _steps(graph, node)
    if lengths and filled_with(graph, lengths) != steps:
        return "its items have lengths of their own"
    if peepholes or node.attrs["clip"] or node.attrs.get("input_forget"):
        return "its cell has peepholes, a clip or coupled gates"
    if other := {name for name, *_ in activations(node)} - WRITTEN:
        return f"its cell has {min(other)}"
    if not 0 < steps * len(directions(node)) <= MOST_STEPS:
        return f"{steps} steps are too many to write out"
    return ""


def _steps(graph: Graph, node: Node) -> int:
    return as_int(graph.types[node.inputs[0]].shape[1 if node.attrs["layout"] else 0])


class _UnrolledLayer:
    """Builder of one layer's nodes. Tensors of a step are [items, 1, ...], so that a Concat joins the steps."""

    def __init__(self, editor: GraphEditor, node: Node) -> None:
        self.editor, self.node = editor, node
        self.steps, self.each = _steps(editor.graph, node), GATES[node.op]
        self.hidden = as_int(editor.shape(node.inputs[2])[2])
        self.rows = self.each * self.hidden
        self.inside = bool(node.attrs.get("linear_before_reset"))       # R's bias is added before the reset gate

    def write(self) -> None:
        x, w, r, b, _, h, c, _ = (*self.node.inputs, *("",) * (8 - len(self.node.inputs)))
        if not self.node.attrs["layout"]:
            x = self._add("Transpose", x, perm=(1, 0, 2))
        states = (h, c) if self.node.op == "LSTM" else (h,)
        made = [self._direction(d, backwards, x, w, r, b, states)
                for d, backwards in enumerate(directions(self.node))]
        for i, (target, parts) in enumerate(zip(self.node.outputs, zip(*made, strict=True), strict=False)):
            self._output(target, parts, time=i == 0)

    def _direction(self, d: int, backwards: bool, x: str, w: str, r: str, b: str, initial: Sequence[str]) -> list[str]:
        """Add the steps of direction `d`; return y [items, T, H] and the last states [items, 1, H]."""
        gates = self._add("MatMul", x, self._matrix(w, d))
        recurrent, bias = self._matrix(r, d), ""
        if b:
            row = self._add("Reshape", self._cut(b, 0, d, 1), shape=(2 * self.rows,))
            own, bias = (self._cut(row, 0, at, self.rows) for at in (0, self.rows))
            gates = self._add("Add", gates, own if self.inside else self._add("Add", own, bias))
        states = [self._first(state, d) for state in initial]
        y = [""] * self.steps
        for t in reversed(range(self.steps)) if backwards else range(self.steps):
            states = self._step(d, self._cut(gates, 1, t, 1), recurrent, bias if self.inside else "", states)
            y[t] = states[0]
        return [self._add("Concat", *y, axis=1), *states]

    def _step(self, d: int, x: str, r: str, bias: str, states: Sequence[str]) -> list[str]:
        """Return the states after a step. `bias` is added to h R' before the reset gate; "" for none."""
        count = len(DEFAULTS[self.node.op])
        f, *others = [name for name, *_ in activations(self.node)][d * count:(d + 1) * count]
        h = states[0]
        if self.node.op == "GRU":
            return [self._gru(x, r, bias, h, f, others[0])]
        sums = self._add("Add", x, self._add("MatMul", h, r))
        if self.node.op == "RNN":
            return [self._add(f, sums)]
        i, o, forget = (self._add(f, self._gate(sums, gate)) for gate in range(3))
        new = self._add("Mul", i, self._add(others[0], self._gate(sums, 3)))
        c = self._add("Add", self._add("Mul", forget, states[1]), new)
        return [self._add("Mul", o, self._add(others[1], c)), c]

    def _gru(self, x: str, r: str, bias: str, h: str, f: str, g: str) -> str:
        """Return a GRU's next state (1 - z) n + z h, computed as n + z (h - n)."""
        both = 2 * self.hidden
        product = self._add("MatMul", h, r if self.inside else self._cut(r, 1, 0, both))
        product = self._add("Add", product, bias) if bias else product
        sums = self._add("Add", self._cut(x, 2, 0, both), self._cut(product, 2, 0, both) if self.inside else product)
        z, reset = (self._add(f, self._gate(sums, gate)) for gate in range(2))
        last = self._add("Mul", reset, self._gate(product, 2)) if self.inside else \
            self._add("MatMul", self._add("Mul", reset, h), self._cut(r, 1, both, self.hidden))
        new = self._add(g, self._add("Add", self._gate(x, 2), last))
        return self._add("Add", new, self._add("Mul", z, self._add("Sub", h, new)))

    def _output(self, target: str, parts: Sequence[str], time: bool) -> None:
        """Compute the layer's output `target` from the directions' parts [items, T or 1, H]."""
        editor, node = self.editor, self.node
        shape = editor.shape(target)
        perm: tuple[int, ...] = (1, 0, 2)
        if time:
            items = editor.shape(parts[0])[0]
            split = [self._add("Reshape", part, shape=(items, self.steps, 1, self.hidden)) for part in parts]
            whole, perm = (self._add("Concat", *split, axis=2) if split[1:] else split[0]), (1, 2, 0, 3)
        else:
            whole = self._add("Concat", *parts, axis=1) if parts[1:] else parts[0]
        if node.attrs["layout"]:
            editor.make(target, "Reshape", (whole,), {"shape": shape}, node.origin)
        else:
            editor.make(target, "Transpose", (whole,), {"perm": perm}, node.origin)

    # ---- what steps read
    def _matrix(self, weights: str, d: int) -> str:
        """Return direction `d` of W or R [D, G H, K] as [K, G H]."""
        own = self._add("Reshape", self._cut(weights, 0, d, 1), shape=self.editor.shape(weights)[1:])
        return self._add("Transpose", own, perm=(1, 0))

    def _first(self, state: str, d: int) -> str:
        """Return the initial state [items, 1, H] of direction `d`, or zeros [1, 1, H]."""
        if not state:
            zeros = np.zeros((1, 1, self.hidden), self.editor.type(self.node.inputs[0]).dtype)
            return self.editor.add_constant(f"{self.node.outputs[0]}.first", zeros)
        own = self._cut(state, 1 if self.node.attrs["layout"] else 0, d, 1)
        return own if self.node.attrs["layout"] else self._add("Transpose", own, perm=(1, 0, 2))

    def _gate(self, x: str, gate: int) -> str:
        return self._cut(x, 2, gate * self.hidden, self.hidden)

    def _cut(self, x: str, axis: int, start: int, extent: int) -> str:
        return self._add("Slice", x, axes=(axis,), starts=(start,), ends=(start + extent,), steps=(1,))

    def _add(self, op: str, *inputs: str, **attrs: object) -> str:
        return self.editor.add(f"{self.node.outputs[0]}.{op.lower()}", op, inputs, attrs, self.node.origin)
