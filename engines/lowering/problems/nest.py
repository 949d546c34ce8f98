"""Loop nests whose elements are computed by a program (engines/lowering/nest).

    Nest        y[n, i, j, ...] = program                               reductions, gathers, windows, odd dtypes
    Scatter     y = x, then for each i, j, ... in order: y[n, place] = combine(y[n, place], value)
    Update      a Scatter whose x lies where y does
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.lowering.nest.meaning import evaluate, load, store
from infer_server.engines.lowering.nest.program import KINDS, NestProgram
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View


@dataclass(frozen=True)
class Nest(Problem):
    """Loop nest with dense results.

    Attributes
    ----------
    sources : tuple of View
        Operands. Those of reads are views over (*loops, *reduced), broadcast by strides of 0; those of picks have any
        shape.
    targets : tuple of View
        Results over the loops, or over (*loops, *reduced) if `inside`.
    loops, reduced : tuple of int
        Extents of the outer and inner loops.
    program : NestProgram
        Computation of an element.
    inside : bool
        Store a result in every iteration of the inner loops.
    """
    sources: tuple[View, ...]
    targets: tuple[View, ...]
    loops: tuple[int, ...]
    reduced: tuple[int, ...]
    program: NestProgram
    inside: bool = False
    family = "nest"
    computes_on = KINDS
    reads = ("sources",)
    writes = ("targets",)

    @property
    def bytes(self) -> int:
        """Bytes moved per item; broadcast axes count once."""
        return sum(touched(view) for view in (*self.sources, *self.targets))

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        items = len(inputs[0]) if inputs else 1
        values = evaluate(self.program, self.loops, self.reduced, operands, items)
        results = []
        for view, number in zip(self.targets, self.program.results, strict=True):
            value = values[number]
            if not self.inside:         # a read may be broadcast along the reduced loops
                value = value.reshape(*value.shape[:1 + len(self.loops)], -1)[..., 0]
            results.append(store(view.dtype, np.broadcast_to(value, (items, *view.shape)).copy()))
        return tuple(results)


@dataclass(frozen=True)
class Scatter(Problem):
    """Copy of x with updates at computed places, in order.

    `sources` are as those of a Nest; the first is x, of y's shape, which the program does not read. The program's
    results are the value, then an index per axis of y.

    combined: "" to overwrite, or add, mul, max or min.
    """
    sources: tuple[View, ...]
    y: View
    loops: tuple[int, ...]
    program: NestProgram
    combined: str = ""
    family = "scatter"
    computes_on = KINDS
    reads = ("sources",)

    @property
    def bytes(self) -> int:
        return sum(touched(view) for view in (*self.sources, self.y))

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        values = evaluate(self.program, self.loops, (), operands, len(inputs[0]))
        y = operands[0].copy()
        shape = (len(y), *self.loops)
        value, *indices = (np.broadcast_to(values[number], shape) for number in self.program.results)
        item = np.arange(len(y)).reshape(-1, *(1,) * len(self.loops))
        at = (np.broadcast_to(item, shape), *indices)
        if self.combined:
            {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[self.combined].at(y, at, value)
        else:
            y[at] = value       # the last of equal places wins
        return (store(self.y.dtype, y),)


@dataclass(frozen=True)
class Update(Scatter):
    """Scatter that overwrites elements of x in the memory of x. No place is given twice, so that it may be repeated."""
    family = "update"


def touched(view: View) -> int:
    """Return the bytes of an item that a view covers; broadcast axes count once."""
    return view.size * math.prod(n for n, stride in zip(view.shape, view.strides, strict=True) if stride)
