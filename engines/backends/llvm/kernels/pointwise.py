"""Pointwise chains, casts, quantise and dequantise, broadcasts: a program on every element.

    y[n, i, ..., c] = program(inputs[n, i, ..., c]; constants[c])

    for block of a row of the grid:                 about BLOCK elements
      for pixel: for panel of channels:             vectorised along the innermost axis

Axes that all views step evenly across become one; where every constant is a single number (`uniform`), a dense tensor
is thus one long run of elements.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engines.backends.llvm.access import (
    PANEL,
    item_addresses,
    joined,
    load_channels,
    load_constants,
    offset,
    panels,
    run_program,
    store_channels,
    unravel,
)
from engines.backends.llvm.emit import Function, Module, Value
from engines.backends.llvm.isa import Isa
from engines.backends.llvm.lanes import Lanes
from engines.backends.llvm.program import Program, load_meaning, store_meaning
from engines.backends.llvm.spec import Array, Grid, KernelSpec, Tactic, View, begin_kernel, pack_channels

BLOCK = 1 << 13     # elements of a row of the grid: enough to pay for its call, few enough to share out


@dataclass(frozen=True)
class Pointwise(KernelSpec):
    """inputs and output are of one shape; an input's stride of 0 broadcasts. program.accumulator is False.

    uniform: every constant of the program is one number; otherwise they are per index of the innermost axis.
    """
    sources: tuple[View, ...]
    output: View
    program: Program
    uniform: bool = False
    family = "pointwise"

    @property
    def inputs(self) -> tuple[View, ...]:
        return self.sources

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.output,)

    @property
    def macs(self) -> int:
        return 0

    # ---- how the elements are cut
    @cached_property
    def views(self) -> tuple[View, ...]:
        """Inputs, then the output, on as few axes as possible."""
        return joined((*self.sources, self.output), keep_last=not self.uniform)

    @property
    def channels(self) -> int:
        return self.views[-1].shape[-1]

    @property
    def block(self) -> int:
        """Pixels of a row of the grid, or elements where the tensor is one run."""
        shape = self.views[-1].shape
        if len(shape) == 1:
            return min(BLOCK, shape[0])
        return min(max(BLOCK // shape[-1], 1), shape[-2])

    @property
    def blocks(self) -> int:
        shape = self.views[-1].shape
        return -(-shape[max(len(shape) - 2, 0)] // self.block)

    @property
    def packed(self) -> bool:
        """Packed order makes u8 -> u8 cheap; from floats, one shuffle after the packs is cheaper."""
        return self.output.dtype == "uint8" and all(v.dtype == "uint8" or v.strides[-1] == 0 for v in self.views)

    def tactics(self, isa: Isa) -> Sequence[Tactic]:
        return (Tactic(),)

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.views[-1].shape[:-2]) * self.blocks)

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.sources) + 2)
        *inputs, constants, output = addresses
        shape = self.views[-1].shape
        outer = shape[:-2]
        rows = math.prod(outer) * self.blocks
        for row in f.range("row", begin, end):
            at = item_addresses([*inputs, output], self.views, row.divided(rows))
            *places, block = unravel(row.remainder(rows), (*outer, self.blocks)) if outer else [row.remainder(rows)]
            at = [offset(a, places, view.strides[:len(outer)]) for a, view in zip(at, self.views, strict=True)]
            first = block * self.block
            if len(shape) == 1:
                self._run(f, isa, at, constants, first)
                continue
            last = (first + self.block).at_most(shape[-2])
            for pixel in f.range("pixel", first, last):
                here = [offset(a, [pixel], [view.strides[-2]]) for a, view in zip(at, self.views, strict=True)]
                for start, count in f.tiles("channel", self.channels, PANEL * isa.lanes):
                    self._panel(isa, here, constants + start * self._constants_step, start, count)

    def _run(self, f: Function, isa: Isa, at: list[Value], constants: Value, first: Value) -> None:
        """Elements first .. first + block of one long run."""
        extent, width = self.channels, PANEL * isa.lanes
        last = (first + self.block).at_most(extent - extent % width)
        for start in f.range("element", first, last, width):
            self._panel(isa, at, constants + start * self._constants_step, start, width)
        if extent % width:
            with f.when((first + self.block).compare("uge", extent)):
                start = first.like(extent - extent % width)
                self._panel(isa, at, constants + start * self._constants_step, start, extent % width)

    @property
    def _constants_step(self) -> int:
        """Bytes of constants of a channel."""
        return 0 if self.uniform else 4 * self.program.constants

    def _panel(self, isa: Isa, at: list[Value], constants: Value, start: Value, count: int) -> None:
        """`count` channels from `start` on."""
        lanes = Lanes(isa, count, self.packed)
        here = [offset(a, [start], [view.strides[-1]]) for a, view in zip(at, self.views, strict=True)]
        operands = [load_channels(lanes, view, a) for view, a in zip(self.views[:-1], here[:-1], strict=True)]
        if self.uniform:        # one number, repeated: the same lanes serve every vector
            few = load_constants(Lanes(isa, isa.lanes, False), constants, self.program.constants)
            numbers = few * lanes.vectors
        else:
            numbers = load_constants(lanes, constants, self.program.constants)
        store_channels(lanes, self.views[-1], [run_program(lanes, self.program, None, operands, numbers)], here[-1:])

    # ---- constants and meaning
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"program": a sequence of float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        if self.uniform:
            return (pack_channels(constants["program"], isa.lanes, panels(isa, isa.lanes, False)),)
        return (pack_channels(constants["program"], self.channels, panels(isa, self.channels, self.packed)),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load_meaning(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        return (store_meaning(self.output.dtype, self.program.meaning(None, operands, constants["program"])),)
