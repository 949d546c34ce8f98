"""Templates: symbolic plans of a model, traced once with symbolic extents and compiled to a function of them.

    templates = Templates(trace)            # trace: returns the plan for symbolic extents
    templates.plan({"T": 77})               # the plan for this extent; None if no template holds for it

The plan and its guards become the source of one Python function. It checks the guards, computes each number once,
computes the constants that depend on extents, and makes the dataclasses of the plan around the invariant parts.
"""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engines.ir.counted import ByteSize, Counting, Pinned, Quotient, SymbolicInt, is_counted
from engines.ir.deferred import Deferred, LateBytes
from engines.ir.polynomials import Polynomial
from engines.ir.shapes import Extent, SymbolicDim
from engines.lowering.buffers import check_memory
from engines.plan.extents import Extents
from engines.plan.plan import Plan

MOST = 16           # maximum number of templates of a model; the last used are kept
CREDIT = 8          # traces before giving up: each template that serves a second shape earns another two

log = logging.getLogger(__name__)


class Templates:
    """Templates of one model. Not thread-safe."""

    def __init__(self, trace: Callable[[Counting, Extents], Plan | None],
                 right: Callable[[Plan, Extents], bool] = lambda plan, extents: True) -> None:
        """Create an empty set of templates.

        Parameters
        ----------
        trace : callable
            Returns the plan for symbolic extents, or None if there are no such plans.
        right : callable
            Returns True if a plan is correct for extents; called for the second shape that each template serves.
        """
        self._trace, self._right, self._credit = trace, right, CREDIT
        self._known: list[Template] = []            # the last used at the end
        self._first: set[int] = set()               # ids of templates that have served only their traced shape

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if no template holds for them and none can be traced."""
        for template in reversed(self._known):
            if plan := template.plan(extents):
                is_first = id(template) in self._first
                if is_first and not self._proven(template, plan, extents):
                    return None
                self._known.remove(template)
                self._known.append(template)
                return plan if is_first else dataclasses.replace(plan, of_template=True)
        made = self._traced(extents) if self._credit > 0 else None
        plan = made.plan(extents) if made else None
        if made and plan:
            self._known = [*self._known[1 - MOST:], made]
            self._first = {id(made), *self._first.intersection(map(id, self._known))}
        return plan

    def _proven(self, template: Template, plan: Plan, extents: Extents) -> bool:
        """Verify a template's plan for the first shape other than the traced one; return True if it is correct.

        If it is not, all templates of the model are discarded, and no more are traced.
        """
        if dict(extents) == template.of_shape:
            return True
        if not self._right(plan, extents):
            self._known.clear()
            self._credit = 0
            return False
        self._first.remove(id(template))
        self._credit = min(self._credit + 2, CREDIT)
        return True

    def _traced(self, extents: Extents) -> Template | None:
        """Return a new template, or None if tracing fails; an error recurs when the plan is made for the shape only."""
        self._credit -= 1
        counting = Counting()
        fixed = {name: extent for name, extent in extents.items() if not isinstance(extent, int) or extent < 1}
        counted = {name: counting.extent(name, extent) for name, extent in extents.items() if name not in fixed}
        try:
            plan = self._trace(counting, {name: counted.get(name, extent) for name, extent in extents.items()})
            return Template.of(plan, counting, extents, tuple(counted), fixed) if plan else None
        except (Pinned, Exception) as reason:       # a real fault recurs when the plan is made for the shape only
            log.info("there is no template for %s: %s: %s", dict(extents), type(reason).__name__, reason)
            return None


@dataclasses.dataclass(frozen=True)
class Template:
    """Function from extents to a plan.

    of_shape: the extents of the trace. names: those that are symbolic. fixed: the others, and the values of deciding
    inputs.
    """
    of_shape: Extents
    names: tuple[str, ...]
    fixed: Extents
    _made: Callable[..., Plan | None]

    @staticmethod
    def of(plan: Plan, counting: Counting, extents: Extents, names: Sequence[str], fixed: Extents) -> Template:
        """Make a template of a traced plan. names: the symbolic extents, in the order of their creation.

        Raises Pinned if a part of the plan cannot be written as a function of them.
        """
        return Template(dict(extents), tuple(names), dict(fixed), function_of(plan, counting, len(names)))

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if a guard does not hold or a constant cannot be computed.

        Raises ConfigError if the plan needs more memory than there is.
        """
        if any(extents[name] != value for name, value in self.fixed.items()) or any(
                not extents[name] for name in self.names):
            return None
        try:
            with np.errstate(all="ignore"):
                plan = self._made(*(extents[name] for name in self.names))
        except (Pinned, Exception):     # a real fault recurs when the plan is made for the shape only
            return None
        if plan is None:
            return None
        check_memory(plan.name, plan.machine.buffers, plan.max_batch)
        return dataclasses.replace(plan, extents=dict(extents))


def function_of(value: Any, counting: Counting, extents: int) -> Callable[..., Any]:
    """Compile a symbolic value to a function of its extents.

    Parameters
    ----------
    value : Any
        Nested dataclasses, tuples, lists and mappings with symbolic numbers.
    counting : Counting
        Record of the symbolic numbers and guards.
    extents : int
        Number of parameters: the symbols created first.

    Returns
    -------
    callable
        Returns the value for numbers of the extents, or None if a guard does not hold; raises errors of constants.

    Raises
    ------
    Pinned
        A part of the value cannot be written as a function.
    """
    writer = _SourceWriter(counting, extents)
    writer.guards()
    for check in counting.checks:
        writer.expression(check)
    source, namespace = writer.function(writer.expression(value))
    exec(compile(source, "<template>", "exec"), namespace)
    made: Callable[..., Any] = namespace["made"]
    return made


class _SourceWriter:
    """Writer of the source of a function: its lines, and the values that they name."""

    def __init__(self, counting: Counting, extents: int) -> None:
        self._counting, self._extents = counting, extents
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}           # invariant values by name
        self._named: dict[int, str] = {}            # names of values already written, by id
        self._numbers: dict[Polynomial, str] = {}
        self._atoms: dict[int, str] = {index: f"e{index}" for index in range(extents)}
        self._open: dict[int, bool] = {}
        self._held: list[Any] = []                  # keeps values alive, so that their ids stay unique

    # ---- numbers
    def guards(self) -> None:
        """Write the guards: the function returns None if one does not hold."""
        for (relation, polynomial), holds in self._counting.guards.items():
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
            what = self._counting.atoms[index]
            if isinstance(what, Quotient):
                made = f"({self.number(what.over)})//({self.number(what.by)})"
            else:
                assert isinstance(what, ByteSize)
                made = f"{self.expression(what.array)}.nbytes"
            self._atoms[index] = self._name("q", made)
        return self._atoms[index]

    def _name(self, kind: str, text: str) -> str:
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name

    # ---- values
    def expression(self, value: Any) -> str:
        """Return the expression of a value, writing the lines that it needs."""
        if type(value) is SymbolicInt:
            return self.number(value.polynomial)
        if not self._is_open(value):
            return self._constant(value)
        if id(value) not in self._named:
            self._held.append(value)
            self._named[id(value)] = self._name("v", self._making(value))
        return self._named[id(value)]

    def _making(self, value: Any) -> str:
        if isinstance(value, SymbolicDim):
            return f"{self._constant(_text_of)}({self.expression(value.extent)})"
        if isinstance(value, Deferred):
            arguments = "".join(f"{self.expression(one)}, " for one in value.arguments)
            return f"{self._constant(value.function)}({arguments})"
        if isinstance(value, LateBytes):
            late = [part for part in value.parts if isinstance(part, Deferred)]
            arrays, sizes = ("".join(f"{self.expression(one)}, " for one in some)
                             for some in (late, [part.nbytes for part in late]))
            return f"{self._constant(value.joined)}(({arrays}), ({sizes}))"
        if isinstance(value, Mapping):
            items = ", ".join(f"{self.expression(key)}: {self.expression(item)}" for key, item in value.items())
            return f"{{{items}}}"
        if isinstance(value, tuple | list):
            items = "".join(f"{self.expression(item)}, " for item in value)
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            fields = ", ".join(f"{one.name}={self.expression(getattr(value, one.name))}"
                               for one in dataclasses.fields(value) if one.init)
            # A frozen dataclass sets each field by a call of object.__setattr__.
            is_plain = hasattr(value, "__dict__") and not hasattr(kind, "__post_init__") and all(
                one.init for one in dataclasses.fields(value))
            return f"{self._constant(_filled)}({self._constant(kind)}, {fields})" if is_plain else (
                f"{self._constant(kind)}({fields})")
        raise Pinned(f"a {type(value).__name__} holds numbers that are counted")

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
            return is_counted(value)
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
        return f"def made({parameters}):\n{body}", dict(self._values)


def _filled(kind: type, /, **fields: Any) -> Any:
    """Return an instance of a dataclass with all its fields set directly, without __init__."""
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def _text_of(extent: Extent) -> str:
    return str(extent)
