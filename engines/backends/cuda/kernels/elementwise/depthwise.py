"""Depthwise convolution: one thread for a few channels of an output pixel, taps in column-major order.

    y[n, i, j, c] = program(sum over p, q of x[n, i * stride + p * dilation, j * stride + q * dilation, c] * w[c, p, q])

INT8 sums are int32, float sums use fma in float32. Pixels shared by neighbouring threads hit the L1 cache.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.module import wide
from infer_server.engines.backends.cuda.kernels.access import WIDEST, load_stored, pixel_offset, to_float
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import Tactic, solves
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import FLOAT, I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Depthwise
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View


@solves(Depthwise)
class DepthwiseByThreads(ProgramKernel[Depthwise]):
    """Kernel with one thread for a few channels of a pixel."""
    tables = 2

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @property
    def weights(self) -> View:
        """View of one tap's weights; the table is [taps in column-major order][channels]."""
        dtype = "int8" if self.problem.precision == "int8" else "float32"
        size = 1 if dtype == "int8" else 4
        return View(dtype, (self.problem.channels,), (size,), size * self.problem.channels)

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        return [*super().vectors, (self.weights, WIDEST)]

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        weights = np.asarray(constants["weights"], self.weights.dtype)
        flat = weights.reshape(self.problem.channels, *self.problem.taps).transpose(2, 1, 0)
        return (np.ascontiguousarray(flat), *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, x, weights = self.problem, self.problem.x, self.weights
        integers, inputs = problem.precision == "int8", len(problem.inputs)
        strides = [s * n for s, n in zip(problem.stride, x.strides, strict=False)]
        base = operands[0] + pixel_offset(pixel, self.y.shape[:2], strides, x.item) + wide(channel) * x.strides[2]
        row = operands[inputs] + wide(channel) * weights.size
        acc = [f.constant(0, I32 if integers else FLOAT)] * self.each
        (rows, columns), (down, right) = problem.taps, problem.dilation
        for q in range(columns):
            for p in range(rows):
                pixels = load_stored(x, base + (p * down * x.strides[0] + q * right * x.strides[1]), self.each)
                factors = load_stored(weights, row + (q * rows + p) * weights.item, self.each)
                acc = [self._added(a, v, w) for a, v, w in zip(acc, pixels, factors, strict=True)]
        sums = [self.gpu.to_float(a) for a in acc] if integers else acc
        self.finish(operands, pixel, channel, sums, range(1, inputs), inputs + 1)

    def _added(self, acc: Value, value: Value, weight: Value) -> Value:
        f = acc.f
        if self.problem.precision == "int8":
            return acc + f.cast("zext", value, I32, "wide") * f.cast("sext", weight, I32, "wide")
        return self.gpu.fma(to_float(self.gpu, self.problem.x.dtype, value), weight, acc)
