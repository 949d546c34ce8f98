"""Pool of result arrays, reused when the caller has dropped the last view of them.

Fresh memory costs a page fault for every 4 KiB at the first write, which takes longer than a short step.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array

LARGEST = 1 << 24       # maximum bytes of an array that is pooled
KEPT = 4                # maximum number of pooled arrays of one shape
MOST_BYTES = 1 << 26    # maximum bytes of all pooled arrays


class _Unread:
    """Finder of arrays without views, by their reference counts. Not thread-safe.

    A view holds a reference to its array; without views the count is that of any object in a list. All counts are taken
    in one call, so that a debugger cannot add references in between. Without the GIL counts are not reliable.
    """

    def __init__(self) -> None:
        self._probes = [object(), object()]
        self._view = self._probes[1]
        self._counts = getattr(sys, "_is_gil_enabled", lambda: True)()      # an enabled GIL is never disabled again

    def among(self, arrays: Sequence[Array]) -> Array | None:
        """Return an array without views; None if there is none or it cannot be determined."""
        alone, viewed, *counts = map(sys.getrefcount, (*self._probes, *arrays))
        if alone not in counts or viewed != alone + 1 or not self._counts:
            return None
        return arrays[counts.index(alone)]


class Results:
    """Pool of the result arrays of one context; callers get views."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Array]] = {}
        self._bytes = 0
        self._unread = _Unread()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array."""
        arrays = self._arrays.get((shape, dtype), ())
        if (found := self._unread.among(arrays)) is None:
            found = np.empty(shape, dtype)
            if len(arrays) < KEPT and found.nbytes <= LARGEST:
                self._keep(found)
        return found.view()

    def _keep(self, array: Array) -> None:
        if self._bytes + array.nbytes > MOST_BYTES:     # too many shapes: start over
            self._arrays.clear()
            self._bytes = 0
        self._arrays.setdefault((array.shape, array.dtype), []).append(array)
        self._bytes += array.nbytes
