"""Matrix products and inverses."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import broadcast, check_stretches
from infer_server.engines.ops.items import ItemAxes, Mixed, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, Op, SameShape, Stored, Types, present


class Gemm(Op):
    """Product alpha * A' B' + beta * C, where ' is a transposition according to transA and transB."""
    attributes = ("alpha", "beta", "transA", "transB")
    output_axis, anchor, stored = 0, True, Stored.CONVERTED         # 0 in canonical form, with transB

    @classmethod
    def types(cls, node: Node, a: TensorType, b: TensorType, c: TensorType | None = None) -> Types:
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise GraphError("both factors must be matrices")
        rows, depth = reversed(a.shape) if node.attrs.get("transA") else a.shape
        deep, columns = reversed(b.shape) if node.attrs.get("transB") else b.shape
        if depth != deep:
            raise GraphError(f"the inner extents {depth} and {deep} of the factors differ")
        if c is not None:
            check_stretches("third operand", c.shape, (rows, columns))
        return (TensorType(a.dtype, (rows, columns)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        transposed = [bool(node.attrs.get(key)) for key in ("transA", "transB")]
        made = _of_product([None if axis is None else axis - 2 if not swap else -1 - axis
                            for axis, swap in zip(axes, transposed, strict=False)])
        c = inputs[2] if len(inputs) > 2 else None
        if c is not None and axes[2] is not None:
            of_c = axes[2] - len(c.shape)
            if made not in (None, of_c):
                raise Mixed("its third operand has its items along another axis")
            made = of_c
        return (None if made is None else made + 2,)

    @classmethod
    def compute(cls, node: Node, a: Array, b: Array, c: Array | None = None) -> Array:
        product = (a.T if node.attrs.get("transA") else a) @ (b.T if node.attrs.get("transB") else b)
        y = node.attrs.get("alpha", 1) * product
        if c is not None:
            y = y + node.attrs.get("beta", 1) * c
        return np.asarray(y).astype(a.dtype, copy=False)


class MatMul(Op):
    """NumPy's matmul: leading axes broadcast; a vector is a row on the left and a column on the right."""
    output_axis, anchor, stored = 1, True, Stored.CONVERTED         # 1 for a matrix

    @classmethod
    def types(cls, node: Node, a: TensorType, b: TensorType) -> Types:
        if not a.shape or not b.shape:
            raise GraphError("a factor is a scalar, but needs at least one axis")
        left = a.shape if len(a.shape) > 1 else (1, *a.shape)
        right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
        if left[-1] != right[-2]:
            raise GraphError(f"the inner extents {left[-1]} and {right[-2]} of the factors differ")
        rows = (left[-2],) if len(a.shape) > 1 else ()
        columns = (right[-1],) if len(b.shape) > 1 else ()
        return (TensorType(a.dtype, (*broadcast(left[:-2], right[:-2]), *rows, *columns)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        a, b = present(inputs)
        behind = [None if axis is None else axis - rank if rank > 1 else (axis - 1 if left else axis - 2)
                  for left, axis, rank in zip((True, False), axes, (len(a.shape), len(b.shape)), strict=True)]
        made = _of_product(behind)
        assert made is not None
        # The result lacks the axis of an operand that is a vector.
        dropped = (made < -1 and len(b.shape) == 1) + (made < -2 and len(a.shape) == 1)
        return (made + dropped + len(outputs[0].shape),)

    @classmethod
    def compute(cls, node: Node, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))


class Inverse(SameShape):
    """Inverse of the matrices in the last two axes (com.microsoft)."""

    @classmethod
    def types(cls, node: Node, x: TensorType, *_: TensorType | None) -> Types:
        if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
            raise GraphError("the matrices must be square")
        return super().types(node, x)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (untouched_axis(outputs[0].shape, only_first(axes), (-1, -2), "inverts along"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.asarray(np.linalg.inv(x))


def _of_product(axes: ItemAxes) -> int | None:
    """Return the batch axis of a product a b, counted from the end as those of its factors: rows -2, columns -1."""
    a, b = axes
    if a == -1 or b == -2:
        raise Mixed("it sums over the items")
    if a is not None and b is not None and a != b:
        raise Mixed("it multiplies every item by every other")
    return b if a is None else a
