"""Epilogue program on every element: pointwise chains, casts, quantise and dequantise, broadcasts.

    for block of a row of the grid:                 about BLOCK elements
      for pixel: for panel of channels:             vectorised along the innermost axis

Axes that all views step evenly across become one. If every constant is a single number (`uniform`), a dense tensor is
thus one long run of elements.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import Lanes
from infer_server.engines.backends.llvm.kernels.common.access import ViewRuns, offset
from infer_server.engines.backends.llvm.kernels.common.pixels import (
    PANEL,
    load_channels,
    load_constants,
    pack_panels,
    run_program,
    store_channels,
)
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import joined


@solves(Pointwise)
class PointwiseKernel(Kernel[Pointwise]):
    """Kernel of pointwise chains."""
    @cached_property
    def runs(self) -> ViewRuns:
        """Return the inputs and the output as runs, on as few axes as possible."""
        problem = self.problem
        by_channel = not problem.uniform and problem.program.constants > 0
        return ViewRuns(joined((*problem.sources, problem.output), keep_last=by_channel))

    @property
    def packed(self) -> bool:
        """Return True for packed order, which makes u8 -> u8 cheap.

        From floats, one shuffle after the packs is cheaper.
        """
        views = self.runs.views
        return self.problem.output.dtype == "uint8" and all(v.dtype == "uint8" or v.strides[-1] == 0 for v in views)

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.runs.rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return self.runs.windows()

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(problem.sources) + 2)
        *inputs, constants, output = addresses
        step = 0 if problem.uniform else 4 * problem.program.constants
        self.runs.emit(f, [*inputs, output], begin, end, PANEL * isa.lanes, lambda at, start, count: self._panel(
            isa, at, constants + start * step, start, count), split_tail=step == 0)

    def _panel(self, isa: Isa, at: list[Value], constants: Value, start: Value, count: int) -> None:
        """Emit `count` channels from `start` on."""
        problem = self.problem
        lanes = Lanes(isa, count, self.packed)
        *inputs, output = self.runs.views
        *sources, target = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.runs.views, strict=True))
        operands = [load_channels(lanes, view, a) for view, a in zip(inputs, sources, strict=True)]
        if problem.uniform:        # a single number: one vector serves all
            few = load_constants(Lanes(isa, isa.lanes, False), constants, problem.program.constants)
            numbers = few * lanes.vectors
        else:
            numbers = load_constants(lanes, constants, problem.program.constants)
        store_channels(lanes, output, [run_program(lanes, problem.program, None, operands, numbers)], [target])

    # ---- constants
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        if self.problem.uniform:
            return (pack_panels(isa, constants, isa.lanes, False),)
        return (pack_panels(isa, constants, self.problem.output.shape[-1], self.packed),)
