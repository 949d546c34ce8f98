"""Symbolic integers: sizes of a kernel that are read at run time instead of written into its code.

A kernel is written in Python with its problem's numbers: extents, strides. A KernelInt takes the place of such a
number. It computes as an int does, and records the expression (term) that gave it:

    rows = KernelInt(trace, 77, leaf(0))
    -(-rows // 6)                           # KernelInt: 13 = -(-n0 // 6)

Emitted as an operand, a KernelInt becomes a load from a table of run-time numbers (Function.constant). If Python needs
the number itself, to compare, to unroll a loop, to write it into a text, the answer is recorded as a guard. The code is
valid for all numbers that give every guard its recorded value. So a kernel need not be written for KernelInts: one that
reads the number itself is specialised to it, and its guards record that.

See infer_server.engines.ir.symint for the other symbolic integers.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer_server.engines.ir.symint import SymInt

TABLE = "parameters"            # name of the register that holds the table's address, in each function
Term = int | list[Any]          # a number; ["n", i] is leaf i; [operator, term, term]

_OPERATORS: dict[str, Callable[[int, int], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "==": operator.eq, "<": operator.lt, "<=": operator.le}
_DIVIDE = ("//", "%")
NEVER = -(1 << 62)          # result of a division by 0; no guard has this value


def leaf(index: int) -> Term:
    """Return the term of run-time number `index`."""
    return ["n", index]


def value_of(term: Term, numbers: Sequence[int]) -> int:
    """Evaluate a term for these run-time numbers; a division by 0 gives NEVER, a comparison 0 or 1."""
    if isinstance(term, int):
        return term
    if term[0] == "n":
        return numbers[term[1]]
    left, right = (value_of(one, numbers) for one in term[1:])
    return +_OPERATORS[term[0]](left, right) if term[0] not in _DIVIDE or right else NEVER     # + makes a bool an int


@dataclass
class Trace:
    """Guards and run-time numbers recorded while a kernel was written."""
    guards: dict[str, tuple[Term, int]] = field(default_factory=dict)       # text of a term -> (term, its value)
    table: list[Term] = field(default_factory=list)     # terms whose values the kernel loads
    _slots: dict[str, int] = field(default_factory=dict)

    def slot(self, term: Term) -> int:
        """Return the position of a term in the table; add the term if it is new."""
        key = str(term)
        if key not in self._slots:
            self._slots[key] = len(self.table)
            self.table.append(term)
        return self._slots[key]

    def guard(self, term: Term, value: int) -> None:
        """Record that the code is valid only while the term has this value."""
        self.guards[str(term)] = term, value

    def extents(self, numbers: Sequence[int]) -> list[KernelInt]:
        """Return a KernelInt for each number: number i is leaf i."""
        return [KernelInt(self, number, leaf(index)) for index, number in enumerate(numbers)]


class KernelInt(SymInt):
    """Integer with the term that it was computed by. It is no int, so that no code uses its number without a guard."""
    __slots__ = ("trace", "hint", "expr")

    def __init__(self, trace: Trace, hint: int, expr: Term) -> None:
        self.trace, self.hint, self.expr = trace, hint, expr

    def _arithmetic(self, word: str, a: Any, b: Any) -> Any:
        # A number of another kernel is a plain number here: terms of two traces cannot be combined.
        a, b = (one.__index__() if isinstance(one, KernelInt) and one.trace is not self.trace else one
                for one in (a, b))
        left, right = (one.expr if isinstance(one, KernelInt) else one for one in (a, b))
        if isinstance(left, float) or isinstance(right, float):
            return _OPERATORS[word](*(one.__index__() if isinstance(one, KernelInt) else one for one in (a, b)))
        if not isinstance(left, int | list) or not isinstance(right, int | list):
            return NotImplemented
        term = _simplified(word, left, right)
        if isinstance(term, int):
            return term
        return KernelInt(self.trace, int(_OPERATORS[word](*map(_number, (a, b)))), term)

    def _compare(self, word: str, a: Any, b: Any) -> Any:
        found = self._arithmetic(word, a, b)
        if found is NotImplemented:
            return NotImplemented
        return bool(found.__index__() if isinstance(found, KernelInt) else found)

    def __hash__(self) -> int:
        return hash(self.hint)

    # ---- conversions record guards
    def __index__(self) -> int:
        self.trace.guard(self.expr, self.hint)
        return self.hint

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __truediv__(self, other: Any) -> float:
        return self.__index__() / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / self.__index__()

    def __str__(self) -> str:
        return str(self.__index__())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)


class Table:
    """LLVM IR lines at the start of a function that load its run-time numbers, each once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._registers: dict[int, str] = {}

    def begin(self, operands: str, index: int) -> None:
        """Load the table's address, which is operand number `index` of the kernel."""
        self.lines += [f"  %{TABLE}.at = getelementptr i8, ptr {operands}, i64 {8 * index}",
                       f"  %{TABLE} = load ptr, ptr %{TABLE}.at, align 8"]

    def register(self, extent: KernelInt, fresh: Callable[[str], str]) -> str:
        """Return the i64 register that holds an extent; `fresh` makes an unused name from a hint."""
        slot = extent.trace.slot(extent.expr)
        if slot not in self._registers:
            name = self._registers[slot] = f"%{fresh('number')}"
            self.lines += [f"  {name}.at = getelementptr i8, ptr %{TABLE}, i64 {8 * slot}",
                           f"  {name} = load i64, ptr {name}.at, align 8"]
        return self._registers[slot]


def _number(one: KernelInt | int) -> int:
    return one.hint if isinstance(one, KernelInt) else one


def _simplified(word: str, left: Term, right: Term) -> Term:
    """Fold constants and identities (x + 0, 1 * x, x - x, ...) of a new term."""
    if word in ("==", "<=") and left == right:
        return 1
    if word == "<" and left == right:
        return 0
    if word == "*" and 1 in (left, right):
        return right if left == 1 else left
    if word == "*" and 0 in (left, right):
        return 0
    if (word in "+-" and right == 0) or (word == "//" and right == 1):
        return left
    if word == "+" and left == 0:
        return right
    if word in _DIVIDE and isinstance(right, int) and right and isinstance(left, list) and left[0] == "*":
        for factor, other in (left[1:], left[:0:-1]):
            if isinstance(factor, int) and factor % right == 0:
                return 0 if word == "%" else _simplified("*", factor // right, other)
    if word == "%" and right == 1 or word == "-" and left == right:
        return 0
    if isinstance(left, int) and isinstance(right, int):
        return int(_OPERATORS[word](left, right))
    return [word, left, right]
