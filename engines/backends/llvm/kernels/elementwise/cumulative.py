"""Cumulative sums along an axis, of floats or of integers (in int64).

    y[n, o, i, j] = x[n, o, 0, j] + ... + x[n, o, i, j]         exclusive: without x[n, o, i, j]; reverse: from the end

    for o: for vector of j: for i: sum += x                     sums in order, so that they round as numpy's do
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import FLOAT, I64, Module, Value, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.access import item_addresses, joined, offset, unravel
from engines.backends.llvm.kernels.elementwise.integers import load_integers, store_integers
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View


@dataclass(frozen=True)
class CumulativeSum(KernelSpec):
    """x and y are of one shape and one dtype: float32, int32 or int64. `axis` is one of the item's."""
    x: View
    y: View
    axis: int
    exclusive: bool = False
    reverse: bool = False
    family = "cumulative_sum"
    computes_on = ("float32", "int32", "int64")

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.x,)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

    @cached_property
    def beside(self) -> tuple[View, ...]:
        """x and y without the axis."""
        def rest(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return numbers[:self.axis] + numbers[self.axis + 1:]
        return joined([View(v.dtype, rest(v.shape), rest(v.strides), v.item) for v in (self.x, self.y)],
                      keep_last=False)

    @property
    def outer(self) -> tuple[int, ...]:
        """The extents of `beside` that are no run of neighbours in both."""
        shape = self.beside[0].shape
        return shape[:-1] if all(v.strides[-1] == v.size for v in self.beside) else shape

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.outer))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, 2)
        run = math.prod(self.beside[0].shape) // math.prod(self.outer)
        for row in f.range("row", begin, end):
            at = item_addresses(addresses, self.beside, row.divided(math.prod(self.outer)))
            places = unravel(row.remainder(math.prod(self.outer)), self.outer)
            x, y = (offset(a, places, view.strides[:len(places)]) for a, view in zip(at, self.beside, strict=True))
            for start, count in f.tiles("element", run, isa.lanes):
                self._sums(x + start * self.x.size, y + start * self.y.size, count)

    def _sums(self, x: Value, y: Value, count: int) -> None:
        """Down the axis, for `count` neighbours."""
        f, extent, size = x.f, self.x.shape[self.axis], self.x.size
        one = View(self.x.dtype, (count,), (size,), size)
        steps = [view.strides[self.axis] * (-1 if self.reverse else 1) for view in (self.x, self.y)]
        if self.reverse:
            x, y = (a + (extent - 1) * -step for a, step in zip((x, y), steps, strict=True))
        acc = {"sum": f.constant(0, vector(count, FLOAT if self.x.dtype == "float32" else I64))}
        for i in f.loop("index", extent, acc=acc):
            before = acc["sum"]
            acc["sum"] = before + self._loaded(one, x + i * steps[0], count)
            self._stored(one, before if self.exclusive else acc["sum"], y + i * steps[1], count)

    @staticmethod
    def _loaded(view: View, address: Value, count: int) -> Value:
        if view.dtype != "float32":
            return load_integers(view, address, count)
        return address.f.load(vector(count, FLOAT), address, hint="element")

    @staticmethod
    def _stored(view: View, value: Value, address: Value, count: int) -> None:
        if view.dtype != "float32":
            store_integers(view, value, address, count)
        else:
            address.f.store(value, address)

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        axis = self.axis + 1
        x = np.flip(inputs[0], axis) if self.reverse else inputs[0]
        x = np.moveaxis(x, axis, 0)
        sums = np.add.accumulate(x, dtype=x.dtype)
        if self.exclusive:
            sums = np.concatenate([np.zeros_like(sums[:1]), sums[:-1]])
        sums = np.moveaxis(sums, 0, axis)
        return (np.ascontiguousarray(np.flip(sums, axis) if self.reverse else sums),)
