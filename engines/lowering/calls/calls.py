"""What lowering produces: calls, of problems on placed tensors; and the rules that make them, by operator."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.ir.graph import Graph, Node, TensorType
from engines.lowering.calls.aliasing import Aliasing
from engines.lowering.calls.placement import Placement, batch_axis
from engines.lowering.problems.problem import Array, Problem


class Refused(Exception):
    """Why a rule cannot make a kernel of a node: the node then runs on the reference, and the build says so."""


@dataclass(frozen=True)
class Call:
    """A problem on placed tensors."""
    node: Node
    problem: Problem
    inputs: tuple[Placement, ...] = ()
    outputs: tuple[Placement, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FallbackCall:
    """A node that no rule takes, for the reason given: the operator's reference runs it."""
    node: Node
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    reason: str


AnyCall = Call | FallbackCall


def name_of(call: AnyCall) -> str:
    """Of the step that the call becomes."""
    return call.node.name or call.node.outputs[0]


@dataclass(frozen=True)
class Context:
    """What a rule may ask."""
    graph: Graph
    placements: Aliasing
    lanes: int                  # of the narrowest vectors that the target's kernels are written for
    solved: Collection[type[Problem]] | None = None     # the kinds of problems that it has kernels for; None: all

    def type(self, name: str) -> TensorType:
        return self.graph.types[name]

    def constant(self, name: str) -> Array:
        if name not in self.graph.constants:
            raise Refused(f"'{name}' is computed at run time; only a constant is compiled here")
        return self.graph.constants[name]


Rule = Callable[[Context, Node], Sequence[Call]]
RULES: dict[str, Rule] = {}
GENERAL: dict[str, Rule] = {}       # for what those refuse: by nests of any loops


def lowers(*ops: str, images: bool = False, volumes: bool = False,
           any_batch: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for nodes whose anchor is one of these operators. images: where it works on images in NHWC;
    volumes: and on those in NDHWC. any_batch: where it knows on which axis the batch stands; others take shapes as
    items lie in memory."""
    def register(rule: Rule) -> Rule:
        def checked(ctx: Context, node: Node) -> Sequence[Call]:
            anchor = node.anchor
            if not (any_batch and node.op == anchor.op) and (name := _batch_inside(ctx, node)):
                raise Refused(f"the batch is not the leading axis of '{name}'")
            if images and not anchor.attrs.get("channels_last"):
                raise Refused(f"only a {anchor.op} of images in NHWC is compiled")
            if images and not volumes and len(ctx.type(anchor.inputs[0]).shape) != 4:
                raise Refused(f"only a {anchor.op} of 2-D images is compiled")
            return rule(ctx, node)

        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = checked
        return rule
    return register


def _batch_inside(ctx: Context, node: Node) -> str:
    """A tensor of the node with axes before that of the batch."""
    return next((name for name in (*node.inputs, *node.outputs) if name and batch_axis(ctx.type(name))), "")


def lowers_in_general(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for what the rule of these operators, if there is one, refuses."""
    def register(rule: Rule) -> Rule:
        for op in ops:
            assert op not in GENERAL, f"two general rules for {op}"
            GENERAL[op] = rule
        return rule
    return register
