"""Top-k of a row: a warp finds one element after the other by integer keys (engines/codegen/keys.py).

    k times: the first element, ordered by key and then by index, after the one found before

k passes are slower than a sort for large k, but k is small in networks.
"""
from __future__ import annotations

import math

from infer_server.engines.backends.cuda.codegen.gpu import WARP
from infer_server.engines.backends.cuda.codegen.module import (
    GpuModule,
    begin_kernel,
    shuffle_xor,
    special_register,
    wide,
)
from infer_server.engines.backends.cuda.kernels.access import offset_in
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from infer_server.engines.backends.cuda.kernels.rows.rows import WARPS
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.keys import key_of, lowest_of
from infer_server.engines.codegen.nest.values import load
from infer_server.engines.codegen.types import ELEMENTS, I32
from infer_server.engines.lowering.problems.elementwise import TopK

NOWHERE = 0x7FFFFFFF        # index of no element, after all others

KeyedElement = dict[str, Value]  # "key" and "place" of an element


@solves(TopK)
class TopKByWarp(GpuKernel[TopK]):
    """Kernel with a warp per row."""

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]), WARPS, WARPS * WARP)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, outputs = self.problem, self.problem.outputs
        f, (x, *targets), rows = begin_kernel(module, name, WARPS * WARP, 1 + len(outputs))
        thread = special_register(f, "tid.x")
        lane = thread & WARP - 1
        row = special_register(f, "ctaid.x") * WARPS + thread.binary("lshr", WARP.bit_length() - 1)
        bits, step = 64 if problem.x.dtype in TopK.wide else 32, problem.x.strides[-1]
        with f.when(row.below(rows)):
            source = x + offset_in(problem.x, row)
            *values, indices = (target + offset_in(view, row) for target, view in zip(targets, outputs, strict=True))
            found = {"key": f.constant(-1 - lowest_of(bits), f"i{bits}"), "place": f.constant(-1, I32)}
            for turn in f.loop("turn", outputs[-1].shape[-1], found=found):
                found.update(self._next(source, lane, found))
                with f.when(lane.compare("eq", 0)):
                    place = wide(found["place"])
                    f.store(place, indices + turn * problem.indices.strides[-1], 8)
                    for target in values:
                        value = f.load(ELEMENTS[problem.x.dtype], source + place * step, problem.x.size, "value")
                        f.store(value, target + turn * outputs[0].strides[-1], problem.x.size)

    def _next(self, source: Value, lane: Value, previous: KeyedElement) -> KeyedElement:
        """Return the first element after `previous`."""
        f, x = lane.f, self.problem.x
        key = previous["key"]
        best = {"key": key.like(lowest_of(int(key.type[1:]))), "place": f.constant(NOWHERE, I32)}
        for turn in f.loop("part", -(-x.shape[-1] // WARP), best=best):
            place = f.cast("trunc", turn, I32, "turn") * WARP + lane
            inside = place.below(x.shape[-1])
            here = source + wide(f.select(inside, place, place.like(0), "place")) * x.strides[-1]
            one = {"key": key_of(load(self.gpu, x.dtype, here, 0, 1), self.problem.largest), "place": place}
            best.update(chosen(inside & before(previous, one) & before(one, best), one, best))
        return first_of_warp(best)


def first_of_warp(element: KeyedElement) -> KeyedElement:
    """Return the first of all lanes' elements."""
    for distance in (16, 8, 4, 2, 1):
        other = {name: shuffle_xor(value, distance) for name, value in element.items()}
        element = chosen(before(other, element), other, element)
    return element


def chosen(test: Value, a: KeyedElement, b: KeyedElement) -> KeyedElement:
    """Select a if the test holds, else b."""
    return {name: test.f.select(test, a[name], b[name], name) for name in a}


def before(a: KeyedElement, b: KeyedElement) -> Value:
    """Return true (i1) if a comes before b, by key and then by index."""
    return a["key"].compare("sgt", b["key"]) | (
        a["key"].compare("eq", b["key"]) & a["place"].compare("slt", b["place"]))
