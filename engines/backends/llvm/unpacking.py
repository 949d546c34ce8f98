"""The way back from packed constants to the graph's: found by packing numbers instead of weights, and then checked.

So no kernel family has to say how to undo its packing (but where the weights' values decide it: Kernel.picked). A
matrix of zeros but for its first and last column, which hold the numbers of their rows, is packed; then one whose first
and last row hold the numbers of their columns. Where a number comes to lie is where that element of the weights does.
Numbers are written in digits that are exact in every stored dtype, one digit a matrix; the last row and column hold
them negative, to be told from the first.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.llvm.codegen.isa import Isa
from engines.backends.llvm.kernels.kernel import Kernel
from engines.lowering.epilogue.program import load_meaning, store_meaning
from engines.lowering.problems.problem import Array
from engines.plan.packed import Packing, Picked

SMALLEST = 4096             # bytes: below, a constant takes hardly more room than the way back to it
MOST_COLUMNS = 1 << 16      # of a matrix: a packing says a number for each
_LEAST, _BASE = 1, 120      # digits are 1 to 120: 0 is padding
_STORED = {"int8": ("int8",), "float32": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Found:
    """A constant's elements lie in one of a kernel's packed arrays."""
    which: tuple[int, ...]  # of them: what the packing takes it from
    stored: str             # dtype of an element there
    packing: Packing | Picked


class PackingFinder:
    """Finds packings; those of equal kernels once."""

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._found: dict[Any, Found | None] = {}

    def find(self, kernel: Kernel[Any], tactic: Any, constants: Mapping[str, Any], key: str, packed: Sequence[Array],
             rounded: bool) -> Found | None:
        """Where constants[key], as a matrix, lies in `packed`; None if that has no form.

        rounded: it may come back as it is stored, bfloat16 or float16 for float32.
        """
        weights = np.asarray(constants[key])
        identity = kernel, kernel.packing(tactic), key, weights.shape
        if identity not in self._found:
            self._found[identity] = self._told(kernel, tactic, key) or self._probe(kernel, tactic, constants, key)
        found = self._found[identity]
        if found is None:
            return None
        matrix = np.ascontiguousarray(weights).reshape(_as_matrix(weights.shape))
        if rounded and found.stored != matrix.dtype:
            matrix = load_meaning(found.stored, store_meaning(found.stored, matrix))
        again = found.packing.take([packed[which] for which in found.which], found.stored)
        return found if np.array_equal(again, matrix) else None

    def _told(self, kernel: Kernel[Any], tactic: Any, key: str) -> Found | None:
        """As the kernel family says it, for constants whose values decide where they lie."""
        picked = kernel.picked(self._isa, tactic).get(key)
        return Found((0, 1, 2), "int8", picked) if picked else None

    def _probe(self, kernel: Kernel[Any], tactic: Any, constants: Mapping[str, Any], key: str) -> Found | None:
        weights = np.asarray(constants[key])
        shape = _as_matrix(weights.shape)

        def pack(axis: int) -> list[tuple[Array, ...]]:
            """The ends of an axis numbered, a digit at a time."""
            results = []
            for digit in _digits(shape[1 - axis]):
                matrix = np.zeros(shape, weights.dtype)
                lines = matrix.swapaxes(0, axis)
                lines[-1], lines[0] = -digit, digit
                results.append(kernel.pack(self._isa, tactic, {**constants, key: matrix.reshape(weights.shape)}))
            return results

        by_row, by_column = pack(axis=1), pack(axis=0)
        for which in range(len(by_row[0])):
            for stored in _STORED.get(str(weights.dtype), ()):
                columns = _places([packed[which] for packed in by_row], stored, shape[0])
                rows = _places([packed[which] for packed in by_column], stored, shape[1])
                packing = None if columns is None or rows is None else _packing(columns, rows)
                if packing:
                    return Found((which,), stored, packing)
        return None


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns): the leading axis is the rows, and as many more as leave no great number of columns."""
    axes = next((i for i in range(1, len(shape)) if prod(shape[i:]) <= MOST_COLUMNS), max(len(shape) - 1, 1))
    return prod(shape[:axes]), prod(shape[axes:])


def _digits(count: int) -> Iterator[Array]:
    """The numbers below count, a digit at a time, low ones first."""
    numbers, left = np.arange(count), count
    while True:
        yield numbers % _BASE + _LEAST
        numbers, left = numbers // _BASE, -(-left // _BASE)
        if left == 1:
            return


def _places(packed: list[Array], stored: str, count: int) -> NDArray[np.int64] | None:
    """[first or last, number] -> byte, from one packed array for each digit; None if these hold something else."""
    places, numbers = None, np.int64(0)
    for power, array in enumerate(packed):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        size = 2 if stored == "bfloat16" else np.dtype(stored).itemsize
        if len(data) % size:
            return None
        elements = data.view("uint16" if stored == "bfloat16" else stored)
        here = np.flatnonzero(elements)
        values = load_meaning(stored, elements[here]).astype(np.float32)
        digits = np.abs(values) - _LEAST
        if places is not None and not np.array_equal(here, places) or not np.all(digits == np.floor(digits) % _BASE):
            return None
        places, signs = here, values < 0
        numbers = numbers + digits.astype(np.int64) * _BASE ** power
    result = np.full((2, count), -1, np.int64)
    if places is None or np.any(numbers >= count):
        return None
    result[signs.astype(int), numbers] = places * size
    if count and np.all(result[1] < 0):     # the first is the last
        result[1] = result[0]
    return None if np.any(result < 0) else result


def _packing(columns: NDArray[np.int64], rows: NDArray[np.int64]) -> Packing | None:
    """From the places of the first and last column's elements, and of the first and last row's."""
    starts, widths = columns[0], columns[1] - columns[0]
    steps = rows - rows[:, :1]
    kinds = np.where(widths == widths[0], 0, 1)
    if not np.all((kinds == 0) | (widths == widths[-1])):
        return None
    if np.array_equal(*steps):
        steps = steps[:1]
    return Packing(tuple(starts.tolist()), tuple(kinds.tolist()), tuple(tuple(s) for s in steps.tolist()))
