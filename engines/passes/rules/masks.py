"""Simplify exported attention masks: fewer nodes on smaller tensors.

    a & true = a | false = a
    f(expand(x), y) = f(x, y)                       if the result has the same shape
    f(expand(x), number) = expand(f(x, number))     so that the rule above applies further down
    where(isnan(softmax(x)), 0, softmax(x)) = softmax(x)        our softmax gives zeros for a fully masked row
"""
from __future__ import annotations

from infer_server.engines.ir.shapes import broadcast
from infer_server.engines.ops import OPS
from infer_server.engines.passes.rewriting.facts import scalar
from infer_server.engines.passes.rewriting.rewrite import Constant, Draft, Match, P, Rule, Value

_POINTWISE = P(" ".join(name for name, op in OPS.items() if op.pointwise))


class NeutralLogic(Rule):
    """Remove an And with all true, or an Or with all false."""
    pattern = P("And Or", Value("other"), Constant("neutral"))

    def check(self, match: Match) -> bool:
        return bool((match.constant("neutral") == (match.root.op == "And")).all())

    def rewrite(self, match: Match, draft: Draft) -> None:
        other = match.value("other")
        if match.shape(other) == match.type.shape:
            draft.same_as(other)
        else:
            draft.finish_view("Expand", other)


class NeedlessExpand(Rule):
    """Remove Expands of a pointwise node's operands if broadcasting gives the same shape."""
    pattern = _POINTWISE

    def check(self, match: Match) -> bool:
        shapes = [match.shape(name) for name in _sources(match)]
        return (_sources(match) != list(match.root.inputs)
                and broadcast(*shapes) == match.type.shape)

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish(match.root.op, _sources(match), match.root.attrs)


class LaterExpand(Rule):
    """Move an Expand past a pointwise node whose other operands are scalars."""
    pattern = _POINTWISE

    def check(self, match: Match) -> bool:
        others = [i for i in match.root.inputs if scalar(match.graph, i) is None]
        return len(others) == 1 and _sources(match) != list(match.root.inputs)

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.finish_view("Expand", draft.node(match.root.op, _sources(match), match.root.attrs))


def _sources(match: Match) -> list[str]:
    """Return the root's inputs, with the inputs of Expands in place of their outputs."""
    nodes = [match.graph.producer.get(name) for name in match.root.inputs]
    return [node.inputs[0] if node is not None and node.op == "Expand" else name
            for node, name in zip(nodes, match.root.inputs, strict=True)]


class SafeSoftmax(Rule):
    pattern = P("Where", P("IsNaN", Value("y")), Constant("zero"), Value("y"))

    def check(self, match: Match) -> bool:
        made = match.graph.producer.get(match.value("y"))
        return made is not None and made.op == "Softmax" and not match.constant("zero").any()

    def rewrite(self, match: Match, draft: Draft) -> None:
        draft.same_as(match.value("y"))


MASKS = (NeutralLogic(), NeedlessExpand(), LaterExpand(), SafeSoftmax())
