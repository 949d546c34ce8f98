"""A node's pointwise body as an epilogue program, with the values of its constants and the tensors that it reads."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.errors import GraphError
from engines.ir.counted import is_counted, plain
from engines.ir.deferred import Deferred, late_vectors
from engines.ir.graph import Node, TensorType
from engines.lowering.calls.broadcast import broadcast, image
from engines.lowering.calls.calls import Call, Context, Refused
from engines.lowering.epilogue.affine import Affine, AffineWriter
from engines.lowering.epilogue.from_onnx import write_node
from engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View


@dataclass(frozen=True)
class BoundProgram:
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


def write_body(ctx: Context, node: Node, accumulator: tuple[Any, ...] | None) -> BoundProgram:
    """The program of a node: its pointwise nodes, dequantisation of what they read, requantisation of the result.

    accumulator: (scale, offset) of the anchor's sum, per channel or one number, and what is taken off the sum before
    where the offset would round it away; None for a node without an anchor.
    """
    constants = ctx.graph.constants
    late = {name: constants[name] for part in node.body or (node,) for name in part.inputs
            if isinstance(constants.get(name), Deferred)}
    return written_for(lambda *arrays: _written(ctx, node, accumulator, dict(zip(late, arrays, strict=True))),
                       *late.values())


def _written(ctx: Context, node: Node, accumulator: tuple[Any, ...] | None, late: Mapping[str, Array]) -> BoundProgram:
    """late: the values of constants that follow from extents."""
    builder = ProgramBuilder(accumulator is not None)
    output = node.outputs[0]
    quant = ctx.type(output).quant
    writer = AffineWriter(builder, coarse=quant is not None)
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
        if (number := _per_channel(late.get(name, ctx.graph.constants.get(name)))) is not None:
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
    return BoundProgram(program, list(builder.constants), tuple(operands))


def written_for(write: Callable[..., BoundProgram], *values: Any) -> BoundProgram:
    """The program that is written for numbers and constants, which may follow from extents: its constants then do, too,
    and what it does must be the same for others."""
    written = write(*plain(values))
    if not is_counted(values):
        return written
    return replace(written, constants=late_vectors(partial(_constants_for, write, written), values,
                                                   written.constants))


def _constants_for(write: Callable[..., BoundProgram], expected: BoundProgram, *values: Any) -> Sequence[Array]:
    """Raises GraphError: of these comes another program."""
    found = write(*values)
    if (found.program, found.operands) != (expected.program, expected.operands):
        raise GraphError("another program is written for other extents")
    return found.constants


def call_of(ctx: Context, node: Node, problem: Problem, body: BoundProgram, **constants: Any) -> Call:
    """The call of a problem on the anchor's first input, the operands of the body, and the node's output."""
    names = (node.anchor.inputs[0], *body.operands)
    return Call(node, problem, tuple(ctx.placements[name] for name in names), (ctx.placements[node.outputs[0]],),
                {"program": body.constants, **constants})


def operand_views(ctx: Context, node: Node, body: BoundProgram) -> tuple[View, ...]:
    """The body's operands as images beside the node's output."""
    return tuple(image(broadcast(ctx, name, node.outputs[0])) for name in body.operands)


def _per_channel(constant: Array | None) -> Array | None:
    """A constant that varies along the last axis only, as a vector (or one number); others are read from memory."""
    if constant is None or constant.size != 1 and constant.size != constant.shape[-1]:
        return None
    return constant.reshape(()) if constant.size == 1 else constant.reshape(-1)
