"""What an array holds, as a key: a model's constants are read, computed and packed anew for each shape that it is
compiled for, and come out the same."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

from engines.ir.dtypes import name_in_file
from engines.ir.graph import Array

LEAST = 1 << 12         # elements of an array that it pays to take the sum of
SAMPLE = 16             # elements that EqualArrays compares before it takes a digest
MOST = 512              # results kept of a function, those of the weights met last

Given = ParamSpec("Given")
Found = TypeVar("Found")


def content_of(array: Array) -> bytes:
    """The same for arrays of equal elements, shape and dtype. Weights that are seen transposed are read in the order in
    which they lie: to put them in the other one takes several times as long as to read them."""
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    lying = np.ascontiguousarray(array.transpose(axes))
    head = repr((name_in_file(array.dtype), array.shape, axes)).encode()
    return hashlib.sha256(lying.reshape(-1).view(np.uint8).data, usedforsecurity=False).digest() + head


class EqualArrays:
    """Numbers arrays so that arrays of equal dtype, shape and bytes get equal numbers.

    A few elements of each array are compared first, and a digest is taken only where these are equal: arrays without a
    twin cost next to nothing. The arrays are kept, and must not be written to.
    """

    def __init__(self) -> None:
        self._count = 0
        self._single: dict[Hashable, tuple[Array, int] | None] = {}     # by sample; None: their digests are taken
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
        at = np.linspace(0, max(array.size - 1, 0), min(SAMPLE, array.size)).astype(np.intp)
        return name_in_file(array.dtype), array.shape, array.flat[at].tobytes()


def remembering(most: int = MOST) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A decorator for functions of arrays and numbers: for arguments of equal content they give the same object again,
    computed once. For results that nobody writes to. most: how many are kept; large ones should be few."""
    def remembered(function: Callable[Given, Found]) -> Callable[Given, Found]:
        known: OrderedDict[tuple[Hashable, ...], Found] = OrderedDict()

        @wraps(function)
        def found(*given: Given.args, **named: Given.kwargs) -> Found:
            told = (*given, *(part for pair in sorted(named.items()) for part in pair))
            if max(one.size for one in told if isinstance(one, np.ndarray)) < LEAST:
                return function(*given, **named)
            key = tuple(content_of(one) if isinstance(one, np.ndarray) else one for one in told)
            with suppress(KeyError):            # not `in`: another thread may drop it meanwhile
                known.move_to_end(key)
                return known[key]
            result = known[key] = function(*given, **named)
            if len(known) > most:
                known.popitem(last=False)
            return result

        return found

    return remembered
