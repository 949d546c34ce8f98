"""Conversion of a node's pointwise body to an epilogue program with constants and operands."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.deferred import Deferred, late_vectors
from infer_server.engines.ir.graph import Node, QParams
from infer_server.engines.ir.symbolic import is_symbolic, plain
from infer_server.engines.lowering.calls.broadcast import broadcast, image
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused
from infer_server.engines.lowering.calls.scaled_rows import only_scaled
from infer_server.engines.lowering.epilogue.affine import Affine, AffineWriter
from infer_server.engines.lowering.epilogue.from_onnx import write_node
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View


@dataclass(frozen=True)
class BoundProgram:
    """Epilogue program with the values of its constants and the names of its operands."""
    program: EpilogueProgram
    constants: list[Array]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Body:
    """Node with a pointwise body, and what its program depends on: quantisation and small constants of its tensors.

    It can be encoded, unlike the context, so that symbolic plans can be stored.
    """
    node: Node
    quants: Mapping[str, QParams | None]
    constants: Mapping[str, Array | Deferred]
    scaled: bool = False        # only ScaledRows nodes read the result

    @staticmethod
    def of(ctx: Context, node: Node) -> Body:
        read = {name for part in (node, *node.body) for name in part.inputs if name}
        made = {name for part in node.body for name in part.outputs}
        constants = {name: ctx.graph.constants[name] for name in sorted(read) if name in ctx.graph.constants}
        return Body(node, {name: ctx.type(name).quant for name in (read - made).union(node.outputs)},
                    {name: array for name, array in constants.items()
                     if isinstance(array, Deferred) or _per_channel(array) is not None},
                    only_scaled(ctx.graph, node.outputs[0]))


def stored(quant: QParams | None, ref: Any) -> Affine:
    """Return the real value of a stored element, dequantised if it is quantised."""
    if quant is None:
        return Affine.of(ref)
    if quant.axis is not None:
        raise Refused("only constants may have a scale per channel")
    scale, zero = quant.scale[0], quant.zero_point[0]
    return Affine.of(ref, scale, -scale * zero)


def write_body(ctx: Context, node: Node, accumulator: tuple[Any, ...] | None) -> BoundProgram:
    """Write a node's epilogue program: dequantisation of inputs, pointwise nodes, requantisation of the result.

    Parameters
    ----------
    ctx : Context
        Context of the rule.
    node : Node
        Node with a pointwise body.
    accumulator : tuple or None
        (scale, offset) of the anchor's sum, scalars or per channel, and optionally a value to subtract from the sum
        first, where the offset would round it away. None for a node without an anchor.
    """
    return program_of(Body.of(ctx, node), accumulator)


def program_of(body: Body, accumulator: tuple[Any, ...] | None) -> BoundProgram:
    """Write the epilogue program of a body; see write_body."""
    late = {name: array for name, array in body.constants.items() if isinstance(array, Deferred)}
    fixed = replace(body, constants={name: array for name, array in body.constants.items() if name not in late})
    return written_for(partial(_written, fixed, accumulator, tuple(late)), *late.values())


def _written(body: Body, accumulator: tuple[Any, ...] | None, late: Sequence[str], *arrays: Array) -> BoundProgram:
    """Write the program. late: names of constants that depend on symbolic sizes, whose values are `arrays`."""
    builder, node = ProgramBuilder(accumulator is not None), body.node
    constants: Mapping[str, Any] = {**body.constants, **dict(zip(late, arrays, strict=True))}
    output = node.outputs[0]
    quant = body.quants[output]
    writer = AffineWriter(builder, coarse=quant is not None, approximate=body.scaled)
    values: dict[str, Affine] = {}
    operands: dict[str, Affine] = {}
    parts = node.body or (node,)
    if accumulator is not None:
        scale, offset, *shift = accumulator
        total = builder.add("sub", builder.accumulator, builder.constant(shift[0])) if shift else builder.accumulator
        values[parts[0].outputs[0]] = Affine.of(total, scale, offset)
        parts = parts[1:]

    def argument(name: str) -> Affine:
        if name in values:
            return values[name]
        if (number := _per_channel(constants.get(name))) is not None:
            return Affine.number(number)
        if name not in operands:
            operands[name] = stored(body.quants[name], builder.operand())
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
    return BoundProgram(program, list(builder.constants), tuple(operands))


def written_for(write: Callable[..., BoundProgram], *values: Any) -> BoundProgram:
    """Write a program for numbers and constants that may depend on symbolic sizes.

    If they do, the program's constants are deferred; its instructions must not depend on the sizes.
    """
    written = write(*plain(values))
    if not is_symbolic(values):
        return written
    return replace(written, constants=late_vectors(partial(_constants_for, write, written), values,
                                                   written.constants))


def _constants_for(write: Callable[..., BoundProgram], expected: BoundProgram, *values: Any) -> Sequence[Array]:
    """Return the constants for given values. Raise GraphError if these lead to another program."""
    found = write(*values)
    if (found.program, found.operands) != (expected.program, expected.operands):
        raise GraphError("the epilogue program depends on symbolic sizes")
    return found.constants


def call_of(ctx: Context, node: Node, problem: Problem, body: BoundProgram, **constants: Any) -> ProblemCall:
    """Return the call of a problem on the anchor's first input, the body's operands and the node's output."""
    names = (node.anchor.inputs[0], *body.operands)
    return ProblemCall(node, problem, tuple(ctx.placements[name] for name in names), (ctx.placements[node.outputs[0]],),
                       {"program": body.constants, **constants})


def operand_views(ctx: Context, node: Node, body: BoundProgram) -> tuple[View, ...]:
    """Return the body's operands as images, broadcast to the node's output."""
    return tuple(image(broadcast(ctx, name, node.outputs[0])) for name in body.operands)


def _per_channel(constant: Array | None) -> Array | None:
    """Return a constant as a scalar or a vector along the last axis, or None if it varies along other axes."""
    if constant is None or constant.size != 1 and constant.size != constant.shape[-1]:
        return None
    return constant.reshape(()) if constant.size == 1 else constant.reshape(-1)
