"""Kernel of an IntegerProduct: a product of bytes with run-time zero points, whose int32 sums are stored."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.kernel import begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.matmul.product import ProductEmitter, ProductKernel, Tile
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I32
from infer_server.engines.lowering.problems.matmul import MIDDLE, IntegerProduct
from infer_server.engines.lowering.problems.problem import Array


@solves(IntegerProduct)
class IntegerProductKernel(ProductKernel):
    """Product of bytes with run-time zero points; it has no constants."""
    problem: IntegerProduct

    def pack(self, isa: Isa, tactic: Tile, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return ()

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tile) -> None:
        IntegerProductEmitter(self.problem, module, name, isa, tactic).emit()


class IntegerProductEmitter(ProductEmitter):
    problem: IntegerProduct

    def _begin(self) -> tuple[Function, list[Value], list[Value]]:
        problem = self.problem
        f, (a, b, *zeros, y), bounds = begin_kernel(self.module, self.name, len(problem.inputs) + 1)
        self.numbers = self.constants = f.alloca(8, 8, "numbers")
        for i, (factor, view) in enumerate(((problem.a, problem.zero_a), (problem.b, problem.zero_b))):
            zero = f.constant(0, I32)
            if view:
                byte = f.load(I8, zeros.pop(0), hint="zero")
                zero = f.cast("zext" if view.dtype == "uint8" else "sext", byte, I32, "zero")
            if factor.dtype == "int8":
                zero = zero + MIDDLE        # int8 counts as a uint8 that is MIDDLE larger
            f.store(f.cast("sitofp", zero, FLOAT, "number"), self.numbers + 4 * i, 4)
        return f, [a, b, y], bounds

    def finish(self, lanes: Lanes, rows: int, sums: Mapping[tuple[int, int], Value],
                parameters: Mapping[str, Value]) -> None:
        f = parameters["y"].f
        for m, v in sums:
            count = min(lanes.channels - v * self.isa.lanes, self.isa.lanes)
            if count > 0:
                part = sums[m, v] if count == self.isa.lanes else f.shuffle(sums[m, v], None, range(count), "part")
                f.store(part, parameters["y"] + (m * self.problem.y.strides[-2] + v * self.isa.lanes * 4), 4)
