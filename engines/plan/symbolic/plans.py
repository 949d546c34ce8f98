"""Symbolic plans: plans as functions of their extents.

    symbolic = SymbolicPlan(plan, env, {"T": 40}, ("T",), {})      # plan: traced with symbolic extents
    symbolic.plan({"T": 77})                                        # None if it does not hold for this extent

The plan and its guards become the source of Python functions. The first one checks the guards. The second one computes
each number once, computes the constants that depend on extents, and makes what each run needs: inputs and outputs.
Steps, buffers and halos are made when they are asked for (LateMachine); a backend's runtime takes their numbers as one
vector.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from infer_server.engines.ir.deferred import Deferred, LateBytes
from infer_server.engines.ir.symbolic import NotSymbolic, ShapeEnv
from infer_server.engines.plan.extents import Extents
from infer_server.engines.plan.plan import MachinePart, Plan
from infer_server.engines.plan.symbolic.functions import function_of, guards_of

_LATE = ("steps", "buffers", "fills")       # fields of MachinePart


@dataclasses.dataclass(frozen=True)
class DynamicKernel:
    """Kernel of symbolic plans, which reads numbers of its problem at run time.

    It solves every problem with the same `words` and `numbers` (None matches any) for which each guard has its answer.
    The kernel loads the numbers of its table, polynomials as its guards are (engines/codegen/extents.py).
    """
    symbol: str
    words: str                              # the problem's spec without its numbers
    tactic: str
    numbers: tuple[int | None, ...]         # None: read at run time
    operands: tuple[Any, ...]               # of polynomials: a position in numbers, or (dividend, divisor)
    guards: tuple[tuple[str, Any, bool], ...]       # (relation to 0, polynomial, answer)
    table: tuple[Any, ...]


class CompiledKernel(NamedTuple):
    """Dynamic kernel and its object code."""
    kernel: DynamicKernel
    code: bytes


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
        if not any(step.fallback for step in plan.machine.steps):       # only these read the weights
            plan = dataclasses.replace(plan, weights={}, machine=dataclasses.replace(plan.machine, weight_offsets={}))
        self.traced, self.env, self.of_shape = plan, env, dict(extents)
        self.names, self.fixed = tuple(names), dict(fixed)
        _ = self._guards, self._head, self._late        # compiled now, to raise NotSymbolic now

    @cached_property
    def _guards(self) -> Callable[..., bool]:
        """Function that returns True if the guards hold; its own, because the head takes 0.1 s to compile."""
        return guards_of(self.env, len(self.names))

    @cached_property
    def _head(self) -> Callable[..., Any]:
        """Function that returns the plan without late fields, and the bytes of all buffers; None: see function_of."""
        machine = self.traced.machine
        empty: dict[str, Any] = dict.fromkeys(_LATE, ())
        head = dataclasses.replace(self.traced, machine=dataclasses.replace(machine, **empty))
        value = head, sum(buffer.bytes for buffer in machine.buffers)
        return function_of(value, self.env, len(self.names), checked=True)

    @cached_property
    def _late(self) -> dict[str, Callable[..., Any]]:
        return {name: self.function(getattr(self.traced.machine, name)) for name in _LATE}

    @property
    def constant_bytes(self) -> int:
        """Bytes of the constants that it does not share with the plan, without deferred ones."""
        constants: Any = self.traced.machine.constants
        parts = constants.parts if isinstance(constants, LateBytes) else (constants,)
        return sum(len(part) for part in parts if not isinstance(part, Deferred))

    def function(self, value: Any) -> Callable[..., Any]:
        """Compile a part of the symbolic plan to a function of its extents, without guards. Raises NotSymbolic."""
        return function_of(value, self.env, len(self.names))

    def holds(self, extents: Extents) -> bool:
        """Return True if the guards hold that need no constants; `plan` checks the others."""
        arguments = [extents[name] for name in self.names]
        return all(extents[name] == value for name, value in self.fixed.items()) and all(arguments) and (
            self._guards(*arguments))

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if a guard does not hold or a constant cannot be computed."""
        arguments = tuple([extents[name] for name in self.names])
        try:
            with np.errstate(all="ignore"):
                result = self._head(*arguments) if self.holds(extents) else None
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
