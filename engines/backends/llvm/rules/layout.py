"""Transpose -> Permute; the first kernel of most plans: an NCHW float image becomes NHWC as it is stored."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.backends.llvm.calls import Call, Context, Refused, lowers
from engines.backends.llvm.rules.copies import moved
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
    output = node.outputs[0]
    return [moved(ctx, node, node.inputs[0], replace(source, view=seen), output, ctx.places[output])]
