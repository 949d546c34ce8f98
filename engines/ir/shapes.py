"""Extents that depend on the batch, and shape rules shared by ONNX operators.

A known extent is an int. One that depends on the batch is written as a string, `coefficient * batch + constant`:
"batch", "12*batch", "batch+1". Arithmetic uses `BatchInt`; the batch may be any positive integer, and a comparison that
depends on it (batch == 1) raises Undecided.

Small integer tensors computed from shapes (Shape -> Gather -> Mul -> Concat -> Reshape) are object arrays of ints and
BatchInts: NumPy applies the operators below, so the reference of an operator is also its symbolic evaluation.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import BATCH, Array, Dim, TensorType
from infer_server.engines.ir.symbolic import Late, SymbolicInt, as_int, is_symbolic, plain
from infer_server.engines.ir.symint import SymInt

MOST_AXES = 31          # NumPy before version 2 allows 32 axes


class Undecided(Exception):
    """The answer depends on the batch, or the result is not of the form coefficient * batch + constant."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchInt(SymInt):
    """Extent coefficient * batch + constant with a nonzero coefficient."""
    coefficient: int
    constant: int = 0

    def __str__(self) -> str:
        head = BATCH if self.coefficient == 1 else f"{self.coefficient}*{BATCH}"
        return f"{head}{self.constant:+d}" if self.constant else head

    def _arithmetic(self, word: str, a: Any, b: Any) -> Any:
        (coefficient, constant), (other, addend) = _parts(a), _parts(b)
        if word == "+":
            return _extent(coefficient + other, constant + addend)
        if word == "-":
            return _extent(coefficient - other, constant - addend)
        if word == "%":
            return a - (a // b) * b
        if word == "*":
            if coefficient and other:
                raise Undecided(f"({a}) * ({b}) is not linear in the batch")
            return _extent(coefficient * addend + constant * other, constant * addend)
        if not other:
            if not addend or coefficient % addend:
                raise Undecided(f"({a}) / {b}")
            return _extent(coefficient // addend, constant // addend)
        ratio, rest = divmod(coefficient, other)
        if not coefficient or rest or constant != ratio * addend:
            raise Undecided(f"({a}) / ({b})")
        return ratio

    def __truediv__(self, other: Any) -> Any:
        quotient = self // other
        if self - quotient * other != 0:
            raise Undecided(f"({self}) / ({other})")
        return quotient

    def __rtruediv__(self, other: Any) -> Any:
        raise Undecided(f"{other} / ({self})")

    def _compare(self, word: str, a: Any, b: Any) -> Any:
        if not isinstance(b if a is self else a, int | float | np.number | BatchInt):
            return NotImplemented
        difference = a - b
        if word != "==":
            return _sign(difference) < (1 if word == "<=" else 0)
        if not isinstance(difference, BatchInt):
            return bool(difference == 0)
        root, rest = divmod(-difference.constant, difference.coefficient)
        if not rest and root >= 1:
            raise Undecided(f"{a} == {b}")
        return False

    def __bool__(self) -> bool:
        return True             # NumPy asks for all elements of arrays with it

    def __hash__(self) -> int:
        return hash((self.coefficient, self.constant))


def _parts(value: Any) -> tuple[int, int]:
    if isinstance(value, BatchInt):
        return value.coefficient, value.constant
    if value != as_int(value):
        raise Undecided(f"{value} is not an integer")
    return 0, as_int(value)


def _extent(coefficient: int, constant: int) -> int | BatchInt:
    return BatchInt(coefficient, constant) if coefficient else constant


def _sign(difference: int | BatchInt) -> int:
    """Return the sign of coefficient * batch + constant for all batch >= 1, or raise Undecided."""
    if not isinstance(difference, BatchInt):
        return (difference > 0) - (difference < 0)
    at_one = difference.coefficient + difference.constant
    if at_one * difference.coefficient <= 0:
        raise Undecided(f"the sign of {difference}")
    return 1 if at_one > 0 else -1


class SymbolicDim(str, Late):
    """Dim whose coefficient or constant is symbolic; its text does not show the numbers."""
    extent: BatchInt

    def __new__(cls, extent: BatchInt) -> SymbolicDim:
        self = super().__new__(cls, extent)
        self.extent = extent
        return self

    def now(self) -> str:
        return str(BatchInt(plain(self.extent.coefficient), plain(self.extent.constant)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and is_extent(other) and bool(self.extent == extent(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.extent.coefficient, self.extent.constant))


_DIM = re.compile(rf"(?:(-?\d+)\*)?{BATCH}([+-]\d+)?")


def extent(dim: Dim) -> int | BatchInt:
    """Return the number that a Dim stands for."""
    if not isinstance(dim, str):
        return as_int(dim)
    if isinstance(dim, SymbolicDim):
        return dim.extent
    match = _DIM.fullmatch(dim)
    if not match:
        raise GraphError(f"'{dim}' is not an extent: only '{BATCH}' is supported, as in '2*{BATCH}+1'")
    return BatchInt(int(match[1] or 1), int(match[2] or 0))


def is_extent(dim: Dim) -> bool:
    """Return True for a number, and for text that `extent` can read."""
    return not isinstance(dim, str) or isinstance(dim, SymbolicDim) or bool(_DIM.fullmatch(dim))


def dim(value: Any) -> Dim:
    """Return the Dim of a number or a BatchInt."""
    if not isinstance(value, BatchInt):
        return as_int(value)
    return SymbolicDim(value) if is_symbolic((value.coefficient, value.constant)) else str(value)


def text(shape: Iterable[Dim]) -> str:
    """Format a shape, as in [batch, 3, 224, 224]."""
    return f"[{', '.join(map(str, shape))}]"


def product(shape: Iterable[Dim]) -> int | BatchInt:
    """Return the number of elements. Raise Undecided if the batch appears twice."""
    return math.prod((extent(d) for d in shape), start=1)


def bind(shape: Iterable[Dim], batch: int | None) -> tuple[int, ...]:
    """Return the shape for a batch. Raise GraphError if it is symbolic and `batch` is None."""
    sizes: list[int] = []
    for d in shape:
        value = extent(d)
        if isinstance(value, BatchInt):
            if batch is None:
                raise GraphError(f"the extent '{d}' is symbolic: a batch is needed")
            value = value.coefficient * batch + value.constant
        sizes.append(value)
    return tuple(sizes)


def batch_of(shape: Sequence[Dim], actual: Sequence[int]) -> int | None:
    """Return the batch for which `shape` equals `actual`, or None if no extent depends on it.

    Raises GraphError if there is no such batch.
    """
    batch = None
    for d, size in zip(shape, actual, strict=False):
        value = extent(d)
        if isinstance(value, BatchInt) and batch is None:
            batch = (size - value.constant) // value.coefficient
    if bind(shape, batch) != tuple(actual):
        raise GraphError(f"shape {text(actual)} does not fit {text(shape)}")
    return batch


def is_empty(tensor: TensorType) -> bool:
    """Return True if a tensor has no elements for any batch."""
    return 0 in tensor.shape


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Broadcast shapes by NumPy's rule. Raise GraphError if they do not fit."""
    result: list[Dim] = []
    for axis in range(-max(map(len, shapes), default=0), 0):
        extents = [shape[axis] for shape in shapes if len(shape) >= -axis and shape[axis] != 1]
        if any(extent != extents[0] for extent in extents[1:]):
            raise GraphError(f"shapes {', '.join(map(text, shapes))} do not broadcast")
        result.append(extents[0] if extents else 1)
    return tuple(result)


def check_stretches(what: str, shape: Sequence[Dim], target: Sequence[Dim]) -> None:
    """Raise GraphError unless `shape` broadcasts to `target`."""
    if broadcast(shape, target) != tuple(target):
        raise GraphError(f"its {what} of shape {text(shape)} does not fit {text(target)}")


def fixed(shape: Iterable[Dim]) -> tuple[int, ...]:
    """Return the shape as ints. Raise GraphError if it depends on the batch."""
    shape = tuple(shape)
    if any(isinstance(d, str) for d in shape):
        raise GraphError(f"{text(shape)} must be fixed here, and depends on the batch: build the model for a fixed "
                         "batch, with the whole shape of each input that has one, as in --shape NAME:1x3x224x224")
    return tuple(as_int(d) for d in shape)


def normal_axis(axis: int, rank: int) -> int:
    """Return a non-negative axis. Raise GraphError unless it is in -rank..rank - 1."""
    if not -rank <= axis < max(rank, 1):
        raise GraphError(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank if rank else 0


def symbolic_array(values: Iterable[Any]) -> Array:
    """Return a 1-D array of ints, or of dtype object if an element is symbolic."""
    items = list(values)
    if not any(isinstance(item, BatchInt) or type(item) is SymbolicInt for item in items):
        return np.array(items, np.int64)
    array = np.empty(len(items), object)
    array[:] = items
    return array
