"""Pooling over whole images.

    for item: for panel of channels:          rows and columns of the grid
      for i: for j: ... acc = sum or max of acc, x

Large images of floats are summed in runs, to bound the rounding error.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import item_addresses
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    PANEL,
    finish_pixel,
    load_constants,
    pack_panels,
    panels_between,
    store_channels,
)
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.pooling.reduction import Pixel, PixelReduction
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.loops import every_address
from infer_server.engines.codegen.types import I64
from infer_server.engines.lowering.problems.images import GlobalPool
from infer_server.engines.lowering.problems.problem import Array


@solves(GlobalPool)
class GlobalPoolKernel(Kernel[GlobalPool]):
    """Kernel of global average, max and sum pooling."""
    @property
    def packed(self) -> bool:
        return self.problem.x.dtype == self.problem.y.dtype == "uint8"

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1, columns=-(-self.problem.channels // (PANEL * isa.lanes)))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, first, last) = begin_kernel(module, name, 1 + len(self.problem.operands) + 2)
        *inputs, constants, y = addresses
        for item in f.range("item", begin, end):
            at = item_addresses([*inputs, y], (*self.problem.inputs, self.problem.y), item)
            for start, channels in panels_between(f, first, last, self.problem.channels, PANEL * isa.lanes):
                self._panel(f, isa, at, constants, start, channels)

    def _panel(self, f: Function, isa: Isa, at: list[Value], constants: Value, start: Value, count: int) -> None:
        problem = self.problem
        lanes = Lanes(isa, count, self.packed)
        reduction = PixelReduction(problem.kind, problem.x.dtype, lanes)
        x, *others = (a + start * view.strides[-1] for a, view in zip(at, (*problem.inputs, problem.y), strict=True))
        *operands, y = others
        pixel = self._reduced(f, reduction, x)
        numbers = load_constants(lanes, constants + start * (4 * problem.program.constants), problem.program.constants)
        values = reduction.finish(pixel)
        result = finish_pixel(lanes, problem.program, values, problem.operands, operands, numbers)
        store_channels(lanes, problem.y, [result], [y])

    def _reduced(self, f: Function, reduction: PixelReduction, x: Value) -> Pixel:
        view = self.problem.joined_view
        shape, strides = view.shape[:-1], view.strides[:-1]
        run = self.problem.run
        if not run:
            return self._one_by_one(f, reduction, x, shape, strides)
        acc = dict(enumerate(reduction.neutral(x)))
        for row in every_address(f, x, shape[:-1], strides[:-1], acc=acc):
            for i in f.loop("run", -(-shape[-1] // run), acc=acc):
                length = (f.constant(shape[-1], I64) - i * run).at_most(run)
                part = self._one_by_one(f, reduction, row + i * (run * strides[-1]), (length,), strides[-1:])
                acc.update(enumerate(reduction.combine(list(acc.values()), part)))
        return list(acc.values())

    @staticmethod
    def _one_by_one(f: Function, reduction: PixelReduction, x: Value, shape: Sequence[int | Value],
                    strides: Sequence[int]) -> Pixel:
        acc = dict(enumerate(reduction.neutral(x)))
        for pixel in every_address(f, x, shape, strides, acc=acc):
            acc.update(enumerate(reduction.combine(list(acc.values()), reduction.load(pixel))))
        return list(acc.values())

    # ---- constants
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (pack_panels(isa, constants, self.problem.channels, self.packed),)
