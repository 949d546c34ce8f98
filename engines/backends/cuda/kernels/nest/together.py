"""The loops of a nest of which several threads have the inner turns together, and what their reductions add up to.

    thread: the turns of `shares`: of a loop every so many-th; then, of each reduction, that of all threads

Threads of a warp exchange what they found, lanes 16, 8, 4, 2 and 1 apart; then each warp's is put into shared memory,
and all of them read those in order. Floats are so summed in an order that the tactic decides, the same in every run.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engines.backends.cuda.codegen.gpu import WARP
from engines.backends.cuda.codegen.module import across, barrier, shared
from engines.codegen.ir_builder import Function, Value
from engines.codegen.nest.loops import Code, Copy, Parts
from engines.codegen.nest.order import Loops
from engines.codegen.nest.values import LaneValue
from engines.codegen.types import I1, I32, I64
from engines.codegen.words import Primitives

SLOT = 16               # bytes of shared memory for what a warp found, and where


class Share(NamedTuple):
    """Every `step`-th turn of a loop, from `first` on."""
    first: Value
    step: int


class CodeTogether(Code):
    """Writes them. warps: of the threads of an element."""

    def __init__(self, f: Function, machine: Primitives, loops: Loops, shares: Mapping[int, Share], warps: int,
                 thread: Value) -> None:
        super().__init__(f, machine, loops)
        self.shares, self.warps, self.thread = shares, warps, thread

    def _parts(self, loop: int, acc: dict[object, Value] | None, bounds: tuple[Value, Value] | None) -> Parts:
        if loop not in self.shares:
            yield from super()._parts(loop, acc, bounds)
            return
        share, end = self.shares[loop], self.f.constant(self.loops.extents[loop], I64)
        for turn in self.f.range(f"loop {loop}", share.first, end, share.step, acc={} if acc is None else acc):
            yield turn, 1

    def _end(self, one: int, copy: Copy, acc: dict[object, Value]) -> LaneValue:
        operation, place = self.loops.program.operations[one], self._accumulator_of(one, copy)
        how, kind = str(operation.what), self.loops.program.operations[operation.args[0]].kind
        pair = acc[one, place], acc.get((one, place, "where"))
        for distance in (16, 8, 4, 2, 1):
            pair = self._merged(how, kind, pair, (
                across(pair[0], distance), None if pair[1] is None else across(pair[1], distance)))
        if self.warps > 1:
            pair = self._of_warps(how, kind, pair)
        return pair[0] if pair[1] is None else pair[1]

    def _of_warps(self, how: str, kind: str, pair: tuple[Value, Value | None]) -> tuple[Value, Value | None]:
        f, (value, where) = self.f, pair
        here = shared(f) + self.thread.divided(WARP) * SLOT
        barrier(f)          # what was found before has been read
        with f.when((self.thread & WARP - 1).compare("eq", 0)):
            f.store(f.cast("zext", value, I32, "bit") if value.type == I1 else value, here, 8)
            if where is not None:
                f.store(where, here + 8, 8)
        barrier(f)
        found = None
        for warp in range(self.warps):
            other = self._load(value.type, shared(f) + warp * SLOT), (
                None if where is None else f.load(I64, shared(f) + (warp * SLOT + 8), 8, "where"))
            found = other if found is None else self._merged(how, kind, found, other)
        assert found
        return found

    def _load(self, type_: str, at: Value) -> Value:
        if type_ == I1:
            return self.f.cast("trunc", self.f.load(I32, at, 8, "bit"), I1, "bit")
        return self.f.load(type_, at, 8, "found")
