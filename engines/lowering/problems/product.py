"""The matrix product of two tensors that are both computed at run time, in batches.

    y[n, ..., m, o] = program(sum over k of a[n, ..., m, k] * b[n, ..., k, o])

Leading axes may be strided (heads of a wider tensor) or repeated (strides of 0), the last two of b in either order. In
int8 the sum is of (a - za) * (b - zb), exact.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lowering.epilogue.program import EpilogueProgram, load_meaning, store_meaning
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View


@dataclass(frozen=True)
class Product(Problem):
    """Views of one item: a [..., M, K], b [..., K, N], y and the program's operands [..., M, N].

    The innermost axis of a and y is contiguous, of b it or the one before it.

    Constants: "numbers", the zero points of a and b; "program", a sequence of float32 [1] or [N].
    """
    a: View
    b: View
    y: View
    operands: tuple[View, ...]
    program: EpilogueProgram
    precision: str                  # int8, fp32, bf16, fp16
    family = "product"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.a, self.b, *self.operands)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

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
        wide: type[Any] = np.float64 if self.precision == "int8" else np.float32    # exact, as a contraction's are
        sums = np.matmul(a.astype(wide), b.astype(wide)).astype(np.float32)
        return (store_meaning(self.y.dtype, self.program.meaning(sums, operands, constants["program"])),)
