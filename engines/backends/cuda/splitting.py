"""Contractions of few tiles are cut along K where the model of cost.py says that it pays: at batch 1 a layer of 7 x 7
pixels has blocks for a tenth of a large GPU.

    contraction  ->  the sums of each part of its channels, in a buffer of their own;  what these add up to, the program

Parts are added in order, so that results are the same in every run; in INT8 they are those of one sum.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.cost import Card
from engines.backends.cuda.kernels.kernel import cheapest, kernel_for
from engines.backends.cuda.kernels.partial import constants_of_parts, in_parts
from engines.ir.graph import BATCH
from engines.lowering.calls.calls import AnyCall, Call, name_of
from engines.lowering.calls.placement import Placement
from engines.lowering.lower import Lowered
from engines.lowering.problems.convolution import Contraction
from engines.plan.arena import CACHE_LINE

PARTS = (2, 4, 8, 16)
LEAST = 64                  # bytes of a tap's channels in a part
TILE = 32 * 64              # pixels x couts of the smallest


def aligned(placement: Placement) -> int:
    """What a tensor's address is a multiple of: buffers begin on cache lines."""
    return math.gcd(CACHE_LINE, placement.offset)


@dataclass(frozen=True)
class Splitting:
    """batch: items that are to be fast."""
    gpu: Gpu
    card: Card
    batch: int

    def of(self, lowered: Lowered) -> Lowered:
        """The same, with some contractions in two calls."""
        calls = [each for call in lowered.calls for each in self._calls(lowered, call)]
        return replace(lowered, calls=tuple(calls))

    def _calls(self, lowered: Lowered, call: AnyCall) -> Sequence[AnyCall]:
        if not isinstance(call, Call) or type(call.problem) is not Contraction:
            return (call,)
        times = {parts: sum(map(self._seconds, two)) for parts in self._possible(call.problem, call.outputs[0])
                 for two in [_in_two(call, parts, Placement(0, 0, call.problem.y, call.outputs[0].items))]}
        parts = min(times, key=times.__getitem__, default=1)
        if parts == 1 or times[parts] >= self._seconds(call):
            return (call,)
        sums, _ = in_parts(call.problem, parts)
        return _in_two(call, parts, lowered.placements.scratch(f"{name_of(call)}.parts", sums.y, call.outputs[0].items))

    def _possible(self, problem: Contraction, y: Placement) -> Iterator[int]:
        """In how many parts, where one alone leaves multiprocessors idle."""
        if problem.groups == 1 and self._items(y) * math.prod(problem.y.shape) < TILE * self.card.multiprocessors:
            for parts in PARTS:
                share = problem.cin * problem.x.size / parts
                if share >= LEAST and not share % LEAST:
                    yield parts

    def _items(self, placement: Placement) -> int:
        return self.batch if placement.items == BATCH else int(placement.items)

    def _seconds(self, call: Call) -> float:
        problem, placements = call.problem, (*call.inputs, *call.outputs)
        kernel = kernel_for(problem, self.gpu, tuple(map(aligned, placements)))
        assert kernel
        items = self._items(call.outputs[0])
        return kernel.cost(cheapest(kernel, self.card, items), self.card, items)


def _in_two(call: Call, parts: int, between: Placement) -> tuple[Call, Call]:
    assert isinstance(call.problem, Contraction)
    (first, second), (x, *operands) = in_parts(call.problem, parts), call.inputs
    node = replace(call.node, name=f"{name_of(call)}.parts")
    between = replace(between, view=first.y)
    return (Call(node, first, (x,), (between,), constants_of_parts(first, call.constants)),
            Call(call.node, second, (between, *operands), call.outputs, {"program": call.constants["program"]}))
