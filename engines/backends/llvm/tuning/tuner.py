"""Kernels of specs: compiled once each, their tactics timed on this machine, the fastest taken.

For all specs of a graph together, in turns that do not disturb each other: while tactics are compiled, on every
processor, nothing is timed; while they are timed, nothing is compiled. The tactics of a spec are one module, so that
those that differ in their outer loops only share what is inside.
"""
from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.compile_pool import CompilerPool
from engines.backends.llvm.codegen.ir_builder import Module
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.spec import Array, Grid, KernelSpec, View
from engines.backends.llvm.runtime.elf import LoadedCode
from engines.machine.clock import thread_seconds
from engines.machine.timing_cache import TimingCache
from engines.version import COMPILER_VERSION

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)
SECONDS = 0.004             # spent on timing one tactic, in rounds among its rivals
ROUNDS = 3
COSTLY = 1.3                # times the least cost: tactics beyond it are not timed
HOPELESS = 1.5              # times the fastest in its first runs: a tactic that is not timed further

Progress = Callable[[int, int, str], None]
Constants = Mapping[str, Any]
Times = tuple[float, ...]       # microseconds of a tactic, for a batch of each size that it is timed with


@dataclass(frozen=True)
class Kernel:
    """A tactic's machine code. `symbol` is unique to the spec, the tactic and the instruction set."""
    symbol: str
    code: bytes


@dataclass(frozen=True)
class Choice:
    """What was taken for a spec, its time for one item (0 if nothing was timed), and the share of that which each
    further item takes."""
    tactic: Any
    kernel: Kernel
    time_us: float
    further_item: float


class Tuner:
    """Chooses and compiles; equal specs are one kernel. `timing` off takes the tactic of least cost (cost.py).

    short_lived: for plans that run a few times, as calibration's trials. Packing weights is then most of the work, so
    only tactics whose packing is a permutation count.
    """

    def __init__(self, isa: Isa, cache: TimingCache, processor: str, timing: bool = True,
                 short_lived: bool = False) -> None:
        self.isa, self.cache, self.processor, self.timing, self.short_lived = isa, cache, processor, timing, short_lived
        self._choices: dict[KernelSpec, Choice] = {}
        self._batches: tuple[int, ...] = (1,)
        self.timed = 0              # tactics measured, not found in the cache

    def choose(self, wanted: Mapping[KernelSpec, Constants], progress: Progress | None = None,
               batches: Sequence[int] = (1,)) -> dict[KernelSpec, Choice]:
        """The tactic and the kernel of each spec. The constants: any values of the right shapes, for timing.

        progress(done, of, what) is called as kernels are compiled and timed. batches: the sizes of batches that are
        timed; the first is for kernels to which the batch makes no difference, all are for those that it does.
        """
        self._batches = tuple(batches)
        new = {spec: constants for spec, constants in wanted.items() if spec not in self._choices}
        report = _Report(progress, len(new), self.timing)
        with CompilerPool(self.isa) as pool:
            times = self._fastest(pool, new, report) if self.timing else \
                {spec: (self._usual(spec), (0.0,)) for spec in new}
            code = pool.compile((self._text(spec, [tactic]) for spec, (tactic, _) in times.items()),
                                lambda: report("compiled"))
        for (spec, (tactic, found)), object_ in zip(times.items(), code, strict=True):
            self._choices[spec] = Choice(tactic, Kernel(self._symbol(spec, tactic), object_),
                                         found[0] / self._batches[0], self._further_item(found))
        return {spec: self._choices[spec] for spec in wanted}

    def _fastest(self, pool: CompilerPool, wanted: Mapping[KernelSpec, Constants],
                 report: _Report) -> dict[KernelSpec, tuple[Any, Times]]:
        """The fastest tactic of each spec, refined."""
        likely = {spec: self._cheapest(spec, spec.tactics(self.isa)) for spec in wanted}
        times = self._times(pool, wanted, likely, report)
        refined = {spec: [t for t in spec.refinements(self.isa, _least(times[spec])) if t not in times[spec]]
                   for spec in wanted}
        for spec, more in self._times(pool, wanted, refined, report).items():
            times[spec] |= more
        return {spec: (_least(found), found[_least(found)]) for spec, found in times.items()}

    def _usual(self, spec: KernelSpec) -> Any:
        """The cheapest tactic, refined."""
        tactics = spec.tactics(self.isa)
        quick = [tactic for tactic in tactics if spec.packing_is_permutation(tactic)] if self.short_lived else []
        best = self._cheapest(spec, quick or tactics)[0]
        return self._cheapest(spec, [best, *spec.refinements(self.isa, best)])[0]

    def _cheapest(self, spec: KernelSpec, tactics: Sequence[Any]) -> list[Any]:
        """Those that by their cost may be the fastest, the cheapest first; of ways as different as Winograd's and a
        direct one, whose costs compare less well, the likely of each."""
        costs = {tactic: spec.cost(self.isa, tactic) for tactic in tactics}
        limits: dict[type, float] = {}
        for tactic, cost in costs.items():
            limits[type(tactic)] = min(cost * COSTLY, limits.get(type(tactic), math.inf))
        return sorted((tactic for tactic, cost in costs.items() if cost <= limits[type(tactic)]),
                      key=lambda tactic: costs[tactic])

    # ---- code
    def _text(self, spec: KernelSpec, tactics: Sequence[Any]) -> str:
        """The module of some tactics of a spec."""
        module = Module()
        for tactic in tactics:
            spec.emit(module, self._symbol(spec, tactic), self.isa, tactic)
        return module.text()

    def _symbol(self, spec: KernelSpec, tactic: Any) -> str:
        return f"{spec.family}_{self._digest(spec, tactic)[:16]}"

    def _digest(self, spec: KernelSpec, tactic: Any) -> str:
        text = repr((COMPILER_VERSION, self.isa.name, spec, tactic))
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- times
    def _times(self, pool: CompilerPool, wanted: Mapping[KernelSpec, Constants],
               tactics: Mapping[KernelSpec, Sequence[Any]], report: _Report) -> dict[KernelSpec, dict[Any, Times]]:
        """Those of each tactic of each spec, from the cache or measured side by side."""
        known = {spec: {tactic: self._known(spec, tactic) for tactic in some} for spec, some in tactics.items()}
        missing = {spec: [tactic for tactic, found in times.items() if found is None] for spec, times in known.items()}
        missing = {spec: some for spec, some in missing.items() if some}
        report("in the timing cache", 2 * (len(tactics) - len(missing)))
        code = pool.compile((self._text(spec, some) for spec, some in missing.items()), lambda: report("compiled"))
        for (spec, some), object_ in zip(missing.items(), code, strict=True):
            known[spec] |= self._measured(spec, some, wanted[spec], object_)
            report(f"timed {spec.family}")
        return {spec: {tactic: found for tactic, found in times.items() if found is not None}
                for spec, times in known.items()}

    def _further_item(self, found: Times) -> float:
        """Of a batch of one and a larger one; 1 where no two were timed."""
        if len(found) == 1 or not found[0]:
            return 1.0
        return min(max((found[1] / found[0] - 1) / (self._batches[1] - self._batches[0]), 0.0), 1.0)

    def _sizes(self, spec: KernelSpec) -> tuple[int, ...]:
        return self._batches if spec.by_batch else self._batches[:1]

    def _known(self, spec: KernelSpec, tactic: Any) -> Times | None:
        """What the cache has, if it has all."""
        found = [self.cache.get(self._key(spec, tactic, items)) for items in self._sizes(spec)]
        known = tuple(time_us for time_us in found if time_us is not None)
        return known if len(known) == len(found) else None

    def _key(self, spec: KernelSpec, tactic: Any, items: int) -> str:
        return f"{self.processor}/{self._digest(spec, tactic)}/{items}"

    def _measured(self, spec: KernelSpec, tactics: Sequence[Any], constants: Constants,
                  code: bytes) -> dict[Any, Times]:
        """Those of tactics on batches of zeros, which the cache takes."""
        loaded, sizes = LoadedCode([code]), self._sizes(spec)
        inputs, outputs = ([_memory(view, max(sizes)) for view in views] for views in (spec.inputs, spec.outputs))
        packed: dict[Any, list[Array]] = {}
        calls: dict[int, dict[Any, Callable[[], None]]] = {items: {} for items in sizes}
        for tactic in tactics:
            packing = spec.packing(tactic)
            if packing not in packed:
                packed[packing] = [aligned(constant) for constant in spec.ready_constants(self.isa, tactic, constants)]
            function = KERNEL(loaded.addresses[self._symbol(spec, tactic)])
            for items in sizes:
                calls[items][tactic] = _call(function, [*inputs, *packed[packing], *outputs],
                                             spec.grid(self.isa, tactic), items)
        times = {items: measure(of_tactics) for items, of_tactics in calls.items()}
        self.timed += len(tactics)
        for items, found in times.items():
            for tactic, microseconds in found.items():
                self.cache.put(self._key(spec, tactic, items), microseconds)
        return {tactic: tuple(times[items][tactic] for items in sizes) for tactic in tactics}


class _Report:
    """Counts towards a progress: each spec is compiled and timed twice, and compiled once more; or only that."""

    def __init__(self, progress: Progress | None, specs: int, timing: bool) -> None:
        self._progress, self._done, self._of = progress, 0, specs * (5 if timing else 1)

    def __call__(self, what: str, count: int = 1) -> None:
        self._done += count
        if self._progress and count:
            self._progress(self._done, self._of, what)


def _least(times: Mapping[Any, Times]) -> Any:
    """The tactic that takes least; of several batches each counts alike, in units of the fastest one's time."""
    fastest = [max(min(of_batch), 1e-9) for of_batch in zip(*times.values(), strict=True)]
    return min(times, key=lambda tactic: sum(us / unit for us, unit in zip(times[tactic], fastest, strict=True)))


def _call(function: Any, arrays: list[Array], grid: Grid, items: int) -> Callable[[], None]:
    """A call of a kernel for all of a batch."""
    table = np.array([array.ctypes.data for array in arrays], np.int64)
    address, keep = table.ctypes.data, (arrays, table)

    def call(keep: Any = keep) -> None:
        function(address, 0, items * grid.rows_per_item, 0, grid.columns)
    return call


def aligned(array: Array) -> Array:
    """A flat copy that begins on a cache line: numpy's own buffers need not."""
    array = np.ascontiguousarray(array).reshape(-1)
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start:start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def _memory(view: View, items: int) -> Array:
    """Room for so many items of a view, halo and slack included."""
    return aligned(np.zeros((items - 1) * view.item + view.span + 256, np.uint8))


def measure(calls: Mapping[Any, Callable[[], None]]) -> dict[Any, float]:
    """{name: call} -> {name: microseconds of its fastest run}, the calls taken in turns.

    The fastest run, because everything that disturbs a measurement makes it longer; in CPU time, for a slow kernel may
    never have the core to itself. Calls that are far behind after two runs are left at that.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()                      # touch the memory, fill the caches
    for _ in range(2):
        for name, call in calls.items():
            best[name] = min(best[name], _seconds(call))
    limit = HOPELESS * min(best.values(), default=0.0)
    hopeful = [name for name, seconds in best.items() if seconds <= limit]
    for _ in range(ROUNDS):
        for name in hopeful:
            end = time.perf_counter() + SECONDS / ROUNDS
            while True:
                best[name] = min(best[name], _seconds(calls[name]))
                if time.perf_counter() >= end:
                    break
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _seconds(call: Callable[[], None]) -> float:
    begin = thread_seconds()
    call()
    return thread_seconds() - begin
