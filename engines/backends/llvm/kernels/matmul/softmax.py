"""Softmax between the two products of attention: rows of scores -> rows of p, and the factors of their weighted means.

    for row:  peak    = max of x                -> peaks
    for row:  p       = e**(x - peak)           -> p; its sum, in partial sums of each lane, -> totals
    for row:  inverse = 1 / sum of p            -> inverse

They are three loops because within a row each step waits for the one before, with a reduction over lanes at its end,
and a row is too long for out-of-order execution to reach the next one.

Bytes are summed as integers before they are narrowed.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.codegen.lanes import from_float, in_order, to_float
from infer_server.engines.backends.llvm.kernels.rows.passes import RowVector, across_lanes, live, reduce_row, strips
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.row_formulas import softmax_scale, softmax_shift
from infer_server.engines.codegen.types import FLOAT
from infer_server.engines.lowering.epilogue.functions import Machine
from infer_server.engines.lowering.problems.exp2 import LOG2_E, exp2
from infer_server.engines.lowering.problems.view import SIZES


@dataclass(frozen=True)
class AttentionSoftmax:
    """Softmax of rows of `keys` scores, `pitch` floats apart, to rows of p in `dtype`, `pitch` elements apart.

    natural: the scores are multiplied by log2(e) here; else they are in units of log 2 already.
    """
    isa: Isa
    keys: int
    pitch: int
    dtype: str
    natural: bool

    @property
    def exact(self) -> bool:
        """Return True if p are bytes."""
        return self.dtype == "uint8"

    @property
    def machine(self) -> Machine:
        """Return the machine that exponentials run on."""
        return self.isa

    def peaks(self, x: Value, peaks: Value, rows: Value) -> None:
        for row in x.f.loop("peak", rows):
            score = partial(self._score, x + row * (4 * self.pitch))
            peak = reduce_row(x.f, self.isa, self.keys, "max", score)
            x.f.store(_first(peak), peaks + row * 4)

    def weights(self, x: Value, peaks: Value, p: Value, totals: Value, rows: Value,
                each: Callable[[Value], None] = lambda row: None) -> None:
        """Emit p and its sums. each: emits code that runs before each row, for other execution units."""
        f, isa = x.f, self.isa
        for row in f.loop("weighed row", rows):
            each(row)
            here, there = x + row * (4 * self.pitch), p + row * (SIZES[self.dtype] * self.pitch)
            peak = softmax_shift(f.splat(f.load(FLOAT, peaks + row * 4, hint="peak"), isa.lanes))
            total = (self._integers if self.exact else self._floats)(here, there, peak)
            f.store(total, totals + row * isa.bytes, isa.bytes)

    def inverses(self, peaks: Value, totals: Value, inverse: Value, rows: Value) -> None:
        f, isa = peaks.f, self.isa
        for row in f.loop("inverse", rows):
            peak = f.splat(f.load(FLOAT, peaks + row * 4, hint="peak"), isa.lanes)
            parts = f.load(isa.ints if self.exact else isa.floats, totals + row * isa.bytes, isa.bytes, "parts")
            total = across_lanes(isa, "sum", parts)
            inverted = softmax_scale(peak, isa.to_float(total) if self.exact else total)
            f.store(_first(inverted), inverse + row * 4)

    # ---- one row
    def _score(self, here: Value, at: RowVector) -> Value:
        return here.f.load(self.isa.floats, here + at.column * 4, self.isa.bytes, "score")

    def _power(self, here: Value, peak: Value, at: RowVector) -> Value:
        """Return e**(score - peak), or 255 times that."""
        less = self._score(here, at) - peak
        less = less * LOG2_E if self.natural else less
        result: Value = exp2(self.machine, less, self.dtype)
        return result

    def _integers(self, here: Value, there: Value, peak: Value) -> Value:
        f, isa = here.f, self.isa
        total = {"sum": f.constant(0, isa.ints)}
        for _, vectors in strips(f, isa, self.keys, 4, total):
            for first in range(0, len(vectors), 4):
                ints = []
                for at in vectors[first:first + 4]:
                    ints.append(isa.round(self._power(here, peak, at)))
                    total["sum"] += live(isa, ints[-1], at.count, 0)
                f.store(in_order(isa, (ints * 4)[:4]), there + vectors[first].column)
        return total["sum"]

    def _floats(self, here: Value, there: Value, peak: Value) -> Value:
        f, isa = here.f, self.isa
        total = dict.fromkeys(range(2), f.constant(0, isa.floats))
        for start, vectors in strips(f, isa, self.keys, 1, total):
            for i, at in enumerate(vectors, start):
                stored = from_float(isa, self.dtype, live(isa, self._power(here, peak, at), at.count, 0))
                f.store(stored, there + at.column * SIZES[self.dtype])
                total[i % 2] += to_float(isa, self.dtype, stored)
        return total[0] + total[1]


def _first(lanes: Value) -> Value:
    return lanes.f.op(FLOAT, f"extractelement {lanes}, i32 0", "first")
