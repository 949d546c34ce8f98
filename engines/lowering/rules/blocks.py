"""MatMulBlocks -> BlockedProduct."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.ir.graph import Node
from engines.lowering.calls.body import call_of, write_body
from engines.lowering.calls.calls import Call, Context, lowers
from engines.lowering.problems.convolution import BlockedProduct
from engines.lowering.rules.contraction import matrices
from engines.ops.blocks import CENTRE, unpacked


@lowers("MatMulBlocks")
def lower_blocked(ctx: Context, node: Node) -> Sequence[Call]:
    product = node.anchor
    _, packed, scale, offset, *bias = product.inputs
    scales = ctx.constant(scale)
    offsets = ctx.constant(offset) if offset else -CENTRE * scales
    body = write_body(ctx, node, (1.0, ctx.constant(bias[0]).reshape(-1).astype(np.float64) if bias else 0.0))
    x, y, operands = matrices(ctx, node, body)
    problem = BlockedProduct(x.view, y.view, operands, body.program, node.precision, block=product.attrs["block"],
                             centred=not offset)
    call = call_of(ctx, node, problem, body, weights=unpacked(ctx.constant(packed), product.attrs["depth"]),
                   scales=scales, offsets=offsets)
    return [replace(call, inputs=(x, *call.inputs[1:]), outputs=(y,))]
