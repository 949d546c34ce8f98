"""Global pools, and ReduceMean / ReduceSum / ReduceMax over the axes between batch and channels.

    y[n, c] = program(sum or max over all i, j, ... of x[n, i, j, ..., c])

    for item: for panel of channels:          both may be shared out: rows and columns of the grid
      for i: for j: ... acc = fold(acc, x)

A mean's 1 / count is a constant of the program. Sums of u8 are exact in int32: up to 2**23 elements.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import Lanes
from engines.backends.llvm.kernels.common.access import (
    PANEL,
    item_addresses,
    joined,
    load_channels,
    load_constants,
    panels,
    run_program,
    store_channels,
)
from engines.backends.llvm.kernels.kernel import Grid, ImageKernel, Tactic, begin_kernel, pack_channels
from engines.backends.llvm.kernels.pooling.reduction import Fold
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array


@dataclass(frozen=True)
class GlobalPool(ImageKernel):
    """kind: "max" or "sum". x: [..., channels]; y and the operands: any shape of as many elements, channels last."""
    kind: str
    family = "global_pool"

    @property
    def channels(self) -> int:
        return self.x.shape[-1]

    @property
    def packed(self) -> bool:
        return self.y.dtype == "uint8" and self.x.dtype == "uint8"

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1, columns=-(-self.channels // (PANEL * isa.lanes)))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, first, last) = begin_kernel(module, name, 1 + len(self.operands) + 2)
        *inputs, constants, y = addresses
        width = PANEL * isa.lanes
        whole, tail = divmod(self.channels, width)
        for item in f.range("item", begin, end):
            at = item_addresses([*inputs, y], (*self.inputs, self.y), item)
            if whole:
                for panel in f.range("panel", first, last.at_most(whole)):
                    self._panel(f, isa, at, constants, panel * width, width)
            if tail:
                with f.when(last.compare("ugt", whole)):
                    self._panel(f, isa, at, constants, last.like(whole * width), tail)

    def _panel(self, f: Function, isa: Isa, at: list[Value], constants: Value, start: Value, count: int) -> None:
        lanes = Lanes(isa, count, self.packed)
        fold = Fold(self.kind, self.x.dtype, lanes)
        x, *others = (a + start * view.strides[-1] for a, view in zip(at, (*self.inputs, self.y), strict=True))
        *operands, y = others
        acc = dict(enumerate(fold.neutral(x)))
        places, = joined((self.x,), keep_last=True)
        for pixel in _every(f, x, places.shape[:-1], places.strides[:-1], acc):
            acc.update(enumerate(fold.combine(list(acc.values()), fold.load(pixel))))
        numbers = load_constants(lanes, constants + start * (4 * self.program.constants), self.program.constants)
        values = [load_channels(lanes, view, a) for view, a in zip(self.operands, operands, strict=True)]
        result = run_program(lanes, self.program, fold.finish(list(acc.values())), values, numbers)
        store_channels(lanes, self.y, [result], [y])

    # ---- constants and meaning
    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"program": a sequence of float32 [1] or [channels] -> [panel][constant][vector][lane]."""
        return (pack_channels(constants["program"], self.channels, panels(isa, self.channels, self.packed)),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        pixels = x.reshape(len(x), -1, self.channels)
        wide: Any = pixels.astype(np.int64) if x.dtype == np.uint8 else load_meaning(self.x.dtype, pixels)
        # One after the other, as the kernel adds; numpy's sum would pair them.
        accumulator = wide.max(1) if self.kind == "max" else np.add.accumulate(wide, 1)[:, -1]
        shape = (len(x), *self.y.shape)
        others = [load_meaning(view.dtype, operand) for view, operand in zip(self.operands, operands, strict=True)]
        result = self.program.meaning(accumulator.astype(np.float32).reshape(shape), others, constants["program"])
        return (store_meaning(self.y.dtype, result),)


def _every(f: Function, address: Value, shape: Sequence[int], strides: Sequence[int],
           acc: dict[int, Value]) -> Iterator[Value]:
    """The address of every pixel, in nested loops that carry acc."""
    if not shape:
        yield address
        return
    for i in f.loop("pixel", shape[0], acc=acc):
        yield from _every(f, address + i * strides[0], shape[1:], strides[1:], acc)
