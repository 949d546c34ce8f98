"""Scaled dot-product attention as one operator, the form of ONNX's Attention (opset 23) that kernels run."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import broadcast
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.items import broadcast as broadcast_items
from infer_server.engines.ops.normalization import softmax
from infer_server.engines.ops.op import Inputs, Op, Stored, Types


class ScaledDotProductAttention(Op):
    """Attention softmax(scale * q k' + mask) v over the last two axes; the additive mask is optional.

    q [..., S, D], k [..., T, D], v [..., T, E], mask broadcast to [..., S, T] -> [..., S, E], with at least one leading
    axis (items, heads); leading axes broadcast.
    """
    stored = Stored.CONVERTED       # except the mask

    @classmethod
    def types(cls, node: Node, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None = None) -> Types:
        if len({len(q.shape), len(k.shape), len(v.shape)}) > 1 or len(q.shape) < 3:
            raise GraphError("q, k and v must have the same number of axes, at least three")
        if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
            raise GraphError("the last axes of q and k must be equal, and so must the sequence lengths of k and v")
        lead = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        scores = (*lead, q.shape[-2], k.shape[-2])
        if mask is not None and broadcast(scores, mask.shape) != scores:
            raise GraphError("the mask does not broadcast to the shape of the scores")
        return (TensorType(q.dtype, (*lead, q.shape[-2], v.shape[-1])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        rank = len(outputs[0].shape)
        axis = broadcast_items(inputs, axes, rank)
        of_keys = [place for place, at in enumerate(axes) if place and at is not None]
        if axis == rank - 1 or axis == rank - 2 and of_keys:
            raise Mixed("it attends from one item to others")
        return (axis,)

    @classmethod
    def compute(cls, node: Node, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        scores = np.matmul(q, k.swapaxes(-1, -2)) * q.dtype.type(node.attrs["scale"])
        if mask is not None:
            scores = scores + mask
        return np.asarray(np.matmul(softmax(scores, -1), v), q.dtype)
