"""Fill of the halo (border) around each image of a buffer, by vector stores."""
from __future__ import annotations

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import I8, vector
from infer_server.engines.lowering.problems.movement import HaloFill

UNROLLED = 4            # vectors


@solves(HaloFill)
class HaloFillKernel(Kernel[HaloFill]):
    """Kernel that writes the border value into the runs of a halo."""
    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(1)

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.problem.runs))
        for item in f.range("item", begin, end):
            for view, address in zip(self.problem.runs, addresses, strict=True):
                self._fill(f, isa, address + item * view.item, view.shape, view.strides)

    def _fill(self, f: Function, isa: Isa, start: Value, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        if len(shape) > 1:
            for run in f.loop("run", shape[0]):
                self._fill(f, isa, start + run * strides[0], shape[1:], strides[1:])
            return
        for at, part in f.tiles("byte", shape[0], UNROLLED * isa.bytes, split_tail=True):
            for first in range(0, part, isa.bytes):
                bytes_ = vector(min(part - first, isa.bytes), I8)
                f.store(f.constant(self.problem.value, bytes_), start + at + first)
