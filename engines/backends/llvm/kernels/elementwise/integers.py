"""One operation on integers, in vectors of i64."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import Runs, joined, offset
from engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, Window, begin_kernel, solves
from engines.codegen.ir_builder import I1, I64, Module, Value, vector
from engines.lowering.problems.elementwise import UNSIGNED, Integers
from engines.lowering.problems.view import View

Operation = Callable[..., Value]        # on vectors of i64; an answer of yes or no is 1 or 0


def _comparison(order: str) -> Operation:
    return lambda a, b: _truth(a.compare(order, b))


def _truth(test: Value) -> Value:
    return test.f.cast("zext", test, test.type.replace(I1, I64), "truth")


def _binary(word: str) -> Operation:
    return lambda a, b: a.binary(word, b)


def _choice(order: str) -> Operation:
    return lambda a, b: a.f.select(a.compare(order, b), a, b)


# By 0 all of these give 0. The machine's division is not asked for what it would trap at: that, and -2**63 / -1.
def _divisor(b: Value) -> Value:
    special = b.compare("eq", 0).binary("or", b.compare("eq", -1))
    return b.f.select(special, b.like(1), b)


def _quotient(a: Value, b: Value) -> Value:
    """Truncated toward zero."""
    usual = a.binary("sdiv", _divisor(b))
    return a.f.select(b.compare("eq", 0), a.like(0), a.f.select(b.compare("eq", -1), a.like(0) - a, usual))


def _remainder(a: Value, b: Value) -> Value:
    """With the sign of the dividend."""
    return a.binary("srem", _divisor(b))


def _modulo(a: Value, b: Value) -> Value:
    """With the sign of the divisor."""
    rest = _remainder(a, b)
    opposed = rest.compare("ne", 0).binary("and", rest.binary("xor", b).compare("slt", 0))
    return a.f.select(opposed, rest + b, rest)


OPERATIONS: Mapping[str, Operation] = {
    "copy": lambda x: x,
    "not": lambda x: _truth(x.compare("eq", 0)),
    "negate": lambda x: x.like(0) - x,
    "invert": lambda x: x.binary("xor", -1),
    "absolute": lambda x: x.f.select(x.compare("slt", 0), x.like(0) - x, x),
    "add": _binary("add"),
    "subtract": _binary("sub"),
    "multiply": _binary("mul"),
    "divide": _quotient,
    "modulo": _modulo,
    "remainder": _remainder,
    "and": _binary("and"),
    "or": _binary("or"),
    "xor": _binary("xor"),
    "greatest": _choice("sgt"),
    "least": _choice("slt"),
    "equal": _comparison("eq"),
    "less": _comparison("slt"),
    "less_or_equal": _comparison("sle"),
    "greater": _comparison("sgt"),
    "greater_or_equal": _comparison("sge"),
    "where": lambda c, a, b: c.f.select(c.compare("ne", 0), a, b),
}


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
        value = _truth(value.compare("ne", 0))
    stored = value if element == I64 else f.cast("trunc", value, vector(count, element), "narrow")
    if stride == view.size or count == 1:
        f.store(stored, address)
        return
    for i in range(count):
        f.store(f.op(element, f"extractelement {stored}, i32 {i}", "element"), address + i * stride)
