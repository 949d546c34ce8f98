"""Constants of the graph that a plan does not hold twice: they are read back from where the kernels' packing put them.

A plan keeps the graph that it was lowered from, so that it can be lowered again for another machine. The weights are
there already, in the order that the kernels read them in: all that is kept of the graph's copy is the way back.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.ir import Array


@dataclass(frozen=True)
class Packing:
    """An order of the elements of a matrix: element [i, j] is at byte starts[i] + steps[kinds[i]][j].

    Rows are of few kinds: those of a kernel's full panels, and those of the last one.
    """
    starts: tuple[int, ...]
    kinds: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PackedArray:
    """A constant of the graph as a part of the plan's constants: `axis` is the matrix's rows, the others its columns.

    Its elements come back as they are stored: a float32 weight of a bfloat16 layer is rounded to bfloat16.
    """
    dtype: str
    shape: tuple[int, ...]
    axis: int
    stored: str                 # dtype of an element there: "int8", "float32", "float16" or "bfloat16"
    offset: int                 # bytes, of what the packing counts from
    packing: Packing

    def unpack(self, constants: bytes | memoryview) -> Array:
        """A new array, from the plan's constants."""
        shape = [*self.shape]
        shape.insert(0, shape.pop(self.axis))
        matrix = take_packed(np.frombuffer(constants, np.uint8)[self.offset:], self.packing, self.stored)
        array: Array = np.moveaxis(matrix.astype(self.dtype).reshape(shape), 0, self.axis)
        return array


def take_packed(data: Array, packing: Packing, stored: str) -> Array:
    """The matrix whose elements lie in `data` as the packing says; of bfloat16, as float32."""
    dtype = np.dtype("uint16" if stored == "bfloat16" else stored)
    starts, kinds = np.array(packing.starts, np.int64), np.array(packing.kinds, np.int64)
    places = starts[:, None] + np.array(packing.steps, np.int64)[kinds]
    flat = data.reshape(-1).view(np.uint8)
    # An element begins at a multiple of its size.
    elements: Array = flat[:len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)[places // dtype.itemsize]
    return (elements.astype(np.uint32) << 16).view(np.float32) if stored == "bfloat16" else elements
