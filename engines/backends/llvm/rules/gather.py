"""Gather -> Take, where the index is a constant, or Lookup, where the table is."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.backends.llvm.calls import Call, Context, Refused, lowers
from engines.backends.llvm.kernels.gather import Lookup, Take
from engines.backends.llvm.spec import dense_view
from engines.ir import Node


@lowers("Gather")
def lower_gather(ctx: Context, node: Node) -> Sequence[Call]:
    data, index = node.inputs
    output, y = ctx.type(node.outputs[0]), ctx.places[node.outputs[0]]
    if data in ctx.graph.constants:
        table, axis = ctx.constant(data), node.attrs.get("axis", 0)
        if table.ndim != 2 or axis % 2 or output.quant or ctx.places[index].view.dtype not in ("int32", "int64"):
            raise Refused("only rows of a constant matrix of floats are looked up")
        lookup = Lookup(ctx.places[index].view, y.view, len(table))
        return [Call(node, lookup, (ctx.places[index],), (y,), {"table": table})]
    x, axis = ctx.places[data], node.attrs.get("axis", 0) % len(ctx.type(data).shape) - 1
    picked = ctx.constant(index)
    if axis < 0 or picked.ndim > 1 or output.quant != ctx.type(data).quant:
        raise Refused("only a constant index of one axis behind the batch is compiled")
    inside = x.view.shape[axis + 1:]
    if any(v.strides[len(v.strides) - len(inside):] != dense_view(v.dtype, inside).strides for v in (x.view, y.view)):
        raise Refused("the axes behind the index do not lie in one piece")
    view = y.view
    if picked.ndim == 0:
        view = replace(view, shape=(*view.shape[:axis], 1, *view.shape[axis:]),
                       strides=(*view.strides[:axis], 0, *view.strides[axis:]))
    return [Call(node, Take(x.view, view, axis), (x,), (replace(y, view=view),), {"index": np.atleast_1d(picked)})]
