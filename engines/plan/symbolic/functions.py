"""Functions of extents, compiled from the source that symbolic values are written as."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from infer_server.engines.ir.deferred import Deferred, LateBytes
from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.shapes import BatchInt, SymbolicDim
from infer_server.engines.ir.symbolic import ByteSize, NotSymbolic, Quotient, ShapeEnv, SymbolicInt, is_symbolic


def function_of(value: Any, env: ShapeEnv, extents: int, checked: bool = False) -> Callable[..., Any]:
    """Compile a symbolic value to a function of its extents.

    Parameters
    ----------
    value : Any
        Nested dataclasses, tuples, lists and mappings with symbolic numbers.
    env : ShapeEnv
        Record of the symbolic numbers and guards.
    extents : int
        Number of parameters: the symbols created first.
    checked : bool
        Check what `guards_of` leaves out: guards on sizes of computed constants, and that constants can be computed.

    Returns
    -------
    callable
        Returns the value for numbers of the extents, or None if a guard does not hold; raises errors of constants.

    Raises
    ------
    NotSymbolic
        A part of the value cannot be written as a function.
    """
    writer = _SourceWriter(env, extents)
    if checked:
        writer.guards(of_constants=True)
        for check in env.checks.values():
            writer.expression(check)
    return writer.function(writer.expression(value))


def guards_of(env: ShapeEnv, extents: int) -> Callable[..., bool]:
    """Compile the guards of a trace to a function of its extents, which returns True if they hold.

    Guards on the sizes of computed constants are left out.
    """
    writer = _SourceWriter(env, extents)
    writer.guards(of_constants=False)
    return writer.function("True")


class _SourceWriter:
    """Writer of the source of a function: its lines, and the values that they name."""

    def __init__(self, env: ShapeEnv, extents: int) -> None:
        self._env, self._extents = env, extents
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}           # invariant values by name
        self._named: dict[int, str] = {}            # names of values already written, by id
        self._written: dict[tuple[str, str], str] = {}      # expression and its completion -> variable
        self._numbers: dict[Polynomial, str] = {}
        self._atoms: dict[int, str] = {index: f"e{index}" for index in range(extents)}
        self._open: dict[int, bool] = {}
        self._held: list[Any] = []                  # keeps values alive, so that their ids stay unique

    # ---- numbers
    def guards(self, of_constants: bool) -> None:
        """Write guards: the function returns None if one does not hold. of_constants: those on sizes of constants."""
        for (relation, polynomial), holds in self._env.guards.items():
            if self._asks_constants(polynomial) != of_constants:
                continue
            answer = f"{self.number(polynomial)} {relation} 0"
            self._lines.append(f"if {'not ' if holds else ''}{answer}: return None")

    def _asks_constants(self, polynomial: Polynomial) -> bool:
        atoms = [self._env.atoms[index] for monomial, _ in polynomial for index in monomial]
        return any(isinstance(atom, ByteSize) or isinstance(atom, Quotient) and (
            self._asks_constants(atom.over) or self._asks_constants(atom.by)) for atom in atoms)

    def number(self, polynomial: Polynomial) -> str:
        """Return the name of the variable for a number, or its expression if that is short."""
        if polynomial not in self._numbers:
            terms = "+".join("*".join((str(factor), *map(self._atom, monomial))) if factor != 1 or not monomial else
                             "*".join(map(self._atom, monomial)) for monomial, factor in polynomial) or "0"
            if len(polynomial) > 1 or "*" in terms:
                terms = self._name("n", terms)
            self._numbers[polynomial] = terms
        return self._numbers[polynomial]

    def _atom(self, index: int) -> str:
        if index not in self._atoms:
            what = self._env.atoms[index]
            if isinstance(what, Quotient):
                result = f"({self.number(what.over)})//({self.number(what.by)})"
            else:
                assert isinstance(what, ByteSize)
                result = f"{self.expression(what.array)}.nbytes"
            self._atoms[index] = self._name("q", result)
        return self._atoms[index]

    def _name(self, kind: str, text: str, after: str = "") -> str:
        """Return the variable for an expression; equal expressions have one. after: a line that completes its value."""
        if (text, after) not in self._written:
            name = self._written[text, after] = f"{kind}{len(self._lines)}"
            self._lines += [f"{name} = {text}", *([f"{name}{after}"] if after else [])]
        return self._written[text, after]

    # ---- values
    def expression(self, value: Any) -> str:
        """Return the expression of a value, writing the lines that it needs."""
        if type(value) is SymbolicInt:
            return self.number(value.expr)
        if not self._is_open(value):
            return self._constant(value)
        if id(value) not in self._named:
            self._held.append(value)
            self._named[id(value)] = self._name("v", *self._making(value))
        return self._named[id(value)]

    def _making(self, value: Any) -> tuple[str] | tuple[str, str]:
        """Return the expression that makes a value, and for a dataclass the line that sets its fields."""
        if isinstance(value, SymbolicDim):
            return f"{self._constant(_text_of)}({self.expression(value.extent)})",
        if isinstance(value, Deferred):
            return f"{self._constant(value.function)}({self._items(value.arguments)})",
        if isinstance(value, LateBytes):
            joiner, arrays, numbers = value.joiner()
            sizes = [array.nbytes for array in arrays]
            lists = ", ".join(f"[{self._items(some)}]" for some in (arrays, sizes, numbers))
            return f"{self._constant(joiner)}({lists})",
        if isinstance(value, Mapping):
            items = ", ".join(f"{self.expression(key)}: {self.expression(item)}" for key, item in value.items())
            return f"{{{items}}}",
        if isinstance(value, tuple | list):
            return f"({self._items(value)})" if isinstance(value, tuple) else f"[{self._items(value)}]",
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            fields = ", ".join(f"{one.name}={self.expression(getattr(value, one.name))}"
                               for one in dataclasses.fields(value) if one.init)
            # A frozen dataclass sets each field by a call of object.__setattr__.
            is_plain = hasattr(value, "__dict__") and not hasattr(kind, "__post_init__") and all(
                one.init for one in dataclasses.fields(value))
            return (f"{self._constant(object.__new__)}({self._constant(kind)})", f".__dict__.update({fields})") \
                if is_plain else (f"{self._constant(kind)}({fields})",)
        raise NotSymbolic(f"a {type(value).__name__} holds symbolic numbers")

    def _items(self, values: Iterable[Any]) -> str:
        return "".join(f"{self.expression(one)}, " for one in values)

    def _constant(self, value: Any) -> str:
        if type(value) in (int, bool, str) or value is None:
            return repr(value)
        if id(value) not in self._named:
            self._held.append(value)
            self._named[id(value)] = name = f"c{len(self._values)}"
            self._values[name] = value
        return self._named[id(value)]

    def _is_open(self, value: Any) -> bool:
        """Return True if a value contains symbolic numbers."""
        if isinstance(value, Deferred | LateBytes | SymbolicDim):
            return True
        if isinstance(value, np.ndarray):
            return is_symbolic(value)
        parts = (value if isinstance(value, tuple | list) else value.values() if isinstance(value, Mapping) else
                 [getattr(value, one.name) for one in dataclasses.fields(value)]
                 if dataclasses.is_dataclass(value) and not isinstance(value, type) else None)
        if parts is None:
            return type(value) is SymbolicInt
        if id(value) not in self._open:
            self._held.append(value)
            self._open[id(value)] = any(map(self._is_open, parts))
        return self._open[id(value)]

    def function(self, result: str) -> Callable[..., Any]:
        """Compile the function that returns a result."""
        parameters = ", ".join(self._atoms[index] for index in range(self._extents))
        body = "".join(f"    {line}\n" for line in (*self._lines, f"return {result}"))
        namespace = dict(self._values)
        exec(compile(f"def head({parameters}):\n{body}", "<symbolic plan>", "exec"), namespace)
        head: Callable[..., Any] = namespace["head"]
        return head


def _text_of(extent: BatchInt) -> str:
    return str(extent)
