"""Graphs of traces at other extents, so that a model is imported once for several traces.

    traced = TracedGraph(graph, extents)        # graph: imported with symbolic extents
    traced.at({"T": env.extent("T", 40)})       # the graph with the numbers of another trace, env
    traced.at({"T": 40})                        # the graph with plain numbers
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.polynomials import value as value_of
from infer_server.engines.ir.symbolic import (
    ByteSize,
    Late,
    Quotient,
    ShapeEnv,
    SymbolicInt,
    env_in,
    is_symbolic,
    plain,
)
from infer_server.engines.plan.extents import Extents

Convert = Callable[[Any], Any]

_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})       # types that contain no symbolic number


class TracedGraph:
    """Graph with symbolic extents, and the guards under which it is the model's graph at other extents.

    is_proven: True if a symbolic plan of this graph agreed with a plan of a graph that was imported for its extents.
    """

    def __init__(self, graph: Graph, extents: Extents) -> None:
        """Take a graph that was just imported for these extents, some of which are symbolic."""
        env = env_in(extents)
        assert env is not None
        self._graph, self._env = graph, ShapeEnv()
        self._env.restore(env.atoms, env.guards, [*env.checks.values()], env.hints, env.least)
        self._fixed = _fixed(extents)
        self._envs = [env]
        self.is_proven = False

    def at(self, extents: Extents) -> Graph | None:
        """Return the graph at other extents; None if a guard does not hold for them.

        If some are symbolic, their trace, which has no other numbers yet, gets the numbers and guards of the graph.
        """
        env = env_in(extents)
        if env is None:
            scratch = ShapeEnv()
            symbols = {name: scratch.extent(name, extent) for name, extent in extents.items()
                       if isinstance(extent, int) and extent >= 1}
            symbolic = self.at({**extents, **symbols}) if symbols else None
            made: Graph | None = plain(substituted(symbolic, lambda number: number.hint, {}))   # computes constants
            return made
        if _fixed(extents) != self._fixed:
            return None
        convert = continued(env, self._env)
        if convert is None:
            return None
        self._envs.append(env)
        graph: Graph = convert(self._graph)
        return graph

    def is_of(self, env: ShapeEnv) -> bool:
        """Return True if a trace has the numbers of this graph."""
        return any(env is one for one in self._envs)


def _fixed(extents: Extents) -> dict[str, Any]:
    return {name: extent for name, extent in extents.items() if not is_symbolic(extent)}


def continued(env: ShapeEnv, other: ShapeEnv) -> Convert | None:
    """Add the numbers, guards and checks of another trace to one that has only its extents.

    Returns
    -------
    callable or None
        Converts values of the other trace to values of this one. None, with the trace unchanged, if the other one has
        other extents, or if a guard or check of it does not hold.
    """
    count, hints, known = len(env.atoms), [*env.hints], dict[int, tuple[Any, Any]]()
    if env.atoms != other.atoms[:count] or any(isinstance(atom, str) for atom in other.atoms[count:]):
        return None

    def convert(value: Any) -> Any:
        return substituted(value, lambda number: SymbolicInt(env, value_of(number.expr, hints), number.expr), known)

    try:
        atoms = [*env.atoms]
        for atom in other.atoms[count:]:
            if isinstance(atom, ByteSize):
                atom = ByteSize(convert(atom.array))
                hints.append(atom.array.now().nbytes)
            elif isinstance(atom, Quotient):
                hints.append(value_of(atom.over, hints) // value_of(atom.by, hints))
            atoms.append(atom)
        checks = [convert(check) for check in other.checks.values()]
        for check in checks:
            check.now()
    except Exception:       # a constant or a quotient cannot be computed for these extents
        return None
    for (relation, polynomial), answer in other.guards.items():
        value = value_of(polynomial, hints)
        if (value == 0 if relation == "==" else value < 0) != answer:
            return None
    env.restore(atoms, other.guards, checks, hints, other.least)
    return convert


def substituted(value: Any, number: Callable[[SymbolicInt], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """Return a value with its symbolic numbers replaced; parts without such numbers stay the same objects.

    known: values that were replaced before, and their results, by id.
    """
    if type(value) in _LEAVES:
        return value
    if type(value) is SymbolicInt:
        return number(value)
    if id(value) not in known:
        known[id(value)] = value, _substituted(value, lambda part: substituted(part, number, known))
    return known[id(value)][1]


def _substituted(value: Any, convert: Convert) -> Any:
    if isinstance(value, str):      # a SymbolicDim; other text has no numbers
        return type(value)(convert(value.extent)) if isinstance(value, Late) else value     # type: ignore
    if isinstance(value, np.ndarray):
        return np.frompyfunc(convert, 1, 1)(value) if value.dtype == object and value.size else value
    if isinstance(value, tuple | list):
        parts = [convert(one) for one in value]
        same = type(value) not in (tuple, list) or all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    if isinstance(value, Mapping):
        items = {key: convert(one) for key, one in value.items()}
        return value if all(items[key] is one for key, one in value.items()) else MappingProxyType(items)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {one.name: convert(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if all(one is getattr(value, name) for name, one in fields.items()):
        return value
    copy = object.__new__(type(value))      # skips __post_init__: the original's fields have been checked
    for name, one in fields.items():
        object.__setattr__(copy, name, one)
    return copy
