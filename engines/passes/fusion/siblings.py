"""Horizontal fusion: convolutions and products that read one tensor become one wide kernel.

    a = Relu(Conv(x, Wa)); b = Conv(x, Wb)   =   a, b = Split(Clip(Conv(x, [Wa; Wb]), min=[0...; -inf...]))

x is read once instead of once per branch, and narrow branches share full vectors. The parts of the Split are views of
the wide result, not copies. Pointwise nodes that follow every branch (an activation, a bias per channel) move before
the Split; if only some branches are clipped, the Clip has one pair of bounds per channel.

A group is left alone if merging would cost more than it saves: beyond MAX_CHANNELS channels the wide result no longer
stays in the cache for its readers, and a branch that is a graph output would have to be copied out of it.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.passes.rewriting.editor import GraphEditor, merged_origin
from infer_server.engines.passes.rewriting.facts import is_pointwise, is_weighted, output_axis, per_channel, reader
from infer_server.engines.passes.rewriting.notes import Note, note
from infer_server.engines.passes.rules.activations import bounds

MAX_CHANNELS = 4096


def merge_siblings(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Merge layers of one input and equal windows; `log` says which groups are left alone, and why."""
    groups: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        if (key := _key(graph, node)) is not None:
            groups.setdefault(key, []).append(node)
    siblings = {id(members[0]): members for members in groups.values() if _worth_it(graph, members, log)}
    editor = GraphEditor(graph)
    merged: set[int] = set()            # ids of the nodes that wide ones replace
    for node in graph.nodes:
        if members := siblings.get(id(node)):
            merged |= _Merge(editor, members).run()
        elif id(node) not in merged:
            editor.nodes.append(node)
    return editor.finish()


def _key(graph: Graph, node: Node) -> Hashable | None:
    """Return a key that is equal for nodes that may be merged; None for a node that may not, as any ConvTranspose."""
    if not is_weighted(node) or node.op == "ConvTranspose":
        return None
    if not all(graph.is_constant(name) for name in node.inputs[1:] if name):
        return None
    weight, attrs = graph.constants[node.inputs[1]], node.attrs
    if attrs.get("group", 1) != 1 or node.op == "MatMul" and weight.ndim != 2:
        return None
    if node.op == "Gemm" and attrs != {"transB": 1}:
        return None
    if len(node.inputs) > 2 and graph.constants[node.inputs[2]].ndim != 1:
        return None
    window = tuple(tuple(attrs.get(key, ())) for key in ("kernel_shape", "strides", "pads", "dilations"))
    return node.op, node.inputs[0], weight.dtype, window, attrs.get("channels_last", 0)


def _worth_it(graph: Graph, members: list[Node], log: list[Note] | None) -> bool:
    if len(members) < 2:
        return False
    if any(node.outputs[0] in graph.outputs for node in members):
        note(log, members[0], "merge_siblings", "a branch is a graph output, which would be a copy")
        return False
    total = sum(graph.constants[node.inputs[1]].shape[output_axis(node)] for node in members)
    if total > MAX_CHANNELS:
        note(log, members[0], "merge_siblings", f"{total} output channels together, more than {MAX_CHANNELS}")
        return False
    return True


class _Merge:
    """State of merging a group: `wide` is the last wide tensor, and `ends` the tensors of the branches it replaces."""

    def __init__(self, editor: GraphEditor, members: Sequence[Node]) -> None:
        self.editor, self.graph, self.members = editor, editor.graph, members
        first = members[0]
        self.rank = len(self.graph.shape(first.outputs[0]))
        self.axis = 1 if first.op == "Conv" and not first.attrs.get("channels_last") else self.rank - 1    # channels
        self.sizes = tuple(self.graph.constants[node.inputs[1]].shape[output_axis(node)] for node in members)
        self.ends = tuple(node.outputs[0] for node in members)
        self.merged = {id(node) for node in members}
        self.wide = self._add_anchor()

    def run(self) -> set[int]:
        """Add the wide nodes and the Split after them; return the ids of all nodes that they replace."""
        while self._sink():
            pass
        self.editor.nodes.append(Node("Split", (self.wide,), self.ends, {"axis": self.axis, "split": self.sizes},
                                      f"{self.wide}.split"))
        return self.merged

    def _add_anchor(self) -> str:
        first, name = self.members[0], f"{self.ends[0]}.siblings"
        weights = [self.graph.constants[node.inputs[1]] for node in self.members]
        inputs = [first.inputs[0], self.editor.add_constant(
            f"{name}.weight", np.concatenate(weights, axis=output_axis(first)))]
        if any(len(node.inputs) > 2 and node.inputs[2] for node in self.members):
            given = [self.graph.constants.get((*node.inputs, "")[2]) for node in self.members]
            inputs.append(self.editor.add_constant(f"{name}.bias", np.concatenate([
                np.zeros(size, weights[0].dtype) if bias is None else bias
                for bias, size in zip(given, self.sizes, strict=True)])))
        return self.editor.add(name, first.op, inputs, first.attrs, merged_origin(self.members))

    def _sink(self) -> bool:
        """Move one pointwise node of every branch before the Split; return False if that is impossible."""
        after = [reader(self.graph, end) for end in self.ends]
        alike = [node for node in after if node is not None]
        if len(alike) == len(after) and len(set(map(_what, alike, self.ends))) == 1:
            return self._sink_alike(alike)
        clips = [node if node is not None and _is_plain_clip(node) else None for node in after]
        if self.axis != self.rank - 1 or not any(clips):
            return False
        ends = tuple(end if node is None else node.outputs[0] for node, end in zip(clips, self.ends, strict=True))
        pairs = [(-np.inf, np.inf) if node is None else bounds(node) for node in clips]
        low, high = (tuple(np.repeat([pair[side] for pair in pairs], self.sizes).tolist()) for side in (0, 1))
        self._append("Clip", [self.wide], {"min": low, "max": high}, [node for node in clips if node is not None], ends)
        return True

    def _sink_alike(self, after: list[Node]) -> bool:
        """Merge pointwise nodes of equal attributes, one per branch, whose other operands are constants per channel."""
        if not is_pointwise(after[0]):
            return False
        inputs: list[str] = []
        for place, operand in enumerate(after[0].inputs):
            if operand == self.ends[0]:
                inputs.append(self.wide)
                continue
            parts = [self._channels(node.inputs[place], size) for node, size in zip(after, self.sizes, strict=True)]
            known = [part for part in parts if part is not None]
            if len(known) != len(parts):
                return False
            inputs.append(self.editor.add_constant(
                f"{self.wide}.operand", np.concatenate(known).reshape(-1, *(1,) * (self.rank - 1 - self.axis))))
        if any(self.graph.shape(node.outputs[0]) != self.graph.shape(end)
               for node, end in zip(after, self.ends, strict=True)):
            return False
        self._append(after[0].op, inputs, after[0].attrs, after, tuple(node.outputs[0] for node in after))
        return True

    def _append(self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any], replaced: list[Node],
                ends: tuple[str, ...]) -> None:
        """Add a node after the wide tensor, which replaces the nodes `replaced` with outputs `ends`."""
        self.merged.update(map(id, replaced))
        self.ends = ends
        self.wide = self.editor.add(f"{ends[0]}.siblings", op, inputs, attrs, merged_origin(replaced))

    def _channels(self, name: str, size: int) -> Array | None:
        constant = self.graph.constants.get(name)
        return None if constant is None else per_channel(constant, self.rank, size, self.axis)


def _what(node: Node, end: str) -> Hashable:
    """Return a key of a node after a branch: operator, attributes, and which operand the branch is."""
    attrs: Any = tuple(sorted((key, str(value)) for key, value in node.attrs.items()))
    return node.op, attrs, tuple(name == end for name in node.inputs)


def _is_plain_clip(node: Node) -> bool:
    """Return True for a Relu, or a Clip by two scalars."""
    return node.op == "Relu" or node.op == "Clip" and all(
        np.ndim(node.attrs.get(key, 0.0)) == 0 for key in ("min", "max"))
