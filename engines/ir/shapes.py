"""Extents that depend on the batch, and the shape rules that ONNX operators share.

A known extent is an int. One that depends on the batch is written as a string, `coefficient * batch + constant`:
"batch", "12*batch", "batch+1". Arithmetic is done on `Extent`s; the batch may be any integer from 1 on, and a question
whose answer depends on it (is batch == 1?) raises Undecided.

The value of a small integer tensor that is computed from shapes (Shape -> Gather -> Mul -> Concat -> Reshape) is an
array of dtype object that holds ints and Extents: NumPy then applies the operators below, so the reference of an
operator is also its symbolic evaluation.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.errors import GraphError
from engines.ir.counted import Counted, Late, as_int, is_counted, plain
from engines.ir.graph import BATCH, Array, Dim, TensorType

MOST_AXES = 31          # of a tensor; NumPy's arrays have 32 at most before its version 2


class Undecided(Exception):
    """The answer depends on the batch, or is not of the form coefficient * batch + constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """coefficient * batch + constant; coefficient is never 0 (that is an int)."""
    coefficient: int
    constant: int = 0

    def __str__(self) -> str:
        head = BATCH if self.coefficient == 1 else f"{self.coefficient}*{BATCH}"
        return f"{head}{self.constant:+d}" if self.constant else head

    def __add__(self, other: Any) -> Any:
        coefficient, constant = _parts(other)
        return _extent(self.coefficient + coefficient, self.constant + constant)

    def __mul__(self, other: Any) -> Any:
        coefficient, constant = _parts(other)
        if coefficient:
            raise Undecided(f"({self}) * ({other}) is not linear in the batch")
        return _extent(self.coefficient * constant, self.constant * constant)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __floordiv__(self, other: Any) -> Any:
        coefficient, constant = _parts(other)
        if coefficient:
            ratio, rest = divmod(self.coefficient, coefficient)
            if rest or self.constant != ratio * constant:
                raise Undecided(f"({self}) / ({other})")
            return ratio
        if not constant or self.coefficient % constant:
            raise Undecided(f"({self}) / {constant}")
        return _extent(self.coefficient // constant, self.constant // constant)

    def __rfloordiv__(self, other: Any) -> Any:
        raise Undecided(f"{other} / ({self})")

    def __truediv__(self, other: Any) -> Any:
        quotient = self // other
        if self - quotient * other != 0:
            raise Undecided(f"({self}) / ({other})")
        return quotient

    def __mod__(self, other: Any) -> Any:
        return self - (self // other) * other

    __radd__, __rmul__, __rtruediv__, __rmod__ = __add__, __mul__, __rfloordiv__, __rfloordiv__

    def __floor__(self) -> Extent:
        return self

    __ceil__ = __round__ = __trunc__ = __floor__

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, int | float | np.number | Extent):
            return NotImplemented
        difference = self - other
        if not isinstance(difference, Extent):
            return bool(difference == 0)
        root, rest = divmod(-difference.constant, difference.coefficient)
        if not rest and root >= 1:
            raise Undecided(f"{self} == {other}")
        return False

    def __hash__(self) -> int:
        return hash((self.coefficient, self.constant))

    def __lt__(self, other: Any) -> bool:
        return _sign(self - other) < 0

    def __le__(self, other: Any) -> bool:
        return _sign(self - other) <= 0

    def __gt__(self, other: Any) -> bool:
        return _sign(self - other) > 0

    def __ge__(self, other: Any) -> bool:
        return _sign(self - other) >= 0


def _parts(value: Any) -> tuple[int, int]:
    if isinstance(value, Extent):
        return value.coefficient, value.constant
    if value != as_int(value):
        raise Undecided(f"{value} is not an integer")
    return 0, as_int(value)


def _extent(coefficient: int, constant: int) -> int | Extent:
    return Extent(coefficient, constant) if coefficient else constant


def _sign(difference: int | Extent) -> int:
    """Of coefficient * batch + constant where batch >= 1: it grows away from its value at 1, or crosses zero."""
    if not isinstance(difference, Extent):
        return (difference > 0) - (difference < 0)
    at_one = difference.coefficient + difference.constant
    if at_one * difference.coefficient <= 0:
        raise Undecided(f"the sign of {difference}")
    return 1 if at_one > 0 else -1


class CountedDim(str, Late):
    """A Dim whose coefficient or constant is counted: its text does not say which numbers they are."""
    extent: Extent

    def __new__(cls, extent: Extent) -> CountedDim:
        self = super().__new__(cls, extent)
        self.extent = extent
        return self

    def now(self) -> str:
        return str(Extent(plain(self.extent.coefficient), plain(self.extent.constant)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and is_extent(other) and bool(self.extent == extent(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.extent.coefficient, self.extent.constant))


_DIM = re.compile(rf"(?:(-?\d+)\*)?{BATCH}([+-]\d+)?")


def extent(dim: Dim) -> int | Extent:
    """The number that a Dim stands for."""
    if not isinstance(dim, str):
        return as_int(dim)
    if isinstance(dim, CountedDim):
        return dim.extent
    match = _DIM.fullmatch(dim)
    if not match:
        raise GraphError(f"'{dim}' is no extent: only '{BATCH}' is known, as in '2*{BATCH}+1'")
    return Extent(int(match[1] or 1), int(match[2] or 0))


def is_extent(dim: Dim) -> bool:
    """Whether it is a number or of the form that `extent` reads."""
    return not isinstance(dim, str) or isinstance(dim, CountedDim) or bool(_DIM.fullmatch(dim))


def dim(value: Any) -> Dim:
    """The Dim that writes down a number."""
    if not isinstance(value, Extent):
        return as_int(value)
    return CountedDim(value) if is_counted((value.coefficient, value.constant)) else str(value)


def text(shape: Iterable[Dim]) -> str:
    """[batch, 3, 224, 224]"""
    return f"[{', '.join(map(str, shape))}]"


def product(shape: Iterable[Dim]) -> int | Extent:
    """How many elements; raises Undecided where the batch appears twice."""
    return math.prod((extent(d) for d in shape), start=1)


def bind(shape: Iterable[Dim], batch: int | None) -> tuple[int, ...]:
    """The shape for one value of the batch. Raises GraphError if it has a symbol and `batch` is None."""
    sizes: list[int] = []
    for d in shape:
        value = extent(d)
        if isinstance(value, Extent):
            if batch is None:
                raise GraphError(f"the extent '{d}' has no value: tell the batch")
            value = value.coefficient * batch + value.constant
        sizes.append(value)
    return tuple(sizes)


def batch_of(shape: Sequence[Dim], actual: Sequence[int]) -> int | None:
    """The batch for which `shape` is `actual`; None if no extent depends on it.

    Raises GraphError if there is no such batch.
    """
    batch = None
    for d, size in zip(shape, actual, strict=False):
        value = extent(d)
        if isinstance(value, Extent) and batch is None:
            batch = (size - value.constant) // value.coefficient
    if bind(shape, batch) != tuple(actual):
        raise GraphError(f"shape {text(actual)} does not fit {text(shape)}")
    return batch


def is_empty(tensor: TensorType) -> bool:
    """Whether it has no elements, whatever the batch."""
    return 0 in tensor.shape


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """NumPy's rule: aligned at the right, an extent of 1 stretches. Raises GraphError where extents differ."""
    result: list[Dim] = []
    for axis in range(-max(map(len, shapes), default=0), 0):
        extents = [shape[axis] for shape in shapes if len(shape) >= -axis and shape[axis] != 1]
        if any(extent != extents[0] for extent in extents[1:]):
            raise GraphError(f"shapes {', '.join(map(text, shapes))} do not broadcast")
        result.append(extents[0] if extents else 1)
    return tuple(result)


def check_stretches(what: str, shape: Sequence[Dim], target: Sequence[Dim]) -> None:
    """Raises GraphError unless NumPy's rule stretches `shape` to `target`, which stays as it is."""
    if broadcast(shape, target) != tuple(target):
        raise GraphError(f"its {what} of shape {text(shape)} does not fit {text(target)}")


def fixed(shape: Iterable[Dim]) -> tuple[int, ...]:
    """The same shape, known to be of ints; raises GraphError otherwise."""
    shape = tuple(shape)
    if any(isinstance(d, str) for d in shape):
        raise GraphError(f"{text(shape)} must be fixed here, and depends on the batch: build the model for a fixed "
                         "batch, with the whole shape of each input that has one, as in --shape NAME:1x3x224x224")
    return tuple(as_int(d) for d in shape)


def normal_axis(axis: int, rank: int) -> int:
    """0 <= axis < rank; raises GraphError if it is not one of -rank .. rank - 1."""
    if not -rank <= axis < max(rank, 1):
        raise GraphError(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank if rank else 0


def symbolic_array(values: Iterable[Any]) -> Array:
    """A 1-D array of ints, or of dtype object if one of them is an Extent."""
    items = list(values)
    if not any(isinstance(item, Extent) or type(item) is Counted for item in items):
        return np.array(items, np.int64)
    array = np.empty(len(items), object)
    array[:] = items
    return array
