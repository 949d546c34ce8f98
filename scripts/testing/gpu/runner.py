"""Runner of a problem on a GPU, emulated on the CPU by its PTX; each tensor is an allocation of its own."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.cuda import kernels  # noqa: F401  (fills KERNELS)
from infer_server.engines.backends.cuda.backend import BACKEND
from infer_server.engines.backends.cuda.codegen.assemble import ptx_of
from infer_server.engines.backends.cuda.codegen.gpu import GPUS, Gpu
from infer_server.engines.backends.cuda.codegen.module import GpuModule
from infer_server.engines.backends.cuda.cost import CARDS
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, cheapest, kernel_for
from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.holdings import ScopedResources
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.machine.timing_cache import TimingCache
from scripts.testing.gpu.emulated import EmulatedGpu

ALIGNED = 256       # default alignment of every tensor


@dataclass(frozen=True)
class Way:
    """Kernel with one of its tactics."""
    kernel: GpuKernel[Any]
    tactic: Any

    @property
    def problem(self) -> Problem:
        problem: Problem = self.kernel.problem
        return problem


@cache
def text_of(way: Way) -> str:
    module = GpuModule()
    way.kernel.emit(module, "kernel", way.tactic)
    return ptx_of(module.text(), way.kernel.gpu)


def way_of(problem: Problem | Way, gpu: Gpu, aligned: int = ALIGNED) -> Way:
    """Return the problem's kernel with its cheapest tactic. Skips the test if its family has none."""
    if isinstance(problem, Way):
        return problem
    kernel = kernel_for(problem, gpu, (aligned,) * len((*problem.inputs, *problem.outputs)))
    if kernel is None:
        pytest.skip(f"there is no GPU kernel for {problem.family}")
    if kernel.refusal:
        pytest.skip(kernel.refusal)
    return Way(kernel, cheapest(kernel, CARDS[gpu.name], items=2))


def emulated(gpu: Gpu) -> GpuDriver:
    return EmulatedGpu(gpu.name, 16 << 20)


@dataclass(frozen=True)
class GpuRunner:
    """Runner on one architecture. `open` returns the GPU, by default the emulated one."""
    gpu: Gpu
    open: Callable[[Gpu], GpuDriver] = emulated
    lanes: int = 32

    @property
    def name(self) -> str:
        return self.gpu.name

    def ways(self, problem: Problem) -> list[Way]:
        return [way_of(problem, self.gpu)]

    def execute(self, problem: Problem | Way, inputs: list[Array], outputs: list[Array], constants: dict[str, Any],
                batch: int, pieces: int = 1, aligned: int = ALIGNED, text: str = "") -> None:
        """Run the problem by one launch. aligned: alignment of each tensor's address in bytes."""
        way, device = way_of(problem, self.gpu, aligned), self.open(self.gpu)
        grid, tensors = way.kernel.grid(way.tactic), [*inputs, *outputs]
        with ScopedResources(device) as resources:
            device.use()
            addresses = [resources.upload(np.concatenate([np.zeros(aligned, np.uint8), tensor])) + aligned
                         for tensor in tensors]
            tables = [resources.upload(table) for table in way.kernel.pack(way.tactic, constants)]
            module = device.load((text or text_of(way)).encode())
            resources.add(partial(device.unload, module))
            stream = device.stream()
            resources.add(stream.close)
            split = len(inputs)
            stream.launch(device.function(module, "kernel", grid.shared_bytes), grid.blocks(batch), grid.threads,
                          [*addresses[:split], *tables, *addresses[split:]], grid.rows_per_item * batch,
                          grid.shared_bytes)
            results = [np.empty_like(tensor) for tensor in tensors]
            for array, address in zip(results, addresses, strict=True):
                stream.copy_out(array, address)
            stream.wait()
        for tensor, old, new in zip(tensors, [tensor.copy() for tensor in tensors], results, strict=True):
            tensor[new != old] = new[new != old]        # tensors may share one allocation


def at_hand() -> GpuRunner:
    """Return a runner on the GPU of this machine. Raises ConfigError if there is none."""
    return GpuRunner(GPUS[BACKEND.session("cuda", TimingCache(), timing=False).target], lambda gpu: DEVICE.gpu)


def every_way(problem: Problem, gpu: Gpu) -> list[Way]:
    """Return all tactics that the tuner may choose."""
    way = way_of(problem, gpu)
    return [replace(way, tactic=tactic) for tactic in way.kernel.tactics()]
