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
from engines.codegen.types import ELEMENTS, I32, I64, PTR, vector
from engines.lowering.problems.elementwise import TopK

BLOCK = 64              # elements whose peak is remembered; a multiple of every machine's lanes
LOWEST = -(1 << 31)     # of the keys of 32 bits; no element has it
FAR = (1 << 31) - 1     # beyond every place


def lowest_of(bits: int) -> int:
    return -(1 << bits - 1)


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

    @property
    def bits(self) -> int:
        """Of a key."""
        return 64 if self.problem.x.dtype in TopK.wide else 32

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem, bits = self.problem, self.bits
        views, element, size = (*problem.inputs, *problem.outputs), ELEMENTS[problem.x.dtype], bits // 8
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(views))
        keys, peaks = (f.op(PTR, f"alloca [{count} x i{bits}], align {ALIGNMENT}", hint)
                       for count, hint in ((self.blocks * BLOCK, "keys"), (self.peaks, "peaks")))
        for x, *values, indices in each_row(f, begin, end, addresses, views, problem.x.shape[:-1]):
            self._make_keys(f, isa, x, keys, peaks)
            for turn in f.loop("turn", problem.indices.shape[-1]):
                block = first_of(f, isa, peaks, self.peaks, highest(f, isa, peaks, self.peaks, bits))
                start = keys + block * (size * BLOCK)
                place = first_of(f, isa, start, BLOCK, highest(f, isa, start, BLOCK, bits))
                index = block * BLOCK + place
                if problem.values:
                    value = f.load(element, x + index * problem.x.strides[-1], hint="value")
                    f.store(value, values[0] + turn * problem.values.strides[-1])
                f.store(index, indices + turn * problem.indices.strides[-1])
                f.store(f.constant(lowest_of(bits), f"i{bits}"), start + place * size)
                f.store(highest(f, isa, start, BLOCK, bits), peaks + block * size)

    def _make_keys(self, f: Function, isa: Isa, x: Value, keys: Value, peaks: Value) -> None:
        size = self.bits // 8
        if self.blocks < self.peaks:
            lowest = f.constant(lowest_of(self.bits), vector(isa.lanes, f"i{self.bits}"))
            for behind in range(self.blocks // isa.lanes * isa.lanes, self.peaks, isa.lanes):
                f.store(lowest, peaks + behind * size)
        for start, count in f.tiles("block", self.width, BLOCK):
            for first in range(0, BLOCK, isa.lanes):
                at = x + (start + first) * self.problem.x.strides[-1]
                f.store(self._keys(f, isa, at, count - first), keys + (start + first) * size)
            f.store(highest(f, isa, keys + start * size, BLOCK, self.bits), peaks + start.divided(BLOCK) * size)

    def _keys(self, f: Function, isa: Isa, address: Value, count: int) -> Value:
        """A vector of integers in the order of the elements; both zeros are one number. Past the row, the lowest."""
        bits, type_, lowest = self.bits, vector(isa.lanes, f"i{self.bits}"), lowest_of(self.bits)
        if count <= 0:
            return f.constant(lowest, type_)
        part = load(isa, self.problem.x.dtype, address, self.problem.x.strides[-1], min(count, isa.lanes))
        if part.type == type_:
            ordered = part if self.problem.largest else part.binary("xor", -1)
            ordered = f.call(type_, f"llvm.smax.v{isa.lanes}i{bits}", ordered, ordered.like(lowest + 1), hint="ordered")
        else:
            number = part + 0 if self.problem.largest else part.like(0) - part
            found = f.cast("bitcast", number, type_, "bits")
            ordered = found.binary("xor", found.binary("ashr", bits - 1).binary("and", -1 - lowest))
        return live(isa, ordered, min(count, isa.lanes), lowest)


def highest(f: Function, isa: Isa, address: Value, count: int, bits: int = 32) -> Value:
    """The greatest of `count` integers (a multiple of the lanes)."""
    type_ = vector(isa.lanes, f"i{bits}")
    best = {"best": f.constant(lowest_of(bits), type_)}
    for i in f.loop("part", count // isa.lanes, best=best):
        best["best"] = f.call(type_, f"llvm.smax.v{isa.lanes}i{bits}", best["best"],
                              f.load(type_, address + i * (isa.lanes * bits // 8), hint="keys"), hint="best")
    return f.call(f"i{bits}", f"llvm.vector.reduce.smax.v{isa.lanes}i{bits}", best["best"], hint="highest")


def first_of(f: Function, isa: Isa, address: Value, count: int, wanted: Value) -> Value:
    """Where the first of `count` integers is that is `wanted`; one is. An i64."""
    everywhere, far = f.splat(wanted, isa.lanes), f.constant(FAR, isa.ints)
    size = isa.lanes * int(wanted.type[1:]) // 8
    lanes = ", ".join(f"{I32} {lane}" for lane in range(isa.lanes))
    state = {"place": Value(f, isa.ints, f"<{lanes}>"), "found": far}
    for i in f.loop("part", count // isa.lanes, state=state):
        same = f.load(everywhere.type, address + i * size, hint="keys").compare("eq", everywhere)
        here = f.select(same, state["place"], far)
        state["found"] = f.call(isa.ints, f"llvm.smin.v{isa.lanes}i32", state["found"], here, hint="found")
        state["place"] = state["place"] + isa.lanes
    least = f.call(I32, f"llvm.vector.reduce.smin.v{isa.lanes}i32", state["found"], hint="first")
    return f.cast("zext", least, I64, "place")
