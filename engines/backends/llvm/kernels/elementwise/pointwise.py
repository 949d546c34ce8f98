"""Pointwise chains, casts, quantise and dequantise, broadcasts: a program on every element.

    y[n, i, ..., c] = program(inputs[n, i, ..., c]; constants[c])

    for block of a row of the grid:                 about BLOCK elements
      for pixel: for panel of channels:             vectorised along the innermost axis

Axes that all views step evenly across become one; where every constant is a single number (`uniform`), a dense tensor
is thus one long run of elements.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engines.backends.llvm.codegen.ir_builder import Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import (
    PANEL,
    Runs,
    joined,
    load_channels,
    load_constants,
    offset,
    panels,
    run_program,
    store_channels,
)
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, Window, begin_kernel, pack_channels
from engines.lowering.epilogue.program import EpilogueProgram, load_meaning, store_meaning
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import FLOATS, View

INTEGERS = ("bool", "int8", "int32", "int64")       # what a Cast reads, and the condition of a Where


@dataclass(frozen=True)
class Pointwise(KernelSpec):
    """inputs and output are of one shape; an input's stride of 0 broadcasts. program.accumulator is False.

    uniform: every constant of the program is one number; otherwise they are per index of the innermost axis.
    """
    sources: tuple[View, ...]
    output: View
    program: EpilogueProgram
    uniform: bool = False
    family = "pointwise"
    computes_on = (*FLOATS, *INTEGERS)

    @property
    def inputs(self) -> tuple[View, ...]:
        return self.sources

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.output,)

    @cached_property
    def runs(self) -> Runs:
        """Inputs, then the output, on as few axes as possible."""
        return Runs(joined((*self.sources, self.output), keep_last=not self.uniform and self.program.constants > 0))

    @property
    def packed(self) -> bool:
        """Packed order makes u8 -> u8 cheap; from floats, one shuffle after the packs is cheaper."""
        views = self.runs.views
        return self.output.dtype == "uint8" and all(v.dtype == "uint8" or v.strides[-1] == 0 for v in views)

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.runs.rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return self.runs.windows()

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.sources) + 2)
        *inputs, constants, output = addresses
        step = 0 if self.uniform else 4 * self.program.constants
        self.runs.emit(f, [*inputs, output], begin, end, PANEL * isa.lanes, lambda at, start, count: self._panel(
            isa, at, constants + start * step, start, count))

    def _panel(self, isa: Isa, at: list[Value], constants: Value, start: Value, count: int) -> None:
        """`count` channels from `start` on."""
        lanes = Lanes(isa, count, self.packed)
        *inputs, output = self.runs.views
        *sources, target = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.runs.views, strict=True))
        operands = [load_channels(lanes, view, a) for view, a in zip(inputs, sources, strict=True)]
        if self.uniform:        # one number, repeated: the same lanes serve every vector
            few = load_constants(Lanes(isa, isa.lanes, False), constants, self.program.constants)
            numbers = few * lanes.vectors
        else:
            numbers = load_constants(lanes, constants, self.program.constants)
        store_channels(lanes, output, [run_program(lanes, self.program, None, operands, numbers)], [target])

    # ---- constants and meaning
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"program": a sequence of float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        if self.uniform:
            return (pack_channels(constants["program"], isa.lanes, panels(isa, isa.lanes, False)),)
        channels = self.output.shape[-1]
        return (pack_channels(constants["program"], channels, panels(isa, channels, self.packed)),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load_meaning(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        return (store_meaning(self.output.dtype, self.program.meaning(None, operands, constants["program"])),)
