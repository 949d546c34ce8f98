"""What an array holds, as a key: a model's constants are read, computed and packed anew for each shape that it is
compiled for, and come out the same."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TypeVar

import numpy as np

from engines.ir.dtypes import name_in_file
from engines.ir.graph import Array

LEAST = 1 << 12         # elements of an array that it pays to take the sum of
MOST = 512              # results kept of a function, those of the weights met last

Found = TypeVar("Found")


def content_of(array: Array) -> bytes:
    """The same for arrays of equal elements, shape and dtype. Weights that are seen transposed are read in the order in
    which they lie: to put them in the other one takes several times as long as to read them."""
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    lying = np.ascontiguousarray(array.transpose(axes))
    head = repr((name_in_file(array.dtype), array.shape, axes)).encode()
    return hashlib.sha256(lying.reshape(-1).view(np.uint8).data, usedforsecurity=False).digest() + head


def remembering(function: Callable[[Array, int], Found]) -> Callable[[Array, int], Found]:
    """The function of an array and an axis, which gives for an array that it has met what it gave then, the same
    object. For results that are small, and that nobody writes to."""
    known: OrderedDict[tuple[bytes, int], Found] = OrderedDict()

    @wraps(function)
    def found(array: Array, axis: int) -> Found:
        if array.size < LEAST:
            return function(array, axis)
        key = content_of(array), axis
        with suppress(KeyError):            # not `in`: another thread may drop it meanwhile
            known.move_to_end(key)
            return known[key]
        result = known[key] = function(array, axis)
        if len(known) > MOST:
            known.popitem(last=False)
        return result

    return found
