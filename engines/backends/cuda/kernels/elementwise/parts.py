"""Sum of the slices of a split-K contraction, in order: one thread for a few neighbouring couts."""
from __future__ import annotations

from infer_server.engines.backends.cuda.kernels.access import load_stored
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel
from infer_server.engines.backends.cuda.kernels.kernel import solves
from infer_server.engines.backends.cuda.kernels.partial import SumOfParts
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I32
from infer_server.engines.lowering.epilogue.program import EpilogueProgram


@solves(SumOfParts)
class PartsByThread(ProgramKernel[SumOfParts]):
    """Kernel with one thread for a few couts."""

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        problem, first = self.problem, self.at(0, operands, pixel, channel)
        step = problem.y.shape[-1] * problem.x.size
        sums, *others = (load_stored(problem.x, first + part * step, self.each) for part in range(problem.parts))
        for part in others:
            sums = [before + more for before, more in zip(sums, part, strict=True)]
        inputs = len(problem.inputs)
        floats = [self.gpu.to_float(value) if value.type == I32 else value for value in sums]
        self.finish(operands, pixel, channel, floats, range(1, inputs), inputs)
