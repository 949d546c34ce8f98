"""Vertical fusion: a heavy node and the pointwise nodes after it become one Fused node, run by one kernel.

    Fused(x, w, b, r) -> y      body: t0 = Conv(x, w, b); t1 = Add(t0, r); y = Relu(t1)

A group has one result; its inner tensors never reach memory. It grows by the readers of its result while it still has
one result: if there are several readers, by all nodes up to the one that joins them again (x * sigmoid(x), GELU). A
node with two possible hosts (the Add of two convolutions) joins a heavy one, and of two heavy ones the later, since the
other's result exists by then.

Pointwise nodes without a heavy host form groups of their own: one pass over memory for a chain.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT, is_float
from infer_server.engines.ir.graph import Array, Graph, Node
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import merged_origin
from infer_server.engines.passes.rewriting.facts import is_product

REGION = 12         # most nodes between a value and the node that joins all its readers


@dataclass
class _FusionGroup:
    """Nodes that become one Fused node; `last` is the index of the last of them in the graph."""
    nodes: list[Node]
    last: int
    heavy: bool

    @property
    def result(self) -> str:
        return self.nodes[-1].outputs[0]


def fuse_pointwise(graph: Graph) -> Graph:
    """Return the graph with each group of several nodes as one Fused node; other nodes stay."""
    positions = {id(node): position for position, node in enumerate(graph.nodes)}
    groups = _grouped(graph, positions)
    at = {group.last: group for group in groups}
    inside = {id(node) for group in groups for node in group.nodes}
    nodes: list[Node] = []
    for position, node in enumerate(graph.nodes):
        if group := at.get(position):
            nodes.append(replace(group.nodes[-1], origin=merged_origin(group.nodes)).with_body(group.nodes))
        elif id(node) not in inside:
            nodes.append(node)
    return graph.rebuild(nodes)


def _grouped(graph: Graph, positions: Mapping[int, int]) -> list[_FusionGroup]:
    groups: dict[str, _FusionGroup] = {}          # by the group's result
    seen: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if id(node) in seen:
            continue
        if _is_heavy(graph, node):
            groups[node.outputs[0]] = _FusionGroup([node], position, heavy=True)
        elif _is_epilogue(graph, node, heavy=False):
            group = _joined(graph, groups, node, positions, seen)
            seen.update(id(part) for part in group.nodes[-1 - REGION:])     # earlier ones are in it already
            groups[group.result] = group
    return list(groups.values())


def _joined(graph: Graph, groups: dict[str, _FusionGroup], node: Node, positions: Mapping[int, int],
            seen: Collection[int]) -> _FusionGroup:
    """Return the group that `node` joins, and remove the groups that it absorbs from `groups`."""
    hosts = {name: region for name in dict.fromkeys(node.inputs)
             if name in groups and (region := _region(graph, name, positions, seen, groups[name].heavy)) is not None}
    if not hosts:
        return _FusionGroup([node], positions[id(node)], heavy=False)
    name = max(hosts, key=lambda name: (groups[name].heavy, groups[name].last))
    host, region = groups.pop(name), hosts[name]
    chains = [groups.pop(other) for other, alone in hosts.items()
              if other != name and len(alone) == 1 and not groups[other].heavy
              and all(_is_epilogue(graph, part, host.heavy) for part in groups[other].nodes)]
    nodes = [*host.nodes, *(part for chain in chains for part in chain.nodes), *region]
    return _FusionGroup(nodes, positions[id(region[-1])], host.heavy)


def _region(graph: Graph, value: str, positions: Mapping[int, int], seen: Collection[int],
            heavy: bool) -> list[Node] | None:
    """Return the pointwise nodes, in order, from the readers of `value` to the node that joins all their results.

    None if there is no such node, or one on the way is no epilogue or is in a group already. `heavy` says that `value`
    is the result of a group with a heavy node.
    """
    region: dict[int, Node] = {}
    open_values = [value]
    while len(open_values) > 1 or not region:
        earliest = open_values.pop(0)
        if earliest in graph.outputs:
            return None
        for node in graph.consumers[earliest]:
            if id(node) in seen or not _is_epilogue(graph, node, heavy) or \
                    graph.shape(node.outputs[0]) != graph.shape(value):
                return None
            region[positions[id(node)]] = node
        if not graph.consumers[earliest] or len(region) > REGION:
            return None
        nodes = [region[position] for position in sorted(region)]
        inside = {id(node) for node in nodes}
        open_values = [node.outputs[0] for node in nodes if node.outputs[0] in graph.outputs
                       or any(id(r) not in inside for r in graph.consumers[node.outputs[0]])]
    return [region[position] for position in sorted(region)] if open_values == [nodes[-1].outputs[0]] else None


def _is_heavy(graph: Graph, node: Node) -> bool:
    if not op_of(node.op).anchor:
        return False
    return is_product(graph, node) or all(graph.is_constant(name) for name in node.inputs[1:] if name)


def _is_epilogue(graph: Graph, node: Node, heavy: bool) -> bool:
    """Return True if a group may hold the node.

    Allowed are pointwise nodes on floats whose constants are scalars or vary along the last axis alone; Casts from
    integers to float32, which begin a chain; and Casts between floats. A group without a heavy node also takes
    constants that vary along their first axis alone (channels first), and a Cast of whole numbers to uint8.
    """
    if node.op == "Cast":
        source, result = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
        if is_float(source):
            return is_float(result) or not heavy and _stores_bytes(graph, node)
        return source.dtype.kind in "uib" and result.dtype == FLOAT
    if not op_of(node.op).epilogue:
        return False
    if not all(is_float(graph.types[name]) for name in (*node.inputs, *node.outputs) if name):
        return False
    axes = (-1,) if heavy else (-1, 0)
    return all(array.size == 1 or array.size in (array.shape[axis] for axis in axes)
               for array in _constants(graph, node.inputs))


def _stores_bytes(graph: Graph, cast: Node) -> bool:
    """Return True if a Cast to uint8 reads whole numbers in 0..255."""
    maker = graph.producer.get(cast.inputs[0])
    if maker is None or graph.types[cast.outputs[0]].dtype != np.uint8:
        return False
    attrs = maker.attrs
    if maker.op == "Clip":
        low, high = np.min(attrs.get("min", -np.inf)), np.max(attrs.get("max", np.inf))
        return bool(attrs.get("saturates") and low >= 0 and high <= 255)
    return (maker.op == "FakeQuantize" and (attrs["scale"], attrs["zero_point"]) == (1, 0)
            and attrs["low"] >= 0 and attrs["high"] <= 255)


def _constants(graph: Graph, names: Iterable[str]) -> list[Array]:
    return [graph.constants[name] for name in names if name in graph.constants]
