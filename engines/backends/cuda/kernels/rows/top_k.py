"""The k largest or smallest of a row: a warp finds one after the other, by their keys (engines/codegen/keys.py).

    k times: of the elements that come behind the last one found, in order of key and then of place, the first

k passes over the row take longer than a sort where k is large; of what networks ask for it is small.
"""
from __future__ import annotations

import math

from engines.backends.cuda.codegen.gpu import WARP
from engines.backends.cuda.codegen.module import GpuModule, across, begin_kernel, special, wide
from engines.backends.cuda.kernels.access import offset_in
from engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic, solves
from engines.backends.cuda.kernels.rows.rows import WARPS
from engines.codegen.ir_builder import Value
from engines.codegen.keys import key_of, lowest_of
from engines.codegen.nest.values import load
from engines.codegen.types import ELEMENTS, I32
from engines.lowering.problems.elementwise import TopK

NOWHERE = 0x7FFFFFFF        # the place of no element, behind all others

Found = dict[str, Value]        # "key", "place"


@solves(TopK)
class TopKByWarp(GpuKernel[TopK]):
    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]), WARPS, WARPS * WARP)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, outputs = self.problem, self.problem.outputs
        f, (x, *targets), rows = begin_kernel(module, name, WARPS * WARP, 1 + len(outputs))
        thread = special(f, "tid.x")
        lane, row = thread & WARP - 1, special(f, "ctaid.x") * WARPS + thread.binary("lshr", WARP.bit_length() - 1)
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

    def _next(self, source: Value, lane: Value, found: Found) -> Found:
        """The first element behind the one found."""
        f, x = lane.f, self.problem.x
        key = found["key"]
        best = {"key": key.like(lowest_of(int(key.type[1:]))), "place": f.constant(NOWHERE, I32)}
        for turn in f.loop("part", -(-x.shape[-1] // WARP), best=best):
            place = f.cast("trunc", turn, I32, "turn") * WARP + lane
            inside = place.below(x.shape[-1])
            here = source + wide(f.select(inside, place, place.like(0), "place")) * x.strides[-1]
            one = {"key": key_of(load(self.gpu, x.dtype, here, 0, 1), self.problem.largest), "place": place}
            best.update(chosen(inside & before(found, one) & before(one, best), one, best))
        return first_of_warp(best)


def first_of_warp(found: Found) -> Found:
    """Of what its lanes have found."""
    for distance in (16, 8, 4, 2, 1):
        other = {name: across(value, distance) for name, value in found.items()}
        found = chosen(before(other, found), other, found)
    return found


def chosen(test: Value, a: Found, b: Found) -> Found:
    """a where the test holds, else b."""
    return {name: test.f.select(test, a[name], b[name], name) for name in a}


def before(a: Found, b: Found) -> Value:
    """Whether a comes before b: by its key, of equals by its place."""
    return a["key"].compare("sgt", b["key"]) | (
        a["key"].compare("eq", b["key"]) & a["place"].compare("slt", b["place"]))
