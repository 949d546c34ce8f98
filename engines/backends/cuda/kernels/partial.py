"""Split-K contraction as two problems: partial sums over slices of K, and their sum with the epilogue.

    PartialSums   s[n, i, j, (g, o)] = sum over p, q and the g-th slice of c of x[n, i_p, j_q, c] * w[o, c, p, q]
    SumOfParts    y[n, i, j, o] = program(s[n, i, j, (0, o)] + s[n, i, j, (1, o)] + ...), in that order

INT8 sums are int32 and thus equal the unsplit ones; float sums are float32 with their own order of additions.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.lowering.problems.problem import Array, ImageProblem
from infer_server.engines.lowering.problems.view import FLOATS, dense_view

SUMS = "int32"


@dataclass(frozen=True)
class PartialSums(Contraction):
    """Partial sums of a contraction: one slice of K per group, all output channels, no epilogue."""
    family = "partial_sums"
    computes_on = (*FLOATS, SUMS)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        return (self.sums(inputs[0], constants).astype(self.y.dtype),)


@dataclass(frozen=True)
class SumOfParts(ImageProblem):
    """Sum of the slices, which lie next to each other along the channels of x, and the epilogue."""
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
    """Split a contraction into `parts` slices of K.

    `constants_of_parts` makes the constants of the first problem; the second has the program's.
    """
    assert problem.groups == 1 and problem.cin % parts == 0
    stored = SUMS if problem.precision == "int8" else "float32"
    sums = dense_view(stored, (*problem.y.shape[:-1], problem.cout * parts))
    same = {field.name: getattr(problem, field.name) for field in fields(Contraction)}
    return (PartialSums(**{**same, "y": sums, "operands": (), "program": EpilogueProgram(), "groups": parts}),
            SumOfParts(sums, problem.y, problem.operands, problem.program))


def constants_of_parts(problem: PartialSums, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Rearrange a contraction's weights into groups, one per slice of K."""
    weights = np.asarray(constants["weights"])
    groups = weights.reshape(len(weights), problem.groups, problem.cin, *problem.taps)
    return {"weights": groups.swapaxes(0, 1).reshape(-1, problem.cin, *problem.taps), "program": []}
