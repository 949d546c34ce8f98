"""One operation on integers, in vectors of i64."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import Runs, offset
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from engines.codegen.integers import OPERATIONS, truth
from engines.codegen.ir_builder import I64, Module, Value, vector
from engines.lowering.problems.elementwise import UNSIGNED, Integers
from engines.lowering.problems.view import View, joined


@solves(Integers)
class IntegersKernel(Kernel[Integers]):
    @cached_property
    def runs(self) -> Runs:
        return Runs(joined((*self.problem.sources, self.problem.output), keep_last=False))

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.runs.rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return self.runs.windows()

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.problem.sources) + 1)
        self.runs.emit(f, addresses, begin, end, isa.lanes, self._vector)

    def _vector(self, at: list[Value], start: Value, count: int) -> None:
        *views, output = self.runs.views
        *places, target = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.runs.views, strict=True))
        values = [load_integers(view, place, count) for view, place in zip(views, places, strict=True)]
        store_integers(output, OPERATIONS[self.problem.operation](*values), target, count)


def load_integers(view: View, address: Value, count: int) -> Value:
    """`count` elements along the innermost axis as i64; a float is truncated. A stride of 0 repeats one element."""
    f, element, stride, wide = address.f, ELEMENTS[view.dtype], view.strides[-1], vector(count, I64)
    if stride == view.size:
        stored = f.load(vector(count, element), address, hint="stored")
    elif stride == 0:
        stored = f.splat(f.load(element, address, hint="stored"), count)
    else:
        stored = f.constant(0, vector(count, element))
        for i in range(count):
            one = f.load(element, address + i * stride, hint="stored")
            stored = f.op(stored.type, f"insertelement {stored}, {one}, i32 {i}", "gathered")
    if view.dtype == "float32":
        return f.cast("fptosi", stored, wide, "truncated")
    if element == I64:
        return stored
    return f.cast("zext" if view.dtype in UNSIGNED else "sext", stored, wide, "wide")


def store_integers(view: View, value: Value, address: Value, count: int) -> None:
    """`count` elements of i64 along the innermost axis, each cut to the bits that it is stored in."""
    f, element, stride = address.f, ELEMENTS[view.dtype], view.strides[-1]
    if view.dtype == "bool":
        value = truth(value.compare("ne", 0))
    stored = value if element == I64 else f.cast("trunc", value, vector(count, element), "narrow")
    if stride == view.size or count == 1:
        f.store(stored, address)
        return
    for i in range(count):
        f.store(f.op(element, f"extractelement {stored}, i32 {i}", "element"), address + i * stride)
