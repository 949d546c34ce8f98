"""Pattern rewriting: a rule has a pattern, may refuse a match with a reason, and drafts the replacement.

    class ConvRelu(Rule):
        pattern = P("Relu", P("Conv", bind="conv"))
        def check(self, match): return True or No("why not")
        def rewrite(self, match, draft): draft.finish("ConvRelu", match["conv"].inputs)

A round is one sweep over the nodes and one rebuild; rounds repeat until nothing changes. (Restarting after each match
would cost seconds on a graph of a thousand nodes.) Within a round a node takes part in at most one match, so a rule
always sees the graph that it was matched on.

The last drafted node takes the outputs of the pattern's root, so tables keyed by tensor name stay valid; every drafted
node inherits the origins of all matched nodes.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from types import EllipsisType
from typing import Any, NamedTuple

from infer_server.engines.ir.graph import Array, Graph, Node, TensorType, verify
from infer_server.engines.ir.symbolic import NotSymbolic
from infer_server.engines.ops import op_of
from infer_server.engines.passes.rewriting.editor import GraphEditor, merged_origin
from infer_server.engines.passes.rewriting.notes import Note, note


@dataclass(frozen=True)
class No:
    """Refusal of a match, with its reason; falsy."""
    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Constant:
    """Operand of a pattern that must be a constant."""
    bind: str


@dataclass(frozen=True)
class Value:
    """Operand of a pattern that may be any tensor; a name bound twice must be one tensor."""
    bind: str


class P:
    """Node of a pattern: one of the operators named (`"Conv Gemm"`), with these operands.

    Omitted operands, and `...`, match anything. The output of an inner node must have no reader outside the pattern.
    """

    def __init__(self, ops: str, *inputs: P | Constant | Value | EllipsisType, bind: str = "") -> None:
        self.ops = frozenset(ops.split())
        self.inputs = inputs
        self.bind = bind


@dataclass(frozen=True)
class Match:
    """Match of a pattern: `match["conv"]` is the node and `match.value("x")` the tensor bound to that name."""
    graph: Graph
    root: Node
    nodes: tuple[Node, ...]             # the matched nodes, root first, which are replaced
    bound: Mapping[str, Node]
    values: Mapping[str, str]

    @property
    def type(self) -> TensorType:
        """The type of the root's output, which the replacement must have."""
        return self.graph.types[self.root.outputs[0]]

    def __getitem__(self, bind: str) -> Node:
        return self.bound[bind]

    def value(self, bind: str) -> str:
        return self.values[bind]

    def constant(self, bind: str) -> Array:
        return self.graph.constants[self.values[bind]]

    def shape(self, name: str) -> tuple[int | str, ...]:
        return self.graph.types[name].shape


class Rule:
    """Rewriting rule; see the module's docstring.

    `check` returns a falsy value, `No(reason)` if the user should know why, to refuse a match.
    """
    pattern: P

    def check(self, match: Match) -> bool | No:
        return True

    def rewrite(self, match: Match, draft: Draft) -> None:
        raise NotImplementedError


class Draft:
    """Replacement of a match. New tensors are named after the output of the match's root."""

    def __init__(self, match: Match, editor: GraphEditor) -> None:
        self._match = match
        self._editor = editor

    def constant(self, suffix: str, array: Array) -> str:
        """Add a constant and return its name."""
        return self._editor.add_constant(self._name(suffix), array)

    def node(self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None) -> str:
        """Add a node with one inner output and return the output's name."""
        return self._editor.add(self._name(op.lower()), op, inputs, attrs, self._origin())

    def cut(self, x: str, axis: int, start: int, end: int) -> str:
        """Add a Slice of [start, end) along one axis and return its output's name."""
        return self.node("Slice", [x], {"axes": (axis,), "starts": (start,), "ends": (end,), "steps": (1,)})

    def finish(self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None) -> None:
        """Add the last node, which takes the outputs of the match's root."""
        root = self._match.root
        self._editor.nodes.append(Node(op, tuple(inputs), root.outputs, attrs or {}, root.name, self._origin()))

    def finish_view(self, op: str, x: str) -> None:
        """Finish with a Reshape or Expand of x to the shape of the root's output."""
        self.finish(op, [x], {"shape": self._match.type.shape})

    def absorb(self, *nodes: Node) -> None:
        """Add nodes to the origin of the replacement. They are removed only if nothing else reads them."""
        self._match = replace(self._match, nodes=(*self._match.nodes, *nodes))

    def same_as(self, name: str) -> None:
        """Replace the root's output by the tensor `name`."""
        self._editor.replace(self._match.root.outputs[0], name)

    def _origin(self) -> tuple[str, ...]:
        return merged_origin(self._match.nodes[::-1])

    def _name(self, suffix: str) -> str:
        return f"{self._match.root.outputs[0]}.{suffix}"


def find(graph: Graph, root: Node, pattern: P) -> Match | None:
    """Return the match of `pattern` whose root is the node `root`, or None."""
    found = _match_node(graph, root, pattern, _PartialMatch((), {}, {}))
    return found and Match(graph, root, found.nodes, found.bound, found.values)


class _PartialMatch(NamedTuple):
    """Partial match, cheap to copy: few of thousands of attempts become a Match."""
    nodes: tuple[Node, ...]
    bound: Mapping[str, Node]
    values: Mapping[str, str]


def _match_node(graph: Graph, node: Node, pattern: P, so_far: _PartialMatch) -> _PartialMatch | None:
    if node.op not in pattern.ops or len(node.inputs) < len(pattern.inputs):
        return None
    bound = {**so_far.bound, pattern.bind: node} if pattern.bind else so_far.bound
    here = _PartialMatch((*so_far.nodes, node), bound, so_far.values)
    if not pattern.inputs:
        return here
    commutes = op_of(node.op).commutative and len(pattern.inputs) == len(node.inputs) == 2
    for inputs in permutations(node.inputs) if commutes else (node.inputs,):
        found: _PartialMatch | None = here
        for name, part in zip(inputs, pattern.inputs, strict=False):
            if found is None:
                break
            found = _match_operand(graph, name, part, found)
        if found:
            return found
    return None


def _match_operand(graph: Graph, name: str, part: P | Constant | Value | EllipsisType,
                   so_far: _PartialMatch) -> _PartialMatch | None:
    if isinstance(part, P):
        node = graph.producer.get(name)
        if node is None or len(node.outputs) > 1 or name in graph.outputs or len(graph.consumers[name]) != 1:
            return None                     # a value that is read outside the pattern cannot be replaced
        return _match_node(graph, node, part, so_far)
    if isinstance(part, EllipsisType):
        return so_far
    if isinstance(part, Constant) and not graph.is_constant(name) or so_far.values.get(part.bind, name) != name:
        return None
    return _PartialMatch(so_far.nodes, so_far.bound, {**so_far.values, part.bind: name})


def apply(graph: Graph, rules: Sequence[Rule], log: list[Note] | None = None) -> Graph:
    """Apply `rules` in rounds (earlier rules first at each node) until none matches; return the verified graph."""
    while (after := _sweep(graph, rules, log)) is not None:
        graph = verify(after)
    return graph


def _sweep(graph: Graph, rules: Sequence[Rule], log: list[Note] | None) -> Graph | None:
    """Run one round; return None if no rule applied."""
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        for op in rule.pattern.ops:
            by_op.setdefault(op, []).append(rule)
    if not any(node.op in by_op for node in graph.nodes):
        return None
    editor = GraphEditor(graph)
    matched: set[int] = set()           # ids of nodes; all but a match's root have lost their readers
    for node in graph.nodes:
        for rule in by_op.get(node.op, ()):
            match = find(graph, node, rule.pattern)
            if match is None or any(id(part) in matched for part in match.nodes):
                continue
            try:
                verdict = rule.check(match)
            except NotSymbolic:              # the rule needs an extent that is symbolic here
                continue
            if verdict:
                rule.rewrite(match, Draft(match, editor))
                matched.update(id(part) for part in match.nodes)
                break
            if isinstance(verdict, No):
                note(log, node, type(rule).__name__, verdict.reason)
        else:
            editor.nodes.append(node)
    return editor.finish() if matched else None
