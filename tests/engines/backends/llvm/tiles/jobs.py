"""Jobs for a TileMachine: a kernel on the inputs of its problem."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.compile import OPT, compile_cached
from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Kernel
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.lowering.problems.problem import Array
from infer_server.engines.plan.plan import SLACK
from scripts.testing.suite import extent, window
from tests.engines.backends.llvm.tiles.trapped import KernelJob, run_trapped


def compiled(module: Module, isa: Isa) -> bytes:
    """Return the object of a module, optimised as in a plan."""
    return compile_cached(module.text(), isa.triple, isa.cpu, isa.features, opt=OPT)


def kernel_job(kernel: Kernel[Any], isa: Isa, tactic: Any, inputs: Sequence[Array], constants: dict[str, Any],
               packed: Sequence[Array] | None = None) -> KernelJob:
    """Return the call of a kernel for a batch.

    packed: its packed constants, if they are not those of `constants`.
    """
    module, problem, batch = Module(), kernel.problem, len(inputs[0])
    kernel.emit(module, "kernel", isa, tactic)
    memory = [np.zeros(extent(view, batch) + SLACK, np.uint8) for view in (*problem.inputs, *problem.outputs)]
    for view, place, array in zip(problem.inputs, memory, inputs, strict=False):
        window(view, place, batch)[...] = array
    count = len(problem.inputs)
    packed = kernel.expanded_constants(isa, tactic, constants) if packed is None else packed
    grid = kernel.grid(isa, tactic)
    return KernelJob(compiled(module, isa), "kernel", [*memory[:count], *packed, *memory[count:]],
                     batch * grid.rows_per_item, grid.columns)


def counting(job: KernelJob) -> KernelJob:
    """Return the job that only counts its tile instructions."""
    return replace(job, execute=False)


def output_of(kernel: Kernel[Any], job: KernelJob, batch: int, folder: Path) -> Array:
    """Run a kernel with one output on a TileMachine.

    Raises
    ------
    TileError
        A CPU would refuse one of its instructions.
    """
    result, = run_trapped([job], folder)
    result.check()
    return window(kernel.problem.outputs[0], result.outputs[str(len(job.operands) - 1)], batch)
