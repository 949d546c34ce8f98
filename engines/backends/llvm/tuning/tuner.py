"""Tuner: compiles kernels for problems, times their tactics alone on this machine, and takes the fastest.

Candidates whose times are close to the fastest are timed again inside the network (network_timing.py). All problems of
a graph are timed together (candidate_times.py).
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from infer_server.engines.backends.base import Progress
from infer_server.engines.backends.llvm.codegen.compile import compiler_pool
from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Kernel, kernels_for
from infer_server.engines.backends.llvm.tuning.candidate_times import (
    REFINED,
    CandidateTimes,
    Constants,
    Report,
    cheapest_of_each_kernel,
    joined,
    promising,
)
from infer_server.engines.backends.llvm.tuning.candidates import Candidate, CandidateCode, Choice, packing
from infer_server.engines.backends.llvm.tuning.dynamic import (
    DynamicKernels,
    KernelMatch,
    parameters_of,
    symbolic_numbers,
)
from infer_server.engines.backends.llvm.tuning.layouts import COST_TOLERANCE, TOLERANCE, with_common_layouts
from infer_server.engines.backends.llvm.tuning.nearest import Timed, correction
from infer_server.engines.backends.llvm.tuning.timing import CLOCK_US, Times, mean_ratios
from infer_server.engines.codegen.compiler_pool import CompilerPool
from infer_server.engines.ir.symbolic import NotSymbolic, plain, structure
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.symbolic.plans import CompiledKernel

MAX_COST_RATIO = 1.3        # tactics above this multiple of the least cost are not timed
NEAR = 1.1                  # times within this multiple of the least are close: noise, and inputs from outer caches
FAR_BYTES = 8e3             # bytes of constants that outer caches or memory deliver in a microsecond, at worst
GAIN = 0.99                 # relative time inside the network below which a candidate replaces the first one
DOUBT = 0.03                # typical relative difference between a time alone and one in a network
TRUST = 0.5                 # weight of times of another problem against costs: both have errors of about a tenth
OUTPUT_CYCLES = 3e6         # cycles to compile a micro-kernel's code for one of its outputs: 1 ms
FEW_RUNS = 200              # runs of a short-lived plan: calibration's items and trials
COPY = 1.03                 # penalty on the time of tactics that need another copy of the weights


class Estimate(NamedTuple):
    """Number and its standard error."""
    value: float
    error: float

    def with_(self, other: Estimate) -> Estimate:
        """Return the mean of two estimates, weighted by the inverses of their variances."""
        ours, theirs = self.error ** -2, other.error ** -2
        return Estimate((self.value * ours + other.value * theirs) / (ours + theirs), (ours + theirs) ** -0.5)


class Tuner:
    """Compiler and chooser of kernels; equal problems share one.

    Without `timing` it takes the tactic of least cost (cost.py). short_lived: for plans that run a few times, such as
    calibration's trials. Packing weights then dominates, so only tactics whose packing is a permutation are considered.
    """

    def __init__(self, isa: Isa, cache: TimingCache, processor: str, timing: bool = True,
                 short_lived: bool = False, code: CandidateCode | None = None) -> None:
        """Make a tuner. code: compiled candidates that it shares with another tuner of the build."""
        self.isa, self.cache, self.processor, self.timing, self.short_lived = isa, cache, processor, timing, short_lived
        self._choices: dict[Problem, Choice] = {}
        self._alone: dict[Problem, dict[Candidate, Times]] = {}
        self.code = code or CandidateCode(isa)
        self._times = CandidateTimes(isa, cache, processor, self.code)
        self._timed = Timed({})
        self.dynamic_kernels = DynamicKernels(isa)
        self._batches_of: dict[Problem, tuple[int, ...]] = {}
        self._sharing: dict[tuple[Problem, ...], None] = {}     # groups of problems that share weights (a set in order)

    @property
    def timed(self) -> int:
        """Return the number of tactics that were measured rather than found in the cache."""
        return self._times.measured

    def digest(self, one: Candidate) -> str:
        """Return a digest of all that decides on the code of a candidate."""
        return self.code.digest(one)

    def take_over(self, corrections: Mapping[str, Mapping[str, float]], objects: Iterable[bytes],
                  dynamic: Iterable[CompiledKernel] = ()) -> None:
        """Reuse results of sessions that compiled the model for other shapes.

        Parameters
        ----------
        corrections : their `corrections`.
        objects : their compiled code.
        dynamic : their dynamic kernels.
        """
        self._timed = Timed(corrections)
        self.code.take_over(objects)
        self.dynamic_kernels.add(dynamic)

    def choose(self, problems: Mapping[Problem, Constants], progress: Progress | None = None,
               batches: Sequence[int] = (1,), sharing: Iterable[tuple[Problem, ...]] = ()) -> dict[Problem, Choice]:
        """Return the kernel, the tactic and the code for each problem.

        Parameters
        ----------
        problems : problems, each with constants of the right shapes to time with; their values do not matter.
        progress : progress(done, of, what) is called as kernels are compiled and timed.
        batches : batch sizes to time with. Kernels that are not divided by batch are timed with the first only.
        sharing : groups of problems that share weights, which are packed in few layouts.
        """
        self._times.batches = tuple(batches)
        self._sharing |= dict.fromkeys(sharing)
        new = {problem: constants for problem, constants in problems.items() if problem not in self._choices}
        self._batches_of |= dict.fromkeys(new, self._times.batches)
        # With timing each is compiled and timed three times, and compiled once more.
        report = Report(progress, len(new), steps=7 if self.timing else 1)
        with compiler_pool(self.isa) as pool:
            if self.timing:
                self._time_alone(pool, new, report)
            taken = {problem: self._least(self._alone[problem]) if self.timing else self._usual(problem)
                     for problem in new}
            taken = self._with_common_layouts(taken)
            code = self.code.alone(pool, taken.values(), lambda: report("compiled"))
        for problem, candidate in taken.items():
            found = self._alone[problem][candidate] if self.timing else (0.0,)
            self._choices[problem] = self._choice(candidate, found, code[candidate])
        return {problem: self._choices[problem] for problem in problems}

    def symbolic(self, problems: Sequence[Problem], batches: Sequence[int] = (1,)) -> list[Choice]:
        """Return a kernel for each problem, which takes the symbolic ones of its numbers at run time.

        Kernels whose code exists are reused; a missing one is compiled as a dynamic kernel, so that later shapes can
        use it, too.
        """
        self._times.batches = tuple(batches)
        known = {structure(problem): problem for problem in problems}
        positions = {key: symbolic_numbers(problem) for key, problem in known.items()}
        values = {key: plain(problem) for key, problem in known.items()}
        found = {key: self._without_compiling(problem, positions[key]) for key, problem in values.items()}
        missing = [key for key, choice in found.items() if choice is None]
        usual = [self._usual(values[key]) for key in missing]
        with compiler_pool(self.isa) as pool:
            made = self.dynamic_kernels.make([(one.kernel, one.tactic) for one in usual], pool,
                                             [positions[key] for key in missing])
        found |= {key: self._dynamic(one.kernel, match) for key, one, match in zip(missing, usual, made, strict=True)}
        symbolic = {key: self._symbolic(choice, known[key]) for key, choice in found.items() if choice}
        return [symbolic[structure(problem)] for problem in problems]

    def _symbolic(self, choice: Choice, problem: Problem) -> Choice:
        """Convert the choice for the current values of a problem to one for the symbolic problem."""
        if choice.parameters is None:
            return choice
        kernel = type(choice.kernel)(problem, choice.kernel.items)
        if not kernel.applies(self.isa):    # not an assert: the comparisons record guards, which python -O would drop
            raise NotSymbolic("the kernel does not solve what its problem is now")
        one = self.dynamic_kernels.by_symbol[choice.symbol].kernel
        return replace(choice, kernel=kernel, parameters=parameters_of(one, kernel))

    def _without_compiling(self, problem: Problem, open_numbers: Set[int] = frozenset()) -> Choice | None:
        """Return the best choice whose code exists, or None.

        open_numbers: positions of the numbers that the kernel must take at run time.
        """
        if problem in self._choices and not open_numbers:
            return self._choices[problem]
        own: list[Candidate] = []
        matches: dict[Candidate, KernelMatch] = {}
        for kernel in kernels_for(problem, self._times.batches[-1]):
            tactics = kernel.tactics(self.isa)
            own += [one for tactic in tactics if not open_numbers
                    and self.code.symbol(one := Candidate(kernel, tactic)) in self.code.reused]
            matches |= {Candidate(kernel, one.tactic): one
                        for one in self.dynamic_kernels.find(kernel, tactics, open_numbers)}
        if not own and not matches:
            return None
        best = min(own or matches, key=self._estimate)
        if best in matches:
            return self._dynamic(best.kernel, matches[best])
        return Choice(best.kernel, best.tactic, symbol := self.code.symbol(best), self.code.reused[symbol], 0.0, 1.0)

    def _dynamic(self, kernel: Kernel[Any], match: KernelMatch) -> Choice:
        return Choice(kernel, match.tactic, match.compiled.kernel.symbol, match.compiled.code, 0.0, 1.0,
                      match.parameters)

    def survey(self, problems: Mapping[Problem, Constants]) -> dict[Problem, dict[Candidate, float]]:
        """Return the microseconds of every candidate for each problem, hopeless ones too, to compare costs with."""
        self._batches_of |= dict.fromkeys(problems, self._times.batches)
        every = {problem: self._candidates(problem) for problem in problems}
        with compiler_pool(self.isa) as pool:
            found = self._times.find(pool, problems, every, Report(None, 0, steps=0))
        return {problem: {one: us for one, (us, *_) in times.items()} for problem, times in found.items()}

    def close_candidates(self, problem: Problem, most: int) -> list[Candidate]:
        """Return the candidate taken, then those that may be faster than it inside a network.

        In a network constants come from outer caches. So a time alone is the best case, and the worst case adds the
        time to fetch all constants. A candidate is excluded if its best case is slower than another one's worst case.
        The closest candidate of each packing of the constants comes first.
        """
        alone = self._alone[problem]
        taken, packings = self._least(alone), dict[Any, Candidate]()
        waiting = {one: tuple(us + self.constant_bytes(one) / FAR_BYTES for us in found)
                   for one, found in alone.items()}
        least, worst = mean_ratios(alone), mean_ratios(waiting, alone)
        near = [one for one in sorted(least, key=lambda one: least[one]) if least[one] <= NEAR * min(worst.values())]
        for one in near:
            packings.setdefault(packing(one), one)
        return list(dict.fromkeys((taken, *packings.values(), *near)))[:most]

    def alone(self, problem: Problem, one: Candidate) -> Estimate:
        """Estimate a close candidate's time relative to that of the one taken, from times alone.

        The more it waits for constants, the larger is the error of the estimate.
        """
        scores, found = self._scores(self._alone[problem]), self._alone[problem][one]
        waits = self.constant_bytes(one) / FAR_BYTES / max(found[0], CLOCK_US)
        return Estimate(scores[one] / min(scores.values()), DOUBT + waits / 2)

    def constant_bytes(self, one: Candidate) -> int:
        return one.kernel.constant_bytes(self.isa, one.tactic)

    def trials(self, candidates: Mapping[Problem, Sequence[Candidate]],
               progress: Progress | None = None) -> dict[Problem, list[Choice]]:
        """Return the close candidates as choices that can be run; those of a problem share one module."""
        report = Report(progress, len(candidates), steps=1)
        with compiler_pool(self.isa) as pool:
            code = self.code.compile_groups(pool, list(candidates.values()), lambda: report("compiled"))
        return {problem: [self._choice(one, self._alone[problem][one], code[one]) for one in some]
                for problem, some in candidates.items()}

    def settle(self, found: Mapping[Problem, Mapping[Candidate, float]]) -> dict[Problem, Choice]:
        """Choose among close candidates by their microseconds inside the network, for a batch of the first size.

        The candidate taken by its time alone stays if the gain is below the noise.
        """
        times = {problem: {one: (us, *self._alone[problem][one][1:]) for one, us in in_network.items()}
                 for problem, in_network in found.items()}
        taken = {}
        for problem, of_candidates in times.items():
            ratios, alone = mean_ratios(of_candidates), self._least(self._alone[problem])
            best = min(ratios, key=lambda one: ratios[one])
            taken[problem] = best if ratios[best] < GAIN * ratios[alone] else alone
        taken = with_common_layouts(taken, self._sharing, {problem: mean_ratios(of_candidates)
                                                           for problem, of_candidates in times.items()}, TOLERANCE)
        with compiler_pool(self.isa) as pool:
            code = self.code.alone(pool, taken.values())
        return {problem: self._choice(one, times[problem][one], code[one]) for problem, one in taken.items()}

    def _with_common_layouts(self, taken: Mapping[Problem, Candidate]) -> dict[Problem, Candidate]:
        """Return the candidates with as few layouts of shared weights as their times allow."""
        shared = {problem for group in self._sharing for problem in group if problem in taken}
        if self.timing:
            scores = {problem: self._scores(self._alone[problem]) for problem in shared}
        else:
            scores = {problem: {one: self._estimate(one) for one in (taken[problem], *self._candidates(problem))}
                      for problem in shared}
        return with_common_layouts(taken, self._sharing, scores, TOLERANCE if self.timing else COST_TOLERANCE)

    def _choice(self, candidate: Candidate, found: Times, code: bytes) -> Choice:
        batches, further = self._batches_of[candidate.kernel.problem], 1.0
        if len(found) > 1 and found[0]:
            further = min(max((found[1] / found[0] - 1) / (batches[1] - batches[0]), 0.0), 1.0)
        symbol = self.code.symbol(candidate)
        return Choice(candidate.kernel, candidate.tactic, symbol, code, found[0] / batches[0], further)

    def _time_alone(self, pool: CompilerPool, problems: Mapping[Problem, Constants], report: Report) -> None:
        """Time the cheapest candidate of each kernel, then those that may be faster, then refinements of the fastest.

        Compiling takes longer than timing: where a problem takes little of all problems' time, fewer are tried.
        """
        likely = {problem: self._cheapest(self._candidates(problem)) for problem in problems}
        times = self._times.find(pool, problems, {
            problem: cheapest_of_each_kernel(some) for problem, some in likely.items()}, report)
        shares = self._shares(times)
        more = {problem: promising(some, {one: one.kernel.cost(self.isa, one.tactic) for one in some},
                                   {one: self._us(found) for one, found in times[problem].items()}, shares[problem])
                for problem, some in likely.items()}
        times = joined(times, self._times.find(pool, problems, more, report))
        refined = {problem: [one for one in self._refinements(self._least(found)) if one not in found]
                   if shares[problem] >= REFINED else [] for problem, found in times.items()}
        self._alone |= joined(times, self._times.find(pool, problems, refined, report, share_tiles=True))

    def _us(self, found: Times) -> float:
        """Microseconds of an item: the sum of those in batches of each size."""
        return max(sum(us / items for us, items in zip(found, self._times.batches, strict=False)), CLOCK_US)

    def _shares(self, times: Mapping[Problem, Mapping[Candidate, Times]]) -> dict[Problem, float]:
        """Return each problem's share of the total time, or 1 if it shares weights with other problems.

        A share of 1 keeps a choice of weight layouts for such problems.
        """
        least = {problem: min(map(self._us, found.values())) for problem, found in times.items()}
        sharing = {problem for group in self._sharing for problem in group}
        total = sum(least.values())
        return {problem: 1.0 if problem in sharing else us / total for problem, us in least.items()}

    def _candidates(self, problem: Problem) -> list[Candidate]:
        """Return every tactic of every kernel that solves the problem on this machine."""
        return [Candidate(kernel, tactic) for kernel in kernels_for(problem, self._times.batches[-1])
                for tactic in kernel.tactics(self.isa)]

    def _scores(self, times: Mapping[Candidate, Times]) -> dict[Candidate, float]:
        """Return times alone, corrected for the network; the least is the candidate to take."""
        return {one: ratio * one.kernel.unseen(self.isa, one.tactic) for one, ratio in mean_ratios(times).items()}

    def _least(self, times: Mapping[Candidate, Times]) -> Candidate:
        scores = self._scores(times)
        return min(scores, key=lambda one: scores[one])

    def _refinements(self, best: Candidate) -> list[Candidate]:
        return [Candidate(best.kernel, tactic) for tactic in best.kernel.refinements(self.isa, best.tactic)]

    def _usual(self, problem: Problem) -> Candidate:
        """Return the fastest by cost and by times of the nearest problem; without such times the cheapest, refined."""
        candidates = self._candidates(problem)
        if self._timed and (likely := self._likely(candidates)):
            return likely
        if self.short_lived:
            return self._quickest(candidates)
        best = self._cheapest(candidates)[0]
        return self._cheapest([best, *self._refinements(best)])[0]

    def _quickest(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the candidate that is fastest to compile and run a few times, by the cost model."""
        quick = [one for one in candidates if one.kernel.packing_is_permutation] or candidates

        def cycles(one: Candidate) -> float:
            return one.kernel.cost(self.isa, one.tactic) + OUTPUT_CYCLES / FEW_RUNS * one.kernel.code_size(
                self.isa, one.tactic)
        best = min(quick, key=cycles)
        return self._cheapest([best, *self._refinements(best)])[0]

    def _likely(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest by `_estimate`, refined; None if nothing near was timed."""
        best = min(candidates, key=self._estimate)
        if self._estimate(best) == math.inf:
            return None
        return min((best, *self._refinements(best)), key=self._estimate)

    def _estimate(self, one: Candidate) -> float:
        """Return the cost, corrected by times of the nearest problem; infinity if none was timed."""
        corrected = math.pow(correction(one.tactic, self._timed.of(one.kernel)), TRUST) if self._timed else 1.0
        return (one.kernel.cost(self.isa, one.tactic) or 1.0) * corrected

    def corrections(self, choices: Mapping[Problem, Choice]) -> dict[str, dict[str, float]]:
        """Return {kernel: {tactic: relative time / cost}}, with kernels and tactics as repr() writes them.

        The time is relative to that of the fastest candidate of the problem. The one taken counts as the fastest, even
        if another was faster alone. Tactics that pack weights in another layout get a penalty, for they need a copy of
        them.
        """
        found: dict[str, dict[str, float]] = {}
        for problem, choice in choices.items():
            scores = self._scores(self._alone[problem])
            least, taken = min(scores.values()), Candidate(choice.kernel, choice.tactic)
            for one, score in {**scores, taken: GAIN * least}.items():
                cost = one.kernel.cost(self.isa, one.tactic) or 1.0
                if self.constant_bytes(one) and packing(one) != packing(taken):
                    score *= COPY
                found.setdefault(repr(one.kernel), {})[repr(one.tactic)] = float(f"{score / least / cost:.4g}")
        return found

    def _cheapest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates whose cost allows that they are the fastest, the cheapest first.

        Costs compare well between tactics of one kernel, and less well between kernels (Winograd's and a direct one).
        So the likely tactics of each kernel are kept.
        """
        costs = {one: one.kernel.cost(self.isa, one.tactic) for one in candidates}
        limits: dict[Kernel[Any], float] = {}
        for candidate, cost in costs.items():
            limits[candidate.kernel] = min(cost * MAX_COST_RATIO, limits.get(candidate.kernel, math.inf))
        return sorted((candidate for candidate, cost in costs.items() if cost <= limits[candidate.kernel]),
                      key=lambda candidate: costs[candidate])
