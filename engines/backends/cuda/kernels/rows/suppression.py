"""Non-maximum suppression: one block for all batches and classes.

    for batch, class:
        alive[box] = score > `least`; a thread has the boxes i with i % THREADS == its number
        `most` times: box = the first alive box with the highest key; select it and remove it from alive
                      alive = alive and not covered by the box

Removing covered boxes at once selects the same boxes as the operator's reference, which tests each box in turn.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import (
    GpuModule,
    barrier,
    begin_kernel,
    shared,
    special_register,
    wide,
)
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.rows.top_k import NOWHERE, KeyedElement, before, chosen, first_of_warp
from infer_server.engines.codegen.boxes import Box, box_of, covers
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.keys import key_of, lowest_of
from infer_server.engines.codegen.types import FLOAT, I32, I64
from infer_server.engines.lowering.problems.selection import Suppression

WARPS = 32              # per block
THREADS = WARPS * WARP
BITS = 32               # boxes per word of the alive mask
LOWEST = lowest_of(32)


@solves(Suppression)
class SuppressionByBlock(GpuKernel[Suppression]):
    """Kernel with a single block.

    Shared memory has each warp's best key and place, then the threads' words of the alive mask. Lowering limits boxes
    to 2**18, which is 8 words per thread.
    """

    @property
    def boxes(self) -> int:
        return self.problem.boxes.shape[1]

    @property
    def each(self) -> int:
        """Boxes per thread."""
        return -(-self.boxes // THREADS)

    @property
    def words(self) -> int:
        """Words of the alive mask per thread."""
        return -(-self.each // BITS)

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(1, 1, THREADS, shared_bytes=8 * WARPS + 4 * THREADS * self.words)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, (batches, classes, _) = self.problem, self.problem.scores.shape
        f, (boxes, scores, most, overlap, least, rows, count), _ = begin_kernel(module, name, THREADS, 7)
        thread = special_register(f, "tid.x")
        wanted: Value = f.load(I64, most, 8, "most")
        wanted = f.call(I64, "llvm.smax.i64", wanted, wanted.like(0), hint="most").at_most(problem.limit)
        share, floor = (f.load(FLOAT, number, 4, "number") for number in (overlap, least))
        found = {"rows": f.constant(0, I64)}
        for batch in f.loop("batch", batches, found=found):
            of_batch = boxes + batch * problem.boxes.strides[0]
            for kind in f.loop("class", classes, found=found):
                row = scores + batch * problem.scores.strides[0] + kind * problem.scores.strides[1]
                self._begin(row, floor, thread)
                state = {"rows": f.constant(0, I64), "going": f.constant(1, I32)}
                for _turn in f.range("turn", f.constant(0, I64), wanted, state=state):
                    with f.when_carrying(state["going"].compare("ne", 0), state):
                        best = self._best(row, thread)
                        any_left = best["place"].compare("ne", NOWHERE)
                        state["going"] = f.cast("zext", any_left, I32, "going")
                        with f.when_carrying(any_left, state):
                            with f.when(thread.compare("eq", 0)):
                                self._write(rows, found["rows"] + state["rows"], (batch, kind, wide(best["place"])))
                            self._cover(of_batch, best["place"], share, thread)
                            state["rows"] = state["rows"] + 1
                found["rows"] = found["rows"] + state["rows"]
        with f.when(thread.compare("eq", 0)):
            f.store(found["rows"], count, 8)

    def _write(self, rows: Value, row: Value, numbers: tuple[Value, ...]) -> None:
        view = self.problem.chosen
        for column, number in enumerate(numbers):
            rows.f.store(number, rows + row * view.strides[0] + column * view.strides[1], 8)

    def _begin(self, scores: Value, least: Value, thread: Value) -> None:
        """Mark boxes with a score above `least` as alive; -inf marks all, including NaN scores."""
        f, every = thread.f, least.compare("oeq", -np.inf)
        for first, at in self._words(thread):
            state = {"alive": f.constant(0, I32)}
            for box, bit in self._boxes(first, state=state):
                inside = box.below(self.boxes)
                score = self._score(scores, f.select(inside, box, box.like(0)))
                wanted = inside & (score.compare("ogt", least) | every)
                state["alive"] = state["alive"] | f.select(wanted, bit, bit.like(0))
            f.store(state["alive"], at, 4)

    def _best(self, scores: Value, thread: Value) -> KeyedElement:
        """Return, in all threads, the first alive box with the highest key, or NOWHERE."""
        f, lane, warp = thread.f, thread & WARP - 1, thread.binary("lshr", WARP.bit_length() - 1)
        best = {"key": f.constant(LOWEST, I32), "place": f.constant(NOWHERE, I32)}
        for first, at in self._words(thread, best=best):
            alive = f.load(I32, at, 4, "alive")
            for box, bit in self._boxes(first, best=best):
                with f.when_carrying((alive & bit).compare("ne", 0), best):
                    score = self._score(scores, box)
                    key = f.select(score.compare("oeq", score), key_of(score), bit.like(LOWEST + 1))   # NaN comes last
                    one = {"key": key, "place": box}
                    best.update(chosen(before(one, best), one, best))
        best = first_of_warp(best)
        barrier(f)          # the previous results have been read
        with f.when(lane.compare("eq", 0)):
            for row, value in enumerate(best.values()):
                f.store(value, shared(f) + (4 * WARPS * row + warp * 4), 4)
        barrier(f)
        return first_of_warp({name: f.load(I32, shared(f) + (4 * WARPS * row + lane * 4), 4, name)
                              for row, name in enumerate(best)})

    def _cover(self, boxes: Value, index: Value, overlap: Value, thread: Value) -> None:
        """Remove the box at `index` and the boxes that it covers from the alive mask."""
        f, taken = thread.f, self._box(boxes, index)
        for first, at in self._words(thread):
            state = {"alive": f.load(I32, at, 4, "alive")}
            for box, bit in self._boxes(first, state=state):
                with f.when_carrying((state["alive"] & bit).compare("ne", 0), state):
                    gone = box.compare("eq", index) | covers(taken, self._box(boxes, box), overlap)
                    state["alive"] = state["alive"] ^ f.select(gone, bit, bit.like(0))
            f.store(state["alive"], at, 4)

    def _words(self, thread: Value, **carried: KeyedElement) -> Iterator[tuple[Value, Value]]:
        """Yield the box of the lowest bit, and the address, of each of the thread's words."""
        f = thread.f
        for turn in f.loop("word", self.words, **carried):
            word = f.cast("trunc", turn, I32, "word")
            yield word * (BITS * THREADS) + thread, shared(f) + ((word * THREADS + thread) * 4 + 8 * WARPS)

    def _boxes(self, first: Value, **carried: KeyedElement) -> Iterator[tuple[Value, Value]]:
        """Yield the boxes of a word, each with its bit."""
        f = first.f
        for turn in f.loop("bit", min(self.each, BITS), **carried):
            bit = f.cast("trunc", turn, I32, "bit")
            yield first + bit * THREADS, bit.like(1) << bit

    def _score(self, scores: Value, box: Value) -> Value:
        return box.f.load(FLOAT, scores + wide(box) * self.problem.scores.strides[2], 4, "score")

    def _box(self, boxes: Value, index: Value) -> Box:
        _, step, number = self.problem.boxes.strides
        a, b, c, d = (index.f.load(FLOAT, boxes + wide(index) * step + i * number, 4, "number") for i in range(4))
        return box_of(a, b, c, d, self.problem.centred)
