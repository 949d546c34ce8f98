"""Base of kernels without shared memory: one thread for a few neighbouring elements along the innermost axis.

    for thread of all items:                    128 threads per block
      `each` channels of a pixel of y:          as many as all views can access with up to 16 bytes
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from infer_server.engines.backends.cuda.codegen.module import GpuModule, begin_kernel, special_register, wide
from infer_server.engines.backends.cuda.kernels.access import (
    WIDEST,
    load_channels,
    load_constants,
    offset_in,
    run_program,
    store_channels,
    vector_width,
)
from infer_server.engines.backends.cuda.kernels.kernel import GpuKernel, Grid, Tactic
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View

THREADS = 128

P = TypeVar("P", bound=Problem)


class ThreadKernel(GpuKernel[P]):
    """Kernel with one thread for `each` elements of y.

    `views` are the tensors that are accessed at the same index, y last.
    """

    @cached_property
    def views(self) -> tuple[View, ...]:
        return tuple(map(row_of, (*self.problem.inputs, *self.problem.outputs)))

    @property
    def y(self) -> View:
        return self.views[-1]

    @property
    def vectors(self) -> Sequence[tuple[View, int]]:
        """Views, with alignments, that a thread accesses `each` elements at a time."""
        return list(zip(self.views, self.aligned, strict=True))

    @cached_property
    def each(self) -> int:
        """Neighbouring elements per thread."""
        vectors = self.vectors
        return vector_width(vectors, self.y.shape[-1], WIDEST // max(view.size for view, _ in vectors))

    def grid(self, tactic: Tactic) -> Grid:
        return Grid(math.prod(self.y.shape) // self.each, THREADS, THREADS)

    @property
    def tables(self) -> int:
        """Number of packed constants."""
        return 0

    @property
    def min_blocks(self) -> int:
        """Minimum of resident blocks that ptxas must allow (minctasm), or 0 to leave it to ptxas."""
        return 0

    def emit(self, module: GpuModule, name: str, tactic: Tactic) -> None:
        problem = self.problem
        count = len(problem.inputs) + self.tables + len(problem.outputs)
        f, operands, rows = begin_kernel(module, name, THREADS, count)
        if self.min_blocks:
            module.min_blocks[name] = self.min_blocks
        thread = special_register(f, "ctaid.x") * THREADS + special_register(f, "tid.x")
        with f.when(thread.below(rows)):
            groups = self.y.shape[-1] // self.each
            self.write(f, operands, thread.divided(groups), thread.remainder(groups) * self.each)

    @abstractmethod
    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        """Emit the code of one thread: `each` channels from `channel` on, of the pixel-th row of channels."""

    def at(self, number: int, operands: Sequence[Value], pixel: Value, channel: Value) -> Value:
        """Return the address in the number-th view, which is also the operand's number; -1 is y."""
        view = self.views[number]
        return operands[number] + offset_in(view, pixel) + wide(channel) * view.strides[-1]


class ProgramKernel(ThreadKernel[P]):
    """Kernel whose results go through an epilogue program."""

    @property
    @abstractmethod
    def program(self) -> EpilogueProgram:
        ...

    @property
    def tables(self) -> int:
        return 1

    def pack(self, tactic: Tactic, constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the program's constants as float32 [constant][channels]."""
        table = np.zeros((max(self.program.constants, 1), self.y.shape[-1]), np.float32)
        for row, constant in zip(table, constants.get("program", ()), strict=False):
            row[:] = constant
        return (table,)

    def finish(self, operands: list[Value], pixel: Value, channel: Value, sums: Sequence[Value],
               sources: Sequence[int], table: int) -> None:
        """Run the program on sums and other views, and store the results.

        Parameters
        ----------
        operands : list of Value
            Addresses of the kernel's operands.
        pixel, channel : Value
            Position of the thread.
        sums : sequence of Value
            Accumulators, one per channel.
        sources : sequence of int
            Numbers of the views that are the program's other inputs.
        table : int
            Number of the operand that holds the program's constants.
        """
        gpu, each = self.gpu, self.each
        others = [load_channels(gpu, self.views[n], self.at(n, operands, pixel, channel), each) for n in sources]
        numbers = load_constants(pixel.f, operands[table], channel, each, self.program.constants, self.y.shape[-1])
        results = run_program(gpu, self.program, sums, others, numbers)
        store_channels(gpu, self.y, results, self.at(-1, operands, pixel, channel))


def row_of(view: View) -> View:
    """Return the view, with a scalar as a row of one element."""
    return view if view.shape else View(view.dtype, (1,), (view.size,), view.item)
