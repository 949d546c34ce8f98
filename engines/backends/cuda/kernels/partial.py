"""A contraction in two problems, for machines with more processors than it has tiles: parts of K, then their sum.

    PartialSums   s[n, i, j, (g, o)] = sum over p, q and the g-th part of all c of x[n, i_p, j_q, c] * w[o, c, p, q]
    SumOfParts    y[n, i, j, o] = program(s[n, i, j, (0, o)] + s[n, i, j, (1, o)] + ...), in that order

Sums of bytes are int32, and so the same as in one; those of floats are float32, in an order of their own.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engines.lowering.epilogue.program import EpilogueProgram
from engines.lowering.problems.convolution import Contraction
from engines.lowering.problems.problem import Array, ImageProblem
from engines.lowering.problems.view import FLOATS, dense_view

SUMS = "int32"


@dataclass(frozen=True)
class PartialSums(Contraction):
    """Every group of channels is a part of K; it has all couts. Without a program."""
    family = "partial_sums"
    computes_on = (*FLOATS, SUMS)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (self.sums(inputs[0], constants).astype(self.y.dtype),)


@dataclass(frozen=True)
class SumOfParts(ImageProblem):
    """x has the parts side by side; each is shaped as y."""
    family = "sum_of_parts"
    computes_on = (*FLOATS, SUMS)

    @property
    def parts(self) -> int:
        return self.x.shape[-1] // self.y.shape[-1]

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, *operands = inputs
        first, *others = np.split(x, self.parts, -1)
        for part in others:
            first = first + part
        return (self.finished(first.astype(np.float32), operands, constants),)


def in_parts(problem: Contraction, parts: int) -> tuple[PartialSums, SumOfParts]:
    """The same in two: `constants_of_parts` are those of the first, the second's are the program's."""
    assert problem.groups == 1 and problem.cin % parts == 0
    stored = SUMS if problem.precision == "int8" else "float32"
    sums = dense_view(stored, (*problem.y.shape[:-1], problem.cout * parts))
    same = {field.name: getattr(problem, field.name) for field in fields(Contraction)}
    return (PartialSums(**{**same, "y": sums, "operands": (), "program": EpilogueProgram(), "groups": parts}),
            SumOfParts(sums, problem.y, problem.operands, problem.program))


def constants_of_parts(problem: PartialSums, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Of the contraction's: its weights as those of groups."""
    weights = np.asarray(constants["weights"])
    groups = weights.reshape(len(weights), problem.groups, problem.cin, *problem.taps)
    return {"weights": groups.swapaxes(0, 1).reshape(-1, problem.cin, *problem.taps), "program": []}
