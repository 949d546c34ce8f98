"""Elementwise integer operation in 64 bits, one element per thread."""
from __future__ import annotations

from functools import cached_property

from infer_server.engines.backends.cuda.kernels.elementwise.threads import ThreadKernel, row_of
from infer_server.engines.backends.cuda.kernels.kernel import solves
from infer_server.engines.codegen.integers import OPERATIONS, truth
from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import ELEMENTS, I64
from infer_server.engines.lowering.problems.elementwise import UNSIGNED, Integers
from infer_server.engines.lowering.problems.view import View, joined


@solves(Integers)
class IntegersOfThreads(ThreadKernel[Integers]):
    """Kernel with one thread per element."""
    each = 1

    @cached_property
    def views(self) -> tuple[View, ...]:
        return joined(list(map(row_of, (*self.problem.inputs, *self.problem.outputs))), keep_last=False)

    def write(self, f: Function, operands: list[Value], pixel: Value, channel: Value) -> None:
        values = [_load(view, self.at(n, operands, pixel, channel)) for n, view in enumerate(self.views[:-1])]
        _store(self.y, OPERATIONS[self.problem.operation](*values), self.at(-1, operands, pixel, channel))


def _load(view: View, address: Value) -> Value:
    """Load an element as i64; floats are truncated."""
    f = address.f
    stored = f.load(ELEMENTS[view.dtype], address, view.size, "stored")
    if view.dtype == "float32":
        return f.cast("fptosi", stored, I64, "truncated")
    if stored.type == I64:
        return stored
    return f.cast("zext" if view.dtype in UNSIGNED else "sext", stored, I64, "wide")


def _store(view: View, value: Value, address: Value) -> None:
    """Truncate an i64 to the stored type and store it."""
    if view.dtype == "bool":
        value = truth(value.compare("ne", 0), value)
    element = ELEMENTS[view.dtype]
    value.f.store(value if element == I64 else value.f.cast("trunc", value, element, "narrow"), address, view.size)
