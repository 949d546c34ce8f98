"""Problems that only move elements, perhaps with a program on the way.

    Permute         y[n, i, j, ...] = program(x[n, i, j, ...])      transposes, concat, split, slice, layout changes
    Take            y[n, o, i, :] = x[n, o, index[i], :]            the index is a constant: Gather, channel orders
    Lookup          y[n, i, :] = table[index[n, i], :]              the table is a constant: embeddings
    GatherElements  y[n, i, j] = x[n, i, index[n, i, j]]            along any axis of the item
    HaloFill        the halo around each image of a buffer = value

Of a Lookup and of GatherElements a negative index counts from the end, and one beyond the table or the axis picks its
last row or element: a request cannot read other memory.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.lowering.epilogue.program import COPY, EpilogueProgram, load_meaning, store_meaning
from engines.lowering.problems.problem import Array, Problem, UnaryProblem
from engines.lowering.problems.view import SIZES, View


@dataclass(frozen=True)
class Permute(UnaryProblem):
    """x and y have the same shape, each its own strides; program's constants are per index of y's innermost axis, or
    `uniform`."""
    program: EpilogueProgram = COPY
    uniform: bool = False
    family = "permute"

    @property
    def raw(self) -> bool:
        """The bytes are only moved."""
        return self.x.dtype == self.y.dtype and not self.program.instructions

    @property
    def misfit(self) -> str:
        return "" if self.raw else super().misfit

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, = inputs
        if self.raw:
            return (x.copy(),)
        result = self.program.meaning(None, [load_meaning(self.x.dtype, x)], constants.get("program", ()))
        return (store_meaning(self.y.dtype, result),)


@dataclass(frozen=True)
class Take(UnaryProblem):
    """x and y have the same shape but for `axis`; the axes behind it are dense in both."""
    axis: int
    family = "take"
    computes_on = SIZES     # it moves bytes

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"index": ints of x's axis, one for each of y's; negative ones count from the end."""
        return (np.take(inputs[0], np.asarray(constants["index"]), self.axis + 1),)


@dataclass(frozen=True)
class Lookup(Problem):
    """index: any shape of int32 or int64; y: the same and the innermost axis of the table, dense."""
    index: View
    y: View
    rows: int           # of the table
    family = "lookup"
    computes_on = SIZES     # it moves bytes
    reads = ("index",)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """"table": [rows, width], as it is stored."""
        return (np.asarray(constants["table"])[_clamped(inputs[0], self.rows)],)


@dataclass(frozen=True)
class GatherElements(UnaryProblem):
    """x: y's shape but for `axis`; index: int32 or int64, of y's shape (a stride of 0 repeats)."""
    index: View
    axis: int
    family = "gather_elements"
    computes_on = ("uint8", "int8", "bool", "int32", "int64", "float32", "float16", "bfloat16")
    reads = ("x", "index")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, index = inputs
        return (np.take_along_axis(x, _clamped(index, self.x.shape[self.axis]), self.axis + 1),)


def _clamped(index: Array, extent: int) -> Array:
    """Negative ones count from the end; what then lies outside is the last."""
    wide = index.astype(np.int64)
    positions = np.where(wide < 0, wide + extent, wide).astype(np.uint64)
    return np.minimum(positions, np.uint64(extent - 1)).astype(np.int64)


@dataclass(frozen=True)
class HaloFill(Problem):
    """Views are uint8 [runs, bytes of a run]; every byte becomes `value`. They are groups of equal runs:

        head        the rows above, and what stands left in the first row of the image
        sides       what stands right in a row and left in the next; of volumes [planes, runs, bytes of a run]
        between     of volumes: what stands between the last row of a plane and the first of the next
        tail        what stands right in the last row, and the rows below
    """
    runs: tuple[View, ...]
    value: int
    family = "halo_fill"
    reads = ()
    writes = ("runs",)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Of one item: there is no input that would say how many there are."""
        return tuple(np.full((1, *view.shape), self.value, np.uint8) for view in self.runs)
