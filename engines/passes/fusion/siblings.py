"""Horizontal fusion: convolutions and products that read one tensor become one wide kernel.

    a = Relu(Conv(x, Wa)); b = Conv(x, Wb)   =   a, b = Split(Clip(Conv(x, [Wa; Wb]), min=[0...; -inf...]))

x is read once instead of once per branch, and narrow branches share full vectors. The parts of the Split are views of
the wide result, not copies. What follows every branch and works per channel (an activation, a bias) goes before the
Split; if only some branches are clipped, the bounds of the Clip are one pair per channel.

A group is left alone where it would cost more than it saves: beyond MAX_CHANNELS the wide result no longer stays in the
cache for its readers, and a branch that is a graph output would have to be copied out of the wide result.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engines.ir.graph import Array, Graph, Node, TensorType
from engines.passes.rewriting.facts import is_pointwise, is_weighted, output_axis, per_channel, reader
from engines.passes.rewriting.notes import Note, note
from engines.passes.rewriting.rewrite import fresh_name, merged_origin
from engines.passes.rules.activations import bounds

MAX_CHANNELS = 4096


@dataclass
class _Branches:
    """A group on its way into one kernel: what was made of it so far, and each branch's last tensor."""
    members: Sequence[Node]
    sizes: tuple[int, ...]
    nodes: list[Node]
    ends: tuple[str, ...]
    gone: list[Node] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    @property
    def wide(self) -> str:
        return self.nodes[-1].outputs[0]


def merge_siblings(graph: Graph, log: list[Note] | None = None) -> Graph:
    groups: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        if (key := _key(graph, node)) is not None:
            groups.setdefault(key, []).append(node)
    taken = {*graph.types, *graph.constants}
    merged = [_merge(graph, members, taken) for members in groups.values() if _worth_it(graph, members, log)]
    at = {id(branches.members[0]): branches for branches in merged}
    gone = {id(node) for branches in merged for node in (*branches.members, *branches.gone)}
    nodes: list[Node] = []
    for node in graph.nodes:
        if branches := at.get(id(node)):
            nodes.extend(branches.nodes)
        elif id(node) not in gone:
            nodes.append(node)
    constants = {name: array for branches in merged for name, array in branches.constants.items()}
    types = {name: kind for branches in merged for name, kind in branches.types.items()}
    return graph.rebuild(nodes, constants, types)


def _key(graph: Graph, node: Node) -> Hashable | None:
    """Equal for nodes that may be merged; None for one that may not. (A ConvTranspose rarely has siblings.)"""
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


def _merge(graph: Graph, members: list[Node], taken: set[str]) -> _Branches:
    branches = _wide_node(graph, members, taken)
    while _sink(graph, branches, taken):
        pass
    axis = _channel_axis(graph, members[0])
    branches.nodes.append(Node("Split", (branches.wide,), branches.ends, {"axis": axis, "split": branches.sizes},
                               f"{branches.wide}.split"))
    return branches


def _channel_axis(graph: Graph, node: Node) -> int:
    first = node.op == "Conv" and not node.attrs.get("channels_last")
    return 1 if first else len(graph.shape(node.outputs[0])) - 1


def _wide_node(graph: Graph, members: list[Node], taken: set[str]) -> _Branches:
    first, rows = members[0], output_axis(members[0])
    weights = [graph.constants[node.inputs[1]] for node in members]
    sizes = tuple(weight.shape[rows] for weight in weights)
    branches = _Branches(members, sizes, [], tuple(node.outputs[0] for node in members))
    wide = _wide_name(graph, branches, first.outputs[0], _channel_axis(graph, first), taken)
    inputs = [first.inputs[0], fresh_name(f"{wide}.weight", taken)]
    branches.constants[inputs[1]] = np.concatenate(weights, axis=rows)
    if any(len(node.inputs) > 2 and node.inputs[2] for node in members):
        inputs.append(fresh_name(f"{wide}.bias", taken))
        given = [graph.constants.get((*node.inputs, "")[2]) for node in members]
        branches.constants[inputs[2]] = np.concatenate([
            np.zeros(size, weights[0].dtype) if bias is None else bias
            for bias, size in zip(given, sizes, strict=True)])
    branches.nodes.append(replace(first, inputs=tuple(inputs), outputs=(wide,), name=wide,
                                  origin=merged_origin(members)))
    return branches


def _wide_name(graph: Graph, branches: _Branches, part: str, axis: int, taken: set[str]) -> str:
    """A new tensor of all branches, named after the first; `part` is one branch's."""
    kind = graph.types[part]
    name = fresh_name(f"{branches.ends[0]}.siblings", taken)
    shape = (*kind.shape[:axis], sum(branches.sizes), *kind.shape[axis + 1:])
    branches.types[name] = TensorType(kind.dtype, shape)
    return name


def _sink(graph: Graph, branches: _Branches, taken: set[str]) -> bool:
    """Moves one pointwise node of every branch before the Split, if that can be."""
    after = [reader(graph, end) for end in branches.ends]
    axis = _channel_axis(graph, branches.members[0])
    alike = [node for node in after if node is not None]
    if len(alike) == len(after) and len(set(map(_what, alike, branches.ends))) == 1:
        return _sink_alike(graph, branches, alike, axis, taken)
    clips = [node if node is not None and _is_plain_clip(node) else None for node in after]
    if axis != len(graph.shape(branches.ends[0])) - 1 or not any(clips):
        return False
    ends = tuple(end if node is None else node.outputs[0] for node, end in zip(clips, branches.ends, strict=True))
    pairs = [(-np.inf, np.inf) if node is None else bounds(node) for node in clips]
    low, high = (tuple(np.repeat([pair[side] for pair in pairs], branches.sizes).tolist()) for side in (0, 1))
    gone = [node for node in clips if node is not None]
    _append(graph, branches, Node("Clip", (branches.wide,), (), {"min": low, "max": high}), gone, ends, axis, taken)
    return True


def _sink_alike(graph: Graph, branches: _Branches, after: list[Node], axis: int, taken: set[str]) -> bool:
    """The same operator with the same attributes after each branch, its other operands constants per channel."""
    rank = len(graph.shape(branches.ends[0]))
    if not is_pointwise(after[0]):
        return False
    inputs: list[str] = []
    constants: dict[str, Array] = {}
    for place, operand in enumerate(after[0].inputs):
        if operand == branches.ends[0]:
            inputs.append(branches.wide)
            continue
        parts = [_channels(graph, node.inputs[place], rank, size, axis)
                 for node, size in zip(after, branches.sizes, strict=True)]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return False
        name = fresh_name(f"{branches.wide}.operand", taken)
        constants[name] = np.concatenate(known).reshape(-1, *(1,) * (rank - 1 - axis))
        inputs.append(name)
    if any(graph.shape(node.outputs[0]) != graph.shape(end) for node, end in zip(after, branches.ends, strict=True)):
        return False
    branches.constants.update(constants)
    ends = tuple(node.outputs[0] for node in after)
    _append(graph, branches, replace(after[0], inputs=tuple(inputs)), after, ends, axis, taken)
    return True


def _append(graph: Graph, branches: _Branches, node: Node, gone: list[Node], ends: tuple[str, ...], axis: int,
            taken: set[str]) -> None:
    branches.gone.extend(gone)
    branches.ends = ends
    wide = _wide_name(graph, branches, ends[0], axis, taken)
    branches.nodes.append(replace(node, outputs=(wide,), name=wide, origin=merged_origin(gone)))


def _what(node: Node, end: str) -> Hashable:
    """What a node does to a branch: operator, attributes, and which operand the branch is."""
    attrs: Any = tuple(sorted((key, str(value)) for key, value in node.attrs.items()))
    return node.op, attrs, tuple(name == end for name in node.inputs)


def _channels(graph: Graph, name: str, rank: int, size: int, axis: int) -> Array | None:
    constant = graph.constants.get(name)
    return None if constant is None else per_channel(constant, rank, size, axis)


def _is_plain_clip(node: Node) -> bool:
    """Relu, or Clip by two numbers."""
    return node.op == "Relu" or node.op == "Clip" and all(
        np.ndim(node.attrs.get(key, 0.0)) == 0 for key in ("min", "max"))
