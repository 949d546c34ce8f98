"""Kernels for problems: compiled once each, their tactics timed alone on this machine, the fastest taken.

Those that are near the fastest are its rivals: in_place.py times them again inside the network. All problems of a
graph are timed together, in turns that do not disturb each other: while tactics are compiled, on every processor,
nothing is timed; while they are timed, nothing is compiled. A problem's tactics are one module, so that those that
differ in their outer loops only share what is inside.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engines.backends.base import Progress
from engines.backends.llvm.codegen.compile import compiler_pool
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import Kernel, kernels_for
from engines.backends.llvm.runtime.abi import KERNEL
from engines.backends.llvm.runtime.elf import LoadedCode, functions_of
from engines.backends.llvm.tuning.general import Found, GeneralKernels
from engines.backends.llvm.tuning.nearest import Timed, correction
from engines.backends.llvm.tuning.timing import CLOCK_US, Times, aligned, call_of, mean_ratios, measure, memory_of
from engines.codegen.compiler_pool import CompilerPool
from engines.codegen.ir_builder import Module
from engines.lowering.problems.problem import Array, Problem
from engines.machine.timing_cache import TimingCache
from engines.plan.plan import GeneralKernel
from engines.version import COMPILER_VERSION

MAX_COST_RATIO = 1.3        # times the least cost: tactics beyond it are not timed
NEAR = 1.1                  # times the least time: noise, inputs from afar
FAR_BYTES = 8e3             # of constants that a microsecond brings from afar, at worst
GAIN = 0.99                 # of the time inside the network; less is noise
DOUBT = 0.03                # of a time alone: how far it usually is from that in a network
TRUST = 0.5                 # in times of another problem, to that in costs: both are wrong by a tenth
COPY = 1.03                 # times the time: what packs weights otherwise than a plan that has them is to gain that

Constants = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A kernel cut by one of its tactics: what is compiled and timed."""
    kernel: Kernel[Any]
    tactic: Any


class Estimate(NamedTuple):
    """A number and its standard error."""
    value: float
    error: float

    def with_(self, other: Estimate) -> Estimate:
        """The best estimate that both make together: each weighs by how sure it is."""
        ours, theirs = self.error ** -2, other.error ** -2
        return Estimate((self.value * ours + other.value * theirs) / (ours + theirs), (ours + theirs) ** -0.5)


@dataclass(frozen=True)
class Choice:
    """The candidate that was taken for a problem, and its machine code.

    symbol: unique to the kernel, the tactic and the instruction set. time_us: for one item, 0 if nothing was timed.
    further_item: the share of that time which each further item of a batch takes, as far as a larger one was timed.
    told: the table of a general kernel, which it reads behind its other operands.
    """
    kernel: Kernel[Any]
    tactic: Any
    symbol: str
    code: bytes
    time_us: float
    further_item: float
    told: tuple[int, ...] | None = None


class Tuner:
    """Chooses and compiles; equal problems share a kernel. `timing` off takes the tactic of least cost (cost.py).

    short_lived: for plans that run a few times, as calibration's trials. Packing weights is then most of the work, so
    only tactics whose packing is a permutation count.
    """

    def __init__(self, isa: Isa, cache: TimingCache, processor: str, timing: bool = True,
                 short_lived: bool = False) -> None:
        self.isa, self.cache, self.processor, self.timing, self.short_lived = isa, cache, processor, timing, short_lived
        self._choices: dict[Problem, Choice] = {}
        self._alone: dict[Problem, dict[Candidate, Times]] = {}
        self._modules: dict[Candidate, bytes] = {}      # code of candidates, with that of their rivals
        self._objects: dict[Candidate, bytes] = {}      # and by itself, as a plan has it
        self._made: dict[str, bytes] = {}               # and of others, by symbol
        self._timed = Timed({})
        self.generals = GeneralKernels(isa)
        self._batches: tuple[int, ...] = (1,)
        self._batches_of: dict[Problem, tuple[int, ...]] = {}
        self.timed = 0              # tactics measured, not found in the cache

    def take_over(self, corrections: Mapping[str, Mapping[str, float]], objects: Iterable[bytes],
                  generals: Iterable[GeneralKernel] = ()) -> None:
        """From sessions that compiled the same model for other shapes: their `corrections`, their code, and what of it
        is general."""
        self._timed = Timed(corrections)
        self._made |= {name: code for code in objects for name in functions_of(code)}
        self.generals.add(generals, self._made)

    def choose(self, wanted: Mapping[Problem, Constants], progress: Progress | None = None,
               batches: Sequence[int] = (1,)) -> dict[Problem, Choice]:
        """The kernel, the tactic and the code for each problem. The constants: any values of the right shapes, to time.

        progress(done, of, what) is called as kernels are compiled and timed. batches: the sizes of batches that are
        timed; the first is for kernels to which the batch makes no difference, all are for those that it does.
        """
        self._batches = tuple(batches)
        new = {problem: constants for problem, constants in wanted.items() if problem not in self._choices}
        self._batches_of |= dict.fromkeys(new, self._batches)
        # With timing each is compiled and timed twice, and compiled once more.
        report = _Report(progress, len(new), steps=5 if self.timing else 1)
        with compiler_pool(self.isa) as pool:
            if self.timing:
                self._time_alone(pool, new, report)
            taken = {problem: self._least(self._alone[problem]) if self.timing else self._usual(problem)
                     for problem in new}
            code = self._compiled(pool, taken.values(), lambda: report("compiled"))
        for problem, candidate in taken.items():
            found = self._alone[problem][candidate] if self.timing else (0.0,)
            self._choices[problem] = self._choice(candidate, found, code[candidate])
        return {problem: self._choices[problem] for problem in wanted}

    def general(self, wanted: Iterable[Problem], batches: Sequence[int] = (1,),
                others: Callable[[], Iterable[Problem]] = lambda: ()) -> dict[Problem, Choice]:
        """A kernel for each problem of which the code is there: its own, or one that is told its numbers. Where there
        is none, one is compiled that is told what differs from other problems, those of the model at other numbers
        among them, for all that come later."""
        self._batches, wanted = tuple(batches), list(wanted)
        found = {problem: self._without_compiling(problem) for problem in dict.fromkeys((*self._choices, *wanted))}
        missing = [self._usual(problem) for problem, choice in found.items() if choice is None]
        if missing:
            for graph in (wanted, self._choices or others()):
                self.generals.meet(kernel for problem in graph for kernel in kernels_for(problem, batches[-1]))
        with compiler_pool(self.isa) as pool:
            made = self.generals.make([(one.kernel, one.tactic) for one in missing], pool)
        return {problem: choice for problem, choice in found.items() if choice} | {
            one.kernel.problem: self._told(one.kernel, general) for one, general in zip(missing, made, strict=True)}

    def _without_compiling(self, problem: Problem) -> Choice | None:
        if problem in self._choices:
            return self._choices[problem]
        own: list[Candidate] = []
        told: dict[Candidate, Found] = {}
        for kernel in kernels_for(problem, self._batches[-1]):
            tactics = kernel.tactics(self.isa)
            own += [one for tactic in tactics if self._symbol(one := Candidate(kernel, tactic)) in self._made]
            told |= {Candidate(kernel, one.tactic): one for one in self.generals.find(kernel, tactics)}
        if not own and not told:
            return None
        best = min(own or told, key=self._estimate)
        if best in told:
            return self._told(best.kernel, told[best])
        return Choice(best.kernel, best.tactic, symbol := self._symbol(best), self._made[symbol], 0.0, 1.0)

    def _told(self, kernel: Kernel[Any], one: Found) -> Choice:
        symbol = one.general.symbol
        return Choice(kernel, one.tactic, symbol, self.generals.code[symbol], 0.0, 1.0, one.table)

    def survey(self, wanted: Mapping[Problem, Constants]) -> dict[Problem, dict[Candidate, float]]:
        """Microseconds of every candidate for each problem, of the hopeless too: what costs are compared with."""
        self._batches_of |= dict.fromkeys(wanted, self._batches)
        every = {problem: self._candidates(problem) for problem in wanted}
        with compiler_pool(self.isa) as pool:
            found = self._times(pool, wanted, every, _Report(None, 0, steps=0))
        return {problem: {one: us for one, (us, *_) in times.items()} for problem, times in found.items()}

    def rivals(self, problem: Problem, most: int) -> list[Candidate]:
        """The candidate taken, then those that may be faster than it inside a network, where constants come from afar.

        A time alone is the least; the most is that with all constants waited for. Who takes longer at best than another
        does at worst is no rival. The nearest of each packing of the constants come first.
        """
        alone = self._alone[problem]
        taken, packings = self._least(alone), dict[Any, Candidate]()
        waiting = {one: tuple(us + self.constant_bytes(one) / FAR_BYTES for us in found)
                   for one, found in alone.items()}
        least, worst = mean_ratios(alone), mean_ratios(waiting, alone)
        near = [one for one in sorted(least, key=lambda one: least[one]) if least[one] <= NEAR * min(worst.values())]
        for one in near:
            packings.setdefault(self.packing(one), one)
        return list(dict.fromkeys((taken, *packings.values(), *near)))[:most]

    def alone(self, problem: Problem, one: Candidate) -> Estimate:
        """A rival's time to that of the candidate taken, as far as times alone tell: the less, the more it waits for
        constants."""
        scores, found = self._scores(self._alone[problem]), self._alone[problem][one]
        waits = self.constant_bytes(one) / FAR_BYTES / max(found[0], CLOCK_US)
        return Estimate(scores[one] / min(scores.values()), DOUBT + waits / 2)

    @staticmethod
    def packing(one: Candidate | Choice) -> Any:
        """What decides how a problem's constants are packed."""
        return type(one.kernel), one.kernel.packing(one.tactic)

    def constant_bytes(self, one: Candidate) -> int:
        return one.kernel.constant_bytes(self.isa, one.tactic)

    def trials(self, rivals: Mapping[Problem, Sequence[Candidate]],
               progress: Progress | None = None) -> dict[Problem, list[Choice]]:
        """The rivals as choices that can be run; those of a problem have their code in common."""
        missing = {problem: some for problem, some in rivals.items() if any(one not in self._modules for one in some)}
        report = _Report(progress, len(missing), steps=1)
        with compiler_pool(self.isa) as pool:
            code = pool.compile(map(self._text, missing.values()), lambda: report("compiled"))
        for some, object_ in zip(missing.values(), code, strict=True):
            self._modules |= dict.fromkeys(some, object_)
        return {problem: [self._choice(one, self._alone[problem][one], self._modules[one]) for one in some]
                for problem, some in rivals.items()}

    def settle(self, found: Mapping[Problem, Mapping[Candidate, float]]) -> dict[Problem, Choice]:
        """The fastest of rivals, by their microseconds inside the network, for a batch of the first size; the one that
        was taken by its time alone where they are alike."""
        times = {problem: {one: (us, *self._alone[problem][one][1:]) for one, us in in_place.items()}
                 for problem, in_place in found.items()}
        taken = {}
        for problem, of_rivals in times.items():
            ratios, alone = mean_ratios(of_rivals), self._least(self._alone[problem])
            best = min(ratios, key=lambda one: ratios[one])
            taken[problem] = best if ratios[best] < GAIN * ratios[alone] else alone
        with compiler_pool(self.isa) as pool:
            code = self._compiled(pool, taken.values())
        return {problem: self._choice(one, times[problem][one], code[one]) for problem, one in taken.items()}

    def _choice(self, candidate: Candidate, found: Times, code: bytes) -> Choice:
        batches, further = self._batches_of[candidate.kernel.problem], 1.0
        if len(found) > 1 and found[0]:
            further = min(max((found[1] / found[0] - 1) / (batches[1] - batches[0]), 0.0), 1.0)
        return Choice(candidate.kernel, candidate.tactic, self._symbol(candidate), code, found[0] / batches[0], further)

    def _time_alone(self, pool: CompilerPool, wanted: Mapping[Problem, Constants], report: _Report) -> None:
        """The likely candidates for each problem, and refinements of the fastest."""
        likely = {problem: self._cheapest(self._candidates(problem)) for problem in wanted}
        times = self._times(pool, wanted, likely, report)
        refined = {problem: [one for one in self._refinements(self._least(found)) if one not in found]
                   for problem, found in times.items()}
        for problem, more in self._times(pool, wanted, refined, report).items():
            self._alone[problem] = times[problem] | more

    def _candidates(self, problem: Problem) -> list[Candidate]:
        """Every tactic of every kernel that solves the problem on this machine."""
        return [Candidate(kernel, tactic) for kernel in kernels_for(problem, self._batches[-1])
                for tactic in kernel.tactics(self.isa)]

    def _scores(self, times: Mapping[Candidate, Times]) -> dict[Candidate, float]:
        """Times alone, as far as they tell those inside a network: the least is the candidate to take."""
        return {one: ratio * one.kernel.unseen(self.isa, one.tactic) for one, ratio in mean_ratios(times).items()}

    def _least(self, times: Mapping[Candidate, Times]) -> Candidate:
        scores = self._scores(times)
        return min(scores, key=lambda one: scores[one])

    def _refinements(self, best: Candidate) -> list[Candidate]:
        return [Candidate(best.kernel, tactic) for tactic in best.kernel.refinements(self.isa, best.tactic)]

    def _usual(self, problem: Problem) -> Candidate:
        """The fastest by its cost and what was timed for the nearest problem; else the cheapest, refined."""
        candidates = self._candidates(problem)
        if self._timed and (likely := self._likely(candidates)):
            return likely
        quick = [c for c in candidates if c.kernel.packing_is_permutation] if self.short_lived else []
        best = self._cheapest(quick or candidates)[0]
        return self._cheapest([best, *self._refinements(best)])[0]

    def _likely(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest, refined; None: nothing near was timed."""
        best = min(candidates, key=self._estimate)
        if self._estimate(best) == math.inf:
            return None
        return min((best, *self._refinements(best)), key=self._estimate)

    def _estimate(self, one: Candidate) -> float:
        """Its cost, as what was timed of the nearest problem corrects it; infinity: nothing near was timed."""
        corrected = math.pow(correction(one.tactic, self._timed.of(one.kernel)), TRUST) if self._timed else 1.0
        return (one.kernel.cost(self.isa, one.tactic) or 1.0) * corrected

    def corrections(self, choices: Mapping[Problem, Choice]) -> dict[str, dict[str, float]]:
        """By kernel and tactic, as repr() writes them: the time, in the fastest one's of the problem, by the cost. What
        was taken is the fastest, whatever else was so alone; what packs weights otherwise has to gain by it, for it
        needs another copy of them."""
        found: dict[str, dict[str, float]] = {}
        for problem, choice in choices.items():
            scores = self._scores(self._alone[problem])
            least, taken = min(scores.values()), Candidate(choice.kernel, choice.tactic)
            for one, score in {**scores, taken: GAIN * least}.items():
                cost = one.kernel.cost(self.isa, one.tactic) or 1.0
                if self.constant_bytes(one) and self.packing(one) != self.packing(taken):
                    score *= COPY
                found.setdefault(repr(one.kernel), {})[repr(one.tactic)] = float(f"{score / least / cost:.4g}")
        return found

    def _cheapest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that by their cost may be the fastest, the cheapest first.

        Costs of one kernel's tactics compare well with each other, less so with those of another kernel (Winograd's and
        a direct one): the likely ones of each kernel are kept.
        """
        costs = {one: one.kernel.cost(self.isa, one.tactic) for one in candidates}
        limits: dict[Kernel[Any], float] = {}
        for candidate, cost in costs.items():
            limits[candidate.kernel] = min(cost * MAX_COST_RATIO, limits.get(candidate.kernel, math.inf))
        return sorted((candidate for candidate, cost in costs.items() if cost <= limits[candidate.kernel]),
                      key=lambda candidate: costs[candidate])

    # ---- code
    def _compiled(self, pool: CompilerPool, candidates: Collection[Candidate],
                  done: Callable[[], None] = lambda: None) -> Mapping[Candidate, bytes]:
        """The code of each by itself."""
        self._objects |= {one: self._made[symbol] for one in candidates
                          if self._made and (symbol := self._symbol(one)) in self._made}
        missing = [one for one in dict.fromkeys(candidates) if one not in self._objects]
        code = pool.compile((self._text([one]) for one in missing), done)
        self._objects |= dict(zip(missing, code, strict=True))
        return self._objects

    def _text(self, candidates: Sequence[Candidate]) -> str:
        """The module of some candidates for one problem."""
        module = Module()
        for candidate in candidates:
            candidate.kernel.emit(module, self._symbol(candidate), self.isa, candidate.tactic)
        return module.text()

    def _symbol(self, candidate: Candidate) -> str:
        return f"{candidate.kernel.problem.family}_{self.digest(candidate)[:16]}"

    def digest(self, candidate: Candidate) -> str:
        """Of all that its code is made of."""
        text = repr((COMPILER_VERSION, self.isa.name, candidate))
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- times
    def _times(self, pool: CompilerPool, wanted: Mapping[Problem, Constants],
               candidates: Mapping[Problem, Sequence[Candidate]],
               report: _Report) -> dict[Problem, dict[Candidate, Times]]:
        """Those of each candidate for each problem, from the cache or measured side by side."""
        known = {problem: {one: self._known(one) for one in some} for problem, some in candidates.items()}
        missing = {problem: [one for one, found in times.items() if found is None] for problem, times in known.items()}
        missing = {problem: some for problem, some in missing.items() if some}
        report("in the timing cache", 2 * (len(candidates) - len(missing)))
        code = pool.compile(map(self._text, missing.values()), lambda: report("compiled"))
        for (problem, some), object_ in zip(missing.items(), code, strict=True):
            self._modules |= dict.fromkeys(some, object_)
            known[problem] |= self._measured(problem, some, wanted[problem], object_)
            report(f"timed {problem.family}")
        return {problem: {one: found for one, found in times.items() if found is not None}
                for problem, times in known.items()}

    def _sizes(self, candidate: Candidate) -> tuple[int, ...]:
        return self._batches if candidate.kernel.by_batch else self._batches[:1]

    def _known(self, candidate: Candidate) -> Times | None:
        """What the cache has, if it has all."""
        found = [self.cache.get(self._key(candidate, items)) for items in self._sizes(candidate)]
        known = tuple(time_us for time_us in found if time_us is not None)
        return known if len(known) == len(found) else None

    def _key(self, candidate: Candidate, items: int) -> str:
        return f"{self.processor}/{self.digest(candidate)}/{items}"

    def _measured(self, problem: Problem, candidates: Sequence[Candidate], constants: Constants,
                  code: bytes) -> dict[Candidate, Times]:
        """Those of candidates on batches of zeros, which the cache takes."""
        loaded, sizes = LoadedCode([code]), {one: self._sizes(one) for one in candidates}
        most = max(map(max, sizes.values()))
        inputs, outputs = ([memory_of(view, most) for view in views] for views in (problem.inputs, problem.outputs))
        packed: dict[Any, list[Array]] = {}
        calls: dict[int, dict[Candidate, Callable[[], None]]] = {}
        for one in candidates:
            packing = one.kernel, one.kernel.packing(one.tactic)
            if packing not in packed:
                packed[packing] = [aligned(constant)
                                   for constant in one.kernel.expanded_constants(self.isa, one.tactic, constants)]
            function = KERNEL(loaded.addresses[self._symbol(one)])
            for items in sizes[one]:
                calls.setdefault(items, {})[one] = call_of(function, [*inputs, *packed[packing], *outputs],
                                                         one.kernel.grid(self.isa, one.tactic), items)
        times = {items: measure(of_candidates) for items, of_candidates in calls.items()}
        self.timed += len(candidates)
        for items, found in times.items():
            for one, microseconds in found.items():
                self.cache.put(self._key(one, items), microseconds)
        return {one: tuple(times[items][one] for items in sizes[one]) for one in candidates}


class _Report:
    """Counts towards a progress, so many steps for each problem."""

    def __init__(self, progress: Progress | None, problems: int, steps: int) -> None:
        self._progress, self._done, self._of = progress, 0, problems * steps

    def __call__(self, what: str, count: int = 1) -> None:
        self._done += count
        if self._progress and count:
            self._progress(self._done, self._of, what)
