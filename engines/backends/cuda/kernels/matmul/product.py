"""The product of two run-time tensors: a thread for a few neighbouring outputs, over all of K.

    y[n, ..., m, o] = program(sum over k of (a[n, ..., m, k] - za) * (b[n, ..., k, o] - zb))

INT8 in int32, exact; floats by fma in float32. It reads through the caches: tiles in shared memory and tensor cores, as
a contraction has them, are still to come.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import wide
from engines.backends.cuda.kernels.access import offset_in, pixel_offset, to_float
from engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from engines.backends.cuda.kernels.kernel import Tactic, solves
from engines.codegen.ir_builder import Function, Value
from engines.codegen.types import ELEMENTS, FLOAT, I32
from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.matmul import Product
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View


@solves(Product)
class ProductByThreads(ProgramKernel[Product]):
    tables = 2

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        return list(super().vectors)[2:]

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """The zero points, then the program's constants."""
        return (np.asarray(constants["numbers"], np.float32), *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, gpu, inputs = self.problem, self.gpu, len(self.problem.inputs)
        a, b, integers = problem.a, problem.b, problem.precision == "int8"
        row = operands[0] + offset_in(a, pixel)
        matrix = pixel.divided(problem.y.shape[-2])
        column = operands[1] + pixel_offset(matrix, b.shape[:-2], b.strides[:-2], b.item)
        column = column + wide(channel) * b.strides[-1]
        zeros = [f.load(FLOAT, operands[inputs] + 4 * n, 4, "zero") for n in (0, 1)]
        if integers:
            zeros = [gpu.round(zero) for zero in zeros]
        acc = dict.fromkeys(range(self.each), f.constant(0, I32 if integers else FLOAT))
        for k in f.loop("k", problem.depth, acc=acc):
            factor = load_factor(gpu, a, row + k * a.strides[-1], zeros[0], integers)
            for c in acc:
                at = column + k * b.strides[-2] + c * b.strides[-1]
                acc[c] = added(gpu, acc[c], factor, load_factor(gpu, b, at, zeros[1], integers))
        sums = [gpu.to_float(s) if integers else s for s in acc.values()]
        self.finish(operands, pixel, channel, sums, range(2, inputs), inputs + 1)


def load_factor(gpu: Gpu, view: View, address: Value, zero: Value | int, integers: bool) -> Value:
    """An element less its zero point, as it is multiplied: an i32, or a float."""
    f = address.f
    stored = f.load(ELEMENTS[view.dtype], address, view.size, "stored")
    if integers:
        return f.cast("zext", stored, I32, "wide") - zero
    return to_float(gpu, view.dtype, stored) - zero


def added(gpu: Gpu, acc: Value, a: Value, b: Value) -> Value:
    """acc + a * b"""
    return acc + a * b if acc.type == I32 else gpu.fma(a, b, acc)
