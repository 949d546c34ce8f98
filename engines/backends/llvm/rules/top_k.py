"""TopK -> TopK."""
from __future__ import annotations

from collections.abc import Sequence

from engines.backends.llvm.calls import Call, Context, Refused, lowers
from engines.backends.llvm.kernels.top_k import WIDEST, TopK
from engines.ir import Node


@lowers("TopK")
def lower_top_k(ctx: Context, node: Node) -> Sequence[Call]:
    x, shape = ctx.places[node.inputs[0]], ctx.type(node.inputs[0]).shape
    if len(shape) < 2 or node.attrs.get("axis", -1) % len(shape) != len(shape) - 1:
        raise Refused("only along the innermost axis, behind the batch, is it compiled")
    if x.view.dtype != "float32" or x.view.strides[-1] != x.view.size or x.view.shape[-1] > WIDEST:
        raise Refused(f"it is compiled for float32 rows in one piece, of up to {WIDEST} elements")
    values, indices = (ctx.places[name] for name in node.outputs)
    spec = TopK(x.view, values.view, indices.view, bool(node.attrs.get("largest", 1)))
    return [Call(node, spec, (x,), (values, indices))]
