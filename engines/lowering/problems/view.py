"""Views: how a kernel sees a tensor in memory, by a shape and by strides in bytes."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.ir.dtypes import memory_dtype

# Bytes of an element of each dtype that a tensor may be stored in; the last ones only on the reference's steps.
SIZES = {name: memory_dtype(name).itemsize for name in (
    "uint8", "int8", "bool", "int32", "int64", "float32", "float16", "bfloat16", "int16", "uint16", "uint32", "uint64",
    "float64")}
FLOATS = ("uint8", "float32", "float16", "bfloat16")        # what a float tensor may be stored as


@dataclass(frozen=True)
class View:
    """How a kernel sees a tensor: element [n, i, j, ...] is n * item + i * strides[0] + ... bytes from its address.

    shape is one item's. A stride of 0 repeats an element (broadcasting). The address is that of element 0.
    """
    dtype: str                  # numpy's name of the stored dtype; "bfloat16" too
    shape: tuple[int, ...]
    strides: tuple[int, ...]    # bytes
    item: int                   # bytes from one item of the batch to the next

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def dense(self) -> bool:
        """The axes follow each other without a gap, and so do the items: the tensor is one long run of elements."""
        return self == dense_view(self.dtype, self.shape)

    @property
    def span(self) -> int:
        """Bytes from element 0 of an item to the end of its last one."""
        return self.size + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


def dense_view(dtype: str, shape: Sequence[int]) -> View:
    """A tensor whose elements follow each other in row-major order."""
    strides, step = [], SIZES[dtype]
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return View(dtype, tuple(shape), tuple(reversed(strides)), step)
