"""Loops of a nest whose iterations are shared by several threads, and the reductions across them.

    thread: its share of each loop's iterations, then the reduction over all threads

Lanes of a warp reduce by shuffles over 16, 8, 4, 2 and 1 lanes; then each warp's result goes to shared memory, and all
warps read these in order. The tactic thus fixes the order of additions, which is the same in every run.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import barrier, shared, shuffle_xor
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.nest.loops import Code, Copy, Parts
from infer_server.engines.codegen.nest.order import Loops
from infer_server.engines.codegen.nest.values import LaneValue
from infer_server.engines.codegen.types import I1, I32, I64
from infer_server.engines.codegen.words import Primitives

SLOT = 16               # bytes of shared memory for a warp's value and its index


class Share(NamedTuple):
    """Iterations first, first + step, ... of a loop."""
    first: Value
    step: int


class CodeTogether(Code):
    """Nest emitter with shared loops. `warps` is the number of warps per element."""

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
        operation, accumulator = self.loops.program.operations[one], self._accumulator_of(one, copy)
        how, kind = str(operation.what), self.loops.program.operations[operation.args[0]].kind
        pair = acc[one, accumulator], acc.get((one, accumulator, "where"))
        for distance in (16, 8, 4, 2, 1):
            pair = self._merged(how, kind, pair, (
                shuffle_xor(pair[0], distance), None if pair[1] is None else shuffle_xor(pair[1], distance)))
        if self.warps > 1:
            pair = self._of_warps(how, kind, pair)
        return pair[0] if pair[1] is None else pair[1]

    def _of_warps(self, how: str, kind: str, pair: tuple[Value, Value | None]) -> tuple[Value, Value | None]:
        f, (value, where) = self.f, pair
        here = shared(f) + self.thread.divided(WARP) * SLOT
        barrier(f)          # the previous results have been read
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
