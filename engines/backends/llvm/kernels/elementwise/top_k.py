"""TopK: the k largest or smallest elements of a row in order, and their indices; the first of equal ones comes first.

    for block of BLOCK elements: keys[block] = sortable integers of x; peaks[block] = max of its keys
    while there are more than FEW peaks: for block of BLOCK peaks: their peaks = max of them, a level above
    k times: from the highest level down, find the first block with the highest peak, and in it the first such key; that
             is the next result. Its key becomes the lowest there is, and the peaks above it are updated

So a row is read once, and each of the k results costs as much as reading FEW + BLOCK * levels numbers. A result lies in
one of the k first blocks in the order of their peaks. If a row is too wide to store all keys, the keys of a block are
computed when it is first searched, and there is memory for those of k blocks.

For k = 1 the result is found in registers: each lane holds the highest key that it has seen and its index, and the
first of the lanes' highest wins.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import each_row
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.backends.llvm.kernels.rows.passes import live
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.keys import key_of, lowest_of
from infer_server.engines.codegen.nest.values import load
from infer_server.engines.codegen.types import ELEMENTS, I32, I64, PTR, vector
from infer_server.engines.lowering.problems.elementwise import TopK

BLOCK = 64              # elements of a block; a multiple of every machine's lanes
FEW = 8 * BLOCK         # most peaks that are searched linearly
MOST_KEYS = 1 << 18     # most 32-bit keys of a row that are kept on the stack for any k
LOWEST = -(1 << 31)     # lowest 32-bit key, which no element has
FAR = (1 << 31) - 1     # greater than every index


@solves(TopK)
class TopKKernel(Kernel[TopK]):
    """Kernel of TopK."""
    @property
    def width(self) -> int:
        return self.problem.x.shape[-1]

    @property
    def blocks(self) -> int:
        return -(-self.width // BLOCK)

    @property
    def peaks(self) -> list[int]:
        """Return the number of peaks in memory at each level, rounded up to whole iterations of a search."""
        counts = [-(-self.blocks // BLOCK) * BLOCK]
        while counts[-1] > FEW:
            counts.append(-(-counts[-1] // BLOCK // BLOCK) * BLOCK)
        return counts

    @property
    def stored_blocks(self) -> int:
        """Return the number of blocks whose keys have memory."""
        if self.width <= MOST_KEYS * 32 // self.bits:
            return self.blocks
        return min(self.blocks, self.problem.indices.shape[-1])

    @property
    def bits(self) -> int:
        """Return the width of a key in bits."""
        return 64 if self.problem.x.dtype in TopK.wide else 32

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        views = (*problem.inputs, *problem.outputs)
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(views))
        if problem.indices.shape[-1] == 1:
            for x, *values, indices in each_row(f, begin, end, addresses, views, problem.x.shape[:-1]):
                self._store(x, self._greatest(f, isa, x), values, indices)
            return
        self._largest(f, isa, addresses, begin, end)

    def _store(self, x: Value, index: Value, values: Sequence[Value], indices: Value) -> None:
        """Store one result: its index, and its value if the problem has values."""
        f, element = x.f, ELEMENTS[self.problem.x.dtype]
        for target in values:
            f.store(f.load(element, x + index * self.problem.x.strides[-1], hint="value"), target)
        f.store(index, indices)

    def _greatest(self, f: Function, isa: Isa, x: Value) -> Value:
        """Return the index of the first highest key of a row."""
        lowest = f.constant(lowest_of(self.bits), vector(isa.lanes, f"i{self.bits}"))
        state = {"best": lowest, "place": f.constant(0, isa.ints), "here": lane_numbers(f, isa)}
        for start, count in f.tiles("part", self.width, isa.lanes, state=state):
            keys = self._keys(f, isa, x + start * self.problem.x.strides[-1], count)
            higher = keys.compare("sgt", state["best"])
            # smax keeps the dependency chain at one instruction; a select would also wait for the comparison.
            state["best"] = f.call(keys.type, f"llvm.smax.v{isa.lanes}i{self.bits}", state["best"], keys, hint="best")
            state["place"] = f.select(higher, state["here"], state["place"])
            state["here"] = state["here"] + isa.lanes
        best = f.call(f"i{self.bits}", f"llvm.vector.reduce.smax.v{isa.lanes}i{self.bits}", state["best"], hint="best")
        highest_lanes = state["best"].compare("eq", f.splat(best, isa.lanes))
        positions = f.select(highest_lanes, state["place"], f.constant(FAR, isa.ints))
        first = f.call(I32, f"llvm.vector.reduce.smin.v{isa.lanes}i32", positions, hint="first")
        return f.cast("zext", first, I64, "place")

    def _largest(self, f: Function, isa: Isa, addresses: Sequence[Value], begin: Value, end: Value) -> None:
        problem, bits, size = self.problem, self.bits, self.bits // 8
        views = (*problem.inputs, *problem.outputs)
        keys, *peaks = (f.op(PTR, f"alloca [{count} x i{bits}], align {ALIGNMENT}", hint)
                        for count, hint in ((self.stored_blocks * BLOCK, "keys"), *((n, "peaks") for n in self.peaks)))
        slots = f.alloca(4 * (self.blocks + 1), ALIGNMENT, "slots") if self.stored_blocks < self.blocks else None
        for x, *values, indices in each_row(f, begin, end, addresses, views, problem.x.shape[:-1]):
            self._make_peaks(f, isa, x, keys, peaks)
            if slots:
                for i in f.loop("slot", self.blocks + 1):
                    f.store(f.constant(0, I32), slots + i * 4)
            for turn in f.loop("turn", problem.indices.shape[-1]):
                value = highest(f, isa, peaks[-1], self.peaks[-1], bits)
                position = first_of(f, isa, peaks[-1], self.peaks[-1], value)
                for below in reversed(peaks[:-1]):
                    position = position * BLOCK + first_of(f, isa, below + position * (size * BLOCK), BLOCK, value)
                block = self._slot(isa, x, keys, slots, position) if slots else position
                start = keys + block * (size * BLOCK)
                inside = first_of(f, isa, start, BLOCK, value)
                self._store(x, position * BLOCK + inside,
                            [a + turn * v.strides[-1] for a, v in zip(values, problem.outputs, strict=False)],
                            indices + turn * problem.indices.strides[-1])
                f.store(f.constant(lowest_of(bits), f"i{bits}"), start + inside * size)
                for above in peaks:
                    f.store(highest(f, isa, start, BLOCK, bits), above + position * size)
                    position = position.divided(BLOCK)
                    start = above + position * (size * BLOCK)

    def _make_peaks(self, f: Function, isa: Isa, x: Value, keys: Value, peaks: Sequence[Value]) -> None:
        """Compute the keys of all blocks (overwriting each other if memory is short) and the peaks of every level."""
        size, late = self.bits // 8, self.stored_blocks < self.blocks
        self._fill(f, isa, peaks[0], self.blocks, self.peaks[0])
        for start, count in f.tiles("block", self.width, BLOCK):
            target = keys if late else keys + start * size
            self._make_keys(f, isa, x + start * self.problem.x.strides[-1], count, target)
            f.store(highest(f, isa, target, BLOCK, self.bits), peaks[0] + start.divided(BLOCK) * size)
        for below, above, count, capacity in zip(peaks, peaks[1:], self.peaks, self.peaks[1:], strict=False):
            self._fill(f, isa, above, count // BLOCK, capacity)
            for i in f.loop("peak", count // BLOCK):
                f.store(highest(f, isa, below + i * (size * BLOCK), BLOCK, self.bits), above + i * size)

    def _fill(self, f: Function, isa: Isa, peaks: Value, count: int, capacity: int) -> None:
        """Fill the memory after `count` peaks with the lowest key."""
        if count < capacity:
            lowest = f.constant(lowest_of(self.bits), vector(isa.lanes, f"i{self.bits}"))
            for behind in range(count // isa.lanes * isa.lanes, capacity, isa.lanes):
                f.store(lowest, peaks + behind * (self.bits // 8))

    def _slot(self, isa: Isa, x: Value, keys: Value, slots: Value, block: Value) -> Value:
        """Return the position of a block's keys in memory; compute the keys if they are not there yet.

        slots: the number of positions in use, then for each block its position, counted from 1.
        """
        f, whole, bytes_ = x.f, self.width // BLOCK, BLOCK * self.bits // 8
        at = slots + (block + 1) * 4
        with f.when(f.load(I32, at, hint="slot").compare("eq", 0)):
            made = f.load(I32, slots, hint="made")
            f.store(made + 1, slots)
            f.store(made + 1, at)
            source = x + block * (BLOCK * self.problem.x.strides[-1])
            target = keys + f.cast("zext", made, I64, "to") * bytes_
            with f.when(block.below(whole)):
                self._make_keys(f, isa, source, BLOCK, target)
            if self.width % BLOCK:
                with f.when(block.compare("eq", whole)):
                    self._make_keys(f, isa, source, self.width % BLOCK, target)
        return f.cast("zext", f.load(I32, at, hint="slot"), I64, "slot") - 1

    def _make_keys(self, f: Function, isa: Isa, x: Value, count: int, target: Value) -> None:
        """Store the keys of a block of so many elements."""
        for first in range(0, BLOCK, isa.lanes):
            keys = self._keys(f, isa, x + first * self.problem.x.strides[-1], count - first)
            f.store(keys, target + first * (self.bits // 8))

    def _keys(self, f: Function, isa: Isa, address: Value, count: int) -> Value:
        """Return a vector of the elements' keys; past the row, the lowest key."""
        lowest = lowest_of(self.bits)
        if count <= 0:
            return f.constant(lowest, vector(isa.lanes, f"i{self.bits}"))
        part = load(isa, self.problem.x.dtype, address, self.problem.x.strides[-1], min(count, isa.lanes))
        return live(isa, key_of(part, self.problem.largest), min(count, isa.lanes), lowest)


def highest(f: Function, isa: Isa, address: Value, count: int, bits: int = 32) -> Value:
    """Return the greatest of `count` integers, a multiple of the lanes."""
    type_ = vector(isa.lanes, f"i{bits}")
    best = {"best": f.constant(lowest_of(bits), type_)}
    for i in f.loop("part", count // isa.lanes, best=best):
        best["best"] = f.call(type_, f"llvm.smax.v{isa.lanes}i{bits}", best["best"],
                              f.load(type_, address + i * (isa.lanes * bits // 8), hint="keys"), hint="best")
    return f.call(f"i{bits}", f"llvm.vector.reduce.smax.v{isa.lanes}i{bits}", best["best"], hint="highest")


def lane_numbers(f: Function, isa: Isa) -> Value:
    """Return the vector 0, 1, 2, ..."""
    return Value(f, isa.ints, f"<{', '.join(f'{I32} {lane}' for lane in range(isa.lanes))}>")


def first_of(f: Function, isa: Isa, address: Value, count: int, value: Value) -> Value:
    """Return the index, an i64, of the first of `count` integers that equals `value`; one of them does."""
    everywhere, far = f.splat(value, isa.lanes), f.constant(FAR, isa.ints)
    size = isa.lanes * int(value.type[1:]) // 8
    state = {"place": lane_numbers(f, isa), "found": far}
    for i in f.loop("part", count // isa.lanes, state=state):
        same = f.load(everywhere.type, address + i * size, hint="keys").compare("eq", everywhere)
        here = f.select(same, state["place"], far)
        state["found"] = f.call(isa.ints, f"llvm.smin.v{isa.lanes}i32", state["found"], here, hint="found")
        state["place"] = state["place"] + isa.lanes
    least = f.call(I32, f"llvm.vector.reduce.smin.v{isa.lanes}i32", state["found"], hint="first")
    return f.cast("zext", least, I64, "place")
