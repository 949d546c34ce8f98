"""SymInt: an integer that is known by an expression, because its value changes between runs.

The words are PyTorch's: the *expression* says how a number follows from others, the *hint* is its value at the shapes
at hand, and a *guard* is a condition on expressions under which all that was made from them is valid. Code written for
ints runs on SymInts unchanged. Arithmetic makes SymInts, or ints where the unknowns cancel; what a question about the
value does is the difference between two subclasses, each of which defines `_arithmetic` and `_compare`:

    class                   expression                      n == 3                      int(n)
    symbolic.SymbolicInt    polynomial of extents           guard                       NotSymbolic; a guard in kernels
    shapes.BatchInt         coefficient * batch + constant  decided, or Undecided       TypeError

Polynomials are canonical, so that equality for all extents is decided and each guard is checked once. One plan serves
all batches, so no guard on the batch may become part of it, and a BatchInt has no hint.

References
----------
torch.SymInt and torch.fx.experimental.symbolic_shapes (PyTorch 2).
"""
from __future__ import annotations

from typing import Any


class SymInt:
    """Operators of symbolic integers."""
    __slots__ = ()

    def _arithmetic(self, word: str, a: Any, b: Any) -> Any:
        """Return a + b, a - b, a * b, a // b or a % b, or NotImplemented; one of the two is this number."""
        raise NotImplementedError

    def _compare(self, word: str, a: Any, b: Any) -> Any:
        """Return a == b, a < b or a <= b as a bool, or NotImplemented; one of the two is this number."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return self._arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._arithmetic("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._arithmetic("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._arithmetic("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return self._arithmetic("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._arithmetic("%", other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return self._arithmetic("-", 0, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    __floor__ = __ceil__ = __trunc__ = __round__ = __pos__

    def __eq__(self, other: object) -> Any:
        return self._compare("==", self, other)

    def __ne__(self, other: object) -> Any:
        equal = self._compare("==", self, other)
        return equal if equal is NotImplemented else not equal

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", self, other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare("<", other, self)

    def __ge__(self, other: Any) -> Any:
        return self._compare("<=", other, self)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        raise NotImplementedError
