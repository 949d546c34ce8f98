"""Window and global pools: one thread for a few channels of an output pixel.

    Pool          y[n, i, j, c] = program(max or mean of x's window)        in column-major order, as the reference
    GlobalPool    y[n, c]       = program(max or sum over all pixels)       in order

Sums of bytes are exact in float32 up to 2**24.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from infer_server.engines.backends.cuda.codegen.module import wide
from infer_server.engines.backends.cuda.kernels.access import load_channels
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import Tactic, solves
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.loops import every_address
from infer_server.engines.codegen.types import FLOAT, I32, I64
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.images import GlobalPool, Pool
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View

Sums = dict[Any, Value]


def _image_index(pixel: Value, shape: Sequence[int]) -> tuple[Value, ...]:
    """Return the item and the indices of a pixel (row and column; plane, row and column for volumes)."""
    outer, extent = math.prod(shape[1:]), math.prod(shape)
    rest = pixel.remainder(extent)
    inner = _image_index(rest, shape[1:])[1:] if len(shape) > 2 else (rest.remainder(outer),)
    return pixel.divided(extent), rest.divided(outer), *inner


@solves(Pool)
class PoolByThreads(ProgramKernel[Pool]):
    """Kernel with one thread for a few channels.

    A table per axis has, for each output index, the valid taps [first, last) and the divisor's count.
    """
    tables = 2

    @property
    def min_blocks(self) -> int:
        """Minimum of resident blocks: six leave 80 registers per thread, so that ptxas does not spill to fit more."""
        return 6

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        cuts = [(*axis.taps(i), 0) for axis in self.problem.axes for i in range(axis.outputs)]
        return (np.array(cuts, np.int32), *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, x = self.problem, self.problem.x
        item, *index = _image_index(pixel, self.y.shape[:-1])
        cuts = operands[len(problem.inputs)]
        taps = [[f.load(I32, cuts + wide(i) * 16 + (first * 16 + 4 * n), 4, "cut") for n in range(3)]
                for i, first in zip(index, accumulate(self.y.shape[:-2], initial=0), strict=True)]
        origin = [i * s - pad for i, s, pad in zip(index, problem.stride, problem.pads, strict=False)]
        base = operands[0] + wide(item) * x.item + wide(channel) * x.strides[-1]
        largest, lowest = problem.kind == "max", -math.inf if x.dtype != "uint8" else 0.0
        zero = f.constant(lowest if largest else 0.0, FLOAT)

        def window(axes: Sequence[int], at: Value) -> list[Value]:
            """Emit loops over the taps along these axes, the last axis outermost, and return the sums."""
            if not axes:
                return load_channels(self.gpu, x, at, self.each)
            *others, axis = axes
            total: Sums = dict.fromkeys(range(self.each), zero)
            for p in f.range("tap", wide(taps[axis][0]), wide(taps[axis][1]), total=total):
                position = origin[axis] + f.cast("trunc", p, I32, "p") * problem.dilation[axis]
                self._take(total, window(others, at + wide(position) * x.strides[axis]))
            return list(total.values())

        sums = window(problem.summed, base)
        sums = sums if largest else self._means(f, sums, taps)
        self.finish(operands, pixel, channel, sums, range(1, len(problem.inputs)), len(problem.inputs) + 1)

    def _take(self, into: Sums, values: Sequence[Value]) -> None:
        largest = self.problem.kind == "max"
        into.update({c: self.gpu.max(v, into[c]) if largest else into[c] + v for c, v in enumerate(values)})

    def _means(self, f: Function, sums: list[Value], taps: list[list[Value]]) -> list[Value]:
        """Divide sums by the number of taps, after adding the padded taps if these count."""
        inside = reduce(mul, (last - first for first, last, _ in taps))
        count = reduce(mul, (counted for *_, counted in taps)) if self.problem.count_include_pad else inside
        if self.problem.pad_value and self.problem.count_include_pad:
            padded = self.gpu.to_float((count - inside) * self.problem.pad_value)
            sums = [s + padded for s in sums]
        share = 1 / self.gpu.to_float(count)
        return [s * share for s in sums]


@solves(GlobalPool)
class GlobalPoolByThreads(ProgramKernel[GlobalPool]):
    """Kernel with one thread for a few channels of an item."""

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @cached_property
    def views(self) -> tuple[View, ...]:
        """View of x, then the operands and y as one row of channels."""
        x, *others = (*self.problem.inputs, *self.problem.outputs)
        return (x, *(View(view.dtype, (self.problem.channels,), (view.strides[-1] if view.shape else 0,), view.item)
                     for view in others))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        x = self.problem.x
        base = operands[0] + wide(pixel) * x.item + wide(channel) * x.strides[-1]
        (*outer, extent), (*strides, step) = ((1, *axes[:-1]) for axes in (
            self.problem.joined_view.shape, self.problem.joined_view.strides))
        run = self.problem.run
        if not run:
            sums = self._one_by_one(f, base, (*outer, extent), (*strides, step))
        else:
            total: Sums = dict.fromkeys(range(self.each), f.constant(0.0, FLOAT))
            for row in every_address(f, base, outer, strides, total=total):
                for i in f.loop("run", -(-extent // run), total=total):
                    count = (f.constant(extent, I64) - i * run).at_most(run)
                    part = self._one_by_one(f, row + i * (run * step), (count,), (step,))
                    total.update({c: total[c] + value for c, value in enumerate(part)})
            sums = list(total.values())
        self.finish(operands, pixel, channel, sums, range(1, len(self.problem.inputs)),
                    len(self.problem.inputs))

    def _one_by_one(self, f: Function, base: Value, shape: Sequence[int | Value],
                    strides: Sequence[int]) -> list[Value]:
        x, largest = self.problem.x, self.problem.kind == "max"
        start = f.constant((-math.inf if x.dtype != "uint8" else 0.0) if largest else 0.0, FLOAT)
        sums: Sums = dict.fromkeys(range(self.each), start)
        for at in every_address(f, base, shape, strides, sums=sums):
            values = load_channels(self.gpu, x, at, self.each)
            sums.update({c: self.gpu.max(v, sums[c]) if largest else sums[c] + v for c, v in enumerate(values)})
        return list(sums.values())
