"""Split attention: one block per query and slice of keys, and a combination with one thread per few columns."""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from infer_server.engines.backends.cuda.codegen.gpu import WARP, Gpu
from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.cost import LAUNCH, Card
from infer_server.engines.backends.cuda.kernels.access import load_stored
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.matmul import one_query
from infer_server.engines.backends.cuda.kernels.matmul.one_query import LanePartition, OneQuery, partition_of
from infer_server.engines.backends.cuda.kernels.matmul.partial_attention import (
    AttentionPeaks,
    AttentionSums,
    JoinedAttention,
)
from infer_server.engines.backends.cuda.kernels.matmul.powers import power
from infer_server.engines.backends.cuda.kernels.matmul.query_tiles import mean_of
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.row_formulas import is_unmasked, softmax_scale, softmax_shift
from infer_server.engines.codegen.types import ELEMENTS, FLOAT
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.lowering.problems.view import View

WARPS = 4               # per block

P = TypeVar("P", bound=AttentionPeaks | AttentionSums)


class _ByParts(GpuKernel[P]):
    """Kernel with one block per query and slice, over all heads and items."""

    @cached_property
    def cut(self) -> LanePartition:
        return partition_of(self.problem.whole, self.aligned, WARPS)

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.peaks.shape), 1, WARPS * WARP, shared_bytes=self.cut.shared_bytes)

    def cost(self, tactic: Tactic, card: Card, items: int) -> float:
        """Estimate a launch; in INT8 peaks and sums each take half of the whole attention."""
        rows = math.prod(self.problem.peaks.shape) * items
        whole = one_query.seconds(self.problem.whole, self.cut, card, rows, items, self.problem.parts) - LAUNCH
        return whole / (2 if self.problem.integers else 1) + LAUNCH

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (self.problem.whole.numbers(constants),)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, inputs = self.problem, len(self.problem.inputs)
        _, operands, rows = begin_kernel(module, name, WARPS * WARP, inputs + 1 + len(problem.outputs))
        block, thread = special_register(rows.f, "ctaid.x"), special_register(rows.f, "tid.x")
        row = block.at_most(rows - 1)
        query = OneQuery(problem.whole, self.gpu, self.cut,
                         [*operands[:len(problem.whole.inputs)], operands[inputs]], row.divided(problem.parts), thread,
                         row.remainder(problem.parts) * problem.keys, problem.keys)
        self.write(query, row, operands[inputs - 1], operands[inputs + 1:], block.below(rows))

    @abstractmethod
    def write(self, query: OneQuery, row: Value, last: Value, results: Sequence[Value], valid: Value) -> None:
        """Emit the code after the query's setup. `last` is the address of the last input."""

    def store(self, query: OneQuery, value: Value, row: Value, valid: Value, to: Value) -> None:
        """Store a value of the row by the first thread."""
        with query.f.when(valid & query.thread.compare("eq", 0)):
            query.f.store(value, to + wide(row) * 4, 4)


@solves(AttentionPeaks)
class PeaksOfParts(_ByParts[AttentionPeaks]):
    """Kernel of the slices' maxima."""

    def write(self, query: OneQuery, row: Value, last: Value, results: Sequence[Value], valid: Value) -> None:
        self.store(query, query.peak(), row, valid, results[0])


@solves(AttentionSums)
class SumsOfParts(_ByParts[AttentionSums]):
    """Kernel of the slices' sums."""

    def write(self, query: OneQuery, row: Value, last: Value, results: Sequence[Value], valid: Value) -> None:
        sums, totals, *peaks = results
        if self.problem.integers:
            total, columns = query.bytes_below(_largest(self.gpu, self.problem.parts, last, query.row))
        else:
            peak, total, columns = query.floats()
            self.store(query, peak, row, valid, peaks[0])
        self.store(query, total, row, valid, totals)
        query.store_sums(self.problem.sums, self.aligned[len(self.problem.inputs)], sums, row, columns, valid)


@solves(JoinedAttention)
class JoinedByThread(ProgramKernel[JoinedAttention]):
    """Kernel that combines the slices, one thread for a few columns."""
    tables = 2

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        (sums, base), *_, y = super().vectors
        return [(sums, base), y]

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return scale and zero points, then the program's constants."""
        return (self.problem.whole.numbers(constants), *super().pack(tactic, constants))

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, gpu, whole = self.problem, self.gpu, self.problem.whole
        sums_at, totals_at, peaks_at, numbers, *_ = operands
        element = ELEMENTS[problem.totals.dtype]
        peak = _largest(gpu, problem.parts, peaks_at, pixel)
        acc = dict.fromkeys(range(-1, self.each), f.constant(0, element))
        for turn in f.loop("part", problem.parts, acc=acc):
            row = wide(pixel * problem.parts) + turn
            at = sums_at + (row * problem.y.shape[-1] + wide(channel)) * 4
            found = [f.load(element, totals_at + row * 4, 4, "total"), *load_stored(problem.sums, at, self.each)]
            if not problem.integers:
                less = power(gpu, whole, f.load(FLOAT, peaks_at + row * 4, 4, "peak"), softmax_shift(peak))
                found = [value * less for value in found]
            acc.update({n: before + more for (n, before), more in zip(acc.items(), found, strict=True)})
        total, *columns = acc.values()
        part = softmax_scale(peak, gpu.to_float(total) if problem.integers else total)
        v_zero = f.load(FLOAT, numbers + 12, 4, "number")
        means = [mean_of(gpu, whole, value, part, is_unmasked(peak), v_zero) for value in columns]
        self.finish(operands, pixel, channel, means, (), 4)


def _largest(gpu: Gpu, parts: int, peaks: Value, query: Value) -> Value:
    """Return the maximum over a query's slices."""
    f, peak = query.f, {"": query.f.constant(-math.inf, FLOAT)}
    for part in f.loop("peak", parts, peak=peak):
        at = peaks + (wide(query * parts) + part) * 4
        peak[""] = gpu.larger(peak[""], f.load(FLOAT, at, 4, "peak"))
    return peak[""]
