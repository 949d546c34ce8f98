"""Lowering of a graph to kernel calls by rules; nodes without a rule become fallback calls with a reason."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from infer_server.engines.ir.graph import Graph, Node
from infer_server.engines.ir.shapes import is_empty
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering import rules  # noqa: F401  (fills RULES)
from infer_server.engines.lowering.calls.aliasing import VIEWS, Aliasing
from infer_server.engines.lowering.calls.calls import (
    FALLBACK_RULES,
    RULES,
    AnyCall,
    Context,
    FallbackCall,
    ProblemCall,
    Refused,
)
from infer_server.engines.lowering.calls.placement import ITEMS, axis_of_item, has_batch
from infer_server.engines.lowering.calls.scaled_rows import with_merged_scaling
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.rules.copies import copy_call


@dataclass(frozen=True)
class Lowered:
    """Graph as kernel calls in order of execution."""
    graph: Graph
    placements: Aliasing
    calls: tuple[AnyCall, ...]
    borders: frozenset[int] = frozenset()       # buffers whose halo a call writes

    @property
    def compiled(self) -> list[ProblemCall]:
        """Calls that run kernels."""
        return [call for call in self.calls if isinstance(call, ProblemCall)]


def lower(graph: Graph, lanes: int, solved: Collection[type[Problem]] | None = None) -> Lowered:
    """Lower a graph to kernel calls.

    Parameters
    ----------
    graph : Graph
        Result of passes.pipeline, with stored types.
    lanes : int
        Lanes of the target's narrowest vectors; narrower groups of a convolution are merged to fill one.
    solved : collection of Problem classes, optional
        Problems that the target has kernels for; None: all. General rules may replace the others.
    """
    placements = Aliasing(graph)
    ctx = Context(graph, placements, lanes, solved)
    calls = tuple(call for node in graph.nodes for call in _calls(ctx, node))
    return Lowered(graph, placements, with_merged_scaling(graph, calls, solved))


def _calls(ctx: Context, node: Node) -> Sequence[AnyCall]:
    try:
        if all(is_empty(ctx.type(name)) for name in node.outputs if name):
            return ()
        if name := next((n for n in (*node.inputs, *node.outputs) if n and is_empty(ctx.type(n))), ""):
            raise Refused(f"'{name}' has no elements")
        if node.op == "Concat":
            return tuple(_gather_parts(ctx, node))
        if node.op in VIEWS and all(ctx.placements.is_view(output, node.inputs[0]) for output in node.outputs):
            return ()
        if node.op == "Transpose" and ctx.placements.is_view(node.inputs[0], node.outputs[0]):
            return ()
        if node.op == "Identity" and node.inputs[0] in ctx.graph.constants:
            return (copy_call(node, ctx.placements[node.inputs[0]], ctx.placements[node.outputs[0]]),)
        return _by_rules(ctx, node)
    except Refused as reason:
        return (_fallback(ctx, node, str(reason)),)


def _by_rules(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a node by the rule of its operator, else by the general rule. Raise the last refusal if both refuse."""
    refusal = Refused(f"no kernel for {node.anchor.op}")
    for rule in (table[node.anchor.op] for table in (RULES, FALLBACK_RULES) if node.anchor.op in table):
        try:
            calls = tuple(rule(ctx, node))
            for problem in (call.problem for call in calls):
                if dtype := problem.unsupported_dtype:
                    raise Refused(f"{problem.family} kernels do not support tensors stored as {dtype}; they support "
                                  f"{', '.join(problem.computes_on)}")
                if ctx.solved is not None and type(problem) not in ctx.solved:
                    raise Refused(f"no {problem.family} kernel for this target")
            return calls
        except Refused as reason:
            refusal = reason
    raise refusal


def _fallback(ctx: Context, node: Node, reason: str) -> FallbackCall:
    inputs = tuple(ctx.placements[name] for name in node.inputs if name and name not in ctx.graph.constants)
    return FallbackCall(node, inputs, tuple(ctx.placements[name] for name in node.outputs), reason)


def _gather_parts(ctx: Context, node: Node) -> Iterator[ProblemCall]:
    """Yield copies for those inputs of a Concat that do not already lie in the output."""
    output = ctx.placements[node.outputs[0]]
    axis = axis_of_item(ctx.type(node.outputs[0]), node.attrs["axis"])
    if axis == ITEMS and has_batch(ctx.type(node.outputs[0])):
        raise Refused("Concat along the batch axis")
    quant, start = ctx.type(node.outputs[0]).quant, 0
    for name in node.inputs:
        if ctx.type(name).quant != quant:
            raise Refused(f"'{name}' and the result have different quantisation parameters")
        extent = as_int(ctx.type(name).shape[node.attrs["axis"]])
        part, is_kept = output.part(axis, start, start + extent), node.outputs[0] in ctx.graph.in_place
        if not (ctx.placements.is_view(name, node.outputs[0]) or is_kept and ctx.placements[name] == part):
            yield copy_call(node, ctx.placements[name], part)
        start += extent
