"""Rules for softmax and normalisations along the innermost axis -> row problems."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.rounding import LEAST_SCALE, MIDDLE, STEPS
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.body import stored, write_body
from infer_server.engines.lowering.calls.broadcast import broadcast
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule, lowers
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.placement import as_one_item
from infer_server.engines.lowering.epilogue.affine import AffineWriter
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from infer_server.engines.lowering.problems.rows import (
    WIDEST_LRN,
    Lrn,
    Norm,
    RowProblem,
    ScaledRows,
    Softmax,
)

SMALLEST = 1e-12        # least L2 norm: a row of zeros stays zeros


@lowers("Softmax", "LogSoftmax")
def lower_softmax(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    return [row_call(ctx, node, Softmax, log=node.anchor.op == "LogSoftmax")]


@lowers("LayerNormalization", "RMSNormalization", "LpNormalization")
def lower_norm(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    norm = node.anchor
    if any(node.outputs[1:]):
        raise Refused("only its first output is compiled")
    if norm.op == "LpNormalization":
        if norm.attrs.get("p", 2) != 2:
            raise Refused("only the L2 norm is compiled")
        return [row_call(ctx, node, Norm, kind="l2", epsilon=SMALLEST)]
    kind, epsilon = "layer" if norm.op == "LayerNormalization" else "rms", float(norm.attrs.get("epsilon", 1e-5))
    constants = [ctx.constant(name) if name else np.zeros(1) for name in (*norm.inputs[1:], "")[:2]]
    if any(constant.size > math.prod(constant.shape[-1:]) for constant in constants):
        return [row_call(ctx, _scaled_by_rows(node), Norm, kind=kind, epsilon=epsilon)]
    scale, shift = (constant.reshape(-1) for constant in constants)
    return [row_call(ctx, node, Norm, (scale, shift), kind=kind, epsilon=epsilon)]


def _scaled_by_rows(node: Node) -> Node:
    """Move a norm's scale and bias into its body if they vary between rows."""
    x, scale, *bias = node.inputs
    y, made = node.outputs[0], f"{node.outputs[0]}.normed"
    scaled = f"{y}.scaled" if bias else y
    parts = [replace(node, inputs=(x,), outputs=(made,)), Node("Mul", (made, scale), (scaled,))]
    return node.with_body([*parts, *(Node("Add", (scaled, name), (y,)) for name in bias)])


@lowers("ScaledRows")
def lower_scaled_rows(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    x, y, scales = (ctx.placements[name] for name in (*node.inputs, *node.outputs))
    if len(ctx.type(node.inputs[0]).shape) < 2:
        raise Refused("its input has one axis only")
    return [ProblemCall(node, ScaledRows((x.view,), y.view, scales=scales.view, steps=_steps(node)), (x,), (y, scales))]


def _steps(node: Node) -> int:
    return int(node.attrs.get("steps", STEPS))


@fallback_rule("ScaledRows")
def lower_scaled_as_nests(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a nest for the scales and one for the rows."""
    *outer, width = ctx.type(node.inputs[0]).shape
    w = NestWriter(ctx, node, outer, (as_int(width),))
    x = w.at(node.inputs[0], [*w.axes, *w.inner])
    largest = w.reduce("max", x.unary("abs").bits("i32")).bits("f32")       # by its bits NaN is the largest
    scale = largest * (1 / _steps(node))
    scale = w.where(scale < LEAST_SCALE, scale.like(LEAST_SCALE), scale)
    result = x * (scale.like(1.0) / scale)
    if ctx.type(node.outputs[0]).quant is not None:
        result = (result + (float(MIDDLE) if _steps(node) == STEPS else 0.0)).unary("rint").to("i32")
    y, scales = (ctx.placements[name] if w.batched else as_one_item(ctx.placements[name]) for name in node.outputs)
    column = replace(scales.view, shape=scales.view.shape[:-1], strides=scales.view.strides[:-1])
    return [w.call(scale, targets=[replace(scales, view=column)]), w.call(result, inside=True, targets=[y])]


@lowers("LRN", images=True)
def lower_lrn(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    lrn = node.anchor.attrs
    if lrn["size"] > WIDEST_LRN:
        raise Refused(f"its window has {lrn['size']} channels; at most {WIDEST_LRN} are compiled")
    numbers: dict[str, Any] = {key: float(lrn[key]) for key in ("alpha", "beta", "bias") if key in lrn}
    return [row_call(ctx, node, Lrn, size=int(lrn["size"]), **numbers)]


def row_call(ctx: Context, node: Node, family: Callable[..., RowProblem], accumulator: tuple[Any, Any] = (1.0, 0.0),
             **options: Any) -> ProblemCall:
    """Return a call of a row problem with dequantisation as its prologue and the node's body as its program."""
    name, rank = node.anchor.inputs[0], len(ctx.type(node.anchor.inputs[0]).shape)
    if rank < 2:
        raise Refused("its input has one axis only")
    if not node.anchor.attrs.get("channels_last") and node.anchor.attrs.get("axis", -1) % rank != rank - 1:
        raise Refused("only the innermost axis is compiled")
    x, y = ctx.placements[name], ctx.placements[node.outputs[0]]
    written = write_body(ctx, node, accumulator)
    operands = tuple(broadcast(ctx, operand, node.outputs[0]) for operand in written.operands)
    builder = ProgramBuilder(False)
    AffineWriter(builder).settle(stored(ctx.type(name).quant, builder.operand()))
    spec = family((x.view,), y.view, operands, builder.program(), written.program, **options)
    inputs = (x, *(ctx.placements[operand] for operand in written.operands))
    return ProblemCall(node, spec, inputs, (y,), {"prologue": builder.constants, "program": written.constants})
