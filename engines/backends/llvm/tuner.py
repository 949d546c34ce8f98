"""Kernels of specs: compiled once each, their tactics timed on this machine, the fastest taken."""
from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backends.llvm.elf import LoadedCode
from engines.backends.llvm.emit import Module
from engines.backends.llvm.isa import Isa
from engines.backends.llvm.jit import compile_object
from engines.backends.llvm.spec import Array, KernelSpec, View
from engines.tactics import TimingCache
from engines.version import COMPILER_VERSION

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)
SECONDS = 0.004             # spent on timing one tactic, in rounds among its rivals
ROUNDS = 3
HOPELESS = 1.3              # times the least cost: tactics beyond it are not timed


@dataclass(frozen=True)
class Kernel:
    """A tactic's machine code. `symbol` is unique to the spec, the tactic and the instruction set."""
    symbol: str
    code: bytes


@dataclass(frozen=True)
class Choice:
    """What was taken for a spec, and its time for one item (0 if nothing was timed)."""
    tactic: Any
    kernel: Kernel
    time_us: float


class Tuner:
    """Chooses and compiles; equal specs are one kernel. `timing` off takes the tactic of least cost (cost.py)."""

    def __init__(self, isa: Isa, cache: TimingCache, processor: str, timing: bool = True) -> None:
        self.isa, self.cache, self.processor, self.timing = isa, cache, processor, timing
        self._kernels: dict[tuple[KernelSpec, Any], Kernel] = {}
        self._choices: dict[KernelSpec, Choice] = {}
        self.timed = 0              # tactics measured, not found in the cache

    def choose(self, spec: KernelSpec, constants: Mapping[str, Any]) -> Choice:
        """The tactic for a spec. `constants`: any values of the right shapes, for timing."""
        if spec not in self._choices:
            self._choices[spec] = self._choose(spec, constants)
        return self._choices[spec]

    def _choose(self, spec: KernelSpec, constants: Mapping[str, Any]) -> Choice:
        if not self.timing:
            best = self._cheapest(spec, spec.tactics(self.isa))[0]
            best = self._cheapest(spec, [best, *spec.refinements(self.isa, best)])[0]
            return Choice(best, self.kernel(spec, best), 0.0)
        times = self._times(spec, self._cheapest(spec, spec.tactics(self.isa)), constants)
        best = min(times, key=lambda tactic: times[tactic])
        times |= self._times(spec, [t for t in spec.refinements(self.isa, best) if t not in times], constants)
        best = min(times, key=lambda tactic: times[tactic])
        return Choice(best, self.kernel(spec, best), times[best])

    def _cheapest(self, spec: KernelSpec, tactics: Sequence[Any]) -> list[Any]:
        """Those that by their cost may be the fastest, the cheapest first."""
        costs = {tactic: spec.cost(self.isa, tactic) for tactic in tactics}
        limit = min(costs.values()) * HOPELESS
        return sorted((tactic for tactic, cost in costs.items() if cost <= limit), key=lambda tactic: costs[tactic])

    # ---- code
    def kernel(self, spec: KernelSpec, tactic: Any) -> Kernel:
        if (spec, tactic) not in self._kernels:
            symbol = f"{spec.family}_{self._digest(spec, tactic)[:16]}"
            module = Module()
            spec.emit(module, symbol, self.isa, tactic)
            self._kernels[spec, tactic] = Kernel(symbol, compile_object(module.text(), self.isa))
        return self._kernels[spec, tactic]

    def _digest(self, spec: KernelSpec, tactic: Any) -> str:
        text = repr((COMPILER_VERSION, self.isa.name, spec, tactic))
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- times
    def _times(self, spec: KernelSpec, tactics: Sequence[Any], constants: Mapping[str, Any]) -> dict[Any, float]:
        """Microseconds of each tactic, from the cache or measured side by side."""
        keys = {tactic: f"{self.processor}/{self._digest(spec, tactic)}" for tactic in tactics}
        known = {tactic: self.cache.get(key) for tactic, key in keys.items()}
        missing = [tactic for tactic in tactics if known[tactic] is None]
        if missing:
            packed: dict[Any, list[Array]] = {}
            for tactic in missing:
                if spec.packing(tactic) not in packed:
                    packed[spec.packing(tactic)] = [aligned(c) for c in spec.pack(self.isa, tactic, constants)]
            measured = measure({tactic: self._bound(spec, tactic, packed[spec.packing(tactic)]) for tactic in missing})
            self.timed += len(missing)
            for tactic, microseconds in measured.items():
                self.cache.put(keys[tactic], microseconds)
                known[tactic] = microseconds
        return {tactic: found for tactic, found in known.items() if found is not None}

    def _bound(self, spec: KernelSpec, tactic: Any, packed: Sequence[Array]) -> Callable[[], None]:
        """A call of the tactic's kernel on one item of zeros."""
        kernel, grid = self.kernel(spec, tactic), spec.grid(self.isa, tactic)
        loaded = LoadedCode([kernel.code])
        arrays = [*map(_memory, spec.inputs), *packed, *map(_memory, spec.outputs)]
        table = np.array([array.ctypes.data for array in arrays], np.int64)
        function = KERNEL(loaded.addresses[kernel.symbol])
        address, keep = table.ctypes.data, (arrays, table, loaded)

        def call(keep: Any = keep) -> None:
            function(address, 0, grid.rows_per_item, 0, grid.columns)
        return call


def aligned(array: Array) -> Array:
    """A flat copy that begins on a cache line: numpy's own buffers need not."""
    array = np.ascontiguousarray(array).reshape(-1)
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64
    result = raw[start:start + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def _memory(view: View) -> Array:
    """Room for one item of a view, halo and slack included."""
    reach = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True)) + view.size
    return aligned(np.zeros(reach + 256, np.uint8))


def measure(calls: dict[Any, Callable[[], None]]) -> dict[Any, float]:
    """{name: call} -> {name: microseconds of its fastest run}, the calls taken in turns.

    The fastest run, because everything that disturbs a measurement makes it longer.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()                      # touch the memory, fill the caches
    for _ in range(ROUNDS):
        for name, call in calls.items():
            end = time.perf_counter() + SECONDS / ROUNDS
            while True:
                begin = time.perf_counter()
                call()
                now = time.perf_counter()
                best[name] = min(best[name], now - begin)
                if now >= end:
                    break
    return {name: seconds * 1e6 for name, seconds in best.items()}
