"""Expansion of Winograd's weights to G g G' when a plan is loaded: a plan stores 9 numbers for 36 that are multiplied.

    kept    [panel][k][tap of 3x3][vector][element]         int8 or float32
    made    [panel][position of 6x6][k][vector][element]    int16 or float32

    for panel: for k: for vector:
      made[panel, :, k, vector] = G kept[panel, k, :, vector] G'        9 registers to 36

Sums of float32 are computed in the order of `transform_weights`, so that every machine gives the same bits.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Grid, Kernel, Tactic, begin_kernel, solves
from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import FLOAT, I8, I16, vector
from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import SIZES, View, dense_view

TAPS, PATCH = 3, 6
_TRANSFORMED = {"int8": "int16", "float32": "float32"}


def transform_weights(g: Sequence[Any]) -> list[Any]:
    """Return G g, three numbers to six; G is that of winograd.py."""
    s, t, d = g[0] + g[2], g[0] + g[2] * 4, g[1] * 2
    return [g[0] * 6, (s + g[1]) * -4, (s - g[1]) * -4, t + d, t - d, g[2] * 6]


@dataclass(frozen=True)
class WinogradWeights(Problem):
    """Problem of expanding Winograd's weights. It has one item: constants have no batch."""
    dtype: str                  # dtype of the stored weights
    steps: int                  # steps of K
    elements: int               # elements of a vector
    panels: int                 # number of panels of `vectors` vectors
    vectors: int
    last: int                   # vectors of one more panel, or 0
    family = "winograd_weights"

    @property
    def inputs(self) -> tuple[View, ...]:
        return (dense_view(self.dtype, (self._vectors * TAPS ** 2 * self.elements,)),)

    @property
    def outputs(self) -> tuple[View, ...]:
        return (dense_view(_TRANSFORMED[self.dtype], (self._vectors * PATCH ** 2 * self.elements,)),)

    @property
    def _vectors(self) -> int:
        """Return the number of vectors of cout channels, over all panels and input-channel steps."""
        return (self.panels * self.vectors + self.last) * self.steps

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        kept = inputs[0].reshape(-1).astype(_TRANSFORMED[self.dtype])
        cut = self.panels * self.vectors * self.steps * TAPS ** 2 * self.elements
        parts = [_transformed(part.reshape(-1, self.steps, TAPS, TAPS, vectors * self.elements))
                 for part, vectors in ((kept[:cut], self.vectors), (kept[cut:], self.last)) if part.size]
        return (np.concatenate(parts)[None],)


@solves(WinogradWeights)
class WinogradWeightsKernel(Kernel[WinogradWeights]):
    """Kernel of the expansion. A row of the grid is a step of K, a column a panel."""

    def grid(self, isa: Isa, tactic: Tactic) -> Grid:
        return Grid(self.problem.steps, columns=self.problem.panels + bool(self.problem.last))

    def emit(self, module: Module, name: str, isa: Isa, tactic: Tactic) -> None:
        problem = self.problem
        f, (kept, made), (row_begin, row_end, column_begin, column_end) = begin_kernel(module, name, 2)
        size, made_size = (SIZES[dtype] * problem.elements for dtype in (problem.dtype, _TRANSFORMED[problem.dtype]))
        panel_bytes = problem.steps * problem.vectors

        def panel(index: Value, vectors: int) -> None:
            source, target = (address + index * (panel_bytes * bytes_) for address, bytes_ in (
                (kept, TAPS ** 2 * size), (made, PATCH ** 2 * made_size)))
            for k in f.range("k", row_begin, row_end):
                here = source + k * (TAPS ** 2 * vectors * size)
                self._transform(f, here, target + k * (vectors * made_size), vectors)

        for index in f.range("panel", column_begin, column_end):
            if problem.panels:
                with f.when(index.below(problem.panels)):
                    panel(index, problem.vectors)
            if problem.last:
                with f.when(index.compare("uge", problem.panels)):
                    panel(index, problem.last)

    def _transform(self, f: Function, kept: Value, transformed: Value, vectors: int) -> None:
        """Expand one step of a panel. All vectors of a position are stored together, to fill its cache lines."""
        problem = self.problem
        size = SIZES[_TRANSFORMED[problem.dtype]] * problem.elements
        taps = [[[self._load(f, kept + ((p * TAPS + q) * vectors + v) * SIZES[problem.dtype] * problem.elements)
                  for q in range(TAPS)] for p in range(TAPS)] for v in range(vectors)]
        columns = [[transform_weights([row[q] for row in rows]) for q in range(TAPS)] for rows in taps]
        for i in range(PATCH):
            row = [transform_weights([column[i] for column in half]) for half in columns]
            for j in range(PATCH):
                position = transformed + (i * PATCH + j) * problem.steps * vectors * size
                for v, values in enumerate(row):
                    f.store(values[j], position + v * size, size)

    def _load(self, f: Function, address: Value) -> Value:
        elements = self.problem.elements
        if self.problem.dtype == "float32":
            return f.load(vector(elements, FLOAT), address, 4 * elements, "taps")
        loaded = f.load(vector(elements, I8), address, elements, "taps")
        return f.cast("sext", loaded, vector(elements, I16), "taps")


def _transformed(taps: Array) -> Array:
    """Transform [panel, k, 3, 3, element] to [panel, 6, 6, k, element], flat."""
    rows = transform_weights([taps[:, :, p] for p in range(TAPS)])
    both = [transform_weights([row[:, :, q] for q in range(TAPS)]) for row in rows]
    return np.stack([np.stack(row, 1) for row in both], 1).ravel()
