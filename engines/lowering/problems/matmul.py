"""Batched matrix product of two run-time tensors, and attention.

    Product     y[n, ..., m, o] = program(sum over k of a[n, ..., m, k] * b[n, ..., k, o])
    IntegerProduct              = sum over k of (a[n, ..., m, k] - za) * (b[n, ..., k, o] - zb)
    Attention   y[n, h, s] = program(sum over t of p[s, t] * v[n, h, t] / sum over t of p[s, t])
                p[s, t]    = e**(x[s, t] - max over t of x[s])
                x          = scale * q[n, h, s] . k[n, h, t] + mask[n, h, s, t]

Factors are read in place: leading axes may be strided (heads of a wider tensor) or broadcast (strides of 0), and the
last two of a right factor may be in either order.

In INT8 all sums are exact. A product is of (a - za) * (b - zb). The p of attention is round(255 * e**...), a byte that
uses its full range in every row, and the divisor is the sum of these bytes, so the mean is exact. k's zero point adds a
constant to a row of scores, which a softmax ignores.

A query without visible keys (all x are -inf) has the mean 0: p and 1 / sum of p are 0. In INT8, where sums are of v -
MIDDLE, v's zero point minus MIDDLE is added.

References
----------
Vaswani et al., "Attention Is All You Need", 2017, equation 1.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.lowering.epilogue.functions import fma
from infer_server.engines.lowering.epilogue.program import NUMPY, EpilogueProgram, Floats, load_meaning, store_meaning
from infer_server.engines.lowering.problems.exp2 import LOG2_E, exp2
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.rows import less_peak, reduced_rows, share_of
from infer_server.engines.lowering.problems.view import View

MIDDLE = 128            # uint8 - MIDDLE is an int8


@dataclass(frozen=True)
class Product(Problem):
    """Batched matrix product. Views of an item: a [..., M, K], b [..., K, N], y and the program's operands [..., M, N].

    The innermost axis of a and y is contiguous, and one of the last two of b.

    Constants: "numbers", the zero points of a and b; "program", a sequence of float32 [1] or [N].
    """
    a: View
    b: View
    y: View
    operands: tuple[View, ...]
    program: EpilogueProgram
    precision: str                  # int8, fp32, bf16, fp16
    family = "product"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "operands")

    @property
    def lead(self) -> tuple[int, ...]:
        return self.y.shape[:-2]

    @property
    def depth(self) -> int:
        return self.a.shape[-1]

    @property
    def macs(self) -> int:
        return math.prod(self.y.shape) * self.depth

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        a, b, *operands = (load_meaning(view.dtype, x) for view, x in zip(self.inputs, inputs, strict=True))
        a, b = (x - np.float32(zero) for x, zero in zip((a, b), constants["numbers"], strict=True))
        wide: type[Any] = np.float64 if self.precision == "int8" else np.float32    # exact for bytes
        sums = np.matmul(a.astype(wide), b.astype(wide)).astype(np.float32)
        return (store_meaning(self.y.dtype, self.program.meaning(sums, operands, constants["program"])),)


@dataclass(frozen=True)
class IntegerProduct(Product):
    """Product of bytes in int32 with zero points in memory: one for each factor, of its dtype, or none.

    a is uint8, b is uint8 or int8.
    """
    operands: tuple[View, ...] = ()
    program: EpilogueProgram = EpilogueProgram()
    precision: str = "int8"
    zero_a: View | None = None
    zero_b: View | None = None
    family = "integer_product"
    computes_on = ("uint8", "int8", "int32")
    reads = ("a", "b", "zero_a", "zero_b")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        a, b, *zeros = (x.astype(np.int32) for x in inputs)
        for zero, which in zip(zeros, [i for i, view in enumerate((self.zero_a, self.zero_b)) if view], strict=True):
            number = zero.reshape(-1)[0]
            a, b = (a - number, b) if which == 0 else (a, b - number)
        return (np.matmul(a, b),)


@dataclass(frozen=True)
class Attention(Problem):
    """Scaled dot-product attention.

    Views of an item: q [..., S, D], k [..., T, D], v [..., T, E], mask [..., S, T], y [..., S, E]; leading axes are
    heads. The innermost axis of q and y is contiguous, and one of the last two of k and v. The mask is float and
    broadcast by strides of 0. Value 0 of the program is the mean of v in v's units, minus its zero point, or minus
    MIDDLE in INT8.

    Constants: "numbers", the scale of the scores and the zero points of q, k and v; "program", float32 [1] or [E].
    """
    q: View
    k: View
    v: View
    y: View
    mask: View | None
    program: EpilogueProgram
    precision: str                  # int8, fp32, bf16, fp16
    family = "attention"
    reads = ("q", "k", "v", "mask")

    @property
    def lead(self) -> tuple[int, ...]:
        return self.q.shape[:-2]

    @property
    def heads(self) -> int:
        return math.prod(self.lead)

    @property
    def queries(self) -> int:
        return self.q.shape[-2]

    @property
    def keys(self) -> int:
        return self.k.shape[-2]

    @property
    def macs(self) -> int:
        return self.heads * self.queries * self.keys * (self.q.shape[-1] + self.v.shape[-1])

    @property
    def units(self) -> np.float32:
        """Factor from differences of scores to exponents of 2; without a mask it is 1, folded into the scale."""
        return np.float32(LOG2_E if self.mask else 1.0)

    def numbers(self, constants: Mapping[str, Any]) -> Floats:
        """Return the constant "numbers" with the scale in the units of the scores."""
        scale, *zeros = constants["numbers"]
        return np.asarray([scale * LOG2_E / float(self.units), *zeros], np.float32)

    def scores(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> Floats:
        """Return the scores x from the inputs q, k and optionally the mask."""
        scale, *zeros = self.numbers(constants)
        q, k, _, *masks = (load_meaning(view.dtype, x) for view, x in zip(self.inputs, inputs, strict=False))
        if self.precision == "int8":
            exact = (q.astype(np.float64) - int(zeros[0])) @ (k.astype(np.float64) - MIDDLE).swapaxes(-1, -2)
            sums: Floats = exact.astype(np.float32)
            return np.asarray(fma(sums, scale, masks[0]) if masks else sums * scale, np.float32)
        x = _product(q - np.float32(zeros[0]), (k - np.float32(zeros[1])).swapaxes(-1, -2)) * scale
        return np.asarray(x + masks[0] if masks else x, np.float32)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, v_zero = self.scores(inputs, constants), self.numbers(constants)[3]
        v, peak = load_meaning(self.v.dtype, inputs[2]), reduced_rows("max", x)
        if self.precision == "int8":
            p = np.rint(exp2(NUMPY, less_peak(x, peak) * self.units, "uint8"))
            mixed = (p.astype(np.float64) @ (v.astype(np.float64) - MIDDLE)).astype(np.float32)
            mean = mixed * share_of(peak, p.sum(-1, dtype=np.float64, keepdims=True).astype(np.float32))
            if self.mask:
                mean = mean + np.where(peak > -np.inf, np.float32(0), v_zero - np.float32(MIDDLE))
        else:
            p = exp2(NUMPY, less_peak(x, peak) * self.units, "float32")
            mean = _product(p, v - np.float32(v_zero)) * share_of(peak, reduced_rows("sum", p))
        return (store_meaning(self.y.dtype, self.program.meaning(mean, [], constants["program"])),)


def _product(a: Floats, b: Floats) -> Floats:
    """Return a @ b in float32."""
    return np.asarray(np.matmul(a, b), np.float32)
