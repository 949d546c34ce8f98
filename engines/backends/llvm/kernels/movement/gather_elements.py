"""Elements picked one by one.

    y[n, i, j] = x[n, i, index[n, i, j]]         along any axis of the item; the index may be repeated to y's shape

As in a lookup, a negative index counts from the end, and one beyond the axis picks its last element: a request cannot
read other memory.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I64, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import item_addresses, offset, unravel
from engines.backends.llvm.kernels.elementwise.integers import load_integers
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

TOGETHER = 8        # elements of an unrolled turn


@dataclass(frozen=True)
class Pick(KernelSpec):
    """x: y's shape but for `axis`; index: int32 or int64, of y's shape (a stride of 0 repeats)."""
    x: View
    index: View
    y: View
    axis: int
    family = "pick"
    computes_on = ELEMENTS

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.x, self.index)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

    @property
    def rows(self) -> int:
        """Of the grid, for an item."""
        return math.prod(self.y.shape[:-1])

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.rows)

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 3)
        steps = [self._steps(), self.index.strides, self.y.strides]
        for row in f.range("row", begin, end):
            at = item_addresses(addresses, (self.x, self.index, self.y), row.divided(self.rows))
            places = unravel(row.remainder(self.rows), self.y.shape[:-1])
            x, index, y = (offset(a, places, s[:-1]) for a, s in zip(at, steps, strict=True))
            for start, count in f.tiles("element", self.y.shape[-1], TOGETHER):
                self._elements([offset(a, [start], s[-1:]) for a, s in zip((x, index, y), steps, strict=True)], count)

    def _steps(self) -> tuple[int, ...]:
        """x's strides; along the axis the index says where to go."""
        return tuple(0 if axis == self.axis else stride for axis, stride in enumerate(self.x.strides))

    def _elements(self, at: list[Value], count: int) -> None:
        """`count` neighbours; at: where in x, the index and y."""
        x, index, y = at
        f, extent = x.f, self.x.shape[self.axis]
        places = load_integers(self.index, index, count)
        places = f.select(places.compare("slt", 0), places + extent, places)
        places = f.select(places.below(extent), places, places.like(extent - 1))
        element = ELEMENTS[self.x.dtype]
        for i in range(count):
            place = f.op(I64, f"extractelement {places}, i32 {i}", "place")
            source = x + place * self.x.strides[self.axis] + i * self._steps()[-1]
            f.store(f.load(element, source, hint="picked"), y + i * self.y.strides[-1])

    # ---- constants and meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, index = inputs
        extent = self.x.shape[self.axis]
        places = np.where(index < 0, index + extent, index).astype(np.uint64)
        places = np.minimum(places, np.uint64(extent - 1)).astype(np.int64)
        return (np.take_along_axis(x, places, self.axis + 1),)
