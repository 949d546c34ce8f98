"""Elementwise integer operations, in vectors of the width that the operands need."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.common.access import ViewRuns, offset
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from infer_server.engines.codegen.integers import OPERATIONS, truth
from infer_server.engines.codegen.ir_builder import Module, Value
from infer_server.engines.codegen.types import ELEMENTS, vector
from infer_server.engines.lowering.problems.elementwise import UNSIGNED, Integers
from infer_server.engines.lowering.problems.view import View, joined


@solves(Integers)
class IntegersKernel(Kernel[Integers]):
    """Kernel of elementwise integer operations."""
    @cached_property
    def runs(self) -> ViewRuns:
        return ViewRuns(joined((*self.problem.sources, self.problem.output), keep_last=False))

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.runs.rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return self.runs.windows()

    @cached_property
    def bits(self) -> int:
        """Return the width of integers that hold all operands, as far as the result depends on their bits."""
        sources, output = self.problem.sources, self.problem.output
        if self.problem.operation == "copy" and (sources[0].dtype, output.dtype) == ("float32", "int32"):
            return 32
        return max(8 * output.size, *(_bits(view, output) for view in sources))

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.problem.sources) + 1)
        self.runs.emit(f, addresses, begin, end, isa.lanes * max(32 // self.bits, 1), partial(self._vector, isa))

    def _vector(self, isa: Isa, at: list[Value], start: Value, count: int) -> None:
        *views, output = self.runs.views
        *addresses, target = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.runs.views, strict=True))
        values = [load_integers(isa, view, address, count, self.bits)
                  for view, address in zip(views, addresses, strict=True)]
        store_integers(output, OPERATIONS[self.problem.operation](*values), target, count)


def _bits(view: View, output: View) -> int:
    """Return the width of a signed integer that holds the stored values.

    For floats, as far as the output depends on them.
    """
    if view.dtype == "float32":
        return 32 if output.size == 1 else 64
    return min(8 * view.size * (2 if view.dtype in UNSIGNED and view.dtype != "bool" else 1), 64)


def load_integers(isa: Isa, view: View, address: Value, count: int, bits: int = 64) -> Value:
    """Load `count` elements along the innermost axis as integers of so many bits.

    Floats are truncated. A stride of 0 repeats one element.
    """
    f, element, stride, wide = address.f, ELEMENTS[view.dtype], view.strides[-1], vector(count, f"i{bits}")
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
        return f.cast("fptosi", stored if bits == 64 else _wrapped(isa, stored), wide, "truncated")
    if stored.type == wide:
        return stored
    return f.cast("zext" if view.dtype in UNSIGNED else "sext", stored, wide, "wide")


def _wrapped(isa: Isa, x: Value) -> Value:
    """Return floats in the int32 range that are congruent to x modulo 2**32; 0 for NaN and infinities.

    Every operation is exact.
    """
    f, whole = x.f, 2.0 ** 32
    rest = x - isa.unary("rint", x * (1 / whole)) * whole
    rest = f.select(rest.compare("oge", whole / 2), rest.like(-whole / 2), rest)
    return f.select(rest.compare("oeq", rest), rest, rest.like(0.0))


def store_integers(view: View, value: Value, address: Value, count: int) -> None:
    """Store `count` integers along the innermost axis, truncated to the stored width."""
    f, element, stride = address.f, ELEMENTS[view.dtype], view.strides[-1]
    if view.dtype == "bool":
        value = truth(value.compare("ne", 0), value)
    narrow = vector(count, element)
    stored = value if value.type == narrow else f.cast("trunc", value, narrow, "narrow")
    if stride == view.size or count == 1:
        f.store(stored, address)
        return
    for i in range(count):
        f.store(f.op(element, f"extractelement {stored}, i32 {i}", "element"), address + i * stride)
