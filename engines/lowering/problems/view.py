"""Views of tensors in memory: shape and byte strides; and the halo around an image."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer_server.engines.ir.dtypes import RARE, memory_dtype

# Bytes per element of each stored dtype; the last ones are used by fallback steps only.
SIZES = {name: memory_dtype(name).itemsize for name in (
    "uint8", "int8", "bool", "int32", "int64", "float32", "float16", "bfloat16", "int16", "uint16", "uint32", "uint64",
    "float64", *RARE)}
FLOATS = ("uint8", "float32", "float16", "bfloat16")        # stored dtypes of float tensors


@dataclass(frozen=True)
class View:
    """View of a tensor: element [n, i, j, ...] is n * item + i * strides[0] + ... bytes from its address.

    `shape` is one item's. A stride of 0 broadcasts. The address is that of element 0.
    """
    dtype: str                  # NumPy's name of the stored dtype, or "bfloat16"
    shape: tuple[int, ...]
    strides: tuple[int, ...]    # bytes
    item: int                   # bytes between items of the batch

    @property
    def size(self) -> int:
        """Bytes per element."""
        return SIZES[self.dtype]

    @property
    def dense(self) -> bool:
        """True if the tensor, including its items, is contiguous in row-major order."""
        return self == dense_view(self.dtype, self.shape)

    @property
    def reach(self) -> tuple[int, int]:
        """Range [begin, end) of an item's bytes relative to element 0; begin is negative for negative strides."""
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(step, 0) for step in steps), self.size + sum(max(step, 0) for step in steps)


def dense_view(dtype: str, shape: Sequence[int]) -> View:
    """Return the view of a contiguous row-major tensor."""
    strides, step = [], SIZES[dtype]
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return View(dtype, tuple(shape), tuple(reversed(strides)), step)


def joined(views: Sequence[View], keep_last: bool) -> tuple[View, ...]:
    """Merge axes of views of one shape, in the same order of elements.

    Parameters
    ----------
    views : sequence of View
        Views of one shape.
    keep_last : bool
        Keep the innermost axis, whose index is a channel.

    Returns
    -------
    tuple of View
        Views with adjacent axes merged where all are evenly strided, without axes of extent 1; at least one axis.
    """
    shape = views[0].shape
    kept: list[tuple[int, tuple[int, ...]]] = []        # (extent, stride in each view), innermost first
    for axis in reversed(range(len(shape))):
        extent, strides = shape[axis], tuple(view.strides[axis] for view in views)
        last = axis == len(shape) - 1
        if extent == 1 and not (last and keep_last):
            continue
        if kept and not (keep_last and len(kept) == 1) and _continues(strides, *kept[-1]):
            kept[-1] = (extent * kept[-1][0], kept[-1][1])
        else:
            kept.append((extent, strides))
    kept = kept[::-1] or [(1, tuple(view.size for view in views))]
    extents = tuple(extent for extent, _ in kept)
    return tuple(View(view.dtype, extents, tuple(strides[i] for _, strides in kept), view.item)
                 for i, view in enumerate(views))


def _continues(outer: tuple[int, ...], extent: int, inner: tuple[int, ...]) -> bool:
    return all(a == b * extent for a, b in zip(outer, inner, strict=True))


@dataclass(frozen=True)
class Halo:
    """Rows and columns of padding around an image in memory, and planes before and after a volume."""
    top: int = 0
    left: int = 0
    bottom: int = 0
    right: int = 0
    front: int = 0
    back: int = 0

    @classmethod
    def of(cls, sides: Sequence[tuple[int, int]]) -> Halo:
        """Return the halo with (before, after) along each axis: rows and columns, or planes first."""
        *planes, (top, bottom), (left, right) = sides
        return cls(top, left, bottom, right, *(cells for plane in planes for cells in plane))

    def __or__(self, other: Halo) -> Halo:
        return Halo(*map(max, self._sides(), other._sides()))

    def __bool__(self) -> bool:
        return any(self._sides())

    def cells(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (before, after) along each axis of [height, width, channels], or [depth, height, width, channels]."""
        return ((self.front, self.back), (self.top, self.bottom), (self.left, self.right), (0, 0))[-rank:]

    def corner(self, rank: int) -> tuple[int, ...]:
        """Return the indices, relative to an image of that rank, at which the halo begins."""
        return tuple(-before for before, _ in self.cells(rank))

    def around(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an image or a volume with the halo."""
        return tuple(before + extent + after for (before, after), extent in zip(
            self.cells(len(image)), image, strict=True))

    def _sides(self) -> tuple[int, ...]:
        return self.top, self.left, self.bottom, self.right, self.front, self.back
