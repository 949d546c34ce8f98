"""One operation on integers: token numbers, positions, masks of yes and no.

    y[n, i, ...] = operation(inputs[n, i, ...])             in int64, whatever the tensors are stored as

So no number is rounded, as it would be on its way through float32, and what is stored in fewer bits wraps as the same
arithmetic in those bits would. Truth is stored as 1 and 0. These tensors have an element a token; nothing is fused.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.ir_builder import I1, I64, Module, Value, vector
from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.codegen.lanes import ELEMENTS
from engines.backends.llvm.kernels.common.access import Runs, joined, offset
from engines.backends.llvm.kernels.kernel import Grid, KernelSpec, Tactic, Window, begin_kernel
from engines.lowering.problems.problem import Array
from engines.lowering.problems.view import View

UNSIGNED = ("bool", "uint8")
STORED = (*UNSIGNED, "int8", "int32", "int64")          # float32 is read too, and truncated


@dataclass(frozen=True)
class Operation:
    """What it means (numpy, int64) and how it is emitted (vectors of i64); an answer of yes or no is 1 or 0."""
    meaning: Callable[..., Any]
    emit: Callable[..., Value]


def _comparison(meaning: np.ufunc, order: str) -> Operation:
    return Operation(meaning, lambda a, b: _truth(a.compare(order, b)))


def _truth(test: Value) -> Value:
    return test.f.cast("zext", test, test.type.replace(I1, I64), "truth")


def _binary(meaning: np.ufunc, word: str) -> Operation:
    return Operation(meaning, lambda a, b: a.binary(word, b))


def _choice(meaning: np.ufunc, order: str) -> Operation:
    return Operation(meaning, lambda a, b: a.f.select(a.compare(order, b), a, b))


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


def _quotient_meaning(a: Any, b: Any) -> Any:
    exact = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, (a - np.fmod(a, exact)) // exact)


OPERATIONS: Mapping[str, Operation] = {
    "copy": Operation(lambda x: x, lambda x: x),
    "not": Operation(lambda x: x == 0, lambda x: _truth(x.compare("eq", 0))),
    "negate": Operation(np.negative, lambda x: x.like(0) - x),
    "invert": Operation(np.invert, lambda x: x.binary("xor", -1)),
    "absolute": Operation(np.abs, lambda x: x.f.select(x.compare("slt", 0), x.like(0) - x, x)),
    "add": _binary(np.add, "add"),
    "subtract": _binary(np.subtract, "sub"),
    "multiply": _binary(np.multiply, "mul"),
    "divide": Operation(_quotient_meaning, _quotient),
    "modulo": Operation(np.mod, _modulo),
    "remainder": Operation(np.fmod, _remainder),
    "and": _binary(np.bitwise_and, "and"),
    "or": _binary(np.bitwise_or, "or"),
    "xor": _binary(np.bitwise_xor, "xor"),
    "greatest": _choice(np.maximum, "sgt"),
    "least": _choice(np.minimum, "slt"),
    "equal": _comparison(np.equal, "eq"),
    "less": _comparison(np.less, "slt"),
    "less_or_equal": _comparison(np.less_equal, "sle"),
    "greater": _comparison(np.greater, "sgt"),
    "greater_or_equal": _comparison(np.greater_equal, "sge"),
    "where": Operation(lambda c, a, b: np.where(c != 0, a, b), lambda c, a, b: c.f.select(c.compare("ne", 0), a, b)),
}


@dataclass(frozen=True)
class Integers(KernelSpec):
    """inputs and output are of one shape; an input's stride of 0 broadcasts."""
    operation: str
    sources: tuple[View, ...]
    output: View
    family = "integers"
    computes_on = (*STORED, "float32")

    @property
    def inputs(self) -> tuple[View, ...]:
        return self.sources

    @property
    def outputs(self) -> tuple[View, ...]:
        return (self.output,)

    @cached_property
    def runs(self) -> Runs:
        return Runs(joined((*self.sources, self.output), keep_last=False))

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.runs.rows)

    def windows(self, isa: Isa, tactic: Tactic) -> Sequence[Window]:
        return self.runs.windows()

    # ---- code
    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        f, addresses, (begin, end, *_) = begin_kernel(module, name, len(self.sources) + 1)
        self.runs.emit(f, addresses, begin, end, isa.lanes, self._vector)

    def _vector(self, at: list[Value], start: Value, count: int) -> None:
        *views, output = self.runs.views
        *places, target = (offset(a, [start], [v.strides[-1]]) for a, v in zip(at, self.runs.views, strict=True))
        values = [load_integers(view, place, count) for view, place in zip(views, places, strict=True)]
        store_integers(output, OPERATIONS[self.operation].emit(*values), target, count)

    # ---- meaning
    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            result = OPERATIONS[self.operation].meaning(*(x.astype(np.int64) for x in inputs))
            return (np.asarray(result).astype(self.output.dtype),)


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
