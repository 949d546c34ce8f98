"""Symbolic plans: plans as functions of their extents.

    symbolic = SymbolicPlan(plan, env, {"T": 40}, ("T",), {})      # plan: traced with symbolic extents
    symbolic.plan({"T": 77})                                        # None if it does not hold for this extent

The plan and its guards become the source of Python functions. The first one checks the guards, computes each number
once, computes the constants that depend on extents, and makes what each run needs: inputs and outputs. Steps, buffers
and halos are made when they are asked for (LateMachine); a backend's runtime takes their numbers as one vector.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from infer_server.engines.ir.deferred import Deferred, LateBytes
from infer_server.engines.ir.polynomials import Polynomial
from infer_server.engines.ir.shapes import BatchInt, SymbolicDim
from infer_server.engines.ir.symbolic import ByteSize, NotSymbolic, Quotient, ShapeEnv, SymbolicInt, is_symbolic
from infer_server.engines.plan.extents import Extents
from infer_server.engines.plan.plan import MachinePart, Plan

_LATE = ("steps", "buffers", "fills")       # fields of MachinePart


class SymbolicPlan:
    """Function from extents to a plan."""

    def __init__(self, plan: Plan, env: ShapeEnv, extents: Extents, names: Sequence[str], fixed: Extents) -> None:
        """Compile a traced plan to functions of its extents.

        Parameters
        ----------
        plan : Plan
            Plan with symbolic numbers.
        env : ShapeEnv
            The trace.
        extents : mapping
            Extents of the trace.
        names : sequence of str
            Those that are symbolic, in the order of their creation.
        fixed : mapping
            The others, and the values of deciding inputs.

        Raises
        ------
        NotSymbolic
            A part of the plan cannot be written as a function of the extents.
        """
        self._env = env       # first, because pickle writes it first: others refer to it
        if not any(step.fallback for step in plan.machine.steps):       # only these read the weights
            plan = dataclasses.replace(plan, weights={}, machine=dataclasses.replace(plan.machine, weight_offsets={}))
        self.traced, self.of_shape, self.names, self.fixed = plan, dict(extents), tuple(names), dict(fixed)
        _ = self._head, self._late              # compiled now, to raise NotSymbolic now

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_head", "_late")}

    @cached_property
    def _head(self) -> Callable[..., Any]:
        """Function that checks the guards and returns the plan without late fields, and the bytes of all buffers."""
        machine = self.traced.machine
        empty: dict[str, Any] = dict.fromkeys(_LATE, ())
        head = dataclasses.replace(self.traced, machine=dataclasses.replace(machine, **empty))
        value = head, sum(buffer.bytes for buffer in machine.buffers)
        return function_of(value, self._env, len(self.names))

    @cached_property
    def _late(self) -> dict[str, Callable[..., Any]]:
        return {name: self.function(getattr(self.traced.machine, name)) for name in _LATE}

    def function(self, value: Any) -> Callable[..., Any]:
        """Compile a part of the symbolic plan to a function of its extents, without guards. Raises NotSymbolic."""
        return function_of(value, self._env, len(self.names), guarded=False)

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if a guard does not hold or a constant cannot be computed."""
        if any(extents[name] != value for name, value in self.fixed.items()):
            return None
        arguments = tuple([extents[name] for name in self.names])
        if not all(arguments):
            return None
        try:
            with np.errstate(all="ignore"):
                result = self._head(*arguments)
        except (NotSymbolic, Exception):     # a real fault recurs when the plan is made for the shape only
            return None
        if result is None:
            return None
        head, buffer_bytes = result
        plan: Plan = object.__new__(Plan)
        machine = LateMachine.of(head.machine, self, arguments, buffer_bytes)
        vars(plan).update(vars(head), machine=machine, extents=dict(extents))
        return plan

    def late(self, name: str, arguments: Sequence[int]) -> Any:
        """Return a field of the machine part that is made when it is asked for."""
        return self._late[name](*arguments)


class LateMachine(MachinePart):
    """Machine part that a symbolic plan made; its steps, buffers and halos are made when they are first asked for.

    symbolic        the symbolic plan that made it; None for a changed copy (dataclasses.replace)
    arguments       its symbolic extents
    buffer_bytes    sum of the sizes of all buffers
    """
    symbolic: SymbolicPlan | None = None
    arguments: tuple[int, ...] = ()
    buffer_bytes = 0

    @staticmethod
    def of(machine: MachinePart, symbolic: SymbolicPlan, arguments: tuple[int, ...], buffer_bytes: int) -> LateMachine:
        result = object.__new__(LateMachine)
        fields = vars(result)
        fields.update(vars(machine))
        for name in _LATE:
            del fields[name]
        fields.update(symbolic=symbolic, arguments=arguments, buffer_bytes=buffer_bytes)
        return result

    steps = cached_property(lambda self: self.symbolic.late("steps", self.arguments))
    buffers = cached_property(lambda self: self.symbolic.late("buffers", self.arguments))
    fills = cached_property(lambda self: self.symbolic.late("fills", self.arguments))


def function_of(value: Any, env: ShapeEnv, extents: int, guarded: bool = True) -> Callable[..., Any]:
    """Compile a symbolic value to a function of its extents.

    Parameters
    ----------
    value : Any
        Nested dataclasses, tuples, lists and mappings with symbolic numbers.
    env : ShapeEnv
        Record of the symbolic numbers and guards.
    extents : int
        Number of parameters: the symbols created first.
    guarded : bool
        Check the guards.

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
    if guarded:
        writer.guards()
        for check in env.checks.values():
            writer.expression(check)
    source, namespace = writer.function(writer.expression(value))
    exec(compile(source, "<symbolic plan>", "exec"), namespace)
    head: Callable[..., Any] = namespace["head"]
    return head


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
    def guards(self) -> None:
        """Write the guards: the function returns None if one does not hold."""
        for (relation, polynomial), holds in self._env.guards.items():
            answer = f"{self.number(polynomial)} {relation} 0"
            self._lines.append(f"if {'not ' if holds else ''}{answer}: return None")

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

    def function(self, result: str) -> tuple[str, dict[str, Any]]:
        """Return the source of the function and the namespace of the values that it names."""
        parameters = ", ".join(self._atoms[index] for index in range(self._extents))
        body = "".join(f"    {line}\n" for line in (*self._lines, f"return {result}"))
        return f"def head({parameters}):\n{body}", dict(self._values)


def _text_of(extent: BatchInt) -> str:
    return str(extent)
