"""The k largest or smallest of a row: a warp finds one after the other.

    k times: of the elements that come behind the last one found, in order of value and then of place, the first

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
from engines.codegen.types import ELEMENTS, I32
from engines.lowering.problems.elementwise import TopK

NOWHERE = 0x7FFFFFFF        # the place of no element, behind all others

Found = dict[str, Value]        # "value", "place"


@solves(TopK)
class TopKByWarp(GpuKernel[TopK]):
    @property
    def refusal(self) -> str:
        return "" if self.problem.x.dtype in ("float32", "int32") else f"a TopK of {self.problem.x.dtype}"

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.problem.x.shape[:-1]), WARPS, WARPS * WARP)

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem, outputs = self.problem, self.problem.outputs
        f, (x, *targets), rows = begin_kernel(module, name, WARPS * WARP, 1 + len(outputs))
        thread = special(f, "tid.x")
        lane, row = thread & WARP - 1, special(f, "ctaid.x") * WARPS + thread.binary("lshr", WARP.bit_length() - 1)
        element = ELEMENTS[problem.x.dtype]
        first, last = (math.inf, -math.inf) if problem.x.dtype == "float32" else (NOWHERE, -NOWHERE - 1)
        if not problem.largest:
            first, last = last, first
        with f.when(row.below(rows)):
            source = x + offset_in(problem.x, row)
            places = [target + offset_in(view, row) for target, view in zip(targets, outputs, strict=True)]
            found = {"value": f.constant(first, element), "place": f.constant(-1, I32)}
            for turn in f.loop("turn", outputs[-1].shape[-1], found=found):
                found.update(self._next(source, lane, found, last))
                with f.when(lane.compare("eq", 0)):
                    if problem.values:
                        f.store(found["value"], places[0] + turn * problem.values.strides[-1], problem.x.size)
                    place = wide(found["place"].at_most(problem.x.shape[-1] - 1))
                    f.store(place, places[-1] + turn * problem.indices.strides[-1], 8)

    def _next(self, source: Value, lane: Value, found: Found, last: float) -> Found:
        """The first element behind the one found."""
        f, width = lane.f, self.problem.x.shape[-1]
        best = {"value": found["value"].like(last), "place": f.constant(NOWHERE, I32)}
        for turn in f.loop("part", -(-width // WARP), best=best):
            place = f.cast("trunc", turn, I32, "turn") * WARP + lane
            inside = place.below(width)
            here = source + wide(f.select(inside, place, place.like(0), "place")) * self.problem.x.strides[-1]
            one = {"value": f.load(best["value"].type, here, self.problem.x.size, "value"), "place": place}
            taken = inside & self._before(found, one) & self._before(one, best)
            best.update({key: f.select(taken, one[key], best[key], key) for key in best})
        for distance in (16, 8, 4, 2, 1):
            other = {key: across(value, distance) for key, value in best.items()}
            taken = self._before(other, best)
            best = {key: f.select(taken, other[key], value, key) for key, value in best.items()}
        return best

    def _before(self, a: Found, b: Found) -> Value:
        """Whether a comes before b: by its value, of equals by its place."""
        ordered = "o" if self.problem.x.dtype == "float32" else "s"
        better = a["value"].compare(ordered + ("gt" if self.problem.largest else "lt"), b["value"])
        equal = a["value"].compare("oeq" if ordered == "o" else "eq", b["value"])
        return better | (equal & a["place"].compare("slt", b["place"]))
