"""Constants of the graph that a plan does not hold twice: they are read back from where the kernels' packing put them.

A plan keeps the graph that it was lowered from, so that it can be lowered again for another machine. The weights are
there already, in the order that the kernels read them in: all that is kept of the graph's copy is the way back.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.ir.graph import Array

PICKS = 4           # elements of a step of Picked: an int32 says their places
ROWS = 32           # of a matrix taken at once: their places stay in cache


@dataclass(frozen=True)
class Packing:
    """An order of the elements of a matrix: element [i, j] is at byte starts[i] + steps[kinds[i]][j].

    Rows are of few kinds: those of a kernel's full panels, and those of the last one.
    """
    starts: tuple[int, ...]
    kinds: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    def take(self, arrays: Sequence[Array], stored: str) -> Array:
        """The matrix, from an array that holds it so; of bfloat16, as float32."""
        (data,), dtype = arrays, np.dtype("uint16" if stored == "bfloat16" else stored)
        # An element begins at a multiple of its size.
        starts, steps = (np.array(bytes_, np.int64) // dtype.itemsize for bytes_ in (self.starts, self.steps))
        kinds, flat = np.array(self.kinds, np.int64), _bytes(data)
        flat = flat[:len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        elements: Array = np.empty((len(starts), steps.shape[1]), dtype)
        for first in range(0, len(starts), ROWS):
            rows = slice(first, first + ROWS)
            elements[rows] = flat[starts[rows, None] + steps[kinds[rows]]]
        return (elements.astype(np.uint32) << 16).view(np.float32) if stored == "bfloat16" else elements


@dataclass(frozen=True)
class Picked:
    """An order of the elements of a matrix of bytes that its values decided: tables beside them say where they are.

        steps   int8 [step][lane][PICKS]
        places  int32 [step][2]: an offset, and PICKS bytes that count from there; or shorter, as `spread_places` reads
        starts  int32 [panel + 1]: the first step of each panel of `lanes` rows

    An element of a step is of the column whose offset its place says; where it is 0 for all lanes, there may be none.
    """
    lanes: int
    short: bool                     # places are
    rows: tuple[int, ...]           # of the matrix: panel * lanes + lane of each
    columns: tuple[int, ...]        # ... and the offset of each

    def take(self, arrays: Sequence[Array], stored: str) -> Array:
        """The matrix, from `steps`, `places` and `starts`."""
        places, starts = (_bytes(array).view(np.int32) for array in arrays[1:])
        panels = max(self.rows) // self.lanes + 1
        starts = starts[:panels + 1]
        count = int(starts[-1])
        steps = _bytes(arrays[0])[:count * self.lanes * PICKS].view(stored).reshape(count, self.lanes, PICKS)
        if self.short:
            offset, picks = spread_places(places[:count].view(np.uint32))
        else:
            offset, picks = places[:2 * count:2], places[1:2 * count:2].copy().view(np.uint8).reshape(count, PICKS)
        there = steps.any(axis=1)                                   # [step][pick]
        offsets = (offset[:, None] + picks)[there]
        columns = np.array(self.columns, np.int64)
        order = np.argsort(columns)
        found = order[np.searchsorted(columns, offsets, sorter=order)]
        panel = np.broadcast_to(np.repeat(np.arange(panels), np.diff(starts))[:, None], there.shape)[there]
        matrix = np.zeros((panels, len(columns), self.lanes), stored)
        matrix[panel, found] = steps.swapaxes(1, 2)[there]
        result: Array = matrix.swapaxes(1, 2).reshape(-1, len(columns))[np.array(self.rows, np.int64)]
        return result


def spread_places(words: Array) -> tuple[Array, Array]:
    """uint32 [step], 16 bits of an offset and 4 of each pick -> int32 [step], uint8 [step][PICKS]."""
    picks = words[:, None] >> (16 + 4 * np.arange(PICKS, dtype=np.uint32)) & 15
    return (words & 0xFFFF).astype(np.int32), picks.astype(np.uint8)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class PackedArray:
    """A constant of the graph as a part of the plan's constants: `axis` is the matrix's rows, the others its columns.

    Its elements come back as they are stored: a float32 weight of a bfloat16 layer is rounded to bfloat16.
    """
    dtype: str
    shape: tuple[int, ...]
    axis: int
    stored: str                 # dtype of an element there: "int8", "float32", "float16" or "bfloat16"
    offsets: tuple[int, ...]    # bytes, of what the packing takes it from
    packing: Packing | Picked

    def unpack(self, constants: bytes | memoryview) -> Array:
        """A new array, from the plan's constants."""
        shape = [*self.shape]
        shape.insert(0, shape.pop(self.axis))
        data = np.frombuffer(constants, np.uint8)
        matrix = self.packing.take([data[offset:] for offset in self.offsets], self.stored)
        array: Array = np.moveaxis(matrix.astype(self.dtype).reshape(shape), 0, self.axis)
        return array
