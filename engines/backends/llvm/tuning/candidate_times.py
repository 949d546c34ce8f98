"""Times of candidates alone, measured in turns with others of their problem, or read from the timing cache.

All candidates are compiled before, on every processor, so that no compilation disturbs the timing.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer_server.engines.backends.base import Progress
from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.runtime.abi import KERNEL
from infer_server.engines.backends.llvm.runtime.elf import LoadedCode
from infer_server.engines.backends.llvm.tuning.candidates import Candidate, CandidateCode
from infer_server.engines.backends.llvm.tuning.timing import Part, Times, aligned, call_of, measure, memory_of, parts_of
from infer_server.engines.codegen.compiler_pool import CompilerPool
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.machine.timing_cache import TimingCache

# How far candidates are tried, by the least share of all problems' time that a problem takes: times the best time that
# the estimate of one may be, and the most of a kernel.
EFFORTS = ((0.01, 1.12, 64), (0.005, 1.06, 4), (0.0, 1.03, 2))
REFINED = 0.005             # share of all problems' time from which on refinements of the fastest are tried

Constants = Mapping[str, Any]


def cheapest_of_each_kernel(some: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each kernel of candidates in the order of their costs."""
    first: dict[Any, Candidate] = {}
    for one in some:
        first.setdefault(one.kernel, one)
    return list(first.values())


def promising(some: Sequence[Candidate], costs: Mapping[Candidate, float], us: Mapping[Candidate, float],
              share: float) -> list[Candidate]:
    """Return the candidates that may be faster than those timed.

    A kernel's costs compare well with each other: what the time of its cheapest candidate is to its cost, that of the
    others is to theirs, within some per cent.

    Parameters
    ----------
    some : candidates of a problem, in the order of their costs
    us : microseconds of the cheapest candidate of each kernel
    share : of all problems' time, what this problem takes
    """
    margin, most = next((margin, most) for least, margin, most in EFFORTS if share >= least)
    limit, found = margin * min(us.values()), list[Candidate]()
    for timed, time_us in us.items():
        others = [one for one in some if one.kernel == timed.kernel and one != timed][:most - 1]
        found += [one for one in others if costs[one] / (costs[timed] or 1.0) * time_us <= limit]
    return found


def joined(times: Mapping[Problem, Mapping[Candidate, Times]],
           more: Mapping[Problem, Mapping[Candidate, Times]]) -> dict[Problem, dict[Candidate, Times]]:
    """Return the times of both for each problem."""
    return {problem: {**found, **more.get(problem, {})} for problem, found in times.items()}


class Report:
    """Progress counter with so many steps for each problem."""

    def __init__(self, progress: Progress | None, problems: int, steps: int) -> None:
        self._progress, self._done, self._of = progress, 0, problems * steps

    def __call__(self, what: str, count: int = 1) -> None:
        self._done += count
        if self._progress and count:
            self._progress(self._done, self._of, what)


class CandidateTimes:
    """Times of candidates on one processor.

    batches: the batch sizes for timing. Kernels that are not divided by batch are timed with the first only.
    """

    def __init__(self, isa: Isa, cache: TimingCache, processor: str, code: CandidateCode) -> None:
        self._isa, self._cache, self._processor, self._code = isa, cache, processor, code
        self.batches: tuple[int, ...] = (1,)
        self.measured = 0           # candidates that were not found in the cache

    def find(self, pool: CompilerPool, constants: Mapping[Problem, Constants],
             candidates: Mapping[Problem, Sequence[Candidate]],
             report: Report, share_tiles: bool = False) -> dict[Problem, dict[Candidate, Times]]:
        """Return the times of each candidate for each problem.

        share_tiles: a problem's candidates differ in their outer loops only, and are compiled together.
        """
        known = {problem: {one: self._known(one) for one in some} for problem, some in candidates.items()}
        missing = {problem: [one for one, found in times.items() if found is None] for problem, times in known.items()}
        missing = {problem: some for problem, some in missing.items() if some}
        report("in the timing cache", 2 * (len(candidates) - len(missing)))
        compiled = self._code.compile_groups if share_tiles else self._code.compile_each
        code = compiled(pool, list(missing.values()), lambda: report("compiled"))
        for problem, some in missing.items():
            known[problem] |= self._measured(problem, some, constants[problem], code)
            report(f"timed {problem.family}")
        return {problem: {one: found for one, found in times.items() if found is not None}
                for problem, times in known.items()}

    def _sizes(self, candidate: Candidate) -> tuple[int, ...]:
        return self.batches if candidate.kernel.by_batch else self.batches[:1]

    def _known(self, candidate: Candidate) -> Times | None:
        """Return the times in the cache, or None if one is missing."""
        found = [self._cache.get(self._key(candidate, items)) for items in self._sizes(candidate)]
        known = tuple(time_us for time_us in found if time_us is not None)
        return known if len(known) == len(found) else None

    def _key(self, candidate: Candidate, items: int) -> str:
        return f"{self._processor}/{self._code.digest(candidate)}/{items}"

    def _measured(self, problem: Problem, candidates: Sequence[Candidate], constants: Constants,
                  code: Mapping[Candidate, bytes]) -> dict[Candidate, Times]:
        """Measure candidates on batches of zeros, and store the times in the cache."""
        loaded = LoadedCode(list(dict.fromkeys(code[one] for one in candidates)))
        sizes = {one: self._sizes(one) for one in candidates}
        most = max(map(max, sizes.values()))
        inputs, outputs = ([memory_of(view, most) for view in views] for views in (problem.inputs, problem.outputs))
        packed: dict[Any, list[Array]] = {}
        calls: dict[int, dict[Candidate, Part]] = {}
        for one in candidates:
            packing = one.kernel, one.kernel.packing(one.tactic)
            if packing not in packed:
                packed[packing] = [aligned(constant)
                                   for constant in one.kernel.expanded_constants(self._isa, one.tactic, constants)]
            function = KERNEL(loaded.addresses[self._code.symbol(one)])
            bytes_packed = sum(constant.nbytes for constant in packed[packing])
            for items in sizes[one]:
                calls.setdefault(items, {})[one] = call_of(
                    function, [*inputs, *packed[packing], *outputs], one.kernel.grid(self._isa, one.tactic), items,
                    parts_of(problem, items, bytes_packed))
        times = {items: measure(of_candidates) for items, of_candidates in calls.items()}
        self.measured += len(candidates)
        for items, found in times.items():
            for one, microseconds in found.items():
                self._cache.put(self._key(one, items), microseconds)
        return {one: tuple(times[items][one] for items in sizes[one]) for one in candidates}
