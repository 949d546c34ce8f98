"""Problems of any loops: what is computed for each element is a program (engines/lowering/nest).

    Nest        y[n, i, j, ...] = program                               reductions, gathers, windows, odd dtypes
    Scatter     y = x, then for each i, j, ... in order: y[n, place] = y[n, place] and the program's value, combined
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lowering.nest.meaning import evaluate, load, store
from engines.lowering.nest.program import KINDS, NestProgram
from engines.lowering.problems.problem import Array, Problem
from engines.lowering.problems.view import View


@dataclass(frozen=True)
class Nest(Problem):
    """sources: of those that the program reads, views over (*loops, *reduced), which a stride of 0 repeats along; of
    those that it picks from, of any shape. targets: a view for each result, over the loops; with `inside` over
    (*loops, *reduced): then each turn of the inner loops stores what it finds."""
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
        """A view with strides of 0 is as large as what it repeats."""
        return sum(touched(view) for view in (*self.sources, *self.targets))

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        operands = [load(view.dtype, x) for view, x in zip(self.sources, inputs, strict=True)]
        items = len(inputs[0]) if inputs else 1
        values = evaluate(self.program, self.loops, self.reduced, operands, items)
        results = []
        for view, number in zip(self.targets, self.program.results, strict=True):
            value = values[number]
            if not self.inside:         # a tensor that is read may repeat itself along the reduced loops
                value = value.reshape(*value.shape[:1 + len(self.loops)], -1)[..., 0]
            results.append(store(view.dtype, np.broadcast_to(value, (items, *view.shape)).copy()))
        return tuple(results)


@dataclass(frozen=True)
class Scatter(Problem):
    """sources: as of a Nest; the first is x, of y's shape, which the program does not name. The program's results are
    the value, then an index for each axis of y.

    combined: "" where the value takes the place of what is there; else add, mul, max or min.
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
        value, *places = (np.broadcast_to(values[number], shape) for number in self.program.results)
        item = np.arange(len(y)).reshape(-1, *(1,) * len(self.loops))
        at = (np.broadcast_to(item, shape), *places)
        if self.combined:
            {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[self.combined].at(y, at, value)
        else:
            y[at] = value       # NumPy keeps the last of several
        return (store(self.y.dtype, y),)


def touched(view: View) -> int:
    """Bytes of an item that a view shows, each once."""
    return view.size * math.prod(n for n, stride in zip(view.shape, view.strides, strict=True) if stride)
