"""Symbolic integers: numbers that remember how they were computed, so that a trace at one shape holds for others.

A SymbolicInt is an open extent, or the result of arithmetic on some: it has a value (hint) and a polynomial over the
extents. It behaves as an int, and isinstance() takes it for one, but its value never leaks unnoticed:

    n * 4 + 1, n // 8, n % 3, divmod, max, min      a SymbolicInt, or an int if the extents cancel
    n == 3, n < m, bool(n), n in (1, 8)             a bool, and a guard: the trace holds where the answer is equal
    range(n), int(n), float(n), np.array([n]), hash(n)      NotSymbolic: the code would hold for this number only

Code written for ints is thus traced by running it; where that is impossible it raises instead of being wrong. `as_int`
is int() for numbers that may be symbolic. `plain` returns the value, for uses that are correct for any value (a cost, a
message, an order of trials); each use states the reason.

References
----------
torch.fx.experimental.symbolic_shapes (PyTorch 2), which makes traces valid for dynamic shapes in this way.
"""
from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.ir import polynomials
from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.symint import SymInt

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})       # types that contain no symbolic number
_FIELDS: dict[type, tuple[str, ...]] = {}       # names of fields by dataclass, () for other types
Guard = tuple[str, Polynomial]          # the relation ("==" or "<") of a polynomial to 0


class NotSymbolic(BaseException):
    """A symbolic number would have to be a known one.

    It is a BaseException, so that handlers of ordinary errors do not catch it.
    """


@dataclass(frozen=True)
class Quotient:
    """Atom for the floor of a quotient of two polynomials."""
    over: Polynomial
    by: Polynomial


class Late:
    """Value that is computed once the extents are known."""

    def now(self) -> Any:
        """Return the value for the current extents."""
        raise NotImplementedError


@dataclass(frozen=True)
class ByteSize:
    """Atom for the number of bytes of an array that is computed once the extents are known."""
    array: Late


@dataclass
class ShapeEnv:
    """Trace: its open extents, the guards, and checks that polynomials cannot express.

    `atoms` are names of extents, quotients and sizes of arrays, which polynomials refer to by index. `pins`: code that
    needs a number itself gets it, and a guard says that it is this one; else such code raises NotSymbolic.
    """
    pins: ClassVar[bool] = False
    atoms: list[str | Quotient | ByteSize] = field(default_factory=list)
    guards: dict[Guard, bool] = field(default_factory=dict)
    checks: dict[Hashable, Late] = field(default_factory=dict)  # computations that raise an error for invalid extents
    _values: list[int] = field(default_factory=list)
    _least: list[int | None] = field(default_factory=list)
    _quotients: dict[Quotient, int] = field(default_factory=dict)
    _compared: dict[Guard, tuple[Guard | None, bool]] = field(default_factory=dict)     # question -> guard, answer

    @property
    def hints(self) -> Sequence[int]:
        """Value of each atom at the shapes at hand."""
        return self._values

    @property
    def least(self) -> Sequence[int | None]:
        """Lower bound of each atom, or None."""
        return self._least

    def restore(self, atoms: Sequence[str | Quotient | ByteSize], guards: Mapping[Guard, bool], checks: Sequence[Late],
                hints: Sequence[int], least: Sequence[int | None]) -> None:
        """Set the content of a trace to that of another one, whose numbers were made for it."""
        self.atoms, self.guards, self.checks = [*atoms], {**guards}, dict(enumerate(checks))
        self._values, self._least = [*hints], [*least]
        self._quotients = {atom: index for index, atom in enumerate(atoms) if isinstance(atom, Quotient)}
        self._compared = {}

    def extent(self, name: str, value: int) -> Any:
        """Return an open extent, at least 1, as a SymbolicInt."""
        assert value >= 1, f"{name} is {value}"
        index = self._atom(name, value, 1)
        self.guards["<", polynomials.plus(polynomials.atom(index), polynomials.constant(-1))] = False
        return SymbolicInt(self, value, polynomials.atom(index))

    def without_guards_of(self, trial: Callable[[], Any]) -> Any:
        """Return the result of `trial`, or None, with its guards dropped, if it is pinned."""
        before = dict(self.guards)
        try:
            return trial()
        except NotSymbolic:
            self.guards = before
            return None

    def measured(self, array: Late) -> SymbolicInt:
        """Return the number of bytes of an array."""
        value = array.now().nbytes
        return SymbolicInt(self, value, polynomials.atom(self._atom(ByteSize(array), value, 0)))

    def of(self, polynomial: Polynomial) -> Any:
        """Return the number of a polynomial, an int if it has no atoms."""
        number = polynomials.number_of(polynomial)
        if number is not None:
            return number
        return SymbolicInt(self, polynomials.value(polynomial, self._values), polynomial)

    def floor(self, over: Polynomial, by: Polynomial) -> Any:
        """Return over // by, simplified by terms that divide exactly."""
        if self.compare("==", by):
            raise ZeroDivisionError("division by zero")
        whole, rest = polynomials.quotient(over, by)
        least, divisor = polynomials.least(rest, self._least), polynomials.number_of(by)
        number = polynomials.number_of(rest)
        if number is not None and divisor is not None:
            return self.of(polynomials.plus(whole, polynomials.constant(number // divisor)))
        if not rest:
            return self.of(whole)
        if divisor is not None and (inner := self._nested(rest, divisor)) is not None:
            return self.of(whole) + inner
        key = Quotient(rest, by)
        if key not in self._quotients:
            value = plain(self.of(rest)) // plain(self.of(by))
            positive = least is not None and least >= 0 and (polynomials.least(by, self._least) or 0) > 0
            self._quotients[key] = self._atom(key, value, None if least is None or not positive else
                                              least // divisor if divisor else 0)
        return self.of(polynomials.plus(whole, polynomials.atom(self._quotients[key])))

    def _nested(self, rest: Polynomial, divisor: int) -> Any:
        """Simplify (x // m + k) // n to (x + k * m) // (m * n) for integers."""
        *constant, (monomial, factor) = rest
        inner = self.atoms[monomial[0]] if len(monomial) == 1 and factor == 1 and divisor > 0 else None
        by = polynomials.number_of(inner.by) if isinstance(inner, Quotient) else None
        if by is None or by < 0 or len(constant) > 1 or constant and constant[0][0]:
            return None
        assert isinstance(inner, Quotient)
        more = polynomials.constant(by * sum(number for _, number in constant))
        return self.floor(polynomials.plus(inner.over, more), polynomials.constant(by * divisor))

    def compare(self, relation: str, polynomial: Polynomial) -> bool:
        """Return the relation of a polynomial to 0, and record a guard unless it holds for all extents."""
        known = self._compared.get((relation, polynomial))
        if known is None:
            known = self._compared[relation, polynomial] = self._answer(relation, polynomial)
        guard, answer = known
        if guard is not None:
            self.guards[guard] = answer
        return answer

    def _answer(self, relation: str, polynomial: Polynomial) -> tuple[Guard | None, bool]:
        """Return the guard, or None if the relation holds for all extents or for none, and the relation."""
        number = polynomials.number_of(polynomial)
        if number is not None:
            return None, number == 0 if relation == "==" else number < 0
        least = polynomials.least(polynomial, self._least)
        if least is not None and least >= (1 if relation == "==" else 0):
            return None, False
        negative = polynomials.product(polynomial, polynomials.constant(-1))
        least = polynomials.least(negative, self._least)
        if least is not None and least >= 1:
            return None, relation == "<"
        if relation == "==":
            polynomial = min(polynomial, negative)
        reduced = polynomials.reduced(relation, polynomial)
        if reduced is None:
            return None, False
        value = polynomials.value(reduced, self._values)
        return (relation, reduced), bool(value == 0 if relation == "==" else value < 0)

    def _atom(self, what: str | Quotient | ByteSize, value: int, least: int | None) -> int:
        self.atoms.append(what)
        self._values.append(value)
        self._least.append(least)
        return len(self.atoms) - 1


class SymbolicInt(SymInt):
    """Symbolic integer of a trace. It is no int, so that C code cannot take its value."""
    __slots__ = ("env", "hint", "expr")

    def __init__(self, env: ShapeEnv, hint: int, expr: Polynomial) -> None:
        self.env, self.hint, self.expr = env, hint, expr

    @property                       # type: ignore[misc]
    def __class__(self) -> type:
        return int

    # ---- arithmetic
    def _expression(self, other: Any) -> Polynomial | None:
        """Return the polynomial of a number, or None for what is none."""
        if type(other) is SymbolicInt and other.env is self.env:
            return other.expr
        if type(other) is SymbolicInt and not self.env.pins:
            raise NotSymbolic("two traces have numbers in common")
        if isinstance(other, int | np.integer):
            return polynomials.constant(int(other))
        if isinstance(other, float | np.floating):
            raise NotSymbolic(f"{self} is computed with floats")
        return None

    def _arithmetic(self, word: str, a: Any, b: Any) -> Any:
        if self.env.pins and isinstance(b if a is self else a, float):
            return _OPERATORS[word](*(int(one) if one is self else one for one in (a, b)))
        p, q = self._expression(a), self._expression(b)
        if p is None or q is None:
            return NotImplemented
        if word == "*":
            return self.env.of(polynomials.product(p, q))
        if word == "//":
            return self.env.floor(p, q)
        return a - a // b * b if word == "%" else self.env.of(polynomials.plus(p, q, 1 if word == "+" else -1))

    # ---- comparisons, which record guards
    def _compare(self, word: str, a: Any, b: Any) -> Any:
        other = b if a is self else a
        if word == "<=":
            more = self._compare("<", b, a)
            return more if more is NotImplemented else not more and other == other      # false for NaN
        if isinstance(other, float | np.floating):
            if not math.isfinite(other):
                return word == "<" and (other > 0 if a is self else other < 0)
            if word == "==" and not other.is_integer():
                return False
            other = math.ceil(other) if a is self else math.floor(other)
        q = self._expression(other)
        if q is None:
            return NotImplemented
        p, q = (self.expr, q) if a is self else (q, self.expr)
        return self.env.compare(word, polynomials.plus(p, q, -1))

    def __hash__(self) -> int:
        if self.env.pins:
            return hash(self.hint)      # a table then asks whether numbers are equal
        raise NotSymbolic(f"{self} is looked up in a table")

    # ---- operations that need a known number
    def __index__(self) -> int:
        if not self.env.pins:
            raise NotSymbolic(f"{self} is taken for {self.hint}")
        self.env.compare("==", polynomials.plus(self.expr, polynomials.constant(-self.hint)))
        return self.hint

    __int__ = __index__

    def __float__(self) -> float:
        return float(int(self))

    def __truediv__(self, other: Any) -> float:
        return int(self) / float(other)

    def __rtruediv__(self, other: Any) -> float:
        return float(other) / int(self)

    def _refuse(self, *_: Any) -> Any:
        raise NotSymbolic(f"{self} is taken for {self.hint}")

    __pow__ = __rpow__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = _refuse
    __rlshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = _refuse

    def __repr__(self) -> str:
        return str(int(self)) if self.env.pins else f"<{text(self.expr, self.env.atoms)}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if self.env.pins else repr(self)


def text(polynomial: Polynomial, atoms: Sequence[str | Quotient | ByteSize]) -> str:
    """Format a polynomial, as in 2*T*T + (T)//(8) + 1."""
    def one(index: int) -> str:
        what = atoms[index]
        if isinstance(what, Quotient):
            return f"({text(what.over, atoms)})//({text(what.by, atoms)})"
        return what if isinstance(what, str) else "bytes"
    return " + ".join("*".join((*([str(c)] if c != 1 or not monomial else []), *map(one, monomial)))
                      for monomial, c in polynomial) or "0"


def is_symbolic(value: Any) -> bool:
    """Return True if a value is or contains a symbolic number.

    Tuples, lists, dicts, dataclasses and object arrays are searched.
    """
    if isinstance(value, np.ndarray):
        return value.dtype == object and any(type(one) is SymbolicInt for one in value.flat)
    return env_in(value) is not None


def as_int(value: Any) -> int:
    """Return int(value), or a symbolic number unchanged."""
    return value if type(value) is SymbolicInt else int(value)  # type: ignore[return-value]


def plain(value: Any) -> Any:
    """Return a value with symbolic numbers replaced by their hints, also in tuples, lists, dicts and dataclasses.

    No guards are recorded, so the result may only be used where any value is correct.
    """
    if type(value) in _LEAVES:
        return value
    if type(value) is SymbolicInt:
        return value.hint
    if isinstance(value, Late):
        return value.now()
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else value
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if names := _fields_of(value):
        copy = object.__new__(type(value))
        for name in names:
            object.__setattr__(copy, name, plain(getattr(value, name)))
        return copy
    return value


def structure(value: Any) -> Hashable:
    """Return a key that is equal for values computed alike. Use it only in tables where equal keys merely save work."""
    if type(value) is SymbolicInt:
        return SymbolicInt, value.expr
    if isinstance(value, tuple | list):
        return tuple(map(structure, value))
    if isinstance(value, Mapping):
        return tuple((name, structure(one)) for name, one in value.items())
    if isinstance(value, np.ndarray):
        return id(value)
    if names := _fields_of(value):
        return type(value), *(structure(getattr(value, name)) for name in names)
    return type(value), value


def identical(a: Any, b: Any) -> bool:
    """Return True if two numbers are equal for all extents; records no guard."""
    return (a.expr if type(a) is SymbolicInt else a) == (b.expr if type(b) is SymbolicInt else b)


def env_in(value: Any) -> ShapeEnv | None:
    """Return the trace of the symbolic numbers in a value, or None if there are none."""
    kind = type(value)
    if kind in _LEAVES:
        return None
    if kind is SymbolicInt:
        found: ShapeEnv = value.env
        return found
    parts: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif names := _fields_of(value):
        parts = [getattr(value, name) for name in names]
    elif isinstance(value, Mapping):
        parts = value.values()
    for part in parts:
        if type(part) not in _LEAVES and (env := env_in(part)):
            return env
    return None


def _fields_of(value: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, () for another value."""
    kind = type(value)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(one.name for one in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
    return _FIELDS[kind]
