"""Runs of elements picked by index, and copied.

    Take     y[n, o, i, :] = x[n, o, index[i], :]       the index is a constant: Gather, Slice backwards, channel orders
    Lookup   y[n, i, :] = table[index[n, i], :]         the table is a constant: embeddings
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I64, Function, Module, Value
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import copy_bytes, item_addresses, joined, offset, unravel
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, Window, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import SIZES, View

CHUNK = 16      # vectors of an unrolled copy


@dataclass(frozen=True)
class Take(KernelSpec):
    """x and y have the same shape but for `axis`; the axes behind it are dense in both."""
    x: View
    y: View
    axis: int
    family = "take"
    computes_on = SIZES     # it moves bytes

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.x,)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

    @property
    def run(self) -> int:
        """Bytes of what one index picks."""
        return self.x.size * math.prod(self.x.shape[self.axis + 1:])

    @cached_property
    def outer(self) -> tuple[View, View]:
        """x and y without the axes that are picked and copied."""
        x, y = joined([View(v.dtype, (*v.shape[:self.axis], 1), (*v.strides[:self.axis], 0), v.item)
                       for v in (self.x, self.y)], keep_last=True)
        return x, y

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.outer[0].shape))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        if not self.axis:
            return super().windows(isa, tactic)
        rows = math.prod(self.x.shape[1:self.axis])
        return [Window.along(view, rows=rows) for view in (self.x, self.y)]

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (source, places, target), (begin, end, *_) = begin_kernel(module, name, 3)
        shape = self.outer[0].shape[:-1]
        for row in f.range("row", begin, end):
            at = item_addresses([source, target], self.outer, row.divided(math.prod(shape)))
            indices = unravel(row.remainder(math.prod(shape)), shape)
            x, y = (offset(a, indices, view.strides[:-1]) for a, view in zip(at, self.outer, strict=True))
            for i in f.loop("index", self.y.shape[self.axis]):
                _copy_run(f, isa, x + f.load(I64, places + i * 8), y + i * self.y.strides[self.axis], self.run)

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"index": ints of x's axis, one for each of y's; negative ones count from the end."""
        index = np.asarray(constants["index"], np.int64) % self.x.shape[self.axis]
        return (index * self.x.strides[self.axis],)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (np.take(inputs[0], np.asarray(constants["index"]), self.axis + 1),)


@dataclass(frozen=True)
class Lookup(KernelSpec):
    """index: any shape of int32 or int64; y: the same and the innermost axis of the table, dense.

    A negative index counts from the end; one beyond the table picks its last row: a request cannot read other memory.
    """
    index: View
    y: View
    rows: int           # of the table
    family = "lookup"
    computes_on = SIZES     # it moves bytes

    @property
    def inputs(self) -> tuple[View, ...]:
        return (self.index,)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.y,)

    @property
    def run(self) -> int:
        """Bytes of a row of the table."""
        return self.y.size * self.y.shape[-1]

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.index.shape))

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        rows = math.prod(self.index.shape[1:])
        return [Window.along(view, rows=rows) if self.index.shape else Window.whole(view)
                for view in (self.index, self.y)]

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, (index, table, y), (begin, end, *_) = begin_kernel(module, name, 3)
        shape = self.index.shape
        for row in f.range("row", begin, end):
            places = unravel(row.remainder(math.prod(shape)), shape)
            item = row.divided(math.prod(shape))
            place = offset(index + item * self.index.item, places, self.index.strides)
            stored = f.load(ELEMENTS[self.index.dtype], place, hint="stored")
            wide = stored if stored.type == I64 else f.cast("sext", stored, I64, "index")
            wide = f.select(wide.compare("slt", 0), wide + self.rows, wide)
            target = offset(y + item * self.y.item, places, self.y.strides[:-1])
            _copy_run(f, isa, table + wide.at_most(self.rows - 1) * self.run, target, self.run)

    def pack(self, isa: Isa, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"table": [rows, width], as it is stored."""
        return (np.ascontiguousarray(constants["table"]),)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        index = inputs[0].astype(np.int64)
        index = np.where(index < 0, index + self.rows, index).astype(np.uint64)
        return (np.asarray(constants["table"])[np.minimum(index, np.uint64(self.rows - 1)).astype(np.int64)],)


def _copy_run(f: Function, isa: Isa, source: Value, target: Value, count: int) -> None:
    for start, size in f.tiles("run", count, CHUNK * isa.bytes):
        copy_bytes(isa, source + start, target + start, size)
