"""A few rows by a right factor [K, N] whose columns lie in one piece each, as keys do, read where they lie.

    for vector of columns:
      for vector of K:          a vector of products for each column
      the sums of `lanes` vectors as one: half as many, whose lanes belong to two of them, log2(lanes) times

Packing such a factor takes about as many instructions as its product with four rows.
"""
from __future__ import annotations

from collections.abc import Sequence

from engines.backends.llvm.kernels.common.access import lane_sums
from engines.backends.llvm.kernels.matmul.operands import Right, converted
from engines.codegen.ir_builder import Value


def has_columns(right: Right) -> bool:
    """Whether its columns lie in one piece, in a dtype that float32 products take."""
    matrix = right.matrix
    return right.arithmetic.weights_dtype == "float32" == matrix.dtype and matrix.strides[0] == matrix.size


def dots(right: Right, x: Value, pitch: int, columns: Value, shape: tuple[int, int]) -> dict[tuple[int, int], Value]:
    """The sums of a tile as float32: {(row, vector)}. shape: rows, `pitch` bytes apart from `x` on, by columns."""
    rows, count = shape
    lanes, size = right.isa.lanes, right.matrix.strides[1]
    return {(m, v): _vector(right, x + m * pitch, [columns + (v * lanes + j) * size for j in range(
        min(lanes, count - v * lanes))]) for m in range(rows) for v in range(right.isa.vectors_for(count))}


def _vector(right: Right, x: Value, columns: Sequence[Value]) -> Value:
    """A row by `lanes` columns at most, a lane each; zeros behind them."""
    f, isa, depth = x.f, right.isa, right.matrix.rows
    acc = dict.fromkeys(range(len(columns)), f.constant(0, isa.floats))
    for k, count in f.tiles("dot", depth, isa.lanes, acc=acc):
        part = converted(isa, "float32", "float32", x + k * 4, count, None)
        for j, column in enumerate(columns):
            acc[j] = isa.fma(part, converted(isa, "float32", "float32", column + k * 4, count, None), acc[j])
    return lane_sums([*acc.values(), *[f.constant(0, isa.floats)] * (isa.lanes - len(columns))])
