"""Product of a few rows and a right factor [K, N] whose columns are contiguous, as keys are, without packing it.

    for vector of columns:
      for vector of K:          a vector of products for each column
      reduce `lanes` vectors to one in log2(lanes) rounds, each of which halves their number

Packing such a factor takes about as many instructions as its product with four rows.
"""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.backends.llvm.kernels.common.access import lane_sums
from infer_server.engines.backends.llvm.kernels.matmul.operands import Right, converted
from infer_server.engines.codegen.ir_builder import Value


def has_columns(right: Right) -> bool:
    """Return True if the factor has contiguous columns of float32 and the arithmetic multiplies float32."""
    matrix = right.matrix
    return right.arithmetic.weights_dtype == "float32" == matrix.dtype and matrix.strides[0] == matrix.size


def dots(right: Right, x: Value, pitch: int, columns: Value, shape: tuple[int, int]) -> dict[tuple[int, int], Value]:
    """Return the float32 sums of a tile, {(row, vector): value}.

    shape: rows, `pitch` bytes apart from x on, by columns.
    """
    rows, count = shape
    lanes, size = right.isa.lanes, right.matrix.strides[1]
    return {(m, v): _vector(right, x + m * pitch, [columns + (v * lanes + j) * size for j in range(
        min(lanes, count - v * lanes))]) for m in range(rows) for v in range(right.isa.vectors_for(count))}


def _vector(right: Right, x: Value, columns: Sequence[Value]) -> Value:
    """Multiply a row by at most `lanes` columns, one for each lane; the other lanes are 0."""
    f, isa, depth = x.f, right.isa, right.matrix.rows
    acc = dict.fromkeys(range(len(columns)), f.constant(0, isa.floats))
    for k, count in f.tiles("dot", depth, isa.lanes, acc=acc):
        part = converted(isa, "float32", "float32", x + k * 4, count, None)
        for j, column in enumerate(columns):
            acc[j] = isa.fma(part, converted(isa, "float32", "float32", column + k * 4, count, None), acc[j])
    return lane_sums([*acc.values(), *[f.constant(0, isa.floats)] * (isa.lanes - len(columns))])
