"""Runs a problem as a GPU does, by its PTX on the CPU: every tensor is an allocation of its own."""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from engines.backends.cuda import kernels  # noqa: F401  (fills KERNELS)
from engines.backends.cuda.codegen.assemble import ptx_of
from engines.backends.cuda.codegen.gpu import Gpu
from engines.backends.cuda.codegen.module import GpuModule
from engines.backends.cuda.cost import CARDS
from engines.backends.cuda.kernels.kernel import GpuKernel, cheapest, kernel_for
from engines.lowering.problems.problem import Array, Problem
from tests.gpu.ptx.machine import Machine
from tests.gpu.ptx.memory import Memory
from tests.gpu.ptx.text import parse

ALIGNED = 256       # of every tensor, unless a test says otherwise


@dataclass(frozen=True)
class Way:
    """A kernel by one of its tactics."""
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
    """The kernel of a problem by its cheapest tactic. Families that have none skip the test."""
    if isinstance(problem, Way):
        return problem
    kernel = kernel_for(problem, gpu, (aligned,) * len((*problem.inputs, *problem.outputs)))
    if kernel is None:
        pytest.skip(f"no kernel of {problem.family} for GPUs yet")
    if kernel.refusal:
        pytest.skip(kernel.refusal)
    return Way(kernel, cheapest(kernel, CARDS[gpu.name], items=2))


def launch(way: Way, memory: Memory, addresses: list[int], constants: dict[str, Any], items: int, outputs: int,
           text: str = "") -> None:
    """Run it on tensors in the machine's memory: inputs, then outputs."""
    tables = [memory.place(table) for table in way.kernel.pack(way.tactic, constants)]
    grid, split = way.kernel.grid(way.tactic), len(addresses) - outputs
    arguments = [*addresses[:split], *tables, *addresses[split:], grid.rows_per_item * items]
    Machine(memory).launch(parse(text or text_of(way))["kernel"], grid.blocks(items), grid.threads, arguments,
                           grid.shared_bytes)


@dataclass(frozen=True)
class GpuRunner:
    """The kernels of an architecture."""
    gpu: Gpu
    lanes: int = 32

    @property
    def name(self) -> str:
        return self.gpu.name

    def ways(self, problem: Problem) -> list[Way]:
        return [way_of(problem, self.gpu)]

    def execute(self, problem: Problem | Way, inputs: list[Array], outputs: list[Array], constants: dict[str, Any],
                batch: int, pieces: int = 1, aligned: int = ALIGNED, text: str = "") -> None:
        """pieces: a launch is one."""
        way, memory = way_of(problem, self.gpu, aligned), Memory(16 << 20)
        tensors = [*inputs, *outputs]
        addresses = [memory.place(np.concatenate([np.zeros(aligned, np.uint8), tensor])) + aligned
                     for tensor in tensors]
        before = [tensor.copy() for tensor in tensors]
        launch(way, memory, addresses, constants, batch, len(outputs), text)
        for tensor, address, old in zip(tensors, addresses, before, strict=True):
            new = memory.array(address, np.uint8, tensor.shape)
            tensor[new != old] = new[new != old]        # tensors may be parts of one


def every_way(problem: Problem, gpu: Gpu) -> list[Way]:
    """All tactics that the tuner may take."""
    way = way_of(problem, gpu)
    return [replace(way, tactic=tactic) for tactic in way.kernel.tactics()]
