"""Softmax of the scores of a register of queries, whose sums were left in scratch memory.

    for row:  x       = scale * sum + mask      -> x, in place; the peak of each lane -> scratch
    peak    = peaks of all rows
    for row:  p       = e**(x - peak)           -> p; its sum in each lane -> scratch
    inverse = 1 / sums of all rows

The reductions over the lanes of 16 rows are one: they are transposed on the way. Rows beyond the last query hold what
scratch memory held; their results are not used.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infer_server.engines.backends.llvm.codegen.tiles import AMX
from infer_server.engines.backends.llvm.kernels.common.access import reduced_lanes
from infer_server.engines.backends.llvm.kernels.common.arithmetic import arithmetic_for
from infer_server.engines.backends.llvm.kernels.matmul.softmax import AttentionSoftmax
from infer_server.engines.backends.llvm.kernels.rows.passes import RowVector, combine, live, reduce_vectors, strips
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.row_formulas import softmax_scale
from infer_server.engines.codegen.types import I16, I32, vector
from infer_server.engines.codegen.words import Primitives
from infer_server.engines.lowering.epilogue.functions import Machine
from infer_server.engines.lowering.problems.view import SIZES

BFLOAT_ONES = 0x3F803F80        # two bfloat16 of 1
RowScores = Callable[[Value, RowVector], Value]     # (row, vector of it) -> scores


class Scaling(Primitives):
    """Primitive operations on 512 bits, whose powers of two take the instructions vreduceps and vscalefps."""
    lanes = AMX.row_bytes // 4

    def parts(self, x: Value) -> tuple[Value, Value]:
        fraction = self._masked("reduce", x, x.f.constant(0, I32))     # 0: no bits of fraction, halves to even
        return x - fraction, fraction

    def scaled(self, x: Value, n: Value) -> Value:
        return self._masked("scalef", x, n)

    def _masked(self, word: str, *operands: Value) -> Value:
        """Call an instruction that has a mask, on all lanes and in the current rounding mode."""
        f = operands[0].f
        every = f.constant(0, self.floats), f.constant(-1, I16), f.constant(4, I32)
        return f.call(self.floats, f"llvm.x86.avx512.mask.{word}.ps.512", *operands, *every, hint=word)


@dataclass(frozen=True)
class GroupSoftmax(AttentionSoftmax):
    """Softmax of as many rows as a vector has lanes."""

    @property
    def machine(self) -> Machine:
        return Scaling()

    def group_peaks(self, peaks: Value, lanes: Value, rows: Value, score: RowScores) -> None:
        """Emit the peaks of `rows` rows. lanes: scratch memory, a vector for each row."""
        f, isa = peaks.f, self.isa
        for row in f.loop("peak", rows):
            def vector_of(at: RowVector, row: Value = row) -> Value:
                return score(row, at)

            f.store(reduce_vectors(f, isa, self.keys, "max", vector_of), lanes + row * isa.bytes, isa.bytes)
        f.store(self._of_rows("max", lanes, isa.floats), peaks, isa.bytes)

    def inverses(self, peaks: Value, totals: Value, inverse: Value, rows: Value) -> None:
        f, isa = peaks.f, self.isa
        total = self._of_rows("sum", totals, isa.ints if self.exact else isa.floats)
        peak = f.load(isa.floats, peaks, isa.bytes, "peaks")
        f.store(softmax_scale(peak, isa.to_float(total) if self.exact else total), inverse, isa.bytes)

    def _floats(self, here: Value, there: Value, peak: Value) -> Value:
        """Emit p of a row in bfloat16, and sum what is stored by products of pairs with 1."""
        f, isa = here.f, self.isa
        if self.dtype != "bfloat16":
            return super()._floats(here, there, peak)
        pairs, total = arithmetic_for("bf16", isa), dict.fromkeys(range(2), f.constant(0, isa.floats))
        for _, vectors in strips(f, isa, self.keys, 2, total):
            for i, at in enumerate(vectors[::2]):
                both = [live(isa, self._power(here, peak, one), one.count, 0) for one in vectors[2 * i:2 * i + 2]]
                stored = isa.floats_to_bfloats(both[0], both[1] if len(both) == 2 else both[0].like(0))
                f.store(stored, there + at.column * SIZES[self.dtype])
                ones = f.cast("bitcast", f.constant(BFLOAT_ONES, isa.ints), vector(2 * isa.lanes, "bfloat"), "ones")
                bfloats = f.cast("bitcast", stored, ones.type, "bfloats")
                total[i % 2] = pairs.dot(isa, total[i % 2], (bfloats,), (ones,))
        return total[0] + total[1]

    def _of_rows(self, kind: str, lanes: Value, type_: str) -> Value:
        """Reduce a vector for each row in memory to one vector, which has a lane for each row."""
        size = self.isa.bytes
        rows = [lanes.f.load(type_, lanes + row * size, size, "row") for row in range(self.isa.lanes)]
        return reduced_lanes(rows, lambda a, b: combine(self.isa, kind, a, b))
