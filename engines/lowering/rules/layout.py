"""Transpose -> Permute; the first kernel of most plans: an NCHW float image becomes NHWC as it is stored."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.ir.graph import Node
from engines.lowering.calls.aliasing import item_perm
from engines.lowering.calls.calls import Call, Context, lowers
from engines.lowering.calls.placement import as_one_item
from engines.lowering.rules.copies import moved


@lowers("Transpose")
def lower_transpose(ctx: Context, node: Node) -> Sequence[Call]:
    name, output = node.inputs[0], node.outputs[0]
    source, target = ctx.placements[name], ctx.placements[output]
    axes: Sequence[int] | None = item_perm(node, ctx.type(name))
    if axes is None:        # what leads changes, and is no batch: the tensors as one item each
        axes, source, target = node.attrs["perm"], as_one_item(source), as_one_item(target)
    seen = replace(source.view, shape=tuple(source.view.shape[a] for a in axes),
                   strides=tuple(source.view.strides[a] for a in axes))
    return [moved(ctx, node, name, replace(source, view=seen), output, target)]
