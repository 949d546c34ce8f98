"""Memory for results, used again once their caller has let go of the last view of them.

Fresh memory costs a page fault for every 4 KiB that is written first, which is more than a short step takes.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.ir.graph import Array

LARGEST = 1 << 24       # bytes of a result whose memory is kept
KEPT = 4                # results of one shape that are kept
MOST_BYTES = 1 << 26    # of all that is kept


class _Unread:
    """Tells arrays that nobody has a view of, for one thread at a time.

    Each view is a reference to the array, which without them has as many as any object in a list. All are counted in
    one step, which no debugger that holds what it looks at comes between. Without the GIL others may count meanwhile.
    """

    def __init__(self) -> None:
        self._probes = [object(), object()]
        self._view = self._probes[1]
        self._counts = getattr(sys, "_is_gil_enabled", lambda: True)()      # from now on: it is never switched off

    def among(self, arrays: Sequence[Array]) -> Array | None:
        """One of them; None: there is none, or views cannot be told."""
        alone, viewed, *counts = map(sys.getrefcount, (*self._probes, *arrays))
        if alone not in counts or viewed != alone + 1 or not self._counts:
            return None
        return arrays[counts.index(alone)]


class Results:
    """Results of one context; views of them are handed out."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Array]] = {}
        self._bytes = 0
        self._unread = _Unread()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of whatever its memory holds."""
        made = self._made.get((shape, dtype), ())
        if (found := self._unread.among(made)) is None:
            found = np.empty(shape, dtype)
            if len(made) < KEPT and found.nbytes <= LARGEST:
                self._keep(found)
        return found.view()

    def _keep(self, array: Array) -> None:
        if self._bytes + array.nbytes > MOST_BYTES:     # of many shapes: those in use begin anew
            self._made.clear()
            self._bytes = 0
        self._made.setdefault((array.shape, array.dtype), []).append(array)
        self._bytes += array.nbytes
