"""Epilogue program on every element: pointwise chains, casts, copies and transposes.

    y[n, i, ..., c] = program(x0[n, i, ..., c], x1[n, i, ..., c], ...; constants[c])

Adjacent axes that are evenly strided in all views are merged.
"""
from __future__ import annotations

from functools import cached_property

from infer_server.engines.backends.cuda.kernels.access import load_stored, store_stored
from infer_server.engines.backends.cuda.kernels.elementwise.threads import ProgramKernel, row_of
from infer_server.engines.backends.cuda.kernels.kernel import solves
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.elementwise import Pointwise
from infer_server.engines.lowering.problems.movement import Permute
from infer_server.engines.lowering.problems.view import View, joined


@solves(Pointwise, Permute)
class Elements(ProgramKernel[Pointwise | Permute]):
    """Kernel with one thread for a few neighbouring elements."""

    @property
    def program(self) -> EpilogueProgram:
        return self.problem.program

    @cached_property
    def views(self) -> tuple[View, ...]:
        by_channel = not self.problem.uniform and self.program.constants > 0
        return joined(list(map(row_of, (*self.problem.inputs, *self.problem.outputs))), keep_last=by_channel)

    @property
    def raw(self) -> bool:
        """True if bytes are only moved, without conversion to float."""
        return isinstance(self.problem, Permute) and self.problem.raw

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        if self.raw:
            stored = load_stored(self.views[0], self.at(0, operands, pixel, channel), self.each)
            store_stored(self.y, stored, self.at(-1, operands, pixel, channel))
            return
        sources = len(self.problem.inputs)
        self.finish(operands, pixel, channel, [], range(sources), sources)
