"""NonMaxSuppression: the best boxes of each class, without those that overlap a better one.

    for batch, class:
        keys, places = the scores above `least`, as sortable integers, and the numbers of their boxes
        as often as there are such scores, while fewer than `most` boxes are taken:
            box = the place of the highest key (found as in TopK), whose key then becomes the lowest
            it is taken unless a taken box covers it:    `lanes` of those at a time, a vector for each number
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import offset
from infer_server.engines.backends.llvm.kernels.elementwise.top_k import BLOCK, LOWEST, first_of, highest
from infer_server.engines.backends.llvm.kernels.kernel import ALIGNMENT, Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.codegen.boxes import Box, box_of, covers
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.keys import key_of
from infer_server.engines.codegen.nest.values import load
from infer_server.engines.codegen.types import FLOAT, I1, I32, I64, vector
from infer_server.engines.lowering.problems.selection import Suppression


@dataclass(frozen=True)
class _Memory:
    """Scratch memory of a class.

    keys, places: the candidate boxes; peaks: the highest key of each block; taken: an array for each number of a box.
    """
    keys: Value
    indices: Value
    peaks: Value
    taken: Sequence[Value]


@solves(Suppression)
class SuppressionKernel(Kernel[Suppression]):
    """Kernel of NonMaxSuppression."""
    @property
    def boxes(self) -> int:
        return self.problem.boxes.shape[1]

    @property
    def peaks(self) -> int:
        """Return the number of peaks in memory, rounded up to whole iterations of a search."""
        return -(-self.boxes // (BLOCK * BLOCK)) * BLOCK

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(problem.inputs) + 2)
        boxes, scores, *numbers, chosen, count = addresses
        room = [f.alloca(4 * extent, ALIGNMENT, hint) for extent, hint in (
            (self.boxes + BLOCK, "keys"), (self.boxes + BLOCK, "places"), (self.peaks, "peaks"),
            *((problem.limit + isa.lanes, "taken"),) * 5)]
        keys, indices, peaks, *taken = room
        memory = _Memory(keys, indices, peaks, taken)
        most = f.load(I64, numbers[0], hint="most")
        most = f.call(I64, "llvm.smax.i64", most, most.like(0), hint="most").at_most(problem.limit)
        overlap, least = (f.splat(f.load(FLOAT, number), isa.lanes) for number in numbers[1:])
        for _ in f.range("item", begin, end):
            found = {"rows": f.constant(0, I64)}
            for batch in f.loop("batch", problem.scores.shape[0], found=found):
                of_batch = boxes + batch * problem.boxes.strides[0]
                for kind in f.loop("class", problem.scores.shape[1], found=found):
                    at = offset(scores, [batch, kind], problem.scores.strides[:2])
                    waiting = self._waiting(f, isa, at, least, memory)
                    rows = self._take(f, isa, of_batch, waiting, (most, overlap), memory,
                                      lambda row, box, at=(batch, kind), first=found["rows"]:       # type: ignore[misc]
                                      self._write(chosen, first + row, (*at, box)))
                    found["rows"] = found["rows"] + rows
            f.store(found["rows"], count)

    def _write(self, chosen: Value, row: Value, numbers: Sequence[Value]) -> None:
        view = self.problem.chosen
        for column, number in enumerate(numbers):
            chosen.f.store(number, chosen + row * view.strides[0] + column * view.strides[1])

    def _waiting(self, f: Function, isa: Isa, scores: Value, least: Value, memory: _Memory) -> Value:
        """Fill keys, places and peaks, and return the number of candidates."""
        stride, every = self.problem.scores.strides[2], least.compare("oeq", -np.inf)
        state = {"count": f.constant(0, I64)}
        for start, count in f.tiles("score", self.boxes, isa.lanes, state=state):
            score = load(isa, "float32", scores + start * stride, stride, count)
            wanted = f.op(every.type, f"or {score.compare('ogt', least)}, {every.name}", "wanted")
            with f.when_carrying(f.call(I1, f"llvm.vector.reduce.or.v{isa.lanes}i1", wanted, hint="any"), state):
                keys = key_of(score)
                keys = f.select(score.compare("oeq", score), keys, keys.like(LOWEST + 1), "keys")      # NaN comes last
                for lane in range(count):
                    key, test = (f.op(element, f"extractelement {value}, i32 {lane}", "lane")
                                 for element, value in ((I32, keys), (I1, wanted)))
                    f.store(key, memory.keys + state["count"] * 4)
                    f.store(f.cast("trunc", start + lane, I32, "place"), memory.indices + state["count"] * 4)
                    state["count"] = state["count"] + f.cast("zext", test, I64, "one")
        lowest = f.constant(LOWEST, isa.ints)
        for behind in range(0, BLOCK, isa.lanes):
            f.store(lowest, memory.keys + state["count"] * 4 + behind * 4)
        for part in f.loop("part", self.peaks // isa.lanes):
            f.store(lowest, memory.peaks + part * (4 * isa.lanes))
        for block in f.range("block", f.constant(0, I64), (state["count"] + (BLOCK - 1)).divided(BLOCK)):
            f.store(highest(f, isa, memory.keys + block * (4 * BLOCK), BLOCK), memory.peaks + block * 4)
        return state["count"]

    def _take(self, f: Function, isa: Isa, boxes: Value, waiting: Value, numbers: tuple[Value, Value],
              memory: _Memory, write: Callable[[Value, Value], None]) -> Value:
        """Call write(number of boxes so far, box) for each box that is taken, and return their number."""
        most, overlap = numbers
        state = {"rows": f.constant(0, I64)}
        for _ in f.range("turn", f.constant(0, I64), waiting, state=state):
            with f.when_carrying(state["rows"].below(most), state):
                index = f.cast("zext", self._next(f, isa, memory), I64, "box")
                box = self._box(f, boxes + index * self.problem.boxes.strides[1])
                with f.when_carrying(self._is_free(f, isa, memory, state["rows"], box, overlap), state):
                    self._remember(f, isa, memory, state["rows"], box)
                    write(state["rows"], index)
                    state["rows"] = state["rows"] + 1
        return state["rows"]

    def _next(self, f: Function, isa: Isa, memory: _Memory) -> Value:
        """Return the box of the highest key, the first if several are equal, and remove its key."""
        block = first_of(f, isa, memory.peaks, self.peaks, highest(f, isa, memory.peaks, self.peaks))
        start = memory.keys + block * (4 * BLOCK)
        index = first_of(f, isa, start, BLOCK, f.load(I32, memory.peaks + block * 4, hint="peak"))
        f.store(f.constant(LOWEST, I32), start + index * 4)
        f.store(highest(f, isa, start, BLOCK), memory.peaks + block * 4)
        return f.load(I32, memory.indices + (block * BLOCK + index) * 4, hint="box")

    def _box(self, f: Function, address: Value) -> Box:
        a, b, c, d = (f.load(FLOAT, address + number * self.problem.boxes.strides[2], hint="number")
                      for number in range(4))
        return box_of(a, b, c, d, self.problem.centred)

    def _is_free(self, f: Function, isa: Isa, memory: _Memory, rows: Value, box: Box, overlap: Value) -> Value:
        """Return an i1 that is true if no taken box covers this one."""
        own = tuple(f.splat(number, isa.lanes) for number in box)
        state = {"covered": f.constant(0, vector(isa.lanes, I1))}
        for first in f.range("taken", f.constant(0, I64), rows, isa.lanes, state=state):
            taken = tuple(f.load(isa.floats, row + first * 4, hint="taken") for row in memory.taken)
            covered = covers(taken, own, overlap)
            state["covered"] = f.op(covered.type, f"or {covered}, {state['covered'].name}", "covered")
        found = f.call(I1, f"llvm.vector.reduce.or.v{isa.lanes}i1", state["covered"], hint="found")
        return found.binary("xor", 1)

    def _remember(self, f: Function, isa: Isa, memory: _Memory, rows: Value, box: Box) -> None:
        """Append a box to the taken ones; new vectors are first filled with empty boxes, which cover none."""
        with f.when(rows.remainder(isa.lanes).compare("eq", 0)):
            for row, number in zip(memory.taken, (np.inf, np.inf, -np.inf, -np.inf, 0), strict=True):
                f.store(f.constant(number, isa.floats), row + rows * 4)
        for row, value in zip(memory.taken, box, strict=True):
            f.store(value, row + rows * 4)
