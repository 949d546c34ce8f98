"""Deferred constants, which depend on symbolic sizes and are computed once these are known.

A Deferred replaces a constant array in a graph. Its dtype is known, and its shape as symbolic numbers; access to its
elements raises NotSymbolic.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from infer_server.engines.ir.shapes import broadcast
from infer_server.engines.ir.symbolic import Late, NotSymbolic, ShapeEnv, env_in, is_symbolic, plain

Array = np.ndarray[Any, Any]
WORD = 8            # bytes of a number in a table


@dataclass(frozen=True, eq=False)
class Deferred(NDArrayOperatorsMixin, Late):
    """Result of a function of arrays, symbolic numbers and other Deferreds."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    dtype: np.dtype[Any]
    shape: tuple[Any, ...]

    def now(self) -> Any:
        return self._now

    @cached_property
    def _now(self) -> Any:
        with np.errstate(all="ignore"):
            return self.function(*map(plain, self.arguments))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Any:
        size: Any = 1
        for extent in self.shape:
            size = size * extent
        return size

    @property
    def nbytes(self) -> Any:
        return self.size * self.dtype.itemsize

    def reshape(self, *shape: Any) -> Deferred:
        """Reshape to known extents; -1 is not supported."""
        said = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if any(extent == -1 for extent in said):
            self._refuse()
        return Deferred(np.reshape, (self, said), self.dtype, said)

    def astype(self, dtype: Any, copy: bool = True) -> Deferred:
        return self if np.dtype(dtype) == self.dtype else Deferred(
            _astype, (self, np.dtype(dtype)), np.dtype(dtype), self.shape)

    @property
    def listed(self) -> tuple[Any, ...] | None:
        """Elements, if they are symbolic numbers, else None."""
        return self.arguments[0] if self.function is _array else None

    def item(self) -> Any:
        """Return the single element."""
        return self.listed[0] if self.listed and not self.shape else self._refuse()

    def transpose(self, order: Sequence[int]) -> Deferred:
        return Deferred(np.transpose, (self, tuple(order)), self.dtype, tuple(self.shape[axis] for axis in order))

    def __getitem__(self, index: Any) -> Deferred:
        """Return the first row; other indices are not supported."""
        return Deferred(operator.getitem, (self, 0), self.dtype, self.shape[1:]) if index == 0 else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotSymbolic(f"the elements of a constant {self.dtype}{list(self.shape)} are asked for, which follow from "
                     "extents")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Defer elementwise arithmetic."""
        if method != "__call__" or options or ufunc.nout != 1:
            return self._refuse()
        kinds = [np.ones((1,) * len(one.shape), one.dtype) if isinstance(one, Deferred) else one for one in inputs]
        shape = broadcast(*(one.shape for one in map(_as_array, inputs)))
        return Deferred(ufunc, inputs, ufunc(*(_small(one) for one in kinds)).dtype, shape)

    __array__ = __array_function__ = __iter__ = __len__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = _refuse

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    def __repr__(self) -> str:
        return f"Deferred {self.dtype}{list(self.shape)}"


def contiguous(array: Any) -> Any:
    """Return np.ascontiguousarray() of an array that may be deferred."""
    return array if isinstance(array, Deferred) else np.ascontiguousarray(array)


def elementwise(function: Callable[[Array], Array], array: Any, dtype: np.dtype[Any]) -> Any:
    """Apply an elementwise function with a result of the given dtype to an array that may be deferred."""
    return Deferred(function, (array,), dtype, array.shape) if isinstance(array, Deferred) else function(array)


def combined(function: Callable[[Array, Array], Array], a: Any, b: Any, dtype: np.dtype[Any]) -> Any:
    """Apply a function to each pair of elements of two arrays that broadcast; either may be deferred."""
    if isinstance(a, Deferred) or isinstance(b, Deferred):
        return Deferred(function, (a, b), dtype, broadcast(a.shape, b.shape))
    return function(a, b)


def _as_array(one: Any) -> Any:
    return one if isinstance(one, Deferred) else np.asarray(one)


def _small(one: Any) -> Any:
    """Return one element with the same number of axes, for inference of dtypes."""
    return one[(slice(0, 1),) * one.ndim] if isinstance(one, np.ndarray) else one


def array_of(function: Callable[..., Array], extents: Sequence[Any], shape: tuple[Any, ...], dtype: Any) -> Any:
    """Return the array that a function makes of extents, deferred where one of these is symbolic."""
    return Deferred(function, tuple(extents), np.dtype(dtype), shape) if is_symbolic(tuple(extents)) else (
        function(*extents))


def numbers(values: Sequence[Any], dtype: np.dtype[Any], shape: tuple[Any, ...]) -> Deferred:
    """Return an array of symbolic numbers."""
    return Deferred(_array, (tuple(values), dtype, shape), dtype, shape)


def table(values: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Return a vector of numbers, some of which may be symbolic."""
    return numbers(values, dtype, (len(values),)) if is_symbolic(tuple(values)) else np.array(values, dtype)


def late_items(make: Callable[..., Sequence[Array]], arguments: Sequence[Any], now: Sequence[Array],
               shape: tuple[int, ...]) -> list[Any]:
    """Return the arrays that `make` computes, deferred.

    Parameters
    ----------
    make : callable
        Computes a sequence of arrays. It is also called for other extents if there are no arrays, to check that.
    arguments : sequence
        Its arguments, some of them symbolic.
    now : sequence of ndarray
        Its result for the current extents.
    shape : tuple of int
        Shape of every array.
    """
    env = env_in(arguments)
    assert isinstance(env, ShapeEnv), "they follow from extents"
    all_of_them = Deferred(make, tuple(arguments), np.dtype(object), ())
    env.checks[id(all_of_them)] = all_of_them
    return [Deferred(operator.getitem, (all_of_them, which), one.dtype, shape) for which, one in enumerate(now)]


def late_vectors(make: Callable[..., Sequence[Array]], arguments: Sequence[Any], now: Sequence[Array]) -> list[Any]:
    """Return the vectors and scalars that `make` computes, deferred, with symbolic lengths."""
    env = env_in(arguments)
    assert isinstance(env, ShapeEnv), "they follow from extents"
    return [one if not array.shape else replace(one, shape=(env.measured(one) // array.itemsize,))
            for one, array in zip(late_items(make, arguments, now, ()), now, strict=True)]


def late_arrays(make: Callable[..., Sequence[Array]], *arguments: Any) -> list[Deferred]:
    """Return the bytes of the arrays that `make` computes, deferred, with symbolic lengths."""
    env = env_in(arguments)
    assert isinstance(env, ShapeEnv), "they follow from extents"
    all_of_them = Deferred(make, arguments, np.dtype(object), ())
    found = []
    for which in range(len(all_of_them.now())):
        one = Deferred(_bytes_of, (all_of_them, which), np.dtype(np.uint8), ())
        found.append(replace(one, shape=(env.measured(one),)))
    return found


def _bytes_of(arrays: Sequence[Array], which: int) -> Array:
    return np.ascontiguousarray(arrays[which]).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class LateBytes:
    """Concatenated bytes, some of deferred arrays; each part begins at a multiple of the alignment."""
    parts: tuple[bytes | Deferred, ...]
    alignment: int

    def joiner(self) -> tuple[Joiner, list[Deferred], list[Any]]:
        """Return a function that joins the parts, the arrays that it needs, and the numbers of tables in order."""
        runs: list[list[Array]] = [[]]
        arrays: list[Deferred] = []
        locations: list[tuple[int, int]] = []       # (run, word) of each number
        values: list[Any] = []
        for part in self.parts:
            if isinstance(part, Deferred) and (part.dtype != np.int64 or part.listed is None):
                arrays.append(part)
                runs.append([])
                continue
            if isinstance(part, Deferred):
                assert part.listed is not None
                first = sum(map(len, runs[-1])) // WORD
                locations += [(len(runs) - 1, first + i) for i in range(len(part.listed))]
                values += part.listed
                part = bytes(len(part.listed) * WORD)
            runs[-1].append(np.frombuffer(part + bytes(-len(part) % self.alignment), np.uint8))
        joined = tuple(np.concatenate([np.zeros(0, np.uint8), *run]) for run in runs)
        return Joiner(joined, np.array(locations, np.int64).reshape(-1, 2).T, self.alignment), arrays, values


class Joiner:
    """Concatenation of constant bytes, tables of numbers, and arrays."""

    def __init__(self, runs: Sequence[Array], locations: Array, alignment: int) -> None:
        """Prepare the constant parts.

        Parameters
        ----------
        runs : constant bytes before, between and after the arrays.
        locations : run and word of each number.
        alignment : alignment of the result, in bytes.
        """
        self._runs, self._alignment = runs, alignment
        self._run_of, self._word_of = locations

    def __call__(self, arrays: Sequence[Array], sizes: Sequence[int], numbers: Sequence[int]) -> memoryview:
        """Return the bytes, which begin at the alignment.

        Raises
        ------
        ValueError
            An array does not have the size in `sizes`, by which later parts were placed.
        """
        if any(array.nbytes != size for array, size in zip(arrays, sizes, strict=True)):
            raise ValueError(f"constants of {[array.nbytes for array in arrays]} bytes, not of {list(sizes)}")
        starts, at = [0], len(self._runs[0])
        for size, run in zip(sizes, self._runs[1:], strict=True):
            starts.append(at - -size // self._alignment * self._alignment)
            at = starts[-1] + len(run)
        memory = np.zeros(at + self._alignment, np.uint8)
        skip = -memory.ctypes.data % self._alignment
        made = memory[skip:skip + at]
        for start, run in zip(starts, self._runs, strict=True):
            made[start:start + len(run)] = run
        for array, start, run in zip(arrays, starts, self._runs, strict=False):
            begin = start + len(run)
            made[begin:begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        made[:at // WORD * WORD].view(np.int64)[np.array(starts)[self._run_of] // WORD + self._word_of] = numbers
        return made.data


def _array(values: Sequence[int], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.array(values, dtype).reshape(shape)


def _astype(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.astype(dtype)
