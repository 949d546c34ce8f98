"""Times tactics on a GPU, with its own clock and for the batch to optimise, and picks the fastest.

A tactic is timed as it will run: as a CUDA graph of consecutive launches, including the gaps between them. Its tensors
are private. Only floats and quantised numbers are random; indices are zeros, which are always valid. Times are kept in
the timing cache under the name of the GPU.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from infer_server.engines.backends.base import Progress
from infer_server.engines.backends.cuda.codegen.assemble import code_of, compiler_pool
from infer_server.engines.backends.cuda.codegen.gpu import Gpu
from infer_server.engines.backends.cuda.codegen.module import GpuModule
from infer_server.engines.backends.cuda.cost import Card
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel
from infer_server.engines.backends.cuda.kernels.kernel import cheapest as least
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.holdings import ScopedResources
from infer_server.engines.backends.cuda.runtime.library import CudaCodeError, CudaError
from infer_server.engines.errors import NoKernelError
from infer_server.engines.lowering.problems.view import View
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.version import COMPILER_VERSION

HOPEFUL = 2.0           # tactics that cost more than this times the least estimate are not timed
LAUNCHES, ROUNDS = 10, 3        # launches per graph; graphs, of which the fastest counts
SYMBOL = "kernel"
BLOCK = np.random.default_rng(0).integers(0, 64, 1 << 20, np.uint8)     # as floats these are finite and normal
RANDOM = ("uint8", "int8", "float16", "bfloat16", "float32")


class TuningRequest(NamedTuple):
    """Kernel whose tactic is to be chosen."""
    kernel: GpuKernel[Any]
    constants: Mapping[str, Any]    # their values do not matter
    items: int


@dataclass(frozen=True)
class Candidate:
    """Kernel with a tactic, to be timed for a number of items."""
    kernel: GpuKernel[Any]
    tactic: Any
    items: int


class GpuTuner:
    """Tuner for one architecture on one GPU."""

    def __init__(self, device: GpuDriver, target: Gpu, cache: TimingCache) -> None:
        self.device, self.target, self.cache = device, target, cache

    def choose(self, requests: Sequence[TuningRequest], card: Card,
               progress: Progress | None = None) -> list[tuple[Any, float]]:
        """Return the fastest tactic of each kernel and its seconds. Raise NoKernelError if all tactics of one fail."""
        candidates = [candidates_for(one, card) for one in requests]
        found = {one: us for some in candidates for one in some if (us := self.cache.get(self._key(one))) is not None}
        missing = [(one, of.constants) for of, some in zip(requests, candidates, strict=True)
                   for one in some if one not in found]
        report = progress or (lambda done, of, what: None)
        done = iter(range(1, 2 * len(missing) + 1))
        with compiler_pool(self.target, self.device.takes_cubins) as pool:
            code = pool.compile((_text(one) for one, _ in missing),
                                lambda: report(next(done), 2 * len(missing), "compiled"))
        refusals: dict[Candidate, CudaError] = {}
        for (one, constants), binary in zip(missing, code, strict=True):
            try:
                found[one] = self._seconds(one, constants, binary) * 1e6
                self.cache.put(self._key(one), found[one])
            except CudaError as error:      # for example too many registers: another tactic may run
                refusals[one] = error
            report(next(done), 2 * len(missing), f"timed {one.kernel.problem.family}")
        return [self._fastest(some, found, refusals) for some in candidates]

    def _fastest(self, candidates: Sequence[Candidate], times: Mapping[Candidate, float],
                 refusals: Mapping[Candidate, CudaError]) -> tuple[Any, float]:
        ran = [one for one in candidates if one in times]
        if not ran:
            one = candidates[0]
            raise NoKernelError(f"no tactic of the {one.kernel.problem.family} kernel runs on this GPU "
                                f"({self.device.name}): {one.tactic}: {refusals[one]}")
        best = min(ran, key=lambda one: times[one])
        return best.tactic, times[best] / 1e6

    def _key(self, one: Candidate) -> str:
        text = repr((COMPILER_VERSION, self.target.name, one.kernel, one.tactic))
        return f"{self.device.name}/{hashlib.sha256(text.encode()).hexdigest()}/{one.items}"

    # ---- on the GPU
    def _seconds(self, one: Candidate, constants: Mapping[str, Any], code: bytes) -> float:
        """Return the seconds of a launch. Raise CudaError if it fails."""
        device, kernel, grid = self.device, one.kernel, one.kernel.grid(one.tactic)
        device.use()
        with ScopedResources(device) as held:
            module = self._module(one, code)
            held.add(partial(device.unload, module))
            function = device.function(module, SYMBOL, grid.shared_bytes)
            split, tensors = len(kernel.problem.inputs), [*kernel.problem.inputs, *kernel.problem.outputs]
            addresses = [self._tensor(view, one.items, held) for view in tensors]
            tables = [held.upload(array) for array in kernel.pack(one.tactic, constants)]
            stream = device.stream()
            held.add(stream.close)
            launch = partial(stream.launch, function, grid.blocks(one.items), grid.threads,
                             [*addresses[:split], *tables, *addresses[split:]], grid.rows_per_item * one.items,
                             grid.shared_bytes)
            graph = stream.record(partial(_launch_repeatedly, launch))
            held.add(graph.close)
            stream.seconds(graph)       # warm up: loads the code and raises the clock
            return min(stream.seconds(graph) for _ in range(ROUNDS)) / LAUNCHES

    def _module(self, one: Candidate, code: bytes) -> Any:
        """Load the code of a candidate, compiled from PTX if the driver rejects the machine code."""
        try:
            return self.device.load(code)
        except CudaCodeError:       # machine code of a newer CUDA than the driver's
            return self.device.load(code_of(_text(one), self.target, cubin=False))

    def _tensor(self, view: View, items: int, held: ScopedResources) -> int:
        reach = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True))
        size = view.size + reach + (items - 1) * view.item
        address = held.allocate(size)
        if view.dtype in RANDOM:
            for at in range(0, size, len(BLOCK)):
                self.device.write(address + at, BLOCK[:size - at])
        return address


def cheapest(request: TuningRequest, card: Card) -> tuple[Any, float]:
    """Return the tactic with the least estimated cost and its estimated seconds."""
    kernel, items = request.kernel, request.items
    tactic = least(kernel, card, items)
    return tactic, kernel.cost(tactic, card, items)


def candidates_for(request: TuningRequest, card: Card) -> list[Candidate]:
    """Return the candidates within HOPEFUL of the least estimated cost, cheapest first."""
    kernel, items = request.kernel, request.items
    costs = {tactic: kernel.cost(tactic, card, items) for tactic in kernel.tactics()}
    limit = HOPEFUL * min(costs.values())
    ranked = sorted((tactic for tactic, cost in costs.items() if cost <= limit and cost < math.inf),
                    key=lambda tactic: costs[tactic])
    return [Candidate(kernel, tactic, items) for tactic in ranked or costs]


def _launch_repeatedly(launch: Callable[[], None]) -> None:
    for _ in range(LAUNCHES):
        launch()


def _text(one: Candidate) -> str:
    module = GpuModule()
    one.kernel.emit(module, SYMBOL, one.tactic)
    return module.text()
