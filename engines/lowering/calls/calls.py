"""Results of lowering, calls of problems on placed tensors, and the registry of lowering rules."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer_server.engines.ir.graph import Graph, Node, TensorType
from infer_server.engines.lowering.calls.aliasing import Aliasing
from infer_server.engines.lowering.calls.placement import Placement, batch_axis
from infer_server.engines.lowering.problems.problem import Array, Problem


class Refused(Exception):
    """Reason why a rule cannot lower a node. The node then runs on the reference, and the build reports it."""


@dataclass(frozen=True)
class ProblemCall:
    """Problem on placed tensors."""
    node: Node
    problem: Problem
    inputs: tuple[Placement, ...] = ()
    outputs: tuple[Placement, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FallbackCall:
    """Node that no rule lowers, for the given reason; the reference runs it."""
    node: Node
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    reason: str


AnyCall = ProblemCall | FallbackCall


def name_of(call: AnyCall) -> str:
    """Return the name of the call's step."""
    return call.node.name or call.node.outputs[0]


@dataclass(frozen=True)
class Context:
    """Information for lowering rules."""
    graph: Graph
    placements: Aliasing
    lanes: int                  # lanes of the target's narrowest vectors
    solved: Collection[type[Problem]] | None = None     # problems with a kernel; None: all

    def type(self, name: str) -> TensorType:
        return self.graph.types[name]

    def constant(self, name: str) -> Array:
        if name not in self.graph.constants:
            raise Refused(f"'{name}' is computed at run time, but has to be a constant to be compiled")
        return self.graph.constants[name]


Rule = Callable[[Context, Node], Sequence[ProblemCall]]
RULES: dict[str, Rule] = {}
FALLBACK_RULES: dict[str, Rule] = {}      # rules that lower to loop nests


def lowers(*ops: str, images: bool = False, volumes: bool = False,
           any_batch: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for nodes whose anchor is one of these operators.

    Parameters
    ----------
    ops : str
        Operators of the anchor.
    images : bool
        Apply the rule to NHWC images only.
    volumes : bool
        With `images`, apply it to NDHWC volumes, too.
    any_batch : bool
        The rule handles a batch on any axis; other rules see only nodes whose tensors lead with the batch.
    """
    def register(rule: Rule) -> Rule:
        def checked(ctx: Context, node: Node) -> Sequence[ProblemCall]:
            anchor = node.anchor
            if not (any_batch and node.op == anchor.op) and (name := _batch_inside(ctx, node)):
                raise Refused(f"the batch is not the leading axis of '{name}'")
            if images and not anchor.attrs.get("channels_last"):
                raise Refused(f"{anchor.op} is compiled for NHWC images only")
            if images and not volumes and len(ctx.type(anchor.inputs[0]).shape) != 4:
                raise Refused(f"{anchor.op} is compiled for 2-D images only")
            return rule(ctx, node)

        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = checked
        return rule
    return register


def _batch_inside(ctx: Context, node: Node) -> str:
    """Return a tensor of the node whose batch is not the leading axis, or ""."""
    return next((name for name in (*node.inputs, *node.outputs) if name and batch_axis(ctx.type(name))), "")


def fallback_rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a fallback rule for operators without a rule, or whose rule refuses the node."""
    def register(rule: Rule) -> Rule:
        for op in ops:
            assert op not in FALLBACK_RULES, f"two fallback rules for {op}"
            FALLBACK_RULES[op] = rule
        return rule
    return register
