"""Rules for blockwise quantisation: MatMulBlocks -> BlockedProduct or RoundedProduct; quantisation of rows -> nests."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.rounding import HEAD, STEPS
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.body import call_of, write_body
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, fallback_rule, lowers
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.nest.program import Term
from infer_server.engines.lowering.problems.convolution import BlockedProduct, RoundedProduct
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.lowering.rules.contraction import matrices
from infer_server.engines.ops.blocks import CENTRE, unpacked


@lowers("MatMulBlocks")
def lower_blocked(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    product = node.anchor
    _, packed, scale, offset, *bias = product.inputs
    scales = ctx.constant(scale)
    offsets = ctx.constant(offset) if offset else -CENTRE * scales
    body = write_body(ctx, node, (1.0, ctx.constant(bias[0]).reshape(-1).astype(np.float64) if bias else 0.0))
    x, y, operands = matrices(ctx, node, body)
    kind, precision = (RoundedProduct, "int8") if x.view.dtype == "int8" else (BlockedProduct, node.precision)
    problem = kind(x.view, y.view, operands, body.program, precision, block=product.attrs["block"], centred=not offset)
    call = call_of(ctx, node, problem, body, weights=unpacked(ctx.constant(packed), product.attrs["depth"]),
                   scales=scales, offsets=offsets)
    return [replace(call, inputs=(x, *call.inputs[1:]), outputs=(y,))]


@fallback_rule("FakeQuantizeBlocks")
def lower_fake(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a nest for the full blocks and one for a partial block."""
    depth, block = as_int(ctx.type(node.inputs[0]).shape[-1]), int(node.attrs["block"])
    whole, rest = divmod(depth, block)
    calls = []
    for first, blocks, size in ((0, whole, block), (whole * block, int(rest > 0), rest)):
        if blocks:
            w, scale, numbers = _rounded(ctx, node, first, blocks, size)
            y = w.target(node.outputs[0])
            cut = _in_blocks(y.view, y.view.dtype, (blocks, size), (block * y.view.size, y.view.size))
            calls.append(w.call(numbers * scale, inside=True,
                                targets=[replace(y, offset=y.offset + first * y.view.size, view=cut)]))
    return calls


@fallback_rule("QuantizeBlocks")
def lower_rounded(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a nest for the blocks' heads and one for their bytes."""
    block = int(node.attrs["block"])
    w, scale, numbers = _rounded(ctx, node, 0, -(-as_int(ctx.type(node.inputs[0]).shape[-1]) // block), block)
    y, step = w.target(node.outputs[0]), HEAD + block
    blocks = y.view.shape[-1] // step

    def part(offset: int, dtype: str, inner: Sequence[int], strides: Sequence[int]) -> Placement:
        return replace(y, offset=y.offset + offset, view=_in_blocks(y.view, dtype, inner, strides))

    whole = numbers.to("i32")
    heads = [part(0, "float32", [blocks], [step]), part(HEAD // 2, "int32", [blocks], [step])]
    return [w.call(scale, w.reduce("sum", whole), targets=heads),
            w.call(whole, inside=True, targets=[part(HEAD, "int8", [blocks, block], [step, 1])])]


def _in_blocks(view: View, dtype: str, inner: Sequence[int], strides: Sequence[int]) -> View:
    """View rows with their last axis split."""
    return View(dtype, (*view.shape[:-1], *inner), (*view.strides[:-1], *strides), view.item)


def _rounded(ctx: Context, node: Node, first: int, blocks: int, size: int) -> tuple[NestWriter, Term, Term]:
    """Return a nest over `blocks` blocks of `size` elements, a block's scale, and its integers as floats.

    `first` is the first element in a row; elements past the row's end are 0. See engines/ir/rounding.py.
    """
    w = NestWriter(ctx, node, (*ctx.type(node.inputs[0]).shape[:-1], blocks), (size,))
    *rows, number = w.axes
    x = w.at(node.inputs[0], [*rows, number * size + first + w.inner[0]], outside=0.0)
    x = w.where(x.equals(x), x, 0.0)        # NaN becomes 0
    scale = w.reduce("max", x.unary("abs")) * (1 / STEPS)
    inverse = w.where(scale > 0.0, scale.like(1.0) / scale, 0.0)
    return w, scale, (x * inverse).unary("rint")
