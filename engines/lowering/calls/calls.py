"""What lowering produces: kernel calls on placed tensors; and what the rules share to make them."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.ir.graph import Dim, Graph, Node, TensorType
from engines.lowering.calls.aliasing import Aliasing
from engines.lowering.calls.placement import Placement
from engines.lowering.epilogue.affine import Affine, AffineWriter
from engines.lowering.epilogue.from_onnx import write_node
from engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View


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
    lanes: int                  # of the target's vectors

    def type(self, name: str) -> TensorType:
        return self.graph.types[name]

    def constant(self, name: str) -> Array:
        if name not in self.graph.constants:
            raise Refused(f"'{name}' is computed at run time; only a constant is compiled here")
        return self.graph.constants[name]


Rule = Callable[[Context, Node], Sequence[Call]]
RULES: dict[str, Rule] = {}


def lowers(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for nodes whose anchor is one of these operators."""
    def register(rule: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = rule
        return rule
    return register


# ---- views
def image(view: View) -> View:
    """A view of any rank as [rows, columns, channels]."""
    shape, strides = view.shape, view.strides
    if len(shape) < 3:
        gaps = 3 - len(shape)
        # A row or an item that is not there is stepped over by no one: give it the stride that makes it seamless.
        outer = strides[0] * shape[0] if strides else view.size
        return replace(view, shape=(*(1,) * gaps, *shape), strides=(*(outer,) * gaps, *strides) if strides
                       else (view.size,) * 3)
    if not is_image(view):
        raise Refused("its leading axes do not follow each other in memory")
    return replace(view, shape=(math.prod(shape[:-2]), *shape[-2:]), strides=strides[-3:])


def is_image(view: View) -> bool:
    """Whether the axes before the last two are one: that of an image's rows."""
    shape, strides = view.shape, view.strides
    return all(strides[axis] == shape[axis + 1] * strides[axis + 1] for axis in range(len(shape) - 3))


def broadcast(ctx: Context, name: str, to: str) -> View:
    """Tensor `name` as it is read beside tensor `to`: strides of 0 along the axes that it repeats."""
    return broadcast_to(ctx, name, ctx.type(to).shape)


def broadcast_to(ctx: Context, name: str, target: Sequence[Dim]) -> View:
    """Tensor `name` as it is read beside tensors of that shape: strides of 0 along the axes that it repeats."""
    source, rank = ctx.type(name), len(target)
    view = ctx.placements[name].view
    shape = (*(1,) * (rank - len(source.shape)), *source.shape)
    steps = (*(0,) * (rank - len(source.shape)), *((view.item, *view.strides) if source.shape else ()))
    strides = []
    for extent, wanted, stride in zip(shape, target, steps, strict=True):
        if extent not in (1, wanted):
            raise Refused(f"'{name}' {source} does not broadcast to {list(target)}")
        strides.append(0 if extent == 1 and wanted != 1 else stride)
    item = 0 if not source.shape or shape[0] != target[0] else strides[0]
    return View(view.dtype, tuple(int(e) for e in target[1:]), tuple(strides[1:]), item)


# ---- programs
@dataclass(frozen=True)
class Written:
    """A program with the values of its constants and the tensors that are its operands."""
    program: EpilogueProgram
    constants: list[Array]
    operands: tuple[str, ...]


def stored(tensor: TensorType, ref: Any) -> Affine:
    """What a stored element means: dequantised, if it is quantised."""
    if tensor.quant is None:
        return Affine.of(ref)
    if tensor.quant.axis is not None:
        raise Refused("a tensor that is not constant has one scale")
    scale, zero = tensor.quant.scale[0], tensor.quant.zero_point[0]
    return Affine.of(ref, scale, -scale * zero)


def write_body(ctx: Context, node: Node, accumulator: tuple[Any, Any] | None) -> Written:
    """The program of a node: its pointwise nodes, dequantisation of what they read, requantisation of the result.

    accumulator: (scale, offset) of the anchor's sum, per channel or one number; None for a node without an anchor.
    """
    builder = ProgramBuilder(accumulator is not None)
    output = node.outputs[0]
    quant = ctx.type(output).quant
    writer = AffineWriter(builder, coarse=quant is not None)
    values: dict[str, Affine] = {}
    operands: dict[str, Affine] = {}
    parts = node.body or (node,)
    if accumulator is not None:
        values[parts[0].outputs[0]] = Affine.of(builder.accumulator, *accumulator)
        parts = parts[1:]

    def argument(name: str) -> Affine:
        if name in values:
            return values[name]
        if (number := _per_channel(ctx.graph.constants.get(name))) is not None:
            return Affine.number(number)
        if name not in operands:
            operands[name] = stored(ctx.type(name), builder.operand())
        return operands[name]

    try:
        for part in parts:
            values[part.outputs[0]] = write_node(writer, part, [argument(name) for name in part.inputs if name])
    except NotImplementedError as reason:
        raise Refused(str(reason)) from reason
    result = values[output] if values else argument(node.inputs[0])
    if quant is not None:
        result = writer.requantise(result, quant.scale[0], quant.zero_point[0], 0, 255)
    program = builder.program(writer.settle(result))
    return Written(program, list(builder.constants), tuple(operands))


def _per_channel(constant: Array | None) -> Array | None:
    """A constant that varies along the last axis only, as a vector (or one number); others are read from memory."""
    if constant is None or constant.size != 1 and constant.size != constant.shape[-1]:
        return None
    return constant.reshape(()) if constant.size == 1 else constant.reshape(-1)


def copy_node(source: str, output: str, origin: tuple[str, ...] = ()) -> Node:
    """A node that only moves a tensor (and requantises, where the two are stored differently)."""
    return Node("Identity", (source,), (output,), name=output, origin=origin)
