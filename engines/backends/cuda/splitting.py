"""Splits calls with too little parallelism for a GPU into several, where the cost model predicts a gain.

    contraction with few tiles      split-K: at batch 1 a layer of 7 x 7 pixels fills a tenth of a large GPU
        partial sums of each slice of K, in a scratch buffer;  their sum and the epilogue
    attention with few queries      split over keys, as in flash-decoding: one query, thousands of keys
        in INT8 the largest score of each slice;  the partial sums of each slice;  their combination

Slices are added in order, so results are reproducible; in INT8 they equal the unsplit ones.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.cost import Card
from infer_server.engines.backends.cuda.kernels.kernel import cheapest, kernel_for
from infer_server.engines.backends.cuda.kernels.matmul.partial_attention import (
    AttentionPeaks,
    AttentionSums,
    JoinedAttention,
)
from infer_server.engines.backends.cuda.kernels.partial import constants_of_parts, in_parts
from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall, name_of
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.lower import Lowered
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.matmul import Attention
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.plan.arena import CACHE_LINE

PARTS = (2, 4, 8, 16)
LEAST = 64                  # bytes of a tap's channels per slice
TILE = 32 * 64              # pixels x couts of the smallest tile
PARTS_OF_KEYS = (2, 4, 8, 16, 32, 64)
LEAST_KEYS = 64             # per slice
QUERIES = 16                # upper bound; more queries fill the GPU

ScratchMaker = Callable[[str, View], Placement]         # places a scratch tensor between the calls of a split


def aligned(placement: Placement) -> int:
    """Return the alignment in bytes of a tensor's address: buffers begin on cache lines."""
    return math.gcd(CACHE_LINE, placement.offset)


@dataclass(frozen=True)
class Splitting:
    """Pass that splits calls. `batch` is the batch size to optimise for."""
    gpu: Gpu
    card: Card
    batch: int

    def apply(self, lowered: Lowered) -> Lowered:
        """Return the lowered graph with calls split where that is faster."""
        calls = [each for call in lowered.calls for each in self._calls(lowered, call)]
        return replace(lowered, calls=tuple(calls))

    def _calls(self, lowered: Lowered, call: AnyCall) -> Sequence[AnyCall]:
        if not isinstance(call, ProblemCall) or type(call.problem) not in SPLITS:
            return (call,)
        cut, items = SPLITS[type(call.problem)], call.outputs[0].items
        times = {parts: sum(map(self._seconds, cut(call, parts, lambda name, view: Placement(0, 0, view, items))))
                 for parts in self._possible(call.problem, self._items(call.outputs[0]))}
        parts = min(times, key=times.__getitem__, default=1)
        if parts == 1 or times[parts] >= self._seconds(call):
            return (call,)
        return cut(call, parts, lambda name, view: lowered.placements.scratch(f"{name_of(call)}.{name}", view, items))

    def _possible(self, problem: Problem, items: int) -> Iterator[int]:
        """Yield the numbers of slices to consider, none if the problem alone fills the GPU."""
        if isinstance(problem, Attention):
            if problem.queries <= QUERIES and items * problem.heads * problem.queries < 4 * self.card.multiprocessors:
                yield from (parts for parts in PARTS_OF_KEYS if problem.keys >= parts * LEAST_KEYS)
            return
        assert isinstance(problem, Contraction)
        if problem.groups == 1 and items * math.prod(problem.y.shape) < TILE * self.card.multiprocessors:
            for parts in PARTS:
                share = problem.cin * problem.x.size / parts
                if share >= LEAST and not share % LEAST:
                    yield parts

    def _items(self, placement: Placement) -> int:
        return self.batch if placement.items == BATCH else int(placement.items)

    def _seconds(self, call: ProblemCall) -> float:
        problem, placements = call.problem, (*call.inputs, *call.outputs)
        kernel = kernel_for(problem, self.gpu, tuple(map(aligned, placements)))
        assert kernel
        items = self._items(call.outputs[0])
        return kernel.cost(cheapest(kernel, self.card, items), self.card, items)


def _contraction(call: ProblemCall, parts: int, make_scratch: ScratchMaker) -> tuple[ProblemCall, ...]:
    assert isinstance(call.problem, Contraction)
    (first, second), (x, *operands) = in_parts(call.problem, parts), call.inputs
    between = make_scratch("parts", first.y)
    return (ProblemCall(_named(call, "parts"), first, (x,), (between,), constants_of_parts(first, call.constants)),
            ProblemCall(call.node, second, (between, *operands), call.outputs, {"program": call.constants["program"]}))


def _attention(call: ProblemCall, parts: int, make_scratch: ScratchMaker) -> tuple[ProblemCall, ...]:
    assert isinstance(call.problem, Attention)
    sums, joined = AttentionSums(call.problem, parts), JoinedAttention(call.problem, parts)
    scratch = [make_scratch(name, view) for name, view in (("parts", sums.sums), ("totals", sums.totals),
                                                 ("peaks", sums.peaks))]
    last = ProblemCall(call.node, joined, tuple(scratch), call.outputs, call.constants)
    if not sums.integers:
        return ProblemCall(_named(call, "parts"), sums, call.inputs, tuple(scratch), call.constants), last
    *others, peaks = scratch
    return (ProblemCall(_named(call, "peaks"), AttentionPeaks(call.problem, parts), call.inputs, (peaks,),
                        call.constants),
            ProblemCall(_named(call, "parts"), sums, (*call.inputs, peaks), tuple(others), call.constants), last)


def _named(call: ProblemCall, part: str) -> Node:
    return replace(call.node, name=f"{name_of(call)}.{part}")


SPLITS: Mapping[type[Problem], Callable[[ProblemCall, int, ScratchMaker], tuple[ProblemCall, ...]]] = {
    Contraction: _contraction, Attention: _attention}
