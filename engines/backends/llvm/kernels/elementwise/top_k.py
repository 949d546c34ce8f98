"""The k largest or smallest of a row, in order, and where they were; of equals the first.

    for block of BLOCK elements: keys[block] = x as integers of the same order; peaks[block] = max of its keys
    k times: the first block whose peak is the highest, and in it the first key that high, is the next
             (what is taken becomes the lowest key there is, and its block's peak is made anew)

A row is so read once, and each of the k costs as much as reading row / BLOCK + BLOCK elements.
"""
from __future__ import annotations

import math

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.common.access import each_row
from engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from engines.backends.llvm.kernels.rows.passes import live
from engines.codegen.ir_builder import Function, Module, Value
from engines.codegen.nest.values import load
from engines.codegen.types import ELEMENTS, I32, I64, PTR
from engines.lowering.problems.elementwise import TopK

BLOCK = 64              # elements whose peak is remembered; a multiple of every machine's lanes
LOWEST = -(1 << 31)     # of the keys; no element has it
FAR = (1 << 31) - 1     # beyond every place


@solves(TopK)
class TopKKernel(Kernel[TopK]):
    @property
    def width(self) -> int:
        return self.problem.x.shape[-1]

    @property
    def blocks(self) -> int:
        return -(-self.width // BLOCK)

    @property
    def peaks(self) -> int:
        """How many are kept: whole turns of a search."""
        return -(-self.blocks // BLOCK) * BLOCK

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        views, element = (*problem.inputs, *problem.outputs), ELEMENTS[problem.x.dtype]
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(views))
        keys, peaks = (f.op(PTR, f"alloca [{count} x i32], align {ALIGNMENT}", hint)
                       for count, hint in ((self.blocks * BLOCK, "keys"), (self.peaks, "peaks")))
        for x, *values, indices in each_row(f, begin, end, addresses, views, problem.x.shape[:-1]):
            self._make_keys(f, isa, x, keys, peaks)
            for turn in f.loop("turn", problem.indices.shape[-1]):
                block = first_of(f, isa, peaks, self.peaks, highest(f, isa, peaks, self.peaks))
                start = keys + block * (4 * BLOCK)
                place = first_of(f, isa, start, BLOCK, highest(f, isa, start, BLOCK))
                index = block * BLOCK + place
                if problem.values:
                    value = f.load(element, x + index * problem.x.strides[-1], hint="value")
                    f.store(value, values[0] + turn * problem.values.strides[-1])
                f.store(index, indices + turn * problem.indices.strides[-1])
                f.store(f.constant(LOWEST, I32), start + place * 4)
                f.store(highest(f, isa, start, BLOCK), peaks + block * 4)

    def _make_keys(self, f: Function, isa: Isa, x: Value, keys: Value, peaks: Value) -> None:
        if self.blocks < self.peaks:
            lowest = f.constant(LOWEST, isa.ints)
            for behind in range(self.blocks // isa.lanes * isa.lanes, self.peaks, isa.lanes):
                f.store(lowest, peaks + behind * 4)
        for start, count in f.tiles("block", self.width, BLOCK):
            for first in range(0, BLOCK, isa.lanes):
                at = x + (start + first) * self.problem.x.strides[-1]
                f.store(self._keys(f, isa, at, count - first), keys + (start + first) * 4)
            f.store(highest(f, isa, keys + start * 4, BLOCK), peaks + start.divided(BLOCK) * 4)

    def _keys(self, f: Function, isa: Isa, address: Value, count: int) -> Value:
        """A vector of integers in the order of the elements; both zeros are one number. Past the row, the lowest."""
        if count <= 0:
            return f.constant(LOWEST, isa.ints)
        part = load(isa, self.problem.x.dtype, address, self.problem.x.strides[-1], min(count, isa.lanes))
        if part.type == isa.ints:
            ordered = part if self.problem.largest else part.binary("xor", -1)
            ordered = f.call(isa.ints, f"llvm.smax.v{isa.lanes}i32", ordered, ordered.like(LOWEST + 1), hint="ordered")
        else:
            number = part + 0 if self.problem.largest else part.like(0) - part
            bits = f.cast("bitcast", number, isa.ints, "bits")
            ordered = bits.binary("xor", bits.binary("ashr", 31).binary("and", FAR))
        return live(isa, ordered, min(count, isa.lanes), LOWEST)


def highest(f: Function, isa: Isa, address: Value, count: int) -> Value:
    """The greatest of `count` integers (a multiple of the lanes), an i32."""
    best = {"best": f.constant(LOWEST, isa.ints)}
    for i in f.loop("part", count // isa.lanes, best=best):
        best["best"] = f.call(isa.ints, f"llvm.smax.v{isa.lanes}i32", best["best"],
                              f.load(isa.ints, address + i * isa.bytes, hint="keys"), hint="best")
    return f.call(I32, f"llvm.vector.reduce.smax.v{isa.lanes}i32", best["best"], hint="highest")


def first_of(f: Function, isa: Isa, address: Value, count: int, wanted: Value) -> Value:
    """Where the first of `count` integers is that is `wanted`; one is. An i64."""
    everywhere, far = f.splat(wanted, isa.lanes), f.constant(FAR, isa.ints)
    lanes = ", ".join(f"{I32} {lane}" for lane in range(isa.lanes))
    state = {"place": Value(f, isa.ints, f"<{lanes}>"), "found": far}
    for i in f.loop("part", count // isa.lanes, state=state):
        same = f.load(isa.ints, address + i * isa.bytes, hint="keys").compare("eq", everywhere)
        here = f.select(same, state["place"], far)
        state["found"] = f.call(isa.ints, f"llvm.smin.v{isa.lanes}i32", state["found"], here, hint="found")
        state["place"] = state["place"] + isa.lanes
    least = f.call(I32, f"llvm.vector.reduce.smin.v{isa.lanes}i32", state["found"], hint="first")
    return f.cast("zext", least, I64, "place")
