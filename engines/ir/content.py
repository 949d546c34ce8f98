"""Content hashes of arrays.

A model's constants are read, computed and packed again for each shape it is compiled for.
"""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

from infer_server.engines.ir.dtypes import name_in_file
from infer_server.engines.ir.graph import Array

LEAST = 1 << 12         # elements from which on hashing an array pays
SAMPLE = 16             # elements, at least, that EqualArrays compares before it computes a digest
MOST = 512              # results kept per function, the most recently used

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def content_of(array: Array) -> bytes:
    """Return a key that is equal for arrays of equal elements, shape and dtype.

    Transposed arrays are hashed in memory order, as reordering them takes several times as long as reading them.
    """
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    lying = np.ascontiguousarray(array.transpose(axes))
    head = repr((name_in_file(array.dtype), array.shape, axes)).encode()
    return hashlib.sha256(lying.reshape(-1).view(np.uint8).data, usedforsecurity=False).digest() + head


class EqualArrays:
    """Numbering of arrays in which arrays of equal dtype, shape and bytes have equal numbers.

    A sample of each array is compared first, and digests are computed only for equal samples, so distinct arrays cost
    little. The arrays are kept, and must not be modified.
    """

    def __init__(self) -> None:
        self._count = 0
        self._single: dict[Hashable, tuple[Array, int] | None] = {}     # by sample; None: see _numbers
        self._numbers: dict[bytes, int] = {}                            # by digest

    def number(self, array: Array) -> int:
        """Return the number of the first array that equals this one."""
        new, sample = self._count, self._sample(array)
        if sample not in self._single:
            self._single[sample] = array, new
            number = new
        else:
            if single := self._single[sample]:
                self._numbers[content_of(single[0])] = single[1]
                self._single[sample] = None
            number = self._numbers.setdefault(content_of(array), new)
        self._count += number == new
        return number

    @staticmethod
    def _sample(array: Array) -> Hashable:
        return name_in_file(array.dtype), array.shape, array.flat[::array.size // SAMPLE or 1].tobytes()


def remembering(most: int = MOST) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that caches results of functions of arrays and numbers by content.

    Equal arguments give the same object, which must not be modified. `most` bounds the number of results; keep it small
    for large ones.
    """
    def remembered(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        cache: OrderedDict[tuple[Hashable, ...], Result] = OrderedDict()

        @wraps(function)
        def wrapper(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            parts = (*arguments, *(one for pair in sorted(named.items()) for one in pair))
            if max(one.size for one in parts if isinstance(one, np.ndarray)) < LEAST:
                return function(*arguments, **named)
            key = tuple(content_of(one) if isinstance(one, np.ndarray) else one for one in parts)
            with suppress(KeyError):            # not `in`: another thread may remove it
                cache.move_to_end(key)
                return cache[key]
            result = cache[key] = function(*arguments, **named)
            if len(cache) > most:
                cache.popitem(last=False)
            return result

        return wrapper

    return remembered
