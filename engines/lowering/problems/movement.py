"""Data movement, optionally with an epilogue program.

    Permute         y[n, i, j, ...] = program(x[n, i, j, ...])      transposes, concat, split, slice, layout changes
    Take            y[n, o, i, :] = x[n, o, index[i], :]            the index is a constant: Gather, channel orders
    Lookup          y[n, i, :] = table[index[n, i], :]              the table is a constant: embeddings
    GatherElements  y[n, i, j] = x[n, i, index[n, i, j]]            along any axis of the item
    HaloFill        the halo around each image of a buffer = value

Negative indices of Lookup and GatherElements count from the end, and indices out of range are clamped to the last row
or element, so that a request cannot read other memory.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.lowering.epilogue.program import COPY, EpilogueProgram, load_meaning, store_meaning
from infer_server.engines.lowering.problems.problem import Array, Problem, UnaryProblem
from infer_server.engines.lowering.problems.view import SIZES, View


@dataclass(frozen=True)
class Permute(UnaryProblem):
    """Copy between two layouts of one shape.

    The program's constants are indexed by y's innermost axis, or are scalars if `uniform`.
    """
    program: EpilogueProgram = COPY
    uniform: bool = False
    family = "permute"

    @property
    def raw(self) -> bool:
        """True if bytes are only moved, without conversion to float."""
        return self.x.dtype == self.y.dtype and not self.program.instructions

    @property
    def unsupported_dtype(self) -> str:
        return "" if self.raw else super().unsupported_dtype

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, = inputs
        if self.raw:
            return (x.copy(),)
        result = self.program.meaning(None, [load_meaning(self.x.dtype, x)], constants.get("program", ()))
        return (store_meaning(self.y.dtype, result),)


@dataclass(frozen=True)
class Take(UnaryProblem):
    """Gather with a constant index along `axis`; axes after it are dense in x and y."""
    axis: int
    family = "take"
    computes_on = SIZES     # it moves bytes

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Take rows at "index", integers per element of y's axis; negative ones count from the end."""
        return (np.take(inputs[0], np.asarray(constants["index"]), self.axis + 1),)


@dataclass(frozen=True)
class Lookup(Problem):
    """Row lookup in a constant table. index: int32 or int64 of any shape; y: its shape and the table's dense rows."""
    index: View
    y: View
    rows: int           # rows of the table
    family = "lookup"
    computes_on = SIZES     # it moves bytes
    reads = ("index",)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Look rows up in "table", [rows, width] in the stored dtype."""
        return (np.asarray(constants["table"])[_clamped(inputs[0], self.rows)],)


@dataclass(frozen=True)
class GatherElements(UnaryProblem):
    """Element gather along `axis`. index: int32 or int64 of y's shape (a stride of 0 broadcasts)."""
    index: View
    axis: int
    family = "gather_elements"
    computes_on = ("uint8", "int8", "bool", "int32", "int64", "float32", "float16", "bfloat16")
    reads = ("x", "index")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        x, index = inputs
        return (np.take_along_axis(x, _clamped(index, self.x.shape[self.axis]), self.axis + 1),)


def _clamped(index: Array, extent: int) -> Array:
    """Wrap negative indices and clamp to the last element."""
    wide = index.astype(np.int64)
    positions = np.where(wide < 0, wide + extent, wide).astype(np.uint64)
    return np.minimum(positions, np.uint64(extent - 1)).astype(np.int64)


@dataclass(frozen=True)
class HaloFill(Problem):
    """Fill of an image's halo with the byte `value`.

    Views are uint8 [runs, bytes per run], groups of equal runs:

        head        the rows above, and the left halo of the image's first row
        sides       the right halo of a row and the left halo of the next; volumes [planes, runs, bytes per run]
        between     volumes: from the last row of a plane to the first of the next
        tail        the right halo of the last row, and the rows below
    """
    runs: tuple[View, ...]
    value: int
    family = "halo_fill"
    reads = ()
    writes = ("runs",)

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        """Return the runs of one item: without an input the batch is unknown."""
        return tuple(np.full((1, *view.shape), self.value, np.uint8) for view in self.runs)
