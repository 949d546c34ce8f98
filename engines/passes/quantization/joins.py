"""Insert conversions at Concats and Splits of tensors with different ranges.

A Concat, a Split or another node that only moves elements reads and writes one stored type with one scale
(Stored.ALIKE), and in memory its tensors are views of each other. A scale that suits boxes in pixels is too coarse for
scores, so tensors of unlike ranges are separated:

    input of a Concat           converted before the Concat; its other readers see it with its own scale
    part of a Split             computed by a separate layer if one layer computes all parts; else the tensor that is
                                split stays float32, and each part is converted with its own range
    Concat of results           stays float32 if moves and pointwise operations alone lead from it to graph outputs

Ranges are unlike if a tensor that is computed with would get a scale more than UNLIKE times its own. A conversion
costs a pass over the tensor, a coarse scale 20 log10(UNLIKE) dB at worst: 12 dB for 4. Measured with ranges of real
weights and data, a text recogniser (PP-OCRv4) gets 3 conversions with 1.5 and 2, none with 3 to 8; a detector
(NanoDet) gets none with 1.5 to 8.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ops import Stored
from infer_server.engines.passes.fusion.parting import can_part, with_layers_parted
from infer_server.engines.passes.quantization.floats import SELECTIONS, closed, leads_to_output
from infer_server.engines.passes.quantization.storage import classes, float_edges, stored_by
from infer_server.engines.passes.rewriting.editor import GraphEditor, renamed

UNLIKE = 4.0
Spans = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Converted:
    """Graph with conversions between stored types.

    Attributes
    ----------
    graph : Graph
        The graph with Identity nodes as conversions.
    floats : frozenset of str
        The tensors that stay float32.
    conversions : frozenset of str
        The outputs of the added Identity nodes.
    """
    graph: Graph
    floats: frozenset[str]
    conversions: frozenset[str]


def with_conversions_at_joins(graph: Graph, spans: Spans, floats: Collection[str]) -> Converted:
    """Return the graph with conversions between tensors of unlike ranges, or of which one stays float32.

    Parameters
    ----------
    spans : mapping
        The (low, high) of tensors' real values; a tensor without a span matches any other.
    floats : collection of str
        Tensors that stay float32.
    """
    floats = closed(graph, floats)
    unlike = _unlike(graph, spans, floats)
    return _converted(graph, closed(graph, floats | unlike.coarse), unlike.cuts)


def with_parts_apart(graph: Graph, spans: Spans, floats: Collection[str]) -> Graph:
    """Return the graph with one layer per part for each wide layer whose parts have unlike ranges."""
    return with_layers_parted(graph, frozenset(_unlike(graph, spans, closed(graph, floats)).parts))


# ---- which ranges are unlike
@dataclass
class _ScaleGroup:
    """Tensors of one scale: their common range, and the width of the narrowest one that is computed with."""
    low: float
    high: float
    narrowest: float

    def __or__(self, other: _ScaleGroup) -> _ScaleGroup:
        return _ScaleGroup(min(self.low, other.low), max(self.high, other.high), min(self.narrowest, other.narrowest))

    @property
    def is_fine(self) -> bool:
        """True if the common scale is at most UNLIKE times the scale that each tensor would have alone."""
        return self.high - self.low <= UNLIKE * self.narrowest


class _ScaleGroups:
    """Disjoint sets of tensors that share a scale (union-find)."""

    def __init__(self, graph: Graph, spans: Spans, names: Collection[str]) -> None:
        self._parent = {name: name for name in names}
        self._groups = {name: _group_of(graph, spans, name) for name in names}

    def __contains__(self, name: str) -> bool:
        return name in self._parent

    def tie(self, a: str, b: str, force: bool = False) -> bool:
        """Merge the groups of two tensors. Return False, with nothing changed, if their ranges are unlike.

        `force` merges them in any case.
        """
        a, b = self._root(a), self._root(b)
        both = self._groups[a] | self._groups[b]
        if a != b and (force or both.is_fine):
            self._parent[b], self._groups[a] = a, both
        return force or both.is_fine

    def computed_with(self, name: str, spans: Spans) -> None:
        """Treat the tensor as computed with, although its readers only move it."""
        group = self._groups[self._root(name)]
        group.narrowest = min(group.narrowest, _width(spans, name))

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name


def _group_of(graph: Graph, spans: Spans, name: str) -> _ScaleGroup:
    low, high = spans.get(name, (0.0, 0.0))
    moved = all(stored_by(graph, node) is Stored.ALIKE for node in graph.consumers[name])
    return _ScaleGroup(min(low, 0.0), max(high, 0.0), math.inf if moved else _width(spans, name))


def _width(spans: Spans, name: str) -> float:
    """Return the width of a tensor's range; infinite if it is unknown or empty, so that any scale suits it."""
    low, high = spans.get(name, (0.0, 0.0))
    return max(high, 0.0) - min(low, 0.0) or math.inf


@dataclass
class _Unlike:
    """Changes that tensors of unlike ranges require.

    Attributes
    ----------
    cuts : set of (str, str)
        (output of a Concat, input of it) between which a conversion is inserted.
    coarse : set of str
        Tensors that stay float32, because one scale is too coarse for their parts.
    parts : set of str
        Outputs of Splits whose wide layer becomes one layer per part.
    """
    cuts: set[tuple[str, str]] = field(default_factory=set)
    coarse: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)


def _unlike(graph: Graph, spans: Spans, floats: Collection[str]) -> _Unlike:
    """Return the changes for the tensors of unlike ranges."""
    names = {name for group in classes(graph, floats) for name in group}
    groups, results = _ScaleGroups(graph, spans, names), leads_to_output(graph)
    movers = [node for node in graph.nodes
              if not names.isdisjoint(node.outputs) and stored_by(graph, node) is Stored.ALIKE]
    for node in movers:
        if node.op != "Concat" and node.op not in SELECTIONS:
            for source in names.intersection(node.inputs):
                groups.tie(node.outputs[0], source, force=True)
    unlike = _Unlike()
    for node in movers:
        if node.op == "Concat":
            is_result = node.outputs[0] in results
            sources = _unlike_sources(groups, node, spans, is_result)
            unlike.coarse.update(node.outputs[:1] if sources and is_result else ())
            unlike.cuts |= {(node.outputs[0], source) for source in sources}
        elif node.op in SELECTIONS:
            in_bytes = names.intersection(node.outputs)     # other parts stay float32
            is_fine = all([groups.tie(node.inputs[0], name) for name in node.outputs if name in in_bytes])
            if not (is_fine and in_bytes.issuperset(node.outputs)) and can_part(graph, node):
                unlike.parts.update(node.outputs)
            if not is_fine:
                unlike.coarse |= _moved_from(graph, node.inputs[0])
    return unlike


def _unlike_sources(groups: _ScaleGroups, concat: Node, spans: Spans, is_result: bool) -> list[str]:
    """Return the inputs of a Concat that do not suit its scale; if it is a result, all its inputs are computed with."""
    sources = [source for source in dict.fromkeys(concat.inputs) if source in groups]
    if is_result:
        for source in sources:
            groups.computed_with(source, spans)
    return [source for source in sources if not groups.tie(concat.outputs[0], source)]


def _moved_from(graph: Graph, name: str) -> set[str]:
    """Return the tensor and the first inputs of the moves that lead to it, up to a Concat."""
    names = {name}
    while (maker := graph.producer.get(name)) is not None and maker.op != "Concat" and (
            stored_by(graph, maker) is Stored.ALIKE):
        name = maker.inputs[0]
        names.add(name)
    return names


# ---- conversions
def _converted(graph: Graph, floats: frozenset[str], cuts: Collection[tuple[str, str]]) -> Converted:
    """Return the graph with an Identity at each cut, and between float32 tensors and others that share a move."""
    editor, edges = GraphEditor(graph), float_edges(graph)
    more, conversions = set(floats), set[str]()

    def added(name: str, is_float: bool) -> str:
        new = editor.add_tensor(f"{name}.converted", graph.types[name])
        conversions.add(new)
        more.update([new] * is_float)
        return new

    for node in graph.nodes:
        if stored_by(graph, node) is not Stored.ALIKE or not edges.intersection(node.outputs):
            editor.nodes.append(node)
            continue
        apart = set() if floats.issuperset(node.outputs) else floats.intersection(node.outputs)
        is_float = floats.issuperset(node.outputs)
        inputs = [editor.make(added(name, is_float), "Identity", [name]) if name in edges and (
            (name in floats) != is_float or (node.outputs[0], name) in cuts) else name for name in node.inputs]
        stored = {name: added(name, False) for name in apart}
        editor.nodes.append(replace(node, inputs=tuple(inputs),
                                    outputs=tuple(stored.get(name, name) for name in node.outputs)))
        for name, source in stored.items():
            editor.make(name, "Identity", [source])
    return Converted(editor.finish(), frozenset(more), frozenset(conversions))


def without_idle(graph: Graph, conversions: Collection[str]) -> Graph:
    """Remove the conversions whose input and output have one stored type, once stored types are decided."""
    idle = {node.outputs[0]: node.inputs[0] for node in graph.nodes if node.outputs[0] in conversions
            and graph.types[node.outputs[0]] == graph.types[node.inputs[0]]}
    return graph.rebuild(renamed(node, idle) for node in graph.nodes if node.outputs[0] not in idle) if idle else graph
