"""Times of candidates alone, measured in turns with others of their problem, or read from the timing cache.

All candidates are compiled before, on every processor, so that no compilation disturbs the timing.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.backends.base import Progress
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.runtime.abi import KERNEL
from engines.backends.llvm.runtime.elf import LoadedCode
from engines.backends.llvm.tuning.candidates import Candidate, CandidateCode
from engines.backends.llvm.tuning.timing import Part, Times, aligned, call_of, measure, memory_of, parts_of
from engines.codegen.compiler_pool import CompilerPool
from engines.lowering.problems.problem import Array, Problem
from engines.machine.timing_cache import TimingCache

Constants = Mapping[str, Any]


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

    def find(self, pool: CompilerPool, wanted: Mapping[Problem, Constants],
             candidates: Mapping[Problem, Sequence[Candidate]],
             report: Report) -> dict[Problem, dict[Candidate, Times]]:
        """Return the times of each candidate for each problem, one for each batch size."""
        known = {problem: {one: self._known(one) for one in some} for problem, some in candidates.items()}
        missing = {problem: [one for one, found in times.items() if found is None] for problem, times in known.items()}
        missing = {problem: some for problem, some in missing.items() if some}
        report("in the timing cache", 2 * (len(candidates) - len(missing)))
        code = self._code.beside(pool, list(missing.values()), lambda: report("compiled"))
        for problem, some in missing.items():
            known[problem] |= self._measured(problem, some, wanted[problem], code)
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
