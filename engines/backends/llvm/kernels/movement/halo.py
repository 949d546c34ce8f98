"""The halo around each image of a buffer, written anew: runs of bytes by vectors."""
from __future__ import annotations

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from engines.codegen.ir_builder import Module
from engines.codegen.types import I8, vector
from engines.lowering.problems.movement import HaloFill

UNROLLED = 4            # vectors


@solves(HaloFill)
class HaloFillKernel(Kernel[HaloFill]):
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.problem.runs))
        for item in f.range("item", begin, end):
            for view, address in zip(self.problem.runs, addresses, strict=True):
                count, size = view.shape
                for run in f.loop("run", count):
                    start = address + (item * view.item + run * view.strides[0])
                    for at, part in f.tiles("byte", size, UNROLLED * isa.bytes, anyhow=True):
                        for first in range(0, part, isa.bytes):
                            bytes_ = vector(min(part - first, isa.bytes), I8)
                            f.store(f.constant(self.problem.value, bytes_), start + at + first)
