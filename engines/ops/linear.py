"""Matrix products."""
from __future__ import annotations

import numpy as np

from engines.errors import GraphError
from engines.ir import Array, Node, TensorType
from engines.ops.op import Inputs, Op, Types, Values
from engines.shapes import broadcast


class Gemm(Op):
    """alpha * A' B' + beta * C, where ' is a transposition if transA, transB say so."""
    attributes = ("alpha", "beta", "transA", "transB")

    @classmethod
    def types(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        a, b = inputs[:2]
        assert a is not None and b is not None
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise GraphError("both factors must be matrices")
        rows, depth = reversed(a.shape) if node.attrs.get("transA") else a.shape
        deep, columns = reversed(b.shape) if node.attrs.get("transB") else b.shape
        if depth != deep:
            raise GraphError(f"inner extents {depth} and {deep} differ")
        return (TensorType(a.dtype, (rows, columns)),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        a, b, c = (*arrays, None)[:3]
        assert a is not None and b is not None
        product = (a.T if node.attrs.get("transA") else a) @ (b.T if node.attrs.get("transB") else b)
        y = node.attrs.get("alpha", 1) * product
        if c is not None:
            y = y + node.attrs.get("beta", 1) * c
        return np.asarray(y).astype(a.dtype, copy=False)


class MatMul(Op):
    """NumPy's matmul: leading axes broadcast, a vector is a row on the left and a column on the right."""

    @classmethod
    def types(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        a, b = inputs
        assert a is not None and b is not None
        if not a.shape or not b.shape:
            raise GraphError("a factor is a scalar")
        left = a.shape if len(a.shape) > 1 else (1, *a.shape)
        right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
        if left[-1] != right[-2]:
            raise GraphError(f"inner extents {left[-1]} and {right[-2]} differ")
        rows = (left[-2],) if len(a.shape) > 1 else ()
        columns = (right[-1],) if len(b.shape) > 1 else ()
        return (TensorType(a.dtype, (*broadcast(left[:-2], right[:-2]), *rows, *columns)),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        a, b = arrays
        return np.asarray(np.matmul(a, b))
