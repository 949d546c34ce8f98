"""Transpose -> Permute; the first kernel of most plans: an NCHW float image becomes NHWC as it is stored."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.backends.llvm.calls import Call, Context, Refused, copy_node, lowers, write_body
from engines.backends.llvm.kernels.layout import Permute
from engines.backends.llvm.places import Place
from engines.ir import Node


@lowers("Transpose")
def lower_transpose(ctx: Context, node: Node) -> Sequence[Call]:
    rank = len(ctx.type(node.inputs[0]).shape)
    perm = tuple(node.attrs.get("perm") or reversed(range(rank)))
    if perm[0] != 0:
        raise Refused("Transpose of the leading axis")
    source = ctx.places[node.inputs[0]]
    axes = [axis - 1 for axis in perm[1:]]
    seen = replace(source.view, shape=tuple(source.view.shape[a] for a in axes),
                   strides=tuple(source.view.strides[a] for a in axes))
    return [moved(ctx, node, replace(source, view=seen))]


def moved(ctx: Context, node: Node, source: Place) -> Call:
    """`source`, already seen in the output's shape, copied into the output's place, requantised where they differ."""
    written = write_body(ctx, copy_node(node.inputs[0], node.outputs[0]), None)
    output = ctx.places[node.outputs[0]]
    spec = Permute(source.view, output.view, written.program, all(c.size == 1 for c in written.constants))
    return Call(node, spec, (source,), (output,), {"program": written.constants})
